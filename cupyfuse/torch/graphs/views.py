"""Rewrite a captured graph's views and indices of the results of products, so that chains can grow over them.

Kernels work on whole rows, from the start of a matrix. What reads a product's result through a slice of its rows, with
its columns in the second dimension, or by an index for each row would need all of it in memory.

- A slice of rows moves to the operand of the product: the rows of a product are products of the rows.
- A loss over the second dimension becomes one over the last, where a transpose has exchanged them.
- `x[arange(n), index]` becomes `index_rows`, and what `broadcast_tensors` repeats becomes `expand_as`, which a slice of
  one element undoes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from .. import rules
from ..rules.labels import index_rows_eager
from .captured import is_dense, storage_of
from .importer import ImportedGraph
from .inplace import SWITCHES, functionalised, is_in_place

F = torch.nn.functional
_SAME_ELEMENTS = ("to", "identity", "positive", "contiguous", "detach")  # rules of views that keep rows and columns
_BY_CHANNEL = ("prelu",)  # rules whose rows belong to the second dimension, not to the last one
_WHOLE = slice(None)


class _Memory:
    """The memory that a captured graph writes to."""

    def __init__(self, graph: Graph):
        self._graph = graph

    @cached_property
    def _written(self) -> set[int]:
        """The storages that anything writes to; those of all inputs if one of them is, as they may share memory."""
        captured = ImportedGraph(self._graph).captured
        written = {storage_of(captured.tensors[n]) for o in captured.operations for n in o.written}
        written.update(map(storage_of, functionalised(self._graph)))
        inputs = {storage_of(captured.tensors[n]) for n in captured.inputs}
        return written if written.isdisjoint(inputs) else written | inputs

    def is_written_to(self, node: Any) -> bool:
        """Whether the memory of a node's results is written to, before or after."""
        return any(storage_of(t) in self._written for t in _results(node))


def rewrite_views(graph: Graph) -> None:
    """Rewrite the views and indices of a captured graph, in place."""
    memory = _Memory(graph)
    for rewrite in (_without_broadcasts, _index_rows, _slice_operands, _reduce_last):
        for node in list(graph.nodes):
            if node.op in ("call_function", "call_method") and _example(node) is not None:
                rewrite(node, memory)


def _example(node: Any) -> Any:
    """Return the fake tensor that a node's result is; None if it is another, such as a DTensor or a tuple."""
    example = node.meta.get("example_value") if isinstance(node, Node) else None
    plain = type(example) is torch._subclasses.FakeTensor and hasattr(example, "fake_mode")
    return example if plain and not torch._C._functorch.is_functorch_wrapped_tensor(example) else None


def _results(node: Node) -> list[Any]:
    """List the example values of a node's results that are tensors."""
    return [t for t in pytree.tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]


def _tensors(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("example_value"), torch.Tensor)]


def _replace(node: Node, by: Node) -> None:
    """Replace a node by another; erase it, and what only it has read."""
    node.replace_all_uses_with(by)
    unused = [node]
    while unused:
        each = unused.pop()
        operands = each.all_input_nodes
        each.graph.erase_node(each)
        unused += [o for o in operands if not o.users and o.op in ("call_function", "call_method")]


def _insert(place: Node, target: Any, *args: Any, example: Any = None, **kwargs: Any) -> Node:
    """Insert a call before a node, with the example value of its result, which is computed unless given.

    Of computed ones, those of floats require gradients where the first operand does.
    """
    make = place.graph.call_method if isinstance(target, str) else place.graph.call_function
    with place.graph.inserting_before(place):
        node = make(target, args, kwargs)
    if example is None:
        first = _example(args[0])
        operands = pytree.tree_map(lambda a: _example(a).detach() if isinstance(a, Node) else a, args)
        function = getattr(torch.Tensor, target) if isinstance(target, str) else target
        with first.fake_mode, torch.no_grad():
            example = function(*operands, **kwargs).requires_grad_(first.requires_grad)
    node.meta = {**place.meta, "example_value": example}
    return node


# Broadcasts and indices ---------------------------------------------------------------------------------------------


