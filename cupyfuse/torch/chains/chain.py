"""A chain: operations on tensors that run together, as data.

A chain says what PyTorch was asked for, operation by operation, with the names of `rules`. It can be run as PyTorch
would (`eager`), traced into the graph that plans are made from (`trace`), and written down as text (`to_json`), which
is what a compiled PyTorch graph holds of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch

from ...errors import TraceError
from ...ir import graph as g
from ...plan.plan import Traced
from ...trace import Trace
from ...trace.saved import stored
from ..rules import RULES
from ..rules.symbols import Ref, Size
from ..rules.values import Value

Meta = tuple[tuple[int, ...], str]  # shape and dtype of a tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One operation.

    Calls are equal where their arguments are the same, types and signs of zeros included: 1, 1.0 and True are three
    constants, though Python holds them equal.

    Attributes
    ----------
    rule : the operation's name in `rules.RULES`
    arguments : canonical arguments: `Ref` for tensors, `Size` for symbolic sizes, else numbers, strings, None or
        tuples of these
    results : the numbers of its results; -1 for those that nobody needs
    """

    rule: str
    arguments: tuple[Any, ...]
    results: tuple[int, ...]

    @cached_property
    def _exactly(self) -> Any:
        return self.rule, exactly(self.arguments), self.results

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self._exactly == other._exactly

    def __hash__(self) -> int:
        return hash(self._exactly)


@dataclass(frozen=True)
class Chain:
    """Operations on tensors that run together.

    Attributes
    ----------
    names : tuple of str
        Of the inputs, as plans print them; their count is that of the inputs.
    calls : tuple of Call
        In an order in which they can run.
    outputs : tuple of int
        The values that are returned.
    updates : tuple of (int, int)
        (input, value): inputs that are overwritten with a value once all else is computed.
    fixed : frozenset of int
        Inputs that change seldom, parameters and buffers: what depends on them alone is prepared once.
    sizes : int
        How many symbolic sizes its arguments name; `with_sizes` fills them in.
    """

    names: tuple[str, ...]
    calls: tuple[Call, ...]
    outputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...] = ()
    fixed: frozenset[int] = frozenset()
    sizes: int = 0

    def with_sizes(self, sizes: tuple[int, ...]) -> Chain:
        """The chain for these values of its symbolic sizes."""
        return _with_sizes(self, sizes) if self.sizes else self

    def filled(self, sizes: Sequence[Any]) -> Chain:
        """The same for values that may be symbols, which no cache can hold."""
        return _filled_in(self, sizes) if self.sizes else self

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(call.rule for call in self.calls)

    @property
    def name(self) -> str:
        return " -> ".join(self.operations)

    # As PyTorch runs it
    def eager(self, tensors: Sequence[Any]) -> list[Any]:
        """Run with PyTorch's own operations; the values of `updates` follow the outputs and are not written back."""
        values = self.values(tensors)
        return [values[n] for n in (*self.outputs, *(value for _, value in self.updates))]

    def values(self, tensors: Sequence[Any]) -> dict[int, Any]:
        """Every value of the chain by number, computed with PyTorch's own operations."""
        values = dict(enumerate(tensors))
        self._run(values, lambda call, arguments: RULES[call.rule].eager(*arguments))
        return values

    def _run(self, values: dict[int, Any], apply: Callable[[Call, list[Any]], Any]) -> None:
        for call in self.calls:
            result = apply(call, [_filled(a, values) for a in call.arguments])
            results = result if isinstance(result, tuple) else (result,)
            for number, value in zip(call.results, results, strict=False):
                if number >= 0:
                    values[number] = value

    # As a graph
    def trace(self, metas: Sequence[Meta]) -> Tracing:
        """The graph of the chain for inputs of these shapes and dtypes.

        Parameters
        ----------
        metas : sequence of (shape, dtype)

        Raises
        ------
        TraceError
            An operation cannot be fused for these.
        """
        trace = Trace()
        inputs = [Value.argument(trace, name, *meta) for name, meta in zip(self.names, metas, strict=True)]
        values: dict[int, Any] = dict(enumerate(inputs))
        self._run(values, lambda call, arguments: traced_call(trace, call.rule, arguments))
        return Tracing(self, trace, inputs, values)

    # As text
    def to_json(self) -> str:
        """The chain as text; `from_json` reads it."""
        calls = [[c.rule, [_encoded(a) for a in c.arguments], list(c.results)] for c in self.calls]
        updates = [list(u) for u in self.updates]
        return json.dumps([list(self.names), calls, list(self.outputs), updates, sorted(self.fixed), self.sizes])

    def landmarks(self, tracing: Tracing) -> list[tuple[int, g.Node]]:
        """The computed values in a graph of the chain, each with the call that makes it."""
        found: list[tuple[int, g.Node]] = []
        seen: set[g.Node] = {v.tracer._node for v in tracing.inputs}
        for k, call in enumerate(self.calls):
            roots = [tracing.values[n].tracer._node for n in call.results if n >= 0]
            for node in g.topological(roots, lambda n: () if n in seen else n.inputs):
                if node not in seen and node.op != "const":
                    found.append((k, node))
                seen.add(node)
        return found

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_json(text: str) -> Chain:
        names, calls, outputs, updates, fixed, sizes = json.loads(text)
        return Chain(
            tuple(names),
            tuple(Call(rule, tuple(map(_decoded, arguments)), tuple(results)) for rule, arguments, results in calls),
            tuple(outputs),
            tuple((int(a), int(b)) for a, b in updates),
            frozenset(fixed),
            sizes,
        )


