"""Library steps: calls of functions that run through NumPy's or CuPy's own code, on whole arrays in memory.

Shapes and dtypes of the results are NumPy's own for arrays of zeros (identity matrices for `np.linalg`), asked once
while tracing; `SHAPES` answers for the expensive functions. Functions whose shapes depend on values are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.library import LibraryCall, Operand, replace_operands
from .axes import Axes
from .broadcasting import axis_labels
from .folds import in_fold
from .tracer import TraceProtocol, Tracer
from .user_code import fail, user_line
from .value import ScalarArgument

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """Shape and dtype of a result, before it is computed."""

    shape: Shape
    dtype: str


_CONSTANTS = (bool, int, float, complex, str, slice, type, np.dtype, np.generic, type(None), type(Ellipsis))


def call_library(function: str, arguments: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Add a call of `np.<function>` to the graph; returns its results in NumPy's structure.

    Raises
    ------
    TraceError
        The trace is strict, an argument is no constant, or a result cannot be traced.
    """
    name, options = f"np.{function}", options or {}
    first = next(tracers_in((tuple(arguments), options)), None)
    if first is None:
        fail(name, "none of its operands is an array")
    trace = first._trace
    found = _Operands(name, trace)
    template, named = found.constants(tuple(arguments)), found.constants(options)
    if trace.strict:
        fail(
            name,
            "it runs through the array library's own function, which strict=True refuses; compute it outside of the "
            "fused function, or leave strict out",
        )
    results = _results(function, template, named, found)
    nodes = tuple(_in_memory(t) for t in found.tracers)
    narrow = [g.cast(n, "float32") if n.dtype == "bfloat16" else n for n in nodes]  # CuPy has no bfloat16
    every = [results] if isinstance(results, Result) else list(results)
    shapes = tuple(t.shape for t in found.tracers)
    call = LibraryCall(function, template, named, shapes, tuple(r.shape for r in every))
    with trace.call(name, found.tracers) as done:
        made = [done(_result(trace, call, narrow, k, r.shape, r.dtype)) for k, r in enumerate(every)]
    if isinstance(results, Result):
        return made[0]
    return type(results)(*made) if hasattr(results, "_fields") else type(results)(made)


def tracers_in(value: Any) -> Iterator[Tracer]:
    """Yield the traced arrays in nested arguments or results."""
    if isinstance(value, Tracer):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tracers_in(item)


class _Operands:
    """The arrays in the arguments of a call."""

    def __init__(self, name: str, trace: TraceProtocol):
        self.name = name
        self.trace = trace
        self.tracers: list[Tracer] = []

    def constants(self, value: Any) -> Any:
        """Return arguments with operands in the places of arrays."""
        if isinstance(value, Tracer):
            self.tracers.append(self.trace.tracer_of(value))
            return Operand(len(self.tracers) - 1)
        if isinstance(value, (tuple, list)):
            return type(value)([self.constants(v) for v in value])
        if isinstance(value, dict):
            return {k: self.constants(v) for k, v in value.items()}
        if isinstance(value, ScalarArgument):
            return float(value)
        if isinstance(value, np.ndarray) and value.ndim:
            return self.constants(self.trace.tracer_of(value))
        if isinstance(value, np.ndarray) and not value.ndim:
            return value[()]
        if not isinstance(value, _CONSTANTS):
            fail(self.name, f"its argument {value!r} is neither an array nor a constant; pass plain Python values")
        return value


def _in_memory(x: Tracer) -> g.Node:
    """Return a node whose elements, row by row, are those of the user's array."""
    if x.ndim > 2 or not x._axes.single:
        return in_fold(x, Axes.by_rows(x.shape))
    turned = list(axis_labels(x, x.ndim).values()) == [1, 0]
    node = g.transpose(x._node) if turned else x._node
    return g.cast(node, node.dtype) if node.op == "const" else node


def _result(
    trace: TraceProtocol, call: LibraryCall, inputs: Sequence[g.Node], number: int, shape: Shape, dtype: str
) -> Tracer:
    """Make a tracer of one result, which the step writes in C order."""
    axes = Axes.by_rows(shape)
    node = g.library(call, inputs, number, axes.node_shape, "float32" if dtype == "bfloat16" else dtype)
    return trace.array(g.cast(node, dtype), axes)


# Shapes and dtypes of results ---------------------------------------------------------------------------------------


