"""Quantiles of CuPy's arrays as NumPy has them.

CuPy 14's quantiles are numbers where there is NaN, read beyond a row at its end, and know five methods; its
`nanmedian` takes NaN for the largest finite number, so that infinities go wrong; it has no `nanquantile`. Each function
takes the array library as its first argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.quantiles import CONTINUOUS, continuous_place, place_of, reduced_axes
from .sorting import sort


def quantile(
    xp: Any,
    a: Any,
    q: Any,
    axis: Any = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Any = None,
    interpolation: Any = None,
) -> Any:
    """Compute `numpy.quantile`, but for weights: of places known before, or of an array of places by some methods."""
    if weights is not None or interpolation is not None:
        raise NotImplementedError("weights")
    rows, axes = _sorted_rows(xp, a, axis)
    if isinstance(q, xp.ndarray):
        _check_range(xp, q)
        found = _between(xp, rows, *_places(xp, rows.shape[-1], q.ravel(), method))
        found = xp.moveaxis(found, -1, 0).reshape((*q.shape, *rows.shape[:-1]))
    elif np.ndim(q):
        found = [_quantile(xp, rows, each.item(), method, np.float64) for each in np.ravel(q)]
        found = xp.stack(found).reshape((*np.shape(q), *rows.shape[:-1]))
    else:
        found = _quantile(xp, rows, q, method, None if type(q) in (int, float) else np.asarray(q).dtype)
    if rows.dtype.kind == "f":
        found = xp.where(xp.isnan(rows[..., -1]), rows[..., -1], found)
    return _with_axes(xp, found, a.ndim, axes, keepdims)


def nanquantile(
    xp: Any,
    a: Any,
    q: Any,
    axis: Any = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: Any = None,
    interpolation: Any = None,
) -> Any:
    """Compute `numpy.nanquantile`, but for weights and some methods."""
    if not a.size:
        return _of_no_elements(xp, a, axis, keepdims)
    if a.dtype.kind != "f":
        return quantile(xp, a, q, axis, method=method, keepdims=keepdims, weights=weights, interpolation=interpolation)
    if weights is not None or interpolation is not None:
        raise NotImplementedError("weights")
    rows, axes = _sorted_rows(xp, a, axis)
    if isinstance(q, xp.ndarray):
        _check_range(xp, q)
    count, places = _numbers(xp, rows), xp.asarray(q).ravel()
    places = places if places.dtype.kind in "iu" else places.astype("float64")
    found = _between(xp, rows, *_places(xp, count, places, method))
    found = xp.where(count == 0, rows.dtype.type(np.nan), found)
    shape = q.shape if isinstance(q, xp.ndarray) else np.shape(q)
    found = xp.moveaxis(found, -1, 0).reshape((*shape, *rows.shape[:-1]))
    return _with_axes(xp, found, a.ndim, axes, keepdims)


def of_percents(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of percentiles for one of quantiles."""

    def percentile(xp: Any, a: Any, q: Any, *args: Any, **options: Any) -> Any:
        return function(xp, a, _hundredth(q), *args, **options)

    return percentile


def _hundredth(q: Any) -> Any:
    return [_hundredth(each) for each in q] if isinstance(q, (list, tuple)) else q / 100


