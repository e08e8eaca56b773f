"""Sorts and searches of CuPy's arrays as NumPy has them: NaN behind all numbers, in any kind of sort.

CuPy 14 sorts vectors of floats by their bits, so that a NaN with its sign bit set comes first; its partitions compare
with <, which NaN leaves anywhere; its searches compare numbers of two dtypes in that of C++, where int64 and float32
meet in float32; and it takes no kind of sort but "stable". Each function takes the array library as its first argument.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# Elements from which on rows are sorted as one vector of 64-bit keys. CuPy sorts the rows of a matrix by merging pairs
# of row and value, in about ten times as long as a vector by its bits; small ones launch as many kernels either way.
_MANY = 1 << 19
# Lengths of rows below which CuPy's partition sorts them, and places from which on it does.
_SHORT, _FAR = 160, 512


def sort(xp: Any, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """Compute `numpy.sort`; every kind is stable, but for the signs of zeros where neither option asks for that."""
    keeps_zeros = a.dtype.kind == "f" and (stable or kind in ("stable", "mergesort"))
    if axis is not None and _sorts_by_keys(a, axis) and not keeps_zeros:
        shape, keys = _keys(xp, a, axis)
        keys.sort()
        low_bits = _key_kernels(xp)[1](keys) if a.dtype.kind == "f" else keys.astype(a.dtype)
        return _with_axis(xp, low_bits.reshape(shape), axis)
    rows = _with_plain_nans(xp, _rows(xp, a, axis))
    rows.sort(axis=-1)
    return _with_axis(xp, rows, axis)


def argsort(xp: Any, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *, stable: Any = None) -> Any:
    """Compute `numpy.argsort`; every kind is stable."""
    a, axis = (a.ravel(), -1) if axis is None else (a, axis)
    if not _sorts_by_keys(a, axis):
        return _with_plain_nans(xp, a).argsort(axis=axis)
    shape, keys = _keys(xp, a, axis, zeros_alike=True)
    found = keys.argsort().reshape(-1, shape[-1]) - xp.arange(0, a.size, shape[-1])[:, None]
    return _with_axis(xp, found.reshape(shape), axis)


def partition(xp: Any, a: Any, kth: Any, axis: int | None = -1, kind: str = "introselect", order: Any = None) -> Any:
    """Compute `numpy.partition`: of floats as integers of the same order."""
    if _is_sorted_for(kth, a, axis):
        return sort(xp, a, axis)
    rows = _rows(xp, a, axis)
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
    if _is_sorted_for(kth, a, axis):
        return argsort(xp, a, axis)
    rows = _rows(xp, a, axis)
    ints = as_ordered_ints(xp, rows) if rows.dtype.kind == "f" else rows
    found = ints.argpartition(_places(kth), axis=-1)
    return _with_axis(xp, found, axis)


def _places(kth: Any) -> tuple[int, ...]:
    return tuple(int(k) for k in np.atleast_1d(kth))


def _is_sorted_for(kth: Any, a: Any, axis: int | None) -> bool:
    """Whether an array is sorted for a partition: where CuPy would, and of complex numbers."""
    length = a.size if axis is None else a.shape[axis]
    return a.dtype.kind == "c" or length < _SHORT or max((k % length for k in _places(kth)), default=0) >= _FAR


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


# Rows as one vector of keys ------------------------------------------------------------------------------------------


def _sorts_by_keys(a: Any, axis: int) -> bool:
    """Whether the rows of an array along an axis are sorted as one vector, of keys that hold the row and the value."""
    if a.ndim < 2 or a.size < _MANY or a.dtype.itemsize > 4:
        return False
    return (a.dtype.kind in "iu" or a.dtype.name == "float32") and 1 < a.size // a.shape[axis] < 1 << 31


def _keys(xp: Any, a: Any, axis: int, zeros_alike: bool = False) -> tuple[tuple[int, ...], Any]:
    """Return 64-bit keys of the values in rows: the row above the low 32 bits, to which the value is added.

    Also returns the shape with the axis to sort along last, in whose order the keys are. With `zeros_alike`, -0.0 has
    the key of 0.0.
    """
    rows = a if axis in (-1, a.ndim - 1) else xp.moveaxis(a, axis, -1)
    outer = rows.shape[:-1]
    row = xp.arange(a.size // rows.shape[-1], dtype="int64").reshape((*outer, 1)) << 32
    keys = _key_kernels(xp)[0](rows, row, zeros_alike) if a.dtype.kind == "f" else row + rows
    return rows.shape, keys.ravel()


@lru_cache(maxsize=8)
def _key_kernels(xp: Any) -> tuple[Any, Any]:
    """Return the kernel that makes keys of float32 values, and the one that makes values of keys.

    A value's 32 bits are an integer of the same order once all but the sign of negative ones are flipped; NaN is the
    largest one.
    """
    to_key = """
        const int bits = reinterpret_cast<const int&>(x);
        const int ordered = bits < 0 ? bits ^ 0x7fffffff : bits;
        key = row + (x != x ? 0x7fffffff : zeros_alike && ordered == -1 ? 0 : ordered);
    """
    from_key = """
        const int ordered = static_cast<int>(key);
        const int bits = ordered < 0 ? ordered ^ 0x7fffffff : ordered;
        x = reinterpret_cast<const float&>(bits);
    """
    return (
        xp.ElementwiseKernel("float32 x, int64 row, bool zeros_alike", "int64 key", to_key, "cupyfuse_to_sort_key"),
        xp.ElementwiseKernel("int64 key", "float32 x", from_key, "cupyfuse_from_sort_key"),
    )


FUNCTIONS = ("sort", "argsort", "partition", "argpartition", "lexsort", "searchsorted", "digitize", "isin")
