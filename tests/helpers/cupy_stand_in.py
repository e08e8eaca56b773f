"""CuPy 14 as far as it differs from NumPy, on the CPU: what `cuda/library_functions.py` puts right.

Each method and function says what CuPy's does; its sources were read for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path
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


class ElementwiseKernel:
    """CuPy's, compiled by g++: one element after the other."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str):
        parsed = [tuple(parameter.split()) for parameter in (*inputs.split(","), *outputs.split(","))]
        self._inputs, ((self._dtype, result),) = parsed[:-1], parsed[-1:]
        pointers = ", ".join(f"const {_C_TYPES[kind]}* {name}_s" for kind, name in self._inputs)
        reads = " ".join(f"const {_C_TYPES[kind]} {name} = {name}_s[i];" for kind, name in self._inputs)
        kind = _C_TYPES[self._dtype]
        self._function = _compiled(
            f'extern "C" void run(long n, {kind}* {result}_s, {pointers}) {{ for (long i = 0; i < n; ++i) {{ '
            f"{reads} {kind}& {result} = {result}_s[i]; {operation} }} }}"
        )

    def __call__(self, *arguments: Any) -> Any:
        kinds = [kind for kind, _ in self._inputs]
        typed = [np.asarray(a) for a in arguments]
        assert all(a.dtype == kind for a, kind in zip(typed, kinds, strict=True)), "CuPy converts no arrays"
        given = [np.ascontiguousarray(a) for a in np.broadcast_arrays(*typed)]
        found = np.empty(given[0].shape, self._dtype)
        self._function(ctypes.c_long(found.size), *(ctypes.c_void_p(a.ctypes.data) for a in (found, *given)))
        return array(found)


_C_TYPES = {"float32": "float", "int64": "long long", "bool": "bool"}


@functools.cache
def _compiled(source: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        text, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        command = [os.environ.get("CXX", "g++"), "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-o", library, text]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library)).run


class Cupy:
    """NumPy with CuPy's name, limits and faults; its functions return arrays of this kind."""

    __name__ = "cupy"
    ndarray, ElementwiseKernel = Array, ElementwiseKernel
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

    @staticmethod
    def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
        """Take differences, and the values beyond the ends, in the values' own dtype."""
        if not x.flags.c_contiguous:
            raise NotImplementedError("Non-C-contiguous x is currently not supported")
        beyond = [None if value is None else np.array(value, fp.dtype).item() for value in (left, right)]
        slopes = np.diff(fp).astype(fp.dtype) / np.diff(xp)
        k = np.clip(np.searchsorted(xp, x, side="right") - 1, 0, max(xp.size - 2, 0))
        found = slopes[k] * (x - xp[k]) + fp[k] if period is None else np.interp(x, xp, fp, period=period)
        inside = (x >= xp[0]) & (x <= xp[-1]) if period is None else True
        return array(np.where(inside, found, np.interp(x, xp, fp, *beyond, period=period)))

    @staticmethod
    def convolve(a: Any, v: Any, mode: str = "full") -> Any:
        """Multiply Fourier transforms, but of integers."""
        if np.result_type(a, v).kind in "fc":
            raise AssertionError("by way of FFTs")
        return array(np.convolve(a, v, mode))

    @staticmethod
    def histogram(x: Any, bins: Any = 10, range: Any = None, density: bool = False, weights: Any = None) -> Any:
        """Widen the last bin of integers by one."""
        edges = np.array(np.histogram_bin_edges(x, bins, range), "float64")
        if x.dtype.kind in "iu" and np.ndim(bins):
            edges[-1] += 1
        found, _ = np.histogram(x, edges, density=density, weights=weights)
        edges[-1] -= x.dtype.kind in "iu" and np.ndim(bins)
        return array(found), array(edges)

    @staticmethod
    def median(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
        """Partition, at a place that no elements have."""
        if not a.size:
            raise ValueError("kth(=-1) out of bounds 0")
        return array(np.median(np.asarray(a), axis=axis, keepdims=keepdims))

    @staticmethod
    def take(a: Any, indices: Any, axis: Any = None) -> Any:
        return array(np.take(a, indices, axis, mode="wrap"))


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
