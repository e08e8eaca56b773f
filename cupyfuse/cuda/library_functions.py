"""NumPy's and SciPy's functions on CuPy's arrays, where CuPy lacks them, takes no lists, or computes something else.

Each function takes the array library as its first argument, `xp`; one that writes to its operand returns it, or another
array where it computes in another dtype. CuPy's `ufunc.at` are atomic operations, which exist for few dtypes, ignore
NaN, and round float64 to float32 in extremes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from ..ir.library import LibraryCall, on_copy, resolve_function, writing_call
from . import quantiles, sampling, sorting
from .arguments import convert_lists, rename
from .sorting import as_ordered_ints, from_ordered_ints


def resolve(call: LibraryCall, xp: Any, in_place: bool = False) -> Callable[..., Any]:
    """Return the function of a call for arrays of CuPy, given as `xp`; AttributeError if there is none.

    With `in_place` it may write to its first operand.
    """
    own = _OWN.get(call.function)
    if own is None:
        return call.resolve_in(xp, in_place)
    function = partial(own, xp)
    return on_copy(function) if call.writes and not in_place else function


def arguments_of(call: LibraryCall, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, positional and by keyword, as the function that runs it takes them."""
    positional, options = convert_lists(call, xp)
    return (positional, options) if call.function in _OWN else rename(call, xp, positional, options)


# Assignment and scatters --------------------------------------------------------------------------------------------


def _setitem(xp: Any, array: Any, index: Any, value: Any) -> Any:
    """Assign to elements; of several values for one element the last one stays, as in NumPy."""
    value = xp.asarray(value) if isinstance(value, (list, tuple)) else value
    if getattr(value, "ndim", 0) and any(map(_may_repeat, index if isinstance(index, tuple) else (index,))):
        value = _last_values(xp, array.shape, index, value)
    array[index] = value
    return array


def _may_repeat(index: Any) -> bool:
    """Whether an index is an array or a list of integers, which may name elements twice."""
    return isinstance(index, list) or (getattr(index, "ndim", 0) > 0 and index.dtype.kind != "b")


def _last_values(xp: Any, shape: tuple[int, ...], index: Any, value: Any) -> Any:
    """Return the values to assign at an index, where equal elements get equal values: the last of them."""
    size = math.prod(shape)
    elements = xp.arange(size).reshape(shape)[index]
    value = xp.broadcast_to(value.reshape(value.shape[max(0, value.ndim - elements.ndim) :]), elements.shape)
    last = xp.zeros(size, elements.dtype)
    xp.maximum.at(last, elements.ravel(), xp.arange(elements.size))
    return value.ravel()[last[elements]]


def _add_at(xp: Any, array: Any, index: Any, values: Any) -> Any:
    """Compute `numpy.add.at` in the dtypes of atomic additions."""
    values = _in_dtype(xp, values, array.dtype)
    if array.dtype.kind == "f":
        xp.add.at(array, index, values)
        return array
    if array.dtype.kind == "b":
        return _extreme_at("maximum", xp, array, index, values)
    changed = array.astype(_atomic_dtype(array.dtype), copy=False)
    if array.dtype.kind == "c":
        xp.add.at(changed.real, index, values.real)
        xp.add.at(changed.imag, index, values.imag)
    else:
        xp.add.at(changed, index, values.astype(changed.dtype, copy=False))
    return changed.astype(array.dtype, copy=False)


def _subtract_at(xp: Any, array: Any, index: Any, values: Any) -> Any:
    """Compute `numpy.subtract.at`: adding the negated values is exact, and wraps around as integers do."""
    return _add_at(xp, array, index, -_in_dtype(xp, values, array.dtype))


def _extreme_at(name: str, xp: Any, array: Any, index: Any, values: Any) -> Any:
    """Compute `numpy.maximum.at` or `minimum.at`; floats as integers of the same order."""
    values = _in_dtype(xp, values, array.dtype)
    if array.dtype.kind != "f":
        changed = array.astype(_atomic_dtype(array.dtype), copy=False)
        getattr(xp, name).at(changed, index, values.astype(changed.dtype, copy=False))
        return changed.astype(array.dtype, copy=False)
    wide = "float32" if array.dtype.itemsize < 4 else array.dtype
    changed, values = (as_ordered_ints(xp, x.astype(wide, copy=False), name == "minimum") for x in (array, values))
    getattr(xp, name).at(changed, index, values)
    return from_ordered_ints(xp, changed, wide).astype(array.dtype, copy=False)


