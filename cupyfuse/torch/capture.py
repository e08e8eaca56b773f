"""Capture a module's forward with Dynamo, and run its graphs with their chains fused."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .backend import fuse_module
from .capturing import guards_to_keep, keeping_validation
from .chains.options import Options
from .chains.runner import Runner
from .codes import Codes
from .cost import decision
from .distributed import has_hooks
from .explain import Part, refusals
from .frames import FrameCallback
from .graphs.importer import NO_TENSOR
from .graphs.lowering import AsOperator, Direct
from .graphs.modes import leaving_modes
from .graphs.partition import Partition
from .idle import DEPTH, WIDTH, IdleCalls
from .methods import TracedMethods

_MOST_RENEWALS = 32  # captures of a module where methods of its classes, or hooks of all modules, change and change
_NOTHING_CAPTURED = (
    "its calls ran no operation on tensors, or Dynamo left them to Python, as it does with PyTorch's own modules, such "
    "as nn.Sequential, within hooks of fully_shard: shard a module with a forward of its own"
)

_WITHIN = "within a tracer, a transform or a dispatch mode of PyTorch's"
_UNPAID = "calls run in eager where their {} graphs, between graph breaks, cost the host more than the chains save"


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
        self._callback: FrameCallback | None = None
        self._idle = IdleCalls()
        self._unpaid = 0  # of a call that was left to PyTorch: its graphs, whose chains save less than they cost
        self._bypassed: dict[str, None] = {}  # where calls were made that Dynamo is kept from
        self._methods = TracedMethods()
        self._renewals = 0  # captures before this one, for whose code other methods or hooks came

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
            if partition.failure:
                found[id(partition)] = Part(path, (), (), partition.failure)
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
        failures = dict(self._callback.codes.failures) if self._callback is not None else {}
        frames = [Part(path, (name,) * bool(name), (), f"not captured: {why}") for name, why in failures.items()]
        if self._renewals >= _MOST_RENEWALS:
            what = "methods of its classes, or hooks of all modules,"
            frames.append(Part(path, (), (), f"not captured: {what} changed {self._renewals} times"))
        if self._unpaid:
            frames.append(Part(path, (), (), _UNPAID.format(self._unpaid)))
        frames += [Part(path, (), (), f"called {where}") for where in self._bypassed]
        if not found and not frames and self._callback is not None and self._callback.calls:
            frames.append(Part(path, (), (), f"not captured: {_NOTHING_CAPTURED}"))
        return [*found.values(), *refusals(path, self.runners), *frames]

    @property
    def size(self) -> tuple[int, int]:
        """The number of graphs, and of runners."""
        return len(self.partitions), len(self._direct.runners)

    def forget(self, begin: tuple[int, int], end: tuple[int | None, int | None] = (None, None)) -> None:
        """Forget the graphs and the runners that were captured between two sizes."""
        del self.partitions[begin[0] : end[0]]
        del self._direct.runners[begin[1] : end[1]]
        self._idle.forget()

    def compile(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Return a module's call, captured at the first call and whenever a guard fails."""
        import torch._dynamo as dynamo

        backend = _Backend(self, module)
        with keeping_validation():
            context = dynamo.optimize(backend, guard_filter_fn=guards_to_keep)
        # Dynamo caches by code object, and learns which sizes vary by the code's name: each module has code of its own.
        name = f"call_{type(module).__name__}_{next(_numbers)}"
        function = types.FunctionType(_call.__code__.replace(co_name=name), _call.__globals__, name)
        self._callback = callback = context.callback = FrameCallback(context.callback, self, function.__code__)
        weakref.finalize(self, _release, callback.codes, backend, self._direct.runners).atexit = False
        captured = context(function)
        jit_tracing, is_fx_tracing = torch._C._get_tracing_state, torch.fx._symbolic_trace.is_fx_symbolic_tracing
        transforms, dispatch_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack
        in_outer_capture = torch.compiler.is_dynamo_compiling
        activity, idle, methods = self._direct.activity, self._idle, self._methods

        def call(*args: Any, **kwargs: Any) -> Any:
            if in_outer_capture():
                return module._call_impl(*args, **kwargs)
            if jit_tracing() is not None or is_fx_tracing() or transforms() or dispatch_modes():
                self._bypassed[_WITHIN] = None  # Dynamo refuses to run there, and would never capture the code again
                return module._call_impl(*args, **kwargs)
            if _holds_nested(args) or _holds_nested(kwargs):
                # Dynamo's guards that were made for other tensors would ask for their strides, which ends the process.
                self._bypassed["with nested tensors"] = None
                return module._call_impl(*args, **kwargs)
            if idle.signatures and idle.includes(module, args, kwargs):
                return module._call_impl(*args, **kwargs)
            if not methods.unchanged():
                return self._renew(module)(*args, **kwargs)
            if not callback.calls and _is_uninitialized(module):
                return module._call_impl(*args, **kwargs)  # a capture draws parameters, and puts the generator back
            callback.calls += 1
            before = activity.calls
            activity.begin()
            try:
                result = captured(module, tuple(kwargs), *args, **kwargs)
            except BaseException:
                callback.settle(returned=False)
                raise
            unsettled = bool(callback.unsettled)
            if unsettled and callback.settle(returned=True):
                return result
            pays = activity.pays
            if not pays:
                self._unpaid = activity.graphs
            if not (unsettled and pays):
                idle.note(self.graphs or (pays and activity.calls != before), module, args, kwargs)
            return result

        return call

    def attach(self, module: torch.nn.Module) -> None:
        """Have calls of a module captured."""
        module.__dict__["_cupyfuse"] = self
        module.__dict__["_compiled_call_impl"] = None if self._renewals >= _MOST_RENEWALS else self.compile(module)

    def _renew(self, module: torch.nn.Module) -> Callable[..., Any]:
        """Begin a new capture of a module whose methods, or hooks of all modules, changed; return the module's call."""
        other = Capture(self.options, self.graphs)
        other._renewals = self._renewals + 1
        other.attach(module)
        return module.__dict__["_compiled_call_impl"] or module._call_impl

    def fuse_graph(
        self, owner: torch.nn.Module, module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Fuse a graph captured from `owner`, and return what Dynamo calls in its place."""
        if self._callback is not None:
            self._callback.note_work(module)
        self._methods.add(owner, torch._guards.TracingContext.get_traced_code() or ())
        beside_gpu = decision.on_gpu(itertools.chain(owner.parameters(), owner.buffers(), example_inputs))
        judge_for = functools.partial(decision.judge_for, self.options, compiled=False, beside_gpu=beside_gpu)
        if not self.graphs:
            hooked, count = has_hooks(owner), len(self.runners)
            self.partitions += fuse_module(module, self._direct, judge_for(hooked=hooked))
            added = self.runners[count:]
            if added:
                added[0].is_first = True
                if not hooked:  # what hooks take is in the chains' estimates
                    added[0].saved -= decision.cost_of_part(example_inputs)
            return leaving_modes(module)
        judge = judge_for(cudagraph=True)
        self.partitions += fuse_module(module, AsOperator(self.options), judge)
        cudagraph: Callable[..., Any] = torch._dynamo.lookup_backend("cudagraphs")(module, list(example_inputs))
        return cudagraph


class _Backend:
    """A module's backend for Dynamo, which keeps every backend: this one keeps neither the module nor its captures."""

    def __init__(self, capture: Capture, owner: torch.nn.Module):
        self._capture, self._owner = weakref.ref(capture), weakref.ref(owner)

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        capture, owner = self._capture(), self._owner()
        assert capture is not None and owner is not None  # a call of theirs is under way
        return capture.fuse_graph(owner, module, example_inputs)


def _release(codes: Codes, backend: _Backend, runners: Sequence[Runner]) -> None:
    """Release what a capture held, once it is no more: Dynamo keeps graphs around a graph break whatever happens."""
    codes.release(backend)
    for runner in runners:
        runner.release()


def _add_or_count(found: dict[Any, Part], graph: Any, part: Part, seen: Counter[Any]) -> None:
    """Add a part of a graph, or count one more capture of it; `seen` tells equal parts of one capture apart."""
    key = (graph, part.module, part.operations, part.reason)
    seen[key] += 1
    before = found.get((key, seen[key]))
    if before is not None:
        part = replace(part, plans=before.plans + part.plans, captures=before.captures + 1)
    found[key, seen[key]] = part


def _holds_nested(value: Any, depth: int = 0) -> bool:
    """Whether an argument is a nested tensor without strides, or one of the first elements of a container is."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return bool(value.is_nested)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return False
    return depth < DEPTH and any(_holds_nested(each, depth + 1) for each in itertools.islice(value, WIDTH))


def _is_uninitialized(module: torch.nn.Module) -> bool:
    """Whether a module has lazy parameters or buffers that no call has initialized yet."""
    return any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))


def _call(module: Any, order: tuple[str, ...], /, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, as `Module.__call__` does without compilation: the function that is captured.

    Dynamo guards the names in `kwargs`, but not their order, which code may see: it guards what it reads of `order`.
    """
    return module._call_impl(*args, **{name: kwargs[name] for name in order})


_numbers = itertools.count()
