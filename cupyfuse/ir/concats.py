"""Matrices side by side, and columns of values: the gradient of the one is the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .. import dtypes
from . import graph as g
from .graph import Node
from .kinds import is_product
from .parts import Part
from .products import sum_with_row


def concat(pieces: Sequence[Node]) -> Node:
    """Put matrices of one dtype, with as many rows each, side by side."""
    rows, dtype = pieces[0].shape[0], pieces[0].dtype
    assert all(p.shape[0] == rows and p.dtype == dtype for p in pieces)
    if len(pieces) == 1:
        return pieces[0]
    return Node("concat", tuple(pieces), (rows, sum(p.shape[1] for p in pieces)), dtype)


def column_bounds(node: Node) -> list[int]:
    """Return the first column of each piece of a concat, and last how many columns there are in all."""
    return list(itertools.accumulate((p.shape[1] for p in node.inputs), initial=0))


def columns_of(node: Node, first: int, count: int) -> Node:
    """Return neighbouring columns of a value: computed from those of its operands, or as a view of it in memory.

    A value that has one column, which broadcasts, is its own part.
    """
    rows, cols = node.shape
    if cols == 1 or count == cols:
        return node
    along_rows = ((rows, 1),) if rows != 1 else ()
    along_cols = ((count, 1),) if count != 1 else ()
    part = Part((along_rows, 0), (along_cols, first), (rows, count), node.shape)
    return part.again(node, _rounded_sums(node)) or part.of_stored(node)


def _rounded_sums(node: Node) -> set[Node]:
    """Find the sums of 16-bit products with a bias beneath a value: they are stored, rounded as in the code as written.

    Their parts, computed again of parts of the product, would read that rounded at a size that the bias may cancel.
    """
    computed = g.topological([node], lambda n: n.inputs if n.pointwise and not _is_rounded_sum(n) else ())
    return set(filter(_is_rounded_sum, computed))


def _is_rounded_sum(node: Node) -> bool:
    if node.op != "add" or dtypes.compute_dtype(node.dtype) == node.dtype:
        return False
    return any(is_product(x) and sum_with_row(x, [node]) is node for x in node.inputs)


def columns_shown(node: Node) -> tuple[int, int] | None:
    """Return the first column, and how many, that a slice shows of all rows of its input; None for other slices."""
    (row, down), (col, across) = node.dims
    all_rows = node.shape[0] == node.inputs[0].shape[0] and row == 0 and (down == 1 or node.shape[0] == 1)
    return (col, node.shape[1]) if all_rows and (across == 1 or node.shape[1] == 1) else None


def between_zeros(node: Node, first: int, cols: int) -> Node:
    """Put a matrix among zeros: the result has `cols` columns, those of the matrix from the column `first` on."""
    rows, count = node.shape

    def zeros(width: int) -> list[Node]:
        zero = g.cast(g.const(0.0), node.dtype)
        return [g.broadcast(zero, (rows, width))] if width else []

    return concat([*zeros(first), node, *zeros(cols - first - count)])
