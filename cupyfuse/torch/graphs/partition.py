"""Partition a captured graph into fused chains and single operations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import rules
from ..chains.chain import Call, Chain
from ..explain import VIEW
from ..rules.symbols import Ref, Size, size_hint, substitute, symbolic
from .captured import CapturedGraph
from .clusters import Cluster, Clusters


@dataclass(frozen=True)
class FusedChain:
    """A chain in a captured graph, whose values and operations have numbers.

    Attributes
    ----------
    chain : Chain
    inputs, outputs : the values that it reads and returns
    members : the operations that it replaces
    views : the members that PyTorch runs again after it, since their results share memory with others
    sizes : the nodes of the chain's symbolic sizes
    note : the judge's verdict, for `explain`
    saved : the seconds that it saves by the judge's estimate; infinite where its memory is what it saves
    """

    chain: Chain
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    members: tuple[int, ...]
    views: tuple[int, ...]
    sizes: tuple[Any, ...] = ()
    note: str = ""
    saved: float = 0.0

    def with_hints(self) -> Chain:
        """Return the chain for the sizes that it was captured with."""
        return self.chain.with_sizes(tuple(map(size_hint, self.sizes)))


@dataclass
class Partition:
    """A captured graph as chains and single operations.

    Attributes
    ----------
    captured : CapturedGraph
    items : in the order in which they run: a `FusedChain`, or the number of an operation
    unfused : for operations that are left to PyTorch, why
    failure : why the whole graph is left to PyTorch, without operations here; empty otherwise
    """

    captured: CapturedGraph
    items: list[FusedChain | int]
    unfused: dict[int, str]
    failure: str = ""

    @property
    def chains(self) -> list[FusedChain]:
        return [item for item in self.items if isinstance(item, FusedChain)]

    @property
    def reordered_in_vain(self) -> set[str]:
        """The names of the nodes none of whose reordered operations is in a chain (`Operation.reordered`)."""
        operations = self.captured.operations
        computing = {k: o.reordered for k, o in enumerate(operations) if o.reordered and not o.view}
        fused = {computing[k] for chain in self.chains for k in chain.members if k in computing}
        return set(computing.values()) - fused


@dataclass(frozen=True)
class Verdict:
    """Whether a chain is worth running, with the reason as text, and the seconds that it saves by estimate.

    With `whole` it is worth that for the memory of its products, whatever its parts would save without them.
    """

    gains: bool
    text: str = ""
    saved: float = 0.0
    whole: bool = False


# Takes a chain, its inputs and outputs as fake tensors, and how many views rewrites have inserted in it and around it.
Judge = Callable[[Chain, Sequence[Any], Sequence[Any], int], Verdict]


def judge_without_costs(chain: Chain, inputs: Sequence[Any], outputs: Sequence[Any], views: int = 0) -> Verdict:
    """Accept chains of several operations, or of one reduction, whatever their time: no cost outweighs them."""
    working = [rules.RULES[c.rule] for c in chain.calls if not rules.RULES[c.rule].no_op]
    if len(working) > 1 or working[0].reduces:
        return Verdict(True, saved=math.inf)
    if working[0].product:
        single = str(inputs[0].dtype) == "torch.float32" and inputs[0].device.type == "cuda"
        return Verdict(single, "a product alone is cuBLAS's either way", math.inf)
    return Verdict(False, "one operation alone gains nothing")


def partition(captured: CapturedGraph, judge: Judge = judge_without_costs) -> Partition:
    """Partition a captured graph into the chains that gain and what is left to PyTorch.

    Parameters
    ----------
    captured : CapturedGraph
    judge : callable
        Says of each chain whether it is worth running.
    """
    clusters = Clusters(captured)
    shared = _shared_parts(clusters)
    if shared:
        clusters = Clusters(captured, shared)
    judged = _judge_clusters(clusters, judge)
    apart = _products_apart(clusters, judged, judge, shared)
    if len(apart) > len(shared):
        clusters = Clusters(captured, apart)
        judged = _judge_clusters(clusters, judge)
    parts = _parts_apart(clusters, judged, judge, apart)
    if parts:
        clusters = Clusters(captured, apart | parts)
        judged = _judge_clusters(clusters, judge)
    losing = [(cluster, verdict.text) for cluster, _, verdict in judged if not verdict.gains]
    for cluster, reason in losing:
        clusters.leave(cluster, reason)
    # What is left to PyTorch reads results of other chains, which may have been no outputs before.
    used = clusters.outside_uses()
    fused: dict[int, FusedChain] = {}
    for cluster, chain, verdict in judged:
        if verdict.gains:
            chain = _extract_chain(clusters, cluster, used) if losing else chain
            assert chain is not None
            saved = math.inf if verdict.whole else verdict.saved
            fused.update(dict.fromkeys(cluster.members, replace(chain, note=verdict.text, saved=saved)))
    return Partition(captured, _topological_order(clusters, fused), clusters.unfused)


# A cluster, its chain if it has one, and whether that gains.
_Judged = tuple[Cluster, FusedChain | None, Verdict]


def _judge_clusters(clusters: Clusters, judge: Judge) -> list[_Judged]:
    """Judge all clusters of a graph."""
    used = clusters.outside_uses()
    judged: list[_Judged] = []
    for cluster in clusters.clusters:
        chain = _extract_chain(clusters, cluster, used)
        judged.append((cluster, chain, _judge_cluster(clusters, cluster, chain, judge)))
    return judged


def _shared_parts(clusters: Clusters) -> dict[int, str]:
    """Find the operations that cut a chain's input into parts some of which are read elsewhere, too.

    PyTorch puts the gradients of all parts together in one copy; that of a chain's part alone would be a copy more.
    """
    used, found = clusters.outside_uses(), {}
    for k, cluster in clusters.cluster_of.items():
        call, operation = clusters.fusible[k].call, clusters.captured.operations[k]
        several = rules.RULES[call.rule].several and rules.takes_part(call.rule, call.arguments)
        if several and operation.read[0] in cluster.inputs and not used.isdisjoint(operation.results):
            found[k] = VIEW
    return found


def _products_apart(
    clusters: Clusters, judged: Sequence[_Judged], judge: Judge, shared: dict[int, str]
) -> dict[int, str]:
    """Choose the products that are left to PyTorch for the sake of what is between them, and say why.

    `shared` are left to PyTorch anyway, and among what is returned.

    In 16 bits PyTorch's products, which add their biases, may be faster than a whole chain; a residual and a norm
    between two of them are not.
    """

    def rule_of(member: int) -> rules.Rule:
        return rules.RULES[clusters.fusible[member].call.rule]

    mixed: list[tuple[Cluster, list[int], Verdict]] = []
    for cluster, _, verdict in judged:
        products = [k for k in cluster.members if rule_of(k).product]
        between_them = any(not rule_of(k).product and not rule_of(k).no_op for k in cluster.members)
        if products and between_them and not verdict.whole:
            mixed.append((cluster, products, verdict))
    if not mixed:
        return shared
    tried = dict.fromkeys((k for _, products, _ in mixed for k in products), "tried")
    between = Clusters(clusters.captured, shared | tried)
    gaining = [(set(part.members), found.saved) for part, _, found in _judge_clusters(between, judge) if found.gains]
    apart = dict(shared)
    for cluster, products, verdict in mixed:
        parts = [saved for members, saved in gaining if members.issubset(cluster.members)]
        if parts and sum(parts) > (verdict.saved if verdict.gains else 0.0):
            reason = f"what is around it gains more alone; as one chain {verdict.text}"
            apart.update(dict.fromkeys(products, reason))
    return apart


def _parts_apart(clusters: Clusters, judged: Sequence[_Judged], judge: Judge, apart: dict[int, str]) -> dict[int, str]:
    """Choose the parts of rows, and rows side by side, whose chain gains nothing where what is around them does.

    They are left to PyTorch; says why. What is `apart` is left to it already.
    """

    def is_part(member: int) -> bool:
        call = clusters.fusible[member].call
        return rules.moves_parts(call.rule, call.arguments)

    losing = [(c, [k for k in c.members if is_part(k)], v) for c, _, v in judged if not (v.gains or c.no_op)]
    chosen = [k for _, parts, _ in losing for k in parts]
    if not chosen:
        return {}
    around = Clusters(clusters.captured, apart | dict.fromkeys(chosen, "tried"))
    gaining = [set(part.members) for part, _, found in _judge_clusters(around, judge) if found.gains]
    return {
        k: f"what is around it gains alone; as one chain {verdict.text}"
        for cluster, parts, verdict in losing
        if any(members.issubset(cluster.members) for members in gaining)
        for k in parts
    }


def _base_of_view(clusters: Clusters, number: int) -> int | None:
    """Return the value that a fusible operation returns this one as a view of; None if none does."""
    k = clusters.producer.get(number)
    if k is None or k not in clusters.fusible:
        return None
    operation = clusters.captured.operations[k]
    if not operation.view or not operation.read:
        return None
    base = operation.read[0]
    return base if clusters.storages[base] == clusters.storages[number] else None


def _judge_cluster(clusters: Clusters, cluster: Cluster, fused: FusedChain | None, judge: Judge) -> Verdict:
    """Judge a cluster by its chain, if it has one."""
    if cluster.no_op:
        return Verdict(False, "nothing is computed")
    if fused is None:
        return Verdict(False, "its results are not needed")
    tensors = clusters.captured.tensors
    inputs, outputs = ([tensors[n] for n in numbers] for numbers in (fused.inputs, fused.outputs))
    return judge(fused.with_hints(), inputs, outputs, _count_inserted_views(clusters, fused))


def _count_inserted_views(clusters: Clusters, fused: FusedChain) -> int:
    """Count the views that rewrites have inserted in a chain, and those of its inputs and outputs.

    Those in a chain count too: estimates charge PyTorch for them, which would not make them.
    """
    outputs = set(fused.outputs)
    inside_or_before = {*fused.members, *(clusters.producer.get(n) for n in fused.inputs)}
    inserted = clusters.captured.inserted_views
    return sum(k in inside_or_before or not outputs.isdisjoint(o.read) for k, o in inserted.items())


def _extract_chain(clusters: Clusters, cluster: Cluster, used: set[int]) -> FusedChain | None:
    """Make the chain of a cluster, whose outputs are the values in `used`; None if only views are used."""
    outputs, views = _outputs_and_views(clusters, cluster, [n for n in dict.fromkeys(cluster.produced) if n in used])
    if not outputs and not cluster.updates:
        return None
    numbers = {n: k for k, n in enumerate(dict.fromkeys((*cluster.inputs, *cluster.produced)))}
    nodes = list(dict.fromkeys(size.symbol for c in cluster.calls for size in symbolic(c.arguments)))

    def renumber(call: Call) -> Call:
        arguments = (
            substitute(a, lambda ref: Ref(numbers[ref.number]), lambda size: Size(nodes.index(size.symbol)))
            for a in call.arguments
        )
        return Call(call.rule, tuple(arguments), tuple(numbers[n] if n >= 0 else -1 for n in call.results))

    updates = tuple((numbers[target], numbers[n]) for target, n in cluster.updates)
    changing = {target for target, _ in updates}
    parameters = clusters.captured.parameters
    fixed = frozenset(k for k, n in enumerate(cluster.inputs) if n in parameters and k not in changing)
    names = tuple(map(clusters.input_name, cluster.inputs))
    calls = tuple(map(renumber, cluster.calls))
    state = clusters.changing_inputs
    copied = frozenset(k for k, n in enumerate(cluster.inputs) if clusters.storages[n] in state and k not in changing)
    chain = Chain(names, calls, tuple(numbers[n] for n in outputs), updates, fixed, len(nodes), copied)
    members = tuple(sorted(cluster.members))
    return FusedChain(chain, tuple(cluster.inputs), tuple(outputs), members, tuple(views), tuple(nodes))


def _outputs_and_views(clusters: Clusters, cluster: Cluster, wanted: Iterable[int]) -> tuple[list[int], list[int]]:
    """Split the wanted values of a chain into outputs, and operations that return views of these or of its inputs.

    PyTorch runs the latter again, so that views share memory and have PyTorch's strides.
    """
    outputs: dict[int, None] = {}
    views: dict[int, None] = {}
    produced = set(cluster.produced)

    def place(number: int) -> None:
        """Add a value to `outputs`; or the view that returns it to `views`, and first place what that is a view of."""
        base = _base_of_view(clusters, number)
        if base is None:
            outputs[number] = None
            return
        if base in produced:
            place(base)
        views[clusters.producer[number]] = None

    for number in wanted:
        place(number)
    return list(outputs), list(views)


def _topological_order(clusters: Clusters, fused: dict[int, FusedChain]) -> list[FusedChain | int]:
    """Sort chains and single operations, each after those it needs, ties in the order of the graph."""
    # A chain goes by the number of its last operation.
    item_of = {k: (fused[k].members[-1] if k in fused else k) for k in range(len(clusters.captured.operations))}
    needs: dict[int, set[int]] = {item: set() for item in item_of.values()}
    for k, item in item_of.items():
        needs[item].update(item_of[b] for b in clusters.before[k] if item_of[b] != item)
    needed_by: dict[int, list[int]] = {}
    for item, others in needs.items():
        for other in others:
            needed_by.setdefault(other, []).append(item)
    waiting = {item: len(others) for item, others in needs.items()}
    free = [item for item, count in waiting.items() if not count]
    heapq.heapify(free)
    order: list[FusedChain | int] = []
    while free:
        item = heapq.heappop(free)
        order.append(fused.get(item, item))
        if item in fused:
            order += fused[item].views
        for later in needed_by.get(item, ()):
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(free, later)
    assert not any(waiting.values()), "chains depend on each other in a circle"
    return order
