"""What results are compared with: the operators' meanings in a wider format.

Formats that compute in float32 are compared with float64. For float64 there is `numpy.longdouble`: on x86 it has 64
binary digits, 11 more, and a library of its own. Where it is no better than float64, which `EXTENDED` says, float64
results are compared with other evaluations in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..ir.operators import POINTWISE
from .formats import Array, Format

WIDE = np.longdouble
EXTENDED = bool(np.finfo(WIDE).eps < 2.0**-60)

# Where the series of erf and the continued fraction of erfc meet, and how many terms leave 1e-20 of them.
_MEET, _SERIES, _FRACTION = 1.5, 60, 250
# pi to 64 digits; a Python float holds 53 of them.
_PI = WIDE(math.pi) + WIDE(1.2246467991473532e-16)


def wider(x: Array, form: Format) -> Array:
    """Numbers of a format in the one that they are compared in."""
    return np.asarray(x, WIDE if form.computed is form and form.name == "float64" else np.float64)


def erfc(x: Array) -> Array:
    """Complementary error function: its series near zero, its continued fraction far out."""
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
    """2 / sqrt(pi) exp(-x^2) (x + 2 x^3 / 3 + 4 x^5 / 15 + ...): no term cancels another."""
    term = total = x
    for n in range(1, _SERIES):
        term = term * (2 * x * x) / (2 * n + 1)
        total = total + term
    return total * np.exp(-x * x) * x.dtype.type(2 / np.sqrt(_PI))


def _erfc_fraction(x: Array) -> Array:
    """exp(-x^2) / sqrt(pi) / (x + (1/2) / (x + 1 / (x + (3/2) / ...))), from its tail."""
    tail = x
    for n in range(_FRACTION, 0, -1):
        tail = x + n / 2 / tail
    # x^2 in two parts, of which the first is exact: what rounding takes from it the exponential would magnify.
    high = x.astype(np.float32).astype(x.dtype)
    square = np.exp(-high * high) * np.exp(-(x - high) * (x + high))
    return square / tail / x.dtype.type(np.sqrt(_PI))


MEANINGS: dict[str, Callable[..., Array]] = {
    "erf": erf,
    "gelu": lambda x: x / 2 * erfc(-x * x.dtype.type(np.sqrt(WIDE(0.5)))),
}


def meaning(operator: str) -> Callable[..., Array]:
    """The operator in any precision: the table's own formula, but for those that it evaluates by polynomials."""
    return MEANINGS.get(operator) or POINTWISE[operator].numpy
