"""Slices of matrices, repeated rows, strided copies, and means of groups of columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .. import dtypes
from .graph import Node, Shape, reduce, reshape
from .repeats import Repeats

_VECTOR = 16  # bytes


def slice_view(node: Node, rows: tuple[int, int, int], cols: tuple[int, int, int]) -> Node:
    """View rows and columns of a matrix without a copy; each is given as (first, step, count)."""
    return Node("slice", (node,), (rows[2], cols[2]), node.dtype, dims=(rows[:2], cols[:2]))


def repeat_rows(node: Node, rows: int, repeats: Repeats) -> Node:
    """View a matrix as `rows` rows, which come again."""
    return Node("repeat", (node,), (rows, node.shape[1]), node.dtype, repeats=repeats)


def strided_copy(node: Node, dims: Iterable[tuple[int, int]], shape: Shape, offset: int = 0) -> Node:
    """Copy a strided view: permuted, repeated (with stride 0) or sliced dimensions.

    `dims` are the view's (length, stride) pairs and `offset` its first element, in elements of the C-contiguous node;
    `shape` is that of the result.
    """
    return Node("strided", (node,), shape, node.dtype, dims=tuple(dims), offset=offset)


def merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (length, stride) pairs that step through memory as one does; leave out those of length one."""
    found: list[tuple[int, int]] = []
    for length, stride in dims:
        if length != 1 and found and found[-1][1] == length * stride:
            found[-1] = found[-1][0] * length, stride
        elif length != 1:
            found.append((length, stride))
    return found


def begin_packs(cols: int, dtype: str) -> bool:
    """Whether all rows of so many elements begin where kernels load vectors from."""
    return cols * dtypes.ITEMSIZE[dtype] % _VECTOR == 0


def rows_of_copy(dims: Iterable[tuple[int, int]], cols: int, dtype: str) -> Repeats | None:
    """Return how a strided copy repeats rows of `cols` elements of a C-contiguous matrix.

    None if it has no rows, or they are not those of a matrix, in order, each several times in a row or in several
    rounds, or they do not all begin where kernels load vectors from.
    """
    if cols > 1 and not begin_packs(cols, dtype):
        return None
    left = merged(dims)
    if cols > 1:
        length, stride = left.pop() if left else (1, 0)
        if stride != 1 or length % cols:
            return None
        left += [(length // cols, cols)] if length > cols else []
    # The others, from the last one on: how often each row comes, the rows of a block, its rounds, and blocks.
    times = left.pop()[0] if left and left[-1][1] == 0 else 1
    inner, stride = left.pop() if left else (1, 0)
    rounds = left.pop()[0] if left and left[-1][1] == 0 else 1
    outer = left.pop()[1] if left else inner * cols
    block = rounds * inner * times
    if left or stride != cols or outer != inner * cols or block in (0, inner):  # no rows, or each once
        return None
    return Repeats(block, times, inner)


def repeats_of(node: Node, cols: int = 0) -> Repeats | None:
    """Return how a strided node repeats rows of its input, seen as rows of `cols` elements; of its own unless given.

    None as `rows_of_copy`, and for a node without elements or one that begins within its input.
    """
    if node.offset or 0 in node.shape:
        return None
    return rows_of_copy(node.dims, cols or node.shape[1], node.dtype)


class RepeatedColumns(NamedTuple):
    """How a strided copy repeats neighbouring columns of the rows of its input, seen as rows of `length` elements."""

    repeats: Repeats
    length: int
    first: int


def repeated_columns(node: Node) -> RepeatedColumns | None:
    """Return how a strided node repeats neighbouring columns of rows; None if it copies other elements.

    None too where kernels cannot load vectors from the first of them.
    """
    (source,), (*outer, (count, step)) = node.inputs, node.dims
    length = min((s for n, s in outer if n != 1 and s), default=source.size)
    if step != 1 or count != node.shape[1] or source.size % max(length, 1) or node.offset + count > length:
        return None
    if not begin_packs(node.offset, node.dtype) or not begin_packs(count, node.dtype):
        return None
    repeats = rows_of_copy([*outer, (length, 1)], length, node.dtype)
    return None if repeats is None else RepeatedColumns(repeats, length, node.offset)


def put(node: Node, value: Node, dims: Iterable[tuple[int, int]], offset: int) -> Node:
    """Copy a node, and write a value in C order to a strided view of the copy, given as for `strided_copy`."""
    return Node("put", (node, value), node.shape, node.dtype, dims=tuple(dims), offset=offset)


def average_pool(node: Node, width: int) -> Node:
    """Average groups of `width` neighbouring columns: (R, C) -> (R, C / width)."""
    rows, cols = node.shape
    groups = reduce("mean", reshape(node, (rows * cols // width, width)), 1)
    return reshape(groups, (rows, cols // width))
