"""Split off what a plan takes as inputs instead of computing it: prepacked values, and those that blocks share."""

from __future__ import annotations

from collections.abc import Callable

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.slices import repeats_of
from ..rewrite import drop_guards_of_elements
from ..settings import Settings
from ..trace import Axes
from .plan import Output, Plan
from .schedule import (
    MOST_FLOPS,
    Cost,
    Layout,
    Schedule,
    base_of,
    cost_of,
    fuse_epilogues,
    guards_keep_apart,
    round_values,
    schedule,
    separate_columns,
    share_launches,
)
from .schedule.memory import COPIES

# Operators that read their operands from memory, in the dtype in which they are stored.
_READ_STORED = ("matmul", "batched_matmul", "split_matmul", "split", *COPIES, "concat", "library", *g.SCANS)


def scheduled_for(
    graph: Graph,
    layouts: dict[int, Layout] | None,
    settings: Settings,
    cost_as_written: Cost | None = None,
    most_flops: float = MOST_FLOPS,
) -> Schedule:
    """Schedule a graph, and fuse epilogues into its products; `cost_as_written` and `most_flops` as for `schedule`.

    Steps with guards cannot share launches (see `share_launches`). Where that may keep column reductions apart, the
    graph is scheduled again with the exact forms of all guards of elements, which is taken if fewer steps move fewer
    bytes: in as many steps exact forms only take longer, such as a division for a multiplication.
    """
    scheduled = _scheduled(graph, layouts, settings, cost_as_written, most_flops)
    if settings.on_gpu and guards_keep_apart(scheduled.steps):
        exact = _scheduled(drop_guards_of_elements(graph), layouts, settings, cost_as_written, most_flops)
        fewer_steps = len(exact.steps) < len(scheduled.steps)
        if fewer_steps and cost_of(exact.steps).bytes < cost_of(scheduled.steps).bytes:
            return exact
    return scheduled


def _scheduled(
    graph: Graph,
    layouts: dict[int, Layout] | None,
    settings: Settings,
    cost_as_written: Cost | None,
    most_flops: float,
) -> Schedule:
    """Schedule a graph as `scheduled_for` does, its guards as they are."""
    scheduled = schedule(graph, layouts, cost_as_written, most_flops)
    results = set(map(base_of, scheduled.graph.roots))
    storage, padded = scheduled.storage, scheduled.padded
    fused = fuse_epilogues(scheduled.steps, storage, padded, results, layouts or {}, settings)
    separated = separate_columns(fused, storage, settings.device)
    scheduled.steps = share_launches(separated, storage, results, settings.on_gpu)
    return scheduled


def plan_inputs(name: str, graph: Graph, layouts: dict[int, Layout] | None, settings: Settings) -> Plan | None:
    """Plan the computation of values that another plan takes as inputs; None if there are none."""
    if not graph.outputs:
        return None
    scheduled = scheduled_for(graph, layouts, settings)
    outputs = tuple(Output(n, Axes.of((0, 1), n.shape)) for n in scheduled.graph.outputs)
    return Plan(name, settings, scheduled.graph, scheduled, outputs, (), (), feeds=True)


def computed_from(graph: Graph, given: Callable[[Node], bool]) -> set[Node]:
    """Find the values that depend on constants and on the inputs for which `given(node)` holds, alone."""
    found: set[Node] = set()
    for node in g.topological(graph.roots):
        operands = [i for i in node.inputs if i.op != "const"]
        varies = any(i.number for i in node.inputs) or (node.call is not None and node.call.numbers)  # with a call's
        if (node.op == "input" and given(node)) or (operands and not varies and all(i in found for i in operands)):
            found.add(node)
    return found


def fixed_values(graph: Graph, bound: frozenset[int]) -> set[Node]:
    """Find the values that depend on bound arguments alone, except on those that the call changes in place."""
    fixed = bound - {arg for arg, _ in graph.effects}
    return computed_from(graph, lambda node: node.argument in fixed)


def prepackable(graph: Graph, fixed: set[Node], settings: Settings) -> set[Node]:
    """Choose the fixed values that may be kept between calls: all but those of rows that come again.

    Where splits may not be kept, also all but the splits that are read in each call.
    """
    kept = fixed - _of_repeated_rows(graph, fixed)
    if settings.keep_halves:
        return kept
    users = g.users(graph.roots)
    return {n for n in kept if n.op != "split" or all(u in fixed for u in users.get(n, ()))}


