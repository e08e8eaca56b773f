"""What extremes and products along an axis give back to their elements: parts of a backward pass, as graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from . import graph as g
from .graph import Node


def extreme_adjoint(node: Node, cotangent: Node) -> Node:
    """To one element, or evenly to all that equal the extreme, as the attribute `gradient` has it.

    "first" and "last": to the first among equal ones, and to the first or the last NaN before all others. "chosen":
    evenly, NaN being equal to NaN, and 0 to all others. "scaled": the same as a product with 0 or 1. Without it, as
    "scaled", but NaN equals nothing: there are none to share it, and the gradient is NaN.
    """
    kind, zero = node.gradient, g.const(0.0)
    if kind in ("first", "last"):
        return g.pointwise("where", _chosen_element(node), cotangent, zero)
    if kind == "chosen":
        shared = g.pointwise("where", _attains(node), cotangent, zero)
    else:
        one = g.cast(g.const(1.0), node.dtype)
        shared = g.pointwise("multiply", cotangent, g.pointwise("where", _attains(node), one, zero))
    return shared if node.partial else g.pointwise("divide", shared, _count_ties(node))


def _attains(node: Node) -> Node:
    """Where the elements lie that share an extreme's gradient."""
    x = node.inputs[0]
    same = g.pointwise("equal", x, node)
    return g.pointwise("logical_or", same, g.pointwise("isnan", x)) if node.gradient else same


def _count_ties(node: Node) -> Node:
    """How many elements equal an extreme: of one taken in two steps, how many of all."""
    x = node.inputs[0]
    count = _count_ties(x) if x.partial else g.cast(g.const(1.0), x.dtype)
    return g.reduce("sum", g.pointwise("where", _attains(node), count, g.const(0.0)), node.axis)


def _chosen_element(node: Node) -> Node:
    """Where the element lies that an extreme was taken from."""
    x, axis = node.inputs[0], node.axis
    places = g.positions(x.shape[axis], axis)
    order = g.pointwise("where", g.pointwise("equal", x, node), places, g.const(math.inf))
    of_nan = g.pointwise("negative", places) if node.gradient == "last" else places
    order = g.pointwise("where", g.pointwise("isnan", x), of_nan, order)
    return g.pointwise("equal", order, g.reduce("min", order, axis))


def exclusive_product(x: Node, product: Node, axes: Sequence[int]) -> Node:
    """For each element the product of all others along the axes, that of all being known.

    It is the quotient where there are no zeros to step around. Among zeros it is zero, or NaN if another one of the
    others is infinite or NaN, as the product itself would be.
    """
    one, zero = g.cast(g.const(1.0), x.dtype), g.const(0.0)

    def along(op: str, node: Node) -> Node:
        for axis in axes:
            node = g.reduce(op, node, axis)
        return node

    missing, finite = g.pointwise("equal", x, zero), g.pointwise("isfinite", x)
    odd = g.pointwise("where", finite, zero, one)
    zeros = along("sum", g.pointwise("where", missing, one, zero))
    others = along("prod", g.pointwise("where", missing, one, x))
    none, single = (g.pointwise("equal", zeros, g.const(float(n))) for n in (0, 1))
    lost = g.pointwise("where", g.pointwise("equal", along("sum", odd), odd), zero, g.const(math.nan))
    lost = g.cast(lost, x.dtype)  # a choice of numbers
    there = g.pointwise("where", single, others, lost)
    return g.pointwise("where", missing, there, g.pointwise("where", none, g.pointwise("divide", product, x), lost))
