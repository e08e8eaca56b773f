"""Library steps: calls of NumPy's or CuPy's own functions on whole arrays in memory.

The shapes and dtypes of the results are found by calling NumPy's function while tracing: on sample arrays of zeros
(identity matrices for `np.linalg`) for traced arrays, and on arrays that the function created as they are. Where a
function checks its values and rejects these, samples of several other kinds are tried, and those that it takes have to
give the same shapes and dtypes. `SHAPES` has rules for expensive functions. Functions whose results' shapes depend on
values are refused.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..errors import TraceAttributeError
from ..ir import graph as g
from ..ir.library import (
    Elements,
    LibraryCall,
    NamedFunction,
    Operand,
    display_name,
    filler,
    flatten,
    resolve_function,
)
from .axes import Axes
from .broadcasting import axis_labels
from .failures import changes_midway, raises_for_values
from .folds import in_fold
from .tracer import TraceProtocol, Tracer
from .user_code import fail, user_line
from .value import NamedConstant

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """Shape and dtype of a future result, and whether NumPy's is a view, an array (not a scalar), a Python number."""

    shape: Shape
    dtype: str
    is_view: bool = False
    is_array: bool = False
    is_python: bool = False


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
    template, named = found.replace_arrays(tuple(arguments)), found.replace_arrays(options)
    if trace.strict:
        fail(
            name,
            "it runs through the array library's own function, which strict=True refuses; compute it outside of the "
            "fused function, or leave strict out",
        )
    results = _infer_results(function, template, named, found)
    nodes = tuple(_c_order_node(t) for t in found.tracers)
    keep_dtype = function.startswith(_OF_SPACING)
    wide = [n if keep_dtype or (n.dtype == "float16" and _is_stored(n)) else _widen(n) for n in nodes]
    every: list[Result] = flatten(results)
    shapes = tuple(t.shape for t in found.tracers)
    call = LibraryCall(function, template, named, shapes, tuple(r.shape for r in every), tuple(r.dtype for r in every))
    if raises_for_values(call, [trace.known(t) is not None for t in found.tracers]):
        trace.note_raise(changes_midway(call))
    with trace.call(name, found.tracers) as record:
        tracers = [record(_result_tracer(trace, call, wide, k, r)) for k, r in enumerate(every)]
    if any(r.is_view for r in every):  # the step copies, so that changes in place would not reach the other array
        for t in (*found.tracers, *tracers):
            t._mark_shared()
    replacements = iter(tracers)
    return _map_results(lambda _: next(replacements), results)


def _map_results(function: Callable[[Any], Any], results: Any) -> Any:
    """Return results with a function applied to each, in nested tuples, lists and namedtuples like theirs."""
    if not isinstance(results, (tuple, list)):
        return function(results)
    items = [_map_results(function, r) for r in results]
    cls = type(results)
    if not hasattr(cls, "_fields"):
        return cls(items)
    is_plain = cls.__bases__ == (tuple,) and not cls.__dictoffset__
    return (cls if is_plain else _plain_namedtuple(cls))(*items)


@cache
def _plain_namedtuple(cls: Any) -> Any:
    """Return a namedtuple class for the fields of one of SciPy's result classes, whose objects hold more than these."""
    make: Any = namedtuple
    made = make(cls.__name__, cls._fields)
    if cls.__name__ in _CORRELATIONS:
        made.correlation = made.statistic

    def refuse(self: Any, name: str) -> NoReturn:
        """Raise an error for an attribute that SciPy's object may have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceAttributeError(
            f"cannot fuse .{name} of SciPy's {cls.__name__}: in a fused function it has its fields alone, "
            f"{', '.join(cls._fields)}; call the function outside\n  at {user_line()}"
        )

    made.__getattr__ = refuse
    made.__reduce__ = lambda self: (_unpickled, (cls, tuple(self)))
    return made


_CORRELATIONS = ("PearsonRResult", "SignificanceResult")  # SciPy's classes with a second name for `statistic`


def _unpickled(cls: Any, items: tuple[Any, ...]) -> Any:
    return _plain_namedtuple(cls)(*items)


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


class _Operands:
    """The arrays in the arguments of the function `name`, collected as `tracers`."""

    def __init__(self, name: str, trace: TraceProtocol):
        self.name = name
        self.trace = trace
        self.tracers: list[Tracer] = []
        self.are_selected = False  # whether the number of elements of some depends on a mask

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
        if isinstance(value, NamedConstant):
            return float(value)
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


# Shapes and dtypes of results ---------------------------------------------------------------------------------------


def _infer_results(function: str, arguments: tuple[Any, ...], options: dict[str, Any], found: _Operands) -> Any:
    """Return a `Result` for each result, in NumPy's structure."""
    metadata = [(t.shape, t.dtype) for t in found.tracers]
    rule = SHAPES.get(function)
    known = None if rule is None or found.are_selected else rule(metadata, arguments, options)
    if known is not None:
        shape, dtype = known
        return Result(shape, _name_of(found.name, dtype))
    attempt = partial(_call_on_samples, function, arguments, options, found)
    try:
        zeros = attempt("zeros")
    except _Rejected as rejected:
        return _agreed_results(found.name, attempt, rejected.error)
    if (len(metadata) == 1 or _is_linear_algebra(function)) and not found.are_selected:
        return zeros
    try:
        ones = attempt("ones")
    except _Rejected:
        return zeros  # ones are invalid, as an index beyond the end; the step checks the shape again when it runs
    if ones != zeros:
        fail(found.name, _DEPENDS)
    if any(r.is_python for r in flatten(zeros)):
        return _of_varying_values(attempt, zeros)
    return zeros


