"""Have operations of a captured graph compute tensors with permuted dimensions in the order of memory.

Heads of queries are such, (b, h, l, d) in the memory of (b, l, h, d), and rotary embeddings of them operations on
elements, slices and concatenations along the last dimension. Kernels work on rows in C order: they would copy the
operand and the result. Of (b, l, h, d) nothing is copied, and rows of d elements stay rows. See `channels_last.py` for
images, whose last dimension in memory is another one.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .captured import inverse, order_in_memory, storage_of
from .inplace import is_switched
from .nodes import (
    WHOLE,
    example_of,
    find_rule,
    insert_copy,
    insert_reordering,
    items_of,
    replace,
    tensors_of,
)
from .rowwise import chooses_format, is_by_element
from .transposes import order_of_transpose, transposed
from .written_memory import WrittenMemory

T = torch.Tensor
# What returns several parts of a tensor: views, also where cupyfuse has no rule for them.
_SEVERAL_PARTS = (torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split")


@dataclass(frozen=True)
class _Cone:
    """Operations that can be computed in the order in which their last result is in memory.

    Attributes
    ----------
    order : the dimensions of the result as they are in memory, the last one last
    members : the operations, and the views of parts of rows between them, in the order of the graph
    borders : the other values that they read, which are in C order once their dimensions are permuted
    """

    order: tuple[int, ...]
    members: list[Node]
    borders: list[Node]

    @property
    def computing(self) -> list[Node]:
        """The members that are no views."""
        return [node for node in self.members if _computes(node)]


_Cones = dict[Node, _Cone]  # by the last operation of each


def permute_rows(graph: Graph, memory: WrittenMemory, kept: Collection[str] = ()) -> None:
    """Compute operations on elements in the order of memory of their result, which becomes a view of that.

    So are those before them whose results they alone read, in whatever order these are in memory: operations on
    elements, concatenations along the last dimension, and views of parts of it. Nothing is changed where an operand
    would be copied, nor where a chain could go on before or behind it in the other order; nor are results whose nodes'
    names are in `kept`.
    """
    cones: _Cones = {}
    for node in graph.nodes:
        cone = _cone_of(node, memory) if node.name not in kept else None
        if cone is not None:
            cones[node] = cone
    while True:
        covered = {node for cone in cones.values() for node in cone.members}
        left = [last for last in cones if _splits_chain(last, cones, covered) or not _gains(last, cones)]
        if not left:
            break
        for last in left:
            del cones[last]
    for last in cones:
        cone = _cone_of(last, memory)  # whose borders other cones may have replaced by now
        if cone is not None:
            _permute(last, cone)


def _cone_of(last: Node, memory: WrittenMemory) -> _Cone | None:
    """Find the operations that can be computed in the order of memory of a result, the last one's.

    None unless that is permuted, and what else they read is in this order too.
    """
    order = _order_of(last)
    if order is None:
        return None
    members, borders, waiting = {last}, dict[Node, None](), [last]
    while waiting:
        node = waiting.pop()
        if memory.is_changed(node):
            return None
        for operand in _operands_of(node):
            if operand in members:
                continue
            if _is_in_order(operand, order, example_of(last).shape):
                borders[operand] = None
            elif _has_rank(operand, len(order)) and (_computes(operand) or _is_part_of_rows(operand)):
                members.add(operand)
                waiting.append(operand)
            else:
                return None
    inner = [node for node in members if node is not last and _computes(node)]  # views may have other readers
    if any(user not in members for node in inner for user in node.users) or is_switched(min(members), last):
        return None
    return _Cone(order, sorted(members), list(borders))


def _order_of(node: Node) -> tuple[int, ...] | None:
    """Return the order in memory of what an operation on elements returns, its last dimension last.

    None if that is C order, or ends with another dimension; also if nothing reads the result: what it was computed from
    would be erased with it, writes in place too.
    """
    example = example_of(node)
    if example is None or example.dim() < 3 or not node.users or not _is_of_elements(node):
        return None
    order = order_in_memory(example)
    if not order or order[-1] != len(order) - 1 or _is_one(example.shape[-1]):
        return None
    return tuple(order) if _has_strides(example, order) else None


def _operands_of(node: Node) -> list[Node]:
    """List what a member of a cone reads the elements of."""
    if _is_getter(node):
        return [node.all_input_nodes[0]]
    return node.all_input_nodes[:1] if _is_cast(node) else tensors_of(node)


def _is_in_order(operand: Node, order: tuple[int, ...], shape: Any) -> bool:
    """Whether an operand that is broadcast to a shape is in C order once its dimensions are permuted."""
    example = example_of(operand)
    if example is None or example.dim() > len(order):
        return False
    missing = len(order) - example.dim()
    kept = [k for k in order if k >= missing]
    repeated = {k for k in kept if _is_one(example.shape[k - missing]) and not _is_one(shape[k])}
    return _has_strides(example, [k - missing for k in kept if k not in repeated])


def _has_strides(tensor: Any, order: Sequence[int]) -> bool:
    """Whether strides are those of C order in this order of dimensions, also where a dimension is of length one.

    PyTorch chooses the strides of results by these, too.
    """
    expected: Any = 1
    for k in reversed(order):
        if not statically_known_true(tensor.stride(k) == expected):
            return False
        expected = expected * tensor.shape[k]
    return True


def _is_one(size: Any) -> bool:
    return statically_known_true(size == 1)


def _has_rank(node: Node, rank: int) -> bool:
    """Whether a node's result has so many dimensions; several parts of a tensor have those of the tensor."""
    example = example_of(node.args[0] if _returns_parts(node) else node)
    return example is not None and example.dim() == rank


