"""Sorts and searches of CuPy's arrays as NumPy has them: NaN behind all numbers, in any kind of sort.

CuPy 14 sorts vectors of floats by their bits, so that a NaN with its sign bit set comes first; its partitions compare
with <, which NaN leaves anywhere; its searches compare numbers of two dtypes in that of C++, where int64 and float32
meet in float32; and it takes no kind of sort but "stable". Each function takes the array library as its first argument.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Elements from which on rows are sorted as one vector of 64-bit keys. CuPy sorts the rows of a matrix by merging pairs
# of row and value, in about ten times as long as a vector by its bits; small ones launch as many kernels either way.
_MANY = 1 << 19
_MOST_HEADS = 512  # elements up to which CuPy's partition does not sort


def sort(xp: Any, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """Compute `numpy.sort`; every kind is stable, but for the signs of zeros where neither option asks for that."""
    rows = _rows(xp, a, axis)
    keeps_zeros = stable or kind in ("stable", "mergesort")
    if _sorts_by_keys(rows, -1) and not (keeps_zeros and rows.dtype.kind == "f"):
        keys = _keys(xp, rows, as_ordered_ints(xp, rows) if rows.dtype.kind == "f" else rows)
        keys.sort()
        keys = keys.reshape(rows.shape)
        if rows.dtype.kind == "f":
            found = from_ordered_ints(xp, keys.astype(f"int{8 * rows.itemsize}"), rows.dtype)
        else:
            found = keys.astype(rows.dtype)  # the low bits
    else:
        found = _with_plain_nans(xp, rows)
        found.sort(axis=-1)
    return _with_axis(xp, found, axis)


def argsort(xp: Any, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """Compute `numpy.argsort`; every kind is stable."""
    a, axis = (a.ravel(), -1) if axis is None else (a, axis)
    if not a.ndim or not _sorts_by_keys(a, axis):
        return _with_plain_nans(xp, a).argsort(axis=axis)
    rows = values = _rows(xp, a, axis)
    if rows.dtype.kind == "f":
        values = as_ordered_ints(xp, rows)
        values = xp.where(values == -1, values.dtype.type(0), values)  # -0.0 as 0.0
    found = _keys(xp, rows, values).argsort().reshape(-1, rows.shape[-1])
    found = found - xp.arange(0, rows.size, rows.shape[-1])[:, None]
    return _with_axis(xp, found.reshape(rows.shape), axis)


def partition(xp: Any, a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Any:
    """Compute `numpy.partition`: of floats as integers of the same order."""
    rows = _rows(xp, a, axis)
    if rows.dtype.kind == "c" or _last_place(kth, rows) >= _MOST_HEADS:
        return sort(xp, a, axis)
    if rows.dtype.kind == "f":
        ints = as_ordered_ints(xp, rows)
        ints.partition(_places(kth), axis=-1)
        found = from_ordered_ints(xp, ints, rows.dtype)
    else:
        found = rows
        found.partition(_places(kth), axis=-1)
    return _with_axis(xp, found, axis)


def argpartition(xp: Any, a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Any:
    """Compute `numpy.argpartition` likewise."""
    rows = _rows(xp, a, axis)
    if rows.dtype.kind == "c" or _last_place(kth, rows) >= _MOST_HEADS:
        return argsort(xp, a, axis)
    ints = as_ordered_ints(xp, rows) if rows.dtype.kind == "f" else rows
    found = ints.argpartition(_places(kth), axis=-1)
    return _with_axis(xp, found, axis)


def _places(kth: Any) -> tuple[int, ...]:
    return tuple(int(k) for k in np.atleast_1d(kth))


def _last_place(kth: Any, rows: Any) -> int:
    """Return the largest place that a partition is asked for."""
    return max((k % rows.shape[-1] for k in _places(kth)), default=0)


def lexsort(xp: Any, keys: Any, axis: int = -1) -> Any:
    """Compute `numpy.lexsort` of keys of any dtypes and numbers of dimensions: stable sorts, the last key's last."""
    first, *others = [xp.asarray(key) for key in keys]
    found = argsort(xp, first, axis)
    for key in others:
        sorted_so_far = xp.take_along_axis(key, found, axis)
        found = xp.take_along_axis(found, argsort(xp, sorted_so_far, axis), axis)
    return found


