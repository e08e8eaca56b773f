"""Row sums of linear maps as matrix-vector products."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node
from .linear import Term, add_all, convert, convert_or_none, eliminate_products, linear_form, scaled
from .notes import Note


def collapse_sum(node: Node) -> Node:
    """sum_j (x W)_ij a_j = x (W a), with added constants, per-row and per-column terms carried through.

    Holds to rounding; guarded by row. A product whose overflow in one column is cancelled by another comes out finite
    here, and infinite or NaN as written. Saves the GEMM: 2 R K C floating-point operations become 2 R K. `W a` is
    computed once for bound weights.
    """
    if node.op != "sum" or node.axis != 1:
        return node
    value, dtype = node.inputs[0], node.dtype
    linear = linear_form(value)
    if not linear.terms:
        return node
    parts = [_row_sum(term, dtype) for term in linear.terms]
    if linear.rest is not None:
        parts.append(g.reduce("sum", convert(linear.rest, dtype), 1))
    for row, col in linear.vectors.items():
        if col.shape[1] == 1:
            total = scaled(col, g.const(float(value.shape[1])))
        else:
            total = g.reduce("sum", convert(col, dtype), 1)
        parts.append(scaled(total, convert_or_none(row, dtype)))
    return g.guard(g.cast(add_all(parts), dtype), node)


def _row_sum(term: Term, dtype: str) -> Node:
    """Sum a scaled matrix product along its rows, as a matrix-vector product."""
    return scaled(_matvec(term.product, convert_or_none(term.col, dtype)), convert_or_none(term.row, dtype))


def _matvec(matmul: Node, weights: Node | None) -> Node:
    """Return sum_j (a b)_ij weights_j as a (b weights), for a product a b; weights of None are 1."""
    a, b = matmul.inputs
    scalar = None
    if weights is not None and weights.shape == (1, 1) and b.shape[1] != 1:
        weights, scalar = None, weights  # a factor of the result
    # b weights, as a row.
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
    return scaled(dot, scalar)


def collapse_sums(graph: Graph, notes: list[Note]) -> Graph:
    """Apply `collapse_sum` to the graph, where nothing else reads the matrix product."""

    def note(target: Node, product: Node) -> Note:
        rows, cols = product.shape
        inner = product.inputs[0].shape[1]
        return Note(
            "the sum of a linear map is a matrix-vector product",
            f"sum over {cols} columns of ({rows} x {inner}) @ ({inner} x {cols})",
            f"{2 * rows * inner * cols - 2 * rows * inner:.3g} FLOPs",
        )

    return eliminate_products(graph, collapse_sum, g.eager_inputs, note, notes)
