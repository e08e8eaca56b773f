"""Matrices side by side: what is computed of them is computed of each, and they are put side by side at the end."""

from __future__ import annotations

import itertools

from ..ir import graph as g
from ..ir.concats import columns_of, columns_shown, concat, first_columns
from ..ir.graph import Node
from ..ir.slices import repeats_of, strided_copy


def sink_concats(node: Node) -> Node:
    """f([a, b], c) = [f(a, c's first columns), f(b, c's last ones)] for pointwise f, and columns of [a, b] are theirs.

    Exact. Saves storing [a, b]: at the end of a function, steps write its pieces where they belong.
    """
    if node.op == "slice" and node.inputs[0].op == "concat":
        shown = columns_shown(node)
        return node if shown is None else _columns(node.inputs[0], *shown)
    if node.op == "concat" and any(i.op == "concat" for i in node.inputs):
        return concat([piece for i in node.inputs for piece in (i.inputs if i.op == "concat" else (i,))])
    ends = {end for i in node.inputs if i.op == "concat" for end in first_columns(i)}
    if not ends or not node.pointwise or node.op == "guard":
        return node
    pieces = []
    for first, end in itertools.pairwise(sorted(ends)):
        operands = [_columns(i, first, end - first) for i in node.inputs]
        pieces.append(g.with_inputs(node, operands, (node.shape[0], end - first)))
    return concat(pieces)


def _columns(node: Node, first: int, count: int) -> Node:
    """Return neighbouring columns of a value: of the pieces that have them, if it is put together of some."""
    if node.op != "concat" or count == node.shape[1]:
        return columns_of(node, first, count)
    found, ends = [], first_columns(node)
    for piece, start, end in zip(node.inputs, ends, ends[1:], strict=False):
        low, high = max(first, start), min(first + count, end)
        if low < high:
            found.append(g.broadcast(columns_of(piece, low - start, high - low), (node.shape[0], high - low)))
    return concat(found)


def repeat_columns(node: Node) -> Node:
    """Columns of rows that come again are columns of the rows, which come again. Exact; nothing else is copied."""
    shown = columns_shown(node) if node.op == "slice" and node.inputs[0].op == "strided" else None
    if shown is None or repeats_of(node.inputs[0]) is None:
        return node
    (copy,), (first, count) = node.inputs, shown
    *outer, (length, _) = copy.dims
    if length != copy.shape[1]:
        return node
    return strided_copy(copy.inputs[0], [*outer, (count, 1)], node.shape, first)
