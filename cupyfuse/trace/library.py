"""Library steps: calls of NumPy's or CuPy's own functions on whole arrays in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..ir import graph as g
from ..ir.library import (
    ORDER_STATISTICS,
    SET_PART,
    VIEW,
    Elements,
    LibraryCall,
    NamedFunction,
    Operand,
    display_name,
    flatten,
    of_linear_algebra,
    replace_numbers,
)
from ..ir.numbers import Number
from .axes import Axes
from .broadcasting import axis_labels
from .failures import changes_midway, raises_for_values
from .folds import in_fold
from .library_results import FutureCall, Result, depend_on_numbers, infer_results
from .library_shapes import SHAPES
from .number import TracedNumber
from .result_structures import map_results
from .tracer import TraceProtocol, Tracer
from .user_code import fail
from .value import NamedConstant

_VALUES = (bool, int, float, complex, str, slice, type, np.dtype, np.generic, type(None), type(Ellipsis))
_CONSTANTS = (*_VALUES, NamedFunction, type(np._NoValue))


def call_library(function: str, arguments: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Add a library step to the graph, and return its results in NumPy's structure.

    Parameters
    ----------
    function : str
        Its name in a `LibraryCall`, as "sort", "linalg.inv" or "scipy.fft.fft".
    arguments : sequence
        Traced arrays, constants, and nested lists and tuples of these.
    options : dict, optional

    Raises
    ------
    TraceError
        The trace is strict, an argument is neither an array nor a constant, or a result cannot be traced.
    """
    name, options = display_name(function), options or {}
    first = next(tracers_in((tuple(arguments), options)), None)
    if first is None:
        fail(name, "none of its operands is an array")
    trace = first._trace
    found = _Operands(name, trace)
    given = found.replace_arrays(found.take_numbers(function, tuple(arguments), options))
    if trace.strict:
        fail(
            name,
            "it runs through the array library's own function, which strict=True refuses; compute it outside of the "
            "fused function, or leave strict out",
        )
    future = partial(FutureCall, function, operands=found.tracers, are_selected=found.are_selected)
    results = infer_results(future(*replace_numbers(given, found.numbers.__getitem__)))
    others = [replace_numbers(given, partial(_other, found.numbers, k)) for k in range(2) if found.numbers]
    if depend_on_numbers(results, [future(*other) for other in others]):
        given = replace_numbers(given, lambda number: number.read())
    template, named = given
    nodes = tuple(_c_order_node(t) for t in found.tracers)
    keep_dtype = function.startswith(_OF_SPACING) or function == VIEW
    wide = [n if keep_dtype or (n.dtype == "float16" and _is_stored(n)) else _widen(n) for n in nodes]
    every: list[Result] = flatten(results)
    shapes = tuple(t.shape for t in found.tracers)
    call = LibraryCall(function, template, named, shapes, tuple(r.shape for r in every), tuple(r.dtype for r in every))
    known = [*(trace.known(t) is not None for t in found.tracers), *(False for _ in call.numbers)]
    if raises_for_values(call, known):
        trace.note_raise(name, changes_midway(call))
    with trace.call(name, found.tracers) as record:
        tracers = [record(_result_tracer(trace, call, wide, k, r)) for k, r in enumerate(every)]
    # The step copies, so that changes in place would not reach the other array; what follows makes views of these.
    if any(r.is_view for r in every) and function not in (*SET_PART, "getitem"):
        for t in (*found.tracers, *tracers):
            t._mark_shared()
    replacements = iter(tracers)
    return map_results(lambda _: next(replacements), results)


def tracers_in(value: Any) -> Iterator[Tracer]:
    """Yield the traced arrays in nested arguments or results."""
    if isinstance(value, Tracer):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tracers_in(item)
    elif isinstance(value, Elements):
        yield from (value.array, value.mask)


def holds_tracers(value: Any) -> bool:
    """Whether a value is a list or tuple that holds traced arrays, perhaps in lists and tuples of its own."""
    return type(value) in (list, tuple) and next(tracers_in(value), None) is not None


