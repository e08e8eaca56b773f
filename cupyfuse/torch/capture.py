"""Capture a module's forward with Dynamo, and run its graphs with their chains fused."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import threading
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .backend import fuse_module
from .capturing import capturing, running_eagerly, without_messages
from .chains.options import Options
from .chains.runner import Runner
from .cost import decision
from .distributed import has_hooks
from .explain import Part, refusals
from .graphs.importer import NO_TENSOR
from .graphs.lowering import AsOperator, Direct
from .graphs.modes import leaving_modes
from .graphs.partition import Partition
from .idle import IdleCalls

_log = logging.getLogger(__name__)
_MOST_IN_A_ROW = 32  # calls that all capture a code anew, after which it is no longer captured
_FAILURES = 8  # calls that leave a frame uncaptured, until its code is given up
_NEXT_CALL = "the next call captures it as compiled code"
_NOTHING_CAPTURED = (
    "its calls ran no operation on tensors, or Dynamo left them to Python, as it does with PyTorch's own modules, such "
    "as nn.Sequential, within hooks of fully_shard: shard a module with a forward of its own"
)


class Capture:
    """The captured graphs of one fused module.

    Parameters
    ----------
    options : Options
    graphs : bool
        Whether captured graphs run as CUDA graphs.

    Attributes
    ----------
    partitions : list of Partition
        One for each graph so far.
    """

    def __init__(self, options: Options, graphs: bool):
        self.options = options
        self.graphs = graphs
        self.partitions: list[Partition] = []
        self._direct = Direct(options)
        self._callback: _Callback | None = None
        self._idle = IdleCalls()
        self._bypassed = False  # whether a call was made where Dynamo refuses to run

    def __deepcopy__(self, memo: Any) -> Capture:
        return self  # a copied module gets one of its own

    @property
    def runners(self) -> list[Runner]:
        return list(self._direct.runners)

    @property
    def kept(self) -> int:
        """Bytes of prepacked weights."""
        return self._direct.budget.used

    def parts(self, path: str) -> list[Part]:
        """List the fused chains and the operations left to PyTorch; recaptures of a graph count in `Part.captures`."""
        by_chain: dict[Any, list[Runner]] = {}
        for runner in self.runners:
            by_chain.setdefault(id(runner.chain), []).append(runner)
        found: dict[Any, Part] = {}
        for partition in list(self.partitions):
            operations = partition.captured.operations
            graph = tuple((o.path, o.name) for o in operations)  # equal for captures of the same code
            seen: Counter[Any] = Counter()
            for fused in partition.chains:
                where = operations[fused.members[0]].path
                plans = tuple(plan for r in by_chain.get(id(fused.chain), ()) for plan in r.plans)
                part = Part(where, fused.chain.operations, plans, "", fused.note)
                _add_or_count(found, graph, part, seen)
            for k, reason in partition.unfused.items():
                if reason != NO_TENSOR:
                    _add_or_count(found, graph, Part(operations[k].path, (operations[k].name,), (), reason), seen)
        failures = dict(self._callback.failures) if self._callback is not None else {}
        frames = [Part(path, (name,) * bool(name), (), f"not captured: {why}") for name, why in failures.items()]
        if self._bypassed:
            frames.append(Part(path, (), (), "called within a tracer, a transform or a dispatch mode of PyTorch's"))
        if not found and not frames and self._callback is not None and self._callback.calls:
            frames.append(Part(path, (), (), f"not captured: {_NOTHING_CAPTURED}"))
        return [*found.values(), *refusals(path, self.runners), *frames]

    def forget(self, kept_graphs: int = 0, kept_runners: int = 0) -> None:
        """Forget what was captured, but for so many graphs and runners, the first ones."""
        del self.partitions[kept_graphs:]
        del self._direct.runners[kept_runners:]
        self._idle.forget()

    def compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return a module's call, captured at the first call and whenever a guard fails."""
        import torch._dynamo as dynamo

        context = dynamo.optimize(functools.partial(self._backend, module))
        self._callback = callback = context.callback = _Callback(context.callback, self)
        # Dynamo caches by code object, and learns which sizes vary by the code's name: each module has code of its own.
        name = f"call_{type(module).__name__}_{next(_numbers)}"
        function = types.FunctionType(_call.__code__.replace(co_name=name), _call.__globals__, name)
        captured = context(function)
        jit_tracing, is_fx_tracing = torch._C._get_tracing_state, torch.fx._symbolic_trace.is_fx_symbolic_tracing
        transforms, dispatch_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
        in_outer_capture = torch.compiler.is_dynamo_compiling
        activity, idle = self._direct.activity, self._idle

        def call(*args: Any, **kwargs: Any) -> Any:
            if in_outer_capture():
                return module._call_impl(*args, **kwargs)
            if jit_tracing() is not None or is_fx_tracing() or transforms() or dispatch_modes():
                self._bypassed = True  # Dynamo refuses to run there, and would never capture the code again
                return module._call_impl(*args, **kwargs)
            if idle.signatures and idle.includes(module, args, kwargs):
                return module._call_impl(*args, **kwargs)
            callback.calls += 1
            before = activity.calls
            try:
                result = captured(module, *args, **kwargs)
            except Exception:
                callback.settle(returned=False)
                raise
            if callback.undecided:
                callback.settle(returned=True)
            else:
                idle.note(self.graphs or activity.calls != before, module, args, kwargs)
            return result

        return call

    def _backend(
        self, owner: torch.nn.Module, module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Fuse a graph captured from `owner`, and return what Dynamo calls in its place."""
        if not self.graphs:
            judge = decision.judge_for(self.options, compiled=False, hooked=has_hooks(owner))
            self.partitions += fuse_module(module, self._direct, judge)
            return leaving_modes(module)
        judge = decision.judge_for(self.options, compiled=False, cudagraph=True)
        self.partitions += fuse_module(module, AsOperator(self.options), judge)
        cudagraph: Callable[..., Any] = torch._dynamo.lookup_backend("cudagraphs")(module, list(example_inputs))
        return cudagraph


def _add_or_count(found: dict[Any, Part], graph: Any, part: Part, seen: Counter[Any]) -> None:
    """Add a part of a graph, or count one more capture of it; `seen` tells equal parts of one capture apart."""
    key = (graph, part.module, part.operations, part.reason)
    seen[key] += 1
    before = found.get((key, seen[key]))
    if before is not None:
        part = replace(part, plans=before.plans + part.plans, captures=before.captures + 1)
    found[key, seen[key]] = part


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, as `Module.__call__` does without compilation: the function that is captured."""
    return module._call_impl(*args, **kwargs)


_numbers = itertools.count()


class _Callback:
    """Dynamo's callback for a frame.

    What Dynamo cannot capture runs in eager, and Dynamo would never look at its code again. But code that raises an
    error for its arguments cannot be captured for these either, nor can an operation that refuses them; and other
    arguments, such as sparse tensors, may be more than Dynamo knows. So a code is given up by a call that returns,
    where nothing of it was ever captured, else after `_FAILURES` calls; what is captured by then stays in use.

    Attributes
    ----------
    undecided : dict
        By thread, the codes that its call met and that Dynamo gives up, with what Dynamo would do with their frames.
    failures : dict
        The frames that run in eager because of an error, and the error in a line; "" for the module's call itself.
    calls : int
        How many calls of the module have begun.
    as_compiled : bool
        Whether captured code finds that it is compiled (`running_eagerly`): from the call on after the first one that
        returned and met a frame that can be captured only so, such as code that asks to avoid what Dynamo does not
        know. It holds for all of the module's code, which is captured again: never do parts of a call find different
        answers.
    """

    def __init__(self, callback: Any, capture: Capture):
        self._torchdynamo_orig_backend = callback
        self._capture = capture
        self.undecided: dict[int, list[tuple[types.CodeType, Any, str]]] = {}
        self.failures: dict[str, str] = {}
        self.calls = 0
        self.as_compiled = False
        # Threads in whose present call a frame could be captured as compiled code only.
        self._needs_compiled: set[int] = set()
        self._in_a_row: dict[types.CodeType, tuple[int, int]] = {}  # the last call that captured a code, and how many
        self._captured: set[types.CodeType] = set()
        self._failed: Counter[types.CodeType] = Counter()

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        """Return the captured code of a frame, or have this call run it in eager and `settle` decide on its code."""
        from torch._dynamo import exc
        from torch._dynamo.types import ConvertFrameReturn

        if threading.get_ident() in self._needs_compiled:  # all code will be captured again
            return replace(ConvertFrameReturn(), apply_to_code=False)
        reason = ""
        with capturing():
            try:
                result = self._convert(frame, *arguments)
            except (exc.ResumePrologueTracingError, exc.UncapturedHigherOrderOpError):
                raise  # Dynamo handles the first one itself, and suppresses neither
            except Exception as error:
                _log.info("not captured: %s", _name(frame.f_code), exc_info=True)
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
                self.failures.pop(_name(frame.f_code), None)
        if result.guarded_code is not None:
            result = self._without_endless_captures(frame.f_code, result)
        if result.guarded_code is not None or not result.apply_to_code:
            return result
        here = self.undecided.setdefault(threading.get_ident(), [])
        here.append((frame.f_code, result.frame_exec_strategy, reason))
        return replace(result, apply_to_code=False)

    def _convert(self, frame: Any, *arguments: Any) -> Any:
        """Capture a frame; where that fails, raise the error, and note whether it could be as compiled code."""
        before = len(self._capture.partitions), len(self._capture.runners)
        try:
            with running_eagerly(not self.as_compiled), without_messages("torch._subclasses.fake_tensor"):
                return self._torchdynamo_orig_backend(frame, *arguments)
        except Exception:
            if not self.as_compiled:
                with contextlib.suppress(Exception), without_messages("torch._subclasses.fake_tensor"):
                    if self._torchdynamo_orig_backend(frame, *arguments).guarded_code is not None:
                        self._needs_compiled.add(threading.get_ident())
                self._capture.forget(*before)
            raise

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
        self.failures[_name(code)] = f"{_MOST_IN_A_ROW} calls in a row captured it anew: they change what it reads"
        strategy = _FrameExecStrategy(_FrameAction.RUN_ONLY, _FrameAction.DEFAULT)
        return replace(result, frame_exec_strategy=strategy, apply_to_code=True)

    def settle(self, returned: bool) -> None:
        """Decide, at the end of this thread's call, on the codes that it could not capture.

        Each is given up, or counted to be tried again; or all code is captured anew, as compiled code.
        """
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        undecided = self.undecided.pop(threading.get_ident(), ())
        if threading.get_ident() in self._needs_compiled:
            self._needs_compiled.discard(threading.get_ident())
            if returned:
                self._capture_as_compiled({_name(code): reason for code, _, reason in undecided if reason})
                return
        for code, strategy, reason in undecided:
            self._failed[code] += 1
            if self._failed[code] < _FAILURES and (code in self._captured or not returned):
                continue
            skipped = strategy.cur_action == _FrameAction.SKIP
            action = _FrameAction.RUN_ONLY if skipped else strategy.cur_action
            set_code_exec_strategy(code, _FrameExecStrategy(action, strategy.recursive_action))
            if reason:
                self.failures[_name(code)] = reason

    def _capture_as_compiled(self, failures: dict[str, str]) -> None:
        """Have all of the module's code captured again, as code that is compiled, if it is not yet."""
        from torch._C._dynamo.eval_frame import reset_code

        with capturing():  # not while another thread captures
            if self.as_compiled:
                return
            self.as_compiled = True
            for code in self._captured:
                reset_code(code)
            self._captured.clear()
            self._failed.clear()
            self.failures.clear()
            self.failures.update({name: f"{reason}; {_NEXT_CALL}" for name, reason in failures.items()})
            self._capture.forget()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torchdynamo_orig_backend, name)


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


def _name(code: types.CodeType) -> str:
    if code.co_filename == _call.__code__.co_filename:
        return ""
    return f"{code.co_name} ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
