"""Parts and other shapes of values: read from the value in memory, or computed again from those of its operands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from . import graph as g
from . import slices
from .kinds import is_product

# Pointwise operators that a part is computed by again; a value that takes more of them is stored, and the part read.
MOST_COPIED = 16
# Pointwise operators on arguments that are computed again in another shape, rather than stored and read back.
_MOST_RESHAPED = 8

# Choices by position whose results parts know, and that they pass by; and operators in the condition of one.
_MOST_PASSED, _DEEPEST = 256, 4
_DECIDABLE: dict[str, Callable[..., bool]] = {
    "equal": operator.eq,
    "less": operator.lt,
    "greater_equal": operator.ge,
    "logical_and": lambda a, b: a and b,
}

Slice = tuple[int, int, int]  # of one axis: the first index, the step, the number of indices
FlatSlices = tuple[tuple[tuple[int, int], ...], int]  # of rows or columns: (count, stride) pairs, and the first index


class View(Protocol):
    """A view of a value, which can be had without the value in memory. Equal ones are views of the same elements."""

    def of_stored(self, node: g.Node) -> g.Node:
        """Return the view of a value in memory."""

    def again(self, node: g.Node, stored: Collection[g.Node]) -> g.Node | None:
        """Compute the view from views of what the value is computed from, of which `stored` ones are in memory.

        None if that takes too many operators.
        """

    def copies(self, node: g.Node, stored: Collection[g.Node]) -> bool:
        """Whether `again` computes a node beneath the value again, for the view alone."""


Viewed = Mapping[g.Node, tuple[g.Node, View]]  # of which values nodes are views, and which views


def operands_as_written(node: g.Node, viewed: Viewed) -> tuple[g.Node, ...]:
    """Return what a node is computed from as written: of a view the value alone, not what computes it again."""
    return viewed[node][:1] if node in viewed else node.inputs


def in_memory(node: g.Node) -> bool:
    """Whether a value is always stored in memory, never computed as it is read."""
    while node.op in g.VIEWS:
        node = node.inputs[0]
    return (
        node.op in ("input", "const", "strided", "put", "concat")
        or is_product(node)
        or (node.reduction and node.axis == 0)
    )


@dataclass(frozen=True)
class Reshaped:
    """A value in another shape, with its elements in the same order; computed again if it is cheap."""

    shape: g.Shape

    def of_stored(self, node: g.Node) -> g.Node:
        return g.reshape(node, self.shape)

    def again(self, node: g.Node, stored: Collection[g.Node] = ()) -> g.Node | None:
        done: dict[g.Node, g.Node] = {}
        for each in g.topological([node], lambda n: () if n.op == "strided" or is_product(n) else n.inputs):
            if each.size == 1 and self.shape != (1, 1):
                done[each] = each  # a number, which broadcasts to any shape
            elif each.op == "input" or each in stored or is_product(each):
                done[each] = g.reshape(each, self.shape)
            elif each.op == "strided":
                # Rows that come again are read where they are, so they are split or joined there, not in a copy.
                if not slices.repeats_of(each) or not slices.repeats_of(each, self.shape[1]):
                    return None
                done[each] = slices.strided_copy(each.inputs[0], each.dims, self.shape)
            elif each.op == "reshape":
                done[each] = done[each.inputs[0]]
            elif each.pointwise and len(done) < _MOST_RESHAPED and all(i.size in (1, each.size) for i in each.inputs):
                done[each] = g.with_inputs(each, [done[i] for i in each.inputs], self.shape)
            else:
                return None
        return done[node]

    def copies(self, node: g.Node, stored: Collection[g.Node]) -> bool:
        return node.pointwise and node.size != 1 and node not in stored


@dataclass(frozen=True)
class Repeated:
    """A value whose rows come again: computed again of one array whose rows do, if it is cheap.

    A value of several arrays is stored: in gradients the rows of each of them would be added up.

    Attributes
    ----------
    dims : tuple of (int, int)
        Those of a strided copy of the value.
    shape : Shape
        Of that copy.
    """

    dims: tuple[tuple[int, int], ...]
    shape: g.Shape

    def of_stored(self, node: g.Node) -> g.Node:
        return slices.strided_copy(node, self.dims, self.shape)

    def again(self, node: g.Node, stored: Collection[g.Node] = ()) -> g.Node | None:
        done: dict[g.Node, g.Node] = {}
        arrays = 0  # that are read
        for each in g.topological([node], lambda n: () if n.op in g.VIEWS or n in stored else n.inputs):
            if each.op == "const" and each.size == 1:
                done[each] = each
            elif each.size != node.size:
                return None
            elif each in stored or each.op == "input" or (each.op == "reshape" and each.inputs[0].op == "input"):
                if arrays or slices.rows_of_copy(self.dims, self.shape[1], each.dtype) is None:
                    return None
                arrays, done[each] = arrays + 1, self.of_stored(each)
            elif each.pointwise and each.op != "guard" and len(done) < _MOST_RESHAPED:
                done[each] = g.with_inputs(each, [done[i] for i in each.inputs], self.shape)
            else:
                return None
        return done[node]

    def copies(self, node: g.Node, stored: Collection[g.Node]) -> bool:
        return node.pointwise and node not in stored


@dataclass(frozen=True)
class Part:
    """Rows and columns of a value that slices select.

    A part is computed by pointwise operators on parts of what the value is computed from, at most `MOST_COPIED` of
    them. Without that bound, a loop that indexes what it computed the round before would copy the copies of that round,
    and those of all rounds before it.

    Attributes
    ----------
    rows, cols : FlatSlices
    shape : Shape
        Of the part.
    whole : Shape
        Of the value.
    """

    rows: FlatSlices
    cols: FlatSlices
    shape: g.Shape
    whole: g.Shape

    @cached_property
    def _all(self) -> tuple[bool, ...]:
        """Whether all rows, and all columns, are selected in order."""
        slices = zip((self.rows, self.cols), self.shape, self.whole, strict=True)
        return tuple(count == n and first == 0 and _is_whole(dims) for (dims, first), count, n in slices)

    def of_stored(self, node: g.Node) -> g.Node:
        return self._copy(node, self._shape_of(node))

    def again(self, node: g.Node, stored: Collection[g.Node]) -> g.Node | None:
        taken = self._taken(node, stored)
        if taken is None:
            return None
        done: dict[g.Node, g.Node] = {}

        def part_of(operand: g.Node) -> g.Node:
            found = done[taken[operand]]
            return (
                g.broadcast(g.cast(found, operand.dtype), self._shape_of(operand)) if operand.op == "where" else found
            )

        for each in g.topological([taken[node]], lambda n: [taken[i] for i in self._operands(n, stored)]):
            if self._is_kept(each):
                done[each] = each
            elif operands := self._operands(each, stored):
                done[each] = g.with_inputs(each, [part_of(i) for i in operands], self._shape_of(each))
            elif each.op == "positions":
                done[each] = self._positions(each)
            else:
                done[each] = self._copy(each, self._shape_of(each))
        found = part_of(node)
        # A value that the graph has already gets a node for this view of it.
        return g.Node("broadcast", (found,), found.shape, found.dtype) if found in done else found

    def copies(self, node: g.Node, stored: Collection[g.Node]) -> bool:
        return bool(self._operands(node, stored))

    def _taken(self, root: g.Node, stored: Collection[g.Node]) -> dict[g.Node, g.Node] | None:
        """Return the node that the part takes for each node beneath it: itself, or what a choice by position chooses.

        None if the part takes more than `MOST_COPIED` operators; looks at few more than these.
        """
        taken: dict[g.Node, g.Node] = {}
        copied = passed = 0
        left = [root]
        while left:
            operand = node = left.pop()
            if operand in taken:
                continue
            while node not in stored and not self._is_kept(node) and (chosen := self._chosen(node)) is not None:
                node = chosen
                passed += 1
                if passed > _MOST_PASSED:
                    return None
            taken[operand] = node
            if node not in taken or node is operand:
                taken[node] = node
                operands = self._operands(node, stored)
                copied += bool(operands)
                if copied > MOST_COPIED:
                    return None
                left += operands
        return taken

    def _operands(self, node: g.Node, stored: Collection[g.Node]) -> tuple[g.Node, ...]:
        """Return the inputs to cut for the part of a node; none if that is the node itself, or read from memory."""
        computed = node.pointwise and node.op != "guard" and node not in stored and not in_memory(node)
        return node.inputs if computed and not self._is_kept(node) else ()

    def _chosen(self, node: g.Node) -> g.Node | None:
        """Return the operand that a choice by position takes for all of the part; None for other nodes.

        So what was assigned to one element, and is read from there, is the value that was assigned.
        """
        if node.op != "where" or (condition := self._known(node.inputs[0], 0)) is None:
            return None
        return node.inputs[1] if condition else node.inputs[2]

    def _known(self, node: g.Node, depth: int) -> int | None:
        """Return the one value that a comparison of positions, or its operand, has in the part; None if unknown."""
        if node.op == "const":
            return node.value if type(node.value) in (int, bool) else None
        if node.op == "positions":
            dims, offset = (self.rows, self.cols)[node.axis]
            return None if dims else offset
        if node.op == "cast" and node.dtype != "bool":
            return self._known(node.inputs[0], depth)
        if node.op not in _DECIDABLE or depth == _DEEPEST:
            return None
        known = [self._known(i, depth + 1) for i in node.inputs]
        return None if None in known else _DECIDABLE[node.op](*known)

    def _is_kept(self, node: g.Node) -> bool:
        """Whether a node is its own part: a constant, or of length one along the axes that are cut."""
        if node.op == "const":
            return True
        lengths = zip(self._all, node.shape, self.whole, strict=True)
        return all(whole or length == 1 != n for whole, length, n in lengths)

    def _shape_of(self, node: g.Node) -> g.Shape:
        """Return the shape of a node's part: nodes broadcast, so they may have length one along rows or columns."""
        rows, cols = (n if node.shape[a] != 1 else 1 for a, n in enumerate(self.shape))
        return rows, cols

    def _positions(self, node: g.Node) -> g.Node:
        """Compute the part of a node of positions 0, 1, 2, ..."""
        dims, offset = (self.rows, self.cols)[node.axis]
        if not dims:
            return g.cast(g.const(offset), node.dtype)
        if len(dims) != 1:
            return self._copy(node, self._shape_of(node))
        count, step = dims[0]
        positions = g.positions(count, node.axis, node.dtype)
        return g.pointwise("add", g.pointwise("multiply", positions, g.const(step)), g.const(offset))

    def _copy(self, node: g.Node, shape: g.Shape) -> g.Node:
        """View or copy the part, of a shape, of a node in memory."""
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
            return slices.slice_view(node, _as_slice(self.rows, node.shape[0]), _as_slice(self.cols, node.shape[1]))
        return slices.strided_copy(base, dims or [(1, 0)], shape, offset)


def _as_slice(flat: FlatSlices, length: int) -> Slice:
    """Return slices of at most one dimension as one slice of the rows or columns of a node, which are so many."""
    if length == 1:
        return 0, 1, 1
    dims, first = flat
    count, step = dims[0] if dims else (1, 1)
    return first, step, count


def _is_whole(dims: Sequence[tuple[int, int]]) -> bool:
    """Whether (count, stride) pairs step through memory element by element."""
    stride = 1
    for n, s in reversed(dims):
        if s != stride:
            return False
        stride *= n
    return True
