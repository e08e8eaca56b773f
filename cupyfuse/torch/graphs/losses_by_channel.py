"""Have losses of a captured graph over the second dimension take classes as the last one, before a transpose.

Kernels work on whole rows: a loss over the second dimension would need the products that it reads in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .captured import channels_last
from .inplace import is_in_place
from .nodes import example_of, find_rule, insert, insert_copy, replace, tensors_of
from .rowwise import operand_of_rows
from .transposes import transposed
from .written_memory import WrittenMemory

F = torch.nn.functional


def reduce_last(node: Node, memory: WrittenMemory) -> None:
    """Have a loss whose classes are the second of several dimensions take them as the last one, where they were.

    Logits (N, C, ...) that are a transposed (N, ..., C) become rows (R, C) of it, labels (N, ...) a vector (R,), and
    probabilities (N, C, ...) rows (R, C). Losses of each label get their shape back.
    """
    found = find_rule(node)
    if found is None or found.rule.name not in ("cross_entropy", "nll_loss"):
        return
    logits, target, weight, ignore_index, reduction, *smoothing = found.arguments
    if example_of(logits) is None or example_of(target) is None or example_of(logits).dim() < 3:
        return
    labelled = not example_of(target).is_floating_point()
    if example_of(target).dim() != example_of(logits).dim() - labelled or (reduction == "none" and not labelled):
        return
    transposed = _transposed(logits)
    if transposed is None or memory.is_written_to(transposed[0]):
        return
    rows = insert(transposed[1], "flatten", transposed[0], 0, -2)
    for operation in transposed[2:]:
        rows = _with_classes_last(operation, rows)
    if not labelled:
        last = example_of(target).dim() - 1
        target = insert(node, "permute", target, 0, *range(2, last + 1), 1)
    labels = insert(node, "flatten", target, *((0, -1) if labelled else (0, -2)))
    options = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    if smoothing:
        options["label_smoothing"] = smoothing[0]
    whole = example_of(node)
    if reduction == "none":
        with whole.fake_mode, torch.no_grad():
            flat = whole.detach().reshape(-1).requires_grad_(whole.requires_grad)
    function = F.cross_entropy if smoothing else F.nll_loss
    loss = insert(node, function, rows, labels, example=flat if reduction == "none" else whole, **options)
    if reduction == "none":
        loss = insert(node, "view_as", loss, target)
    replace(node, loss)


def _transposed(node: Any) -> list[Node] | None:
    """Trace a value with its classes in the second dimension back to one in C order with the same ones in the last.

    Returns
    -------
    That value, what transposes it, and the operations from there to the given node; None if there is no such value
    """
    found = find_rule(node) if example_of(node) is not None else None
    if found is None:
        return None
    source = transposed(node, channels_last(example_of(node).dim()), node)
    if source is not None:
        return [source, node]
    main, rank = operand_of_rows(node), example_of(node).dim()
    if found.rule.name == "log_softmax" and found.arguments[1] in (1, 1 - rank):
        main = found.arguments[0]
    if main is None or found.rule.product or len(node.users) > 1 or is_in_place(node) or len(tensors_of(node)) > 1:
        return None
    before = _transposed(main)
    return None if before is None else [*before, node]


def _with_classes_last(operation: Node, rows: Node) -> Node:
    """Insert an operation with its classes in the second dimension for rows of classes, where it was."""
    found, whole = find_rule(operation), example_of(operation)
    with whole.fake_mode, torch.no_grad():
        example = torch.empty_like(example_of(rows).detach(), dtype=whole.dtype).requires_grad_(whole.requires_grad)
    if found.rule.name == "log_softmax":
        dtype = found.arguments[2]
        return insert(operation, torch.log_softmax, rows, -1, dtype=dtype and getattr(torch, dtype), example=example)
    (main,) = tensors_of(operation)
    return insert_copy(operation, {main: rows}, example)
