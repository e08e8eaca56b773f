"""Average pooling of linear maps, moved into the weights."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.slices import average_pool
from .linear import Term, add_all, convert, convert_or_none, eliminate_products, linear_form, scaled
from .notes import Note


def pool_weights(node: Node) -> Node:
    """pool(x W + b) = x pool(W) + pool(b) for average pools of groups of columns.

    Holds to rounding for finite values. A group that holds an infinity beside NaN or the opposite infinity may come out
    infinite instead of NaN, since its weights are added first. Saves all but one in `width` of the GEMM's columns;
    pooled weights are computed once where they are bound.
    """
    match = _match_pool(node)
    if match is None:
        return node
    value, width = match
    linear = linear_form(value)
    scalar = all(t.col is None or t.col.shape == (1, 1) for t in linear.terms)
    if not linear.terms or linear.rest is not None or not scalar:
        return node
    parts = [_pooled_term(term, width, node.dtype) for term in linear.terms]
    for row, col in linear.vectors.items():
        col = convert(col, node.dtype)
        col = average_pool(col, width) if col.shape[1] > 1 else col
        parts.append(scaled(col, convert_or_none(row, node.dtype)))
    return g.cast(add_all(parts), node.dtype)


def _match_pool(node: Node) -> tuple[Node, int] | None:
    """Match an average pool as `ir.slices.average_pool` builds it; return its operand and width, or None."""
    if node.op != "reshape" or node.inputs[0].op != "mean" or node.inputs[0].inputs[0].op != "reshape":
        return None
    mean, groups = node.inputs[0], _groups_of(node)
    value, width = groups.inputs[0], groups.shape[1]
    pools = mean.axis == 1 and node.shape == (value.shape[0], value.shape[1] // max(width, 1))
    return (value, width) if pools and width > 1 else None


def _groups_of(pool: Node) -> Node:
    """Return the reshaped operand of an average pool's mean: a row for each group of columns."""
    return pool.inputs[0].inputs[0]


def _pooled_term(term: Term, width: int, dtype: str) -> Node:
    """Pool the weights of a scaled matrix product whose factors do not vary by column."""
    a, b = term.product.inputs
    # Divide before summing: sums of weights near the largest number would overflow.
    share = g.pointwise("multiply", b, g.const(1.0 / width))
    rows, cols = b.shape
    groups = g.reduce("sum", g.reshape(share, (rows * cols // width, width)), 1)
    pooled = g.matmul(a, g.reshape(groups, (rows, cols // width)))
    return scaled(pooled, convert_or_none(term.col, dtype), convert_or_none(term.row, dtype))


def pool_products(graph: Graph, notes: list[Note]) -> Graph:
    """Apply `pool_weights` to the graph, where only the pool reads the linear map."""

    def note(target: Node, product: Node) -> Note:
        rows, cols = product.shape
        inner, width = product.inputs[0].shape[1], _groups_of(target).shape[1]
        work = 2 * product.size * inner
        return Note(
            "the average pool of a linear map pools the weights (infinite inputs may give inf for NaN)",
            f"means of {width} columns of ({rows} x {inner}) @ ({inner} x {cols})",
            f"{work - work // width:.3g} FLOPs",
        )

    return eliminate_products(graph, pool_weights, lambda n: n.inputs, note, notes)
