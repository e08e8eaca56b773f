"""Find where a graph can be cut into blocks of rows: what a block computes, what precedes it, and what follows.

A block has some rows of a large product. It computes values from those rows alone, and its addends of sums over all
rows: products that contract the rows, such as the gradient of a weight, and sums down the columns. What needs all rows
of a small value, such as a mean of losses, follows the blocks.

A block may have some columns of the product instead, which are rows of its transpose: all is said of rows, and holds of
columns with the axes exchanged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from ... import dtypes
from ...ir import graph as g
from ...ir.concats import columns_shown
from ...ir.graph import Graph, Node
from ...ir.products import split_shape
from .cost import MOST_FLOPS, unfused_cost

LEAST_ROWS = 128  # of a block, if the workspace allows: with fewer, tensor cores wait for the weights

# What a block has of a value: its rows along axis 0 or 1, all of it, or an addend of a sum over all rows.
ROWS, COLUMNS, WHOLE, ADDEND = 0, 1, -1, -2
Mode: TypeAlias = int
Part: TypeAlias = tuple[Node, Mode]  # what a block has of a value


class NotRowwise(Exception):
    """A graph cannot be computed in blocks of rows; the message says why."""


def operands_of_part(node: Node, mode: Mode, rows: int) -> list[Part] | None:
    """Return what a block needs of a node's operands to compute a part of it; None if it needs other rows too.

    `rows` is the number of rows of all blocks: an axis of that length is cut.
    """
    if mode == WHOLE:
        # Factors are written with their product, which each block computes, also those of the columns.
        return [] if node.op == "factor" else [(i, WHOLE) for i in node.inputs]
    if mode == ADDEND:
        return _operands_of_addend(node, rows)
    if (node.inputs[0] if node.op == "split" else node).shape[mode] != rows:
        return None
    if node.op == "concat":
        return [(i, mode) for i in node.inputs] if mode == ROWS else None
    if node.op == "slice":
        return [(node.inputs[0], mode)] if mode == ROWS and columns_shown(node) is not None else None
    if node.pointwise or node.op == "copy":
        return [(i, mode if i.shape[mode] == rows else WHOLE) for i in node.inputs]
    if node.op == "transpose":
        return [(node.inputs[0], 1 - mode)]
    if node.op in ("split", "factor") or (node.reduction and node.axis != mode):
        return [(node.inputs[0], mode)]
    if node.op in g.SCANS and mode == ROWS:
        return [(node.inputs[0], ROWS)]
    if node.op in ("matmul", "split_matmul"):
        # Rows of a product are those of its left operand, columns those of its right one. The right operand of a split
        # product is transposed: its rows are the product's columns. Behind the splits follow their two operands.
        axis = ROWS if node.op == "split_matmul" else mode
        return [(operand, axis if k % 2 == mode else WHOLE) for k, operand in enumerate(node.inputs)]
    return None


def _operands_of_addend(node: Node, rows: int) -> list[Part] | None:
    """Return what a block needs of a node's operands to compute its addend of the node; None if it has none."""
    if node.op == "matmul" and node.inputs[0].shape[1] == rows:
        return [(node.inputs[0], COLUMNS), (node.inputs[1], ROWS)]
    if node.op == "split_matmul":
        return [(i, COLUMNS) for i in node.inputs]
    if node.op == "sum" and node.inputs[0].shape[node.axis] == rows:
        return [(node.inputs[0], node.axis)]
    if node.pointwise or node.op == "factor":  # casts of addends, and factors that a product from splits is times
        return [(i, ADDEND if i.op != "const" else WHOLE) for i in node.inputs]
    return None


@dataclass
class Cut:
    """A graph cut into blocks of rows.

    Attributes
    ----------
    axis : int
        ROWS, or COLUMNS if what is cut are the rows of transposes.
    rows : int
        Of all blocks together.
    block : Graph
        One block that has all rows. Its outputs are `collected`, then the addends of `summed`.
    sources : list of (Node, Mode)
        What the block's inputs hold: parts of arguments, and of values that are computed before the blocks.
    collected : list of Node
        Values of which each block computes its rows, along axis 0.
    transposed : set of Node
        Those of `collected` that the block returns transposed.
    summed : list of Node
        Values that are sums over all rows.
    before : list of Node
        Values that are computed before the blocks, for these and for what follows them.
    """

    axis: Mode
    rows: int
    block: Graph
    sources: list[Part]
    collected: list[Node]
    transposed: set[Node]
    summed: list[Node]
    before: list[Node]


def cut(graph: Graph, anchors: Set[Node], axis: Mode = ROWS) -> Cut:
    """Cut a graph along an axis of the matrices `anchors`; without any, along the rows that all results have.

    Raises
    ------
    NotRowwise
        Rows depend on each other.
    """
    if graph.effects:
        raise NotRowwise("an argument is changed in place")
    rows = {n.shape[axis] for n in anchors or graph.outputs}
    if len(rows) != 1 or rows <= {0, 1}:
        raise NotRowwise("the results differ in their numbers of rows" if len(rows) > 1 else "there is one row at most")
    return _Cutter(graph, rows.pop(), anchors, axis).cut()