def _without_broadcasts(node: Node, memory: _Memory) -> None:
    """Replace what `broadcast_tensors` returns by its operands, expanded; and a slice of an expanded value by that."""
    if node.target is not operator.getitem:
        return
    source, index = node.args
    if not isinstance(source, Node) or any(user.op == "output" for user in node.users):
        return
    if source.target is torch.functional.broadcast_tensors and isinstance(index, int):
        operands = source.args
        whole = next((o for o in operands if _example(o) is not None and _same_shape(o, node)), None)
        if whole is not None and _example(operands[index]) is not None:
            operand = operands[index]
            assert isinstance(operand, Node)
            same = _same_shape(operand, node)
            _replace(node, operand if same else _insert(node, "expand_as", operand, whole))
    elif source.target in ("expand", "expand_as") and source.op == "call_method":
        base = source.args[0]
        if _example(base) is not None and _same_shape(base, node) and _takes_one_of_repeated(source, base, index):
            assert isinstance(base, Node)
            _replace(node, base)


def _same_shape(a: Any, b: Any) -> bool:
    first, second = _example(a).shape, _example(b).shape
    return len(first) == len(second) and all(map(statically_known_true, map(operator.eq, first, second)))


def _takes_one_of_repeated(expanded: Node, base: Any, index: Any) -> bool:
    """Whether an index has whole dimensions, and the first element of those that were repeated."""
    items = _items(index, _example(expanded).dim())
    if items is None or _example(base).dim() != len(items):
        return False
    repeated = [statically_known_true(n == 1) for n in _example(base).shape]
    first = (slice(None, 1, None), slice(0, 1, None), slice(None, 1, 1), slice(0, 1, 1))
    return all(item == _WHOLE or (again and item in first) for item, again in zip(items, repeated, strict=True))


def _items(index: Any, rank: int) -> list[Any] | None:
    """List an index's integers and slices, one for each dimension; None where it has anything else."""
    given = list(index) if isinstance(index, tuple) else [index]
    for k, item in enumerate(given):
        if item is Ellipsis:
            given[k : k + 1] = [_WHOLE] * (rank - len(given) + 1)
            break
    given += [_WHOLE] * (rank - len(given))
    if len(given) != rank or not all(_is_number(i) or _is_slice(i) for i in given):
        return None
    return given


def _is_number(item: Any) -> bool:
    return type(item) is int


def _is_slice(item: Any) -> bool:
    return isinstance(item, slice) and all(n is None or _is_number(n) for n in (item.start, item.stop, item.step))


def _index_rows(node: Node, memory: _Memory) -> None:
    """Replace `x[arange(len(x)), index]` by `index_rows(x, index)`."""
    if node.target is not operator.getitem or _example(node.args[0]) is None:
        return
    source, index = node.args
    if not isinstance(index, tuple) or len(index) != 2 or _example(source).dim() != 2:
        return
    rows, columns = index
    if _example(rows) is None or _example(columns) is None or not _is_arange(rows) or memory.is_written_to(rows):
        return
    labels, n = _example(columns), _example(source).shape[0]
    if labels.dim() != 1 or labels.dtype is not torch.int64:
        return
    if statically_known_true(labels.shape[0] == n) and statically_known_true(_example(rows).shape[0] == n):
        _replace(node, _insert(node, index_rows_eager, source, columns, example=node.meta["example_value"]))


def _is_arange(node: Node) -> bool:
    """Whether a node is 0, 1, 2, ... up to some number."""
    names = ("end",) if len(node.args) == 1 and "end" not in node.kwargs else ("start", "end", "step")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    from_zero = given.get("start", 0) == 0 and given.get("step", 1) == 1
    return node.target is torch.arange and from_zero and _example(node).dtype is torch.int64


# Slices of rows -----------------------------------------------------------------------------------------------------


