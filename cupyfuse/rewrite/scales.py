"""Adjacent per-column scales, such as the division by a deviation and the gamma of BatchNorm, folded into one.

Shifts stay where they are written. ((y - m) / s) g + t as y a + c, with a = g / s and c = t - m g / s, would save a
subtraction, and lose all digits that y and m share: y a and c are both rounded, by parts of |y a| and |m a|, before
they cancel. Nor are two shifts added before they meet the data: y + b can cancel where b - m rounds. A product of
factors rounds relative to itself, whatever the data; so a folded chain has at most one rounding more than the scales as
written between the same two shifts, and cancels nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from .linear import convert, product_dependents, scale_factor
from .notes import Note

# A guard costs about an operation: folds have to save more. One multiplication and a guard take as long as two.
_LEAST_FLOPS = 3


def fold_scales(chain: list[Node], inner: Node) -> Node | None:
    """y r / s g = y a, with the per-column factor a = r / s g.

    Holds to rounding; guarded by element, also where factors underflow. Operands that depend on a maximum or minimum
    end a chain: (y - min(y)) / (max(y) - min(y)) is exactly one. Saves the loads and the arithmetic of all steps but
    one; the factor is computed once for bound arrays. `chain` and `inner` are those of `_scale_chain`; returns None
    where a fold would gain nothing.
    """
    node = chain[0]
    if len(chain) < 2 or sum(g.flops(s) for s in chain) < _LEAST_FLOPS * node.size:
        return None
    factor: Node | None = None
    value = inner
    for step in reversed(chain):
        if step.op == "negative":
            factor = scale_factor("multiply", factor, g.const(-1.0))
        else:
            (other,) = (i for i in step.inputs if i is not value)
            factor = scale_factor(step.op, factor, convert(other, step.dtype))
        value = step
    assert factor is not None
    return g.guard(g.cast(g.pointwise("multiply", inner, factor), node.dtype), node)


def _scale_chain(node: Node, dependences: _Dependences) -> tuple[list[Node], Node]:
    """Return the chain of scales that ends in a node, outermost first, and the value that it is applied to."""
    chain: list[Node] = []
    while (inner := _scaled_operand(node, dependences)) is not None:
        chain.append(node)
        node = inner
    return chain, node


def _scaled_operand(node: Node, dependences: _Dependences) -> Node | None:
    """Return the operand that a node scales by a per-column value; None for other nodes."""
    if node.op not in ("multiply", "divide", "negative") or not dtypes.is_float(node.dtype) or node.shape[1] == 1:
        return None
    if node.shape[0] == 1 and node not in dependences.of_products:
        return None  # one row: a vector of factors, unless it is a matrix product of one row
    values = [i for i in node.inputs if i.shape == node.shape and i in dependences.varying]
    if len(values) != 1 or (node.op == "divide" and values[0] is not node.inputs[0]):
        return None
    others = [i for i in node.inputs if i is not values[0]]
    fixed = all(i.shape[0] == 1 and i not in dependences.varying and i not in dependences.extremal for i in others)
    return values[0] if fixed else None


@dataclass(frozen=True)
class _Dependences:
    """Values by what they depend on.

    Attributes
    ----------
    varying : values that depend on a matrix, so that their rows may differ
    extremal : values that depend on the maximum or minimum of a varying value
    of_products : values that depend on a matrix product
    """

    varying: set[Node]
    extremal: set[Node]
    of_products: set[Node]


def _find_dependences(roots: Collection[Node]) -> _Dependences:
    """Find which values beneath the roots vary from row to row, and which depend on extrema of them, or on products."""
    varying: set[Node] = set()
    extremal: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        inputs = g.eager_inputs(node)
        matrix = node.op == "matmul" or (node.op == "input" and node.ndim >= 2)
        column_reduction = node.reduction and node.axis == 0
        if matrix or (not column_reduction and any(i in varying for i in inputs)):
            varying.add(node)
        if any(i in extremal for i in inputs) or (node.op in ("max", "min") and inputs[0] in varying):
            extremal.add(node)
    return _Dependences(varying, extremal, product_dependents(roots))


def fold_scale_chains(graph: Graph, notes: list[Note]) -> Graph:
    """Apply `fold_scales` to each chain of per-column scales once, at its last step."""
    users = g.users(graph.roots)
    roots = set(graph.roots)
    dependences = _find_dependences(graph.roots)
    chained = {n for n in users if _scaled_operand(n, dependences) is not None}
    outermost = {n for n in chained if n in roots or not users[n] or not all(u in chained for u in users[n])}
    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if node not in outermost:
            continue
        chain, inner = _scale_chain(node, dependences)
        folded = fold_scales(chain, inner)
        if folded is None:
            continue
        saved = sum(map(g.flops, chain)) - node.size
        what = " -> ".join(n.op for n in reversed(chain))
        notes.append(Note("per-column scales are one", what, f"{saved:.3g} FLOPs"))
        # Rebuild the folded value, too, on the rebuilt nodes beneath it.
        for part in g.topological([folded], lambda n: () if n in done else n.inputs):
            if part not in done:
                done[part] = g.with_inputs(part, [done[i] for i in part.inputs])
        done[node] = done[folded]
    return graph.replace(done)
