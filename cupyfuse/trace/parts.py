"""Parts of traced arrays that slices and integers select: copies of them, and arrays with a part replaced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir import slices
from ..ir.parts import FlatSlices, Part, Slice
from .axes import Axes
from .broadcasting import expand
from .folds import in_fold, strides_of
from .labels import positions
from .operations import apply
from .tracer import Tracer
from .user_code import user_line


@dataclass(frozen=True)
class Selection:
    """An index of slices, integers, new axes and an ellipsis, resolved for an array.

    Attributes
    ----------
    slices : tuple of Slice
        For each axis of the array.
    order : tuple of int or None
        The axes of the part, None for new ones; those indexed by an integer are left out.
    scalar : bool
        Whether the part is one element, which NumPy returns as a scalar, not as an array.
    """

    slices: tuple[Slice, ...]
    order: tuple[int | None, ...]
    scalar: bool

    def sliced(self, shape: Sequence[int]) -> list[int]:
        """Return the axes along which not every element is selected, or not in order."""
        slices = enumerate(zip(self.slices, shape, strict=True))
        return [p for p, ((_, step, count), n) in slices if count != n or (step != 1 and n > 1)]

    def whole(self, shape: Sequence[int]) -> bool:
        """Whether every element is selected, in order."""
        return not self.sliced(shape)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of indices along each axis of the array."""
        return tuple(count for _, _, count in self.slices)


def is_position(item: Any) -> bool:
    """Whether an item of an index is an integer, known or traced."""
    if isinstance(item, Tracer):
        return not item.ndim and dtypes.is_integer(item._node.dtype)
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)


def is_index_array(item: Any) -> bool:
    """Whether an item of an index is an array of integers, known or traced, or a list or range of them."""
    if isinstance(item, (list, range, np.ndarray)):
        item = np.asarray(item)
    return isinstance(item, (Tracer, np.ndarray)) and item.ndim > 0 and item.dtype.kind in "iu"


def full_index(index: Any, ndim: int, axes_of_mask: int = 1) -> list[Any]:
    """Return the items of an index, with full slices for the axes that it leaves out and for an ellipsis.

    Each item but None takes one axis; if there is a mask among them, it takes `axes_of_mask`.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    present = sum(i is not None and i is not Ellipsis for i in items) + axes_of_mask - 1
    ellipses = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(ellipses) > 1:
        raise IndexError(f"an index can only have a single ellipsis ('...')\n  at {user_line()}")
    if present > ndim:
        raise IndexError(f"too many indices for an array of {ndim} dimensions\n  at {user_line()}")
    place = ellipses[0] if ellipses else len(items)
    items[place : place + 1] = [slice(None)] * (ndim - present)
    return items


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Resolve an index of slices, integers, None and an ellipsis."""
    slices: list[Slice] = []
    order: list[int | None] = []
    for item in full_index(index, len(shape)):
        if item is None:
            order.append(None)
            continue
        axis, n = len(slices), shape[len(slices)]
        if isinstance(item, slice):
            start, stop, step = item.indices(n)
            slices.append((start, step, len(range(start, stop, step))))
            order.append(axis)
            continue
        try:
            i = operator.index(item)
        except TypeError as error:
            raise IndexError(
                f"only integers, slices, None, ..., integer and boolean arrays are valid indices, got {item!r}\n"
                f"  at {user_line()}"
            ) from error
        if not -n <= i < n:
            raise IndexError(f"index {i} is out of bounds for axis {axis} with size {n}\n  at {user_line()}")
        slices.append((i % n, 1, 1))
    given = index if isinstance(index, tuple) else (index,)
    return Selection(tuple(slices), tuple(order), not order and not any(i is Ellipsis for i in given))


def part(x: Tracer, selection: Selection) -> Tracer:
    """Copy a part of an array; pointwise operators are computed for the part alone."""
    folds = _rows_and_cols(x)
    rows, cols = (
        [(p, *selection.slices[p]) for p in axes if x.shape[p] != 1 or selection.slices[p][2] != 1] for axes in folds
    )
    axes = Axes(selection.counts, *folds)
    if x.size and 0 not in axes.shape:
        flat = _flatten_slices(rows, x.shape), _flatten_slices(cols, x.shape)
        node = _part_of(x, Part(*flat, axes.node_shape, x._node.shape))
        return x._trace.array(node, axes.picked(selection.order))
    base, strides = strides_of(x)
    dims = [(count, step * strides.get(p, 0)) for p, _, step, count in rows + cols]
    return x._trace.array(slices.strided_copy(base, dims or [(1, 0)], axes.node_shape), axes.picked(selection.order))


