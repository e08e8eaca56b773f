"""Find, in a captured graph, where the elements of each pair along the last dimension change places.

Rotary embeddings of interleaved halves do: `torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)`. Kernels
cannot put every second element of several tensors side by side, but they swap those of a pair in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..rules.pairs import swap_pairs
from .inplace import is_in_place, is_switched
from .nodes import WHOLE, example_of, find_rule, insert, items_of, replace, same_shape
from .written_memory import WrittenMemory

# Rules of views that keep all elements in their order, and gradients: not `detach`.
_IN_ORDER = ("reshape", "view_as", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "identity")


class _Half(NamedTuple):
    """Every second element of a tensor along its last dimension, from the first or from the second one on."""

    whole: Node
    start: int
    negated: bool
    nodes: tuple[Node, ...]  # what computes it


def join_pairs(node: Node, memory: WrittenMemory) -> None:
    """Replace a stack of every second element of a tensor, joined to its shape, by one operation on the tensor."""
    stack = _operand_of_view(node)
    if stack is None or (tensors := _stacked(stack)) is None:
        return
    first, second = (_half_of(each, node) for each in tensors)
    if first is None or second is None or first.whole is not second.whole or (first.start, second.start) != (1, 0):
        return
    whole, halves = first.whole, [*first.nodes, *second.nodes]
    if any(map(memory.is_written_to, (whole, *halves))) or any(map(is_in_place, (*halves, stack, node))):
        return
    if list(stack.users) != [node]:
        return  # whose memory the result shares
    if not example_of(whole).is_floating_point() or not example_of(node).is_contiguous():
        return
    if is_switched(min(halves), node):
        return
    replace(node, insert(node, swap_pairs, whole, first.negated, second.negated, example=example_of(node)))


def _operand_of_view(node: Any) -> Node | None:
    """Return the tensor whose elements a view shows in their order, in whatever shape; None for other operations."""
    found = find_rule(node) if example_of(node) is not None else None
    if found is None or found.rule.name not in _IN_ORDER:
        return None
    source = found.arguments[0]
    return source if example_of(source) is not None else None


def _stacked(node: Node) -> Sequence[Any] | None:
    """Return the two tensors that a node stacks along a new last dimension."""
    given = _arguments(node, "tensors", "dim") if node.target is torch.stack else {}
    if given.keys() != {"tensors", "dim"} or given["dim"] not in (-1, example_of(node).dim() - 1):
        return None
    tensors = given["tensors"]
    return tensors if isinstance(tensors, (list, tuple)) and len(tensors) == 2 else None


def _arguments(node: Node, *names: str) -> dict[str, Any]:
    """Return the arguments of a call by the names of its parameters."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _half_of(node: Any, shape: Node) -> _Half | None:
    """Trace a tensor to every second element of one of a shape: through a negation, and through a view of its pairs."""
    found = find_rule(node) if example_of(node) is not None else None
    if found is not None and found.rule.name == "neg":
        half = _half_of(found.arguments[0], shape)
        return None if half is None or half.negated else half._replace(negated=True, nodes=(node, *half.nodes))
    if example_of(node) is None:
        return None
    source, start, nodes = _strided(node) or _one_of_pairs(node) or (None, 0, ())
    if source is None or not same_shape(source, shape):
        return None
    return _Half(source, start, False, (node, *nodes))


def _item_of(node: Node) -> tuple[Node, Any] | None:
    """Return the tensor that a node indexes along its last dimension alone, and that integer or slice."""
    if node.target is not operator.getitem or example_of(node.args[0]) is None:
        return None
    source, index = node.args
    items = items_of(index, example_of(source).dim())
    if not items or any(item != WHOLE for item in items[:-1]):
        return None
    assert isinstance(source, Node)
    return source, items[-1]


def _strided(node: Node) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Return the tensor of which a node shows every second element, and the first one's index."""
    source, item = _item_of(node) or (None, None)
    if source is None or not isinstance(item, slice):
        return None
    start, stop = item.start or 0, item.stop
    to_end = stop is None or statically_known_true(stop >= example_of(source).shape[-1])
    return (source, start, ()) if item.step == 2 and start in (0, 1) and to_end else None


def _one_of_pairs(node: Node) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Return the tensor whose last dimension a view has as pairs, of which a node shows one, and which one."""
    found = _selected(node)
    if found is None:
        return None
    pairs, index, nodes = found
    source = _operand_of_view(pairs)
    if source is None or not statically_known_true(example_of(pairs).shape[-1] == 2) or index not in (-2, -1, 0, 1):
        return None
    if not statically_known_true(example_of(source).shape[-1] % 2 == 0):
        return None  # pairs are of two rows
    return source, index % 2, (*nodes, pairs)


def _selected(node: Node) -> tuple[Node, Any, tuple[Node, ...]] | None:
    """Return the tensor of whose last dimension a node shows one index, that index, and what comes between."""
    source, index = _item_of(node) or (None, None)
    if source is not None:
        return None if isinstance(index, slice) else (source, index, ())
    between: tuple[Node, ...] = ()
    if node.target in (torch.select, "select"):
        given = _arguments(node, "input", "dim", "index")
    elif node.target is operator.getitem and isinstance(node.args[0], Node):
        between = (node.args[0],)
        if between[0].target not in (torch.unbind, "unbind"):
            return None
        given = {**_arguments(between[0], "input", "dim"), "index": node.args[1]}
    else:
        return None
    source = given.get("input")
    if example_of(source) is None or given.get("dim") not in (-1, example_of(source).dim() - 1):
        return None
    return source, given.get("index"), between
