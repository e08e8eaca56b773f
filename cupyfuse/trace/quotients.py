"""Cotangents of quotients whose two operands belong together: shares of a sum, and reciprocals of deviations."""

from __future__ import annotations

from collections.abc import Container

from ..ir import graph as g
from ..ir.graph import Node
from ..ir.kinds import squared
from .cotangents import same_values, sum_to_shape, unchanged


def cotangent_of_share(node: Node, cotangent: Node, wanted: Container[Node]) -> tuple[Node, Node] | None:
    """Return what q = e / sum(e) depends on, with its cotangent: (c - sum(c q)) / sum(e) of e; None of other nodes.

    Of u, where e = exp(u) as in softmax, it is q (c - sum(c q)), the form of PyTorch's own gradient. Through both
    operands of the quotient it would be several quotients of each element, and the difference of two large terms.
    None too where a value in between is `wanted`: it has a gradient of its own.
    """
    if not is_share(node):
        return None
    e, (*between, total) = node.inputs[0], same_values(node.inputs[1])
    if any(n in wanted for n in (*between, total, *same_values(total.inputs[0])[:-1])):
        return None
    is_exponential = e.op == "exp" and e.inputs[0].dtype == e.dtype and e not in wanted
    chosen = g.reduce("sum", g.pointwise("multiply", g.broadcast(cotangent, node.shape), node), total.axis)
    rest = g.pointwise("subtract", cotangent, chosen)
    if is_exponential:
        return e.inputs[0], g.pointwise("multiply", rest, node)
    return e, g.pointwise("divide", rest, node.inputs[1])


def is_share(node: Node) -> bool:
    """Whether a value is a share of a sum, e / sum(e), as softmax is."""
    if node.op != "divide":
        return False
    e, total = node.inputs[0], same_values(node.inputs[1])[-1]
    return total.reduction and _is_sum_of(total, e) and e.dtype == node.dtype and e.shape == node.shape


def _is_sum_of(total: Node, e: Node) -> bool:
    """Whether a reduction is the sum of e, or that of exp(x - max(x)) where this is e; not of one element, x / x."""
    if e.shape[total.axis] == 1:
        return False
    if total.op == "sum":
        return unchanged(total.inputs[0]) is e
    if total.op != "expsum" or e.op != "exp" or e.inputs[0].op != "subtract":
        return False
    x, top = e.inputs[0].inputs
    top = unchanged(top)
    if top.op != "stop_gradient":
        return False
    largest = unchanged(top.inputs[0])
    return largest.op == "max" and largest.axis == total.axis and largest.inputs[0] is total.inputs[0] is x


def cotangent_of_divisor(
    node: Node, operand: int, cotangent: Node, forward: Container[Node], wanted: Container[Node]
) -> tuple[Node, Node] | None:
    """Return s and its cotangent, -sum(c y) / s, where y = x r, and r = 1 / s for a deviation s of x; else None.

    The derivative by r would be the sum of c x instead, beside that of c y which a scale behind y needs. Of other s, y
    could be infinite, and c y NaN where c is 0 because what follows y is constant there. None too where a value in
    between is `wanted`: it has a gradient of its own.
    """
    if node.op != "multiply":
        return None
    between, x = same_values(node.inputs[operand]), unchanged(node.inputs[1 - operand])
    factor = between[-1]
    if factor.op != "reciprocal" or factor.size == node.size or factor.dtype != node.dtype:
        return None
    if not _is_deviation_of(x, unchanged(factor.inputs[0])) or any(n in wanted for n in between):
        return None
    total = sum_to_shape(g.pointwise("multiply", cotangent, node), factor.shape, node.shape, forward)
    return factor.inputs[0], g.pointwise("multiply", g.pointwise("negative", total), factor)


def _is_deviation_of(x: Node, root: Node) -> bool:
    """Whether a value is the root of the mean of x^2, or of the variance of what x is less its mean.

    Numbers may be added, and scale it.
    """
    if root.op != "sqrt":
        return False
    value = unchanged(root.inputs[0])
    while value.op in ("add", "multiply", "divide"):
        first, second = map(unchanged, value.inputs)
        if second.op != "const":
            break
        value = first
    if not value.reduction:
        return False
    of = unchanged(value.inputs[0])
    if value.op == "moment2":
        return x.op == "subtract" and unchanged(x.inputs[0]) is of
    base = squared(of)
    return value.op in ("mean", "sum") and base is not None and unchanged(base) is x
