"""Reductions of one element, of several at once, and those made of others."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Node
from ..ir.operators import REDUCTIONS


def reduction_over_one(node: Node) -> Node:
    """A reduction along an axis of length 1 is the identity.

    sum, product, mean, max, min and logsumexp of one element are that element, ±inf and NaN included. The sum of
    exponentials relative to the largest is exp(x - x): 1, or NaN for ±inf and NaN. The second moment is (x - x)^2.
    Saves the whole reduction.
    """
    if not node.reduction or node.inputs[0].shape[node.axis] != 1:
        return node
    x = node.inputs[0]
    if REDUCTIONS[node.op].identity_on_one:
        return x
    difference = g.pointwise("subtract", x, x)
    return g.pointwise("exp" if node.op == "expsum" else "square", difference)


def lower_mean(node: Node) -> Node:
    """mean(x) = sum(x) / n, the division last as NumPy does it. Exact."""
    if node.op != "mean":
        return node
    x = node.inputs[0]
    return g.pointwise("divide", g.reduce("sum", x, node.axis), g.count(x.shape[node.axis], node.axis))


def lower_logsumexp(node: Node) -> Node:
    """logsumexp(x) = m + log(sum(exp(x - m))) with m = max(x); m itself where it is not finite.

    Gives +inf for a row with +inf, -inf for a row of -inf, NaN for a row with NaN. The two reductions share one pass.
    In float64 the largest elements are counted, which takes another pass: results near 0 keep their digits.
    """
    if node.op != "logsumexp":
        return node
    x = node.inputs[0]
    top = g.reduce("max", x, node.axis)
    if x.dtype == "float64":
        return g.pointwise("add", g.pointwise("finite_or_zero", top), _counted_logarithm(x, top, node.axis))
    return g.pointwise("plus_log", top, g.reduce("expsum", x, node.axis))


def _counted_logarithm(x: Node, top: Node, axis: int) -> Node:
    """log(sum(exp(x - m))) as log(n) + log(1 + s / n), n elements being the largest and s the sum of the others."""
    one, zero = g.const(1.0), g.const(0.0)
    largest = g.pointwise("equal", x, top)
    count = g.reduce("sum", g.pointwise("where", largest, g.cast(one, x.dtype), zero), axis)
    others = g.pointwise("where", largest, zero, g.pointwise("exp", g.pointwise("subtract", x, top)))
    ratio = g.pointwise("divide", g.reduce("sum", others, axis), count)
    logarithm = g.pointwise("add", g.pointwise("log", count), g.pointwise("log1p", ratio))
    finite = g.pointwise("equal", g.pointwise("subtract", top, top), zero)
    return g.pointwise("where", finite, logarithm, top)


def recognize_expsum(node: Node) -> Node:
    """sum(exp(x - max(x))), written out as in a softmax, is one reduction with the maximum instead of one after it.

    Exact; ±inf and NaN included, for which both are NaN. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "exp":
        return node
    difference = node.inputs[0].inputs[0]
    if difference.op != "subtract":
        return node
    x, top = difference.inputs
    same = top.op == "max" and top.axis == node.axis and top.inputs[0] is x and x.dtype == node.dtype
    return g.reduce("expsum", x, node.axis) if same else node