def _in_dtype(xp: Any, values: Any, dtype: Any) -> Any:
    """Return values as an array of a dtype, which they may be: no call of the library then."""
    if isinstance(values, xp.ndarray) and values.dtype == dtype:
        return values
    return xp.asarray(values).astype(dtype, copy=False)


def _atomic_dtype(dtype: Any) -> Any:
    """Return the dtype in which elements are added and compared: int32 for bools and integers of 8 and 16 bits."""
    return "int32" if dtype.kind in "biu" and dtype.itemsize < 4 else dtype


# The normal distribution --------------------------------------------------------------------------------------------


def _normal(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `scipy.stats.norm`; `compute(special, xp, x, loc, scale)` is for positive scales."""

    def method(xp: Any, x: Any, loc: Any = 0, scale: Any = 1) -> Any:
        result = compute(partial(_special, xp), xp, x, loc, scale)
        if isinstance(scale, (int, float)) and scale > 0:
            return result
        return xp.where(xp.asarray(scale) > 0, result, math.nan)

    return method


def _special(xp: Any, name: str, x: Any) -> Any:
    """Call a function of `scipy.special`, or of CuPy's counterpart."""
    return resolve_function(f"scipy.special.{name}", xp)(x)


def _exponent(xp: Any, x: Any, loc: Any, scale: Any) -> Any:
    return -xp.square((x - loc) / scale) / 2


_NORMAL: dict[str, Callable[..., Any]] = {
    "cdf": lambda special, xp, x, loc, scale: special("ndtr", (x - loc) / scale),
    "sf": lambda special, xp, x, loc, scale: special("ndtr", (loc - x) / scale),
    "logcdf": lambda special, xp, x, loc, scale: special("log_ndtr", (x - loc) / scale),
    "logsf": lambda special, xp, x, loc, scale: special("log_ndtr", (loc - x) / scale),
    "ppf": lambda special, xp, x, loc, scale: loc + scale * special("ndtri", x),
    "isf": lambda special, xp, x, loc, scale: loc - scale * special("ndtri", x),
    "pdf": lambda special, xp, x, loc, scale: xp.exp(_exponent(xp, x, loc, scale)) / (math.sqrt(2 * math.pi) * scale),
    "logpdf": lambda special, xp, x, loc, scale: (
        _exponent(xp, x, loc, scale) - math.log(2 * math.pi) / 2 - xp.log(scale)
    ),
}

# Functions of `numpy.linalg` that CuPy lacks ------------------------------------------------------------------------


_LINALG: dict[str, Callable[..., Any]] = {
    "diagonal": lambda xp, x, offset=0: xp.diagonal(x, offset, -2, -1),
    "matrix_norm": lambda xp, x, ord="fro", keepdims=False: xp.linalg.norm(x, ord, (-2, -1), keepdims),
    "outer": lambda xp, x1, x2: xp.outer(x1, x2),
    "svdvals": lambda xp, x: xp.linalg.svd(x, compute_uv=False),
    "tensordot": lambda xp, x1, x2, axes=2: xp.tensordot(x1, x2, axes),
    "trace": lambda xp, x, offset=0, dtype=None: xp.trace(x, offset, -2, -1, dtype),
    "vecdot": lambda xp, x1, x2, axis=-1: (xp.conj(x1) * x2).sum(axis),
}

# Functions that are computed here, by their names in a `LibraryCall`.
_OWN: dict[str, Callable[..., Any]] = {
    "setitem": _setitem,
    **{name: getattr(sorting, name) for name in sorting.FUNCTIONS},
    **{name: getattr(sampling, name) for name in sampling.FUNCTIONS},
    "quantile": quantiles.quantile,
    "nanquantile": quantiles.nanquantile,
    "percentile": quantiles.of_percents(quantiles.quantile),
    "nanpercentile": quantiles.of_percents(quantiles.nanquantile),
    "median": quantiles.median,
    "nanmedian": quantiles.nanmedian,
    writing_call("add.at"): _add_at,
    writing_call("subtract.at"): _subtract_at,
    writing_call("maximum.at"): partial(_extreme_at, "maximum"),
    writing_call("minimum.at"): partial(_extreme_at, "minimum"),
    **{f"linalg.{name}": function for name, function in _LINALG.items()},
    **{f"scipy.stats.norm.{name}": _normal(compute) for name, compute in _NORMAL.items()},
}