def _of_varying_values(attempt: Callable[[str], Any], constant: Any) -> Any:
    """Return the results for samples that vary, if only their kind differs from those for constant samples.

    Some functions return Python numbers for constants alone.
    """
    try:
        found = attempt("random")
    except _Rejected:
        return constant
    plain = [[replace(r, is_python=False, is_array=False) for r in flatten(each)] for each in (found, constant)]
    return found if plain[0] == plain[1] else constant


_DEPENDS = "the shape or dtype of its result depends on values; call it outside of the fused function"


def _agreed_results(name: str, attempt: Callable[[str], Any], error: Exception) -> Any:
    """Return what a function that rejected zeros, with an error, returns for all samples that it takes."""
    errors, found = [error], []
    for kind in _KINDS[1:]:
        try:
            found.append(attempt(kind))
        except _Rejected as rejected:
            errors.append(rejected.error)
    if not found and len({(type(e), str(e)) for e in errors}) == 1:
        reraise(name, error)  # it does not depend on values, and the plain function would raise it too
    if not found:
        fail(
            name,
            "the shapes of its results are found by calling it on sample arrays, and it rejects those of each kind, "
            f"zeros with {type(error).__name__}: {error}; call it outside of the fused function",
        )
    if any(f != found[0] for f in found):
        fail(name, _DEPENDS)
    return found[0]


def _describe(name: str, result: Any, samples: Sequence[Any]) -> Result:
    """Return the `Result` for what a function returned for sample arrays."""
    if not isinstance(result, (np.ndarray, np.generic, bool, int, float)):
        fail(name, f"it returns a {type(result).__name__}, not arrays; call it outside of the fused function")
    array = np.asarray(result)
    is_view = any(np.may_share_memory(array, sample) for sample in samples)
    return Result(
        array.shape, _name_of(name, array.dtype), is_view, isinstance(result, np.ndarray), not hasattr(result, "dtype")
    )


def _name_of(name: str, dtype: Any) -> str:
    """Return the name of the dtype of a function's result, or raise if it is not supported."""
    try:
        return dtypes.name_of(dtype)
    except TypeError as error:
        fail(name, f"its result: {error}")


class _Rejected(Exception):
    """A function raised `error` for sample arrays."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


def _call_on_samples(
    function: str, arguments: tuple[Any, ...], options: dict[str, Any], found: _Operands, kind: str
) -> Any:
    """Call NumPy's function on sample arrays of a kind, and describe what it returns; _Rejected if it raises."""
    samples = [_sample(function, t, kind, number) for number, t in enumerate(found.tracers)]
    numpy = resolve_function(function, np)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = numpy(*filler(arguments)(samples), **filler(options)(samples))
        except Exception as error:
            raise _Rejected(error) from error
    return _map_results(lambda r: _describe(found.name, r, samples), result)


_ERRORS = (
    TypeError,
    ValueError,
    IndexError,
    OverflowError,
    ZeroDivisionError,
    np.exceptions.AxisError,
    np.linalg.LinAlgError,
)


def reraise(name: str, error: Exception) -> NoReturn:
    """Raise an error of NumPy's again, with the name of the function and the user's line."""
    kind = type(error) if type(error) in _ERRORS else ValueError if isinstance(error, ValueError) else TypeError
    raise kind(f"{name}: {error}\n  at {user_line()}") from error


def _is_linear_algebra(function: str) -> bool:
    return function.startswith(("linalg.", "scipy.linalg.", "scipy.stats.multivariate_"))


# Kinds of sample arrays. Zeros are identity matrices for linear algebra; shares sum to one along the first axis.
_KINDS = ("zeros", "ones", "increasing", "shares", "large", "identity", "random")


def _sample(function: str, operand: Tracer, kind: str, number: int) -> Any:
    """Return what stands for the operand of a number, an array or a scalar: its known values, else values of a kind."""
    known = operand._trace.known(operand)
    array = known.copy() if known is not None else _sample_array(function, operand, kind, number)
    return array[()] if operand._is_scalar else array


