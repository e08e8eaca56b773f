"""Choice between storing a value and recomputing it in every step that needs it.

A step computes what it needs from what is in memory. That is cheap for a few pointwise operations; where reductions
along rows and columns alternate, each step would start again from the arguments, and the cost would grow with the
square of the program's length. So the partition without any stored values is taken if it is within the bounds of
`cost`, but for reductions along rows, which one step alone computes. Otherwise every value that several steps compute
is stored by the first of them, and little is computed twice; matrices among these are computed again all the same where
that moves fewer bytes for few FLOPs. Where even that is beyond the bounds, every value is stored.

Stored values of 16 bits keep their wider dtype, unless that alone takes more bytes than the operations one by one: then
they are rounded, as these round them.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from .cost import MOST_FLOPS, Cost, cost_of, unfused_cost
from .extrema import beside_extrema
from .memory import base_of
from .partition import Scheduler
from .placement import Placement, StepKey
from .steps import Step, with_bytes

# Storing a value moves its readers to later steps, which may then share others: how often to look again.
_ROUNDS = 8
# Share of the FLOPs that may go into computing vectors again, which saves launches of their own.
_VECTORS = 1 / 8
# Up to so many stored matrices a partition without each is tried, which takes time; of more, none. And the FLOPs that a
# byte is worth: an H200 does fourteen in the time in which it moves one, of which row programs reach a part.
_MOST_TRIED, _FLOPS_A_BYTE = 16, 3


def best_partition(
    graph: Graph, cost_as_written: Cost | None, most_flops: float = MOST_FLOPS
) -> tuple[Scheduler, list[Step]]:
    """Partition a graph within the bounds of `cost` with the fewest values stored; else with the fewest bytes moved.

    Parameters
    ----------
    graph : Graph
    cost_as_written : Cost or None
        Of the function as written, which may compute a value twice that the graph holds once.
    most_flops : float
        How many times the FLOPs of the graph the steps may have.

    Returns
    -------
    scheduler : Scheduler
    steps : list of Step
    """
    once = unfused_cost(graph)
    limit = max(most_flops * once.repeatable, 0 if cost_as_written is None else cost_as_written.repeatable)
    best: tuple[Scheduler, list[Step], Cost] | None = None
    for candidate in _candidates(graph, once):
        scheduler, within = _reducing_once(candidate, once.products + limit)
        if within is None:
            continue
        scheduler, steps, cost = _reading_back(scheduler, within, once.products + limit)
        if cost.bytes <= once.bytes:
            return _storing_less(scheduler, steps, cost, once.products + limit)
        if not scheduler.kept and cost.repeatable <= once.repeatable:
            # Nothing is shared. The wide dtypes may take the bytes that fusion saves; copies and products are in excess
            # either way.
            rounded = Scheduler(graph, round_stored=True)
            rounded_steps, rounded_cost = _with_cost(rounded, rounded.run())
            saved = once.bytes - _bytes_unwidened(scheduler, steps)
            too_wide = cost.bytes - rounded_cost.bytes > max(0, saved)
            return (rounded, rounded_steps) if too_wide else (scheduler, steps)
        if best is None or cost.bytes < best[2].bytes:
            best = scheduler, steps, cost
    if best is None:
        scheduler = storing_everything(graph)
        return scheduler, _with_cost(scheduler, scheduler.run())[0]
    return best[:2]


def _reducing_once(scheduler: Scheduler, most_flops: float) -> tuple[Scheduler, list[Step] | None]:
    """Store the reductions along rows that several steps compute; return the steps, None if beyond `most_flops`.

    Two kernels may add in another order: `s = x.sum(1)` computed by both would not equal itself in `s == s.max()`. So
    may values of 16 bits that are compared with their extremum.
    """
    compared = beside_extrema(scheduler.graph)
    while True:
        steps = scheduler.run_within(most_flops)
        if steps is None:
            return scheduler, None
        seen: set[Node] = set()
        again: set[Node] = set()
        for step in steps:
            once = {n for n in step.nodes if n in compared or (n.reduction and n.axis == 1)}
            again |= once & seen
            seen |= once
        if not again - scheduler.kept:
            return scheduler, steps
        scheduler = Scheduler(scheduler.graph, scheduler.kept | again, scheduler.round_stored)


def _reading_back(scheduler: Scheduler, steps: list[Step], most_flops: float) -> tuple[Scheduler, list[Step], Cost]:
    """Let row programs read values that a step stores anyway, if they then move fewer bytes, in no more steps.

    Such values are results, and operands of products. Those of 16 bits are rounded there as in the function as written.
    """
    steps, cost = _with_cost(scheduler, steps)
    stored = {base_of(n) for step in steps for n in step.outputs}
    repeated: set[Node] = set()  # what row programs compute although another step stores it
    for step in steps:
        if step.kind == "RowProgram":
            repeated |= stored.intersection(step.nodes).difference(map(base_of, step.outputs))
    if repeated <= scheduler.kept:
        return scheduler, steps, cost
    reading = Scheduler(scheduler.graph, scheduler.kept | repeated, scheduler.round_stored)
    reading, within = _reducing_once(reading, most_flops)
    if within is not None and len(within) <= len(steps):
        within, found = _with_cost(reading, within)
        if found.bytes < cost.bytes and found.flops <= cost.flops:
            return reading, within, found
    return scheduler, steps, cost


def _storing_less(
    scheduler: Scheduler, steps: list[Step], cost: Cost, most_flops: float
) -> tuple[Scheduler, list[Step]]:
    """Compute matrices again in each step that needs them instead of storing them, where the bytes saved are worth it.

    Pointwise ones are tried one by one, the largest first. The steps have at most `most_flops` FLOPs, and are no more
    than before.
    """
    matrices = [n for n in g.topological(scheduler.kept) if n in scheduler.kept and n.pointwise and 1 not in n.shape]
    if len(matrices) > _MOST_TRIED:
        return scheduler, steps
    for node in sorted(matrices, key=lambda n: -n.nbytes):
        without = Scheduler(scheduler.graph, scheduler.kept - {node}, scheduler.round_stored)
        without, within = _reducing_once(without, most_flops)
        if within is None or len(within) > len(steps):
            continue
        within, found = _with_cost(without, within)
        saved = cost.bytes - found.bytes
        if saved > 0 and found.flops - cost.flops < _FLOPS_A_BYTE * saved:
            scheduler, steps, cost = without, within, found
    return scheduler, steps


def storing_everything(graph: Graph) -> Scheduler:
    """Return the partition that stores every value, and so computes none twice."""
    values = g.topological(graph.roots, g.eager_inputs)
    return Scheduler(graph, frozenset(n for n in values if n.op not in ("input", "const")))


def _with_cost(scheduler: Scheduler, steps: list[Step]) -> tuple[list[Step], Cost]:
    """Fill in the bytes of steps; return them with their total cost."""
    storage = scheduler.storage(steps)
    steps = [with_bytes(step, storage) for step in steps]
    return steps, cost_of(steps)


def _bytes_unwidened(scheduler: Scheduler, steps: list[Step]) -> int:
    """Count the bytes of steps as if each value were stored in its own dtype."""
    own = {node: node.dtype for node in scheduler.storage(steps)}
    return cost_of(with_bytes(step, own) for step in steps).bytes


def _candidates(graph: Graph, once: Cost) -> Iterator[Scheduler]:
    """Yield partitions that store nothing more than they must, then shared values too, then those rounded.

    `once` is the cost of the graph with each value computed once.
    """
    scheduler = Scheduler(graph)
    yield scheduler
    for _ in range(_ROUNDS):
        shared = _shared_values(scheduler.placement, _VECTORS * once.repeatable) - scheduler.kept
        if not shared:
            break
        scheduler = Scheduler(graph, scheduler.kept | shared)
    yield scheduler
    yield Scheduler(graph, scheduler.kept, round_stored=True)


def _shared_values(placement: Placement, spare: float) -> Set[Node]:
    """Find the values that several steps compute, each found value being stored by the first step that can compute it.

    Vectors are recomputed, and so not found, as long as that costs no more than `spare` FLOPs in all.
    """
    found: set[Node] = set()
    keys: dict[Node, dict[StepKey, None]] = {}  # the steps that compute each value

    def require(node: Node) -> None:
        node = base_of(node)
        if node.op not in ("input", "const"):
            keys.setdefault(node, {})[placement.home_step(node)] = None

    for root in placement.graph.roots:
        require(root)
    for node in reversed(list(g.topological(placement.graph.roots))):
        steps = keys.pop(node, {})
        if len(steps) > 1 and not placement.in_memory(node):
            home = placement.home_step(node)
            again = (len(steps) - 1) * g.flops(node)
            vector = 1 in node.shape and not placement.after_reduction[node]
            if vector and home not in steps and again <= spare:
                spare -= again
            elif again or home in steps or _is_smaller_cast(node, placement):
                found.add(node)
                steps = {home: None}
        for key in steps:
            for i in (*g.eager_inputs(node), *placement.guard_only_reads(node, placement.live_set)):
                if i.op == "const":
                    continue
                if placement.reads(key, i):
                    require(i)
                else:
                    keys.setdefault(i, {})[key] = None
    return found


def _is_smaller_cast(node: Node, placement: Placement) -> bool:
    """Whether a value is a cast of a computed one that takes no more memory, and so is the better one to store."""
    if node.op != "cast" or placement.in_memory(node.inputs[0]):
        return False
    return dtypes.ITEMSIZE[node.dtype] <= dtypes.ITEMSIZE[dtypes.compute_dtype(node.inputs[0].dtype)]
