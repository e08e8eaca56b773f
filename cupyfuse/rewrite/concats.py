"""Matrices side by side: what is computed of them is computed of each, and only results are put side by side."""

from __future__ import annotations

import functools
import itertools

from ..ir import graph as g
from ..ir.concats import column_bounds, columns_of, columns_shown, concat
from ..ir.graph import Graph, Node
from ..ir.slices import repeats_of, strided_copy

# What combines reductions of rows of the pieces into that of the whole.
_COMBINED = {"sum": "add", "mean": "add", "max": "maximum", "min": "minimum"}


def sink_concats(graph: Graph) -> Graph:
    """f([a, b], c) = [f(a, c's first columns), f(b, c's last ones)] for pointwise f, and columns of [a, b] are theirs.

    Sums, means and extrema of rows are combined from those of the pieces, if these have one width. Exact, but for the
    order of sums. Saves storing [a, b]: steps write pieces where they belong. What any other reduction of rows reads is
    computed as a whole.
    """
    if all(node.op != "concat" for node in graph.order):
        return graph
    whole = _read_as_a_whole(graph)
    sinking: set[Node] = set()  # concats of the rebuilt graph whose readers are computed of each piece
    done: dict[Node, Node] = {}
    for node in graph.order:
        found = done[node] = _sunk(g.with_inputs(node, [done[i] for i in node.inputs]), sinking)
        if found.op == "concat" and node not in whole:
            sinking.add(found)
    return graph.replace(done)


def _read_as_a_whole(graph: Graph) -> set[Node]:
    """Find the values that are not computed piece by piece, for the sake of a reduction that reads them or a later one.

    That is one of rows which those of pieces cannot be combined into.
    """
    readers, found = g.users(graph.roots), set[Node]()
    bounds: dict[Node, list[int]] = {}  # of the pieces of values
    for node in graph.order:
        own = _bounds(node, bounds)
        if len(own) > 2:
            bounds[node] = own
    for node in reversed(graph.order):
        if node in bounds:
            even = len({end - first for first, end in itertools.pairwise(bounds[node])}) == 1
            for reader in readers.get(node, ()):
                reduced = reader.reduction and reader.axis == 1
                if reader in found or (reduced and not (even and _is_combined(reader))):
                    found.add(node)
    return found


def _bounds(node: Node, known: dict[Node, list[int]]) -> list[int]:
    """Return the bounds of the pieces that a value would be computed in; none if it is no such value."""
    if node.op == "concat":
        return column_bounds(node)
    if node.op == "slice" and node.inputs[0] in known:
        first, count = columns_shown(node) or (0, 0)
        within = [bound - first for bound in known[node.inputs[0]] if first < bound < first + count]
        return [0, *within, count]
    if not node.pointwise:
        return []
    # Those of a vector for all rows cut a matrix, too.
    return sorted({bound for i in node.inputs if i.shape[1] == node.shape[1] for bound in known.get(i, ())})


def _is_combined(node: Node) -> bool:
    """Whether a reduction of rows is combined from those of pieces."""
    return node.op in _COMBINED and not node.gradient


def _sunk(node: Node, sinking: set[Node]) -> Node:
    """Compute a node from the pieces of operands in `sinking`; return it as it is where it needs these as a whole."""
    operands = [i for i in node.inputs if i in sinking]
    if not operands:
        return node
    if node.op == "slice":
        shown = columns_shown(node)
        return node if shown is None else _columns(operands[0], *shown, sinking)
    if node.op == "concat":
        return concat([piece for i in node.inputs for piece in (i.inputs if i in sinking else (i,))])
    if node.reduction and node.axis == 1 and _is_combined(node):
        return _reduced(node, operands[0])
    if not node.pointwise or node.op == "guard":
        return node
    bounds = sorted({bound for i in operands for bound in column_bounds(i)})
    pieces = []
    for first, end in itertools.pairwise(bounds):
        of_piece = [_columns(i, first, end - first, sinking) for i in node.inputs]
        pieces.append(g.with_inputs(node, of_piece, (node.shape[0], end - first)))
    return concat(pieces)


def _reduced(node: Node, operand: Node) -> Node:
    """Reduce the rows of each piece, and combine the results."""
    combine = functools.partial(g.pointwise, _COMBINED[node.op])
    op = "sum" if node.op == "mean" else node.op
    total = functools.reduce(combine, [g.reduce(op, piece, 1) for piece in operand.inputs])
    return total if node.op != "mean" else g.pointwise("divide", total, g.axis_length(operand.shape[1], 1))


def _columns(node: Node, first: int, count: int, sinking: set[Node]) -> Node:
    """Return neighbouring columns of a value; of one in `sinking`, those of the pieces that have them."""
    if node not in sinking or count == node.shape[1]:
        return columns_of(node, first, count)
    found = []
    for piece, (start, end) in zip(node.inputs, itertools.pairwise(column_bounds(node)), strict=True):
        low, high = max(first, start), min(first + count, end)
        if low < high:
            found.append(columns_of(piece, low - start, high - low))
    return concat(found)


def repeat_columns(node: Node) -> Node:
    """Columns of rows that come again are the rows' columns, which come again. Exact; saves copying the others."""
    shown = columns_shown(node) if node.op == "slice" and node.inputs[0].op == "strided" else None
    if shown is None or repeats_of(node.inputs[0]) is None:
        return node
    (copy,), (first, count) = node.inputs, shown
    *outer, (length, _) = copy.dims
    if length != copy.shape[1]:
        return node
    return strided_copy(copy.inputs[0], [*outer, (count, 1)], node.shape, first)
