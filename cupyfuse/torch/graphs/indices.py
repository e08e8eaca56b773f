"""Rewrite a captured graph's broadcasts, and its indices with an element for each row, to operations of chains.

`x[arange(n), index]` becomes `index_rows`, and what `broadcast_tensors` repeats becomes `expand_as`, which a slice of
one element undoes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..rules.labels import index_rows_eager
from .nodes import WHOLE, example_of, insert, items_of, replace, same_shape
from .written_memory import WrittenMemory


def remove_broadcasts(node: Node, memory: WrittenMemory) -> None:
    """Replace what `broadcast_tensors` returns by its operands, expanded; and a slice of an expanded value by that."""
    if node.target is not operator.getitem:
        return
    source, index = node.args
    if not isinstance(source, Node) or any(user.op == "output" for user in node.users):
        return
    if source.target is torch.functional.broadcast_tensors and isinstance(index, int):
        operands = source.args
        whole = next((o for o in operands if example_of(o) is not None and same_shape(o, node)), None)
        if whole is not None and example_of(operands[index]) is not None:
            operand = operands[index]
            assert isinstance(operand, Node)
            same = same_shape(operand, node)
            replace(node, operand if same else insert(node, "expand_as", operand, whole))
    elif source.target in ("expand", "expand_as") and source.op == "call_method":
        base = source.args[0]
        if example_of(base) is not None and same_shape(base, node) and _takes_one_of_repeated(source, base, index):
            assert isinstance(base, Node)
            replace(node, base)


def _takes_one_of_repeated(expanded: Node, base: Any, index: Any) -> bool:
    """Whether an index has whole dimensions, and the first element of those that were repeated."""
    items = items_of(index, example_of(expanded).dim())
    if items is None or example_of(base).dim() != len(items):
        return False
    repeated = [statically_known_true(n == 1) for n in example_of(base).shape]
    first = (slice(None, 1, None), slice(0, 1, None), slice(None, 1, 1), slice(0, 1, 1))
    return all(item == WHOLE or (again and item in first) for item, again in zip(items, repeated, strict=True))


def index_rows(node: Node, memory: WrittenMemory) -> None:
    """Replace `x[arange(len(x)), index]` by `index_rows(x, index)`."""
    if node.target is not operator.getitem or example_of(node.args[0]) is None:
        return
    source, index = node.args
    if not isinstance(index, tuple) or len(index) != 2 or example_of(source).dim() != 2:
        return
    rows, columns = index
    if example_of(rows) is None or example_of(columns) is None or not _is_arange(rows) or memory.is_written_to(rows):
        return
    labels, n = example_of(columns), example_of(source).shape[0]
    if labels.dim() != 1 or labels.dtype is not torch.int64:
        return
    if statically_known_true(labels.shape[0] == n) and statically_known_true(example_of(rows).shape[0] == n):
        replace(node, insert(node, index_rows_eager, source, columns, example=node.meta["example_value"]))


def _is_arange(node: Node) -> bool:
    """Whether a node is 0, 1, 2, ... up to some number."""
    names = ("end",) if len(node.args) == 1 and "end" not in node.kwargs else ("start", "end", "step")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    from_zero = given.get("start", 0) == 0 and given.get("step", 1) == 1
    return node.target is torch.arange and from_zero and example_of(node).dtype is torch.int64
