"""Cotangents of quotients whose two operands belong together: shares of a sum, and reciprocals of deviations."""

from __future__ import annotations

from collections.abc import Container

from ..ir import graph as g
from ..ir.graph import Node
from .cotangents import same_values, sum_to_shape, unchanged


def cotangent_of_share(node: Node, cotangent: Node, wanted: Container[Node]) -> tuple[Node, Node] | None:
    """Return what q = e / sum(e) depends on, with its cotangent: (c - sum(c q)) / sum(e) of e; None of other nodes.

    Of u, where e = exp(u) as in softmax, it is q (c - sum(c q)), the form of PyTorch's own gradient. Through both
    operands of the quotient it would be several quotients of each element, and the difference of two large terms.
    None too where a value in between is `wanted`: it has a gradient of its own.
    """
    if node.op != "divide":
        return None
    e, (*between, total) = node.inputs[0], same_values(node.inputs[1])
    if not (total.reduction and _is_sum_of(total, e)) or e.dtype != node.dtype or e.shape != node.shape:
        return None
    is_exponential = e.op == "exp" and e.inputs[0].dtype == e.dtype
    between += [total, *same_values(total.inputs[0])[:-1], *([e] if is_exponential else [])]
    if any(n in wanted for n in between):
        return None
    chosen = g.reduce("sum", g.pointwise("multiply", g.broadcast(cotangent, node.shape), node), total.axis)
    rest = g.pointwise("subtract", cotangent, chosen)
    if is_exponential:
        return e.inputs[0], g.pointwise("multiply", rest, node)
    return e, g.pointwise("divide", rest, node.inputs[1])


def _is_sum_of(total: Node, e: Node) -> bool:
    """Whether a reduction is the sum of e, or that of exp(x - max(x)) where this is e."""
    if e.shape[total.axis] == 1:
        return False
    if total.op == "sum":
        return unchanged(total.inputs[0]) is e
    if total.op != "expsum" or e.op != "exp" or e.inputs[0].op != "subtract":
        return False
    x, top = e.inputs[0].inputs
    top = unchanged(top)
    extremum = unchanged(top.inputs[0]) if top.op == "stop_gradient" else top
    is_maximum = extremum.op == "max" and extremum.axis == total.axis
    return is_maximum and extremum.inputs[0] is total.inputs[0] is x and top.op == "stop_gradient"


def cotangent_of_divisor(
    node: Node, operand: int, cotangent: Node, forward: Container[Node], wanted: Container[Node]
) -> tuple[Node, Node] | None:
    """Return s and its cotangent, -sum(c y) / s, where y = x r and the operand r = 1 / s is smaller; else None.

    The derivative by r would be the sum of c x instead, beside that of c y which a scale behind y needs. Holds for
    roots s alone, as deviations are: their reciprocals are below 1e23 in float32. Others could take y out of range, and
    c y is NaN where c is 0 because what follows y is constant there. None too where a value in between is `wanted`: it
    has a gradient of its own.
    """
    if node.op != "multiply":
        return None
    between = same_values(node.inputs[operand])
    factor = between[-1]
    if factor.op != "reciprocal" or factor.size == node.size or factor.dtype != node.dtype:
        return None
    if unchanged(factor.inputs[0]).op != "sqrt" or any(n in wanted for n in between):
        return None
    total = sum_to_shape(g.pointwise("multiply", cotangent, node), factor.shape, node.shape, forward)
    return factor.inputs[0], g.pointwise("multiply", g.pointwise("negative", total), factor)
