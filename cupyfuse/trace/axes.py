"""Axes of traced arrays: the map from the user's axes to rows and columns of a node."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .user_code import user_line

# For each axis of the user's array: 0 if it is along the rows of the node, 1 along the columns, None for neither.
AxisLabels = tuple["int | None", ...]


@dataclass(frozen=True)
class Axes:
    """The map from the axes of an array of any rank to the rows and columns of its node.

    Vectors, transposes, new axes and ranks above two exist only here, not in the graph.

    Attributes
    ----------
    shape : tuple of int
        Of the array.
    rows, cols : tuple of int
        The array's axes along the rows and along the columns of the node, the slowest first. An axis in neither has
        length one.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @classmethod
    def of(cls, labels: Axes | AxisLabels, shape: tuple[int, int]) -> Axes:
        """Return the axes of a node of a shape, from labels, or from the axes of a node that may have more rows.

        Folded axes of a node with more rows become those of a matrix.
        """
        if isinstance(labels, Axes):
            if labels.node_shape == shape:
                return labels
            labels = (0, 1) if labels.folded else labels.labels
        rows, cols = (tuple(p for p, a in enumerate(labels) if a == k) for k in (0, 1))
        return cls(tuple(1 if a is None else shape[a] for a in labels), rows, cols)

    @classmethod
    def by_rows(cls, shape: tuple[int, ...]) -> Axes:
        """Fold all axes but the last into rows, as in C-contiguous memory; a vector is one row."""
        order = tuple(range(len(shape)))
        return cls(shape, order[:-1], order[-1:])

    @property
    def node_shape(self) -> tuple[int, int]:
        return self.length(self.rows), self.length(self.cols)

    @property
    def labels(self) -> AxisLabels:
        return tuple(0 if p in self.rows else 1 if p in self.cols else None for p in range(len(self.shape)))

    @cached_property
    def long(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes along rows and along columns whose length is not one."""
        rows, cols = (tuple(p for p in axes if self.shape[p] != 1) for axes in (self.rows, self.cols))
        return rows, cols

    @property
    def is_matrix_like(self) -> bool:
        """Whether rows and columns of the node are at most one axis each, not counting axes of length one."""
        return max(map(len, self.long)) <= 1

    @property
    def folded(self) -> bool:
        """Whether several axes are along the rows or along the columns."""
        return max(len(self.rows), len(self.cols)) > 1

    @cached_property
    def in_order(self) -> bool:
        """Whether the elements of the node, row by row, are those of the array in C order."""
        rows, cols = self.long
        return list(rows + cols) == sorted(rows + cols)

    @property
    def transposed(self) -> bool:
        """Whether the transpose of the node has its elements in C order."""
        rows, cols = self.long
        return list(cols + rows) == sorted(cols + rows)

    def length(self, axes: Iterable[int]) -> int:
        """Return the number of elements along some axes together."""
        return math.prod(self.shape[p] for p in axes)

    def picked(self, order: Sequence[int | None]) -> Axes:
        """Return the axes in another order, with new axes for None; those left out must have length one."""
        new_place = {old: new for new, old in enumerate(order) if old is not None}
        shape = tuple(1 if p is None else self.shape[p] for p in order)
        return Axes(shape, *(tuple(new_place[p] for p in axes if p in new_place) for axes in (self.rows, self.cols)))

    def reduced(self, positions: Iterable[int], keepdims: bool) -> Axes:
        """Return the axes after a reduction along some of them."""
        positions = set(positions)
        ones = Axes(tuple(1 if p in positions else n for p, n in enumerate(self.shape)), self.rows, self.cols)
        return ones if keepdims else ones.picked([p for p in range(len(self.shape)) if p not in positions])


def as_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple; a length alone, and lists, ranges and arrays of lengths are shapes to NumPy, too."""
    if isinstance(shape, np.ndarray):
        shape = np.atleast_1d(shape)
    elif not isinstance(shape, (tuple, list, range)):
        shape = (shape,)
    return tuple(map(operator.index, shape))


def normalize_axes(axis: Any, ndim: int, operation: str = "axis") -> tuple[int, ...]:
    """Resolve an `axis` argument to a tuple of non-negative axes; None is all axes.

    Raises
    ------
    TypeError, AxisError, ValueError
        An axis is not an integer, is out of bounds, or is given twice; messages name the operation.
    """
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    result = []
    for a in axes:
        try:
            if isinstance(a, (bool, np.bool_)):  # which Python takes for integers, and NumPy does not
                raise TypeError
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
