"""Build the plan of a traced function: choose its products, split off what is prepacked, cut it into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

from ..ir.graph import Graph
from ..rewrite import Note, replace_library_calls, simplify
from ..settings import Settings
from ..trace import Axes
from .block_choice import choose_blocks
from .block_planner import BlockPlanner
from .plan import Output, Plan
from .prepacking import fixed_values, is_quick, plan_inputs, prepackable, scheduled_for, split_off
from .rounding import mark_products, mark_saved_sums, may_store_rounded
from .schedule import (
    MOST_FLOPS,
    Cost,
    Layout,
    NotRowwise,
    choose_products,
    cost_of,
    one_pass_product_variances,
    takes_epilogues,
    unfused_cost,
)
from .soundness import check_plan
from .traced import Traced
from .views import with_views_stored, within_flops


def build(
    traced: Traced,
    layouts: dict[int, Layout] | None = None,
    settings: Settings | None = None,
    bound: frozenset[int] = frozenset(),
    checked: bool = False,
) -> Plan:
    """Simplify and schedule a traced function; split off what depends on the bound arguments alone.

    A graph with views of computed values has two forms: with views computed again, within the bound of FLOPs, and as
    written. The first one is planned if it moves no more bytes than the function as written, else the better of both.

    Parameters
    ----------
    traced : Traced
    layouts : dict, optional
        Memory layouts by argument number; by default all are contiguous.
    settings : Settings, optional
    bound : frozenset of int
        Argument numbers whose arrays stay the same from call to call.
    checked : bool
        Each call checks whether they do, so that what it computes in less time is not prepacked; plans
        in blocks prepack it all the same.
    """
    settings = settings or Settings()
    written = with_views_stored(traced.graph, traced.viewed)
    chosen = within_flops(traced.graph, traced.viewed, written)
    written, chosen, notes = _for_device(written, chosen, settings)
    cost = unfused_cost(written, fixed_values(written, bound))
    repeats = unfused_cost(chosen, fixed_values(chosen, bound)).repeatable / max(1, cost.repeatable)
    forms = [(written, MOST_FLOPS)]
    if chosen is not written and repeats <= MOST_FLOPS:
        forms.insert(0, (chosen, MOST_FLOPS / max(1.0, repeats)))
    plans = []
    for graph, most_flops in forms:
        plan = _plan_of(replace(traced, graph=graph), layouts, settings, bound, checked, cost, most_flops, notes)
        found = cost_of(plan.steps)
        # Simplification may remove less of this form than of that as written, which is never dropped.
        repeated = graph is not written and found.repeatable > MOST_FLOPS * cost.repeatable
        if not repeated:
            plans.append((found.bytes, plan))
            if found.bytes <= cost.bytes:
                break
    plan = min(plans, key=itemgetter(0))[1]
    check_plan(plan, traced.graph.inputs, bound)
    return plan


def _for_device(written: Graph, chosen: Graph, settings: Settings) -> tuple[Graph, Graph, list[Note]]:
    """Apply the rewrites that are for GPUs alone to both forms of a graph, which may be one; return notes of them."""
    if not settings.on_gpu:
        return written, chosen, []
    rewritten, notes = replace_library_calls(written)
    return rewritten, rewritten if chosen is written else replace_library_calls(chosen)[0], notes


def _plan_of(
    traced: Traced,
    layouts: dict[int, Layout] | None,
    settings: Settings,
    bound: frozenset[int],
    checked: bool,
    cost_as_written: Cost,
    most_flops: float,
    noted: Sequence[Note],
) -> Plan:
    """Build the plan of a traced function with at most `most_flops` times the FLOPs of its graph.

    `cost_as_written` is that of the function as written, but for what bound arguments alone fix; `noted` are the
    rewrites that led to the graph.
    """
    simplified, notes = simplify(traced.graph, settings.on_gpu)
    if may_store_rounded(traced.graph, traced.calls):
        simplified = mark_products(simplified)
    simplified = mark_saved_sums(simplified, traced.saved)
    graph = choose_products(simplified, settings, fixed_values(simplified, bound))
    graph = one_pass_product_variances(graph) if takes_epilogues(settings) else graph
    prepare = None
    if bound:
        fixed = prepackable(graph, fixed_values(graph, bound), settings)
        rest, prepacking = split_off(graph, fixed, "prepacked")
        if not (checked and is_quick(prepacking)):
            graph = rest
            prepare = plan_inputs(f"{traced.name}: prepacked once", prepacking, layouts, settings)

    scheduled = scheduled_for(graph, layouts, settings, None if bound else cost_as_written, most_flops)
    results = zip(scheduled.graph.outputs, traced.axes, strict=True)
    outputs = tuple(Output(n, Axes.of(axes, n.shape)) for n, axes in results)
    plan = Plan(traced.name, settings, scheduled.graph, scheduled, outputs, (*noted, *notes), traced.calls, prepare)
    if plan.workspace > settings.max_workspace:
        planner = BlockPlanner(traced.name, simplified, traced.axes, layouts or {}, settings, bound)
        try:
            plan.blocks, plan.prepare = choose_blocks(planner, plan.workspace)
        except NotRowwise as reason:
            plan.whole = str(reason)
    return plan