def _slice_operands(node: Node, memory: _Memory) -> None:
    """Move a slice of the rows of a product to its operand, over operations on elements that the product ends in."""
    if node.target is not operator.getitem or _example(node.args[0]) is None:
        return
    source, index = node.args
    items = _items(index, _example(source).dim())
    if items is None or items[-1] != _WHOLE or all(item == _WHOLE for item in items):
        return
    path: list[tuple[Node, Node]] = []  # operations before the slice, the last one first, and the operand of each
    while True:
        assert isinstance(source, Node)
        main = _operand_of_rows(source)
        if main is None or len(source.users) > 1 or is_in_place(source):
            return
        path.append((source, main))
        if _is_product(source):
            break
        source = main
    value = path[-1][1]
    if _is_switched(path[-1][0], node) or memory.is_written_to(value):
        return
    if any(memory.is_written_to(n) or _is_returned(n) for n in _sharing(node)):
        return
    graded = _example(value).requires_grad and _example(path[-1][0]).requires_grad
    value = _insert(path[-1][0], operator.getitem, value, index)
    value.meta["example_value"].requires_grad_(graded)
    for operation, main in reversed(path):
        value = _with_operand(operation, main, value, index)
    _replace(node, value)


def _with_operand(operation: Node, main: Node, rows: Node, index: Any) -> Node:
    """Insert an operation on some rows of its operand, which gives those rows of its result."""

    def of_rows(argument: Node) -> Node:
        return rows if argument is main else argument

    whole = _example(operation)
    with whole.fake_mode, torch.no_grad():
        example = whole.detach()[index].clone(memory_format=torch.contiguous_format)
    place = operation.next
    with operation.graph.inserting_before(place):
        result = operation.graph.node_copy(operation, of_rows)
    result.meta = {**operation.meta, "example_value": example.requires_grad_(whole.requires_grad)}
    return result


def _found(node: Node) -> Any:
    """Return the rule and the canonical arguments of a node; None where there is no rule."""
    target = node.target if node.op in ("call_function", "call_method") else None
    found = rules.find(target, node.args, node.kwargs)
    return found if isinstance(found, rules.Found) and not found.inplace else None


def _is_product(node: Node) -> bool:
    return _found(node).rule.product


def _operand_of_rows(node: Node) -> Node | None:
    """Return the operand whose rows give the rows of an operation's result; None if there is no such operand.

    Of a product it is the first one, which has to be the smaller one for its rows to be the better ones to slice. Of
    an operation on elements it is the one of the result's shape; others may be numbers and rows.
    """
    found = _found(node) if _example(node) is not None else None
    if found is None:
        return None
    tensors = _tensors(node)
    if any(_example(t) is None for t in tensors):
        return None
    if found.rule.name in ("linear", "matmul"):
        first, second = found.arguments[:2]
        rest = [t for t in tensors if t is not first and t is not second]
        if _example(first).dim() < 2 or _example(second).dim() != 2 or first is second or _max_rank(rest) > 1:
            return None
        wider = statically_known_true(_example(node).shape[-1] >= _example(first).shape[-1])
        return first if wider and len(tensors) == len({*tensors}) else None
    by_element = not (found.rule.reduces or found.rule.product or found.rule.updates or found.rule.view)
    if not by_element and found.rule.name not in _SAME_ELEMENTS:
        return None
    if found.rule.name in _BY_CHANNEL or any(isinstance(a, torch.memory_format) for a in _constants(node)):
        return None
    main = [t for t in tensors if _same_shape(t, node)]
    others = [t for t in tensors if t not in main]
    return main[0] if len(main) == 1 and _max_rank(others) < 2 else None


def _max_rank(nodes: Sequence[Node]) -> int:
    return max((_example(n).dim() for n in nodes), default=0)


def _constants(node: Node) -> list[Any]:
    """List what an operation is called with, tensors included."""
    leaves: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return leaves


def _is_switched(first: Node, last: Node) -> bool:
    """Whether anything between two nodes switches gradients: views and what is computed may be recorded or not."""
    node = first
    while node is not last:
        node = node.next
        if node.target in SWITCHES:
            return True
    return False


def _sharing(node: Node) -> list[Node]:
    """List the nodes whose results may use the memory of a node's result once that is dense, with the node itself.

    What had to copy rows that lay apart may then return a view.
    """
    memory, sharing = {storage_of(_example(node))}, [node]
    for each in sharing:
        for user in each.users:
            results, found = _results(user), _found(user)
            if user in sharing or not results:
                continue
            whole = (found is None or found.rule.view) and any(_same_elements(t, each) for t in results)
            if whole or any(storage_of(t) in memory for t in results):
                memory.update(map(storage_of, results))
                sharing.append(user)
    return sharing


