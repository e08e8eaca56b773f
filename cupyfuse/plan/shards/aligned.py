"""Which axes of a graph's arguments go together: where one is split, so are the others."""

from __future__ import annotations

from ...ir import graph as g
from ...ir.graph import Graph, Node
from .split import _operands

Place = tuple[Node, int]  # an axis of a value


def aligned_axes(graph: Graph) -> dict[tuple[int, int], int]:
    """Number the axes of the arguments, those that go together alike.

    Axes of length one are left out.

    Returns
    -------
    dict
        A number for each (argument number, axis).
    """
    parents: dict[Place, Place] = {}

    def find(place: Place) -> Place:
        while (parent := parents.setdefault(place, place)) != place:
            parents[place] = place = parents[parent]
        return place

    for node in g.topological([*graph.inputs, *graph.outputs]):
        for axis in (0, 1):
            if node.shape[axis] > 1:
                for operand, needed in _operands(node, axis, node.shape[axis]) or ():
                    if needed in (0, 1):
                        parents[find((operand, needed))] = find((node, axis))
        if node.op == "matmul" and node.inputs[0].shape[1] > 1:
            a, b = node.inputs
            parents[find((a, 1))] = find((b, 0))
    numbers: dict[Place, int] = {}
    places = [(n, axis) for n in graph.inputs for axis in (0, 1) if n.shape[axis] > 1]
    return {(n.argument, axis): numbers.setdefault(find((n, axis)), len(numbers)) for n, axis in places}
