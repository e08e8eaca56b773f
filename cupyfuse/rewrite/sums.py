"""Sums over the columns of a linear map: the matrix product becomes a matrix-vector product."""

from __future__ import annotations

from .. import graph as g
from ..graph import Graph, Node
from .linear import Term, known, linear_terms, product, total, widened_term
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
    x = node.inputs[0]
    rows, cols = x.shape
    terms = linear_terms(x, rows, cols)
    if not any(t.base is not None and t.base.op == "matmul" for t in terms):
        return node
    fast = g.cast(total([_summed(widened_term(t, node.dtype), cols) for t in terms]), node.dtype)
    return g.guard(fast, node)


def _summed(term: Term, cols: int) -> Node:
    """The sum over the columns of one term."""
    if term.base is None:
        if term.col is None:
            inner = g.const(float(cols))
        elif term.col.shape[1] == 1:
            inner = g.pointwise("multiply", term.col, g.const(float(cols)))
        else:
            inner = g.reduce("sum", term.col, 1)
    elif term.base.op == "matmul":
        inner = _matvec(term.base, term.col)
    else:
        inner = g.reduce("sum", known(product(term.base, term.col)), 1)
    return known(product(inner, term.row))


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
    refused: set[Node] = set()
    while True:
        live = list(g.topological(graph.roots, g.eager_inputs))
        candidates = [n for n in live if n not in refused and n.op == "sum" and collapse_sum(n) is not n]
        if not candidates:
            return graph
        target = candidates[0]
        products = {n for n in g.topological([target], g.eager_inputs) if n.op == "matmul"}
        attempt = g.substitute(graph, target, collapse_sum(target))
        survivors = set(g.topological(attempt.roots, g.eager_inputs))
        dead = [p for p in products if p not in survivors]
        if not dead:
            refused.add(target)
            continue
        graph = attempt
        for p in dead:
            rows, cols = p.shape
            inner = p.inputs[0].shape[1]
            notes.append(
                Note(
                    "the sum of a linear map is a matrix-vector product",
                    f"sum over {cols} columns of ({rows} x {inner}) @ ({inner} x {cols})",
                    f"{2 * rows * inner * cols - 2 * rows * inner:.3g} FLOPs",
                )
            )