@lru_cache(maxsize=4096)
def _with_sizes(chain: Chain, sizes: tuple[int, ...]) -> Chain:
    return _filled_in(chain, sizes)


def _filled_in(chain: Chain, sizes: Sequence[Any]) -> Chain:
    def filled(argument: Any) -> Any:
        if isinstance(argument, Size):
            return sizes[argument.of]
        return tuple(map(filled, argument)) if isinstance(argument, tuple) else argument

    calls = tuple(Call(c.rule, tuple(map(filled, c.arguments)), c.results) for c in chain.calls)
    return replace(chain, calls=calls, sizes=0)


def traced_call(trace: Trace, rule: str, arguments: Sequence[Any]) -> Any:
    """One operation on traced values, recorded as one."""
    tracers = [a.tracer for a in arguments if isinstance(a, Value)]
    with trace.call(rule, tracers) as done:
        result = RULES[rule].traced(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        done(first.tracer)
        return result


@dataclass
class Tracing:
    """A chain's graph, and where the chain's values are in it."""

    chain: Chain
    trace: Trace
    inputs: list[Value]
    values: dict[int, Any]

    @property
    def outputs(self) -> list[Value]:
        return [self.values[n] for n in self.chain.outputs]

    def updated(self) -> list[tuple[int, Value]]:
        return [(k, self.values[n]) for k, n in self.chain.updates]

    def as_traced(self, saved: Sequence[g.Node] = (), in_place: bool = True) -> Traced:
        """What a plan is made from: outputs, then updates unless they are made in place, then saved nodes."""
        results = [(v.tracer._node, v.tracer._axes) for v in self.outputs]
        effects: list[tuple[int, g.Node]] = []
        for k, value in self.updated():
            node, tracer = _shaped_like(value, self.inputs[k]), self.inputs[k].tracer
            if in_place:
                effects.append((k, node))
            else:
                results.append((node, tracer._axes))
        results += [(stored(node), (0, 1)) for node in saved]
        graph = g.Graph(self.trace.inputs, [node for node, _ in results], effects)
        return Traced(self.chain.name, graph, tuple(axes for _, axes in results), tuple(self.trace.calls))


def _shaped_like(value: Value, target: Value) -> g.Node:
    """The node of an update, as the input that it overwrites lies."""
    node, want = value.tracer._node, target.tracer._node
    if node.shape != want.shape:
        node = g.transpose(node)
    if node.shape != want.shape:
        raise TraceError(f"an update of shape {value.shape} does not fit its target of shape {target.shape}")
    return g.cast(node, want.dtype)


def exactly(argument: Any) -> Any:
    """What equals that of another argument only where the two are of the same type and value, -0.0 and 0.0 apart."""
    if isinstance(argument, tuple):
        return tuple(map(exactly, argument))
    return type(argument), argument.hex() if isinstance(argument, float) else argument


def sizes(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor as numbers; where they are symbols, those that stand for them at the moment."""
    return tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else int(n) for n in tensor.shape)


def _filled(argument: Any, values: dict[int, Any]) -> Any:
    if isinstance(argument, Ref):
        return values[argument.number]
    if isinstance(argument, tuple):
        return tuple(_filled(a, values) for a in argument)
    return argument


def _encoded(argument: Any) -> Any:
    if isinstance(argument, Ref):
        return {"value": argument.number}
    if isinstance(argument, Size):
        return {"size": argument.of}
    if isinstance(argument, tuple):
        return [_encoded(a) for a in argument]
    if isinstance(argument, float):
        return {"float": argument.hex()}
    if argument is None or isinstance(argument, (bool, int, str)):
        return argument
    raise TypeError(f"an argument of type {type(argument).__name__} cannot be part of a chain")


def _decoded(argument: Any) -> Any:
    if isinstance(argument, list):
        return tuple(map(_decoded, argument))
    if isinstance(argument, dict):
        ((kind, value),) = argument.items()
        return Ref(value) if kind == "value" else Size(value) if kind == "size" else float.fromhex(value)
    return argument