def median(
    xp: Any, a: Any, axis: Any = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Any:
    """Compute `numpy.median`: CuPy's, but of no elements, where that raises."""
    axes = reduced_axes(axis, a.ndim)
    if all(a.shape[p] for p in axes):
        return xp.median(a, axis, keepdims=keepdims)
    return _of_no_elements(xp, a, axis, keepdims)


def _of_no_elements(xp: Any, a: Any, axis: Any, keepdims: bool) -> Any:
    """Return the NaNs that an array of no elements has: of a list of quantiles, too, as many as of one."""
    axes = reduced_axes(axis, a.ndim)
    dtype = a.dtype if a.dtype.kind in "fc" else "float64"
    kept = xp.full([n for p, n in enumerate(a.shape) if p not in axes], np.nan, dtype)
    return _with_axes(xp, kept, a.ndim, axes, keepdims)


def nanmedian(
    xp: Any, a: Any, axis: Any = None, out: None = None, overwrite_input: bool = False, keepdims: bool = False
) -> Any:
    """Compute `numpy.nanmedian`."""
    if a.dtype.kind not in "fc":
        return median(xp, a, axis, keepdims=keepdims)
    rows, axes = _sorted_rows(xp, a, axis)
    count = _numbers(xp, rows)
    low, high = (_at(xp, rows, place) for place in ((count - 1) // 2, count // 2))
    if rows.dtype.itemsize == 2:
        low, high = low.astype("float32"), high.astype("float32")
    found = xp.where(low == high, low, (low + high) / low.dtype.type(2))
    found = xp.where(count == 0, low.dtype.type(np.nan), found)[..., 0]
    return _with_axes(xp, found, a.ndim, axes, keepdims)


def _quantile(xp: Any, rows: Any, q: Any, method: str, dtype: Any) -> Any:
    """Return one quantile of sorted rows; its weight has a dtype, or is weak in promotion."""
    below, above, weight = place_of(rows.shape[-1], int(q) if isinstance(q, np.integer) else q, method)
    if weight is None or (below == above and rows.dtype.kind != "f"):
        return rows[..., below]  # no integer beyond those that floats hold is rounded
    low, high = rows[..., below], rows[..., above]
    difference = high - low
    if dtype is not None:
        difference = difference.astype(np.promote_types(difference.dtype, dtype), copy=False)
    return high - difference * (1 - weight) if weight >= 0.5 else low + difference * weight


def _places(xp: Any, n: Any, q: Any, method: str) -> tuple[Any, Any, Any]:
    """Return the elements below and above quantiles, and the weights of the latter, for arrays of `n` or `q`."""
    if method == "linear" and q.dtype.kind in "iu":
        place = (n - 1) * q
        return place, place, None
    unclipped = continuous_place(n, q, method if method in CONTINUOUS else "linear")
    position = xp.minimum(xp.maximum(unclipped, 0), n - 1)
    if method in ("lower", "higher", "nearest"):
        rounding = {"lower": xp.floor, "higher": xp.ceil, "nearest": xp.rint}[method]
        place = rounding(position).astype("int64")
        return place, place, None
    below = xp.floor(position)
    if method == "midpoint":
        weight = xp.where(position == below, 0.0, 0.5)
    elif method in CONTINUOUS:
        weight = position - below
    else:
        raise NotImplementedError(method)
    below = below.astype("int64")
    return below, xp.where(unclipped < 0, below, xp.minimum(below + 1, n - 1)), weight


def _between(xp: Any, rows: Any, below: Any, above: Any, weight: Any) -> Any:
    """Interpolate between elements of sorted rows, along a last axis of places."""
    low = _at(xp, rows, below)
    if weight is None:
        return low
    high = _at(xp, rows, above)
    difference = high - low
    return xp.where(weight >= 0.5, high - difference * (1 - weight), low + difference * weight)


def _at(xp: Any, rows: Any, places: Any) -> Any:
    """Return elements of rows: at the same places of all, or at each row's own; NaN for rows of none."""
    if places.ndim == 1 and rows.ndim != 1:
        return rows[..., places]
    if not rows.shape[-1]:
        return xp.full((*rows.shape[:-1], places.shape[-1]), rows.dtype.type(np.nan))
    return xp.take_along_axis(rows, xp.maximum(places, 0), axis=-1)


def _numbers(xp: Any, rows: Any) -> Any:
    """Return how many numbers are in each row, which may have NaN behind them."""
    return xp.count_nonzero(~xp.isnan(rows), axis=-1)[..., None]


def _check_range(xp: Any, q: Any) -> None:
    if not bool(xp.all((q >= 0) & (q <= 1))):
        raise ValueError("Quantiles must be in the range [0, 1]")


def _sorted_rows(xp: Any, a: Any, axis: Any) -> tuple[Any, tuple[int, ...]]:
    """Return an array with some axes, or all, made one, sorted and last; and these axes."""
    axes = reduced_axes(axis, a.ndim)
    kept = [p for p in range(a.ndim) if p not in axes]
    length = math.prod(a.shape[p] for p in axes)
    return sort(xp, a.transpose((*kept, *axes)).reshape((*(a.shape[p] for p in kept), length))), axes


def _with_axes(xp: Any, found: Any, ndim: int, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Return a result with the axes that were reduced, of length one, behind its leading ones, if they are kept."""
    if not keepdims:
        return found
    leading = found.ndim - (ndim - len(axes))
    return xp.expand_dims(found, tuple(leading + p for p in axes))
