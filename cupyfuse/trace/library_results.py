"""What a library function will return: shapes and dtypes, found by calling NumPy's function while tracing.

The function is called on sample arrays of zeros (identity matrices for `np.linalg`) for traced arrays, and on arrays
that the user's function created as they are. Where a function checks its values and rejects these, samples of several
other kinds are tried, and those that it takes have to give the same shapes and dtypes. Functions whose results' shapes
depend on values are refused.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes
from ..ir.library import display_name, filler, flatten, of_linear_algebra, resolve_function
from .library_shapes import SHAPES, Shape
from .result_structures import map_results
from .tracer import Tracer
from .user_code import fail, reraise


@dataclass(frozen=True)
class Result:
    """Shape and dtype of a future result, and whether NumPy's is a view, an array (not a scalar), a Python number."""

    shape: Shape
    dtype: str
    is_view: bool = False
    is_array: bool = False
    is_python: bool = False


@dataclass(frozen=True)
class FutureCall:
    """A call of a library function on arrays that have no values yet.

    Attributes
    ----------
    function, arguments, options : str, tuple, dict
        As those of a `LibraryCall`.
    operands : list of Tracer
    are_selected : bool
        Whether the number of elements of some operands depends on a mask.
    """

    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    operands: list[Tracer]
    are_selected: bool

    @property
    def name(self) -> str:
        return display_name(self.function)


def infer_results(call: FutureCall) -> Any:
    """Return a `Result` for each result, in NumPy's structure."""
    metadata = [(t.shape, t.dtype) for t in call.operands]
    rule = SHAPES.get(call.function)
    known = None if rule is None or call.are_selected else rule(metadata, call.arguments, call.options)
    if known is not None:
        shape, dtype = known
        return Result(shape, _name_of(call.name, dtype))
    attempt = partial(_call_on_samples, call)
    try:
        zeros = attempt("zeros")
    except _Rejected as rejected:
        return _agreed_results(call.name, attempt, rejected.error)
    if (len(metadata) == 1 or of_linear_algebra(call.function)) and not call.are_selected:
        return zeros
    try:
        ones = attempt("ones")
    except _Rejected:
        return zeros  # ones are invalid, as an index beyond the end; the step checks the shape again when it runs
    if ones != zeros:
        fail(call.name, _DEPENDS)
    if any(r.is_python for r in flatten(zeros)):
        return _of_varying_values(attempt, zeros)
    return zeros


def depend_on_numbers(results: Any, others: Sequence[FutureCall]) -> bool:
    """Whether the shapes or dtypes of results are others in calls with other numbers, or none of these shows it."""
    expected, found = [(r.shape, r.dtype) for r in flatten(results)], []
    for call in others:
        with contextlib.suppress(_Rejected):
            found.append([(r.shape, r.dtype) for r in flatten(_call_on_samples(call, "zeros"))])
    return bool(others) and (not found or any(f != expected for f in found))


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


def _call_on_samples(call: FutureCall, kind: str) -> Any:
    """Call NumPy's function on sample arrays of a kind, and describe what it returns; _Rejected if it raises."""
    samples = [_sample(call.function, t, kind, number) for number, t in enumerate(call.operands)]
    numpy = resolve_function(call.function, np)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = numpy(*filler(call.arguments)(samples), **filler(call.options)(samples))
        except Exception as error:
            raise _Rejected(error) from error
    return map_results(lambda r: _describe(call.name, r, samples), result)


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
    if kind == "zeros" and of_linear_algebra(function) and len(shape) >= 2:
        array[...] = np.eye(shape[-2], shape[-1])  # it can be inverted and decomposed
    elif kind == "zeros" and of_linear_algebra(function) and shape and shape[0]:
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
