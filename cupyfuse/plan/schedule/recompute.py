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
from typing import NamedTuple

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


class _Limits(NamedTuple):
    """What holds for every partition of a graph.

    Attributes
    ----------
    flops : float
        Of all steps, at most.
    alone : set of Node
        Values, reductions along rows aside, that one step alone computes: see `extrema`.
    """

    flops: float
    alone: Set[Node]


class _Partition(NamedTuple):
    """Steps, with what built them and their cost."""

    scheduler: Scheduler
    steps: list[Step]
    cost: Cost


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
    repeatable = max(most_flops * once.repeatable, 0 if cost_as_written is None else cost_as_written.repeatable)
    limits = _Limits(once.products + repeatable, beside_extrema(graph))
    best: _Partition | None = None
    for candidate in _candidates(graph, once):
        found = _reducing_once(candidate, limits)
        if found is None:
            continue
        found = _reading_back(found, limits)
        if found.cost.bytes <= once.bytes:
            return _storing_less(found, limits)[:2]
        if not found.scheduler.kept and found.cost.repeatable <= once.repeatable:
            # Nothing is shared. The wide dtypes may take the bytes that fusion saves; copies and products are in excess
            # either way.
            rounded = Scheduler(graph, round_stored=True)
            narrow = _with_cost(rounded, rounded.run())
            saved = once.bytes - _bytes_unwidened(found)
            too_wide = found.cost.bytes - narrow.cost.bytes > max(0, saved)
            return (narrow if too_wide else found)[:2]
        if best is None or found.cost.bytes < best.cost.bytes:
            best = found
    if best is None:
        scheduler = storing_everything(graph)
        best = _with_cost(scheduler, scheduler.run())
    return best[:2]


def _reducing_once(scheduler: Scheduler, limits: _Limits, most_steps: int | None = None) -> _Partition | None:
    """Partition with those values stored that one step alone may compute; None if that takes more FLOPs or steps.

    Two kernels may add along rows in another order: `s = x.sum(1)` computed by both would not equal itself in
    `s == s.max()`. Nor would values of 16 bits, which kernels may compute in two forms, equal their extremum.
    """
    while True:
        steps = scheduler.run_within(limits.flops)
        if steps is None:
            return None
        seen: set[Node] = set()
        again: set[Node] = set()
        for step in steps:
            once = {n for n in step.nodes if n in limits.alone or (n.reduction and n.axis == 1)}
            again |= once & seen
            seen |= once
        if not again - scheduler.kept:
            too_many = most_steps is not None and len(steps) > most_steps
            return None if too_many else _with_cost(scheduler, steps)
        scheduler = scheduler.storing(scheduler.kept | again)


def _reading_back(given: _Partition, limits: _Limits) -> _Partition:
    """Let row programs read values that a step stores anyway, if they then move fewer bytes, in no more steps.

    Such values are results, and operands of products. Those of 16 bits are rounded there as in the function as written.
    """
    stored = {base_of(n) for step in given.steps for n in step.outputs}
    repeated: set[Node] = set()  # what row programs compute although another step stores it
    for step in given.steps:
        if step.kind == "RowProgram":
            repeated |= stored.intersection(step.nodes).difference(map(base_of, step.outputs))
    kept = given.scheduler.kept
    if repeated <= kept:
        return given
    found = _reducing_once(given.scheduler.storing(kept | repeated), limits, len(given.steps))
    if found is None or found.cost.bytes >= given.cost.bytes or found.cost.flops > given.cost.flops:
        return given
    return found


def _storing_less(given: _Partition, limits: _Limits) -> _Partition:
    """Compute matrices again in each step that needs them instead of storing them, where the bytes saved are worth it.

    Pointwise ones are tried one by one, the largest first. The steps are no more than before.
    """
    kept = given.scheduler.kept
    matrices = [n for n in g.topological(kept) if n in kept and n.pointwise and 1 not in n.shape]
    if len(matrices) > _MOST_TRIED:
        return given
    best = given
    for node in sorted(matrices, key=lambda n: -n.nbytes):
        without = best.scheduler.storing(best.scheduler.kept - {node})
        found = _reducing_once(without, limits, len(best.steps))
        if found is None:
            continue
        saved = best.cost.bytes - found.cost.bytes
        if saved > 0 and found.cost.flops - best.cost.flops < _FLOPS_A_BYTE * saved:
            best = found
    return best


def storing_everything(graph: Graph) -> Scheduler:
    """Return the partition that stores every value, and so computes none twice."""
    values = g.topological(graph.roots, g.eager_inputs)
    return Scheduler(graph, frozenset(n for n in values if n.op not in ("input", "const")))


def _with_cost(scheduler: Scheduler, steps: list[Step]) -> _Partition:
    """Fill in the bytes of steps, and count their cost."""
    storage = scheduler.storage(steps)
    steps = [with_bytes(step, storage) for step in steps]
    return _Partition(scheduler, steps, cost_of(steps))


def _bytes_unwidened(partition: _Partition) -> int:
    """Count the bytes of steps as if each value were stored in its own dtype."""
    own = {node: node.dtype for node in partition.scheduler.storage(partition.steps)}
    return cost_of(with_bytes(step, own) for step in partition.steps).bytes


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
