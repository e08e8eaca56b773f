"""Matrices side by side: of results, steps write each piece where it belongs; others are stored first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..ir import graph as g
from ..ir.concats import first_columns
from ..ir.graph import Graph, Node
from ..ir.slices import put
from ..trace import Axes, AxisLabels
from .plan import Output


def stored_where_read(graph: Graph) -> Graph:
    """Store the matrices side by side that something reads as a whole: zeros, to which each piece is written."""
    read = {i for node in graph.order for i in node.inputs if i.op == "concat"}
    read.update(node for _, node in graph.effects if node.op == "concat")
    if not read:
        return graph
    done: dict[Node, Node] = {}
    for node in graph.order:
        done[node] = found = g.with_inputs(node, [done[i] for i in node.inputs])
        if node in read:
            done[node] = _written_to_zeros(found)
    return graph.replace(done)


def _written_to_zeros(node: Node) -> Node:
    rows, cols = node.shape
    found = g.broadcast(g.cast(g.const(0.0), node.dtype), node.shape)
    for piece, first in zip(node.inputs, first_columns(node), strict=False):
        found = put(found, piece, ((rows, cols), (piece.shape[1], 1)), first)
    return found


def with_pieces_apart(graph: Graph) -> Graph:
    """Return a graph whose results are the pieces of results that are matrices side by side; itself without any.

    Each piece is a value of its own, which row programs compute: other steps write without gaps.
    """
    if all(node.op != "concat" for node in graph.outputs):
        return graph
    return Graph(graph.inputs, [piece for node in graph.outputs for piece in _pieces(node)], graph.effects)


def _pieces(node: Node) -> list[Node]:
    if node.op != "concat":
        return [node]
    return [Node("cast", (piece,), piece.shape, piece.dtype) for piece in node.inputs]


def outputs_of(graph: Graph, planned: Graph, axes: Sequence[Axes | AxisLabels]) -> Iterator[Output]:
    """Yield the results of a graph, given the planned one that `with_pieces_apart` has begun."""
    found = iter(planned.outputs)
    for node, own in zip(graph.outputs, axes, strict=True):
        if node.op == "concat":
            yield Output(node, Axes.of(own, node.shape), tuple(next(found) for _ in node.inputs))
        else:
            node = next(found)
            yield Output(node, Axes.of(own, node.shape))
