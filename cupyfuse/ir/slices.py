"""Slices of matrices, strided copies, and means of groups of columns."""

from __future__ import annotations

from collections.abc import Iterable

from .graph import Node, Shape, reduce, reshape


def slice_view(node: Node, rows: tuple[int, int, int], cols: tuple[int, int, int]) -> Node:
    """View rows and columns of a matrix without a copy; each is given as (first, step, count)."""
    return Node("slice", (node,), (rows[2], cols[2]), node.dtype, dims=(rows[:2], cols[:2]))


def strided_copy(node: Node, dims: Iterable[tuple[int, int]], shape: Shape, offset: int = 0) -> Node:
    """Copy a strided view: permuted, repeated (with stride 0) or sliced dimensions.

    `dims` are the view's (length, stride) pairs and `offset` its first element, in elements of the C-contiguous node;
    `shape` is that of the result.
    """
    return Node("strided", (node,), shape, node.dtype, dims=tuple(dims), offset=offset)


def put(node: Node, value: Node, dims: Iterable[tuple[int, int]], offset: int) -> Node:
    """Copy a node, and write a value in C order to a strided view of the copy, given as for `strided_copy`."""
    return Node("put", (node, value), node.shape, node.dtype, dims=tuple(dims), offset=offset)


def average_pool(node: Node, width: int) -> Node:
    """Average groups of `width` neighbouring columns: (R, C) -> (R, C / width)."""
    rows, cols = node.shape
    groups = reduce("mean", reshape(node, (rows * cols // width, width)), 1)
    return reshape(groups, (rows, cols // width))
