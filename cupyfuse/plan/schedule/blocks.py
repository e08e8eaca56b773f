"""Blocks of rows: the same graph for fewer rows, where no row of the results depends on another row."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.products import split_shape

LEAST_ROWS = 128  # of a block, if the workspace allows: with fewer, tensor cores wait for the weights


class NotRowwise(Exception):
    """A graph cannot be computed in blocks of rows; the message says why."""


def rowwise_values(graph: Graph) -> set[Node]:
    """Find the values with a row for each row of the results, computed from that row alone.

    Raises
    ------
    NotRowwise
        Rows of the results depend on each other.
    """
    if graph.effects:
        raise NotRowwise("an argument is changed in place")
    rows = {n.shape[0] for n in graph.outputs}
    if len(rows) != 1 or rows <= {0, 1}:
        raise NotRowwise("the results differ in their numbers of rows" if len(rows) > 1 else "there is one row at most")
    found = _Rows()
    for node in graph.outputs:
        found.mark_rowwise(node, "a result")
    for node in reversed(list(g.topological(graph.roots))):
        found.visit(node)
    return found.rowwise


class _Rows:
    """Marks, from the results to the arguments, the values that are read by row and those that are read as a whole."""

    def __init__(self) -> None:
        self.rowwise: set[Node] = set()
        self.whole: dict[Node, str] = {}

    def mark_rowwise(self, node: Node, reader: str) -> None:
        if node.op == "const" or node.shape[0] == 1:
            return
        if node.op == "input" and node.ndim < 2:
            raise NotRowwise(f"{reader} takes a vector for a matrix")
        self.rowwise.add(node)

    def visit(self, node: Node) -> None:
        """Mark the operands of a node, after all nodes that read it have been visited."""
        if node in self.rowwise and node in self.whole:
            raise NotRowwise(f"{self.whole[node]} takes all rows of what others take row by row")
        by_row = node in self.rowwise
        if by_row and node.op == "positions":
            raise NotRowwise("a result depends on the numbers of rows")
        inputs = list(node.inputs)
        if node.op in ("matmul", "split_matmul"):
            self.mark(inputs.pop(0), by_row, node.op)
            if node.op == "split_matmul":  # left are the right split, the left operand, the right operand
                self.mark(inputs.pop(1), by_row, node.op)
            for i in inputs:
                self.mark(i, False, "a matrix product")
        elif node.op == "factor":
            if node.shape[0] > 1:  # those of columns are each block's own
                self.mark(inputs[0], by_row, node.op)
        elif node.op == "split" or node.pointwise or node.op == "copy" or (node.reduction and node.axis == 1):
            for i in inputs:
                self.mark(i, by_row, node.op)
        else:
            name = repr(node.call) if node.call is not None else f"a {node.op}"
            for i in inputs:
                self.mark(i, False, f"{name} across rows")
                if by_row:
                    raise NotRowwise(f"{name} gives values of other rows")

    def mark(self, node: Node, by_row: bool, reader: str) -> None:
        if node.op == "const" or node.shape[0] == 1:
            return
        if by_row:
            self.mark_rowwise(node, reader)
        else:
            self.whole[node] = reader


def with_rows(graph: Graph, rowwise: set[Node], rows: int) -> Graph:
    """Return the graph with another number of rows in its rowwise values."""
    done: dict[Node, Node] = {}

    def resized(node: Node) -> Node:
        inputs = tuple(done[i] for i in node.inputs)
        if node not in rowwise:
            return g.with_inputs(node, inputs)
        shape = split_shape(inputs[0].shape, node.parts) if node.op == "split" else (rows, node.shape[1])
        return g.with_inputs(node, inputs, shape)

    for node in g.topological([*graph.inputs, *graph.roots]):
        done[node] = resized(node)
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])
