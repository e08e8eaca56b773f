"""Library steps: calls of functions that run through NumPy's or CuPy's own code, on whole arrays in memory.

Shapes and dtypes of the results are NumPy's own for arrays of zeros (identity matrices for `np.linalg`), and for arrays
that the function made as they are, asked once while tracing; `SHAPES` answers for the expensive functions. Functions
whose shapes depend on values are refused.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.library import LibraryCall, Operand, display_name, replace_operands, resolve_function
from .axes import Axes
from .broadcasting import axis_labels
from .folds import in_fold
from .tracer import TraceProtocol, Tracer
from .user_code import fail, user_line
from .value import ScalarArgument

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """Shape and dtype of a result, before it is computed; whether NumPy's is a view, an array, a Python number."""

    shape: Shape
    dtype: str
    is_view: bool = False
    is_array: bool = False
    is_python: bool = False


_CONSTANTS = (bool, int, float, complex, str, slice, type, np.dtype, np.generic, type(None), type(Ellipsis))


def call_library(function: str, arguments: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Add a call of a function, by its name in a `LibraryCall`, to the graph; returns its results in NumPy's structure.

    Raises
    ------
    TraceError
        The trace is strict, an argument is no constant, or a result cannot be traced.
    """
    name, options = display_name(function), options or {}
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
    own = function.startswith(_OF_SPACING)
    wide = [n if own or (n.dtype == "float16" and _is_stored(n)) else _widened(n) for n in nodes]
    every = [results] if isinstance(results, Result) else list(results)
    shapes = tuple(t.shape for t in found.tracers)
    call = LibraryCall(function, template, named, shapes, tuple(r.shape for r in every), tuple(r.dtype for r in every))
    with trace.call(name, found.tracers) as done:
        made = [done(_result(trace, call, wide, k, r.shape, r.dtype)) for k, r in enumerate(every)]
    for t, r in zip(made, every, strict=True):
        t._is_array, t._is_python = r.is_array, r.is_python
    if any(r.is_view for r in every):  # ours is a copy: neither may change from here on
        for t in (*found.tracers, *made):
            t._share()
    if isinstance(results, Result):
        return made[0]
    return _with_fields(type(results), made) if hasattr(results, "_fields") else type(results)(made)


def _with_fields(cls: type, values: list[Any]) -> Any:
    """Make a named tuple; of SciPy's result classes, which hold more than their fields, a plain one of their name."""
    fields: tuple[str, ...] = cls._fields  # type: ignore[attr-defined]
    if cls.__new__ is not tuple.__new__ and cls.__module__.startswith("scipy."):
        return namedtuple(cls.__name__, fields)(*values)
    return cls(*values)


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


def _widened(node: g.Node) -> g.Node:
    """Return 16-bit floats as kernels compute with them; CuPy has no bfloat16."""
    return g.cast(node, "float32") if node.dtype in ("float16", "bfloat16") else node


def _is_stored(node: g.Node) -> bool:
    """Whether a value is one that is in memory before the call, in its own dtype."""
    while node.op in (*g.VIEWS, "copy", "strided"):
        node = node.inputs[0]
    return node.op == "input"


# The results of these depend on the dtype that they compute in.
_OF_SPACING = ("nextafter", "spacing")


def _result(
    trace: TraceProtocol, call: LibraryCall, inputs: Sequence[g.Node], number: int, shape: Shape, dtype: str
) -> Tracer:
    """Make a tracer of one result, which the step writes in C order."""
    axes = Axes.by_rows(shape)
    return trace.array(g.Node("library", tuple(inputs), axes.node_shape, dtype, call=call, result=number), axes)


# Shapes and dtypes of results ---------------------------------------------------------------------------------------


def _results(function: str, arguments: tuple[Any, ...], options: dict[str, Any], found: _Operands) -> Any:
    """Find shape and dtype of each result, in NumPy's structure."""
    metadata = [(t.shape, t.dtype) for t in found.tracers]
    rule = SHAPES.get(function)
    known = None if rule is None else rule(metadata, arguments, options)
    if known is not None:
        shape, dtype = known
        return Result(shape, _name_of(found.name, dtype))
    zeros = _tried(function, arguments, options, found, 0)
    if len(metadata) == 1 or _is_linear_algebra(function):
        return zeros
    try:
        ones = _tried(function, arguments, options, found, 1)
    except (TypeError, ValueError, IndexError):
        return zeros  # such as an index of 1 beyond the end: the shape is checked again when the step runs
    if ones != zeros:
        fail(found.name, "the shape of its result depends on values; call it outside of the fused function")
    return zeros


def _described(name: str, result: Any, samples: Sequence[Any]) -> Result:
    if not isinstance(result, (np.ndarray, np.generic, bool, int, float)):
        fail(name, f"it returns a {type(result).__name__}, not arrays; call it outside of the fused function")
    array = np.asarray(result)
    is_view = any(np.may_share_memory(array, sample) for sample in samples)
    return Result(
        array.shape, _name_of(name, array.dtype), is_view, isinstance(result, np.ndarray), not hasattr(result, "dtype")
    )


def _name_of(name: str, dtype: Any) -> str:
    try:
        return dtypes.name_of(dtype)
    except TypeError as error:
        fail(name, f"its result: {error}")


def _tried(function: str, arguments: tuple[Any, ...], options: dict[str, Any], found: _Operands, value: int) -> Any:
    """Call the function on arrays of these shapes; its errors name the user's line."""
    name = found.name
    samples = [_sample(function, t, value) for t in found.tracers]
    numpy = resolve_function(function, np)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = numpy(*replace_operands(arguments, samples), **replace_operands(options, samples))
        except Exception as error:
            reraise(name, error)
    if hasattr(result, "_fields"):
        return _with_fields(type(result), [_described(name, r, samples) for r in result])
    if isinstance(result, (tuple, list)):
        return type(result)([_described(name, r, samples) for r in result])
    return _described(name, result, samples)


_ERRORS = (TypeError, ValueError, IndexError, ZeroDivisionError, np.exceptions.AxisError, np.linalg.LinAlgError)


def reraise(name: str, error: Exception) -> NoReturn:
    """Raise NumPy's error with the user's line."""
    kind = type(error) if type(error) in _ERRORS else ValueError if isinstance(error, ValueError) else TypeError
    raise kind(f"{name}: {error}\n  at {user_line()}") from error


def _is_linear_algebra(function: str) -> bool:
    return function.startswith(("linalg.", "scipy.linalg.", "scipy.stats.multivariate_"))


def _sample(function: str, operand: Tracer, value: int) -> Any:
    known = operand._trace.known(operand)
    if known is not None:
        return known.copy()
    shape = operand.shape
    array = np.full(shape, value, operand.dtype)
    if _is_linear_algebra(function) and len(shape) >= 2:
        array[...] = np.eye(shape[-2], shape[-1])  # which can be inverted and decomposed
    elif _is_linear_algebra(function) and shape and shape[0]:
        array[0] = 1  # the first column of the identity
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


def _polynomial(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """np.polyfit without more results than the coefficients."""
    degree = options.get("deg", arguments[2] if len(arguments) > 2 else None)
    if not isinstance(degree, int) or len(arguments) > 3 or not set(options) <= {"deg", "w"} or len(arguments) < 2:
        return None
    shape, dtype = metadata[-2 if "w" in options and isinstance(options["w"], Operand) else -1]
    values = arguments[1]
    return None if not isinstance(values, Operand) else ((degree + 1, *shape[1:]), np.result_type(dtype, np.float64))


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
    "polyfit": _polynomial,
}
