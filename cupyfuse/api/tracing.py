"""Trace a function: run it on traced arrays twice, and check that both runs did the same."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import dtypes
from ..errors import TraceError
from ..ir import graph as g
from ..ir.rebuild import operation_key
from ..plan.traced import Traced
from ..trace import NUMPY_NUMBERS, NumbersOfCall, Trace, Tracer, refusals_reach_the_caller
from ..trace.numpy import traced_conversions
from ..trace.user_code import StepFailed, took_array_of_compiled_code
from ..trace.watched import Site
from .dependence import Dependence
from .environment import Environment
from .kept_functions import calling_replacements
from .parameters import Parameters
from .results import Results
from .signature import Signature
from .substitution import Substitution

_MOST_SITES = 32  # places that are looked for; a function that assigns to arrays of more has all its arrays traced


@dataclass(frozen=True)
class Tracing:
    """A traced function.

    Attributes
    ----------
    traced : Traced
        The graph; its inputs are the leaves of the signature, then the constants.
    results : Results
    constants : list of array
        Arrays that the function created.
    numbers : NumbersOfCall
        The numbers of the call: the graph serves calls with the values that were read, and where the conditions
        turn out the same.
    """

    traced: Traced
    results: Results
    constants: list[Any]
    numbers: NumbersOfCall

    @property
    def depends(self) -> Dependence:
        """The numbers that the graph serves."""
        read = self.numbers.read  # whose values settle conditions on them alone
        conditions = (c for c in self.numbers.conditions.values() if not read.issuperset(c[0].positions))
        return Dependence(tuple(sorted(read)), tuple(conditions))

    def does_the_same(self, other: Tracing) -> bool:
        """Whether another tracing of the same call does what this one does, with other numbers as constants."""
        return self._key_of_call == other._key_of_call

    @property
    def _key_of_call(self) -> list[Hashable]:
        values = self.numbers.values
        created = [(c.shape, str(c.dtype), c.tobytes()) for c in self.constants]
        return [*self.results.key_for(values), *self.traced.axes, *graph_key(self.traced.graph, values), *created]


def trace_function(
    environment: Environment,
    parameters: Parameters,
    values: Sequence[Any],
    signature: Signature,
    strict: bool,
    numbers: NumbersOfCall,
    for_shards: bool = False,
) -> Tracing:
    """Trace a function for the values of its parameters.

    It is traced twice, because random numbers and the time, which later calls would repeat, differ between two traces.

    Parameters
    ----------
    environment : Environment
        Of the function.
    parameters : Parameters
    values : sequence
        The value of each parameter.
    signature : Signature
        Of the call.
    strict : bool
        Whether library steps are errors.
    numbers : NumbersOfCall
        The numbers of the call.
    for_shards : bool
        As of `Trace`.

    Raises
    ------
    TraceError
        An operation cannot be traced, the traces differ, or the function returns nothing.
    """
    name = str(getattr(environment.function, "__name__", type(environment.function).__name__))

    def run(trace: Trace) -> Results:
        return _trace_once(trace, environment, parameters, values, signature, numbers)

    def new_trace(repeats: Trace | None, sites: Container[Site], watches: bool = False) -> Trace:
        return Trace(repeats, True, strict, sites, watches, for_shards)

    first = new_trace(None, ())
    try:
        results = run(first)
    except (TypeError, ValueError, IndexError) as error:
        # The function may have assigned traced values to an array that it created.
        if not first.has_created:
            raise
        first, results = _trace_with_created(run, new_trace, error)
    second = new_trace(first, first.traced_sites, first.watches)
    if _trace_key(first, results) != _trace_key(second, run(second)):
        raise TraceError(
            f"cannot fuse {name}: traced a second time it does something else, as if it drew random numbers or read "
            "the time; make what changes an argument"
        )
    if results.is_none and not first.effects:
        raise TraceError(f"cannot fuse {name}: it returns nothing, nor changes an array; return what it computes")
    axes = tuple(t._axes for t in results.leaves)
    graph, calls = _graph_of(first, results), tuple(first.calls)
    caught = _caught_operation(run, first, lambda: new_trace(None, first.traced_sites, first.watches))
    traced = Traced(name, graph, axes, calls, first.numpy_only, first.viewed, first.at_risk, caught=caught)
    return Tracing(traced, results, first.constants, numbers)


def _caught_operation(run: Callable[[Trace], Results], first: Trace, new_trace: Callable[[], Trace]) -> str:
    """Return the name of an operation whose errors for some values the function catches; an empty string for none.

    Each that code around it may catch raises in a trace of its own, which the error has to leave.
    """
    for position, name in first.catchable.values():
        trace = new_trace()
        trace.fails_at = position
        try:
            run(trace)
        except StepFailed:
            continue
        except Exception:  # of any kind: what the function raises instead, or what cannot be traced of how it goes on
            return name
        return name
    return ""


class _Everywhere(Container[Any]):
    """Every place."""

    def __contains__(self, item: object) -> bool:
        return True


def _trace_with_created(
    run: Callable[[Trace], Results], new_trace: Callable[..., Trace], error: Exception
) -> tuple[Trace, Results]:
    """Trace a function that failed with `error`, with the arrays traced that it creates and assigns to, or with all.

    If all of it fails, the error is that of the first operation that fails with those traced that are assigned to.
    """
    sites: frozenset[Site] = frozenset()
    while len(sites) < _MOST_SITES:
        trace = new_trace(None, sites, True)
        try:
            return trace, run(trace)
        except (TypeError, ValueError, IndexError) as found:
            # A generator of random numbers creates its state where the user's code calls for it: that is no place.
            error = error if not sites or took_array_of_compiled_code(found) else found
            if trace.assigned_sites <= sites:
                break
            sites |= trace.assigned_sites
    trace = new_trace(None, _Everywhere())
    try:
        return trace, run(trace)
    except (TypeError, ValueError, IndexError):
        raise error from None


def _trace_key(trace: Trace, results: Results) -> list[Hashable]:
    """Return a key that two traces share if they did the same."""
    return [*results.key, *(t._axes for t in results.leaves), *graph_key(_graph_of(trace, results))]


def _graph_of(trace: Trace, results: Results) -> g.Graph:
    return g.Graph(trace.inputs, [t._node for t in results.leaves], list(trace.effects.items()))


def _trace_once(
    trace: Trace,
    environment: Environment,
    parameters: Parameters,
    values: Sequence[Any],
    signature: Signature,
    numbers: NumbersOfCall,
) -> Results:
    """Run the function on traced arrays and numbers, which note what it reads of them."""
    traced = [_trace_argument(trace, leaf, name) for leaf, name in zip(signature.leaves, signature.names, strict=True)]
    for i, earlier in signature.duplicates().items():
        traced[i] = traced[earlier]
    static = environment.static
    substitution = Substitution(trace, signature, traced, static, environment.package, numbers)
    arguments = [
        value if name in static else substitution.value(value, name)
        for name, value in zip(parameters.names, values, strict=True)
    ]
    function = substitution.fused_function(environment.function)
    substitution.check_complete()
    kept = environment.kept_functions(signature)
    try:
        with traced_conversions(trace), calling_replacements(kept), refusals_reach_the_caller():
            results = Results(parameters.call(function, arguments), environment.function)
        changed = substitution.changed_container()
    finally:
        trace.end()
        of_classes = substitution.restore()
    changed = changed or of_classes
    if changed is not None:
        raise TraceError(
            f"cannot fuse a change of {changed!r}: a fused function runs as Python code only while it is traced, and "
            "later calls would change nothing; return what it computes, and change the object outside (arrays in "
            "it can be changed in place, as by d['w'][...] = value)"
        )
    return results


def _trace_argument(trace: Trace, leaf: Any, name: str) -> Tracer:
    """Make the tracer of an array argument."""
    try:
        dtype = dtypes.name_of(leaf.dtype)
    except TypeError as error:
        raise TypeError(f"argument {name!r}: {error}") from None
    return trace.argument(name, leaf.shape, dtype, getattr(leaf, "strides", None))


def graph_key(graph: g.Graph, values: Sequence[float] | None = None) -> list[Hashable]:
    """Return a key that two graphs share if they compute the same values from the same arguments.

    With the values of numbers, if they do so in a call with these.
    """
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(graph.roots):
        numbers[node] = len(numbers)
        if node.call is not None and values is not None:
            node = replace(node, call=node.call.for_values(values))
        key = operation_key(node) if values is None or node.op != "const" else _constant_of_call(node, values)
        lines.append((key, tuple(numbers[i] for i in node.inputs)))
    effects = tuple((argument, numbers[n]) for argument, n in graph.effects)
    return [*lines, tuple(numbers[n] for n in graph.outputs), effects]


def _constant_of_call(node: g.Node, values: Sequence[float]) -> Hashable:
    """Return the key of a constant's value in a call.

    An integer has the key of the float that it equals: open ones meet arrays of floats alone, which take both alike. So
    has a NumPy number, which is cast to its dtype.
    """
    value: Any = node.value if node.number is None else node.number.evaluate(values)
    return repr(float(value) if type(value) is int or isinstance(value, (float, *NUMPY_NUMBERS)) else value)
