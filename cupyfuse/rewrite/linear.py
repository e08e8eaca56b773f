"""Linear maps taken apart: what is a multiple of a matrix product, and what is added to it.

What is added stays in the order in which it was written: where (b - d) cancels, sum(b) - sum(d) would lose the digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from .cleanup import drop_no_ops
from .notes import Note

_MOST_TERMS = 4096  # y + y doubles the terms of y: a value of more than these is not taken apart


@dataclass(frozen=True)
class Term:
    """`row * col * product`: a matrix product times a factor for each row and one for each column, or None for 1."""

    row: Node | None
    col: Node | None
    product: Node


@dataclass(frozen=True)
class Linear:
    """A value as a sum: of its terms, of `row * col` for each of `vectors`, and of `rest`.

    Attributes
    ----------
    terms : what is linear in matrix products
    vectors : by row factor (None for 1), what is added of a value a column or a number; none where there is a rest
    rest : what is added of full values
    """

    terms: tuple[Term, ...] = ()
    vectors: dict[Node | None, Node] = field(default_factory=dict)
    rest: Node | None = None

    @property
    def added(self) -> Node | None:
        """All that is added, as one value."""
        return self.rest or total([known(product(col, row)) for row, col in self.vectors.items()])


def taken_apart(value: Node) -> Linear:
    """Write a value as the sum of what is linear in matrix products and of what needs none."""
    over = _above_matmul([value])

    def full(node: Node) -> bool:
        return node.shape == value.shape and (node.shape[0] != 1 or node in over)

    def linear_inputs(node: Node) -> tuple[Node, ...]:
        """The operands that a node is linear in, and that matrix products are in."""
        inner = tuple(i for i in node.inputs if full(i) and i in over)
        if node.op in ("add", "subtract", "negative"):
            return inner
        single = len(inner) == 1 and sum(map(full, node.inputs)) == 1
        divides = node.op == "divide" and single and node.inputs[0] is inner[0]
        return inner if divides or (node.op == "multiply" and single) else ()

    found: dict[Node, Linear] = {}
    for node in g.topological([value], linear_inputs):
        inner = linear_inputs(node)
        if node.op == "matmul" or not inner:
            part = _alone(node, full(node))
        elif node.op == "negative":
            part = _negated(found[inner[0]])
        elif node.op in ("add", "subtract"):
            parts = (found[i] if i in inner else _alone(widened(i, node.dtype), full(i)) for i in node.inputs)
            part = _together(node.op, *parts)
        else:
            factor = node.inputs[1] if node.inputs[0] is inner[0] else node.inputs[0]
            part = _scaled(node.op, found[inner[0]], widened(factor, node.dtype))
        found[node] = part if len(part.terms) <= _MOST_TERMS else Linear(rest=node)
    return found[value]


def _above_matmul(roots: Iterable[Node]) -> set[Node]:
    """The nodes that need a matrix product."""
    found: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        if node.op == "matmul" or any(i in found for i in g.eager_inputs(node)):
            found.add(node)
    return found


def _alone(node: Node, full: bool) -> Linear:
    if node.op == "matmul" and full:
        return Linear((Term(None, None, node),))
    if full:
        return Linear(rest=node)
    return Linear(vectors={None: node} if node.shape[0] == 1 else {node: g.const(1.0)})


def _negated(part: Linear) -> Linear:
    minus = g.const(-1.0)
    terms = tuple(Term(t.row, combine("multiply", t.col, minus), t.product) for t in part.terms)
    vectors = {row: g.pointwise("negative", col) for row, col in part.vectors.items()}
    return Linear(terms, vectors, None if part.rest is None else g.pointwise("negative", part.rest))


def _together(op: str, left: Linear, right: Linear) -> Linear:
    """The sum or the difference of two values."""
    other = right if op == "add" else _negated(right)
    terms = left.terms + other.terms
    if left.rest is not None or right.rest is not None:
        a, b = left.added, right.added
        return Linear(terms, rest=g.pointwise(op, a, b) if a is not None and b is not None else a or other.added)
    vectors = {**left.vectors, **other.vectors}
    for row in left.vectors.keys() & right.vectors.keys():
        vectors[row] = g.pointwise(op, left.vectors[row], right.vectors[row])
    return Linear(terms, vectors)


def _scaled(op: str, part: Linear, factor: Node) -> Linear:
    """The product with a value a row, a value a column or a number; or the quotient by it."""
    rest = None if part.rest is None else g.pointwise(op, part.rest, factor)
    if factor.shape[0] != 1:
        terms = tuple(Term(combine(op, t.row, factor), t.col, t.product) for t in part.terms)
        return Linear(terms, {combine(op, row, factor): col for row, col in part.vectors.items()}, rest)
    terms = tuple(Term(t.row, combine(op, t.col, factor), t.product) for t in part.terms)
    return Linear(terms, {row: g.pointwise(op, col, factor) for row, col in part.vectors.items()}, rest)


def combine(op: str, coefficient: Node | None, factor: Node) -> Node:
    """One more factor, or divisor, of a coefficient; NaN where their product underflows, so that guards notice."""
    if coefficient is None and op == "multiply":
        return factor
    return g.pointwise(f"safe_{op}", g.const(1.0) if coefficient is None else coefficient, factor)


def free_of_products(
    graph: Graph,
    rule: Callable[[Node], Node],
    inputs: Callable[[Node], Iterable[Node]],
    note: Callable[[Node, Node], Note],
    notes: list[Note],
) -> Graph:
    """Apply a rule to one node at a time, wherever that leaves a matrix product without readers; note each of those."""
    refused: set[Node] = set()
    while True:
        order = [n for n in g.topological(graph.roots, inputs) if n not in refused]
        target = next((n for n in order if rule(n) is not n), None)
        if target is None:
            return graph
        attempt = g.substitute(graph, target, rule(target))
        survivors = set(g.topological(attempt.roots, inputs))
        products = [n for n in g.topological([target], inputs) if n.op == "matmul"]
        dead = [p for p in products if p not in survivors]
        if not dead:
            refused.add(target)
            continue
        graph = attempt
        notes += [note(target, p) for p in dead]


def product(*factors: Node | None) -> Node | None:
    result: Node | None = None
    for factor in factors:
        if factor is not None:
            result = factor if result is None else g.pointwise("multiply", result, factor)
    return result


def total(values: Iterable[Node]) -> Node | None:
    result: Node | None = None
    for value in values:
        result = value if result is None else g.pointwise("add", result, value)
    return result


def known(node: Node | None) -> Node:
    assert node is not None
    return node


def widened(factor: Node, dtype: str) -> Node:
    """An operand in the float dtype of the operation it belongs to, in which it would have been used."""
    if factor.op == "const":
        # Integers would overflow where they meet before the floats, and True + True is True.
        return factor if dtypes.is_float(factor.dtype) else g.const(float(factor.value))
    return drop_no_ops(g.cast(factor, dtype))


def widened_or_one(factor: Node | None, dtype: str) -> Node | None:
    return None if factor is None else widened(factor, dtype)
