"""Emit the repair of a guarded row sum: a function that evaluates the sum as it was written."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import graph as g
from ..ir.graph import Node
from ..ir.kinds import is_product
from .c_types import c_type
from .expressions import Body, Scope, indented
from .program import Program


def repair_function(name: str, node: Node, scope: Scope, repair: Callable[[Node], str]) -> str:
    """Emit the CUDA function that evaluates a guarded row sum as written, one column after the other.

    Parameters
    ----------
    name : str
    node : Node
        The guard.
    scope : Scope
        Of the row.
    repair : callable
        Emits the repair of a guarded sum within this one, and returns a call of it.
    """
    total = node.inputs[1]
    kind, elements = c_type(node.dtype), total.inputs[0]
    body = Body(scope.copy())
    body.index, body.repair = ("row", "col"), repair
    loops: list[str] = []
    for number, product in enumerate(_missing_products(scope.program, elements)):
        loops += _inner_product(f"product{number}", kind, product, scope, repair)
        body.scope.expressions[product] = f"product{number}.total()"
    value = body.value(elements)
    lines = [
        "// As written: every column's product, then their sum, which stays NaN once it is.",
        f"Sum<{kind}> total;",
        f"for (i64 col = 0; col < {elements.shape[1]}; ++col) {{",
        *(f"    {line}" for line in (*loops, *body.lines)),
        f"    total.add({value}, col);",
        "    if (isnan(total.total())) {",
        "        break;",
        "    }",
        "}",
        "return total.total();",
    ]
    head = f"template <class Team>\n__device__ {kind} {name}(const Team& team, i64 row, const Row& r) const"
    return f"{head} {{\n" + indented("\n".join(lines)) + "\n}"


def _inner_product(name: str, kind: str, product: Node, scope: Scope, repair: Callable[[Node], str]) -> list[str]:
    """Write the loop in which a team sums a product's element at (row, col) into the accumulator `name`."""
    a, b = product.inputs
    body = Body(scope.copy())
    body.index, body.repair = ("row", "k"), repair
    left = body.value(a)
    body.index, body.repair = ("k", "col"), None
    right = body.value(b)
    return [
        f"Sum<{kind}> {name};",
        f"for (i64 k = team.rank(); k < {a.shape[1]}; k += team.size()) {{",
        *(f"    {line}" for line in body.lines),
        f"    {name}.add({left} * {right}, k);",
        "}",
        f"team.reduce({name});",
    ]


def _missing_products(program: Program, node: Node) -> list[Node]:
    """Find the outermost products beneath a value that no parameter holds."""
    order = g.topological([node], lambda n: () if n in program.loaded or is_product(n) else n.inputs)
    return [n for n in order if is_product(n) and n not in program.loaded]
