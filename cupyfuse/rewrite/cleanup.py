"""Exact cleanups: common subexpressions, no-ops, views of views, redundant guards, implicit conversions."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.rebuild import expression_key, rebuild


def share_common_subexpressions(graph: Graph) -> Graph:
    """Compute equal operations on equal inputs once. Exact."""
    seen: dict[tuple[object, ...], Node] = {}

    def rule(node: Node) -> Node:
        return seen.setdefault(expression_key(node), node)

    return rebuild(graph, rule)


def drop_no_ops(node: Node) -> Node:
    """Drop casts to a value's own dtype, broadcasts to its own shape, and stop_gradient. Exact.

    A cast constant stays cast: by itself it would be weak in promotion.
    """
    if node.op in g.PASS_THROUGH and (node.inputs[0].dtype, node.inputs[0].shape) == (node.dtype, node.shape):
        return g.cast(node.inputs[0], node.dtype)
    return node


def drop_custom_derivatives(node: Node) -> Node:
    """custom_derivative(value, ...) = value: gradients are taken before rewriting. Exact."""
    return node.inputs[0] if node.op == "custom_derivative" else node


def cancel_transposes(node: Node) -> Node:
    """(x^T)^T = x, and a reshape of a reshape is one reshape. Exact."""
    if node.op == "transpose" and node.inputs[0].op == "transpose":
        return node.inputs[0].inputs[0]
    if node.op == "reshape" and node.inputs[0].op == "reshape":
        return g.reshape(node.inputs[0].inputs[0], node.shape)
    return node


def push_transposes(graph: Graph) -> Graph:
    """f(v)^T = f(v^T) for pointwise functions of vectors. Exact.

    Saves storing f(v): the transpose of an argument is free, that of a computed value is not, except to matrix
    products, which read what is stored either way.
    """
    users, roots = g.users(graph.roots), set(graph.roots)
    transposes: dict[Node, Node] = {}

    def is_pointwise_vector(node: Node) -> bool:
        guards_row_sum = node.op == "guard" and node.inputs[1].reduction
        return node.pointwise and 1 in node.shape and node.shape != (1, 1) and not guards_row_sum

    def operands(node: Node) -> tuple[Node, ...]:
        return node.inputs if is_pointwise_vector(node) and node not in transposes else ()

    def transposed(node: Node) -> Node:
        for inner in g.topological(node.inputs, operands):
            if inner in transposes:
                continue
            if is_pointwise_vector(inner):
                shape = inner.shape[1], inner.shape[0]
                transposes[inner] = g.with_inputs(inner, [transposes[i] for i in inner.inputs], shape)
            else:
                transposes[inner] = g.transpose(inner)
        return transposes[node.inputs[0]]

    def read_by_products_alone(node: Node) -> bool:
        return node not in roots and bool(users.get(node)) and all(reader.op == "matmul" for reader in users[node])

    pushed = {
        node
        for node in graph.order
        if node.op == "transpose" and is_pointwise_vector(node.inputs[0]) and not read_by_products_alone(node)
    }
    if not pushed:
        return graph
    done: dict[Node, Node] = {}
    for node in graph.order:
        found = g.with_inputs(node, [done[i] for i in node.inputs])
        done[node] = transposed(found) if node in pushed else found
    return graph.replace(done)


def convert_matmul_operands(node: Node) -> Node:
    """Cast the operands of a matrix product to its dtype, as NumPy does implicitly. Exact."""
    if node.op != "matmul":
        return node

    def converted(operand: Node) -> Node:
        if operand.dtype == node.dtype:
            return operand
        if operand.op == "transpose":
            return g.transpose(g.cast(operand.inputs[0], node.dtype))
        return g.cast(operand, node.dtype)

    return g.with_inputs(node, [converted(i) for i in node.inputs])


def drop_redundant_guards(graph: Graph) -> Graph:
    """guard(fast, exact) = exact, where `exact` is computed anyway. Exact."""
    live = set(g.topological(graph.roots, g.eager_inputs))
    return _without_guards(graph, lambda node: node.inputs[1] in live)


def drop_guards_of_elements(graph: Graph) -> Graph:
    """guard(fast, exact) = exact, where `exact` takes pointwise operations alone on what is computed anyway. Exact."""
    live = set(g.topological(graph.roots, g.eager_inputs))

    def is_of_elements(node: Node) -> bool:
        added = g.topological([node.inputs[1]], lambda n: () if n in live else n.inputs)
        return all(n.pointwise or n in live or not n.inputs for n in added)

    return _without_guards(graph, is_of_elements)


def _without_guards(graph: Graph, dropped: Callable[[Node], bool]) -> Graph:
    """Replace the guards for which `dropped(node)` holds by their exact forms."""
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        exact = node.op == "guard" and dropped(node)
        done[node] = done[node.inputs[1]] if exact else g.with_inputs(node, [done[i] for i in node.inputs])
    return graph.replace(done)
