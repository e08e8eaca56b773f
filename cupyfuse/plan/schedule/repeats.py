"""Rows that come again, such as a mask for all heads of attention: read where they are, instead of from a copy of all.

A value that is broadcast along an axis in the middle is copied for each of its elements. Where pointwise operators of
row programs and column statistics alone read the copy, they read the value itself, by the index of its row.

Where they reduce nothing, and all rows come again together, as positions of tokens do for each text, rows are joined to
longer ones instead, of which the value is one: kernels load values of columns once for several rows.

Copies in which the columns of pairs change places (`ir/pairs.py`) are read where they are likewise.
"""

from __future__ import annotations

from ...ir import graph as g
from ...ir.concats import columns_shown
from ...ir.graph import Graph, Node
from ...ir.pairs import swapped_pairs, view_swapped
from ...ir.repeats import Repeats
from ...ir.slices import repeat_rows, repeated_columns, repeats_of, slice_view
from .memory import Layout, base_of, is_contiguous
from .steps import Step


def repeat_in_place(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Replace copies of rows that come again or have several strides, or of swapped pairs, by views.

    Only those that row programs alone read: pointwise operations, and of arguments reductions, too.
    """
    graph = _read_in_place(graph, layouts)
    if all(node.op != "strided" for node in graph.order):
        return graph
    graph = _join_rows(graph, layouts)
    live = g.topological(graph.roots, g.eager_inputs)
    read_otherwise = set(graph.roots).union(i for n in live if not n.pointwise for i in n.inputs)
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if node.op == "strided" and node not in read_otherwise:
            done[node] = _as_view(done[node])
    return graph.replace(done)


def reads_repeats(step: Step) -> bool:
    """Whether a step reads rows that come again, or pairs of columns in each other's place."""
    return any(n.op in ("repeat", "swap") for n in (*step.inputs, *step.repair_inputs))


def can_read_repeats(step: Step) -> bool:
    """Whether a step's kernels find rows, and columns, by their index."""
    return step.kind in ("RowProgram", "MatVec", "ColumnStats")


def _as_view(node: Node) -> Node:
    """Return a view of what a strided copy repeats, rows or columns of rows, or of the pairs that it swaps.

    The copy itself if it is another one.
    """
    (source,), (rows, cols) = node.inputs, node.shape
    swapped = swapped_pairs(node)
    if swapped is not None and base_of(source).op != "const":
        return view_swapped(node, swapped)
    found, columns = repeats_of(node), repeated_columns(node) if node.size and base_of(source).op != "const" else None
    if found is None and columns is not None:
        whole = g.reshape(source, (source.size // columns.length, columns.length))
        part = slice_view(whole, (0, 1, whole.shape[0]), (columns.first, 1, cols))
        return repeat_rows(part, rows, columns.repeats)
    if found is None or source.size % cols or base_of(source).op == "const":
        return node
    matrix = source if source.shape[1] == cols else g.reshape(source, (source.size // cols, cols))
    return repeat_rows(matrix, rows, found)


# Rows of several strides ----------------------------------------------------------------------------------------------


def _read_in_place(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Have row programs read arguments whose rows have several strides where they are, or neighbouring columns.

    Such are heads, permuted or of a fused projection, and all rows but the first of each batch.
    """
    copies = [n for n in graph.order if n.op == "copy" and _places_of(n.inputs[0], layouts) is not None]
    if not copies:
        return graph
    readers, roots = g.users(graph.roots), set(graph.roots)
    views: dict[Node, Node] = {}

    def shown_by(node: Node, shown: Node | None) -> dict[Node, Node] | None:
        """Return what a node, and views of it, show of the argument; None if these are read otherwise than by rows."""
        if node in roots or shown is None:
            return None
        found = {node: shown}
        for reader in readers[node]:
            if not (reader.pointwise or reader.reduction):
                further = shown_by(reader, _view_of_rows(reader, shown))
                if further is None:
                    return None
                found |= further
        return found

    for copy in copies:
        places, shown = _places_of(copy.inputs[0], layouts), shown_by(copy, copy.inputs[0])
        if places is not None and shown is not None:
            views.update((node, repeat_rows(view, node.shape[0], places)) for node, view in shown.items())
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = [done[i] for i in node.inputs]
        if node.reduction:  # reads what row programs compute
            inputs = [Node("cast", (i,), i.shape, i.dtype) if i.op == "repeat" else i for i in inputs]
        done[node] = views.get(node) or g.with_inputs(node, inputs)
    return graph.replace(done)


def _view_of_rows(node: Node, source: Node) -> Node | None:
    """Return the columns of a source, or swapped pairs of them, that a node shows of its copy; None for others."""
    shown = g.with_inputs(node, [source])
    if node.op == "slice" and columns_shown(node) is not None:
        return shown
    swapped = swapped_pairs(shown) if node.shape[0] == source.shape[0] else None
    return view_swapped(shown, swapped) if swapped is not None and swapped.length == source.shape[1] else None


def _places_of(node: Node, layouts: dict[int, Layout]) -> Repeats | None:
    """Return where the rows of an argument with several strides of rows are; None for other nodes."""
    given = layouts.get(node.argument) if node.op == "input" else None
    return None if given is None else given.rows


# Rows that are joined -----------------------------------------------------------------------------------------------

_STORED_FOR = ("matmul", "split", "batched_matmul")  # readers of what is in memory, in whatever shape it was computed


def _join_rows(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Compute pointwise operations in longer rows, of which what they repeat is one."""
    readers = g.users(graph.roots)
    joined: dict[Node, int] = {}  # how many rows make one, of copies and of what is computed from them
    for node in readers:
        if node.op == "strided" and node not in joined and node not in graph.roots:
            inner = _rows_of_a_round(node)
            group = _pointwise_group(node, inner, readers, graph, layouts) if inner > 1 else None
            joined.update(dict.fromkeys(group or (), inner))
    if not joined:
        return graph
    done: dict[Node, Node] = {}
    wide: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inner = joined.get(node, 0)
        if node.op == "strided" and inner:
            wide[node] = g.reshape(done[node.inputs[0]], (1, inner * node.shape[1]))
        elif inner:
            shape = node.shape[0] // inner, inner * node.shape[1]
            operands = [wide[i] if i in joined else _in_shape(done[i], i, node, shape) for i in node.inputs]
            wide[node] = g.with_inputs(node, operands, shape)
            done[node] = g.reshape(wide[node], node.shape)
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    return graph.replace(done)


def _in_shape(done: Node, operand: Node, reader: Node, shape: tuple[int, int]) -> Node:
    """Return an operand from outside of a group for joined rows: one element as it is."""
    return g.reshape(done, shape) if operand.shape == reader.shape else done


def _rows_of_a_round(node: Node) -> int:
    """Return how many rows a copy repeats, if all of them come again together, in one or more rounds; else 0."""
    (source,), (rows, cols) = node.inputs, node.shape
    found = repeats_of(node) if cols > 1 else None
    if found is None or found.times > 1 or found.block < rows or source.size != found.inner * cols:
        return 0
    return found.inner


def _pointwise_group(
    copy: Node, inner: int, readers: dict[Node, list[Node]], graph: Graph, layouts: dict[int, Layout]
) -> set[Node] | None:
    """Find what is computed from a copy, and what else that reads; None unless all can be in joined rows."""
    changed = {node for _, node in graph.effects}
    found, rest = {copy}, [copy]
    while rest:
        node = rest.pop()
        for reader in readers[node]:
            if reader.op in _STORED_FOR and node.op != "strided":
                continue
            if not _joins(reader, copy, inner) or reader in changed:
                return None
            if reader not in found:
                found.add(reader)
                rest.append(reader)
        for i in node.inputs if node.pointwise else ():
            if i not in found and _joins(i, copy, inner):
                found.add(i)
                rest.append(i)
    outside = {i for n in found if n.pointwise for i in n.inputs if i not in found}
    return found if all(_can_be_joined(i, copy, layouts) for i in outside) else None


def _joins(node: Node, copy: Node, inner: int) -> bool:
    """Whether a node is of a group with a copy: a pointwise operation of its shape, or such a copy."""
    if node.shape != copy.shape:
        return False
    if node.op == "strided":
        return _rows_of_a_round(node) == inner
    return node.pointwise and node.op not in ("guard", "custom_derivative")


def _can_be_joined(operand: Node, copy: Node, layouts: dict[int, Layout]) -> bool:
    """Whether an operand is one element, or can be viewed with its rows joined; other copies would have to be made."""
    whole = operand.shape == copy.shape and operand.op != "strided" and is_contiguous(operand, layouts)
    return operand.size == 1 or whole
