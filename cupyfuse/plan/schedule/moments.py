"""Variances along the rows of a product in one pass, so that an epilogue can compute them tile by tile."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...rewrite import one_pass_variances
from .tiles import is_half_product


def one_pass_product_variances(graph: Graph) -> Graph:
    """Take variances, and sums of squared distances from the mean, along the rows of products in one pass.

    The products are those that our kernel of 16-bit operands may compute; the rows may also be of pointwise work on
    one. Saves a pass over the rows, which would have to be stored.
    """
    return one_pass_variances(graph, lambda x, axis: axis == 1 and _is_of_product(x))


def _is_of_product(x: Node) -> bool:
    """Whether a value is computed element by element from such a product of its shape."""
    order = g.topological([x], lambda n: g.eager_inputs(n) if n.pointwise else ())
    return any(n.shape == x.shape and is_half_product(n) for n in order)