def _sample_array(function: str, operand: Tracer, kind: str, number: int) -> Any:
    shape = operand.shape
    array = np.full(shape, kind != "zeros", operand.dtype)  # zeros, or ones that other kinds replace
    if kind == "zeros" and _is_linear_algebra(function) and len(shape) >= 2:
        array[...] = np.eye(shape[-2], shape[-1])  # it can be inverted and decomposed
    elif kind == "zeros" and _is_linear_algebra(function) and shape and shape[0]:
        array[0] = 1  # the first column of the identity
    elif kind == "identity" and len(shape) >= 2 and shape[-1] == shape[-2]:
        array[...] = np.eye(shape[-1])
    elif kind == "increasing":
        positions = np.arange(array.size).reshape(shape)
        array[...] = positions % 100 + 1 if array.dtype.kind in "iub" else 1 + positions / max(array.size, 1)
    elif kind == "large":
        array[...] = 100
    elif kind == "shares" and shape and array.dtype.kind not in "iub":
        array[...] = 1 / max(shape[0], 1)
    elif kind == "random":
        random = np.random.default_rng(number)
        low, high = (0, 2) if array.dtype == bool else (1, 4)
        array[...] = random.integers(low, high, shape) if array.dtype.kind in "iub" else random.standard_normal(shape)
    return array


def _linalg_dtype(dtype: Any) -> Any:
    """Return the dtype in which `np.linalg` computes with arrays of a dtype; None if it refuses them."""
    name = np.dtype(dtype).name
    if name in ("float32", "float64", "complex64", "complex128"):
        return np.dtype(name)
    return np.dtype(np.float64) if np.dtype(dtype).kind in "iub" else None


def _like_square_matrix(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.inv and cholesky: those of the operand."""
    shape, dtype = metadata[0]
    dtype = _linalg_dtype(dtype)
    fits = len(metadata) == 1 == len(arguments) and len(shape) >= 2 and shape[-1] == shape[-2]
    return (shape, dtype) if fits and dtype is not None and not options else None


def _of_solve(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.solve for one matrix, with one right-hand side or several."""
    if len(metadata) != 2 or len(arguments) != 2 or options:
        return None
    (matrix, first), (right, second) = metadata
    computed = [_linalg_dtype(d) for d in (first, second)]
    fits = len(matrix) == 2 and matrix[0] == matrix[1] and len(right) in (1, 2) and right[0] == matrix[0]
    return (right, np.result_type(*computed)) if fits and None not in computed else None


def _of_polyfit(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.polyfit where it returns the coefficients alone."""
    degree = options.get("deg", arguments[2] if len(arguments) > 2 else None)
    if not isinstance(degree, int) or len(arguments) > 3 or not set(options) <= {"deg", "w"} or len(arguments) < 2:
        return None
    shape, dtype = metadata[-2 if "w" in options and isinstance(options["w"], Operand) else -1]
    values = arguments[1]
    return None if not isinstance(values, Operand) else ((degree + 1, *shape[1:]), np.result_type(dtype, np.float64))


def _of_det(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.linalg.det: one number for each matrix."""
    known = _like_square_matrix(metadata, arguments, options)
    return None if known is None else (known[0][:-2], known[1])


def _of_bincount(metadata: list[tuple[Shape, Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Shape and dtype of np.bincount of labels below `minlength`; the step checks the shape again when it runs."""
    given = dict(zip(("x", "weights", "minlength"), arguments, strict=False)) | options
    (shape, dtype), length = metadata[0], given.get("minlength")
    fits = len(shape) == 1 and all(s == shape for s, _ in metadata) and isinstance(given.get("x"), Operand)
    casts = np.can_cast(dtype, np.intp) and all(np.can_cast(d, np.float64) for _, d in metadata)
    if not (fits and casts and isinstance(length, (int, np.integer)) and length > 0):
        return None
    counts = given.get("weights") is None or shape == (0,)  # of no labels NumPy reads no weights
    return (int(length),), np.dtype(np.int64 if counts else np.float64)


# Rules for functions whose work grows faster than their operands, or whose shape zeros and ones do not tell: (shape,
# dtype) of the result, from those of the operands, the arguments and the options; None where a rule does not know, and
# NumPy's function is called.
SHAPES: dict[str, Callable[[list[tuple[Shape, Any]], tuple[Any, ...], dict[str, Any]], Any]] = {
    "linalg.inv": _like_square_matrix,
    "linalg.cholesky": _like_square_matrix,
    "linalg.solve": _of_solve,
    "linalg.det": _of_det,
    "polyfit": _of_polyfit,
    "bincount": _of_bincount,
}
