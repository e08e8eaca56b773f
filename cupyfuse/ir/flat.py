"""Graphs as lists of nodes, to be sent to other processes: pickling linked nodes recurses, and chains are long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .graph import Graph, Node, topological, with_inputs


class FlatGraph(NamedTuple):
    """A graph without references between nodes.

    Attributes
    ----------
    nodes : list of (Node, tuple of int)
        Each node without its inputs, and the positions of these, all of them earlier ones.
    inputs, outputs : list of int
        Positions of the graph's inputs and outputs in `nodes`.
    """

    nodes: list[tuple[Node, tuple[int, ...]]]
    inputs: list[int]
    outputs: list[int]


def flatten(graph: Graph) -> FlatGraph:
    """Return a graph as a list of nodes. It must have no effects, which are left out."""
    position: dict[Node, int] = {}
    nodes = []
    for node in topological([*graph.inputs, *graph.outputs]):
        nodes.append((with_inputs(node, ()), tuple(position[i] for i in node.inputs)))
        position[node] = len(position)
    return FlatGraph(nodes, [position[n] for n in graph.inputs], [position[n] for n in graph.outputs])


def unflatten(nodes: Iterable[tuple[Node, Iterable[int]]], inputs: Iterable[int], outputs: Iterable[int]) -> Graph:
    """Build the graph of the parts of a `FlatGraph`."""
    built: list[Node] = []
    for node, operands in nodes:
        built.append(with_inputs(node, [built[k] for k in operands]))
    return Graph([built[k] for k in inputs], [built[k] for k in outputs])
