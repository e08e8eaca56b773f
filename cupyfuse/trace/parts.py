"""Parts of traced arrays, as slices and integers select them: copies of them, and arrays with a part replaced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import graph as g
from ..ir import slices
from .axes import Axes
from .broadcasting import expand
from .folds import in_fold, in_memory, strides_of
from .labels import positions
from .operations import apply
from .tracer import Tracer
from .user_code import fail, user_line

Cut = tuple[int, int, int]  # of one axis: the first index, the step, the number of indices


@dataclass(frozen=True)
class Selection:
    """A part of an array, as slices, integers, new axes and an ellipsis select it.

    Attributes
    ----------
    cuts : tuple
        For each axis of the array.
    order : tuple of int or None
        The axes of the part, None for new ones; those indexed by an integer are left out.
    scalar : bool
        Whether the part is one element that NumPy returns as a number, not as an array.
    """

    cuts: tuple[Cut, ...]
    order: tuple[int | None, ...]
    scalar: bool

    def whole(self, shape: Sequence[int]) -> bool:
        """Whether every element is selected, in order."""
        return all(count == n and (step == 1 or n <= 1) for (_, step, count), n in zip(self.cuts, shape, strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(count for _, _, count in self.cuts)


def _items(index: Any, ndim: int) -> list[Any]:
    """Return one item for each axis and new axis; an ellipsis, given or left out, becomes full slices."""
    items = list(index) if isinstance(index, tuple) else [index]
    present = sum(i is not None and i is not Ellipsis for i in items)
    ellipses = [k for k, i in enumerate(items) if i is Ellipsis]
    if present > ndim or len(ellipses) > 1:
        raise IndexError(f"too many indices for an array of {ndim} dimensions\n  at {user_line()}")
    place = ellipses[0] if ellipses else len(items)
    items[place : place + 1] = [slice(None)] * (ndim - present)
    return items


def select(index: Any, shape: tuple[int, ...]) -> Selection:
    """Resolve an index of slices, integers, None and an ellipsis."""
    cuts: list[Cut] = []
    order: list[int | None] = []
    for item in _items(index, len(shape)):
        if item is None:
            order.append(None)
            continue
        axis, n = len(cuts), shape[len(cuts)]
        if isinstance(item, slice):
            start, stop, step = item.indices(n)
            cuts.append((start, step, len(range(start, stop, step))))
            order.append(axis)
            continue
        try:
            i = operator.index(item)
        except TypeError:
            fail(f"indexing with {item!r}", "slices, integers, None, ..., labels and masks are expected")
        if not -n <= i < n:
            raise IndexError(f"index {i} is out of bounds for axis {axis} with size {n}\n  at {user_line()}")
        cuts.append((i % n, 1, 1))
    given = index if isinstance(index, tuple) else (index,)
    return Selection(tuple(cuts), tuple(order), not order and not any(i is Ellipsis for i in given))


def part(x: Tracer, selection: Selection) -> Tracer:
    """Copy a part of an array; what is pointwise is computed for the part alone."""
    rows, cols = (
        [(p, *selection.cuts[p]) for p in axes if x.shape[p] != 1 or selection.cuts[p][2] != 1] for axes in _held(x)
    )
    counts = Axes(selection.counts, *_held(x))
    node = x._node
    if x.size and 0 not in counts.shape:
        cut = _Cut(_flat(rows, x.shape), _flat(cols, x.shape), counts.node_shape)
        return x._trace.array(cut(node), counts.picked(selection.order))
    base, strides = strides_of(x)
    dims = [(count, step * strides.get(p, 0)) for p, _, step, count in rows + cols]
    return x._trace.array(
        slices.strided_copy(base, dims or [(1, 0)], counts.node_shape), counts.picked(selection.order)
    )


def _held(x: Tracer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes along rows and columns; those of length one that are neither count as rows, which may be cut."""
    rows, cols = x._axes.rows, x._axes.cols
    return tuple(p for p in range(x.ndim) if p not in rows + cols) + rows, cols


_Flat = tuple[tuple[tuple[int, int], ...], int]  # pairs (count, stride), and the first index, in rows or in columns


def _flat(cuts: list[tuple[int, int, int, int]], shape: tuple[int, ...]) -> _Flat:
    """Combine the cuts of the axes that are folded into rows, or into columns."""
    dims: list[tuple[int, int]] = []
    offset, stride = 0, 1
    for p, start, step, count in reversed(cuts):
        if dims and step * stride == dims[0][0] * dims[0][1]:
            dims[0] = (count * dims[0][0], dims[0][1])  # one dimension, as of all rows
        elif count != 1:
            dims.insert(0, (count, step * stride))
        offset += start * stride
        stride *= shape[p]
    return tuple(dims), offset


