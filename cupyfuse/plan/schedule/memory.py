"""Layouts of arguments in memory, and the copies that readers and results need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.rebuild import rebuild
from ...ir.repeats import Repeats
from ...ir.slices import merged, strided_copy


@dataclass(frozen=True)
class Layout:
    """The memory layout of an argument, seen as rows x columns, as far as a plan depends on it.

    Attributes
    ----------
    unit_cols, unit_rows : whether the stride between columns, or between rows, is 1
    contiguous : whether it is C-contiguous
    blas : whether cuBLAS can read it
    foldable : whether its rows have one stride; the leading axes of an array of more dimensions may have several
    rows : where rows with several strides are, whose elements follow each other
    """

    unit_cols: bool = True
    unit_rows: bool = False
    contiguous: bool = True
    blas: bool = True
    foldable: bool = True
    rows: Repeats | None = None

    @property
    def transposed(self) -> Layout:
        return Layout(self.unit_rows, self.unit_cols, False, self.blas)


# Operators that copy a value in the dtype in which it is stored.
COPIES = ("copy", "strided", "put")
# A column-major operand is split without a copy in two parts, which only GPUs with clusters do; in one part if it has
# at least so many rows, or no fewer rows than columns: fewer rows make too few blocks for two passes.
_SPLIT_BY_COLUMNS = 4096


def base_of(node: Node) -> Node:
    """Return the value in memory that a view, or a view of views, shows; the node itself if it is none."""
    while node.op in g.VIEWS:
        node = node.inputs[0]
    return node


def stored_size(node: Node) -> int:
    """Return the number of elements in memory that a value shows: those of repeated rows are read once."""
    return node.inputs[0].size if node.op == "repeat" else node.size


def source_of_copies(node: Node) -> Node:
    """Return the value that copies, and views of copies, were made of."""
    while node.op in COPIES:
        node = base_of(node.inputs[0])
    return node


def is_own_rounding(node: Node) -> bool:
    """Whether a value is a cast to another dtype, which is rounded wherever it is computed, stored or not."""
    return node.op == "cast" and node.inputs[0].dtype != node.dtype


def is_exact(node: Node) -> bool:
    """Whether a 16-bit value already is of its dtype when it is computed, so that storing it in 16 bits rounds nothing.

    Arguments and casts are, and so are what library functions return for floats of that dtype alone, and views,
    repetitions and copies of all these.
    """
    while node.op in (*g.VIEWS, *g.PASS_THROUGH, "copy", "strided") and not is_own_rounding(node):
        node = node.inputs[0]
    if node.op == "library":
        return all(not dtypes.is_float(i.dtype) or i.dtype == node.dtype for i in node.inputs)
    return node.op == "input" or is_own_rounding(node)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array, in elements."""
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def row_stride(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of an array's rows, which are all axes but the last; None if they have several strides."""
    axes = merged(zip(shape[:-1], strides[:-1], strict=True))
    if not axes or 0 in shape:
        return 0
    return axes[0][1] if len(axes) == 1 else None


class RowPlaces(NamedTuple):
    """Where the rows of an array of several dimensions are: `Repeats` counts them, in strides of so many elements."""

    repeats: Repeats
    stride: int


def row_places(shape: Sequence[int], strides: Sequence[int]) -> RowPlaces | None:
    """Return where an array's rows are, all axes but the last, if they have two or three strides.

    So are those of heads, permuted or of a fused projection, and all rows but the first of each batch. None for one
    stride, more than three, strides that are not positive, and rows whose elements do not follow each other.
    """
    axes = merged(zip(shape[:-1], strides[:-1], strict=True))
    if not 1 < len(axes) < 4 or 0 in shape or strides[-1] != 1 or any(step <= 0 for _, step in axes):
        return None
    stride = math.gcd(*(step for _, step in axes))
    (_, apart), (inner, between), (times, within) = [*axes, (1, 0)][:3]
    repeats = Repeats(inner * times, times, inner, apart // stride, between // stride, within // stride)
    return RowPlaces(repeats, stride)


def view_chain(node: Node) -> list[Node]:
    """List the views between `base_of(node)` and the node, in the order in which they apply."""
    found = []
    while node.op in g.VIEWS:
        found.append(node)
        node = node.inputs[0]
    return found[::-1]


def in_order_of_base(node: Node) -> bool:
    """Whether a value has the elements of `base_of(node)` in their order, under any shape."""
    return all(view.op == "reshape" for view in view_chain(node))


def layout_of(node: Node, layouts: dict[int, Layout]) -> Layout:
    """Return the layout of a value or a view, given those of the arguments.

    Computed values are taken to be contiguous: `can_be_padded` refuses those whose readers depend on it.
    """
    transposed = False
    while node.op == "transpose":
        node, transposed = node.inputs[0], not transposed
    if node.op == "swap":
        layout = replace(layout_of(node.inputs[0], layouts), contiguous=False, blas=False)
    elif node.op == "repeat":
        layout = Layout(unit_rows=min(node.shape) <= 1, contiguous=False, blas=False)
    elif node.op == "slice":
        whole, ((_, down), (_, across)) = layout_of(node.inputs[0], layouts), node.dims
        layout = Layout(
            whole.unit_cols and (across == 1 or node.shape[1] <= 1),
            whole.unit_rows and (down == 1 or node.shape[0] <= 1),
            contiguous=False,
            blas=False,
        )
    else:
        given = layouts.get(node.argument) if node.op == "input" else None
        layout = given or Layout(unit_rows=min(node.shape) <= 1)
    return layout.transposed if transposed else layout


def readable_by_rows(node: Node, layouts: dict[int, Layout]) -> bool:
    """Whether a kernel that works along rows can read a value: with unit column stride, or of a single column."""
    layout = layout_of(node, layouts)
    return node.shape[1] <= 1 or layout.unit_cols or (node.shape[0] <= 1 and layout.contiguous)


def insert_copies(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Copy arguments and transposed values before each reader that cannot take their layout."""
    live = set(g.topological(graph.roots, g.eager_inputs))
    copies: dict[Node, Node] = {}

    def copy_of(value: Node) -> Node:
        return copies.setdefault(value, Node("copy", (value,), value.shape, value.dtype))

    def readable_operand(reader: Node, value: Node) -> Node:
        """Return the value, or a copy of it where the reader cannot take its layout."""
        if value.op not in ("input", "transpose", "slice"):
            return value
        if reader.op in ("matmul", "split") and _views_slice(value):
            return copy_of(value)
        layout = layout_of(value, layouts)
        if layout.blas if reader.op == "matmul" else readable_by_rows(value, layouts):
            return value
        enough = reader.parts == 2 or value.shape[0] >= min(value.shape[1], _SPLIT_BY_COLUMNS)
        splits_by_columns = reader.op == "split" and layout.unit_rows and enough
        return value if splits_by_columns else copy_of(value)

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = tuple(done[i] for i in node.inputs)
        if node.op in ("reshape", "strided", "put", "batched_matmul"):
            inputs = tuple(i if is_contiguous(i, layouts) else copy_of(i) for i in inputs)
        elif node in live and (node.pointwise or node.reduction or node.op in ("matmul", "split")):
            inputs = tuple(readable_operand(node, i) for i in inputs)
        done[node] = g.with_inputs(node, inputs)
        if node.op == "input" and not layout_of(node, layouts).foldable:
            done[node] = copy_of(node)
        if node.op == "split" and not readable_by_rows(inputs[0], layouts):
            done[node] = replace(done[node], by_columns=True)
    return graph.replace(done)


def is_reshaped_argument(node: Node, layouts: dict[int, Layout]) -> bool:
    """Whether a value shows the memory of a contiguous argument under another shape."""
    base = base_of(node)
    in_c_order = base.op == "input" and layout_of(base, layouts).contiguous
    return in_c_order and in_order_of_base(node)


def is_contiguous(value: Node, layouts: dict[int, Layout]) -> bool:
    """Whether a value is in C order in memory, given the layouts of the arguments."""
    while value.op == "transpose" and min(value.shape) <= 1:
        value = value.inputs[0]
    return value.op != "transpose" and layout_of(value, layouts).contiguous


def _views_slice(node: Node) -> bool:
    """Whether one of the views that make a node is a slice."""
    while node.op in g.VIEWS:
        if node.op == "slice":
            return True
        node = node.inputs[0]
    return False


def results_in_memory(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Copy results that are arguments, slices, constants or the same value as another result, by a row program.

    Those that are reshaped arguments, not contiguous, are left: `insert_copies` copies them.
    """
    used: set[Node] = set()

    def in_own_memory(node: Node) -> Node:
        base = base_of(node)
        will_be_copied = any(v.op == "reshape" and not is_contiguous(v.inputs[0], layouts) for v in view_chain(node))
        fresh = (will_be_copied or base.op not in ("input", "const")) and base not in used and not _views_slice(node)
        op = "copy" if dtypes.is_opaque(node.dtype) else "cast"  # kernels cannot read opaque values
        result = node if fresh else Node(op, (node,), node.shape, node.dtype)
        used.add(base_of(result))
        return result

    outputs = [in_own_memory(n) for n in graph.outputs]
    return Graph(graph.inputs, outputs, [(arg, in_own_memory(n)) for arg, n in graph.effects])


def copy_opaque_broadcasts(graph: Graph) -> Graph:
    """Replace broadcasts of values that kernels cannot read, such as complex numbers, by strided copies.

    Constants are no values in memory.
    """

    def rule(node: Node) -> Node:
        if node.op != "broadcast" or node.inputs[0].op == "const" or not dtypes.is_opaque(node.dtype):
            return node
        rows, cols = node.inputs[0].shape
        dims = (node.shape[0], cols if rows > 1 else 0), (node.shape[1], int(cols > 1))
        return strided_copy(node.inputs[0], dims, node.shape)

    return rebuild(graph, rule)


def pieces_in_memory(graph: Graph) -> Graph:
    """Make each piece of matrices side by side a value of its own, which nothing else reads.

    A row program writes it where it belongs in the whole, whatever computes it: other steps write without gaps.
    """
    if all(node.op != "concat" for node in graph.order):
        return graph

    def rule(node: Node) -> Node:
        if node.op != "concat":
            return node
        return g.with_inputs(node, [Node("cast", (piece,), piece.shape, piece.dtype) for piece in node.inputs])

    return rebuild(graph, rule)


def round_values(graph: Graph, values: set[Node]) -> Graph:
    """Round 16-bit values where they are computed, for all of their readers."""
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        value = g.with_inputs(node, [done[i] for i in node.inputs])
        done[node] = g.cast(g.cast(value, "float32"), node.dtype) if node in values else value
    return graph.replace(done)
