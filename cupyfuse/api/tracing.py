"""Trace a function: run it on traced arrays, twice, and check that both runs did the same."""

from __future__ import annotations

import inspect
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..errors import TraceError
from ..ir import graph as g
from ..plan.plan import Traced
from ..trace import Trace, Tracer
from ..trace.numpy import traced_conversions
from .environment import Environment
from .results import Results
from .signature import Signature
from .substitution import Substitution


@dataclass(frozen=True)
class Tracing:
    """What tracing a function found.

    Attributes
    ----------
    traced : Traced
        The graph; its inputs are the leaves of the signature, then the constants.
    results : Results
    constants : list of array
        Arrays that the function made itself.
    read : set of int
        Positions of the float arguments whose values it has read, so that the graph holds for these values only.
    """

    traced: Traced
    results: Results
    constants: list[Any]
    read: set[int]


def trace_function(
    environment: Environment,
    parameters: inspect.Signature,
    values: Sequence[Any],
    signature: Signature,
    by_value: Container[str] = (),
    strict: bool = False,
) -> Tracing:
    """Trace a function for the values of its parameters; those named in `by_value` have floats that are constants.

    `strict` refuses library steps.

    It is traced twice: what it draws at random or reads from a clock would be the same in all later calls, and differs
    between the two.
    """
    name = str(getattr(environment.function, "__name__", type(environment.function).__name__))
    read: set[int] = set()
    first = Trace(captures=True, strict=strict)
    try:
        results = _run(first, environment, parameters, values, signature, by_value, read)
    except (TypeError, ValueError, IndexError):
        # Something traced may have been written to an array that the function made.
        if not first.made:
            raise
        first = Trace(captures=True, strict=strict, makes=True)
        results = _run(first, environment, parameters, values, signature, by_value, read)
    second = Trace(repeats=first, captures=True, strict=strict, makes=first.makes)
    again = _run(second, environment, parameters, values, signature, by_value, read)
    if _key(first, results) != _key(second, again):
        raise TraceError(
            f"cannot fuse {name}: traced a second time it does something else, as if it drew random numbers or read "
            "the time; make what changes an argument"
        )
    if not results.leaves and not first.effects:
        raise TraceError(f"cannot fuse {name}: it returns no array computed from its arguments")
    axes = tuple(t._axes for t in results.leaves)
    traced = Traced(name, _graph(first, results), axes, tuple(first.calls), first.plain)
    return Tracing(traced, results, first.constants, read)


def _key(trace: Trace, results: Results) -> list[Hashable]:
    return [*results.key, *(t._axes for t in results.leaves), *graph_key(_graph(trace, results))]


def _graph(trace: Trace, results: Results) -> g.Graph:
    return g.Graph(trace.inputs, [t._node for t in results.leaves], list(trace.effects.items()))


def _run(
    trace: Trace,
    environment: Environment,
    parameters: inspect.Signature,
    values: Sequence[Any],
    signature: Signature,
    by_value: Container[str],
    read: set[int],
) -> Results:
    """Run the function once, and note in `read` which float arguments it has read."""
    traced = [_argument(trace, leaf, name) for leaf, name in zip(signature.leaves, signature.names, strict=True)]
    for i, same in signature.repeated().items():
        traced[i] = traced[same]
    static = environment.static
    substitution = Substitution(trace, iter(traced), signature.captured, static, environment.package, read)
    bound = parameters.bind_partial()
    for name, value in zip(parameters.parameters, values, strict=True):
        given = substitution.by_value if name in by_value else substitution.of
        bound.arguments[name] = value if name in static else given(value, name)
    function = substitution.root(environment.function)
    try:
        with traced_conversions(trace):
            results = Results(function(*bound.args, **bound.kwargs))
        changed = substitution.changed()
    finally:
        trace.end()
    if changed is not None:
        raise TraceError(
            f"cannot fuse a change of {changed!r}: a fused function runs as Python code only while it is traced, and "
            "later calls would change nothing; return what it computes, and change the object outside"
        )
    return results


def _argument(trace: Trace, leaf: Any, name: str) -> Tracer:
    try:
        dtype = dtypes.name_of(leaf.dtype)
    except TypeError as error:
        raise TypeError(f"argument {name!r}: {error}") from None
    return trace.argument(name, leaf.shape, dtype, getattr(leaf, "strides", None))


def graph_key(graph: g.Graph) -> list[Hashable]:
    """Return a key that graphs share if they compute the same values from the same arguments."""
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(graph.roots):
        numbers[node] = len(numbers)
        lines.append((g.operation_key(node), tuple(numbers[i] for i in node.inputs)))
    effects = tuple((argument, numbers[n]) for argument, n in graph.effects)
    return [*lines, tuple(numbers[n] for n in graph.outputs), effects]