@dataclass
class _Cutter:
    """The state of one `cut`."""

    graph: Graph
    rows: int
    anchors: Set[Node]
    axis: Mode
    modes: dict[Node, Mode] = field(default_factory=dict)  # of anchors, and of values that depend on them
    after: dict[Node, str] = field(default_factory=dict)  # values that need all blocks, and why

    def cut(self) -> Cut:
        for node in g.topological(self.graph.roots):
            self._choose_mode(node)
        leaving = dict.fromkeys(self._values_read_later())
        summed = [n for n in leaving if self.modes.get(n) == ADDEND]
        return self._build([n for n in leaving if self.modes.get(n) != ADDEND], summed)

    def _choose_mode(self, node: Node) -> None:
        """Choose what a block computes of a value that depends on anchors; if nothing, the value follows the blocks."""
        depends_on_anchors = any(i in self.modes or i in self.after for i in node.inputs)
        if not depends_on_anchors:
            if node in self.anchors:
                self.modes[node] = self.axis
            return
        if all(i not in self.after and self.modes.get(i) != ADDEND for i in node.inputs):
            for mode in (ROWS, COLUMNS, ADDEND):
                if mode == ADDEND and (node.pointwise or (node.reduction and 1 in node.inputs[0].shape)):
                    continue  # sums of vectors follow the blocks
                parts = operands_of_part(node, mode, self.rows)
                if parts is not None and all(self.modes.get(i, needed) == needed for i, needed in parts):
                    self.modes[node] = mode
                    return
        self.after[node] = across_rows(node)

    def _values_read_later(self) -> Iterable[Node]:
        """Yield the values computed by blocks that are results, or that what follows the blocks reads."""
        for node in self.graph.outputs:
            if node in self.modes:
                yield node
            elif node in self.after or node.op in ("input", "const"):
                continue
            elif operands_of_part(node, ROWS, self.rows) is not None:
                yield node  # it depends on no anchor, but can be computed by rows
        for node in g.topological(self.graph.outputs):
            if node in self.after:
                yield from (i for i in node.inputs if i in self.modes)

    def _build(self, collected: list[Node], summed: list[Node]) -> Cut:
        """Build the graph of one block from the values that it returns and those that it adds to."""
        roots: list[Part] = [(n, self.modes.get(n, ROWS)) for n in collected]
        transposed = {n for n, mode in roots if mode == COLUMNS}
        addends: list[Part] = [(n, ADDEND) for n in summed]
        order, before = self._parts_of_block([*roots, *addends], {*collected, *summed})
        sources: list[Part] = []
        inputs: list[Node] = []
        done: dict[Part, Node] = {}
        for part in order:
            node, operands = part[0], self._operands_in_block(part, before)
            if node.op == "const":
                done[part] = node
            elif node.op == "input" or node in before:
                ndim = node.ndim if node.op == "input" else 2
                done[part] = g.argument(len(inputs), node.name or f"before{len(inputs)}", node.shape, node.dtype, ndim)
                inputs.append(done[part])
                sources.append(part)
            else:
                # A node of its own also where nothing changes: what is computed both ways is two nodes of the block.
                done[part] = replace(node, inputs=tuple(done[p] for p in operands))
        outputs = [g.transpose(done[part]) if part[0] in transposed else done[part] for part in roots]
        outputs += [g.cast(done[part], dtypes.compute_dtype(done[part].dtype)) for part in addends]
        read = {*(n for n, _ in sources), *self._computed_after(before, {*collected, *summed})}
        kept = [n for n in before if n in read]
        return Cut(self.axis, self.rows, Graph(inputs, outputs), sources, collected, transposed, summed, kept)

    def _parts_of_block(self, roots: list[Part], leaving: Set[Node]) -> tuple[list[Part], dict[Node, None]]:
        """List what a block computes or reads for its results `roots`, operands first.

        Also returns the values to compute before the blocks: those of which these read rows, and cannot compute rows
        alone or read all of them, too; and those that would be computed several times. `leaving` is what blocks return.
        """
        before: dict[Node, None] = {}
        while True:
            order = list(g.topological(roots, lambda part: self._operands_in_block(part, before)))
            whole = {n for n, mode in order if mode == WHOLE and n.inputs and n not in before}
            shared = self._shared([n for n, _ in order if n.inputs and n not in before], before, leaving)
            # Pointwise work is computed whole and also by rows, unless an operation that is no part of a row program
            # stores it anyway.
            stored = {i for n in whole if not (n.pointwise or n.reduction) for i in n.inputs}
            whole -= {n for n in whole if n.pointwise and n not in stored}
            parts = [(n, mode) for n, mode in order if mode != WHOLE and n.op not in ("input", "const")]
            sliced = {n for n, mode in parts if n in whole or operands_of_part(n, mode, self.rows) is None}
            found = (sliced | shared).difference(before)
            if not found:
                return order, before
            before.update((n, None) for n in g.topological(self.graph.outputs) if n in found)

    def _shared(self, block: Iterable[Node], before: Collection[Node], leaving: Set[Node]) -> set[Node]:
        """Find reductions, products and library steps that several parts would compute, but not what these alone read.

        The parts are the blocks, which compute `block`, a value twice if by rows and as a whole; what precedes them;
        and what follows. Pointwise work is found, too, where computing it again takes more FLOPs than `cost` allows.
        """
        first = set(g.topological(before, g.eager_inputs)).difference(before)
        last = self._computed_after(before, leaving).difference(before, leaving)
        times = Counter(n for n in chain(block, first, last) if n not in self.modes)
        repeated = sum((count - 1) * g.flops(n) for n, count in times.items() if n.pointwise)
        all_of_it = repeated > (MOST_FLOPS - 1) * unfused_cost(self.graph).repeatable
        found = {n for n, count in times.items() if count > 1 and (_is_costly(n) or (all_of_it and g.flops(n)))}
        return found.difference(g.topological(i for n in found for i in n.inputs))

    def _computed_after(self, before: Container[Node], leaving: Set[Node]) -> set[Node]:
        """Find the values that what follows the blocks computes, or reads of those computed already."""

        def operands(node: Node) -> tuple[Node, ...]:
            return () if node in leaving or node in before else g.eager_inputs(node)

        return set(g.topological(self.graph.outputs, operands))

    def _operands_in_block(self, part: Part, before: Container[Node]) -> list[Part]:
        """Return what a block computes a part from; nothing for inputs, constants and what is computed `before`."""
        node, mode = part
        if node.op in ("input", "const") or node in before:
            return []
        return operands_of_part(node, mode, self.rows) or []


