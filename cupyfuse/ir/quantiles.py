"""Where quantiles lie among sorted elements, and along which axes, as NumPy defines them."""

from __future__ import annotations

import math
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
    if method in SELECTING:
        chosen = int(np.quantile(np.arange(n), q, method=method))
        return Place(chosen, chosen, None)
    position: float
    if method == "averaged_inverted_cdf":
        position = n * q - 1
    elif method == "midpoint":
        position = (math.floor((n - 1) * q) + math.ceil((n - 1) * q)) / 2
    else:
        position = continuous_place(n, q, method)
        if isinstance(position, int):
            return Place(position, position, None)
    if position < 0 or position >= n - 1:
        end = 0 if position < 0 else n - 1
        return Place(end, end, 0.0)
    below = math.floor(position)
    weight = float(position - below)
    if method == "averaged_inverted_cdf":
        weight = 0.5 if weight == 0 else 1.0
    return Place(below, below + 1, weight)


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
