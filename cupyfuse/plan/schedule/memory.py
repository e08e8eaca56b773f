"""What lies in memory and how: layouts of arguments, the copies that readers need, results of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir import graph as g
from ...ir.graph import Graph, Node


@dataclass(frozen=True)
class Layout:
    """How an argument lies in memory, as far as a plan depends on it, seen as rows x columns.

    Neighbouring columns (or rows) are neighbours in memory; all elements are, in C order; cuBLAS can read it.
    """

    unit_cols: bool = True
    unit_rows: bool = False
    contiguous: bool = True
    blas: bool = True

    @property
    def transposed(self) -> Layout:
        return Layout(self.unit_rows, self.unit_cols, False, self.blas)


# Rows of an operand from which on, however long, it is split as it is where its columns lie in memory. Fewer are too
# few blocks to read twice what a copy reads once: 2048 rows of 8192 take 90 us on an H200, 75 with a copy.
_SPLIT_BY_COLUMNS = 4096


def resolve(node: Node) -> Node:
    """The value in memory that a view looks at."""
    while node.op in ("transpose", "reshape"):
        node = node.inputs[0]
    return node


def layout_of(node: Node, layouts: dict[int, Layout]) -> Layout:
    if node.op == "transpose":
        return layout_of(node.inputs[0], layouts).transposed
    if node.op == "input":
        return layouts.get(node.argument) or Layout(unit_rows=min(node.shape) <= 1)
    return Layout(unit_rows=min(node.shape) <= 1)


def readable_by_rows(node: Node, layouts: dict[int, Layout]) -> bool:
    """Whether neighbouring columns are neighbours in memory, or there is one column only."""
    layout = layout_of(node, layouts)
    return node.shape[1] <= 1 or layout.unit_cols or (node.shape[0] <= 1 and layout.contiguous)


def insert_copies(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Put an explicit copy before every read of an argument, or of a transpose, whose layout the reader cannot take."""
    live = set(g.topological(graph.roots, g.eager_inputs))
    copies: dict[Node, Node] = {}

    def copied(value: Node) -> Node:
        return copies.setdefault(value, Node("copy", (value,), value.shape, value.dtype))

    def whole(value: Node) -> bool:
        """Whether a value's elements are neighbours in memory, in C order: what a reshape of it relies on."""
        if value.op == "transpose":
            return min(value.shape) <= 1 and whole(value.inputs[0])
        return layout_of(value, layouts).contiguous

    def fit(reader: Node, value: Node) -> Node:
        if value.op not in ("input", "transpose"):
            return value
        layout = layout_of(value, layouts)
        good = layout.blas if reader.op == "matmul" else readable_by_rows(value, layouts)
        tall = value.shape[0] >= min(value.shape[1], _SPLIT_BY_COLUMNS)
        by_columns = reader.op == "split" and layout.unit_rows and tall
        return value if good or by_columns else copied(value)

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = tuple(done[i] for i in node.inputs)
        if node.op == "reshape" and not whole(inputs[0]):
            inputs = (copied(inputs[0]),)
        elif node in live and (node.pointwise or node.reduction or node.op in ("matmul", "split")):
            inputs = tuple(fit(node, i) for i in inputs)
        done[node] = g.with_inputs(node, inputs)
        if node.op == "split" and not readable_by_rows(inputs[0], layouts):
            done[node] = replace(done[node], by_columns=True)
    return graph.replace(done)


def results_in_memory(graph: Graph) -> Graph:
    """Results that are arguments, views of them, constants or twice the same are copied by a row program."""
    taken: set[Node] = set()

    def own(node: Node) -> Node:
        base = resolve(node)
        fresh = base.op not in ("input", "const") and base not in taken
        result = node if fresh else Node("cast", (node,), node.shape, node.dtype)
        taken.add(resolve(result))
        return result

    return Graph(graph.inputs, [own(n) for n in graph.outputs], [(arg, own(n)) for arg, n in graph.effects])


def rounded(graph: Graph, values: set[Node]) -> Graph:
    """The graph with some values of 16 bits rounded where they are computed, for all who read them."""
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        value = g.with_inputs(node, [done[i] for i in node.inputs])
        done[node] = g.cast(g.cast(value, "float32"), node.dtype) if node in values else value
    return graph.replace(done)
