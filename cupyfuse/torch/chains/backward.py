"""The backward pass of a chain: what it needs of the forward pass, and how it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.plan import Plan
from ...plan.traced import Traced
from ...settings import Settings
from ...trace.saved import read_operands, stored
from ..rules.symbols import references
from ..rules.values import Value
from .chain import Chain, TracedChain
from .eligibility import is_plain, is_sharded
from .matching import BackwardCall, backward_call
from .runtime import begin, load
from .saving import SavedValues, backward_graph, choose_saved, cotangents_of, derive, scale_gradients
from .tensors import Tensors, as_rows, layout_of, without_memory

Flags = tuple[bool, ...]
_WITH_SLOPES = 0.5  # where logarithms, roots, quotients and inverse sines have finite slopes
_MOST_RECOGNIZED = 4  # plans whose calls are recognised: of alike layers, or of outputs that are used in turn


@dataclass
class _BackwardPlan:
    """A backward plan, and the result of each gradient.

    `execute` is None until it is loaded, by `finish` where that is begun. `again` runs calls like the first one.
    """

    plan: Plan
    finish: Callable[[], Any] | None
    gradients: list[tuple[int, int]]
    execute: Any = None
    again: BackwardCall | None = None


class _Dependence(NamedTuple):
    """Which gradients exist, for a choice of cotangents and wanted gradients."""

    computed: list[int]
    zero: list[int]  # inputs that the outputs depend on through step functions alone


class Backward:
    """The vector-Jacobian product of a chain, for inputs of fixed shapes and dtypes.

    Parameters
    ----------
    needs : for each input, whether its gradient is wanted
    saving : what the forward pass saves; chosen unless given
    shards : how many processes have a part of the products each
    distinct : whether gradients share no memory; else those of two operands of one sum are one tensor, as in PyTorch

    Attributes
    ----------
    differentiable : for each output, whether it depends on an input whose gradient is wanted
    constants : the outputs that do not
    inputs : the inputs that the backward pass reads
    unreached : the inputs whose gradient is wanted and that no output has one for, as those of comparisons
    second_order_inputs : further inputs, which saved values depend on; only derivatives of the gradients read them
    may_be_overwritten : those of `inputs` and `second_order_inputs` that may share memory with what the forward pass
        overwrites, such as running statistics
    saving : what the forward pass saves; all else is recomputed
    """

    def __init__(
        self,
        traced: TracedChain,
        needs: Sequence[bool],
        settings: Settings,
        saving: SavedValues | None = None,
        shards: int = 0,
        distinct: bool = False,
    ):
        self._addends = {} if distinct else _addends(traced.chain)
        self.traced, self.settings = traced, settings
        self._inputs = [v.tracer._node for v in traced.inputs]
        self._outputs = [v.tracer._node for v in traced.outputs]
        self._cotangents = cotangents_of(traced)
        dependent = self._dependent_nodes(needs)
        self.differentiable = [dtypes.is_float(n.dtype) and n in dependent for n in self._outputs]
        self.constants = [k for k, depends in enumerate(self.differentiable) if not depends]
        self.saving = saving or choose_saved(traced, needs, self.differentiable, settings, shards)
        self._outputs_saved = {} if distinct else traced.outputs_saved(self.saving.nodes)
        roots = [n for n in self._gradients(tuple(self.differentiable), tuple(needs)) if n is not None]
        values = self.saving.values
        read = set(g.topological(roots, lambda n: () if n in values else n.inputs))
        reached = set(g.topological([*roots, *self.saving.nodes]))
        self.inputs = [k for k, n in enumerate(self._inputs) if n in read]
        self.second_order_inputs = [k for k, n in enumerate(self._inputs) if n in reached and n not in read]
        self._updated = [k for k, _ in traced.chain.updates]
        # Inputs with gradients are none of the buffers that a chain updates, nor views of these.
        constant = frozenset(k for k in (*self.inputs, *self.second_order_inputs) if not needs[k])
        self.may_be_overwritten = constant if self._updated else frozenset()
        self._plans: dict[Hashable, _BackwardPlan] = {}
        self._dependence: dict[Hashable, _Dependence] = {}
        self._recognized: list[BackwardCall] = []  # the last one first
        given_to = self.inputs_with_gradients(self.differentiable, needs)
        self.unreached = frozenset(k for k, need in enumerate(needs) if need) - given_to

    def _dependent_nodes(self, needs: Sequence[bool]) -> set[Node]:
        """Find the nodes that depend on inputs whose gradient is wanted."""
        found = {n for n, need in zip(self._inputs, needs, strict=True) if need}
        for node in g.topological(self._outputs):
            if any(i in found for i in _differentiable_inputs(node)):
                found.add(node)
        return found

    def _gradients(self, given: Flags, wanted: Flags) -> list[Node | None]:
        """Derive the gradient of each input from the given cotangents; None where it is zero or not wanted."""
        cotangents = [c if present else None for c, present in zip(self._cotangents, given, strict=True)]
        if self.saving.gradients:
            cotangent = next((c for c in cotangents if c is not None), None)
            found = {} if cotangent is None else scale_gradients(self.saving.gradients, cotangent)
            return [found.get(k) if want else None for k, want in enumerate(wanted)]
        derived = derive(self.traced, cotangents, wanted)
        if not self.saving.operands:
            return derived
        existing = [n for n in derived if n is not None]
        replaced = iter(read_operands(existing, self.saving.operands, self.saving.values))
        return [None if n is None else next(replaced) for n in derived]

    def _find_dependence(self, given: Flags, wanted: Flags) -> _Dependence:
        """Find which of the wanted gradients are computed, and which are zero."""
        if not (any(given) and any(wanted)):
            return _Dependence([], [])
        known = self._dependence.get((given, wanted))
        if known is not None:
            return known
        roots = self._gradients(given, wanted)
        outputs = [n for n, present in zip(self._outputs, given, strict=True) if present]
        reached = set(g.topological(outputs, _differentiable_inputs))
        zero = [k for k, n in enumerate(self._inputs) if wanted[k] and roots[k] is None and n in reached]
        computed = [k for k, root in enumerate(roots) if root is not None]
        self._dependence[given, wanted] = found = _Dependence(computed, zero)
        return found

    def __call__(self, tensors: Tensors, cotangents: Tensors, wanted: Flags) -> list[Any]:
        """Compute the gradients, one for each input of the chain; None where nothing depends on it.

        Parameters
        ----------
        tensors : the inputs in `inputs`, then the saved values
        cotangents : one for each output, or None for zero
        wanted : for each input, whether its gradient is wanted
        """
        for again in self._recognized:
            found = again(tensors, cotangents, wanted)
            if found is not None:
                return found
        given = self._flags([c is not None for c in cotangents])
        dependence = self._find_dependence(given, wanted)
        pairs = [(v, c) for v, c, present in zip(self.traced.outputs, cotangents, given, strict=True) if present]
        result: list[Any] = [None] * len(self._inputs)
        for k in dependence.zero:
            result[k] = self._zeros(k, pairs[0][1].device)
        if dependence.computed:
            for k, grad in self._run(tensors, pairs, given, wanted):
                result[k] = grad
        return result

    def _flags(self, given: Iterable[bool]) -> Flags:
        """Return for each output whether its cotangent is given and counts."""
        return tuple([g and d for g, d in zip(given, self.differentiable, strict=True)])

    def inputs_with_gradients(self, given: Iterable[bool], wanted: Sequence[bool]) -> frozenset[int]:
        """Return the inputs that have a gradient, which may be zero, where these outputs have cotangents."""
        dependence = self._find_dependence(self._flags(given), tuple(wanted))
        return frozenset((*dependence.computed, *dependence.zero))

    def before_updates(self, tensors: Tensors) -> Tensors:
        """Return the inputs of a forward pass to come, with copies of those whose memory it will overwrite."""
        updated = {_memory_of(tensors[k]) for k in self._updated}
        return [
            t.detach().clone() if k in self.may_be_overwritten and _memory_of(t) in updated else t
            for k, t in enumerate(tensors)
        ]

    def saved(self, outputs: Tensors, others: Tensors) -> Tensors:
        """Return the saved values: outputs that serve as these, in the memory of results, and the others in order."""
        if not self._outputs_saved:
            return others
        rest = iter(others)
        return [
            outputs[self._outputs_saved[k]].detach().reshape(n.shape) if k in self._outputs_saved else next(rest)
            for k, n in enumerate(self.saving.nodes)
        ]

    @staticmethod
    def takes(cotangents: Tensors) -> bool:
        """Whether the backward plan can take these cotangents."""
        return all(c is None or is_plain(c) for c in cotangents)

    def _run(
        self, tensors: Tensors, pairs: Sequence[tuple[Value, Any]], given: Flags, wanted: Flags
    ) -> list[tuple[int, Any]]:
        """Compute the gradients that exist, with the inputs they are of, from the cotangents of outputs."""
        arrays = [*map(as_rows, tensors), *(cotangent_matrix(value, c) for value, c in pairs)]
        loaded = self._find_loaded(given, wanted, arrays)
        results = loaded.execute(arrays)
        unfolded = [*tensors, *(c for _, c in pairs)]
        uncopied = all(a.data_ptr() == t.data_ptr() for a, t in zip(arrays, unfolded, strict=True))
        quick = getattr(loaded.execute, "quick", None)  # reads no more of arrays than their addresses
        if uncopied and quick is not None:
            again = loaded.again or self._write_call(quick, loaded, tensors, pairs, given, wanted)
            loaded.again = again
            others = [each for each in self._recognized if each is not again]
            self._recognized = [again, *others][:_MOST_RECOGNIZED]
        return [(k, results[place]) for k, place in loaded.gradients]

    def _write_call(
        self,
        run: Callable[[Tensors], Tensors],
        loaded: _BackwardPlan,
        tensors: Tensors,
        pairs: Sequence[tuple[Value, Any]],
        given: Flags,
        wanted: Flags,
    ) -> BackwardCall:
        """Return a function that recognises calls like this one, and runs them with the tensors as they are."""
        dependence, device = self._find_dependence(given, wanted), pairs[0][1].device
        gradients: list[int | Callable[[], Any] | None] = [None] * len(wanted)
        for k in dependence.zero:
            gradients[k] = partial(self._zeros, k, device)
        for k, place in loaded.gradients:
            gradients[k] = place
        read = [k for k, present in enumerate(given) if present]
        cotangents = dict(zip(read, (c for _, c in pairs), strict=True))
        absent = [k for k, differentiable in enumerate(self.differentiable) if differentiable and k not in cotangents]
        return backward_call(tensors, cotangents, len(given), absent, wanted, run, gradients)

    def _find_loaded(self, given: Flags, wanted: Flags, arrays: Tensors) -> _BackwardPlan:
        """Return the plan for a choice of gradients and arrays of these layouts, loaded at the first of such calls."""
        key = _key(given, wanted, arrays, arrays[0].device)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._plan(given, wanted, arrays)
        if found.execute is None:
            found.execute = found.finish() if found.finish is not None else load(found.plan, arrays)
        return found

    def prepare(self, tensors: Tensors, device: torch.device, wanted: Sequence[bool]) -> None:
        """Plan the first call, and begin to compile its kernels, which takes them longer than the forward pass.

        Every output that depends on an input whose gradient is wanted is taken to have a contiguous cotangent.

        Parameters
        ----------
        tensors : all inputs of the chain, or tensors of the device "meta" with their shapes, dtypes and strides
        device : that of the inputs
        wanted : for each input, whether its gradient is wanted
        """
        first = self._first_call(tensors, wanted)
        if first is not None:
            key = _key(*first, device)
            if key not in self._plans:
                self._plans[key] = self._plan(*first, device)

    def plan(self, tensors: Tensors, wanted: Sequence[bool]) -> Plan | None:
        """Plan the first call as `prepare` does, without compiling anything; None where there is no gradient."""
        first = self._first_call(tensors, wanted)
        return None if first is None else self._plan(*first).plan

    def _first_call(self, tensors: Tensors, wanted: Sequence[bool]) -> tuple[Flags, Flags, Tensors] | None:
        """Return the outputs with cotangents, the wanted gradients and the arrays of the first call.

        Saved values and cotangents have no memory.
        """
        given = self._flags([True] * len(self.differentiable))
        wanted = tuple([want and k not in self.unreached for k, want in enumerate(wanted)])
        if not self._find_dependence(given, wanted).computed:
            return None
        saved = [without_memory(node.shape, stored(node).dtype) for node in self.saving.nodes]
        values = [v for v, present in zip(self.traced.outputs, given, strict=True) if present]
        arrays = [*(as_rows(tensors[k]) for k in self.inputs), *saved]
        arrays += [cotangent_matrix(v, without_memory(v.shape, v.dtype)) for v in values]
        return given, wanted, arrays

    def _plan(self, given: Flags, wanted: Flags, arrays: Tensors, device: torch.device | None = None) -> _BackwardPlan:
        """Plan the backward graph for inputs, saved values and cotangents of these layouts.

        With a device, begin to compile its kernels.
        """
        roots = self._roots(given, wanted)
        inputs: dict[int, list[int]] = {}  # of each result, the inputs that it is the gradient of
        for k, node in roots.items():
            other = self._addends.get(k, k)
            same = roots.get(other) is node and self.traced.inputs[other].shape == self.traced.inputs[k].shape
            inputs.setdefault(other if same else k, []).append(k)
        computed = {first: roots[first] for first, *_ in inputs.values()}
        plan = build(self._graph(given, computed), dict(enumerate(map(layout_of, arrays))), self.settings)
        gradients = [(k, place) for place, given_to in enumerate(inputs.values()) for k in given_to]
        finish = begin(plan, arrays, device) if device is not None else None
        return _BackwardPlan(plan, finish, gradients)

    def _roots(self, given: Flags, wanted: Flags) -> dict[int, Node]:
        """Return the gradients that exist, by input."""
        return {k: n for k, n in enumerate(self._gradients(given, wanted)) if n is not None}

    def graph(self, given: Flags, wanted: Flags) -> tuple[dict[int, Node], Traced]:
        """Return the gradients by input, and the graph of them from inputs, saved values and the given cotangents."""
        roots = self._roots(given, wanted)
        return roots, self._graph(given, roots)

    def _graph(self, given: Flags, roots: dict[int, Node]) -> Traced:
        cotangents = [c if present else None for c, present in zip(self._cotangents, given, strict=True)]
        return backward_graph(self.traced, roots, self.inputs, self.saving, cotangents)

    def _zeros(self, number: int, device: torch.device) -> torch.Tensor:
        return self._filled(number, device, 0.0)

    def _filled(self, number: int, device: torch.device, fill: float) -> torch.Tensor:
        value = self.traced.inputs[number]
        return torch.full(value.shape, fill, dtype=getattr(torch, value.dtype), device=device)

    def eager_gradients(self, tensors: Mapping[int, Any], cotangents: Tensors, wanted: Sequence[bool]) -> list[Any]:
        """Compute the gradients by PyTorch's own operations, to be differentiated again where that is enabled.

        Parameters
        ----------
        tensors : those of `inputs` and `second_order_inputs`, by number
        cotangents : one for each output, or None for zero
        wanted : for each input, whether its gradient is wanted
        """
        none: list[Any] = [None] * len(wanted)
        device = next((c.device for c in cotangents if c is not None), None)
        if device is None:
            return none
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # No derivative depends on the values of other inputs, unless it is NaN, as zero times the infinite slope
            # of a logarithm at 0: that of `trunc(log(x))`.
            inputs = [
                tensors[k] if k in tensors else self._filled(k, device, _WITH_SLOPES).requires_grad_(want)
                for k, want in enumerate(wanted)
            ]
            aliases = [t.view_as(t) if want else t for t, want in zip(inputs, wanted, strict=True)]
            outputs = self.traced.chain.eager(aliases)[: len(self._outputs)]
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
            if not pairs:
                return none
            sources = [t for t, want in zip(aliases, wanted, strict=True) if want]
            ends, weights = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(ends, sources, weights, create_graph=again, allow_unused=True))
            return [next(found) if want else None for want in wanted]


def _key(given: Flags, wanted: Flags, arrays: Tensors, device: torch.device) -> Hashable:
    """Return what a backward plan depends on."""
    return given, wanted, tuple([(a.stride(), a.shape) for a in arrays]), device


def _addends(chain: Chain) -> dict[int, int]:
    """Find inputs that a chain does no more with than to add them to another one: that one, by the input's number."""
    uses = Counter(n for call in chain.calls for n in references(call.arguments))
    found = {}
    for call in chain.calls:
        numbers = list(references(call.arguments))
        if call.rule == "add" and len(numbers) == 2 and call.arguments[2] == 1:
            first, second = sorted(numbers)
            if second < len(chain.names) and uses[first] == uses[second] == 1:
                found[second] = first
    return found


def _differentiable_inputs(node: Node) -> Sequence[Node]:
    """Return the inputs of a node that its gradient flows to."""
    flows = dtypes.is_float(node.dtype) and node.op != "stop_gradient"
    return [i for i in node.inputs if dtypes.is_float(i.dtype)] if flows else []


def cotangent_matrix(value: Value, cotangent: Any) -> Any:
    """Reshape the cotangent of a value to the rows x columns of its node, transposed where the node is."""
    shape = value.tracer._node.shape
    matrix = cotangent if value.tracer._axes.in_order else cotangent.reshape(shape[::-1]).t()
    return matrix if matrix.shape == shape else matrix.reshape(shape)


def _memory_of(tensor: torch.Tensor) -> int:
    """Identify a tensor's memory, all of which views share; of a DTensor, that of its shard."""
    local = tensor._local_tensor if is_sharded(tensor) else tensor
    return int(local.untyped_storage().data_ptr())
