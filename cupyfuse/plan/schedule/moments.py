"""Variances along the rows of a product in one pass, so that an epilogue can compute them tile by tile."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.rebuild import rebuild
from ...rewrite.reductions import recognize_variance

_SOURCES = ("float16", "bfloat16")


def one_pass_variances(graph: Graph) -> Graph:
    """Replace sum((x - mean(x))^2) / n by moment2(x), where x is pointwise work on a 16-bit product of its shape.

    Exact but for rounding: Welford's updates, relative to the first element of each part, are as accurate as two
    passes. Rows with infinities or NaN give NaN either way. Saves a pass over the rows, which would have to be stored.
    """

    def rule(node: Node) -> Node:
        found = recognize_variance(node)
        return found if found.op == "moment2" and found.axis == 1 and _is_of_product(found.inputs[0]) else node

    return rebuild(graph, rule)


def _is_of_product(x: Node) -> bool:
    """Whether a value is computed element by element from a 16-bit product of its shape."""
    order = g.topological([x], lambda n: g.eager_inputs(n) if n.pointwise else ())
    return any(n.op == "matmul" and n.dtype in _SOURCES and n.shape == x.shape for n in order)
