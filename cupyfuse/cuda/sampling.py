"""Interpolation, convolution, histograms and gathers of CuPy's arrays as NumPy has them.

Each function takes the array library as its first argument.
"""

from __future__ import annotations

from typing import Any

_MOST_PRODUCTS = 1 << 24  # of a convolution in memory at once


def interp(library: Any, x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None) -> Any:
    """Compute `numpy.interp` in float64: CuPy's takes differences, and `left` and `right`, in the values' own dtype."""
    x, xp, fp = (library.asarray(each) for each in (x, xp, fp))
    dtype = "complex128" if fp.dtype.kind == "c" else "float64"
    x, xp = x.astype("float64", order="C", copy=False), xp.astype("float64", copy=False)
    fp = fp.astype(dtype, copy=False)
    return library.interp(x, xp, fp, left, right, period)


def convolve(xp: Any, a: Any, v: Any, mode: str = "full") -> Any:
    """Compute `numpy.convolve` as sums: CuPy's goes by way of FFTs, which spread NaN, infinities and large values."""
    a, v = xp.asarray(a).ravel(), xp.asarray(v).ravel()
    if xp.result_type(a, v).kind not in "fc":
        return xp.convolve(a, v, mode)
    return _part(_convolved(xp, a, v), mode, a.size, v.size, (min(a.size, v.size) - 1) // 2)


def correlate(xp: Any, a: Any, v: Any, mode: str = "valid") -> Any:
    """Compute `numpy.correlate` likewise."""
    a, v = xp.asarray(a), xp.asarray(v)
    shorter = min(a.size, v.size)
    first = (shorter - 1) // 2 if a.size >= v.size else shorter // 2
    return _part(_convolved(xp, a, v.conj()[::-1]), mode, a.size, v.size, first)


def _convolved(xp: Any, a: Any, v: Any) -> Any:
    """Return all sums of products of one vector and another one from back to front.

    Each element of the shorter one times the longer one is a row of a matrix; in rows shorter by one element, row k
    begins k columns further on, and what is summed are columns.
    """
    dtype = xp.result_type(a, v)
    if dtype.kind not in "fc":
        return xp.convolve(a, v)
    a, v = (x.astype(dtype, copy=False) for x in ((a, v) if a.size >= v.size else (v, a)))
    n, most = a.size, max(1, _MOST_PRODUCTS // a.size)
    total = xp.zeros(n + v.size - 1, dtype)
    for first in range(0, v.size, most):
        factors = v[first : first + most]
        m = factors.size
        products = xp.zeros((m, n + m), dtype)
        products[:, :n] = factors[:, None] * a
        width = n + m - 1
        total[first : first + width] += products.ravel()[: m * width].reshape(m, width).sum(axis=0)
    return total


def _part(full: Any, mode: str, n: int, m: int, first: int) -> Any:
    """Return the part of a convolution of `n` and `m` elements by a mode; that of mode "same" begins at `first`."""
    shorter, longer = sorted((n, m))
    if mode == "valid":
        return full[shorter - 1 : longer]
    return full[first : first + longer] if mode == "same" else full


def histogram(xp: Any, a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Compute `numpy.histogram`: of integers as floats, as CuPy widens the last bin of integers by one."""
    a = a.astype("float64") if a.dtype.kind in "biu" else a
    return xp.histogram(a, bins, range, bool(density), weights)


def take(xp: Any, a: Any, indices: Any, axis: Any = None, out: None = None, mode: str = "raise") -> Any:
    """Compute `numpy.take`, but for its error: indices out of range wrap around, unless they are clipped."""
    if mode == "clip":
        indices = xp.clip(xp.asarray(indices), 0, (a.size if axis is None else a.shape[axis]) - 1)
    return xp.take(a, indices, axis)


FUNCTIONS = ("interp", "convolve", "correlate", "histogram", "take")