# Searches -----------------------------------------------------------------------------------------------------------


def searchsorted(xp: Any, a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    """Compute `numpy.searchsorted`, comparing in the dtype that both promote to."""
    a, v = _in_common_dtype(xp, a, v)
    return xp.searchsorted(a, v, side, sorter)


def digitize(xp: Any, x: Any, bins: Any, right: bool = False) -> Any:
    """Compute `numpy.digitize` likewise; bins in no order are no error."""
    x, bins = _in_common_dtype(xp, x, bins)
    return xp.digitize(x, bins, right)


def isin(
    xp: Any, element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False, *, kind: Any = None
) -> Any:
    """Compute `numpy.isin`, which sorts one operand and searches in it, whatever the kind."""
    element, tests = _in_common_dtype(xp, element, test_elements)
    return xp.isin(element, _with_plain_nans(xp, tests.ravel()), assume_unique, invert)


def _in_common_dtype(xp: Any, *operands: Any) -> list[Any]:
    """Return arrays in the dtype that NumPy promotes them to."""
    arrays = [xp.asarray(x) for x in operands]
    dtype = np.result_type(*(x.dtype for x in arrays))
    return [x.astype(dtype, copy=False) for x in arrays]


# Floats as integers of the same order -------------------------------------------------------------------------------


def as_ordered_ints(xp: Any, x: Any, nan_first: bool = False) -> Any:
    """Return integers in the order of floats, whose rows are contiguous; NaN is the maximum, or the minimum, of all."""
    ints = x.view(f"int{8 * x.dtype.itemsize}")
    limits = xp.iinfo(ints.dtype)
    nan = ints.dtype.type(limits.min if nan_first else limits.max)  # NaN as a float, too
    return xp.where(xp.isnan(x), nan, _flip_negative(xp, ints))


def from_ordered_ints(xp: Any, ints: Any, dtype: Any) -> Any:
    """Return the floats of which these are the ordered integers."""
    return _flip_negative(xp, ints).view(dtype)


def _flip_negative(xp: Any, ints: Any) -> Any:
    """Flip all bits but the sign of negative integers: the bits of floats become ordered, and the other way round."""
    return xp.where(ints < 0, ints ^ ints.dtype.type(xp.iinfo(ints.dtype).max), ints)


def _rows(xp: Any, a: Any, axis: int | None) -> Any:
    """Return a copy of an array in C order with the axis to sort along last; all elements in a vector for no axis."""
    if axis is None:
        return a.flatten()
    return xp.array(a if axis in (-1, a.ndim - 1) else xp.moveaxis(a, axis, -1), order="C")


def _with_axis(xp: Any, rows: Any, axis: int | None) -> Any:
    """Move the last axis to its place again."""
    return rows if axis in (None, -1, rows.ndim - 1) else xp.moveaxis(rows, -1, axis)


def _with_plain_nans(xp: Any, rows: Any) -> Any:
    """Return a vector of floats with positive NaNs, which its bits order behind all numbers; other arrays as they are.

    CuPy compares the elements of matrices, and 16-bit and complex ones, as numbers.
    """
    if rows.ndim != 1 or rows.dtype.name not in ("float32", "float64"):
        return rows
    return xp.where(xp.isnan(rows), rows.dtype.type(np.nan), rows)


def _sorts_by_keys(a: Any, axis: int) -> bool:
    """Whether the rows of an array along an axis are sorted as one vector, of keys that hold the row and the value."""
    is_short = a.dtype.kind in "fiu" and a.dtype.itemsize <= 4
    return is_short and a.ndim > 1 and a.size >= _MANY and 1 < a.size // a.shape[axis] < 1 << 31


def _keys(xp: Any, rows: Any, values: Any) -> Any:
    """Return 64-bit keys of the values in rows: the row above the low 32 bits, to which the value is added."""
    length = rows.shape[-1]
    first = xp.arange(rows.size // length, dtype="int64")[:, None] << 32
    return (first + values.reshape(-1, length)).ravel()


FUNCTIONS = ("sort", "argsort", "partition", "argpartition", "lexsort", "searchsorted", "digitize", "isin")
