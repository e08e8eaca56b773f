"""Reference results: the operators' formulas in a wider format.

Formats that compute in float32 are compared with float64, and float64 with `numpy.longdouble`, which has 11 more
bits on x86. Where longdouble is no wider than float64 (`EXTENDED` is False), float64 is compared with float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..ir.operators import POINTWISE
from .formats import Array, Format

WIDE = np.longdouble
EXTENDED = bool(np.finfo(WIDE).eps < 2.0**-60)

# Where the series of erf gives way to the continued fraction of erfc, and the terms of each for 1e-20.
_MEET, _SERIES, _FRACTION = 1.5, 60, 250
# pi to 64 bits, of which a Python float holds 53.
_PI = WIDE(math.pi) + WIDE(1.2246467991473532e-16)


def wider(x: Array, form: Format) -> Array:
    """Convert numbers of a format to the wider one in which its reference results are computed."""
    return np.asarray(x, WIDE if form.computed is form and form.name == "float64" else np.float64)


def erfc(x: Array) -> Array:
    """Complementary error function: by the series of erf near zero, else by its continued fraction."""
    size = np.abs(x)
    near = 1 - _erf_series(np.where(size < _MEET, size, 0))
    far = np.where(size < _MEET, _MEET, np.minimum(size, 200))
    right = np.where(size < _MEET, near, _erfc_fraction(far.astype(x.dtype)))
    return np.where(np.isnan(x), x, np.where(x < 0, 2 - right, right))


def erf(x: Array) -> Array:
    """Error function."""
    near = _erf_series(np.where(np.abs(x) < _MEET, x, 0))
    return np.where(np.abs(x) < _MEET, near, np.where(np.isnan(x), x, np.sign(x) * (1 - erfc(np.abs(x)))))


def _erf_series(x: Array) -> Array:
    """Sum erf(x) = 2 / sqrt(pi) exp(-x^2) (x + 2 x^3 / 3 + 4 x^5 / 15 + ...), in which no terms cancel."""
    term = total = x
    for n in range(1, _SERIES):
        term = term * (2 * x * x) / (2 * n + 1)
        total = total + term
    return total * np.exp(-x * x) * x.dtype.type(2 / np.sqrt(_PI))


def _erfc_fraction(x: Array) -> Array:
    """Evaluate erfc(x) = exp(-x^2) / sqrt(pi) / (x + (1/2) / (x + 1 / (x + (3/2) / ...))) from its tail."""
    tail = x
    for n in range(_FRACTION, 0, -1):
        tail = x + n / 2 / tail
    # exp(-x^2) from x^2 in two parts, the first one exact: the exponential magnifies rounding of its argument.
    high = x.astype(np.float32).astype(x.dtype)
    square = np.exp(-high * high) * np.exp(-(x - high) * (x + high))
    return square / tail / x.dtype.type(np.sqrt(_PI))


def _normal(x: Array) -> Array:
    """Evaluate the normal distribution, erfc(-x / sqrt(2)) / 2."""
    return erfc(-x * x.dtype.type(np.sqrt(WIDE(0.5)))) / 2


_WIDE_FORMULAS: dict[str, Callable[..., Array]] = {
    "erf": erf,
    "gelu": lambda x: x * _normal(x),
    "gelu_slope": lambda x: _normal(x) + x * np.exp(-x * x / 2) / x.dtype.type(np.sqrt(2 * _PI)),
}


def wide_formula(operator: str) -> Callable[..., Array]:
    """Return an operator's formula for any precision: the table's, unless that is a polynomial for float64."""
    return _WIDE_FORMULAS.get(operator) or POINTWISE[operator].numpy
