"""Build the plan of a traced function: choose its products, split off what is prepacked, cut it into blocks."""

from __future__ import annotations

from ..ir.graph import Graph
from ..rewrite import simplify
from ..settings import Settings
from ..trace import Axes
from .block_choice import choose_blocks
from .block_planner import BlockPlanner
from .plan import Output, Plan, Traced
from .prepacking import fixed_values, plan_inputs, prepackable, scheduled_for, split_off
from .schedule import (
    Cost,
    Layout,
    NotRowwise,
    choose_products,
    one_pass_variances,
    takes_epilogues,
    unfused_cost,
)


def build(
    traced: Traced,
    layouts: dict[int, Layout] | None = None,
    settings: Settings | None = None,
    bound: frozenset[int] = frozenset(),
) -> Plan:
    """Simplify and schedule a traced function; split off what depends on the bound arguments alone.

    Parameters
    ----------
    traced : Traced
    layouts : dict, optional
        Memory layouts by argument number; by default all are contiguous.
    settings : Settings, optional
    bound : frozenset of int
        Argument numbers whose arrays stay the same from call to call.
    """
    settings = settings or Settings()
    simplified, notes = simplify(traced.graph)
    graph = choose_products(simplified, settings, fixed_values(simplified, bound))
    graph = one_pass_variances(graph) if takes_epilogues(settings) else graph
    prepare = None
    if bound:
        fixed = prepackable(graph, fixed_values(graph, bound), settings)
        graph, prepacking = split_off(graph, fixed, "prepacked")
        prepare = plan_inputs(f"{traced.name}: prepacked once", prepacking, layouts, settings)

    def plan_of(graph: Graph, cost_as_written: Cost | None) -> Plan:
        """Schedule a graph with the results of the function, and make it the function's plan."""
        scheduled = scheduled_for(graph, layouts, settings, cost_as_written)
        results = zip(scheduled.graph.outputs, traced.axes, strict=True)
        outputs = tuple(Output(n, Axes.of(axes, n.shape)) for n, axes in results)
        return Plan(traced.name, settings, scheduled.graph, scheduled, outputs, tuple(notes), traced.calls, prepare)

    plan = plan_of(graph, None if bound else unfused_cost(traced.graph))
    if plan.workspace > settings.max_workspace:
        planner = BlockPlanner(traced.name, simplified, traced.axes, layouts or {}, settings, bound)
        try:
            blocks, prepare = choose_blocks(planner, plan.workspace)
        except NotRowwise as reason:
            plan.whole = str(reason)
        else:
            if blocks is not None:
                plan.blocks, plan.prepare = blocks, prepare
    return plan
