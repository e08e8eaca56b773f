"""From a traced function to its plan: how products run, what is prepared once, what is computed in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..rewrite import simplify
from ..settings import Settings
from .plan import Blocks, Output, Plan, Traced
from .schedule import Layout, NotByRows, choose_products, resolve, rounded, rows_apart, schedule, with_rows
from .schedule.blocks import LEAST_ROWS
from .schedule.memory import insert_copies

# What reads its operands from memory, in the dtype in which they are stored.
_OWN_DTYPE = ("matmul", "split_matmul", "split", "copy")


def build(
    traced: Traced,
    layouts: dict[int, Layout] | None = None,
    settings: Settings | None = None,
    bound: frozenset[int] = frozenset(),
) -> Plan:
    """Simplify and schedule a traced function; with bound arguments, split off what can be prepared once."""
    settings = settings or Settings()
    graph, notes = simplify(traced.graph)
    graph = choose_products(graph, settings, fixed_values(graph, bound))
    prepare = None
    if bound:
        graph, prepared = split_fixed(graph, _kept(graph, fixed_values(graph, bound), settings), "prepared")
        prepare = _preparing(f"{traced.name}: prepared once", prepared, layouts, settings)

    def planned(graph: Graph) -> Plan:
        done = schedule(graph, layouts)
        outputs = tuple(Output(n, axes) for n, axes in zip(done.graph.outputs, traced.axes, strict=True))
        return Plan(traced.name, settings, done.graph, done, outputs, tuple(notes), traced.calls, prepare)

    plan = planned(graph)
    if plan.workspace > settings.max_workspace:
        try:
            plan.blocks = _in_blocks(graph, plan, planned, layouts)
        except NotByRows as reason:
            plan.whole = str(reason)
    return plan


def _preparing(name: str, graph: Graph, layouts: dict[int, Layout] | None, settings: Settings) -> Plan | None:
    """The plan of values that another plan takes as inputs."""
    if not graph.outputs:
        return None
    done = schedule(graph, layouts)
    return Plan(name, settings, done.graph, done, tuple(Output(n, (0, 1)) for n in done.graph.outputs), (), ())


def _in_blocks(
    graph: Graph, plan: Plan, planned: Callable[[Graph], Plan], layouts: dict[int, Layout] | None
) -> Blocks | None:
    """Blocks of as many rows as the workspace allows, all of nearly one size; None if what is cut is small enough."""
    graph = insert_copies(graph, layouts or {})
    together = rows_apart(graph)
    if any(o.axes[:1] != (0,) for o in plan.outputs):
        raise NotByRows("the rows of a result are not along its first dimension")
    graph, common = split_fixed(graph, _without(graph, together), "common", cheap=False)
    together = rows_apart(graph)
    total, most = graph.outputs[0].shape[0], plan.settings.max_workspace
    whole, one = (planned(with_rows(graph, together, n)).workspace for n in (total, 1))
    if whole <= most:
        return None
    if one > most:
        raise NotByRows("one row takes more than that")
    rows = max(1, min(total, 1 + (most - one) // max(1, (whole - one) // max(1, total - 1))))
    if rows >= LEAST_ROWS:
        rows -= rows % LEAST_ROWS
        even = -(-total // -(-total // rows))
        rows = min(rows, -(-even // LEAST_ROWS) * LEAST_ROWS)
    while rows > 1 and planned(with_rows(graph, together, rows)).workspace > most:
        rows -= -(-rows // 16)  # halves come in groups of eight rows
    rest = total % rows
    return Blocks(
        total,
        rows,
        planned(with_rows(graph, together, rows)),
        planned(with_rows(graph, together, rest)) if rest else None,
        _preparing(f"{plan.name}: for all blocks", common, layouts, plan.settings),
        frozenset(n.argument for n in graph.inputs if n in together),
    )


def _without(graph: Graph, together: set[Node]) -> set[Node]:
    """The values that depend on no row in particular."""
    found: set[Node] = set()
    for node in g.topological(graph.roots):
        real = [i for i in node.inputs if i.op != "const"]
        if (node.op == "input" and node not in together) or (real and all(i in found for i in real)):
            found.add(node)
    return found


def fixed_values(graph: Graph, bound: frozenset[int]) -> set[Node]:
    """The values that depend on bound arguments alone; never on one that the call changes in place."""
    changing = {arg for arg, _ in graph.effects}
    fixed: set[Node] = set()
    for node in g.topological(graph.roots):
        real = [i for i in node.inputs if i.op != "const"]
        argument = node.op == "input" and node.argument in bound - changing
        if argument or (real and all(i in fixed for i in real)):
            fixed.add(node)
    return fixed


def _kept(graph: Graph, fixed: set[Node], settings: Settings) -> set[Node]:
    """The fixed values that are kept from call to call, where they are needed: all, or all but halves."""
    if settings.keep_halves:
        return fixed
    users = g.users(graph.roots)
    return {n for n in fixed if n.op != "split" or all(u in fixed for u in users.get(n, ()))}


def split_fixed(graph: Graph, static: set[Node], name: str, cheap: bool = True) -> tuple[Graph, Graph]:
    """Split off fixed values, such as those that depend on bound arguments alone.

    Returns the graph of the rest, in which those that it needs are further inputs (numbered after the arguments), and
    the graph that prepares them. Without `cheap`, pointwise work on arguments stays with what follows, unless that is a
    product.
    """
    reducing: dict[Node, bool] = {}
    for node in g.topological(graph.roots):
        reducing[node] = node.reduction or node.op in _OWN_DTYPE or any(reducing[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if n in static else g.eager_inputs(n)))
    wanted: dict[Node, bool] = {}  # value -> whether it is needed in its own dtype, not a wider one
    for root in map(resolve, graph.roots):
        if root in static and root.op not in ("input", "const"):
            wanted[root] = True
    for node in g.topological(graph.roots, lambda n: () if n in static else n.inputs):
        if node in static:
            continue
        for i in node.inputs:
            base = resolve(i)
            # A guard's exact form computes cheap things again for the rare element that needs them.
            if (
                base in static
                and base.op != "input"
                and (reducing[base] or (i in eager and (cheap or node.op in _OWN_DTYPE)))
            ):
                wanted[base] = wanted.get(base, False) or node.op in _OWN_DTYPE
    first = len(graph.inputs)
    inputs = list(graph.inputs)
    mapping: dict[Node, Node] = {}
    for k, (node, own) in enumerate(wanted.items()):
        dtype = node.dtype if own else dtypes.compute(node.dtype)
        ndim = 2 if node.shape[0] > 1 else 1
        mapping[node] = g.argument(first + k, f"{name}{k}", node.shape, dtype, ndim)
        inputs.append(mapping[node])
    # What is stored rounded is rounded for what else is prepared from it.
    read = {i for node in g.topological(wanted) for i in node.inputs}
    halves = {n for n, own in wanted.items() if own and n in read and dtypes.compute(n.dtype) != n.dtype}
    prepared = rounded(Graph(graph.inputs, list(wanted)), halves).outputs
    outputs = [g.cast(node, mapping[n].dtype) for n, node in zip(wanted, prepared, strict=True)]
    done: dict[Node, Node] = dict(mapping)
    for node in g.topological(graph.roots, lambda n: () if n in mapping else n.inputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    main = graph.replace(done)
    main.inputs = inputs
    needed = set(g.topological(outputs))
    return main, Graph([n for n in graph.inputs if n in needed], outputs)
