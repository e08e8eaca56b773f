"""Broadcasts moved towards the results, and transposes of products."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.rebuild import rebuild
from .notes import Note


def sink_broadcasts(graph: Graph, notes: list[Note]) -> Graph:
    """Move broadcasts towards the results: f(broadcast(x)) = broadcast(f(x)).

    Exact for pointwise functions and transposes, and for max and min along the broadcast axis. To rounding for sums,
    n x, and for products with x broadcast to equal columns, A x. With c broadcast along the summed axis, c B = c sum(B)
    holds to rounding for finite values; an infinite c may give infinity for NaN.

    Saves the copies, and matrix products with a broadcast operand: 2 R K C floating-point operations.
    """
    compact = _CompactForms()

    def rule(node: Node) -> Node:
        result = _before_broadcast(node, compact)
        if node.op == "matmul" and result is not node:
            (rows, inner), cols = node.inputs[0].shape, node.shape[1]
            what = f"({rows} x {inner}) @ ({inner} x {cols})"
            notes.append(Note(_NOTE, what, f"{g.flops(node) - 2 * max(i.size for i in node.inputs):.3g} FLOPs"))
        for axis in (0, 1):
            compact.along(result, axis)  # memoise it now, so that searches from later nodes end here
        return result

    graph = rebuild(graph, rule)
    return graph.replace({n: g.broadcast(compact.along_both(n), n.shape) for n in graph.roots})


_NOTE = "a product with a broadcast operand is a weighted sum (infinite values may give inf for NaN)"


class _CompactForms:
    """Values before their broadcasts, with length one along the axes on which they are constant; memoised."""

    def __init__(self) -> None:
        self._found: dict[tuple[Node, int], Node | None] = {}  # by value and axis

    def along(self, node: Node, axis: int) -> Node | None:
        """Return the value with length one along an axis, or None where it is not constant along it."""
        if node.shape[axis] == 1:
            return node
        key = node, axis
        if key not in self._found:
            self._found[key] = self._rebuild(node, axis)
        return self._found[key]

    def _rebuild(self, node: Node, axis: int) -> Node | None:
        """Rebuild pointwise work and transposes from compact operands; None if an operand varies along the axis."""
        if node.op == "transpose":
            inner = self.along(node.inputs[0], 1 - axis)
            return None if inner is None else g.transpose(inner)
        if not node.pointwise or node.op == "guard" or not node.inputs:
            return None
        shape = (1, node.shape[1]) if axis == 0 else (node.shape[0], 1)
        inputs = [i for k in node.inputs if (i := self.along(k, axis)) is not None]
        if len(inputs) < len(node.inputs):
            return None
        if node.op in g.PASS_THROUGH and (inputs[0].shape, inputs[0].dtype) == (shape, node.dtype):
            return g.cast(inputs[0], node.dtype)  # a constant by itself would be weak in promotion
        return g.with_inputs(node, inputs, shape)

    def along_both(self, node: Node) -> Node:
        """Return the value with length one along each axis on which it is constant."""
        for axis in (0, 1):
            node = self.along(node, axis) or node
        return node


def _before_broadcast(node: Node, compact: _CompactForms) -> Node:
    """Return the node computed from operands before their broadcasts, or the node itself if none are broadcast."""
    if node.op == "matmul":
        return _product_of_broadcast(node, compact)
    if node.op in ("sum", "max", "min") and node.inputs[0].shape[node.axis] > 1:
        element = compact.along(node.inputs[0], node.axis)
        if element is None:
            return node
        n = node.inputs[0].shape[node.axis]
        return g.pointwise("multiply", element, g.axis_length(n, node.axis)) if node.op == "sum" else element
    if node.pointwise and node.op not in (*g.PASS_THROUGH, "guard"):
        short = [compact.along_both(i) for i in node.inputs]
        if any(a is not b for a, b in zip(short, node.inputs, strict=True)):
            shape = g.broadcast_shapes(*(i.shape for i in short))
            return g.broadcast(g.with_inputs(node, short, shape), node.shape)
    return node


def _product_of_broadcast(node: Node, compact: _CompactForms) -> Node:
    """Compute a matrix product with a broadcast operand as a weighted sum; other products stay."""
    a, b = node.inputs
    depth = a.shape[1]
    if 1 in (depth, *node.shape) or 0 in (depth, *node.shape):
        return node
    # An operand that is constant along the summed axis is a factor of the other's sum.
    for operand, factor, axis in ((b, compact.along(a, 1), 0), (a, compact.along(b, 0), 1)):
        if factor is not None:
            return g.broadcast(g.pointwise("multiply", factor, _weighted_sum(operand, axis)), node.shape)
    # If all columns of b are equal, or all rows of a, so are those of the product: one sum, weighted by one of them.
    column, row = compact.along(b, 1), compact.along(a, 0)
    if column is not None:
        return g.broadcast(_weighted_sum(a, 1, g.transpose(column)), node.shape)
    if row is not None:
        return g.broadcast(_weighted_sum(b, 0, g.transpose(row)), node.shape)
    return node


def _weighted_sum(matrix: Node, axis: int, weights: Node | None = None) -> Node:
    """Sum a matrix along an axis, each element times its weight (None for 1); of a transpose, sum the other axis."""
    if matrix.op == "transpose":
        return g.transpose(_weighted_sum(matrix.inputs[0], 1 - axis, None if weights is None else g.transpose(weights)))
    return g.reduce("sum", matrix if weights is None else g.pointwise("multiply", matrix, weights), axis)


def transpose_products(graph: Graph) -> Graph:
    """(A B)^T = B^T A^T, where every reader takes the transpose. Exact.

    Saves the copy that a transposed reader would need. The right operand of another product stays transposed, since the
    sums of that product run along rows of A B.
    """
    users = g.users(graph.roots)
    roots = set(graph.roots)

    def transposes(reader: Node) -> bool:
        return reader.op == "transpose" and not any(u.op == "matmul" and u.inputs[1] is reader for u in users[reader])

    def always_transposed(node: Node) -> bool:
        return node.op == "matmul" and node not in roots and node in users and all(map(transposes, users[node]))

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = [done[i] for i in node.inputs]
        if node.op == "transpose" and always_transposed(node.inputs[0]):
            a, b = (done[i] for i in node.inputs[0].inputs)
            done[node] = g.with_inputs(node.inputs[0], (g.transpose(b), g.transpose(a)), node.shape)
        else:
            done[node] = g.with_inputs(node, inputs)
    return graph.replace(done)
