"""Cut a graph into blocks of rows: what is computed before them, what each block computes, and what follows.

A block has some rows of a large product. It computes values from those rows alone, and its addends of sums over all
rows: products that contract the rows, such as the gradient of a weight, and sums down the columns. What needs all rows
of a small value, such as a mean of losses, follows the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.products import split_shape

LEAST_ROWS = 128  # of a block, if the workspace allows: with fewer, tensor cores wait for the weights

# What a block has of a value: its rows along axis 0 or 1, all of it, or an addend of a sum over all rows.
ROWS, COLUMNS, WHOLE, ADDEND = 0, 1, -1, -2
Mode: TypeAlias = int
_Part: TypeAlias = tuple[Node, Mode]


class NotRowwise(Exception):
    """A graph cannot be computed in blocks of rows; the message says why."""


def _operands(node: Node, mode: Mode, rows: int) -> list[_Part] | None:
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
    if node.pointwise or node.op == "copy":
        return [(i, mode if i.shape[mode] == rows else WHOLE) for i in node.inputs]
    if node.op == "transpose":
        return [(node.inputs[0], 1 - mode)]
    if node.op in ("split", "factor") or (node.reduction and node.axis != mode):
        return [(node.inputs[0], mode)]
    if node.op in ("matmul", "split_matmul"):
        # The right operand of a split product is transposed: its rows are the product's columns.
        axis = ROWS if node.op == "split_matmul" else mode
        return [(i, axis if k % 2 == mode else WHOLE) for k, i in enumerate(node.inputs)]
    return None


def _operands_of_addend(node: Node, rows: int) -> list[_Part] | None:
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
    """

    rows: int
    block: Graph
    sources: list[_Part]
    collected: list[Node]
    transposed: set[Node]
    summed: list[Node]


def cut(graph: Graph, anchors: Set[Node]) -> Cut:
    """Cut a graph along the rows of the matrices `anchors`; without any, along the rows that all results have.

    Raises
    ------
    NotRowwise
        Rows depend on each other.
    """
    if graph.effects:
        raise NotRowwise("an argument is changed in place")
    rows = {n.shape[0] for n in anchors or graph.outputs}
    if len(rows) != 1 or rows <= {0, 1}:
        raise NotRowwise("the results differ in their numbers of rows" if len(rows) > 1 else "there is one row at most")
    return _Cutter(graph, rows.pop(), anchors).cut()


@dataclass
class _Cutter:
    """The state of one `cut`."""

    graph: Graph
    rows: int
    anchors: Set[Node]
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
        if not any(i in self.modes or i in self.after for i in node.inputs):
            if node in self.anchors:
                self.modes[node] = ROWS
            return
        if all(i not in self.after and self.modes.get(i) != ADDEND for i in node.inputs):
            for mode in (ROWS, COLUMNS, ADDEND):
                if mode == ADDEND and (node.pointwise or (node.reduction and 1 in node.inputs[0].shape)):
                    continue  # sums of vectors follow the blocks
                parts = _operands(node, mode, self.rows)
                if parts is not None and all(self.modes.get(i, own) == own for i, own in parts):
                    self.modes[node] = mode
                    return
        self.after[node] = across_rows(node)

    def _values_read_later(self) -> Iterable[Node]:
        """Yield the values computed by blocks that are results, or that what follows the blocks reads."""
        for node in self.graph.outputs:
            if node in self.modes:
                yield node
            elif node not in self.after and node.op not in ("input", "const"):
                parts = _operands(node, ROWS, self.rows)
                if parts is not None:
                    yield node
        for node in g.topological(self.graph.outputs):
            if node in self.after:
                yield from (i for i in node.inputs if i in self.modes)

    def _build(self, collected: list[Node], summed: list[Node]) -> Cut:
        """Build the graph of one block from the values that it returns and those that it adds to."""
        roots: list[_Part] = [(n, self.modes.get(n, ROWS)) for n in collected]
        roots += [(n, ADDEND) for n in summed]
        shared: set[Node] = set()  # computed before, since blocks read their rows and also all of them

        def operands(part: _Part) -> list[_Part]:
            node, mode = part
            leaf = node.op in ("input", "const") or node in shared
            return [] if leaf else _operands(node, mode, self.rows) or []

        while True:
            order = list(g.topological(roots, operands))
            whole = {n for n, mode in order if mode == WHOLE and n.inputs}
            both = whole & {n for n, mode in order if mode != WHOLE} - shared
            if not both:
                break
            shared |= both
        sources: list[_Part] = []
        done: dict[_Part, Node] = {}
        inputs: list[Node] = []
        for part in order:
            node, mode = part
            if node.op == "const":
                done[part] = node
            elif node.op == "input" or node in shared or (mode != WHOLE and not operands(part)):
                ndim = node.ndim if node.op == "input" else 2
                done[part] = g.argument(len(inputs), node.name or f"before{len(inputs)}", node.shape, node.dtype, ndim)
                inputs.append(done[part])
                sources.append(part)
            else:
                done[part] = g.with_inputs(node, [done[p] for p in operands(part)])
        transposed = {n for n, mode in roots if mode == COLUMNS}
        outputs = [g.transpose(done[part]) if part[0] in transposed else done[part] for part in roots]
        outputs[len(collected) :] = [g.cast(n, dtypes.compute_dtype(n.dtype)) for n in outputs[len(collected) :]]
        return Cut(self.rows, Graph(inputs, outputs), sources, collected, transposed, summed)


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
        parts = _operands(node, found[node], rows)
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
    """Return a block's graph for another number of rows."""
    done: dict[Node, Node] = {}
    for node in g.topological([*graph.inputs, *graph.roots]):
        inputs = tuple(done[i] for i in node.inputs)
        mode, shape = modes.get(node, WHOLE), node.shape
        if node.op == "split":
            shape = split_shape(inputs[0].shape, node.parts)
        elif mode in (ROWS, COLUMNS):
            shape = (rows, shape[1]) if mode == ROWS else (shape[0], rows)
        done[node] = g.with_inputs(node, inputs, shape)
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])
