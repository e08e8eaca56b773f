"""Rewrites of reductions: drop those over one element, lower composed ones, recognise written-out ones."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Node
from ..ir.operators import REDUCTIONS


def drop_unit_reductions(node: Node) -> Node:
    """Replace reductions along an axis of length 1, exactly, ±inf and NaN included.

    Sum, product, mean, max, min and logsumexp are x itself; of -0 NumPy's sum is 0. expsum is exp(x - x), 1 for finite
    x and NaN otherwise; moment2 is (x - x)^2; distances and expdistances are x - x; argmax and argmin are 0. Saves the
    reduction.
    """
    if not node.reduction or node.inputs[0].shape[node.axis] != 1:
        return node
    x = node.inputs[0]
    if REDUCTIONS[node.op].gives_position:
        return g.broadcast(g.cast(g.const(0), node.dtype), node.shape)
    if REDUCTIONS[node.op].identity_on_one:
        return g.cast(x, x.dtype)  # a constant by itself would be weak in promotion
    difference = g.pointwise("subtract", x, x)
    outer = {"expsum": "exp", "moment2": "square"}.get(node.op)
    return g.pointwise(outer, difference) if outer else difference


def lower_mean(node: Node) -> Node:
    """mean(x) = sum(x) / n. Exact: NumPy divides last, too."""
    if node.op != "mean":
        return node
    x = node.inputs[0]
    return g.pointwise("divide", g.reduce("sum", x, node.axis), g.axis_length(x.shape[node.axis], node.axis))


def lower_logsumexp(node: Node) -> Node:
    """logsumexp(x) = m + log(sum(exp(x - m))) with m = max(x); m itself where it is not finite.

    Gives +inf for a row with +inf, -inf for a row of -inf, NaN for a row with NaN. Both reductions share one pass.
    float64 takes another pass to count the maxima, so that results near 0 keep their digits.
    """
    if node.op != "logsumexp":
        return node
    x = node.inputs[0]
    top = g.reduce("max", x, node.axis)
    if x.dtype == "float64":
        return counted_logsumexp(top, *largest_and_others(x, top, node.axis))
    return g.pointwise("plus_log", top, g.reduce("expsum", x, node.axis))


def largest_and_others(x: Node, top: Node, axis: int) -> tuple[Node, Node]:
    """Count the elements along an axis that are the maximum, and sum exp(x - m) over all others."""
    one, zero = g.const(1.0), g.const(0.0)
    largest = g.pointwise("equal", x, top)
    count = g.reduce("sum", g.pointwise("where", largest, g.cast(one, x.dtype), zero), axis)
    others = g.pointwise("where", largest, zero, g.pointwise("exp", g.pointwise("subtract", x, top)))
    return count, g.reduce("sum", others, axis)


def counted_logsumexp(top: Node, count: Node, others: Node) -> Node:
    """m + log(sum(exp(x - m))) = m + log(n) + log1p(s / n), with n maxima and s the sum over all other elements.

    No element may equal m where x is computed twice and rounded differently; one of the others then counts as m.
    """
    zero = g.const(0.0)
    at_least_one = g.pointwise("maximum", count, g.const(1.0))
    rest = g.pointwise("add", others, g.pointwise("subtract", count, at_least_one))
    ratio = g.pointwise("divide", rest, at_least_one)
    logarithm = g.pointwise("add", g.pointwise("log", at_least_one), g.pointwise("log1p", ratio))
    finite = g.pointwise("equal", g.pointwise("subtract", top, top), zero)
    counted = g.pointwise("where", finite, logarithm, top)
    return g.pointwise("add", g.pointwise("finite_or_zero", top), counted)


def recognize_expsum(node: Node) -> Node:
    """sum(exp(x - max(x))) = expsum(x), one online reduction together with the maximum.

    Exact, ±inf and NaN included, for which both are NaN. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "exp":
        return node
    difference = node.inputs[0].inputs[0]
    if difference.op != "subtract":
        return node
    x, top = difference.inputs
    same = top.op == "max" and top.axis == node.axis and top.inputs[0] is x and x.dtype == node.dtype
    return g.reduce("expsum", x, node.axis) if same else node
