"""Pairs of neighbouring columns that change places, as in rotary embeddings of interleaved halves."""

from __future__ import annotations

from typing import NamedTuple

from . import graph as g
from .concats import columns_shown
from .graph import Node, Shape
from .slices import merged, slice_view, strided_copy


def swap_pairs(node: Node) -> Node:
    """Copy a matrix of an even number of columns with those of each pair, 2 k and 2 k + 1, in each other's place.

    A part of rows is copied from the whole, and what was converted to another dtype is copied before that: from what is
    in memory, where it is.
    """
    if node.op == "cast":
        return g.with_inputs(node, [swap_pairs(node.inputs[0])])
    shown = columns_shown(node) if node.op == "slice" else None
    if shown is None or shown[0] % 2:
        return strided_copy(node, _dims(node.shape, node.shape[1]), node.shape, offset=1)
    (whole,), (first, _) = node.inputs, shown
    return strided_copy(whole, _dims(node.shape, whole.shape[1]), node.shape, offset=first + 1)


class Swapped(NamedTuple):
    """Which columns of its input a copy that swaps pairs has: from `first` on, of rows that are `length` long."""

    first: int
    length: int


def swapped_pairs(node: Node) -> Swapped | None:
    """Return which columns a strided copy has, if it swaps those of pairs; None if it copies other elements."""
    rows, cols = node.shape
    if node.op != "strided" or cols % 2 or not node.size:
        return None
    (source,), first, dims = node.inputs, node.offset - 1, merged(node.dims)
    # Rows of the input begin as far apart as those of the copy, or are as long; a single row may be of any length.
    for length in {cols, dims[0][1]} if rows > 1 else {source.size}:
        inside = length > 0 and 0 <= first <= length - cols and rows * length <= source.size
        even = first % 2 == 0  # so that no pair is of two of the input's
        if inside and even and source.size % length == 0 and dims == merged(_dims(node.shape, length)):
            return Swapped(first, length)
    return None


def view_swapped(node: Node, swapped: Swapped) -> Node:
    """View the input of a copy that swaps pairs, which is in memory, as the copy has it."""
    (source,), (rows, cols) = node.inputs, node.shape
    shape = source.size // swapped.length, swapped.length
    whole = source if source.shape == shape else g.reshape(source, shape)
    part = whole if shape == node.shape else slice_view(whole, (0, 1, rows), (swapped.first, 1, cols))
    return Node("swap", (part,), node.shape, node.dtype)


def _dims(shape: Shape, length: int) -> tuple[tuple[int, int], ...]:
    """Return the (length, stride) of each dimension of swapped pairs, in a matrix of `length` columns."""
    rows, cols = shape
    return (rows, length), (cols // 2, 2), (2, -1)
