"""Matrices side by side: what is computed of them is computed of each, and they are put side by side at the end."""

from __future__ import annotations

import itertools

from ..ir import graph as g
from ..ir.concats import columns_of, columns_shown, concat, first_columns
from ..ir.graph import Node


def sink_concats(node: Node) -> Node:
    """f([a, b], c) = [f(a, c's first columns), f(b, c's last ones)] for pointwise f, and columns of [a, b] are theirs.

    Exact. Saves storing [a, b]: at the end of a function, steps write its pieces where they belong.
    """
    if node.op == "slice" and node.inputs[0].op == "concat":
        shown = columns_shown(node)
        return node if shown is None else g.broadcast(columns_of(node.inputs[0], *shown), node.shape)
    ends = {end for i in node.inputs if i.op == "concat" for end in first_columns(i)}
    if not ends or not node.pointwise or node.op == "guard":
        return node
    pieces = []
    for first, end in itertools.pairwise(sorted(ends)):
        operands = [columns_of(i, first, end - first) for i in node.inputs]
        pieces.append(g.with_inputs(node, operands, (node.shape[0], end - first)))
    return concat(pieces)
