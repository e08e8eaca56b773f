"""Variances along the rows of a product in one pass, so that an epilogue can compute them tile by tile."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node

_SOURCES = ("float16", "bfloat16")


def one_pass_variances(graph: Graph) -> Graph:
    """Replace sum((x - mean(x))^2) / n by moment2(x), where x is pointwise work on a 16-bit product of its shape.

    Exact but for rounding: Welford's updates, relative to the first element of each part, are as accurate as two
    passes. Rows with infinities or NaN give NaN either way. Saves a pass over the rows, which would have to be stored.
    """

    def rule(node: Node) -> Node:
        x = _variance_operand(node)
        return g.reduce("moment2", x, 1) if x is not None and _is_of_product(x) else node

    return g.rewrite(graph, rule)


def _variance_operand(node: Node) -> Node | None:
    """Return x where a value is mean((x - mean(x))^2) along the rows; else None."""
    squares = _mean_operand(node)
    if squares is None or squares.op != "square" or squares.inputs[0].op != "subtract":
        return None
    x, centre = squares.inputs[0].inputs
    return x if _mean_operand(centre) is x else None


def _mean_operand(node: Node) -> Node | None:
    """Return x where a value is sum(x) / n along rows of n elements; else None."""
    if node.op != "divide" or node.inputs[0].op != "sum" or node.inputs[0].axis != 1:
        return None
    total, count = node.inputs
    x = total.inputs[0]
    return x if count.op == "const" and count.number is None and count.value == x.shape[1] else None


def _is_of_product(x: Node) -> bool:
    """Whether a value is computed element by element from a 16-bit product of its shape."""
    order = g.topological([x], lambda n: g.eager_inputs(n) if n.pointwise else ())
    return any(n.op == "matmul" and n.dtype in _SOURCES and n.shape == x.shape for n in order)
