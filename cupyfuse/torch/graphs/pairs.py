"""Find, in a captured graph, where the elements of each pair along the last dimension change places.

Rotary embeddings of interleaved halves do: `torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)`. Kernels
cannot put every second element of several tensors side by side, but they swap those of a pair in registers.
"""

from __future__ import annotations

import operator
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


def _stacked(node: Node) -> list[Any] | None:
    """Return the two tensors that a node stacks along a new last dimension."""
    if node.target is not torch.stack:
        return None
    given = [*node.args, *(node.kwargs[name] for name in ("tensors", "dim") if name in node.kwargs)]
    if len(given) != 2 or not isinstance(given[0], (list, tuple)) or len(given[0]) != 2 or len(node.kwargs) > 2:
        return None
    return list(given[0]) if given[1] in (-1, example_of(node).dim() - 1) and "out" not in node.kwargs else None


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


def _strided(node: Node) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Return the tensor of which a node shows every second element, and the first one's index."""
    source = node.args[0] if node.target is operator.getitem and node.args else None
    if example_of(source) is None:
        return None
    items = items_of(node.args[1], example_of(source).dim())
    if items is None or not isinstance(items[-1], slice) or any(item != WHOLE for item in items[:-1]):
        return None
    start, stop, step = items[-1].start or 0, items[-1].stop, items[-1].step
    to_end = stop is None or statically_known_true(stop >= example_of(source).shape[-1])
    return (source, start, ()) if step == 2 and start in (0, 1) and to_end else None


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


def _selected(node: Node) -> tuple[Node, int, tuple[Node, ...]] | None:
    """Return the tensor of whose last dimension a node shows one index, and that index."""
    if node.target in (torch.select, "select") and len(node.args) == 3 and example_of(node.args[0]) is not None:
        source, dim, index = node.args
        return (source, index, ()) if dim in (-1, example_of(source).dim() - 1) else None
    if node.target is not operator.getitem or not isinstance(node.args[0], Node):
        return None
    source, index = node.args
    if example_of(source) is not None:
        items = items_of(index, example_of(source).dim())
        if items is None or type(items[-1]) is not int or any(item != WHOLE for item in items[:-1]):
            return None
        return source, items[-1], ()
    if source.target not in (torch.unbind, "unbind") or type(index) is not int or example_of(source.args[0]) is None:
        return None
    (tensor, *_), given = source.args, [*source.args[1:], *source.kwargs.values()]
    return (tensor, index, (source,)) if given in ([-1], [example_of(tensor).dim() - 1]) else None
