"""Build the plan of a traced function: choose its products, split off what is prepacked, cut it into blocks of rows."""

from __future__ import annotations

from collections.abc import Callable

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..rewrite import simplify
from ..settings import Settings
from ..trace import Axes
from .plan import Blocks, Output, Plan, Traced
from .schedule import (
    Cost,
    Layout,
    NotRowwise,
    Schedule,
    choose_products,
    fuse_epilogues,
    one_pass_variances,
    resolve,
    rounded,
    rowwise_values,
    schedule,
    takes_epilogues,
    unfused_cost,
    with_rows,
)
from .schedule.blocks import LEAST_ROWS
from .schedule.memory import insert_copies

# Operators that read their operands from memory, in the dtype in which they are stored.
_READ_STORED = ("matmul", "batched_matmul", "split_matmul", "split", "copy", "strided", "put", "library")


def build(
    traced: Traced,
    layouts: dict[int, Layout] | None = None,
    settings: Settings | None = None,
    bound: frozenset[int] = frozenset(),
) -> Plan:
    """Simplify and schedule a traced function; split off what depends on the bound arguments alone."""
    settings = settings or Settings()
    graph, notes = simplify(traced.graph)
    graph = choose_products(graph, settings, _fixed_values(graph, bound))
    graph = one_pass_variances(graph) if takes_epilogues(settings) else graph
    prepare = None
    if bound:
        fixed = _prepackable(graph, _fixed_values(graph, bound), settings)
        graph, prepacking = _split_off(graph, fixed, "prepacked")
        prepare = _plan_inputs(f"{traced.name}: prepacked once", prepacking, layouts, settings)

    def plan_of(graph: Graph, written: Cost | None = None) -> Plan:
        scheduled = _scheduled(graph, layouts, settings, written)
        results = zip(scheduled.graph.outputs, traced.axes, strict=True)
        outputs = tuple(Output(n, Axes.of(axes, n.shape)) for n, axes in results)
        return Plan(traced.name, settings, scheduled.graph, scheduled, outputs, tuple(notes), traced.calls, prepare)

    plan = plan_of(graph, None if bound else unfused_cost(traced.graph))
    if plan.workspace > settings.max_workspace:
        try:
            plan.blocks = _in_blocks(graph, plan, plan_of, layouts)
        except NotRowwise as reason:
            plan.whole = str(reason)
    return plan


def _scheduled(
    graph: Graph, layouts: dict[int, Layout] | None, settings: Settings, written: Cost | None = None
) -> Schedule:
    """Schedule a graph, and give products their epilogues."""
    scheduled = schedule(graph, layouts, written)
    results = set(map(resolve, scheduled.graph.roots))
    scheduled.steps = fuse_epilogues(scheduled.steps, scheduled.storage, results, layouts or {}, settings)
    return scheduled


def _plan_inputs(name: str, graph: Graph, layouts: dict[int, Layout] | None, settings: Settings) -> Plan | None:
    """Plan the computation of values that another plan takes as inputs; None if there are none."""
    if not graph.outputs:
        return None
    scheduled = _scheduled(graph, layouts, settings)
    outputs = tuple(Output(n, Axes.of((0, 1), n.shape)) for n in scheduled.graph.outputs)
    return Plan(name, settings, scheduled.graph, scheduled, outputs, (), ())


