"""Linear maps taken apart: a value as a sum of terms, each a row factor times a column factor times a base."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import graph as g
from ..graph import Node
from .cleanup import drop_empty_casts

_MOST_TERMS = 4096  # y + y doubles the terms of y: a value of more than these is not taken apart


@dataclass(frozen=True)
class Term:
    """`row * col * base`: a per-row and a per-column factor (or None) times a full value (or None for 1)."""

    row: Node | None
    col: Node | None
    base: Node | None


def linear_terms(value: Node, rows: int, cols: int) -> list[Term]:
    """Write a full value as a sum of terms, each linear in one full value."""
    products = _above_matmul([value])
    shape = (rows, cols)

    def full(node: Node) -> bool:
        return node.shape == shape and (rows != 1 or node in products)

    def linear_inputs(node: Node) -> tuple[Node, ...]:
        if not full(node) or node.op not in ("add", "subtract", "negative", "multiply", "divide"):
            return ()
        if node.op == "divide":
            return () if full(node.inputs[1]) or not full(node.inputs[0]) else node.inputs[:1]
        if node.op == "multiply":
            return () if all(map(full, node.inputs)) else tuple(i for i in node.inputs if full(i))
        return node.inputs

    found: dict[Node, list[Term]] = {}
    for node in g.topological([value], linear_inputs):
        inner = linear_inputs(node)
        if not inner:
            found[node] = [_single_term(node, full(node))]
        elif node.op == "negative":
            found[node] = [_scaled(t, g.const(-1.0)) for t in found[inner[0]]]
        elif node.op in ("add", "subtract"):
            left, right = (found[i] for i in node.inputs)
            found[node] = left + (right if node.op == "add" else [_scaled(t, g.const(-1.0)) for t in right])
        else:
            factor = node.inputs[1] if node.inputs[0] is inner[0] else node.inputs[0]
            found[node] = [_scaled(t, widened(factor, node.dtype), node.op) for t in found[inner[0]]]
        if len(found[node]) > _MOST_TERMS:
            found[node] = [_single_term(node, full(node))]
    return found[value]


def _single_term(node: Node, full: bool) -> Term:
    if full:
        return Term(None, None, node)
    return Term(None, node, None) if node.shape[0] == 1 else Term(node, None, None)


def _above_matmul(roots: Iterable[Node]) -> set[Node]:
    """The nodes that need a matrix product."""
    found: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        if node.op == "matmul" or any(i in found for i in g.eager_inputs(node)):
            found.add(node)
    return found


def _scaled(term: Term, factor: Node, op: str = "multiply") -> Term:
    if factor.shape[0] != 1:
        return Term(combine(op, term.row, factor), term.col, term.base)
    return Term(term.row, combine(op, term.col, factor), term.base)


def combine(op: str, coefficient: Node | None, factor: Node) -> Node:
    """One more factor, or divisor, of a coefficient; NaN where their product underflows, so that guards notice."""
    if coefficient is None and op == "multiply":
        return factor
    return g.pointwise(f"safe_{op}", g.const(1.0) if coefficient is None else coefficient, factor)


def product(*factors: Node | None) -> Node | None:
    result: Node | None = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else g.pointwise("multiply", result, factor)
    return result


def total(terms: list[Node]) -> Node:
    result = terms[0]
    for term in terms[1:]:
        result = g.pointwise("add", result, term)
    return result


def known(node: Node | None) -> Node:
    assert node is not None
    return node


def widened(factor: Node, dtype: str) -> Node:
    """A factor in the dtype of the product it belongs to, in which it would have been used."""
    return factor if factor.op == "const" else drop_empty_casts(g.cast(factor, dtype))


def widened_term(term: Term, dtype: str) -> Term:
    """A term in the dtype of the sum it belongs to; a matrix product has it, or was converted as written."""
    row, col, base = term.row, term.col, term.base
    return Term(
        None if row is None else widened(row, dtype),
        None if col is None else widened(col, dtype),
        base if base is None or base.op == "matmul" else widened(base, dtype),
    )
