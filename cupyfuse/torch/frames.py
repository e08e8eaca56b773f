"""Dynamo's callback for the frames of a fused module: which are captured, as which code, and which are given up."""

from __future__ import annotations

import gc
import logging
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from .capturing import capturing, running_eagerly, without_messages
from .codes import Codes, Uncaptured
from .graphs.nodes import is_tensor, tensors_of

_log = logging.getLogger(__name__)
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


_NOTHING = _Known()


@dataclass
class _Attempt:
    """A capture of the module's call as compiled code.

    Attributes
    ----------
    has_others : bool
        Whether it has operations that were not captured as code of eager: it may be used once these are known.
    """

    has_others: bool = False


@dataclass
class _Call:
    """What a thread's call has met that was not captured, or not whole.

    Attributes
    ----------
    uncaptured : list of Uncaptured
    tried : _Known or None
        Of a call that was captured in parts, or not at all, whose code had asked whether it is compiled: what was known
        when a call before it was last tried as compiled code.
    refused : bool
        Whether an operation of such a call could not be captured as code of eager.
    """

    uncaptured: list[Uncaptured] = field(default_factory=list)
    tried: _Known | None = None
    refused: bool = False


class FrameCallback:
    """Dynamo's callback for a frame; `Codes` decides which are given up, once a call is over.

    Captured code finds that it is not compiled (`Answers`). Code that asks may do so to avoid what Dynamo does not
    know, and its graph breaks, or is refused. Then the next call tries to capture the module's call anew, as compiled
    code. That is used where it is one graph: all parts of a call find the same answer. Code for compilers may be
    slower, such as attention with a mask that excludes nothing; so it has to consist of operations that were captured
    in parts, except where one of these was refused.

    ================================================  ===============================================================
    the module's call was captured                    its next capture
    ================================================  ===============================================================
    as code of eager, in one graph                    as code of eager
    in parts, and its code had not asked              as code of eager
    in parts, and its code had asked                  as compiled code, from the next call on, if that call returned
    as compiled code                                  as compiled code
    in parts: compiled code had unknown operations    as compiled code, from the next call on, once more are known
    in parts: compiled code was refused otherwise     as compiled code, for other arguments alone
    ================================================  ===============================================================

    Attributes
    ----------
    codes : Codes
    calls : int
        How many calls of the module have begun.
    unsettled : dict
        By thread, its call, if that met something that was not captured, or not whole: `settle` has to follow.
    """

    def __init__(self, callback: Any, captured: Captured, code: types.CodeType):
        self._torchdynamo_orig_backend = callback
        self._captures = captured
        self._code = code
        self.codes = Codes(code)
        self.calls = 0
        self.unsettled: dict[int, _Call] = {}
        # The operations of graphs captured as code of eager: names, and how many tensors each reads.
        self._work: set[tuple[str, int]] = set()
        self._tried = _NOTHING  # what was known when the call was last tried as compiled code; nothing before that
        self._attempt: _Attempt | None = None  # the capture as compiled code that is under way
        self._whole = 0, 0  # the size of what was captured as compiled code, which comes first

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        """Return the captured code of a frame, or have this call run it in eager and `settle` decide on its code."""
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
        from torch._dynamo import exc
        from torch._dynamo.types import ConvertFrameReturn

        thread = threading.get_ident()
        call = self.unsettled.get(thread)
        if call is not None and call.refused and self._is_to_be_tried(call):
            # The next call may have any operations as compiled code: there is no need to know those of further parts.
            return replace(ConvertFrameReturn(), apply_to_code=False)
        reason, given_up = "", False
        with capturing():
            try:
                result = self._convert(frame, *arguments)
            except (exc.ResumePrologueTracingError, exc.UncapturedHigherOrderOpError):
                raise  # Dynamo handles the first one itself, and suppresses neither
            except Exception as error:
                _log.info("not captured: %s", self.codes.name(frame.f_code), exc_info=True)
                reason = _reason(str(error) or type(error).__name__)
                result = ConvertFrameReturn()
                if getattr(error, "frame_exec_strategy", None) is not None:
                    result.frame_exec_strategy = error.frame_exec_strategy  # type: ignore[attr-defined]
            if result.guarded_code is None:
                reason = reason or _reason(_suppressed(frame.f_code))
            if reason:
                gc.collect()  # what is left of a failure may hold guards of the thread's state, and undo them later
            if result.guarded_code is not None:
                given_up = self.codes.note_captured(frame.f_code, self.calls)
        if given_up:
            strategy = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)
            return replace(result, frame_exec_strategy=strategy, apply_to_code=True)
        if result.guarded_code is not None or not result.apply_to_code:
            return result
        call = self.unsettled.setdefault(thread, _Call())
        call.uncaptured.append(Uncaptured(frame.f_code, result.frame_exec_strategy, reason))
        return replace(result, apply_to_code=False)

    def _convert(self, frame: Any, *arguments: Any) -> Any:
        """Capture a frame, the module's call as compiled code where that can be; where all fails, raise the error.

        A call whose code asks, and that is captured in parts or not at all, is noted in `unsettled`.
        """
        from torch._dynamo.utils import graph_break_reasons

        is_call, may_be_whole = frame.f_code is self._code, True
        if is_call and self._tried != _NOTHING:
            attempt = self._attempt = _Attempt()
            try:
                return self._convert_whole(frame, *arguments)
            except Exception as error:
                _log.info("not captured as compiled code: %s", error)
                may_be_whole = attempt.has_others  # other errors would come again
            finally:
                self._attempt = None
        size, breaks = self._captures.size, len(graph_break_reasons)
        whole = refused = False
        with running_eagerly() as answers:
            try:
                with without_messages():
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
                    call = self.unsettled.setdefault(thread, _Call())
                    call.tried, call.refused = self._tried, False
                if refused and thread in self.unsettled:
                    self.unsettled[thread].refused = True

    def _convert_whole(self, frame: Any, *arguments: Any) -> Any:
        """Capture the module's call as compiled code in one graph; raise an error where that cannot be.

        Parts that were captured before are forgotten.
        """
        size = self._captures.size
        try:
            with torch._dynamo.error_on_graph_break(True), without_messages():
                result = self._torchdynamo_orig_backend(frame, *arguments)
            if result.guarded_code is None:
                raise RuntimeError("it was not captured")
        except Exception:
            self._captures.forget(size)
            raise
        self.codes.renew()
        self._captures.forget(self._whole, size)
        self._whole = self._captures.size
        return result

    def note_work(self, module: torch.fx.GraphModule) -> None:
        """Note the operations of a graph captured as code of eager; raise an error if compiled code has others."""
        work = set(_list_work(module))
        if self._attempt is None:
            self._work |= work
        elif not self._tried.refused and not work <= self._work:
            self._attempt.has_others = True
            raise RuntimeError(f"other operations than in eager: {sorted(work - self._work)}")

    def settle(self, returned: bool) -> bool:
        """Decide, at the end of this thread's call, on the codes that it could not capture.

        Each is given up, or counted to be tried again; or the module's call is captured anew, as compiled code. Returns
        whether it is.
        """
        call = self.unsettled.pop(threading.get_ident(), _Call())
        if returned and self._is_to_be_tried(call):
            self._try_as_compiled(call)
            return True
        for frame in {frame.code: frame for frame in call.uncaptured}.values():  # layers of a model share one
            self.codes.note_uncaptured(frame, returned)
        return False

    def _is_to_be_tried(self, call: _Call) -> bool:
        """Whether a call was captured in parts, and more is known than when a call was tried last."""
        return call.tried is not None and call.tried != self._known_after(call)

    def _known_after(self, call: _Call) -> _Known:
        return _Known(len(self._work), self._tried.refused or call.refused)

    def _try_as_compiled(self, call: _Call) -> None:
        """Have the module's call captured again, as compiled code, if no other thread just did so."""
        from torch._C._dynamo.eval_frame import reset_code

        with capturing():  # not while another thread captures
            known = self._known_after(call)
            if self._tried == known:
                return
            self._tried = known
            reset_code(self._code)
            for code, _, reason in call.uncaptured:
                if reason:
                    self.codes.failures[self.codes.name(code)] = f"{reason}; {_NEXT_CALL}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)


def _list_work(module: torch.fx.GraphModule) -> Iterator[tuple[str, int]]:
    """List the operations of a captured graph, regions included: their names, and how many tensors each reads."""
    for each in (m for m in module.modules() if isinstance(m, torch.fx.GraphModule)):
        for node in each.graph.nodes:
            read = len(tensors_of(node))
            if node.op.startswith("call") and (read or is_tensor(node)):
                yield str(getattr(node.target, "__name__", node.target)), read


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
