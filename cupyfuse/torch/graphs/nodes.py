"""What rewrites of a captured graph read of its nodes, and how they change them."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .. import rules

WHOLE = slice(None)
IN_PLACE = "cupyfuse_in_place"  # in a node's meta: the target of the call in place that `functionalise` replaced
# In the meta of an operation that a rewrite has computed in another order of dimensions, and of the views that this
# takes: the name of the node whose result is in that order.
REORDERED = "cupyfuse_reordered"


def example_of(node: Any) -> Any:
    """Return the fake tensor that a node's result is; None if it is another, such as a DTensor or a tuple."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    plain = type(example) is torch._subclasses.FakeTensor and hasattr(example, "fake_mode")
    return example if plain and not torch._C._functorch.is_functorch_wrapped_tensor(example) else None


def results_of(node: Node) -> list[Any]:
    """List the example values of a node's results that are tensors."""
    return [t for t in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]


def tensors_of(node: Node) -> list[Node]:
    """List the nodes that a node reads and whose result is a tensor."""
    return [n for n in node.all_input_nodes if is_tensor(n)]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def replace(node: Node, by: Node) -> None:
    """Replace a node by another; erase it, and what only it has read."""
    node.replace_all_uses_with(by)
    unused = [node]
    while unused:
        each = unused.pop()
        operands = each.all_input_nodes
        each.graph.erase_node(each)
        unused += [o for o in operands if not o.users and o.op in ("call_function", "call_method")]


def insert(place: Node, target: Any, *args: Any, example: Any = None, **kwargs: Any) -> Node:
    """Insert a call before a node, with the example value of its result, which is computed unless given.

    Of computed ones, those of floats require gradients where the first operand does.
    """
    make = place.graph.call_method if isinstance(target, str) else place.graph.call_function
    with place.graph.inserting_before(place):
        node = make(target, args, kwargs)
    if example is None:
        first = example_of(args[0])
        operands = pytree.tree_map(lambda a: example_of(a).detach() if isinstance(a, Node) else a, args)
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        with first.fake_mode, torch.no_grad():
            example = function(*operands, **kwargs).requires_grad_(first.requires_grad)
    node.meta = {**place.meta, "example_value": example}
    node.meta.pop(IN_PLACE, None)
    node.meta.pop(REORDERED, None)
    return node


def insert_reordering(reason: str, place: Node, target: Any, *args: Any, example: Any = None) -> Node:
    """Insert a view that the reordering of a node takes, which has the name `reason` (`REORDERED`)."""
    node = insert(place, target, *args, example=example)
    node.meta[REORDERED] = reason
    return node


def insert_copy(node: Node, operands: dict[Node, Node], example: Any, reason: str = "") -> Node:
    """Insert a node's operation on other operands before it; `example` is the example value of its result.

    `reason` is the name of the node that the operation is reordered for, if it is (`REORDERED`).
    """
    with node.graph.inserting_before(node):
        result = node.graph.node_copy(node, lambda argument: operands.get(argument, argument))
    result.meta = {**node.meta, "example_value": example}
    result.meta.pop(REORDERED, None)
    if reason:
        result.meta[REORDERED] = reason
    return result


def same_shape(a: Any, b: Any) -> bool:
    first, second = example_of(a).shape, example_of(b).shape
    return len(first) == len(second) and all(map(statically_known_true, map(operator.eq, first, second)))


def items_of(index: Any, rank: int) -> list[Any] | None:
    """List an index's integers and slices, one for each dimension; None where it has anything else."""
    given = list(index) if isinstance(index, tuple) else [index]
    for k, item in enumerate(given):
        if item is Ellipsis:
            given[k : k + 1] = [WHOLE] * (rank - len(given) + 1)
            break
    given += [WHOLE] * (rank - len(given))
    if len(given) != rank or not all(_is_number(i) or _is_slice(i) for i in given):
        return None
    return given


def _is_number(item: Any) -> bool:
    return type(item) is int


def _is_slice(item: Any) -> bool:
    return isinstance(item, slice) and all(n is None or _is_number(n) for n in (item.start, item.stop, item.step))


def find_rule(node: Node) -> Any:
    """Return the rule and the canonical arguments of a node; None where there is no rule."""
    target = node.target if node.op in ("call_function", "call_method") else None
    found = rules.find(target, node.args, node.kwargs)
    return found if isinstance(found, rules.Found) and not found.inplace else None
