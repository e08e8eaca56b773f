"""CuPy 14 as far as it differs from NumPy, on the CPU: what `cuda/library_functions.py` puts right.

Each method and function says what CuPy's does; its sources were read for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The dtypes of CuPy's atomic operations, as far as they compute what NumPy's do.
SUMS = ["int32", "int64", "uint32", "uint64", "float16", "float32", "float64"]
EXTREMES = ["int32", "int64", "uint32", "uint64"]


class Array(np.ndarray[Any, Any]):
    """An array whose methods sort as CuPy's."""

    def sort(self, axis: int = -1, kind: Any = None) -> None:  # type: ignore[override]
        """Sort vectors of floats by their bits, -0.0 as 0.0: NaN with a sign comes first; no kind but "stable"."""
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        if not self.flags.c_contiguous:
            raise NotImplementedError("Sorting non-contiguous array is not supported.")
        if self.ndim == 1 and self.dtype.name in ("float32", "float64"):
            self[...] = self.view(np.ndarray)[_order_of_bits(self)]
        else:
            self.view(np.ndarray).sort(axis, kind="stable")

    def argsort(self, axis: int = -1, kind: Any = None) -> Any:  # type: ignore[override]
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        if self.ndim == 1 and self.dtype.name in ("float32", "float64"):
            return _order_of_bits(self).view(Array)
        return self.view(np.ndarray).argsort(axis, kind="stable").view(Array)

    def partition(self, kth: Any, axis: int = -1) -> None:  # type: ignore[override]
        """Partition by <, which leaves elements of rows with NaN anywhere."""
        rows = self.view(np.ndarray)
        rows.partition(kth, axis)
        _shuffle_where_nan(rows, axis)

    def argpartition(self, kth: Any, axis: int = -1) -> Any:  # type: ignore[override]
        rows = self.view(np.ndarray)
        found = rows.argpartition(kth, axis)
        if rows.dtype.kind == "f" and np.isnan(rows).any():
            found = np.flip(found, axis)
        return found.view(Array)


def _order_of_bits(x: Any) -> Any:
    """Return the order of a radix sort."""
    x = np.where(x == 0, x.dtype.type(0), x)
    bits = x.view(f"int{8 * x.itemsize}")
    return np.argsort(np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits), kind="stable")


def _shuffle_where_nan(rows: Any, axis: int) -> None:
    if rows.dtype.kind == "f" and np.isnan(rows).any():
        rows[...] = np.flip(rows, axis).copy()


class _Atomic:
    """A ufunc whose `at` takes what CuPy's takes."""

    def __init__(self, ufunc: np.ufunc, dtypes: list[str]):
        self._ufunc, self._dtypes = ufunc, dtypes

    def at(self, array: Any, index: Any, values: Any) -> None:
        if array.dtype.name not in self._dtypes:
            raise TypeError(f"only {self._dtypes}")
        self._ufunc.at(array, index, values.astype(array.dtype))

    def __call__(self, *operands: Any) -> Any:
        return self._ufunc(*operands)


class Cupy:
    """NumPy with CuPy's name, limits and faults; its functions return arrays of this kind."""

    __name__ = "cupy"
    ndarray = Array
    add, subtract = _Atomic(np.add, SUMS), _Atomic(np.subtract, ["int32", "uint32"])
    maximum, minimum = _Atomic(np.maximum, EXTREMES), _Atomic(np.minimum, EXTREMES)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if isinstance(found, type) or not callable(found):
            return found

        def function(*args: Any, **options: Any) -> Any:
            return array(found(*map(_plain, args), **options))

        return function

    @staticmethod
    def searchsorted(a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
        """Compare int64 and float32 in float32."""
        return array(np.searchsorted(_as_in_c(a, v), _as_in_c(v, a), side, sorter))

    @staticmethod
    def digitize(x: Any, bins: Any, right: bool = False) -> Any:
        return array(np.digitize(_as_in_c(x, bins), _as_in_c(bins, x), right))

    @staticmethod
    def isin(element: Any, test_elements: Any, assume_unique: bool = False, invert: bool = False) -> Any:
        """Sort one operand as `Array.sort` does, and search in it."""
        tests = array(test_elements).ravel().copy()
        tests.sort()
        element = _as_in_c(element, tests)
        if not tests.size:
            return np.full(element.shape, invert).view(Array)
        at = np.searchsorted(np.asarray(tests).astype(element.dtype), element)
        return ((tests[np.minimum(at, tests.size - 1)] == element) != invert).view(Array)


def array(value: Any) -> Any:
    """Return an array of this kind for NumPy's; other values as they are."""
    return value.view(Array) if isinstance(value, np.ndarray) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value.view(np.ndarray) if isinstance(value, Array) else value


def _as_in_c(a: Any, b: Any) -> Any:
    """Return an operand in the dtype in which C++ compares it with another one: int64 in float32 beside float32."""
    dtypes = {np.asarray(a).dtype.name, np.asarray(b).dtype.name}
    return np.asarray(a).astype("float32") if dtypes == {"int64", "float32"} else a


CUPY = Cupy()