def _other(values: dict[Number, Any], k: int, number: Number) -> Any:
    """Return another value of a number, on which no shape may depend: above the one in the traced call, or nearer 0."""
    return values[number] / 2 if k else values[number] + 1


class _Operands:
    """The arrays in the arguments of the function `name`, collected as `tracers`, and the numbers that calls bring."""

    def __init__(self, name: str, trace: TraceProtocol):
        self.name = name
        self.trace = trace
        self.tracers: list[Tracer] = []
        self.numbers: dict[Number, Any] = {}  # with their values in the traced call
        self.are_selected = False  # whether the number of elements of some depends on a mask

    def take_numbers(self, function: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return arguments and options in which what a call brings is a `Number` where each call may bring its own.

        These are floats that are arguments by themselves. Others may be lengths, axes and positions, or are in lists,
        of which CuPy's functions take few; by quantiles and the tolerances of `linalg` algorithms are chosen.
        """
        if function in SHAPES or function in ORDER_STATISTICS or of_linear_algebra(function):
            return arguments, options

        def number(value: Any) -> Any:
            if not isinstance(value, TracedNumber) or not isinstance(value, (float, np.floating)):
                return value
            self.numbers[value.number] = value.value
            return value.number

        return tuple(map(number, arguments)), {label: number(value) for label, value in options.items()}

    def replace_arrays(self, value: Any) -> Any:
        """Return arguments with an `Operand` in the place of each array, which becomes one of the tracers."""
        if isinstance(value, Tracer):
            self.tracers.append(self.trace.tracer_of(value))
            return Operand(len(self.tracers) - 1)
        if isinstance(value, Elements):
            self.are_selected = True
            return Elements(self.replace_arrays(value.array), self.replace_arrays(value.mask), value.axis)
        if isinstance(value, (tuple, list)):
            return type(value)([self.replace_arrays(v) for v in value])
        if isinstance(value, dict):
            return {k: self.replace_arrays(v) for k, v in value.items()}
        if isinstance(value, Number):
            return value
        if isinstance(value, TracedNumber):
            return value.read()
        if isinstance(value, NamedConstant):
            return float(value)
        if isinstance(value, range):
            return list(value)
        if isinstance(value, np.ndarray):
            return self.replace_arrays(self.trace.tracer_of(value)) if value.ndim else value[()]
        if not isinstance(value, _CONSTANTS):
            fail(self.name, f"its argument {value!r} is neither an array nor a constant; pass plain Python values")
        return value


def _c_order_node(x: Tracer) -> g.Node:
    """Return a node whose elements, row by row, are those of the array in C order."""
    if x.ndim > 2 or not x._axes.is_matrix_like:
        node = in_fold(x, Axes.by_rows(x.shape))
    else:
        transposed = list(axis_labels(x, x.ndim).values()) == [1, 0]
        node = g.transpose(x._node) if transposed else x._node
    return g.cast(node, node.dtype) if node.op == "const" else node


def _widen(node: g.Node) -> g.Node:
    """Cast 16-bit floats to float32, in which kernels compute them; CuPy has no bfloat16."""
    return g.cast(node, "float32") if node.dtype in ("float16", "bfloat16") else node


def _is_stored(node: g.Node) -> bool:
    """Whether a value is an argument or a copy of elements of one, which is in memory in its own dtype."""
    while node.op in (*g.VIEWS, "copy", "strided"):
        node = node.inputs[0]
    return node.op == "input"


# Functions of the distance between floats, whose results depend on the dtype.
_OF_SPACING = ("nextafter", "spacing")


def _result_tracer(
    trace: TraceProtocol, call: LibraryCall, inputs: Sequence[g.Node], number: int, result: Result
) -> Tracer:
    """Make the tracer of a step's result of some number, which the step writes in C order."""
    axes = Axes.by_rows(result.shape)
    node = g.Node("library", tuple(inputs), axes.node_shape, result.dtype, call=call, result=number)
    tracer = trace.array(node, axes)
    tracer._is_array, tracer._is_python = result.is_array, result.is_python
    return tracer
