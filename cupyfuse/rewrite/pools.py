"""Average pools of a linear map: the weights are pooled, and the matrix product is narrower."""

from __future__ import annotations

from .. import graph as g
from ..graph import Graph, Node
from .linear import Term, known, linear_terms, product, total, widened_term
from .notes import Note


def pool_weights(node: Node) -> Node:
    """The average pool of a linear map is the linear map of the pooled weights: pool(x W + b) = x pool(W) + pool(b).

    Pooled weights are prepared once where they are bound. Agrees to rounding for finite values. A group of columns that
    as written would hold an infinity beside a NaN or the opposite infinity can come out infinite here instead of NaN,
    since the weights of the group have met first. Saves all but one in `width` of the GEMM's columns.
    """
    pooled = _pooled(node)
    if pooled is None:
        return node
    value, width = pooled
    terms = linear_terms(value, *value.shape)
    products = [t for t in terms if t.base is not None]
    linear = bool(products) and all(t.base is not None and t.base.op == "matmul" for t in products)
    scalar = all(t.col is None or t.col.shape == (1, 1) for t in products)
    if not linear or not scalar:
        return node
    return g.cast(total([_pooled_term(widened_term(t, node.dtype), width) for t in terms]), node.dtype)


def _pooled(node: Node) -> tuple[Node, int] | None:
    """The value and the width of an average pool, as `graph.average_pool` builds it."""
    if node.op != "reshape" or node.inputs[0].op != "mean" or node.inputs[0].inputs[0].op != "reshape":
        return None
    groups = node.inputs[0].inputs[0]
    value, width = groups.inputs[0], groups.shape[1]
    right = node.inputs[0].axis == 1 and node.shape == (value.shape[0], value.shape[1] // max(width, 1))
    return (value, width) if right and width > 1 else None


def _pooled_term(term: Term, width: int) -> Node:
    if term.base is not None:
        a, b = term.base.inputs
        # Shares are summed, not sums shared: weights near the largest number do not overflow on the way.
        share = g.pointwise("multiply", b, g.const(1.0 / width))
        rows, cols = b.shape
        groups = g.reduce("sum", g.reshape(share, (rows * cols // width, width)), 1)
        return known(product(g.matmul(a, g.reshape(groups, (rows, cols // width))), term.col, term.row))
    col = term.col
    if col is not None and col.shape[1] > 1:
        col = g.average_pool(col, width)
    return known(product(col, term.row))


def pool_products(graph: Graph, notes: list[Note]) -> Graph:
    """Pool the weights of linear maps of which nothing but the pooled values is needed."""
    for target in [n for n in g.topological(graph.roots) if _pooled(n) is not None]:
        value = pool_weights(target)
        if value is target:
            continue
        products = [n for n in g.topological([target]) if n.op == "matmul"]
        attempt = g.substitute(graph, target, value)
        survivors = set(g.topological(attempt.roots))
        dead = [p for p in products if p not in survivors]
        if dead:
            graph = attempt
            width = _known_width(target)
            for p in dead:
                work = 2 * p.size * p.inputs[0].shape[1]
                what = (
                    f"means of {width} columns of ({p.shape[0]} x {p.inputs[0].shape[1]}) @ ({p.inputs[0].shape[1]} x "
                )
                notes.append(
                    Note(
                        "the average pool of a linear map pools the weights (infinite inputs may give inf for NaN)",
                        f"{what}{p.shape[1]})",
                        f"{work - work // width:.3g} FLOPs",
                    )
                )
    return graph


def _known_width(node: Node) -> int:
    pooled = _pooled(node)
    return pooled[1] if pooled is not None else 1
