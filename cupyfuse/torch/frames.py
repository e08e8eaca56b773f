"""Dynamo's callback for the frames of a fused module: which are captured, as which code, and which are given up."""

from __future__ import annotations

import gc
import logging
import os
import threading
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch

from .capturing import capturing, running_eagerly, without_messages

_log = logging.getLogger(__name__)
_MOST_IN_A_ROW = 32  # calls that all capture a code anew, after which it is no longer captured
_FAILURES = 8  # calls that leave a frame uncaptured, until its code is given up
_NEXT_CALL = "the next call tries to capture it as compiled code"


class Captured(Protocol):
    """What a module's captures have made."""

    @property
    def size(self) -> tuple[int, int]:
        """The number of graphs, and of runners."""

    def forget(self, begin: tuple[int, int], end: tuple[int | None, int | None] = ...) -> None:
        """Forget the graphs and the runners that were captured between two sizes."""


class _Known(NamedTuple):
    """What decides whether the module's call can be used as compiled code; it only ever grows.

    Attributes
    ----------
    operations : int
        How many operations were captured as code of eager.
    refused : bool
        Whether one could not be.
    """

    operations: int = 0
    refused: bool = False


@dataclass
class _InParts:
    """A call that was captured in parts, or not at all, whose code had asked whether it is compiled.

    Attributes
    ----------
    tried : _Known
        What was known when a call before it was last tried as compiled code.
    refused : bool
        Whether an operation of this call could not be captured as code of eager.
    """

    tried: _Known
    refused: bool = False


