"""Folds: how the axes of arrays of any rank are folded into the rows and columns of their nodes.

The operands of an operation need one fold. Refolding a value in memory, such as an argument, is a view as long as the
axes keep their order; otherwise it is a copy, a step of its own in the plan. So each operation chooses the fold for
which the fewest elements are written and read again.

Axes are numbered as in the broadcast shape of all operands. Under a fold an operand has length one or the full length
along the rows, and so along the columns: one that varies along some axes of the rows is repeated along the others, by a
copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import TraceError
from ..ir import graph as g
from ..ir import slices
from ..ir.parts import Repeated, Reshaped, in_memory
from ..ir.repeats import Repeats
from .axes import Axes
from .tracer import Tracer

_VIEW_COST = 1e-3  # elements; decides between folds that differ in the number of views
_ROW_COST = 1e-5  # elements; of each row that reads one element which comes again: fewer and longer rows are better
# The most elements of axes that are reduced together, before the others: those of a row that one block can hold.
_LONGEST_PART = 32768


class CopyNeeded(TraceError):
    """An operand has to be copied to another fold in a trace without copies."""


def strides_of(x: Tracer) -> tuple[g.Node, dict[int, int]]:
    """Return an array's node as stored, beneath a transpose, and each axis's stride in that node's elements.

    Axes of length one have no stride.
    """
    rows, cols = x._axes.long
    node, order = x._node, rows + cols
    if node.op == "transpose":
        node, order = node.inputs[0], cols + rows
    strides: dict[int, int] = {}
    stride = 1
    for p in reversed(order):
        strides[p] = stride
        stride *= x.shape[p]
    return node, strides


@dataclass(frozen=True)
class Conversion:
    """The conversion of an operand to a fold of a shape that it broadcasts to.

    Attributes
    ----------
    x : Tracer
        The operand.
    shape : tuple of int
    rows, cols : tuple of int
        The axes along rows and columns of the converted operand; () where that has length one.
    columns : int
        The number of columns of the fold, all operands together.
    """

    x: Tracer
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    columns: int

    @classmethod
    def to(cls, x: Tracer, fold: Axes) -> Conversion:
        """Return the conversion of an operand to a fold."""
        extra = len(fold.shape) - x.ndim
        own = {p + extra for p, n in enumerate(x.shape) if n != 1}
        rows, cols = (axes if own.intersection(axes) else () for axes in fold.long)
        return cls(x, fold.shape, rows, cols, fold.length(fold.long[1]))

    @property
    def held(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes along rows and columns of the operand before the conversion."""
        extra = len(self.shape) - self.x.ndim
        rows, cols = self.x._axes.long
        return tuple(p + extra for p in rows), tuple(p + extra for p in cols)

    @property
    def node_shape(self) -> g.Shape:
        return self._length(self.rows), self._length(self.cols)

    def _length(self, axes: Iterable[int]) -> int:
        return Axes(self.shape, (), ()).length(axes)

    @property
    def op(self) -> str:
        """The operator that converts: "transpose", "reshape", "strided" (a copy), or "" for none."""
        rows, cols = self.held
        if (rows, cols) == (self.rows, self.cols):
            return ""
        if (rows, cols) == (self.cols, self.rows):
            return "transpose"
        return "reshape" if rows + cols == self.rows + self.cols else "strided"

    def cost(self) -> float:
        """Count the elements that the conversion writes and reads again."""
        op, node = self.op, self.x._node
        if not op:
            return 0.0
        if op == "strided":
            if self._repeats is not None:
                rows, cols = self.node_shape
                again = _ROW_COST * rows if cols == 1 else 0.0
                return again + 2 * _VIEW_COST + (self._store_cost if self._repeated_again() is None else 0.0)
            if not self.x._trace.copies:
                return math.inf
            if self._key in self.x._trace.folded:
                return _VIEW_COST
            rows, cols = self.node_shape
            return 2.0 * rows * cols + self._store_cost
        if op == "transpose":
            return _VIEW_COST if 1 in node.shape else 2.0 * node.size + self._store_cost
        if self._store_cost and Reshaped(self.node_shape).again(node) is not None:
            return 2 * _VIEW_COST
        return _VIEW_COST + self._store_cost

    @property
    def _store_cost(self) -> float:
        """The elements written and read where the operand has to be stored first."""
        node = self.x._node
        return 0.0 if node.op == "reshape" or in_memory(node) else 2.0 * node.size

    @property
    def _key(self) -> tuple[object, ...]:
        """What a strided copy is found by in `Trace.folded`."""
        dims, base = self._dims
        return base, dims, self.node_shape

    @property
    def _dims(self) -> tuple[tuple[tuple[int, int], ...], g.Node]:
        """The (length, stride) pairs of the converted operand's dimensions, and the node that they stride over."""
        extra = len(self.shape) - self.x.ndim
        node, strides = strides_of(self.x)
        return tuple((self.shape[p], strides.get(p - extra, 0)) for p in self.rows + self.cols), node

    @property
    def _repeats(self) -> Repeats | None:
        """How rows of the operand come again in its strided copy: programs read them where they are, not the copy.

        None if the copy is another one; if the fold has no columns; if its rows begin between packs, as longer rows are
        read faster, unless the operand has one element a row and no copies may be made; and in shards, whose numbers of
        rows are not those of the trace.
        """
        in_any_rows = self.node_shape[1] == 1 and not self.x._trace.copies
        readable = in_any_rows or slices.begin_packs(self.columns, self.x._node.dtype)
        if self.columns == 1 or not readable or self.x._trace.for_shards:
            return None
        return slices.rows_of_copy(self._dims[0], self.node_shape[1], self.x._node.dtype)

    def _repeated_again(self) -> g.Node | None:
        """Compute a strided copy that repeats rows from an argument whose rows come again; None if it is not cheap."""
        dims, base = self._dims
        return Repeated(dims, self.node_shape).again(base) if base.pointwise else None

    def node(self) -> g.Node:
        """Return the node of the converted operand."""
        op, node = self.op, self.x._node
        if not op:
            return node
        if op == "transpose":
            return g.transpose(node)
        if op == "reshape":
            view = Reshaped(self.node_shape)
            found = None if in_memory(node) else view.again(node)
            if found is None:
                return view.of_stored(node)
            if found is not node:
                self.x._trace.viewed[found] = (node, view)
            return found
        if not self.x._trace.copies and self._repeats is None:
            raise CopyNeeded(
                f"an operand of shape {self.x.shape} varies along neither the first nor the last dimensions"
            )
        folded = self.x._trace.folded
        if self._key not in folded:
            dims, base = self._dims
            again = None if self._repeats is None else self._repeated_again()
            folded[self._key] = slices.strided_copy(base, dims, self.node_shape) if again is None else again
            if again is not None:
                self.x._trace.viewed[again] = base, Repeated(dims, self.node_shape)
        return folded[self._key]


