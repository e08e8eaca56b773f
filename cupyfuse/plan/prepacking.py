"""Split off what a plan takes as inputs instead of computing it: prepacked values, and those that blocks share."""

from __future__ import annotations

from collections.abc import Callable

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..settings import Settings
from ..trace import Axes
from .plan import Output, Plan
from .schedule import Cost, Layout, Schedule, base_of, fuse_epilogues, round_values, schedule

# Operators that read their operands from memory, in the dtype in which they are stored.
_READ_STORED = ("matmul", "batched_matmul", "split_matmul", "split", "copy", "strided", "put", "library")


def scheduled_for(
    graph: Graph, layouts: dict[int, Layout] | None, settings: Settings, written: Cost | None = None
) -> Schedule:
    """Schedule a graph, and fuse epilogues into its products; `written` as for `schedule`."""
    scheduled = schedule(graph, layouts, written)
    results = set(map(base_of, scheduled.graph.roots))
    scheduled.steps = fuse_epilogues(scheduled.steps, scheduled.storage, results, layouts or {}, settings)
    return scheduled


def plan_inputs(name: str, graph: Graph, layouts: dict[int, Layout] | None, settings: Settings) -> Plan | None:
    """Plan the computation of values that another plan takes as inputs; None if there are none."""
    if not graph.outputs:
        return None
    scheduled = scheduled_for(graph, layouts, settings)
    outputs = tuple(Output(n, Axes.of((0, 1), n.shape)) for n in scheduled.graph.outputs)
    return Plan(name, settings, scheduled.graph, scheduled, outputs, (), ())


def computed_from(graph: Graph, given: Callable[[Node], bool]) -> set[Node]:
    """Find the values that depend on constants and on the inputs for which `given(node)` holds, alone."""
    found: set[Node] = set()
    for node in g.topological(graph.roots):
        operands = [i for i in node.inputs if i.op != "const"]
        varies = any(i.number for i in node.inputs)  # with the float arguments of a call
        if (node.op == "input" and given(node)) or (operands and not varies and all(i in found for i in operands)):
            found.add(node)
    return found


def fixed_values(graph: Graph, bound: frozenset[int]) -> set[Node]:
    """Find the values that depend on bound arguments alone, except on those that the call changes in place."""
    fixed = bound - {arg for arg, _ in graph.effects}
    return computed_from(graph, lambda node: node.argument in fixed)


def prepackable(graph: Graph, fixed: set[Node], settings: Settings) -> set[Node]:
    """Choose the fixed values that may be kept between calls: all, or where splits may not, all but those read."""
    if settings.keep_halves:
        return fixed
    users = g.users(graph.roots)
    return {n for n in fixed if n.op != "split" or all(u in fixed for u in users.get(n, ()))}


def split_off(graph: Graph, static: set[Node], name: str, cheap: bool = True) -> tuple[Graph, Graph]:
    """Cut a graph in two: return the rest, and the computation of those `static` values that the rest reads.

    These become inputs of the rest, numbered after the arguments. Without `cheap`, pointwise work on arguments stays in
    the rest unless a product reads it.
    """
    costly: dict[Node, bool] = {}  # whether a value depends on a reduction, a product or a copy
    for node in g.topological(graph.roots):
        costly[node] = node.reduction or node.op in _READ_STORED or any(costly[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if n in static else g.eager_inputs(n)))
    boundary: dict[Node, bool] = {}  # static value -> whether it is read in its own dtype, not a wider one
    for root in map(base_of, graph.roots):
        if root in static and root.op not in ("input", "const"):
            boundary[root] = True
    for node in g.topological(graph.roots, lambda n: () if n in static else n.inputs):
        if node in static:
            continue
        for i in node.inputs:
            base = base_of(i)
            # A guard's exact form recomputes cheap values for the rare element that needs them.
            if (
                base in static
                and base.op != "input"
                and (costly[base] or (i in eager and (cheap or node.op in _READ_STORED)))
            ):
                boundary[base] = boundary.get(base, False) or node.op in _READ_STORED
    first = len(graph.inputs)
    inputs = list(graph.inputs)
    mapping: dict[Node, Node] = {}
    for k, (node, own_dtype) in enumerate(boundary.items()):
        dtype = node.dtype if own_dtype else dtypes.compute_dtype(node.dtype)
        ndim = 2 if node.shape[0] > 1 else 1
        mapping[node] = g.argument(first + k, f"{name}{k}", node.shape, dtype, ndim)
        inputs.append(mapping[node])
    # Values that are stored rounded are rounded for the other static values that read them.
    read = {i for node in g.topological(boundary) for i in node.inputs}
    narrow = {
        n for n, own_dtype in boundary.items() if own_dtype and n in read and dtypes.compute_dtype(n.dtype) != n.dtype
    }
    values = round_values(Graph(graph.inputs, list(boundary)), narrow).outputs
    outputs = [g.cast(node, mapping[n].dtype) for n, node in zip(boundary, values, strict=True)]
    done: dict[Node, Node] = dict(mapping)
    for node in g.topological(graph.roots, lambda n: () if n in mapping else n.inputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    rest = graph.replace(done)
    rest.inputs = inputs
    needed = set(g.topological(outputs))
    return rest, Graph([n for n in graph.inputs if n in needed], outputs)
