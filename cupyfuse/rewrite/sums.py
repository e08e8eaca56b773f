"""Sums over the columns of a linear map: the matrix product becomes a matrix-vector product."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from .linear import Term, free_of_products, known, product, taken_apart, total, widened, widened_or_one
from .notes import Note


def collapse_sum(node: Node) -> Node:
    """sum_j (x W)_ij a_j = x (W a): the sum of a linear map is a matrix-vector product.

    `W a` is one weighted sum over the weight (prepared once for bound weights); adding constants and per-row or
    per-column terms carries through. For finite results exact up to rounding; a row that comes out infinite or NaN is
    evaluated as written (guard). Finite inputs whose product overflows in one column and is cancelled by another come
    out finite here and infinite or NaN as written. Saves the GEMM: 2 R K C floating-point operations become 2 R K.
    """
    if node.op != "sum" or node.axis != 1:
        return node
    value, dtype = node.inputs[0], node.dtype
    linear = taken_apart(value)
    if not linear.terms:
        return node
    parts = [_summed_term(term, dtype) for term in linear.terms]
    if linear.rest is not None:
        parts.append(g.reduce("sum", widened(linear.rest, dtype), 1))
    for row, col in linear.vectors.items():
        several = col.shape[1] != 1
        inner = g.reduce("sum", widened(col, dtype), 1) if several else product(col, g.const(float(value.shape[1])))
        parts.append(known(product(inner, widened_or_one(row, dtype))))
    return g.guard(g.cast(known(total(parts)), dtype), node)


def _summed_term(term: Term, dtype: str) -> Node:
    return known(product(_matvec(term.product, widened_or_one(term.col, dtype)), widened_or_one(term.row, dtype)))


def _matvec(matmul: Node, weights: Node | None) -> Node:
    """sum_j matmul[:, j] * weights[j] as a matrix-vector product."""
    a, b = matmul.inputs
    scalar = weights if weights is not None and weights.shape == (1, 1) and b.shape[1] != 1 else None
    if scalar is not None:
        weights = None
    if b.op == "transpose":
        base = b.inputs[0]
        weighted = base if weights is None else g.pointwise("multiply", base, g.transpose(weights))
        vector = g.reduce("sum", weighted, 0) if base.shape[0] != 1 else weighted
    else:
        weighted = b if weights is None else g.pointwise("multiply", b, weights)
        vector = g.transpose(g.reduce("sum", weighted, 1) if b.shape[1] != 1 else weighted)
    if a.shape[1] == 1:
        dot = g.pointwise("multiply", a, vector)
    else:
        dot = g.reduce("sum", g.pointwise("multiply", a, vector), 1)
    return known(product(dot, scalar))


def collapse_sums(graph: Graph, notes: list[Note]) -> Graph:
    """Collapse sums of linear maps, one at a time, wherever nothing else needs the matrix product."""

    def note(target: Node, product: Node) -> Note:
        rows, cols = product.shape
        inner = product.inputs[0].shape[1]
        return Note(
            "the sum of a linear map is a matrix-vector product",
            f"sum over {cols} columns of ({rows} x {inner}) @ ({inner} x {cols})",
            f"{2 * rows * inner * cols - 2 * rows * inner:.3g} FLOPs",
        )

    return free_of_products(graph, collapse_sum, g.eager_inputs, note, notes)
