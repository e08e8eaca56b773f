"""Values that have to equal their own extremum, although kernels may compute them in two forms.

16 bits hide the error of a quick form (`Operator.quick`), but not all kernels take the same: one multiplies by a row's
reciprocal where another divides, one computes exactly what it rounds to whole numbers. The maximum of one form is no
element of the other: `v == v.max(axis=0)` would be false in whole columns, and so the gradient of a maximum zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.kinds import gives_whole_numbers
from ...ir.operators import COMPARISONS, POINTWISE


def beside_extrema(graph: Graph) -> set[Node]:
    """Find what is compared with its own extremum, or has that subtracted, and may have two forms."""
    users = g.users(graph.roots)
    found = {n.inputs[0] for n in users if n.op in ("max", "min") and any(_tells(r, users) for r in _readers(n, users))}
    if not found:
        return found
    operands = [i for n in users if gives_whole_numbers(n) for i in n.inputs]
    whole = set(g.topological(operands, _pointwise_inputs))
    return {n for n in found if any(_has_forms(i, whole) for i in g.topological([n], _pointwise_inputs))}


def _readers(node: Node, users: dict[Node, list[Node]]) -> Iterator[Node]:
    """Iterate over the readers of a value, and of its conversions and broadcasts."""
    converted = g.topological([node], lambda n: [r for r in users[n] if r.op in g.PASS_THROUGH])
    return (r for n in converted for r in users[n] if r.op not in g.PASS_THROUGH)


def _tells(reader: Node, users: dict[Node, list[Node]]) -> bool:
    """Whether a reader of an extremum tells it from its neighbours; exponentials of differences do not."""
    differs = reader.op == "subtract" and any(r.op != "exp" for r in users[reader])
    return reader.op in COMPARISONS.values() or differs


def _pointwise_inputs(node: Node) -> tuple[Node, ...]:
    return node.inputs if node.pointwise else ()


def _has_forms(node: Node, whole: set[Node]) -> bool:
    """Whether kernels have several forms of an operation: quotients by rows, and what is beneath whole numbers."""
    if not node.pointwise or node.op in g.PASS_THROUGH or dtypes.compute_dtype(node.dtype) == node.dtype:
        return False
    by_row = node.op == "divide" and node.inputs[1].op != "const" and node.inputs[1].shape[1] < node.shape[1]
    return by_row or (node in whole and bool(POINTWISE[node.op].quick))