def choose_fold(operands: Sequence[Tracer], shape: tuple[int, ...]) -> Axes:
    """Choose the fold of a shape to which the operands are converted with the least memory traffic."""
    candidates = _candidates(operands, shape)
    if not operands[0]._trace.copies:
        candidates = (fold for fold in candidates if fold.in_order or fold.transposed)
    return cheapest(operands, candidates)


def _candidates(operands: Sequence[Tracer], shape: tuple[int, ...]) -> Iterator[Axes]:
    """Yield the folds that operands have, then all splits of the axes in order, first the last axis as columns."""
    axes = tuple(p for p, n in enumerate(shape) if n != 1)
    for x in operands:
        yield from _extended(x, shape, axes)
    for k in (len(axes) - 1, *range(len(axes) - 1), len(axes)):
        if k >= 0:
            yield Axes(shape, axes[:k], axes[k:])


def cheapest(operands: Sequence[Tracer], folds: Iterable[Axes]) -> Axes:
    """Return the fold to which the operands are converted with the least memory traffic; the first of equals."""
    costs: dict[Axes, float] = {}
    for fold in folds:
        if fold not in costs:
            costs[fold] = sum(Conversion.to(x, fold).cost() for x in operands)
            if not costs[fold]:  # most often the first
                return fold
    return min(costs, key=costs.__getitem__)


