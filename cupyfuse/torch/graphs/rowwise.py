"""Operations of a captured graph that give each row of their result from one row of an operand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .nodes import example_of, find_rule, same_shape, tensors_of

_SAME_ELEMENTS = ("to", "identity", "positive", "contiguous", "detach")  # rules of views that keep rows and columns
# Rules that tell dimensions apart: weights belong to the second one; classes are one more, the last; what is put side
# by side, or gates its other half, is along one, and so are pairs.
_BY_DIMENSION = ("prelu", "one_hot", "cat", "glu", "swap_pairs")


def operand_of_rows(node: Node) -> Node | None:
    """Return the operand whose rows give the rows of an operation's result; None if there is no such operand.

    Of a product it is the first one, which has to be the smaller one for its rows to be the better ones to slice. Of
    an operation on elements it is the one of the result's shape; others may be numbers and rows.
    """
    found = find_rule(node) if example_of(node) is not None else None
    if found is None:
        return None
    tensors = tensors_of(node)
    if any(example_of(t) is None for t in tensors):
        return None
    if found.rule.name in ("linear", "matmul"):
        first, second = found.arguments[:2]
        rest = [t for t in tensors if t is not first and t is not second]
        if example_of(first).dim() < 2 or example_of(second).dim() != 2 or first is second or _max_rank(rest) > 1:
            return None
        wider = statically_known_true(example_of(node).shape[-1] >= example_of(first).shape[-1])
        return first if wider and len(tensors) == len({*tensors}) else None
    if not is_by_element(node) and (found.rule.name not in _SAME_ELEMENTS or chooses_format(node)):
        return None
    main = [t for t in tensors if same_shape(t, node)]
    others = [t for t in tensors if t not in main]
    return main[0] if len(main) == 1 and _max_rank(others) < 2 else None


def is_by_element(node: Node) -> bool:
    """Whether each element of an operation's result is of the elements of its operands there, in whatever order."""
    found = find_rule(node)
    if found is None or found.rule.reduces or found.rule.product or found.rule.updates or found.rule.view:
        return False
    return found.rule.name not in _BY_DIMENSION and not chooses_format(node)


def chooses_format(node: Node) -> bool:
    """Whether a call says in which order of memory its result is."""
    return any(isinstance(a, torch.memory_format) for a in pytree.tree_leaves((node.args, node.kwargs)))


def _max_rank(nodes: Sequence[Node]) -> int:
    return max((example_of(n).dim() for n in nodes), default=0)
