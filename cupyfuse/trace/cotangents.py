"""What becomes of a cotangent on its way to an operand: it is scaled by a derivative, and summed to a shape."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node, Shape

# Scaling ------------------------------------------------------------------------------------------------------------


def scale_cotangent(cotangent: Node, partial: Node | float, given: Container[Node] = ()) -> Node | None:
    """Multiply a cotangent by a partial derivative; None for zero.

    A derivative `where(c, a, b)` selects between products, so that an infinite cotangent of an excluded element gives
    0. A quotient divides, which rounds once; a number in a product multiplies the cotangent where that is smaller.
    Nodes in `given`, the values of the forward pass, are plain factors, whose zeros times infinity are NaN.

    Parameters
    ----------
    cotangent : of the result
    partial : the derivative of the result by one input
    given : the nodes of the forward pass
    """
    if not isinstance(partial, Node):
        return _scale_by_number(cotangent, partial)
    if partial in given and (partial.op in _CHOICES or _is_zero(partial)):
        return g.pointwise("multiply", cotangent, partial)
    if partial.op == "const" and not partial.name:
        return _scale_by_number(cotangent, float(partial.value))
    if partial.op == "where":
        condition, chosen, other = partial.inputs
        return _scale_by_choice(cotangent, condition, chosen, other, given)
    if partial.op in g.PASS_THROUGH and partial.inputs[0].op == "where":
        condition, *branches = partial.inputs[0].inputs
        chosen, other = (b if b.op == "const" else g.cast(b, partial.dtype) for b in branches)
        return _scale_by_choice(cotangent, condition, chosen, other, given)
    if partial.op == "divide" and partial.inputs[0].op == "const":
        upper = scale_cotangent(cotangent, partial.inputs[0])
        return None if upper is None else g.pointwise("divide", upper, partial.inputs[1])
    if partial.op == "multiply" and partial not in given and cotangent.size < partial.size:
        numbers = [i for i in partial.inputs if i.op == "const" and not i.name]
        if len(numbers) == 1:
            (other,) = (i for i in partial.inputs if i not in numbers)
            upper = _scale_by_number(cotangent, float(numbers[0].value))
            return None if upper is None else g.pointwise("multiply", upper, g.cast(other, partial.dtype))
    return g.pointwise("multiply", cotangent, partial)


def _scale_by_number(cotangent: Node, number: float) -> Node | None:
    if number == 0.0:
        return None
    if number == 1.0:
        return cotangent
    return g.pointwise("negative", cotangent) if number == -1.0 else g.pointwise("multiply", cotangent, g.const(number))


def _scale_by_choice(
    cotangent: Node, condition: Node, chosen: Node, other: Node, given: Container[Node]
) -> Node | None:
    """Scale by one of two derivatives where a condition holds, by the other elsewhere."""
    if condition.op == "const":
        return scale_cotangent(cotangent, chosen if condition.value else other, given)
    products = [scale_cotangent(cotangent, partial, given) for partial in (chosen, other)]
    if products == [None, None]:
        return None
    return g.pointwise("where", condition, *(g.const(0.0) if p is None else p for p in products))


_CHOICES = ("where", *g.PASS_THROUGH)


def _is_zero(node: Node) -> bool:
    return node.op == "const" and not node.name and node.value == 0


# Sums ---------------------------------------------------------------------------------------------------------------


def sum_to_shape(cotangent: Node, shape: Shape, whole: Shape, forward: Container[Node] = ()) -> Node:
    """Sum a cotangent of shape `whole` back to `shape` (the adjoint of broadcasting).

    Nodes in `forward`, the values of the forward pass, are summed as they are: see `_sum_of_multiples`.
    """
    for axis in (1, 0):
        if shape[axis] == 1 != whole[axis]:
            if cotangent.shape[axis] == 1 and whole[axis]:  # constant along the axis: its sum is a multiple
                cotangent = g.pointwise("multiply", cotangent, g.axis_length(whole[axis], axis))
                continue
            if cotangent.shape[axis] == 1:  # the sum of nothing is zero, where a multiple of a mean of nothing is NaN
                cotangent = g.broadcast(cotangent, (0, cotangent.shape[1]) if axis == 0 else (cotangent.shape[0], 0))
            cotangent = _sum_of_multiples(cotangent, axis, forward)
    return cotangent


class _Factor(NamedTuple):
    """What is applied to a value: an operator, and its other operand; None where there is none."""

    op: str
    operand: Node | None

    @property
    def stays(self) -> bool:
        """Whether it stays within a sum: one number that is no constant, as of a loss, multiplies the elements, too."""
        return self.operand is not None and self.operand.shape == (1, 1) and self.operand.op != "const"

    def applied(self, value: Node) -> Node:
        return g.pointwise(self.op, value) if self.operand is None else g.pointwise(self.op, value, self.operand)


def _sum_of_multiples(cotangent: Node, axis: int, forward: Container[Node]) -> Node:
    """Sum along an axis, and scale the sum by factors that do not vary along it: sum(c v) = v sum(c).

    Saves an operation for each element, and makes the sums of gradients of one value alike: those of batch norm, with
    regard to the deviation and the scale, are two sums. Holds to rounding, and for infinite factors as PyTorch's own
    gradients of norms: where a factor is infinite, a sum of zero becomes NaN. Factors within values of the forward pass
    stay: without them, elements may be beyond a dtype's range.
    """
    inner, outer = _without_factors(cotangent, axis, forward)
    if inner.op == "multiply" and inner not in forward:
        parts, factors = zip(*(_without_factors(i, axis, forward) for i in inner.inputs), strict=True)
        if any(factors):
            inner = g.pointwise("multiply", *(g.cast(part, inner.dtype) for part in parts))
            outer = [*factors[0], *factors[1], *outer]
    if not outer or cotangent.shape[axis] == 0:
        return g.reduce("sum", cotangent, axis)
    inner = g.cast(inner, cotangent.dtype)
    for factor in outer:
        inner = factor.applied(inner) if factor.stays else inner
    total = g.reduce("sum", inner, axis)
    for factor in outer:
        total = total if factor.stays else factor.applied(total)
    return total


def _without_factors(node: Node, axis: int, forward: Container[Node]) -> tuple[Node, list[_Factor]]:
    """Return what a value is a multiple of, and the factors that do not vary along an axis, the innermost first.

    Innermost factors that stay within sums are left in the value.
    """
    taken_from, factors, count = node, list[_Factor](), 0
    while node not in forward and node.op in ("negative", "multiply", "divide"):
        varying = [i for i in node.inputs if i.shape[axis] != 1]
        if len(varying) != 1 or (node.op == "divide" and varying[0] is not node.inputs[0]):
            break
        (inner,) = varying
        others = [i for i in node.inputs if i is not inner]
        factors.append(_Factor(node.op, others[0] if others else None))
        node = inner
        if not factors[-1].stays:
            taken_from, count = node, len(factors)
    return taken_from, factors[:count][::-1]


def without_deviations(cotangent: Node, node: Node) -> Node | None:
    """Leave out what sums to zero of the cotangent of a mean that `node` subtracts from what it is the mean of.

    These are the deviations times factors that do not vary along the mean's axis: a variance does not depend on what is
    near the mean. As computed, their sum would be a rounding error, and its reduction a stage of a kernel.
    """
    mean = unchanged(node.inputs[1])
    if mean.op != "mean" or unchanged(mean.inputs[0]) is not unchanged(node.inputs[0]):
        return cotangent
    return _without_multiples(cotangent, node, mean.axis) if node.shape[mean.axis] > 1 else cotangent


def _without_multiples(cotangent: Node, of: Node, axis: int) -> Node | None:
    """Return a sum without the terms that are multiples of a value; None if nothing is left."""
    left: dict[Node, Node | None] = {}  # of each sum; loops make long ones, and add values to themselves
    for node in g.topological([cotangent], _terms):
        terms = _terms(node)
        found = [t for t in map(left.__getitem__, terms) if t is not None]
        if _is_multiple(node, of, axis) or (terms and not found):
            left[node] = None
        elif found == list(terms):
            left[node] = node
        else:
            left[node] = found[0] if len(found) < len(terms) else g.pointwise(node.op, *found)
    return left[cotangent]


def _terms(node: Node) -> tuple[Node, ...]:
    """Return what a node is the sum of, or the negative of; nothing for other nodes."""
    is_sum = node.op == "add" and all(i.shape == node.shape for i in node.inputs)
    return node.inputs if is_sum or node.op == "negative" else ()


def _is_multiple(value: Node, of: Node, axis: int) -> bool:
    """Whether a value is a difference `of` two others, or the same, times what does not vary along an axis."""
    while value.op != "subtract":
        if value.op in ("multiply", "divide"):
            whole = [i for i in value.inputs if i.shape[axis] != 1]
            if len(whole) != 1 or (value.op == "divide" and whole[0] is not value.inputs[0]):
                return False
            value = whole[0]
        elif value.op == "negative" or (value.op == "cast" and _is_between_floats(value)):
            value = value.inputs[0]
        else:
            return False
    return value.inputs == of.inputs


def unchanged(node: Node) -> Node:
    """Return what broadcasts, and casts to wider floats, are of: they change no number."""
    return same_values(node)[-1]


def same_values(node: Node) -> list[Node]:
    """Return a node and what it is a broadcast of, or a cast to a wider float, down to the value that is neither."""
    found = [node]
    while node.op == "broadcast" or (node.op == "cast" and _is_between_floats(node) and _is_wider(node)):
        node = node.inputs[0]
        found.append(node)
    return found


def _is_between_floats(cast: Node) -> bool:
    return dtypes.is_float(cast.dtype) and dtypes.is_float(cast.inputs[0].dtype)


def _is_wider(cast: Node) -> bool:
    return dtypes.promote(cast.inputs[0].dtype, cast.dtype) == cast.dtype