class _Cut:
    """Cuts values of one shape, and all that they are computed from by pointwise work, to a part."""

    def __init__(self, rows: _Flat, cols: _Flat, shape: g.Shape):
        self.rows, self.cols, self.shape = rows, cols, shape

    def __call__(self, root: g.Node) -> g.Node:
        whole = root.shape
        done: dict[g.Node, g.Node] = {}

        def inputs(node: g.Node) -> tuple[g.Node, ...]:
            return node.inputs if node.pointwise and node.op != "guard" and not in_memory(node) else ()

        for node in g.topological([root], inputs):
            shape = tuple(n if node.shape[a] != 1 else 1 for a, n in enumerate(self.shape))
            if node.op == "const" or (node.shape == (1, 1) != whole):
                done[node] = node
            elif inputs(node):
                done[node] = g.with_inputs(node, [done[i] for i in node.inputs], (shape[0], shape[1]))
            elif node.op == "positions":
                done[node] = self._positions(node)
            else:
                done[node] = self._copied(node, (shape[0], shape[1]))
        return done[root]

    def _positions(self, node: g.Node) -> g.Node:
        dims, offset = (self.rows, self.cols)[node.axis]
        if not dims:
            return g.cast(g.const(offset), node.dtype)
        if len(dims) != 1:
            return self._copied(node, tuple(n if node.shape[a] != 1 else 1 for a, n in enumerate(self.shape)))  # type: ignore[arg-type]
        count, step = dims[0]
        positions = g.positions(count, node.axis, node.dtype)
        return g.pointwise("add", g.pointwise("multiply", positions, g.const(step)), g.const(offset))

    def _copied(self, node: g.Node, shape: g.Shape) -> g.Node:
        """Copy the part of a value that is in memory."""
        (row_dims, first_row), (col_dims, first_col) = self.rows, self.cols
        transposed = node.op == "transpose"
        base = node.inputs[0] if transposed else node
        down, across = (1, node.shape[0]) if transposed else (node.shape[1], 1)
        dims, offset = [], 0
        if node.shape[0] != 1:
            dims += [(n, s * down) for n, s in row_dims]
            offset += first_row * down
        if node.shape[1] != 1:
            dims += [(n, s * across) for n, s in col_dims]
            offset += first_col * across
        if shape == node.shape and offset == 0 and _is_whole(dims):
            return node
        if len(row_dims) <= 1 and len(col_dims) <= 1:
            rows, cols = (
                (0, 1, 1) if node.shape[a] == 1 else (first, *(flat[0][::-1] if flat else (1, 1)))
                for a, (flat, first) in enumerate((self.rows, self.cols))
            )
            return slices.slice_view(node, rows, cols)
        return slices.strided_copy(base, dims or [(1, 0)], shape, offset)


def _is_whole(dims: list[tuple[int, int]]) -> bool:
    stride = 1
    for n, s in reversed(dims):
        if s != stride:
            return False
        stride *= n
    return True


# Writing ------------------------------------------------------------------------------------------------------------


def without_leading_ones(x: Tracer, ndim: int) -> Tracer:
    extra = max(0, x.ndim - ndim)
    if any(n != 1 for n in x.shape[:extra]):
        raise ValueError(f"an array of shape {x.shape} cannot be broadcast to {ndim} dimensions\n  at {user_line()}")
    return x._trace.array(x._node, x._axes.picked(range(extra, x.ndim)))


def put(x: Tracer, selection: Selection, value: Tracer) -> Tracer:
    """Return the array with a part replaced: by a choice where the value is constant along the cut, else by a copy."""
    order = selection.order
    shape = tuple(1 if p is None else selection.counts[p] for p in order)
    value = without_leading_ones(value, len(order)) if value.ndim > len(order) else value
    if not _broadcasts(value.shape, shape):
        raise ValueError(f"an array of shape {value.shape} cannot be assigned to one of {shape}\n  at {user_line()}")
    # With the axes of the array, in its order.
    place = {p: k - (len(order) - value.ndim) for k, p in enumerate(order) if p is not None}
    back = [place[p] if place.get(p, -1) >= 0 else None for p in range(x.ndim)]
    value = value._trace.array(value._node, value._axes.picked(back)).astype(x._node.dtype)
    if 0 in selection.counts:
        return x.copy()
    cut = [p for p in range(x.ndim) if selection.cuts[p][2] != x.shape[p] or selection.cuts[p][1] < 0 < x.shape[p] - 1]
    if not cut:
        return expand(value, x.shape)
    if all(value.shape[p] == 1 for p in cut):
        inside = [_inside(x, p, selection.cuts[p]) for p in cut]
        mask = functools.reduce(lambda a, b: apply("logical_and", a, b), inside)
        return apply("where", mask, value, x)
    base, strides = strides_of(x)
    fold = Axes(selection.counts, *x._axes.long)
    given = g.broadcast(in_fold(value, fold), fold.node_shape)
    dims = [(selection.counts[p], selection.cuts[p][1] * strides[p]) for p in fold.rows + fold.cols]
    offset = sum(selection.cuts[p][0] * strides[p] for p in fold.rows + fold.cols)
    node = slices.put(base, given, dims, offset)
    return x._trace.array(node if base is x._node else g.transpose(node), x._axes)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, wanted) for n, wanted in pairs)


def _inside(x: Tracer, axis: int, cut: Cut) -> Tracer:
    """Return where a cut selects, along its axis."""
    start, step, count = cut
    if step < 0:
        start, step = start + (count - 1) * step, -step
    here = positions(x._trace, x.ndim, axis, x.shape[axis])
    if count == 1:
        return apply("equal", here, start)
    inside = apply("logical_and", here >= start, here < start + (count - 1) * step + 1)
    if step == 1:
        return inside
    turns = (here - start).astype("float64") / float(step)
    return apply("logical_and", inside, apply("equal", apply("floor", turns), turns))
