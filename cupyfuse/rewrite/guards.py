"""Guards that rewrites put in and that turn out to guard nothing."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Graph, Node


def drop_needless_guards(graph: Graph) -> Graph:
    """Where the exact form is computed anyway, it is the value. Exact."""
    live = set(g.topological(graph.roots, g.eager_inputs))

    def rule(node: Node, original: Node) -> Node:
        return node.inputs[1] if node.op == "guard" and original.inputs[1] in live else node

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        done[node] = rule(g.with_inputs(node, [done[i] for i in node.inputs]), node)
    return graph.replace(done)
