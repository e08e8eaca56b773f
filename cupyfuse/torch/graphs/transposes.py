"""Views that permute dimensions in a captured graph, and what they are views of."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from .captured import inverse, is_dense
from .inplace import is_switched
from .nodes import example_of, find_rule


def order_of_transpose(node: Node) -> list[int] | None:
    """Return the order in which a node permutes the dimensions of its operand; None if it is no such view."""
    found = find_rule(node)
    if found is None or found.rule.name not in ("transpose", "permute") or example_of(node) is None:
        return None
    rank = example_of(node).dim()
    if found.rule.name == "permute":
        return [d % rank for d in found.arguments[1]]
    order = list(range(rank))
    a, b = (d % rank for d in found.arguments[1:])
    order[a], order[b] = b, a
    return order


def transposed(node: Node, order: Sequence[int], place: Node) -> Node | None:
    """Return the value in C order of which a node is the view whose dimensions are in this order in memory.

    None if there is no such value, or where gradients are switched between the view and `place`, which is to read the
    value instead: a view that was taken without gradients has none of its operand.
    """
    permutation = order_of_transpose(node)
    if permutation is None or tuple(permutation) != inverse(order):
        return None
    source = find_rule(node).arguments[0]
    example = example_of(source)
    in_c_order = example is not None and is_dense(example, range(example.dim()))
    return source if in_c_order and not is_switched(node, place) else None
