"""Cost of graphs and plans in FLOPs and bytes, and the bounds that hold for every plan.

FLOPs are counted per element as the operator tables say (`graph.flops`): an addition is one, an exponential eight.
Bytes are counted per operation: each reads every operand once and writes its result once. Views, broadcasts and
conversions between dtypes are no operations of their own.

A schedule may compute a value in several steps instead of storing it, as long as the plan has at most `MOST_FLOPS`
times the FLOPs of the graph and of the function as written, each value computed once, and moves no more bytes than the
graph's operations one by one. As written, views of computed values are no work.
Matrix products, which are always stored, are left out of that comparison: beside a large one, anything would pass.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.kinds import is_product
from .steps import Step

MOST_FLOPS = 1.5

# Operators that cost nothing: no operation of their own computes or writes their results.
_FREE = ("input", "const", "positions", *g.VIEWS, *g.PASS_THROUGH)


@dataclass(frozen=True)
class Cost:
    """FLOPs in all, FLOPs of matrix products among them, and bytes read and written."""

    flops: int
    products: int
    bytes: int

    @property
    def repeatable(self) -> int:
        """FLOPs outside of matrix products, which steps may repeat."""
        return self.flops - self.products


def unfused_cost(graph: Graph, without: Container[Node] = ()) -> Cost:
    """Count the cost of a graph if each operation runs once, by itself; that of some nodes left out."""
    flops = products = moved = 0
    for node in g.topological(graph.roots, g.eager_inputs):
        if node.op not in _FREE and node not in without:
            flops += g.flops(node)
            products += g.flops(node) if is_product(node) else 0
            moved += node.nbytes + sum(i.nbytes for i in set(g.eager_inputs(node)) if i.op != "const")
    return Cost(flops, products, moved)


def cost_of(steps: Iterable[Step]) -> Cost:
    """Count the cost of steps whose bytes are filled in."""
    steps = list(steps)
    products = sum(g.flops(n) for s in steps if s.kind == "Gemm" for n in s.nodes if is_product(n))
    return Cost(sum(s.flops for s in steps), products, sum(s.reads + s.writes for s in steps))
