"""A chain, as data: operations on tensors that run together.

A chain lists calls of rules (`rules.RULES`) by name. It can run with PyTorch's own operations (`eager`), be traced into
the graph that plans are made from (`trace`), and be written as text (`to_json`), which compiled PyTorch graphs hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ...errors import TraceError
from ...ir import graph as g
from ...plan.traced import Traced
from ...trace import Axes, AxisLabels, Trace
from ...trace.saved import stored
from ..rules import PARTS, RULES
from ..rules.symbols import Ref, Size, references, substitute
from ..rules.values import Value
from .tensors import concrete_sizes, dtype_name, folds, lies_in_rows

Meta = tuple[tuple[int, ...], str]  # shape and dtype of a tensor
_SAVING_RESULTS = ("sigmoid", "tanh", "softmax", "softmin")  # rules of operations whose gradients read their results


@dataclass(frozen=True, eq=False)
class Call:
    """One operation.

    Calls are equal where their arguments have equal types and values, signs of zeros included: 1, 1.0 and True are
    three constants, though Python holds them equal.

    Attributes
    ----------
    rule : the operation's name in `rules.RULES`
    arguments : canonical arguments: `Ref` for tensors, `Size` for symbolic sizes, else numbers, strings, None or
        tuples of these
    results : the numbers of its results; -1 for unused ones
    """

    rule: str
    arguments: tuple[Any, ...]
    results: tuple[int, ...]

    @cached_property
    def _key(self) -> Any:
        return self.rule, _exact_key(self.arguments), self.results

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _exact_key(argument: Any) -> Any:
    """Return a hashable key that tells types apart, and 0.0 from -0.0."""
    if isinstance(argument, tuple):
        return tuple(map(_exact_key, argument))
    return type(argument), argument.hex() if isinstance(argument, float) else argument


@dataclass(frozen=True)
class Chain:
    """Operations on tensors that run together.

    Attributes
    ----------
    names : one for each input, as plans print it
    calls : in an order in which they can run
    outputs : the numbers of the values that are returned
    updates : (input, value) for each input that is overwritten with a value once all else is computed
    fixed : the inputs that seldom change, parameters and buffers; what depends on them alone is prepacked
    sizes : how many symbolic sizes the arguments name; `with_sizes` fills them in
    copied : the inputs that the backward pass reads in a copy, as the forward pass of a later call changes them
    """

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...] = ()
    fixed: frozenset[int] = frozenset()
    sizes: int = 0
    copied: frozenset[int] = frozenset()

    def with_sizes(self, sizes: tuple[Any, ...]) -> Chain:
        """Fill in the symbolic sizes, with numbers or with other symbols."""
        if not self.sizes:
            return self
        hashable = all(type(n) is int for n in sizes)  # unlike symbols
        return _fill_sizes(self, sizes) if hashable else _fill_sizes.__wrapped__(self, sizes)

    def copies(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether an input, as this tensor, is copied before it is read: rows of several strides by some operations."""
        if folds(tensor):
            return False
        readers = [RULES[call.rule] for call in self.calls if number in references(call.arguments)]
        return not lies_in_rows(tensor) or any(r.product or (r.view and r.name not in PARTS) for r in readers)

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(call.rule for call in self.calls)

    @property
    def name(self) -> str:
        return " -> ".join(self.operations)

    def eager(self, tensors: Sequence[Any]) -> list[Any]:
        """Run with PyTorch's own operations; the values of `updates` follow the outputs and are not written back.

        Other values live as long as a later operation reads them, as in PyTorch; compilers see to that themselves.
        """
        dead = () if torch.compiler.is_dynamo_compiling() else self._dead
        values = self._run(tensors, _call_eagerly, dead)
        return [values[n] for n in self._results]

    @property
    def _results(self) -> tuple[int, ...]:
        return *self.outputs, *(value for _, value in self.updates)

    @cached_property
    def _dead(self) -> list[list[int]]:
        """For each call, the values that nothing reads after it."""
        needed, dead = set(self._results), list[list[int]]()
        for call in reversed(self.calls):
            used = {*references(call.arguments), *(n for n in call.results if n >= 0)} - needed
            dead.insert(0, sorted(used))
            needed |= used
        return dead

    def values(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """Compute every value of the chain, by number, with PyTorch's own operations."""
        return self._run(tensors, _call_eagerly)

    def _run(
        self,
        inputs: Iterable[Any],
        apply: Callable[[Call, list[Any]], Any],
        dead: Sequence[Sequence[int]] = (),
    ) -> dict[int, Any]:
        """Compute every value, by number, with `apply(call, arguments)` for each call; drop `dead` ones after it."""
        values = dict(enumerate(inputs))

        def fill(argument: Any) -> Any:
            return substitute(argument, lambda ref: values[ref.number], lambda size: size)

        for call, unused in zip(self.calls, dead or [()] * len(self.calls), strict=True):
            result = apply(call, list(map(fill, call.arguments)))
            results = result if isinstance(result, tuple) else (result,)
            values.update((n, value) for n, value in zip(call.results, results, strict=False) if n >= 0)
            for n in unused:
                del values[n]
        return values

    def trace(self, metas: Sequence[Meta]) -> TracedChain:
        """Trace the chain for inputs of these shapes and dtypes.

        Raises
        ------
        TraceError
            An operation cannot be fused for these.
        """
        trace = Trace()
        inputs = [Value.argument(trace, name, *meta) for name, meta in zip(self.names, metas, strict=True)]
        values = self._run(inputs, lambda call, arguments: traced_call(trace, call.rule, arguments))
        return TracedChain(self, trace, inputs, values)

    def to_json(self) -> str:
        """Write the chain as text, which `from_json` reads."""
        calls = [(c.rule, c.arguments, c.results) for c in self.calls]
        fields = (self.names, calls, self.outputs, self.updates, sorted(self.fixed), self.sizes, sorted(self.copied))
        return json.dumps(fields, default=_encode)

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_json(text: str) -> Chain:
        """Read a chain that `to_json` wrote."""
        names, calls, outputs, updates, fixed, sizes, copied = _as_tuples(json.loads(text, object_hook=_decode))
        listed = tuple(Call(*call) for call in calls)
        return Chain(names, listed, outputs, updates, frozenset(fixed), sizes, frozenset(copied))

    def saved_input(self, number: int, tensor: Any) -> Any:
        """Return what is saved of an input for the backward pass: the tensor, or a copy if a later call changes it.

        Or if it is of inference mode: autograd saves none, and eager none that it only computes with.
        """
        copied = tensor.is_inference() or (number in self.copied and not tensor.requires_grad)
        return tensor.detach().clone() if copied else tensor


@lru_cache(maxsize=4096)
def _fill_sizes(chain: Chain, sizes: Sequence[Any]) -> Chain:
    def fill(argument: Any) -> Any:
        return substitute(argument, lambda ref: ref, lambda size: sizes[size.symbol])

    calls = tuple(Call(c.rule, tuple(map(fill, c.arguments)), c.results) for c in chain.calls)
    return replace(chain, calls=calls, sizes=0)


def _call_eagerly(call: Call, arguments: list[Any]) -> Any:
    return RULES[call.rule].eager(*arguments)


def traced_call(trace: Trace, rule: str, arguments: Sequence[Any]) -> Any:
    """Apply one operation to traced values, recorded as one call."""
    tracers = [a.tracer for a in arguments if isinstance(a, Value)]
    with trace.call(rule, tracers) as record_result:
        result = RULES[rule].traced(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        record_result(first.tracer)
        return result


@dataclass
class TracedChain:
    """A chain's graph, and the chain's values in it."""

    chain: Chain
    trace: Trace
    inputs: list[Value]
    values: dict[int, Any]

    @property
    def outputs(self) -> list[Value]:
        return [Value(self.values[n].settled) for n in self.chain.outputs]

    def as_traced(self, saved: Sequence[g.Node] = (), in_place: bool = True) -> Traced:
        """Return the graph to plan: it yields outputs, then updates unless these are made in place, then `saved`.

        With updates in place, those of `saved` are left out that `outputs_saved` finds among the outputs.
        """
        outputs = self.outputs_saved(saved) if in_place else {}
        saved = [node for k, node in enumerate(saved) if k not in outputs]
        results: list[tuple[g.Node, Axes | AxisLabels]] = [(v.tracer._node, v.tracer._axes) for v in self.outputs]
        effects: list[tuple[int, g.Node]] = []
        for k, n in self.chain.updates:
            node = _like_target(self.values[n], self.inputs[k])
            if in_place:
                effects.append((k, node))
            else:
                results.append((node, self.inputs[k].tracer._axes))
        results += [(stored(node), (0, 1)) for node in saved]
        graph = g.Graph(self.trace.inputs, [node for node, _ in results], effects)
        axes = tuple(axes for _, axes in results)
        return Traced(self.chain.name, graph, axes, tuple(self.trace.calls), saved=len(saved))

    def outputs_saved(self, saved: Sequence[g.Node]) -> dict[int, int]:
        """Find what is saved among the outputs, whose tensors serve as that: the output's number by the saved one's.

        Only of operations that save their results in PyTorch, too: to change one in place is an error there.
        """
        found = {}
        rules = {n: call.rule for call in self.chain.calls for n in call.results}
        for k, (n, value) in enumerate(zip(self.chain.outputs, self.outputs, strict=True)):
            tracer = value.tracer
            if tracer._node in saved and tracer._axes.in_order and rules.get(n) in _SAVING_RESULTS:
                found[list(saved).index(tracer._node)] = k
        return found

    def computed(self) -> list[tuple[int, g.Node]]:
        """List the computed nodes in order, each with the index of the call that first computes it."""
        found: list[tuple[int, g.Node]] = []
        seen: set[g.Node] = {v.tracer._node for v in self.inputs}
        for k, call in enumerate(self.chain.calls):
            roots = [self.values[n].tracer._node for n in call.results if n >= 0]
            for node in g.topological(roots, lambda n: () if n in seen else n.inputs):
                if node not in seen and node.op != "const":
                    found.append((k, node))
                seen.add(node)
        return found


def _like_target(value: Value, target: Value) -> g.Node:
    """Transpose and cast the node of an update to the shape and dtype of the input that it overwrites."""
    node, want = value.tracer._node, target.tracer._node
    if node.shape != want.shape:
        node = g.transpose(node)
    if node.shape != want.shape:
        raise TraceError(f"an update of shape {value.shape} does not fit its target of shape {target.shape}")
    return g.cast(node, want.dtype)


def metas_of(tensors: Iterable[Any]) -> tuple[Meta, ...]:
    """Return the shapes and dtypes of tensors, as `Chain.trace` takes them."""
    return tuple((concrete_sizes(t.shape), str(dtype_name(t.dtype))) for t in tensors)


def _encode(argument: Any) -> Any:
    """Encode the stand-ins in a chain's arguments for JSON."""
    if isinstance(argument, Ref):
        return {"value": argument.number}
    if isinstance(argument, Size):
        return {"size": argument.symbol}
    raise TypeError(f"an argument of type {type(argument).__name__} cannot be part of a chain")


def _decode(argument: dict[str, int]) -> Ref | Size:
    return Ref(argument["value"]) if "value" in argument else Size(argument["size"])


def _as_tuples(tree: Any) -> Any:
    return tuple(map(_as_tuples, tree)) if isinstance(tree, list) else tree
