"""Where quantiles lie among sorted elements, and along which axes, as NumPy defines them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

# The continuous methods, by (alpha, beta): a quantile is at the place `n q + alpha + q (1 - alpha - beta) - 1`.
CONTINUOUS = {
    "linear": (1.0, 1.0),
    "interpolated_inverted_cdf": (0.0, 1.0),
    "hazen": (0.5, 0.5),
    "weibull": (0.0, 0.0),
    "median_unbiased": (1 / 3, 1 / 3),
    "normal_unbiased": (3 / 8, 3 / 8),
}
SELECTING = ("lower", "higher", "nearest", "inverted_cdf", "closest_observation")  # methods that return an element


class Place(NamedTuple):
    """The place of a quantile: `weight` of the way from element `below` to element `above`; None for `below` itself."""

    below: int
    above: int
    weight: float | None


def place_of(n: int, q: float, method: Any = "linear") -> Place:
    """Return the place of the quantile `q` among `n` sorted elements.

    0 and 1 as integers, by the method "linear", are the places of elements: as in NumPy, nothing is interpolated.
    """
    if method not in CONTINUOUS:
        position = float(np.quantile(np.arange(n, dtype=np.float64), q, method=method))
        below, above = int(np.floor(position)), int(np.ceil(position))
        return Place(below, above, None if method in SELECTING else position - below)
    position = continuous_place(n, q, method)
    if isinstance(position, int):
        return Place(position, position, None)
    if position >= n - 1:
        return Place(n - 1, n - 1, 0.0)
    below = int(np.floor(position))
    return Place(0, 0, 0.0) if position < 0 else Place(below, below + 1, float(position - below))


def reduced_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the positions of one or some axes, or of all for None, in increasing order."""
    given = range(ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    return tuple(sorted(p % ndim for p in given))


def continuous_place(n: Any, q: Any, method: str) -> Any:
    """Return the place of a quantile by a continuous method, perhaps beyond the elements; numbers or arrays."""
    if method == "linear":
        return (n - 1) * q
    alpha, beta = CONTINUOUS[method]
    return n * q + (alpha + q * (1 - alpha - beta)) - 1
