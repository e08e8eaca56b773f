"""Linear forms: values as sums of scaled matrix products and of terms without products.

Terms without products keep the order in which they were written: where b - d cancels, sum(b) - sum(d) loses digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, reduce

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.rebuild import substitute
from .cleanup import drop_no_ops
from .notes import Note

_MAX_TERMS = 4096  # y + y doubles the terms of y: values of more terms are left whole


@dataclass(frozen=True)
class Term:
    """`row * col * product`: a matrix product with a per-row and a per-column factor; None stands for 1."""

    row: Node | None
    col: Node | None
    product: Node


@dataclass(frozen=True)
class Linear:
    """A value as the sum of `terms`, of `row * col` for each item of `vectors`, and of `rest`.

    Attributes
    ----------
    terms : the scaled matrix products
    vectors : per-column values or numbers by their per-row factor (None for 1); empty where there is a rest
    rest : a full-size value without products
    """

    terms: tuple[Term, ...] = ()
    vectors: dict[Node | None, Node] = field(default_factory=dict)
    rest: Node | None = None

    @property
    def offset(self) -> Node | None:
        """The sum of all but the terms; None for zero."""
        return self.rest or (add_all(scaled(col, row) for row, col in self.vectors.items()) if self.vectors else None)


def linear_form(value: Node) -> Linear:
    """Decompose a value into scaled matrix products and terms without products."""
    dependent = product_dependents([value])

    def is_full_size(node: Node) -> bool:
        """Whether a node has the shape of the value.

        A single row counts only if it depends on a product; otherwise it is a per-column vector.
        """
        return node.shape == value.shape and (node.shape[0] != 1 or node in dependent)

    def linear_inputs(node: Node) -> tuple[Node, ...]:
        """Return the operands that depend on matrix products, if the node is linear in them."""
        inner = tuple(i for i in node.inputs if is_full_size(i) and i in dependent)
        if node.op in ("add", "subtract", "negative"):
            return inner
        # The other operand is then a per-row value, a per-column value or a number.
        single = len(inner) == 1 and sum(map(is_full_size, node.inputs)) == 1
        divides = node.op == "divide" and single and node.inputs[0] is inner[0]
        return inner if divides or (node.op == "multiply" and single) else ()

    found: dict[Node, Linear] = {}
    for node in g.topological([value], linear_inputs):
        inner = linear_inputs(node)
        if node.op == "matmul" or not inner:
            part = _leaf_form(node, is_full_size(node))
        elif node.op == "negative":
            part = _negate(found[inner[0]])
        elif node.op in ("add", "subtract"):
            left, right = (
                found[i] if i in inner else _leaf_form(convert(i, node.dtype), is_full_size(i)) for i in node.inputs
            )
            part = _add(node.op, left, right)
        else:
            factor = node.inputs[1] if node.inputs[0] is inner[0] else node.inputs[0]
            part = _scale(node.op, found[inner[0]], convert(factor, node.dtype))
        found[node] = part if len(part.terms) <= _MAX_TERMS else Linear(rest=node)
    return found[value]


def product_dependents(roots: Iterable[Node]) -> set[Node]:
    """Find matrix products and all nodes that depend on one."""
    found: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        if node.op == "matmul" or any(i in found for i in g.eager_inputs(node)):
            found.add(node)
    return found


def _leaf_form(node: Node, is_full_size: bool) -> Linear:
    """Return the linear form of a node that is not decomposed: a product, a full-size value or a vector."""
    if is_full_size:
        return Linear((Term(None, None, node),)) if node.op == "matmul" else Linear(rest=node)
    return Linear(vectors={None: node} if node.shape[0] == 1 else {node: g.const(1.0)})


def _negate(part: Linear) -> Linear:
    """Negate a linear form."""
    minus = g.const(-1.0)
    terms = tuple(Term(t.row, scale_factor("multiply", t.col, minus), t.product) for t in part.terms)
    vectors = {row: g.pointwise("negative", col) for row, col in part.vectors.items()}
    return Linear(terms, vectors, None if part.rest is None else g.pointwise("negative", part.rest))


def _add(op: str, left: Linear, right: Linear) -> Linear:
    """Add or subtract two linear forms."""
    other = right if op == "add" else _negate(right)
    terms = left.terms + other.terms
    if left.rest is not None or right.rest is not None:
        a, b = left.offset, right.offset
        return Linear(terms, rest=g.pointwise(op, a, b) if a is not None and b is not None else a or other.offset)
    vectors = {**left.vectors, **other.vectors}
    for row in left.vectors.keys() & right.vectors.keys():
        vectors[row] = g.pointwise(op, left.vectors[row], right.vectors[row])
    return Linear(terms, vectors)


def _scale(op: str, part: Linear, factor: Node) -> Linear:
    """Multiply or divide a linear form by a per-row value, a per-column value or a number."""
    rest = None if part.rest is None else g.pointwise(op, part.rest, factor)
    if factor.shape[0] != 1:
        terms = tuple(Term(scale_factor(op, t.row, factor), t.col, t.product) for t in part.terms)
        return Linear(terms, {scale_factor(op, row, factor): col for row, col in part.vectors.items()}, rest)
    terms = tuple(Term(t.row, scale_factor(op, t.col, factor), t.product) for t in part.terms)
    return Linear(terms, {row: g.pointwise(op, col, factor) for row, col in part.vectors.items()}, rest)


def scale_factor(op: str, coefficient: Node | None, factor: Node) -> Node:
    """Multiply or divide a coefficient (None for 1) by a factor; NaN on underflow, which makes guards exact."""
    if coefficient is None and op == "multiply":
        return factor
    return g.pointwise(f"safe_{op}", g.const(1.0) if coefficient is None else coefficient, factor)


def eliminate_products(
    graph: Graph,
    rule: Callable[[Node], Node],
    inputs: Callable[[Node], Iterable[Node]],
    note: Callable[[Node, Node], Note],
    notes: list[Note],
) -> Graph:
    """Apply a rule to one node after the other, wherever that leaves matrix products without readers.

    `inputs(node)` are the operands that count as read. A note is made, by `note(target, product)`, of each product that
    is no longer computed.
    """
    refused: set[Node] = set()
    while True:
        only_readers = _only_readers_of_products(graph)
        order = [n for n in g.topological(graph.roots, inputs) if n in only_readers and n not in refused]
        target = next((n for n in order if rule(n) is not n), None)
        if target is None:
            return graph
        attempt = substitute(graph, target, rule(target))
        survivors = set(g.topological(attempt.roots, inputs))
        products = [n for n in g.topological([target], inputs) if n.op == "matmul"]
        dead = [p for p in products if p not in survivors]
        if dead:
            graph = attempt
            notes += [note(target, p) for p in dead]
        else:
            refused.add(target)


def _only_readers_of_products(graph: Graph) -> set[Node]:
    """Find the nodes whose first operand depends on matrix products and has no other reader."""
    roots, readers = set(graph.roots), g.users(graph.roots)
    read_once = (n for n in product_dependents(graph.roots) if len(readers[n]) == 1 and n not in roots)
    return {readers[n][0] for n in read_once if readers[n][0].inputs[0] is n}


def scaled(value: Node, *factors: Node | None) -> Node:
    """Return a value times its factors, of which None stands for 1."""
    for factor in factors:
        value = value if factor is None else g.pointwise("multiply", value, factor)
    return value


def add_all(values: Iterable[Node]) -> Node:
    """Add values in their order."""
    return reduce(partial(g.pointwise, "add"), values)


def convert(factor: Node, dtype: str) -> Node:
    """Convert an operand to the float dtype of its operation; constants stay weak."""
    if factor.op == "const":
        # As integers, constants could overflow before they meet a float; as bools, True + True would be True.
        return factor if dtypes.is_float(factor.dtype) else g.const(float(factor.value))
    return drop_no_ops(g.cast(factor, dtype))


def convert_or_none(factor: Node | None, dtype: str) -> Node | None:
    """Convert a factor as `convert` does; None, which stands for 1, stays."""
    return None if factor is None else convert(factor, dtype)
