"""Axes of traced arrays: the map from the user's axes to rows and columns of a node."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .user_code import user_line

# For each axis of the user's array: 0 if it is along the rows of the node, 1 along the columns, None for neither.
Labels = tuple["int | None", ...]


@dataclass(frozen=True)
class Axes:
    """How an array of any number of dimensions is held as rows x columns.

    One-dimensional arrays, transposes, new axes and all but two dimensions exist only here, not in the graph.

    Attributes
    ----------
    shape : tuple of int
        The user's.
    rows, cols : tuple of int
        The user's axes along the rows and along the columns of the node, the slowest first. An axis in neither has
        length one.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @classmethod
    def of(cls, labels: Axes | Labels, shape: tuple[int, int]) -> Axes:
        """Make axes for a node of a shape, of which each user's axis is all rows, all columns, or neither.

        Axes of another number of rows, as of a block of them, are those of a matrix if several are folded.
        """
        if isinstance(labels, Axes):
            if labels.node_shape == shape:
                return labels
            labels = (0, 1) if labels.folded else labels.labels
        rows, cols = (tuple(p for p, a in enumerate(labels) if a == k) for k in (0, 1))
        return cls(tuple(1 if a is None else shape[a] for a in labels), rows, cols)

    @classmethod
    def by_rows(cls, shape: tuple[int, ...]) -> Axes:
        """Fold all axes but the last into rows, as they are in C-contiguous memory; a vector is one row."""
        order = tuple(range(len(shape)))
        return cls(shape, order[:-1], order[-1:])

    @property
    def node_shape(self) -> tuple[int, int]:
        return self.length(self.rows), self.length(self.cols)

    @property
    def labels(self) -> Labels:
        return tuple(0 if p in self.rows else 1 if p in self.cols else None for p in range(len(self.shape)))

    @property
    def long(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes along rows and along columns that are not of length one."""
        return self._long(self.rows), self._long(self.cols)

    @property
    def single(self) -> bool:
        """Whether rows and columns are one axis each at most, not counting those of length one."""
        return max(map(len, self.long)) <= 1

    @property
    def folded(self) -> bool:
        """Whether rows or columns are several axes."""
        return max(len(self.rows), len(self.cols)) > 1

    @property
    def in_order(self) -> bool:
        """Whether the elements are in memory as in a C-contiguous array of the user's shape."""
        rows, cols = self.long
        return list(rows + cols) == sorted(rows + cols)

    def _long(self, axes: Iterable[int]) -> tuple[int, ...]:
        return tuple(p for p in axes if self.shape[p] != 1)

    def length(self, axes: Iterable[int]) -> int:
        return math.prod(self.shape[p] for p in axes)

    def picked(self, order: Sequence[int | None]) -> Axes:
        """Permute axes, drop those of length one, and add new ones (None)."""
        place = {old: new for new, old in enumerate(order) if old is not None}
        shape = tuple(1 if p is None else self.shape[p] for p in order)
        return Axes(shape, *(tuple(place[p] for p in axes if p in place) for axes in (self.rows, self.cols)))

    def reduced(self, positions: Iterable[int], keepdims: bool) -> Axes:
        """Return the axes after a reduction."""
        positions = set(positions)
        ones = Axes(tuple(1 if p in positions else n for p, n in enumerate(self.shape)), self.rows, self.cols)
        return ones if keepdims else ones.picked([p for p in range(len(self.shape)) if p not in positions])


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
