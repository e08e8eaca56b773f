"""Move slices of the rows of products in a captured graph to their operands: rows of a product are products of rows.

Kernels work on whole rows, from the start of a matrix: what reads a product's result through a slice of its rows would
need all of it in memory.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .captured import storage_of
from .inplace import is_in_place, is_switched
from .nodes import WHOLE, example_of, find_rule, insert, items_of, replace, results_of
from .rowwise import operand_of_rows
from .written_memory import WrittenMemory


def slice_operands(node: Node, memory: WrittenMemory) -> None:
    """Move a slice of the rows of a product to its operand, over operations on elements that the product ends in."""
    if node.target is not operator.getitem or example_of(node.args[0]) is None:
        return
    source, index = node.args
    items = items_of(index, example_of(source).dim())
    if not items or items[-1] != WHOLE or all(item == WHOLE for item in items):
        return
    path: list[tuple[Node, Node]] = []  # operations before the slice, the last one first, and the operand of each
    while True:
        assert isinstance(source, Node)
        main = operand_of_rows(source)
        if main is None or len(source.users) > 1 or is_in_place(source):
            return
        path.append((source, main))
        if _is_product(source):
            break
        source = main
    value = path[-1][1]
    if is_switched(path[-1][0], node) or memory.is_written_to(value):
        return
    if any(memory.is_written_to(n) or _is_returned(n) for n in _sharing(node)):
        return
    graded = example_of(value).requires_grad and example_of(path[-1][0]).requires_grad
    value = insert(path[-1][0], operator.getitem, value, index)
    value.meta["example_value"].requires_grad_(graded)
    for operation, main in reversed(path):
        value = _with_operand(operation, main, value, index)
    replace(node, value)


def _with_operand(operation: Node, main: Node, rows: Node, index: Any) -> Node:
    """Insert an operation on some rows of its operand, which gives those rows of its result."""

    def of_rows(argument: Node) -> Node:
        return rows if argument is main else argument

    whole = example_of(operation)
    with whole.fake_mode, torch.no_grad():
        example = whole.detach()[index].clone(memory_format=torch.contiguous_format)
    place = operation.next
    with operation.graph.inserting_before(place):
        result = operation.graph.node_copy(operation, of_rows)
    result.meta = {**operation.meta, "example_value": example.requires_grad_(whole.requires_grad)}
    return result


def _is_product(node: Node) -> bool:
    return find_rule(node).rule.product


def _sharing(node: Node) -> list[Node]:
    """List the nodes whose results may use the memory of a node's result once that is dense, with the node itself.

    What had to copy rows that lay apart may then return a view.
    """
    memory, sharing = {storage_of(example_of(node))}, [node]
    for each in sharing:
        for user in each.users:
            results, found = results_of(user), find_rule(user)
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
        t.dtype is result.dtype and not statically_known_true(t.numel() != result.numel()) for t in results_of(node)
    )


def _is_returned(node: Node) -> bool:
    return any(user.op == "output" for user in node.users)