def _is_costly(node: Node) -> bool:
    """Whether a value is worth storing for two readers: that of a reduction, a product, a copy or a library step."""
    return bool(node.inputs) and not node.pointwise and node.op not in g.VIEWS


def across_rows(node: Node) -> str:
    """Name an operation that reads values of other rows, for messages."""
    return f"{repr(node.call) if node.call is not None else f'a {node.op}'} across rows"


# Another number of rows ---------------------------------------------------------------------------------------------


def modes_of(graph: Graph, given: dict[Node, Mode], addends: int, rows: int) -> dict[Node, Mode]:
    """Find the mode of each value in a block's graph, whose last `addends` outputs are addends of sums.

    `given` are the modes of its inputs, and `rows` its number of rows.

    Raises
    ------
    NotRowwise
        Rows of the results depend on each other.
    """
    found: dict[Node, Mode] = {}
    first = len(graph.outputs) - addends
    for k, node in enumerate(graph.outputs):
        _mark(found, node, ROWS if k < first else ADDEND)
    for node in reversed(list(g.topological(graph.outputs))):
        if node.op in ("input", "const"):
            continue
        parts = operands_of_part(node, found[node], rows)
        if parts is None:
            raise NotRowwise(f"{across_rows(node)} gives values of other rows")
        for i, mode in parts:
            _mark(found, i, mode)
    for node, mode in given.items():
        if found.setdefault(node, mode) != mode:
            raise NotRowwise(f"{node.name} is taken by rows and as a whole")
    return found


def _mark(found: dict[Node, Mode], node: Node, mode: Mode) -> None:
    """Record the mode of a value; NotRowwise if another reader needs it in another one."""
    if node.op != "const" and found.setdefault(node, mode) != mode:
        raise NotRowwise(f"all rows are taken of what others take row by row, of a {node.op}")


def with_rows(graph: Graph, modes: dict[Node, Mode], rows: int) -> Graph:
    """Return a block's graph for another number of rows.

    In mode COLUMNS the block's rows lie along axis 1.
    """
    done: dict[Node, Node] = {}
    for node in g.topological([*graph.inputs, *graph.roots]):
        inputs = tuple(done[i] for i in node.inputs)
        mode, shape = modes.get(node, WHOLE), node.shape
        if node.op == "split":
            shape = split_shape(inputs[0].shape, node.parts)
        elif mode == ROWS:
            shape = (rows, shape[1])
        elif mode == COLUMNS:
            shape = (shape[0], rows)
        done[node] = g.with_inputs(node, inputs, shape)
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])


def rows_within(most: int, total: int, whole: int, one: int, workspace: Callable[[int], int]) -> int:
    """Choose the rows of a block, so that blocks of nearly equal size fit in `most` bytes.

    `whole` and `one` are the bytes that all `total` rows and a single one take, `workspace(rows)` those of a block.
    """
    bytes_a_row = max(1, (whole - one) // max(1, total - 1))
    rows = max(1, min(total, 1 + (most - one) // bytes_a_row))
    if rows >= LEAST_ROWS:
        rows -= rows % LEAST_ROWS
        blocks = -(-total // rows)
        even = -(-total // blocks)
        rows = min(rows, -(-even // LEAST_ROWS) * LEAST_ROWS)
    while rows > 1 and workspace(rows) > most:
        rows -= -(-rows // 16)  # not linear in the rows: splits are padded to groups of eight
        rows -= rows % LEAST_ROWS if rows > LEAST_ROWS else 0
    return rows
