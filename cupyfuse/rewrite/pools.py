"""Average pools of a linear map: the weights are pooled, and the matrix product is narrower."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from .linear import Term, free_of_products, known, product, taken_apart, total, widened, widened_or_one
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
    linear = taken_apart(value)
    scalar = all(t.col is None or t.col.shape == (1, 1) for t in linear.terms)
    if not linear.terms or linear.rest is not None or not scalar:
        return node
    parts = [_pooled_term(term, width, node.dtype) for term in linear.terms]
    for row, col in linear.vectors.items():
        col = widened(col, node.dtype)
        col = g.average_pool(col, width) if col.shape[1] > 1 else col
        parts.append(known(product(col, widened_or_one(row, node.dtype))))
    return g.cast(known(total(parts)), node.dtype)


def _pooled(node: Node) -> tuple[Node, int] | None:
    """The value and the width of an average pool, as `graph.average_pool` builds it."""
    if node.op != "reshape" or node.inputs[0].op != "mean" or node.inputs[0].inputs[0].op != "reshape":
        return None
    groups = node.inputs[0].inputs[0]
    value, width = groups.inputs[0], groups.shape[1]
    right = node.inputs[0].axis == 1 and node.shape == (value.shape[0], value.shape[1] // max(width, 1))
    return (value, width) if right and width > 1 else None


def _pooled_term(term: Term, width: int, dtype: str) -> Node:
    a, b = term.product.inputs
    # Shares are summed, not sums shared: weights near the largest number do not overflow on the way.
    share = g.pointwise("multiply", b, g.const(1.0 / width))
    rows, cols = b.shape
    groups = g.reduce("sum", g.reshape(share, (rows * cols // width, width)), 1)
    narrow = g.matmul(a, g.reshape(groups, (rows, cols // width)))
    return known(product(narrow, widened_or_one(term.col, dtype), widened_or_one(term.row, dtype)))


def pool_products(graph: Graph, notes: list[Note]) -> Graph:
    """Pool the weights of linear maps of which nothing but the pooled values is needed."""

    def note(target: Node, product: Node) -> Note:
        rows, cols = product.shape
        inner, width = product.inputs[0].shape[1], _width(target)
        work = 2 * product.size * inner
        return Note(
            "the average pool of a linear map pools the weights (infinite inputs may give inf for NaN)",
            f"means of {width} columns of ({rows} x {inner}) @ ({inner} x {cols})",
            f"{work - work // width:.3g} FLOPs",
        )

    return free_of_products(graph, pool_weights, lambda n: n.inputs, note, notes)


def _width(node: Node) -> int:
    pooled = _pooled(node)
    assert pooled is not None
    return pooled[1]
