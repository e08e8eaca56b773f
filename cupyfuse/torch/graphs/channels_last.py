"""Have operations of a captured graph compute images with their channels last, if they are so in memory.

What comes between convolutions, such as a batch norm in inference, an activation, a residual, is of rows of channels,
(N, H, W, C), of which (N, C, H, W) is a view: kernels would copy it. Blocks that multiply such rows, and transpose the
result for the next convolution, have what follows as a part of the product's chain.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .captured import channels_last, inverse, is_dense, is_in_a_format
from .nodes import example_of, find_rule, insert_copy, insert_reordering, replace, same_shape, tensors_of
from .rowwise import is_by_element
from .transposes import transposed
from .written_memory import WrittenMemory


def keep_channels_last(node: Node, memory: WrittenMemory) -> None:
    """Compute an operation on elements, or a batch norm in inference, of rows of channels, and transpose its result.

    An operand that is a transpose of such rows is these, another one a view. An operation alone, between others that
    no chain takes, is left as it is.
    """
    rank = example_of(node).dim()
    if rank < 3 or memory.is_changed(node) or not is_dense(example_of(node), channels_last(rank)):
        return
    # Whether a chain can go on behind it, but for images of one pixel or one channel, which are in both orders.
    continues = any(map(is_by_element, node.users)) and not is_dense(example_of(node), range(rank))
    if not is_by_element(node):
        if continues:
            _normalize_rows(node)
        return
    tensors = tensors_of(node)
    if any(example_of(t) is None for t in tensors):
        return
    sources = [s for t in tensors if (s := transposed(t, channels_last(rank), node)) is not None]
    if not continues and not any(find_rule(source) for source in sources):
        return
    if not all(_has_channels_last(t, node) or _is_of_channels(t, rank) for t in tensors):
        return
    operands = {t: _with_channels_last(t, node) for t in tensors}
    whole = example_of(node)
    with whole.fake_mode, torch.no_grad():
        example = torch.empty_like(whole.detach().permute(channels_last(rank)), memory_format=torch.contiguous_format)
    result = insert_copy(node, operands, example.requires_grad_(whole.requires_grad), node.name)
    replace(node, insert_reordering(node.name, node, "permute", result, *inverse(channels_last(rank))))


def _normalize_rows(node: Node) -> None:
    """Have a batch norm in inference take an image as a matrix, whose columns are the channels."""
    found = find_rule(node)
    if found is None or found.rule.name != "batch_norm" or found.arguments[5] is not False:
        return
    if not is_in_a_format(example_of(node)):
        return  # PyTorch's result is in another order than the captured one
    image, whole = found.arguments[0], example_of(node)
    if example_of(image) is None or image in found.arguments[1:]:
        return
    if not (same_shape(image, node) and _has_channels_last(image, node)):
        return
    image_rows = _with_channels_last(image, node)
    rows = insert_reordering(node.name, node, "flatten", image_rows, 0, -2)
    with whole.fake_mode, torch.no_grad():
        example = torch.empty_like(example_of(rows).detach(), dtype=whole.dtype).requires_grad_(whole.requires_grad)
    result = insert_copy(node, {image: rows}, example, node.name)
    images = insert_reordering(node.name, node, "view_as", result, image_rows)
    replace(node, insert_reordering(node.name, node, "permute", images, *inverse(channels_last(whole.dim()))))


def _has_channels_last(operand: Node, node: Node) -> bool:
    """Whether an operand has as many dimensions as a result, and its channels last in memory."""
    rank = example_of(node).dim()
    return example_of(operand).dim() == rank and is_dense(example_of(operand), channels_last(rank))


def _is_of_channels(operand: Node, rank: int) -> bool:
    """Whether an operand is a number, or has one element for each channel."""
    shape = example_of(operand).shape
    channel = len(shape) - rank + 1
    return all(k == channel or statically_known_true(size == 1) for k, size in enumerate(shape))


def _with_channels_last(operand: Node, place: Node) -> Node:
    """Return an operand with its channels in the last dimension: the one that it transposes, or a view."""
    rank = example_of(place).dim()
    if example_of(operand).dim() == 0:
        return operand
    if _is_of_channels(operand, rank) and not same_shape(operand, place):
        return insert_reordering(place.name, place, "flatten", operand)
    order = channels_last(rank)
    return transposed(operand, order, place) or insert_reordering(place.name, place, "permute", operand, *order)
