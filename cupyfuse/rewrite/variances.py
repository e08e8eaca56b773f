"""Rewrites of squared distances from a mean, which need not wait for the mean: one pass computes both."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.kinds import squared
from ..ir.rebuild import rebuild
from .cleanup import share_common_subexpressions


def recognize_variance(node: Node) -> Node:
    """sum((x - mean(x))^2) / n = moment2(x), in one pass.

    Same up to rounding: the reduction keeps a mean and updates it (Welford), about the first element that each thread
    sees, and is as accurate as two passes. An infinity or NaN gives NaN either way. Saves a pass.
    """
    total, count = node.inputs if node.op == "divide" else (node, node)
    x = _centred(total)
    return g.reduce("moment2", x, total.axis) if x is not None and _is_count(count, x, total.axis) else node


def recognize_squared_distances(node: Node) -> Node:
    """sum((x - mean(x))^2) = n moment2(x), as for `recognize_variance`, with two roundings more. Saves a pass."""
    x = _centred(node)
    if x is None:
        return node
    return g.pointwise("multiply", g.reduce("moment2", x, node.axis), g.axis_length(x.shape[node.axis], node.axis))


def one_pass_variances(graph: Graph, applies: Callable[[Node, int], bool]) -> Graph:
    """Apply both identities, exact as each says, to those x, and axes, for which `applies(x, axis)` holds."""

    def where_it_applies(rule: Callable[[Node], Node]) -> Callable[[Node], Node]:
        def restricted(node: Node) -> Node:
            found = rule(node)
            moment = found if found.op == "moment2" else found.inputs[0] if found is not node else node
            return found if found is node or applies(moment.inputs[0], moment.axis) else node

        return restricted

    found = graph
    # The quotients first: they would hide behind the factor of a sum.
    for rule in (recognize_variance, recognize_squared_distances):
        found = rebuild(found, where_it_applies(rule))
    return graph if found is graph else share_common_subexpressions(found)


def _centred(node: Node) -> Node | None:
    """Return x where a value is the sum of (x - mean(x))^2, or of (mean(x) - x)^2, along an axis; else None."""
    if node.op != "sum" or node.inputs[0].shape[node.axis] < 2:
        return None
    squares = node.inputs[0]
    distance = squared(squares)
    if distance is not None:
        distance = distance.inputs[0] if distance.op == "absolute" else distance
        if distance.op == "subtract":
            for x, centre in (distance.inputs, distance.inputs[::-1]):
                if _is_mean(centre, x, node.axis) and x.shape == squares.shape and x.dtype == node.dtype:
                    return x
    return None


def _is_mean(node: Node, x: Node, axis: int) -> bool:
    """Whether a value is the mean of x along an axis."""
    total, count = node.inputs if node.op == "divide" else (node, node)
    return total.op == "sum" and total.axis == axis and total.inputs[0] is x and _is_count(count, x, axis)


def _is_count(node: Node, x: Node, axis: int) -> bool:
    """Whether a value is the number of elements of x along an axis."""
    return node.op == "const" and node.number is None and node.value == x.shape[axis]
