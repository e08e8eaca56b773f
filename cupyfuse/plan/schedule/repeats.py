"""Rows that come again, such as a mask for all heads of attention: read where they are, instead of from a copy of all.

A value that is broadcast along an axis in the middle is copied for each of its elements. Where pointwise operators of
row programs and column statistics alone read the copy, they read the value itself, by the index of its row.
"""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.slices import repeat_rows, rows_of_copy
from .memory import base_of
from .steps import Step


def repeat_in_place(graph: Graph) -> Graph:
    """Replace copies of repeated rows, which pointwise operations alone read, by views."""
    live = g.topological(graph.roots, g.eager_inputs)
    read_otherwise = set(graph.roots).union(i for n in live if not n.pointwise for i in n.inputs)
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if node.op == "strided" and node not in read_otherwise:
            done[node] = _as_view(done[node])
    return graph.replace(done)


def reads_repeats(step: Step) -> bool:
    """Whether a step reads rows that come again."""
    return any(n.op == "repeat" for n in (*step.inputs, *step.repair_inputs))


def can_read_repeats(step: Step) -> bool:
    """Whether a step's kernels find rows by their index."""
    return step.kind in ("RowProgram", "MatVec", "ColumnStats")


def _as_view(node: Node) -> Node:
    """Return a view of the rows that a strided copy repeats; the copy itself if it is another one."""
    (source,), (rows, cols) = node.inputs, node.shape
    if node.offset or 0 in node.shape or source.size % cols or base_of(source).op == "const":
        return node
    found = rows_of_copy(node.dims, cols, node.dtype)
    if found is None:
        return node
    matrix = source if source.shape[1] == cols else g.reshape(source, (source.size // cols, cols))
    return repeat_rows(matrix, rows, found)