def _same_elements(result: torch.Tensor, node: Node) -> bool:
    """Whether a result may have all elements of a node's, in some order."""
    return any(
        t.dtype is result.dtype and not statically_known_true(t.numel() != result.numel()) for t in _results(node)
    )


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)


# Losses over the second dimension -----------------------------------------------------------------------------------


def _reduce_last(node: Node, memory: _Memory) -> None:
    """Have a loss whose classes are the second of several dimensions take them as the last one, where they were.

    Logits (N, C, ...) that are a transposed (N, ..., C) become rows (R, C) of it, labels (N, ...) a vector (R,), and
    probabilities (N, C, ...) rows (R, C). Losses of each label get their shape back.
    """
    found = _found(node)
    if found is None or found.rule.name not in ("cross_entropy", "nll_loss"):
        return
    logits, target, weight, ignore_index, reduction, *smoothing = found.arguments
    if _example(logits) is None or _example(target) is None or _example(logits).dim() < 3:
        return
    labelled = not _example(target).is_floating_point()
    if _example(target).dim() != _example(logits).dim() - labelled or (reduction == "none" and not labelled):
        return
    transposed = _transposed(logits)
    if transposed is None or memory.is_written_to(transposed[0]):
        return
    rows = _insert(transposed[1], "flatten", transposed[0], 0, -2)
    for operation in transposed[2:]:
        rows = _with_classes_last(operation, rows)
    if not labelled:
        last = _example(target).dim() - 1
        target = _insert(node, "permute", target, 0, *range(2, last + 1), 1)
    labels = _insert(node, "flatten", target, *((0, -1) if labelled else (0, -2)))
    options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    if smoothing:
        options["label_smoothing"] = smoothing[0]
    whole = _example(node)
    if reduction == "none":
        with whole.fake_mode, torch.no_grad():
            flat = whole.detach().reshape(-1).requires_grad_(whole.requires_grad)
    function = F.cross_entropy if smoothing else F.nll_loss
    loss = _insert(node, function, rows, labels, example=flat if reduction == "none" else whole, **options)
    if reduction == "none":
        loss = _insert(node, "view_as", loss, target)
    _replace(node, loss)


def _transposed(node: Any) -> list[Node] | None:
    """Trace a value with its classes in the second dimension back to one in C order with the same ones in the last.

    Returns
    -------
    That value, what transposes it, and the operations from there to the given node; None if there is no such value
    """
    found = _found(node) if _example(node) is not None else None
    if found is None:
        return None
    name, rank = found.rule.name, _example(node).dim()
    if name in ("transpose", "permute"):
        source = found.arguments[0]
        if name == "transpose":
            order = list(range(rank))
            a, b = (d % rank for d in found.arguments[1:])
            order[a], order[b] = order[b], order[a]
        else:
            order = [d % rank for d in found.arguments[1]]
        in_c_order = _example(source) is not None and is_dense(_example(source), range(rank))
        return [source, node] if in_c_order and order == [0, rank - 1, *range(1, rank - 1)] else None
    main = _operand_of_rows(node)
    if name == "log_softmax" and found.arguments[1] in (1, 1 - rank):
        main = found.arguments[0]
    if main is None or found.rule.product or len(node.users) > 1 or is_in_place(node) or len(_tensors(node)) > 1:
        return None
    before = _transposed(main)
    return None if before is None else [*before, node]


def _with_classes_last(operation: Node, rows: Node) -> Node:
    """Insert an operation with its classes in the second dimension for rows of classes, where it was."""
    found, whole = _found(operation), _example(operation)
    with whole.fake_mode, torch.no_grad():
        example = torch.empty_like(_example(rows).detach(), dtype=whole.dtype).requires_grad_(whole.requires_grad)
    if found.rule.name == "log_softmax":
        dtype = found.arguments[2]
        return _insert(operation, torch.log_softmax, rows, -1, dtype=dtype and getattr(torch, dtype), example=example)
    (main,) = _tensors(operation)
    with operation.graph.inserting_before(operation):
        result = operation.graph.node_copy(operation, lambda argument: rows if argument is main else argument)
    result.meta = {**operation.meta, "example_value": example}
    return result
