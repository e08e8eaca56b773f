"""Work in blocks of rows: the same graph for fewer rows, where no row of the results needs another's."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node

LEAST_ROWS = 128  # of a block, where the workspace allows: fewer would leave the tensor cores waiting for weights


class NotByRows(Exception):
    """Why a graph cannot be computed in blocks of rows."""


def rows_apart(graph: Graph) -> set[Node]:
    """The values that have a row for each row of the results, if those rows do not depend on each other.

    Raises
    ------
    NotByRows
        They do, or there is no such thing; the message says why.
    """
    if graph.effects:
        raise NotByRows("an argument is changed in place")
    rows = {n.shape[0] for n in graph.outputs}
    if len(rows) != 1 or rows <= {0, 1}:
        raise NotByRows("the results differ in their numbers of rows" if len(rows) > 1 else "there is one row at most")
    found = _Rows()
    for node in graph.outputs:
        found.by_row(node, "a result")
    for node in reversed(list(g.topological(graph.roots))):
        found.visit(node)
    return found.together


class _Rows:
    """Marks, from the results to the arguments, what is needed row by row and what as a whole."""

    def __init__(self) -> None:
        self.together: set[Node] = set()
        self.whole: dict[Node, str] = {}

    def by_row(self, node: Node, reader: str) -> None:
        if node.op == "const" or node.shape[0] == 1:
            return
        if node.op == "input" and node.ndim != 2:
            raise NotByRows(f"{reader} takes a vector for a matrix")
        self.together.add(node)

    def visit(self, node: Node) -> None:
        """Called for every node after all that read it."""
        if node in self.together and node in self.whole:
            raise NotByRows(f"{self.whole[node]} takes all rows of what others take row by row")
        split = node in self.together
        if split and node.op == "positions":
            raise NotByRows("a result depends on the numbers of rows")
        inputs = list(node.inputs)
        if node.op in ("matmul", "split_matmul"):
            self.mark(inputs.pop(0), split, node.op)
            if node.op == "split_matmul":
                self.mark(inputs.pop(1), split, node.op)
            for i in inputs:
                self.mark(i, False, "a matrix product")
        elif node.op == "split" or node.pointwise or node.op == "copy" or (node.reduction and node.axis == 1):
            for i in inputs:
                self.mark(i, split, node.op)
        else:
            for i in inputs:
                self.mark(i, False, f"a {node.op} across rows")
                if split:
                    raise NotByRows(f"a {node.op} gives values of other rows")

    def mark(self, node: Node, split: bool, reader: str) -> None:
        if node.op == "const" or node.shape[0] == 1:
            return
        if split:
            self.by_row(node, reader)
        else:
            self.whole[node] = reader


def with_rows(graph: Graph, together: set[Node], rows: int) -> Graph:
    """The same graph for another number of rows."""
    done: dict[Node, Node] = {}

    def resized(node: Node) -> Node:
        inputs = tuple(done[i] for i in node.inputs)
        if node not in together:
            return g.with_inputs(node, inputs)
        shape = g.split_shape(inputs[0].shape) if node.op == "split" else (rows, node.shape[1])
        return g.with_inputs(node, inputs, shape)

    for node in g.topological([*graph.inputs, *graph.roots]):
        done[node] = resized(node)
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])
