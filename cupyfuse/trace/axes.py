"""Axes of traced arrays: the map from the user's axes to rows and columns of a node."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .user_code import user_line

# For each axis of the user's array: 0 (rows of the node), 1 (columns), or None for an axis of length one that is
# neither. One-dimensional arrays, transposes and new axes exist only here, not in the graph.
Axes = tuple["int | None", ...]


def normalize_axes(axis: Any, ndim: int, operation: str = "axis") -> tuple[int, ...]:
    """Resolve an `axis` argument to a tuple of non-negative axes."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    result = []
    for a in axes:
        try:
            a = operator.index(a)
        except TypeError:
            raise TypeError(f"{operation}: axis {a!r} is not an integer\n  at {user_line()}") from None
        if not -ndim <= a < ndim:
            raise np.exceptions.AxisError(
                f"{operation}: axis {a} is out of bounds for an array of {ndim} dimensions\n  at {user_line()}"
            )
        result.append(a % ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"{operation}: duplicate value in 'axis'\n  at {user_line()}")
    return tuple(result)