def _extended(x: Tracer, shape: tuple[int, ...], axes: tuple[int, ...]) -> Iterator[Axes]:
    """Yield the two folds that extend an operand's own by the axes it is broadcast along, to rows and to columns."""
    extra = len(shape) - x.ndim
    rows, cols = (tuple(p + extra for p in held) for held in x._axes.long)
    missing = [p for p in axes if p not in rows + cols]
    yield Axes(shape, _insert(rows, missing), cols)
    yield Axes(shape, rows, _insert(cols, missing))


def _insert(axes: tuple[int, ...], missing: Iterable[int]) -> tuple[int, ...]:
    """Insert each missing axis before the first that follows it."""
    result = list(axes)
    for p in missing:
        before = next((k for k, other in enumerate(result) if other > p), len(result))
        result.insert(before, p)
    return tuple(result)


def in_fold(x: Tracer, fold: Axes) -> g.Node:
    """Return an operand's node, converted to a fold of a shape that it broadcasts to."""
    return Conversion.to(x, fold).node()


def fold_along(x: Tracer, positions: Iterable[int]) -> Axes:
    """Choose a fold, for a reduction, in which rows are all given axes or all others, and so are columns."""
    inside = {p for p in positions if x.shape[p] != 1}
    rows, cols = x._axes.long
    if all(inside.isdisjoint(axes) or inside.issuperset(axes) for axes in (rows, cols)):
        return x._axes
    orders = [rows + cols, tuple(sorted(rows + cols))]  # that of the node, and that of the array
    folds = []
    for order in orders:
        reduced, kept = (tuple(p for p in order if (p in inside) == wanted) for wanted in (True, False))
        folds += [Axes(x.shape, kept, reduced), Axes(x.shape, reduced, kept)]
    return cheapest([x], folds)


def axes_without_copy(x: Tracer, positions: Iterable[int]) -> set[int]:
    """Choose some of the axes of a reduction, to be reduced first, without a copy.

    The last axes of the array that are to be reduced, as many as `_LONGEST_PART` allows; for shards, or if those take a
    copy, the axes along the columns or the rows of its node. An empty set if all of the axes can be reduced at once
    without a copy, or if no part of them can.
    """
    inside = {p for p in positions if x.shape[p] != 1}
    if reduces_without_copy(x, inside):
        return set()
    long = [p for p in range(x.ndim) if x.shape[p] != 1]
    last = [p for k, p in enumerate(long) if inside.issuperset(long[k:])]
    while len(last) > 1 and (last == long or x._axes.length(last) > _LONGEST_PART):
        last = last[1:]
    rows, cols = map(set, x._axes.long)
    parts = (cols, rows) if x._trace.for_shards else (set(last), cols, rows)
    return next((part for part in parts if part and part < inside and reduces_without_copy(x, part)), set())


def reduces_without_copy(x: Tracer, positions: Iterable[int]) -> bool:
    """Whether some axes, and no others, are the rows or the columns of a fold that takes no copy.

    Of all axes of a matrix this is false: they are its rows and its columns.
    """
    inside = {p for p in positions if x.shape[p] != 1}
    fold = fold_along(x, inside)
    return inside in map(set, fold.long) and not takes_copy(x, fold)


def takes_copy(x: Tracer, fold: Axes) -> bool:
    """Whether an array is copied to be converted to a fold, in contrast to views."""
    return Conversion.to(x, fold).cost() >= x.size


def refolded(x: Tracer, fold: Axes) -> Tracer:
    """Return an array converted to another fold of its shape."""
    return x if fold is x._axes else x._trace.array(in_fold(x, fold), fold)
