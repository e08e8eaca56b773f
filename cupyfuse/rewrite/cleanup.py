"""Values that are there already: common subexpressions, empty casts, views of views, conversions. All exact."""

from __future__ import annotations

from .. import graph as g
from ..graph import Graph, Node


def share_common_subexpressions(graph: Graph) -> Graph:
    """Equal operators on equal operands are computed once. Exact."""
    seen: dict[tuple[object, ...], Node] = {}

    def rule(node: Node) -> Node:
        key = (node.op, node.inputs, node.shape, node.dtype, tuple(sorted((k, repr(v)) for k, v in node.attrs.items())))
        return seen.setdefault(key, node)

    return g.rewrite(graph, rule)


def drop_empty_casts(node: Node) -> Node:
    """A cast to the dtype and shape that a value has already is that value. Exact."""
    if node.op == "cast" and node.inputs[0].op != "const":
        source = node.inputs[0]
        if source.dtype == node.dtype and source.shape == node.shape:
            return source
    return node


def cancel_transposes(node: Node) -> Node:
    """The transpose of a transpose, and any reshape of a reshape, is one view. Exact."""
    if node.op == "transpose" and node.inputs[0].op == "transpose":
        return node.inputs[0].inputs[0]
    if node.op == "reshape" and node.inputs[0].op == "reshape":
        return g.reshape(node.inputs[0].inputs[0], node.shape)
    return node


def push_transposes(node: Node) -> Node:
    """The transpose of a pointwise function of vectors is that function of the transposed vectors. Exact.

    Arguments can be read either way at no cost, computed values would have to be stored first.
    """
    if node.op != "transpose" or not node.inputs[0].pointwise or 1 not in node.shape:
        return node
    inner = node.inputs[0]
    if inner.op == "guard" and inner.inputs[1].reduction:
        return node
    turned = tuple(i if i.shape == (1, 1) else push_transposes(g.transpose(i)) for i in inner.inputs)
    return Node(inner.op, turned, node.shape, inner.dtype, inner.attrs)


def convert_matmul_operands(node: Node) -> Node:
    """matmul(a, b) in the promoted dtype converts its operands first, as NumPy does. Exact."""
    if node.op != "matmul":
        return node

    def converted(operand: Node) -> Node:
        if operand.dtype == node.dtype:
            return operand
        if operand.op == "transpose":
            return g.transpose(g.cast(operand.inputs[0], node.dtype))
        return g.cast(operand, node.dtype)

    a, b = (converted(i) for i in node.inputs)
    return node if (a, b) == node.inputs else Node("matmul", (a, b), node.shape, node.dtype, node.attrs)
