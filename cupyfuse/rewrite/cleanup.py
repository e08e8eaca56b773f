"""Values that are there already: common subexpressions, empty casts, views of views, conversions. All exact."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node


def share_common_subexpressions(graph: Graph) -> Graph:
    """Equal operators on equal operands are computed once. Exact."""
    seen: dict[tuple[object, ...], Node] = {}

    def rule(node: Node) -> Node:
        return seen.setdefault(g.signature(node), node)

    return g.rewrite(graph, rule)


def drop_no_ops(node: Node) -> Node:
    """A cast to a value's own dtype, a broadcast to its own shape, and a stop_gradient are that value. Exact.

    A number stays cast, since it would take part in promotion otherwise than an array does.
    """
    if node.op in g.PASS_THROUGH and (node.inputs[0].dtype, node.inputs[0].shape) == (node.dtype, node.shape):
        return g.cast(node.inputs[0], node.dtype)
    return node


def drop_slopes(node: Node) -> Node:
    """A value with partial derivatives of its own is that value: gradients are taken before rewriting. Exact."""
    return node.inputs[0] if node.op == "sloped" else node


def cancel_transposes(node: Node) -> Node:
    """The transpose of a transpose, and any reshape of a reshape, is one view. Exact."""
    if node.op == "transpose" and node.inputs[0].op == "transpose":
        return node.inputs[0].inputs[0]
    if node.op == "reshape" and node.inputs[0].op == "reshape":
        return g.reshape(node.inputs[0].inputs[0], node.shape)
    return node


def push_transposes(graph: Graph) -> Graph:
    """The transpose of a pointwise function of vectors is that function of the transposed vectors. Exact.

    Arguments can be read either way at no cost, computed values would have to be stored first.
    """
    turned: dict[Node, Node] = {}

    def turns(node: Node) -> bool:
        by_rows = node.op == "guard" and node.inputs[1].reduction
        return node.pointwise and 1 in node.shape and node.shape != (1, 1) and not by_rows

    def rule(node: Node) -> Node:
        if node.op != "transpose" or not turns(node.inputs[0]):
            return node
        for inner in g.topological(node.inputs, lambda n: n.inputs if turns(n) and n not in turned else ()):
            if inner in turned:
                continue
            if turns(inner):
                inputs = tuple(turned[i] for i in inner.inputs)
                turned[inner] = g.with_inputs(inner, inputs, (inner.shape[1], inner.shape[0]))
            else:
                turned[inner] = inner if inner.shape == (1, 1) else g.transpose(inner)
        return turned[node.inputs[0]]

    return g.rewrite(graph, rule)


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

    return g.with_inputs(node, [converted(i) for i in node.inputs])