def _in_blocks(
    graph: Graph, plan: Plan, plan_of: Callable[[Graph], Plan], layouts: dict[int, Layout] | None
) -> Blocks | None:
    """Cut a plan into blocks of nearly equal size that fit; None if it fits once common values are split off."""
    layouts = layouts or {}
    graph = insert_copies(graph, layouts)
    by_row = rowwise_values(graph)
    if any(not o.axes.in_order if o.axes.folded else o.axes.labels[:1] != (0,) for o in plan.outputs):
        raise NotRowwise("the rows of a result are not along its first dimension")
    graph, common = _split_off(graph, _computed_from(graph, lambda n: n not in by_row), "common", cheap=False)
    by_row = rowwise_values(graph)
    if any(n.argument in layouts and not layouts[n.argument].foldable for n in graph.inputs if n in by_row):
        raise NotRowwise("the rows of an argument have several strides")
    total, most = graph.outputs[0].shape[0], plan.settings.max_workspace
    whole, one = (plan_of(with_rows(graph, by_row, n)).workspace for n in (total, 1))
    if whole <= most:
        return None
    if one > most:
        raise NotRowwise("one row takes more than that")
    rows = max(1, min(total, 1 + (most - one) // max(1, (whole - one) // max(1, total - 1))))
    if rows >= LEAST_ROWS:
        rows -= rows % LEAST_ROWS
        even = -(-total // -(-total // rows))
        rows = min(rows, -(-even // LEAST_ROWS) * LEAST_ROWS)
    while rows > 1 and plan_of(with_rows(graph, by_row, rows)).workspace > most:
        rows -= -(-rows // 16)  # not linear in the rows: splits are padded to groups of eight
    rest = total % rows
    return Blocks(
        total,
        rows,
        plan_of(with_rows(graph, by_row, rows)),
        plan_of(with_rows(graph, by_row, rest)) if rest else None,
        _plan_inputs(f"{plan.name}: for all blocks", common, layouts, plan.settings),
        frozenset(n.argument for n in graph.inputs if n in by_row),
    )


def _computed_from(graph: Graph, given: Callable[[Node], bool]) -> set[Node]:
    """Find the values that depend on the given inputs, and constants, alone."""
    found: set[Node] = set()
    for node in g.topological(graph.roots):
        operands = [i for i in node.inputs if i.op != "const"]
        brought = any(i.number for i in node.inputs)  # by each call
        if (node.op == "input" and given(node)) or (operands and not brought and all(i in found for i in operands)):
            found.add(node)
    return found


def _fixed_values(graph: Graph, bound: frozenset[int]) -> set[Node]:
    """Find the values that depend on bound arguments alone, none of which the call changes in place."""
    fixed = bound - {arg for arg, _ in graph.effects}
    return _computed_from(graph, lambda node: node.argument in fixed)


def _prepackable(graph: Graph, fixed: set[Node], settings: Settings) -> set[Node]:
    """Choose the fixed values that may be kept from call to call: all, or all but splits that calls read."""
    if settings.keep_halves:
        return fixed
    users = g.users(graph.roots)
    return {n for n in fixed if n.op != "split" or all(u in fixed for u in users.get(n, ()))}


def _split_off(graph: Graph, static: set[Node], name: str, cheap: bool = True) -> tuple[Graph, Graph]:
    """Cut a graph in two: return the rest, and the computation of those `static` values that the rest reads.

    These become inputs of the rest, numbered after the arguments. Without `cheap`, pointwise work on arguments stays in
    the rest unless a product reads it.
    """
    costly: dict[Node, bool] = {}  # whether a value depends on a reduction, a product or a copy
    for node in g.topological(graph.roots):
        costly[node] = node.reduction or node.op in _READ_STORED or any(costly[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if n in static else g.eager_inputs(n)))
    boundary: dict[Node, bool] = {}  # static value -> whether it is read in its own dtype, not a wider one
    for root in map(resolve, graph.roots):
        if root in static and root.op not in ("input", "const"):
            boundary[root] = True
    for node in g.topological(graph.roots, lambda n: () if n in static else n.inputs):
        if node in static:
            continue
        for i in node.inputs:
            base = resolve(i)
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
        dtype = node.dtype if own_dtype else dtypes.compute(node.dtype)
        ndim = 2 if node.shape[0] > 1 else 1
        mapping[node] = g.argument(first + k, f"{name}{k}", node.shape, dtype, ndim)
        inputs.append(mapping[node])
    # Values that are stored rounded are rounded for the other static values that read them.
    read = {i for node in g.topological(boundary) for i in node.inputs}
    narrow = {n for n, own_dtype in boundary.items() if own_dtype and n in read and dtypes.compute(n.dtype) != n.dtype}
    values = rounded(Graph(graph.inputs, list(boundary)), narrow).outputs
    outputs = [g.cast(node, mapping[n].dtype) for n, node in zip(boundary, values, strict=True)]
    done: dict[Node, Node] = dict(mapping)
    for node in g.topological(graph.roots, lambda n: () if n in mapping else n.inputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    rest = graph.replace(done)
    rest.inputs = inputs
    needed = set(g.topological(outputs))
    return rest, Graph([n for n in graph.inputs if n in needed], outputs)