def _computes(node: Node) -> bool:
    """Whether an operation is on elements, concatenates rows, or swaps pairs of their elements."""
    return example_of(node) is not None and (_is_of_elements(node) or _concatenates_rows(node) or _swaps_pairs(node))


def _swaps_pairs(node: Node) -> bool:
    found = find_rule(node)
    return found is not None and found.rule.name == "swap_pairs"


def _is_of_elements(node: Node) -> bool:
    return is_by_element(node) or _is_cast(node)


def _is_cast(node: Node) -> bool:
    """Whether an operation converts its operand to another dtype, in the order of that."""
    found = find_rule(node)
    if found is None or found.rule.name not in ("to", "type_as") or chooses_format(node):
        return False
    example, source = example_of(node), example_of(node.all_input_nodes[0])
    return example is not None and source is not None and storage_of(example) != storage_of(source)


def _concatenates_rows(node: Node) -> bool:
    """Whether a node concatenates tensors of as many dimensions along the last one."""
    found = find_rule(node)
    if found is None or found.rule.name != "cat" or example_of(node) is None:
        return False
    (tensors, dim), rank = found.arguments, example_of(node).dim()
    # PyTorch takes empty vectors among others.
    return dim in (-1, rank - 1) and all(_has_rank(tensor, rank) for tensor in tensors)


def _is_part_of_rows(node: Node) -> bool:
    """Whether a node is a view of a part of each row, or returns several such views."""
    if _is_getter(node):
        return _is_part_of_rows(node.all_input_nodes[0])
    source = example_of(node.args[0]) if node.args else None
    if source is None or node.all_input_nodes != [node.args[0]]:
        return False
    rank = source.dim()
    if node.target is operator.getitem:
        items = items_of(node.args[1], rank)
        return items is not None and isinstance(items[-1], slice) and all(item == WHOLE for item in items[:-1])
    if node.target in (torch.narrow, "narrow"):
        return _is_last(node, 1, rank, "dim")
    return _returns_parts(node) and _is_last(node, 2, rank, "dim")


def _returns_parts(node: Any) -> bool:
    """Whether a node returns several parts of a tensor, its first argument."""
    called = isinstance(node, Node) and node.op in ("call_function", "call_method")
    return called and node.target in _SEVERAL_PARTS and bool(node.args)


def _is_getter(node: Node) -> bool:
    """Whether a node gets one of several parts of a tensor."""
    getting = node.target is operator.getitem and example_of(node) is not None
    return getting and _returns_parts(node.args[0]) and type(node.args[1]) is int


def _is_last(node: Node, position: int, rank: int, *names: str) -> bool:
    """Whether the dimension that a call passes, by position or by name, is the last one of `rank`."""
    given = [*node.args[position : position + 1], *(node.kwargs[name] for name in names if name in node.kwargs)]
    return given in ([-1], [rank - 1])


def _gains(last: Node, cones: _Cones) -> bool:
    """Whether operations would be fused: several of a cone, or those of it and of what is around it."""
    cone = cones[last]
    if len(cone.computing) > 1 or not cones.keys().isdisjoint(cone.borders):
        return True
    if any(last in other.borders for other in cones.values()):
        return True
    if any(_may_be_in_chain(user) for view in _restoring(last, cone) for user in view.users):
        return True
    return any(
        source is not None and find_rule(source) for source in (transposed(b, cone.order, last) for b in cone.borders)
    )


