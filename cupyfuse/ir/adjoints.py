"""Adjoints of maximum, minimum and product reductions, as graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from . import graph as g
from .graph import Node


def extremum_adjoint(node: Node, cotangent: Node) -> Node:
    """Distribute the cotangent of a maximum or minimum to the elements, as the node's `gradient` says.

    "first", "last": to the first element that attains the extremum; if there are NaN, to the first or last of them.
    "chosen": evenly to all that attain it, NaN included; 0 to the others. "scaled": the same as a product of the
    cotangent with 0 or 1. "": as "scaled", but NaN attains nothing, and the gradient is NaN.
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
    """Mask the elements that attain an extremum."""
    x = node.inputs[0]
    same = g.pointwise("equal", x, node)
    return g.pointwise("logical_or", same, g.pointwise("isnan", x)) if node.gradient else same


def _count_ties(node: Node) -> Node:
    """Count the elements that attain an extremum.

    An extremum of a whole matrix is two reductions, of which the first is `partial`: add up the counts of the first
    where the second attains its extremum.
    """
    x = node.inputs[0]
    count = _count_ties(x) if x.partial else g.cast(g.const(1.0), x.dtype)
    return g.reduce("sum", g.pointwise("where", _attains(node), count, g.const(0.0)), node.axis)


def _chosen_element(node: Node) -> Node:
    """Mask the one element that gets the whole gradient of an extremum: the first that attains it.

    If there are NaN, it is the first of them; with the gradient "last", the last.
    """
    x, axis = node.inputs[0], node.axis
    index = g.positions(x.shape[axis], axis)
    order = g.pointwise("where", g.pointwise("equal", x, node), index, g.const(math.inf))
    of_nan = g.pointwise("negative", index) if node.gradient == "last" else index
    order = g.pointwise("where", g.pointwise("isnan", x), of_nan, order)
    return g.pointwise("equal", order, g.reduce("min", order, axis))


def exclusive_product(x: Node, product: Node, axes: Sequence[int]) -> Node:
    """Return, for each element, the product of all others along the axes, given the product of all.

    Without zeros this is product / x, and for the only zero the product of the others. With another zero, it is zero,
    or NaN if another element is infinite or NaN.
    """
    one, zero = g.cast(g.const(1.0), x.dtype), g.const(0.0)
    where, equal = partial(g.pointwise, "where"), partial(g.pointwise, "equal")

    def reduce_all(op: str, node: Node) -> Node:
        for axis in axes:
            node = g.reduce(op, node, axis)
        return node

    is_zero = equal(x, zero)
    zeros = reduce_all("sum", where(is_zero, one, zero))
    nonzeros = reduce_all("prod", where(is_zero, one, x))
    non_finite = where(g.pointwise("isfinite", x), zero, one)
    others_finite = equal(reduce_all("sum", non_finite), non_finite)
    with_zero = g.cast(where(others_finite, zero, g.const(math.nan)), x.dtype)
    of_nonzero = where(equal(zeros, zero), g.pointwise("divide", product, x), with_zero)
    return where(is_zero, where(equal(zeros, g.const(1.0)), nonzeros, with_zero), of_nonzero)
