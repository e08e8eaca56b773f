"""Slices of matrices, repeated rows, strided copies, and means of groups of columns."""

from __future__ import annotations

from collections.abc import Iterable

from .. import dtypes
from .graph import Node, Shape, reduce, reshape

_VECTOR = 16  # bytes


def slice_view(node: Node, rows: tuple[int, int, int], cols: tuple[int, int, int]) -> Node:
    """View rows and columns of a matrix without a copy; each is given as (first, step, count)."""
    return Node("slice", (node,), (rows[2], cols[2]), node.dtype, dims=(rows[:2], cols[:2]))


def repeat_rows(node: Node, rows: int, block: int, inner: int) -> Node:
    """View a matrix as `rows` rows, of which row r is row r // block * inner + r % inner."""
    return Node("repeat", (node,), (rows, node.shape[1]), node.dtype, dims=((block, inner),))


def strided_copy(node: Node, dims: Iterable[tuple[int, int]], shape: Shape, offset: int = 0) -> Node:
    """Copy a strided view: permuted, repeated (with stride 0) or sliced dimensions.

    `dims` are the view's (length, stride) pairs and `offset` its first element, in elements of the C-contiguous node;
    `shape` is that of the result.
    """
    return Node("strided", (node,), shape, node.dtype, dims=tuple(dims), offset=offset)


def rows_of_copy(dims: Iterable[tuple[int, int]], cols: int, dtype: str) -> tuple[int, int] | None:
    """Return `block` and `inner` of the rows that a strided copy repeats, as `repeat_rows` takes them.

    None if its rows of `cols` elements are not all those of a C-contiguous matrix, in order, or do not all begin where
    kernels load vectors from.
    """
    if cols > 1 and cols * dtypes.ITEMSIZE[dtype] % _VECTOR:
        return None
    merged: list[tuple[int, int]] = []
    for length, stride in dims:
        if length != 1 and merged and merged[-1][1] == length * stride:
            merged[-1] = merged[-1][0] * length, stride
        elif length != 1:
            merged.append((length, stride))
    if cols > 1:
        length, stride = merged.pop() if merged else (1, 0)
        if stride != 1 or length % cols:
            return None
        merged += [(length // cols, cols)] if length > cols else []
    lengths, strides = [n for n, _ in merged], [stride for _, stride in merged]
    if strides == [0, cols]:
        return lengths[0] * lengths[1], lengths[1]
    if strides == [cols, 0]:
        return lengths[1], 1
    if len(merged) == 3 and strides[1:] == [0, cols] and strides[0] == lengths[2] * cols:
        return lengths[1] * lengths[2], lengths[2]
    return None


def put(node: Node, value: Node, dims: Iterable[tuple[int, int]], offset: int) -> Node:
    """Copy a node, and write a value in C order to a strided view of the copy, given as for `strided_copy`."""
    return Node("put", (node, value), node.shape, node.dtype, dims=tuple(dims), offset=offset)


def average_pool(node: Node, width: int) -> Node:
    """Average groups of `width` neighbouring columns: (R, C) -> (R, C / width)."""
    rows, cols = node.shape
    groups = reduce("mean", reshape(node, (rows * cols // width, width)), 1)
    return reshape(groups, (rows, cols // width))