def _of_repeated_rows(graph: Graph, fixed: set[Node]) -> set[Node]:
    """Find the fixed values of rows that come again, which kernels read, or compute, without a copy of each row.

    Those of one element a row take little memory, and those that a product or a view reads are in memory anyway: both
    are kept.
    """
    users, again, found = g.users(graph.roots), set[Node](), set[Node]()
    for node in filter(fixed.__contains__, g.topological(graph.roots)):
        several = [i for i in node.inputs if i.shape[0] > 1]  # rows; one is the same for each
        if not (_repeats_rows(node) or (node.pointwise and several and again.issuperset(several))):
            continue
        again.add(node)
        others = [u for u in users.get(node, ()) if not u.pointwise and (u not in fixed or u.op in g.VIEWS)]
        if node.shape[1] > 1 and not others:
            found.add(node)
    return found.difference(graph.roots)


def _repeats_rows(node: Node) -> bool:
    return node.op == "strided" and repeats_of(node) is not None


def is_quick(prepacking: Graph) -> bool:
    """Whether a call computes values in less time than it finds out that they are unchanged: vectors, by element."""
    read = ("input", "const", "positions", *g.VIEWS)
    by_element = all(n.pointwise or n.op in read or _repeats_rows(n) for n in prepacking.order)
    return by_element and all(1 in n.shape for n in prepacking.outputs)


def split_off(graph: Graph, static: set[Node], name: str, cheap: bool = True) -> tuple[Graph, Graph]:
    """Cut a graph in two: return the rest, and the computation of those `static` values that the rest reads.

    These become inputs of the rest, named `name` and numbered after the arguments. Without `cheap`, pointwise work on
    arguments stays in the rest unless a product reads it.
    """
    read_stored = _static_values_read(graph, static, cheap)
    inputs: dict[Node, Node] = {}  # static value -> the input of the rest that holds it
    first = len(graph.inputs)
    for k, (node, as_stored) in enumerate(read_stored.items()):
        dtype = node.dtype if as_stored else dtypes.compute_dtype(node.dtype)
        ndim = 2 if node.shape[0] > 1 else 1
        inputs[node] = g.argument(first + k, f"{name}{k}", node.shape, dtype, ndim)
    return _with_inputs_for(graph, inputs), _computation(graph, inputs)


def _static_values_read(graph: Graph, static: set[Node], cheap: bool) -> dict[Node, bool]:
    """Find the static values that are results, or that the rest of the graph reads; `cheap` as for `split_off`.

    A static value can be computed from bound arguments alone. Returns for each whether a reader takes it as stored in
    its own dtype, not in the wider one that it is computed in.
    """
    costly: dict[Node, bool] = {}  # whether a value depends on a reduction, a product or a copy
    for node in g.topological(graph.roots):
        costly[node] = node.reduction or node.op in _READ_STORED or any(costly[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if n in static else g.eager_inputs(n)))

    def is_read(value: Node, operand: Node, reader: Node) -> bool:
        """Whether a reader takes a static value, of which its operand may be a view, rather than recompute it."""
        if value.op == "input":
            return False
        # A guard's exact form recomputes cheap values for the rare element that needs them.
        return costly[value] or (operand in eager and (cheap or reader.op in _READ_STORED))

    found: dict[Node, bool] = {}
    for root in map(base_of, graph.roots):
        if root in static and root.op not in ("input", "const"):
            found[root] = True
    for reader in g.topological(graph.roots, lambda n: () if n in static else n.inputs):
        if reader in static:
            continue
        for operand in reader.inputs:
            value = base_of(operand)
            if value in static and is_read(value, operand, reader):
                found[value] = found.get(value, False) or reader.op in _READ_STORED
    return found


def _with_inputs_for(graph: Graph, inputs: dict[Node, Node]) -> Graph:
    """Return the graph with further inputs in place of some values."""
    done: dict[Node, Node] = dict(inputs)
    for node in g.topological(graph.roots, lambda n: () if n in inputs else n.inputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    rest = graph.replace(done)
    rest.inputs = [*graph.inputs, *inputs.values()]
    return rest


def _computation(graph: Graph, inputs: dict[Node, Node]) -> Graph:
    """Return the graph that computes values from the arguments, each in the dtype of the input that takes it."""
    # 16-bit values that are stored rounded are rounded for the other values that read them, too; splits are no numbers.
    read = {i for node in g.topological(inputs) for i in node.inputs}
    rounded = {
        n
        for n, i in inputs.items()
        if n in read and n.op != "split" and i.dtype == n.dtype and dtypes.compute_dtype(n.dtype) != n.dtype
    }
    values = round_values(Graph(graph.inputs, list(inputs)), rounded).outputs
    outputs = [g.cast(value, i.dtype) for value, i in zip(values, inputs.values(), strict=True)]
    return with_used_inputs(Graph(graph.inputs, outputs))


def with_used_inputs(graph: Graph) -> Graph:
    """Drop the inputs that no output depends on."""
    used = set(g.topological(graph.outputs))
    return Graph([n for n in graph.inputs if n in used], graph.outputs)