def _part_of(x: Tracer, view: Part) -> g.Node:
    """Return a part of an array's node: of the node in memory if it has a long history, else computed for itself."""
    node, trace = x._node, x._trace
    found = view.again(node, trace.stored)
    if found is None:
        trace.stored.add(node)
        return view.of_stored(node)
    if found is not node and view.copies(node, trace.stored):
        trace.viewed[found] = (node, view)
    return found


def _rows_and_cols(x: Tracer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes along rows and columns; those along neither count as rows, since slices may empty them."""
    rows, cols = x._axes.rows, x._axes.cols
    return tuple(p for p in range(x.ndim) if p not in rows + cols) + rows, cols


def _flatten_slices(slices: list[tuple[int, int, int, int]], shape: tuple[int, ...]) -> FlatSlices:
    """Combine the slices (axis, start, step, count) of the axes that are folded into rows, or into columns."""
    dims: list[tuple[int, int]] = []
    offset, stride = 0, 1
    for p, start, step, count in reversed(slices):
        if dims and step * stride == dims[0][0] * dims[0][1]:
            dims[0] = (count * dims[0][0], dims[0][1])  # continues the dimension before it
        elif count != 1:
            dims.insert(0, (count, step * stride))
        offset += start * stride
        stride *= shape[p]
    return tuple(dims), offset


# Writing ------------------------------------------------------------------------------------------------------------


def without_leading_ones(x: Tracer, ndim: int) -> Tracer:
    """Drop leading axes of length one until an array has at most `ndim` dimensions."""
    extra = max(0, x.ndim - ndim)
    if any(n != 1 for n in x.shape[:extra]):
        raise ValueError(f"an array of shape {x.shape} cannot be broadcast to {ndim} dimensions\n  at {user_line()}")
    return x._trace.array(x._node, x._axes.picked(range(extra, x.ndim)))


def put(x: Tracer, selection: Selection, value: Tracer) -> Tracer:
    """Return an array with a part replaced: by `where` if the value is constant along sliced axes, else by a copy."""
    value = _with_axes_of(x, value, selection).astype(x._node.dtype)
    if 0 in selection.counts:
        return x.copy()
    sliced = selection.sliced(x.shape)
    if not sliced:
        return expand(value, x.shape)
    if all(value.shape[p] == 1 for p in sliced):
        masks = [_mask_along(x, p, selection.slices[p]) for p in sliced]
        mask = functools.reduce(lambda a, b: apply("logical_and", a, b), masks)
        return apply("where", mask, value, x)
    return _write_to_copy(x, selection, value)


def _with_axes_of(x: Tracer, value: Tracer, selection: Selection) -> Tracer:
    """Return a value that is assigned to a part of an array with the axes of that array, in its order.

    Axes of the array that the value lacks have length one.
    """
    order = selection.order
    shape = tuple(1 if p is None else selection.counts[p] for p in order)
    value = without_leading_ones(value, len(order)) if value.ndim > len(order) else value
    if not _broadcasts(value.shape, shape):
        raise ValueError(f"an array of shape {value.shape} cannot be assigned to one of {shape}\n  at {user_line()}")
    axis_of_x = order[len(order) - value.ndim :]  # for each axis of the value
    own_axes = [axis_of_x.index(p) if p in axis_of_x else None for p in range(x.ndim)]
    return value._trace.array(value._node, value._axes.picked(own_axes))


def _write_to_copy(x: Tracer, selection: Selection, value: Tracer) -> Tracer:
    """Return a copy of an array with a part replaced."""
    base, strides = strides_of(x)
    fold = Axes(selection.counts, *x._axes.long)
    new = g.broadcast(in_fold(value, fold), fold.node_shape)
    axes = fold.rows + fold.cols
    dims = [(selection.counts[p], selection.slices[p][1] * strides[p]) for p in axes]
    offset = sum(selection.slices[p][0] * strides[p] for p in axes)
    node = slices.put(base, new, dims, offset)
    return x._trace.array(node if base is x._node else g.transpose(node), x._axes)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, wanted) for n, wanted in pairs)


def _mask_along(x: Tracer, axis: int, indices: Slice) -> Tracer:
    """Return the mask, along an axis of an array, of the indices in a slice."""
    start, step, count = indices
    if step < 0:
        start, step = start + (count - 1) * step, -step
    index = positions(x._trace, x.ndim, axis, x.shape[axis], along=0 if axis in x._axes.rows else 1)
    if count == 1:
        return apply("equal", index, start)
    in_range = apply("logical_and", index >= start, index < start + (count - 1) * step + 1)
    if step == 1:
        return in_range
    steps = (index - start).astype("float64") / float(step)
    return apply("logical_and", in_range, apply("equal", apply("floor", steps), steps))