class FrameCallback:
    """Dynamo's callback for a frame.

    What Dynamo cannot capture runs in eager, and Dynamo would never look at its code again. But code that raises an
    error for its arguments cannot be captured for these either, nor can an operation that refuses them; and other
    arguments, such as sparse tensors, may be more than Dynamo knows. So a code is given up by a call that returns,
    where nothing of it was ever captured, else after `_FAILURES` calls; what is captured by then stays in use.

    Captured code finds that it is not compiled (`Answers`). Code that asks may do so to avoid what Dynamo does not
    know, and its graph breaks, or is refused. Then the next call tries to capture the module's call anew, as compiled
    code. That is used where it is one graph: all parts of a call find the same answer. Code for compilers may be
    slower, such as attention with a mask that excludes nothing; so it has to consist of operations that were captured
    in parts, except where one of these was refused.

    Attributes
    ----------
    undecided : dict
        By thread, the codes that its call met and that Dynamo gives up, with what Dynamo would do with their frames.
    in_parts : dict
        By thread, its call if that was captured in parts, or not at all, and its code had asked.
    failures : dict
        The frames that run in eager because of an error, and the error in a line; "" for the module's call itself.
    calls : int
        How many calls of the module have begun.
    as_compiled : bool
        Whether the module's call is captured as compiled code where that can be: from the call on after the first one
        that returned and was captured in parts. A call that raises changes nothing.
    """

    def __init__(self, callback: Any, captured: Captured, code: types.CodeType):
        self._torchdynamo_orig_backend = callback
        self._captures = captured
        self._code = code
        self.undecided: dict[int, list[tuple[types.CodeType, Any, str]]] = {}
        self.in_parts: dict[int, _InParts] = {}
        self.failures: dict[str, str] = {}
        self.calls = 0
        self.as_compiled = False
        # The operations of graphs captured as code of eager: names, and how many tensors each reads.
        self._work: set[tuple[str, int]] = set()
        self._refused = False  # whether one could not be, so that compiled code may have others
        self._tried = _Known()  # when the call was last tried as compiled code
        self._trying = False  # whether a capture as compiled code is under way
        self._has_others = False  # whether compiled code had operations that were not captured as code of eager
        self._whole = 0, 0  # the size of what was captured as compiled code, which comes first
        self._in_a_row: dict[types.CodeType, tuple[int, int]] = {}  # the last call that captured a code, and how many
        self._captured: set[types.CodeType] = set()
        self._failed: Counter[types.CodeType] = Counter()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        """Return the captured code of a frame, or have this call run it in eager and `settle` decide on its code."""
        from torch._dynamo import exc
        from torch._dynamo.types import ConvertFrameReturn

        if self._is_to_be_tried() and self.in_parts[threading.get_ident()].refused:
            # The next call may have any operations as compiled code: there is no need to know those of further parts.
            return replace(ConvertFrameReturn(), apply_to_code=False)
        reason = ""
        with capturing():
            try:
                result = self._convert(frame, *arguments)
            except (exc.ResumePrologueTracingError, exc.UncapturedHigherOrderOpError):
                raise  # Dynamo handles the first one itself, and suppresses neither
            except Exception as error:
                _log.info("not captured: %s", self._name(frame.f_code), exc_info=True)
                reason = _reason(str(error) or type(error).__name__)
                result = ConvertFrameReturn()
                if getattr(error, "frame_exec_strategy", None) is not None:
                    result.frame_exec_strategy = error.frame_exec_strategy  # type: ignore[attr-defined]
            if result.guarded_code is None:
                reason = reason or _reason(_suppressed(frame.f_code))
            if reason:
                gc.collect()  # what is left of a failure may hold guards of the thread's state, and undo them later
            if result.guarded_code is not None:
                self._captured.add(frame.f_code)
                self.failures.pop(self._name(frame.f_code), None)
        if result.guarded_code is not None:
            result = self._without_endless_captures(frame.f_code, result)
        if result.guarded_code is not None or not result.apply_to_code:
            return result
        here = self.undecided.setdefault(threading.get_ident(), [])
        here.append((frame.f_code, result.frame_exec_strategy, reason))
        return replace(result, apply_to_code=False)

    def _convert(self, frame: Any, *arguments: Any) -> Any:
        """Capture a frame, the module's call as compiled code where that can be; where all fails, raise the error.

        A call whose code asks, and that is captured in parts or not at all, is noted in `in_parts`.
        """
        from torch._dynamo.utils import graph_break_reasons

        is_call, may_be_whole = frame.f_code is self._code, True
        if is_call and self.as_compiled:
            try:
                return self._convert_whole(frame, *arguments)
            except Exception as error:
                _log.info("not captured as compiled code: %s", error)
                may_be_whole = self._has_others  # once more operations are known; other errors would come again
        size, breaks = self._captures.size, len(graph_break_reasons)
        whole = refused = False
        try:
            with running_eagerly() as answers, without_messages("torch._subclasses.fake_tensor"):
                result = self._torchdynamo_orig_backend(frame, *arguments)
            whole = result.guarded_code is not None and len(graph_break_reasons) == breaks
            return result
        except Exception:
            refused = True
            self._captures.forget(size)
            raise
        finally:
            thread = threading.get_ident()
            if is_call and answers.asked and may_be_whole and not whole:
                self.in_parts[thread] = _InParts(self._tried)
            if refused and thread in self.in_parts:
                self.in_parts[thread].refused = True

    def _convert_whole(self, frame: Any, *arguments: Any) -> Any:
        """Capture the module's call as compiled code in one graph; raise an error where that cannot be.

        Parts that were captured before are forgotten.
        """
        from torch._C._dynamo.eval_frame import reset_code

        size = self._captures.size
        self._trying, self._has_others = True, False
        try:
            with torch._dynamo.error_on_graph_break(True), without_messages("torch._subclasses.fake_tensor"):
                result = self._torchdynamo_orig_backend(frame, *arguments)
            if result.guarded_code is None:
                raise RuntimeError("it was not captured")
        except Exception:
            self._captures.forget(size)
            raise
        finally:
            self._trying = False
        for code in self._captured - {self._code}:
            reset_code(code)
        self._captured.clear()
        self._failed.clear()
        self.failures.clear()
        self._captures.forget(self._whole, size)
        self._whole = self._captures.size
        return result

    def note_work(self, module: torch.fx.GraphModule) -> None:
        """Note the operations of a graph captured as code of eager; raise an error if compiled code has others."""
        work = set(_list_work(module))
        if not self._trying:
            self._work |= work
        elif not self._refused and not work <= self._work:
            self._has_others = True
            raise RuntimeError(f"other operations than in eager: {sorted(work - self._work)}")

    def _without_endless_captures(self, code: types.CodeType, result: Any) -> Any:
        """Stop capturing a code that every call captures anew, such as one that appends to a list of its own.

        What is captured by then stays in use.
        """
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

        last, count = self._in_a_row.get(code, (0, 0))
        if last != self.calls:
            self._in_a_row[code] = self.calls, count + 1 if last == self.calls - 1 else 1
        if self._in_a_row[code][1] < _MOST_IN_A_ROW:
            return result
        self.failures[self._name(code)] = f"{_MOST_IN_A_ROW} calls in a row captured it anew: they change what it reads"
        strategy = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)
        return replace(result, frame_exec_strategy=strategy, apply_to_code=True)

    def settle(self, returned: bool) -> None:
        """Decide, at the end of this thread's call, on the codes that it could not capture.

        Each is given up, or counted to be tried again; or the module's call is captured anew, as compiled code.
        """
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        thread = threading.get_ident()
        undecided: Sequence[tuple[types.CodeType, Any, str]] = self.undecided.pop(thread, ())
        if returned and self._is_to_be_tried():
            self._try_as_compiled({self._name(code): reason for code, _, reason in undecided if reason})
            undecided = ()
        self.in_parts.pop(thread, None)
        for code, strategy, reason in undecided:
            self._failed[code] += 1
            if self._failed[code] < _FAILURES and (code in self._captured or not returned):
                continue
            skipped = strategy.cur_action == _FrameAction.SKIP
            action = _FrameAction.RUN_ONLY if skipped else strategy.cur_action
            set_code_exec_strategy(code, _FrameExecStrategy(action, strategy.recursive_action))
            if reason:
                self.failures[self._name(code)] = reason

    def _is_to_be_tried(self) -> bool:
        """Whether this thread's call was captured in parts, and more is known than when a call was tried last."""
        call = self.in_parts.get(threading.get_ident())
        return call is not None and call.tried != self._known_after(call)

    def _known_after(self, call: _InParts) -> _Known:
        return _Known(len(self._work), self._refused or call.refused)

    def _try_as_compiled(self, failures: dict[str, str]) -> None:
        """Have the module's call captured again, as compiled code, if no other thread just did so."""
        from torch._C._dynamo.eval_frame import reset_code

        with capturing():  # not while another thread captures
            known = self._known_after(self.in_parts[threading.get_ident()])
            if self._tried == known:
                return
            self._tried, self._refused, self.as_compiled = known, known.refused, True
            reset_code(self._code)
            self.failures.update({name: f"{reason}; {_NEXT_CALL}" for name, reason in failures.items()})

    def _name(self, code: types.CodeType) -> str:
        if code is self._code:
            return ""
        return f"{code.co_name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)


def _list_work(module: torch.fx.GraphModule) -> Iterator[tuple[str, int]]:
    """List the operations of a captured graph, regions included: their names, and how many tensors each reads."""
    for each in (m for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in each.graph.nodes:
            read = sum(map(_is_tensor, node.all_input_nodes))
            if node.op.startswith("call") and (read or _is_tensor(node)):
                yield str(getattr(node.target, "__name__", node.target)), read


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _suppressed(code: types.CodeType) -> str:
    """Return the error for which Dynamo has just given up a code without raising it; empty if there was none."""
    attempts = torch._dynamo.utils.get_compilation_metrics()
    last = attempts[-1] if attempts else None
    if last is None or (last.co_filename, last.co_firstlineno) != (code.co_filename, code.co_firstlineno):
        return ""
    return last.fail_reason or ""


def _reason(error: str) -> str:
    """Tell an error in a line: that of the operation, where Dynamo's words end with it, or what Dynamo explains."""
    lines = error.splitlines() or [""]
    if lines[0].endswith("raised:"):  # our own, or that of CUDA graphs
        lines = lines[1:] or lines
    told = [line.partition(mark)[2] for mark in (": got ", "Explanation: ") for line in lines if mark in line]
    return (*told, lines[0])[0]