def _splits_chain(last: Node, cones: _Cones, covered: Collection[Node]) -> bool:
    """Whether a chain could have operations of a cone beside others that stay in another order."""
    if any(_reads_unpermuted(user, covered) for user in last.users):
        return True
    # What computes a border stays in the order of its dimensions, unless it is a cone of its own.
    return any(_may_be_in_chain(b) and b not in cones and _moves(b, cones[last].order) for b in cones[last].borders)


def _reads_unpermuted(user: Node, covered: Collection[Node]) -> bool:
    """Whether what a chain may have, and no cone, reads a value as it is, directly or through views."""
    if user in covered or order_of_transpose(user) is not None:
        return False
    found = find_rule(user)
    if (found is not None and found.rule.view and not _is_cast(user)) or _is_part_of_rows(user):
        return any(_reads_unpermuted(each, covered) for each in user.users)
    return _may_be_in_chain(user)


def _may_be_in_chain(node: Node) -> bool:
    """Whether a node is an operation that a chain or a cone may have; of products, those by a matrix alone."""
    found = find_rule(node)
    if found is not None and found.rule.name == "cat":
        return _concatenates_rows(node)
    if found is None or (found.rule.view and not _is_cast(node)):
        return False
    if not found.rule.product:
        return True
    return any(example_of(t) is not None and example_of(t).dim() < 3 for t in tensors_of(node)[1:2])


def _moves(operand: Node, order: tuple[int, ...]) -> bool:
    """Whether an order moves dimensions of an operand that are longer than one."""
    shape = example_of(operand).shape
    missing = len(order) - len(shape)
    moving = [k for k in order if k >= missing and not _is_one(shape[k - missing])]
    return moving != sorted(moving)


def _restoring(last: Node, cone: _Cone) -> list[Node]:
    """List the views of a result that have its dimensions in the order of memory, and are read but not returned."""
    views = [user for user in last.users if user.users and order_of_transpose(user) == list(cone.order)]
    returned = {view for view in views if any(user.op == "output" for user in view.users)}
    return [view for view in views if view not in returned and not is_switched(last, view)]


def _permute(last: Node, cone: _Cone) -> None:
    """Insert a cone's operations with permuted operands, each where it was; replace the last one by a view."""
    inserted: dict[Node, Node] = {}
    for node in cone.members:
        for operand in _operands_of(node):
            if operand not in inserted:
                inserted[operand] = _permuted(operand, node, cone.order, last.name)
        example = _example_permuted(node, inserted, cone.order, node is last)
        inserted[node] = insert_copy(node, inserted, example, last.name if _computes(node) else "")
    result, views = inserted[last], _restoring(last, cone)
    view = insert_reordering(last.name, last, "permute", result, *inverse(cone.order), example=example_of(last))
    replace(last, view)
    for restoring in views:
        replace(restoring, result)


def _permuted(operand: Node, place: Node, order: tuple[int, ...], reason: str) -> Node:
    """Return an operand with permuted dimensions: the one that it transposes, or a view; itself if it is one row.

    `reason` is the name of the node that it is permuted for.
    """
    shape = example_of(operand).shape
    if all(map(_is_one, shape[:-1])):
        return operand
    source = transposed(operand, order, place)
    if source is not None:
        return source
    if len(shape) < len(order):
        missing = (None,) * (len(order) - len(shape))
        operand = insert_reordering(reason, place, operator.getitem, operand, (*missing, Ellipsis))
    return insert_reordering(reason, place, "permute", operand, *order)


def _example_permuted(node: Node, inserted: Mapping[Node, Node], order: tuple[int, ...], is_last: bool) -> Any:
    """Make the example value of a cone's operation on permuted operands.

    That of the last one shares memory with the example that it replaces, as views of that do.
    """
    whole = example_of(node)
    if _computes(node):
        with whole.fake_mode, torch.no_grad():
            example = whole.detach().permute(order)
            if not is_last:
                example = torch.empty_like(example, memory_format=torch.contiguous_format)
        return example.requires_grad_(whole.requires_grad)
    (operand,) = _operands_of(node)
    if _is_getter(node):
        return inserted[operand].meta["example_value"][node.args[1]]
    source = example_of(inserted[operand])
    function: Any = getattr(T, node.target) if isinstance(node.target, str) else node.target
    with source.fake_mode, torch.no_grad():
        parts = function(source.detach(), *node.args[1:], **node.kwargs)
    return pytree.tree_map(lambda part: part.requires_grad_(source.requires_grad), parts)
