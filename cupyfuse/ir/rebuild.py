"""Rebuild graphs with other values, and tell which values are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter

from .graph import Graph, Node, topological, with_inputs


def rebuild(graph: Graph, rule: Callable[[Node], Node]) -> Graph:
    """Rebuild the graph bottom-up, applying `rule` to each node with its rebuilt inputs; itself if nothing changes."""
    done: dict[Node, Node] = {}
    changed = False
    for node in graph.order:
        done[node] = found = rule(with_inputs(node, [done[i] for i in node.inputs]) if changed else node)
        changed = changed or found is not node
    return graph.replace(done) if changed else graph


def substitute(graph: Graph, target: Node, value: Node) -> Graph:
    """Replace the node `target` by `value`, except beneath `value` itself."""
    done: dict[Node, Node] = {}
    for node in topological(graph.roots):
        done[node] = value if node is target else with_inputs(node, [done[i] for i in node.inputs])
    return graph.replace(done)


def operation_key(node: Node) -> tuple[object, ...]:
    """Return a key of all fields of a node but its inputs."""
    # repr tells -0.0 from 0.0, and NaN equals itself.
    return repr(node.value), *_operation_fields(node)


_operation_fields = attrgetter(*(f.name for f in fields(Node) if f.name not in ("inputs", "value")))


def expression_key(node: Node) -> tuple[object, ...]:
    """Return a key that is equal for nodes with the same operation on the same inputs."""
    return *operation_key(node), node.inputs
