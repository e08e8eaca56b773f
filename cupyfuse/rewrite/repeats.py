"""Values that repeat along an axis: what is done to one of the copies is done to all."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from .notes import Note


def drop_repeats(graph: Graph, notes: list[Note] | None = None) -> Graph:
    """What is computed of a value that repeats along an axis is computed of one copy.

    A function of such values, element by element, repeats as they do, and so does the transpose. A value that meets a
    longer one need not be repeated first. The largest and the smallest of n copies are the copy. All that is exact.

    The sum of n copies is n times the copy; with x repeated over its columns A x repeats over its columns, a weighted
    sum of A's columns: the same terms, which agree to rounding. With c repeated along the sums of a product, each of
    its elements is c times a sum: c B = c sum(B). That agrees to rounding for finite values; where c is infinite, an
    infinity can come out instead of NaN.

    Saves the copies, and every matrix product with an operand that repeats: 2 R K C floating-point operations.
    """
    copies = _Copies()

    def rule(node: Node) -> Node:
        result = _of_one_copy(node, copies)
        if node.op == "matmul" and result is not node and notes is not None:
            (rows, inner), cols = node.inputs[0].shape, node.shape[1]
            what = f"({rows} x {inner}) @ ({inner} x {cols})"
            notes.append(Note(_NOTE, what, f"{g.flops(node) - 2 * max(i.size for i in node.inputs):.3g} FLOPs"))
        for axis in (0, 1):
            copies.one(result, axis)
        return result

    graph = g.rewrite(graph, rule)
    return graph.replace({n: g.broadcast(copies.shortest(n), n.shape) for n in graph.roots})


_NOTE = "a product with a value that repeats is a weighted sum (infinite values may give inf for NaN)"


class _Copies:
    """For each value one of its copies along an axis: the same value, of length one there."""

    def __init__(self) -> None:
        self._found: dict[tuple[Node, int], Node | None] = {}

    def one(self, node: Node, axis: int) -> Node | None:
        """The value with length one along an axis along which it repeats, or None."""
        if node.shape[axis] == 1:
            return node
        key = node, axis
        if key not in self._found:
            self._found[key] = self._one(node, axis)
        return self._found[key]

    def _one(self, node: Node, axis: int) -> Node | None:
        if node.op == "transpose":
            inner = self.one(node.inputs[0], 1 - axis)
            return None if inner is None else g.transpose(inner)
        if not node.pointwise or node.op == "guard" or not node.inputs:
            return None
        shape = (1, node.shape[1]) if axis == 0 else (node.shape[0], 1)
        inputs = [i for k in node.inputs if (i := self.one(k, axis)) is not None]
        if len(inputs) < len(node.inputs):
            return None
        if node.op in g.PASS_THROUGH and (inputs[0].shape, inputs[0].dtype) == (shape, node.dtype):
            return inputs[0]
        return g.with_inputs(node, inputs, shape)

    def shortest(self, node: Node) -> Node:
        """One of its copies along both axes, as far as it repeats."""
        for axis in (0, 1):
            node = self.one(node, axis) or node
        return node


def _of_one_copy(node: Node, copies: _Copies) -> Node:
    if node.op == "matmul":
        return _product(node, copies)
    if node.reduction and node.op in ("sum", "max", "min") and node.inputs[0].shape[node.axis] > 1:
        one = copies.one(node.inputs[0], node.axis)
        if one is None:
            return node
        n = node.inputs[0].shape[node.axis]
        return g.pointwise("multiply", one, g.count(n, node.axis)) if node.op == "sum" else one
    if node.pointwise and node.op not in (*g.PASS_THROUGH, "guard"):
        short = [copies.shortest(i) for i in node.inputs]
        if any(a is not b for a, b in zip(short, node.inputs, strict=True)):
            shape = g.broadcast_shapes(*(i.shape for i in short))
            return g.broadcast(g.with_inputs(node, short, shape), node.shape)
    return node


def _product(node: Node, copies: _Copies) -> Node:
    """A matrix product with an operand that repeats, as a weighted sum."""
    a, b = node.inputs
    depth = a.shape[1]
    if 1 in (depth, *node.shape) or 0 in (depth, *node.shape):
        return node
    for operand, factor, axis in ((b, copies.one(a, 1), 0), (a, copies.one(b, 0), 1)):
        if factor is not None:
            return g.broadcast(g.pointwise("multiply", factor, _total(operand, axis)), node.shape)
    column, row = copies.one(b, 1), copies.one(a, 0)
    if column is not None:
        return g.broadcast(_total(a, 1, g.transpose(column)), node.shape)
    if row is not None:
        return g.broadcast(_total(b, 0, g.transpose(row)), node.shape)
    return node


def _total(matrix: Node, axis: int, weights: Node | None = None) -> Node:
    """The sums along an axis of a matrix, of each row or column times its weight; of a turned one as it lies."""
    if matrix.op == "transpose":
        return g.transpose(_total(matrix.inputs[0], 1 - axis, None if weights is None else g.transpose(weights)))
    return g.reduce("sum", matrix if weights is None else g.pointwise("multiply", matrix, weights), axis)


def turn_products(graph: Graph) -> Graph:
    """The transpose of a product is the product of the transposes: (A B)^T = B^T A^T. Exact.

    Where nothing reads the product as it is: it comes to lie in memory as its readers need it, which saves a copy. What
    is a right operand next stays turned, since its sums run along the rows of the product as it lies.
    """
    users = g.users(graph.roots)
    roots = set(graph.roots)

    def turned(reader: Node) -> bool:
        return reader.op == "transpose" and not any(u.op == "matmul" and u.inputs[1] is reader for u in users[reader])

    def turns(node: Node) -> bool:
        return node.op == "matmul" and node not in roots and all(map(turned, users.get(node, [node])))

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = [done[i] for i in node.inputs]
        if node.op == "transpose" and turns(node.inputs[0]):
            a, b = (done[i] for i in node.inputs[0].inputs)
            done[node] = g.with_inputs(node.inputs[0], (g.transpose(b), g.transpose(a)), node.shape)
        else:
            done[node] = g.with_inputs(node, inputs)
    return graph.replace(done)
