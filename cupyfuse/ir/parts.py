"""Parts of matrices, means of groups of columns, and copies of elements at regular places."""

from __future__ import annotations

from collections.abc import Iterable

from .graph import Node, Shape, reduce, reshape


def part(node: Node, rows: tuple[int, int, int], cols: tuple[int, int, int]) -> Node:
    """View rows and columns, given as (first, step, count)."""
    return Node("part", (node,), (rows[2], cols[2]), node.dtype, dims=(rows[:2], cols[:2]))


def strided(node: Node, dims: Iterable[tuple[int, int]], shape: Shape, offset: int = 0) -> Node:
    """Copy elements from regular places: dimensions permuted, repeated (with stride 0), or cut."""
    return Node("strided", (node,), shape, node.dtype, dims=tuple(dims), offset=offset)


def put(node: Node, value: Node, dims: Iterable[tuple[int, int]], offset: int) -> Node:
    """Replace elements at regular places by those of a value, in its C order."""
    return Node("put", (node, value), node.shape, node.dtype, dims=tuple(dims), offset=offset)


def average_pool(node: Node, width: int) -> Node:
    """Means of groups of `width` neighbouring columns: (R, C) -> (R, C / width)."""
    rows, cols = node.shape
    groups = reduce("mean", reshape(node, (rows * cols // width, width)), 1)
    return reshape(groups, (rows, cols // width))