def _results(function: str, arguments: tuple[Any, ...], options: dict[str, Any], found: _Operands) -> Any:
    """Find shape and dtype of each result, in NumPy's structure."""
    metadata = [(t.shape, t.dtype) for t in found.tracers]
    rule = SHAPES.get(function)
    known = None if rule is None else rule(metadata, arguments, options)
    if known is not None:
        shape, dtype = known
        return Result(shape, _name_of(found.name, dtype))
    zeros = _tried(found.name, function, arguments, options, metadata, 0)
    if len(metadata) == 1 or function.startswith("linalg."):
        return zeros
    try:
        ones = _tried(found.name, function, arguments, options, metadata, 1)
    except (TypeError, ValueError, IndexError):
        return zeros  # such as an index of 1 beyond the end: the shape is checked again when the step runs
    if ones != zeros:
        fail(found.name, "the shape of its result depends on values; call it outside of the fused function")
    return zeros


def _described(name: str, result: Any) -> Result:
    if not isinstance(result, (np.ndarray, np.generic, bool, int, float)):
        fail(name, f"it returns a {type(result).__name__}, not arrays; call it outside of the fused function")
    array = np.asarray(result)
    return Result(array.shape, _name_of(name, array.dtype))


def _name_of(name: str, dtype: Any) -> str:
    try:
        return dtypes.name_of(dtype)
    except TypeError as error:
        fail(name, f"its result: {error}")


def _tried(
    name: str,
    function: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    metadata: list[tuple[Shape, Any]],
    value: int,
) -> Any:
    """Call NumPy's function on arrays of these shapes; its errors name the user's line."""
    samples = [_sample(function, shape, dtype, value) for shape, dtype in metadata]
    numpy: Callable[..., Any] = attrgetter(function)(np)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = numpy(*replace_operands(arguments, samples), **replace_operands(options, samples))
        except Exception as error:
            _reraise(name, error)
    if hasattr(result, "_fields"):
        return type(result)(*(_described(name, r) for r in result))
    if isinstance(result, (tuple, list)):
        return type(result)([_described(name, r) for r in result])
    return _described(name, result)


_ERRORS = (TypeError, ValueError, IndexError, ZeroDivisionError, np.exceptions.AxisError, np.linalg.LinAlgError)


def _reraise(name: str, error: Exception) -> NoReturn:
    kind = type(error) if type(error) in _ERRORS else ValueError if isinstance(error, ValueError) else TypeError
    raise kind(f"{name}: {error}\n  at {user_line()}") from error


def _sample(function: str, shape: Shape, dtype: Any, value: int) -> Any:
    array = np.full(shape, value, dtype)
    if function.startswith("linalg.") and len(shape) >= 2:
        array[...] = np.eye(shape[-2], shape[-1])  # which can be inverted and decomposed
    return array


def _decomposed(dtype: Any) -> Any:
    """Return the dtype in which `np.linalg` works on arrays of another one; None where it refuses."""
    name = np.dtype(dtype).name
    if name in ("float32", "float64", "complex64", "complex128"):
        return np.dtype(name)
    return np.dtype(np.float64) if np.dtype(dtype).kind in "iub" else None


def _square(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """np.linalg.inv: the shape of its operand."""
    shape, dtype = metadata[0]
    dtype = _decomposed(dtype)
    fits = len(metadata) == 1 == len(arguments) and len(shape) >= 2 and shape[-1] == shape[-2]
    return (shape, dtype) if fits and dtype is not None and not options else None


def _solution(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """np.linalg.solve of one system, with one right side or several."""
    if len(metadata) != 2 or len(arguments) != 2 or options:
        return None
    (matrix, first), (right, second) = metadata
    dtypes_of = [_decomposed(d) for d in (first, second)]
    fits = len(matrix) == 2 and matrix[0] == matrix[1] and len(right) in (1, 2) and right[0] == matrix[0]
    return (right, np.result_type(*dtypes_of)) if fits and None not in dtypes_of else None


def _scalar(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """np.linalg.det: one number for each matrix."""
    whole = _square(metadata, arguments, options)
    return None if whole is None else (whole[0][:-2], whole[1])


# Functions whose work grows faster than their operands; None where a rule does not know, and NumPy is asked.
SHAPES: dict[str, Callable[[list[tuple[Shape, Any]], tuple[Any, ...], dict[str, Any]], Any]] = {
    "linalg.inv": _square,
    "linalg.cholesky": _square,
    "linalg.solve": _solution,
    "linalg.det": _scalar,
}
