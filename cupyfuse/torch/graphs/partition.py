"""From a record to chains: which operations run together, and why the others do not.

Operations that `rules` knows grow together along the data that they hand on, as long as no operation that stays with
PyTorch has to run between them, and as long as the graph that they make together can be traced.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import TraceError
from ...trace import Trace
from .. import rules
from ..chains.chain import Call, Chain, sizes, traced_call
from ..chains.runtime import dtype_name
from ..explain import VIEW
from ..rules.symbols import Ref, Size, hints, references, symbolic
from ..rules.values import Value
from .captured import CapturedGraph, Operation
from .semantics import GraphSemantics


@dataclass
class Cluster:
    """Operations that run together, traced so far."""

    members: list[int]
    trace: Trace
    values: dict[int, Value]
    inputs: list[int]
    calls: list[Call]
    updates: list[tuple[int, int]]


@dataclass(frozen=True)
class FusedChain:
    """A chain in a record.

    Attributes
    ----------
    chain : Chain
    inputs : numbers of the record's values that are its inputs
    outputs : numbers of those that are its outputs
    members : numbers of the record's operations that it replaces
    views : those among them that PyTorch makes after it once more: their results share memory with others
    sizes : the nodes of the chain's symbolic sizes
    note : what the judge said in its favour, for `explain`
    """

    chain: Chain
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    members: tuple[int, ...]
    views: tuple[int, ...]
    sizes: tuple[Any, ...] = ()
    note: str = ""


@dataclass
class Partition:
    """A record cut into chains and single operations.

    Attributes
    ----------
    captured : CapturedGraph
    items : in the order in which they run: a `FusedChain`, or the number of an operation
    left : for operations that stay with PyTorch, why
    """

    captured: CapturedGraph
    items: list[FusedChain | int]
    left: dict[int, str] = field(default_factory=dict)

    @property
    def chains(self) -> list[FusedChain]:
        return [item for item in self.items if isinstance(item, FusedChain)]


@dataclass(frozen=True)
class Verdict:
    """Whether a chain is worth running, and why, for people to read."""

    gains: bool
    text: str = ""


# Judges a chain by what its inputs and outputs are: fake tensors.
Judge = Callable[[Chain, Sequence[Any], Sequence[Any]], Verdict]


def anything(chain: Chain, inputs: Sequence[Any], outputs: Sequence[Any]) -> Verdict:
    """Judge every chain of two operations or one reduction worth running, whatever it costs."""
    working = [c.rule for c in chain.calls if not rules.RULES[c.rule].idle]
    if len(working) > 1 or rules.RULES[working[0]].reduces:
        return Verdict(True)
    if rules.RULES[working[0]].product:
        single = str(inputs[0].dtype) == "torch.float32" and inputs[0].device.type == "cuda"
        return Verdict(single, "a product alone is cuBLAS's either way")
    return Verdict(False, "one operation alone gains nothing")


def partition(captured: CapturedGraph, judge: Judge = anything) -> Partition:
    """Cut a record into chains and what is left to PyTorch.

    Parameters
    ----------
    captured : CapturedGraph
    judge : callable
        Says of each chain whether it is worth running.
    """
    return _Partitioner(captured, judge).run()


class _Partitioner(GraphSemantics):
    def __init__(self, captured: CapturedGraph, judge: Judge):
        super().__init__(captured)
        self.judge = judge
        self.clusters: list[Cluster] = []
        self.home: dict[int, Cluster] = {}

    # Growing clusters
    def run(self) -> Partition:
        changed = self._changed_outside()
        by_strides = {
            self.storages[n] for o in self.captured.operations if o.name.startswith("as_strided") for n in o.read
        }
        for k, operation in enumerate(self.captured.operations):
            if k not in self.known:
                continue
            if operation.view and self.storages[operation.results[0]] in changed:
                self.left[k] = "its memory is changed in place elsewhere"
                continue
            if any(self.storages[n] in by_strides for n in operation.results):
                self.left[k] = "its memory is looked at by strides"
                continue
            self._place(k, operation)
        return self._finish()

    def _changed_outside(self) -> set[int]:
        found: set[int] = set()
        for k, operation in enumerate(self.captured.operations):
            if k not in self.known:
                found |= {self.storages[n] for n in operation.written}
        return found

    def _place(self, k: int, operation: Operation) -> None:
        """Put an operation in the cluster of what it reads, or in one of its own."""
        near: list[Cluster] = []
        for number in operation.read:
            cluster = self.home.get(self.producer.get(number, -1))
            if cluster is not None and cluster not in near:
                near.append(cluster)
        if operation.view and not near and not self._of_source(operation):
            self.left[k] = VIEW
            return
        choices: list[list[Cluster]] = [near] if near else []
        choices += [[c] for c in reversed(near)] if len(near) > 1 else []
        reason = ""
        for choice in [*choices, []]:
            if choice and not self._convex(k, choice):
                reason = "what runs between has to stay with PyTorch"
                continue
            try:
                merged = self._merged(choice, k)
            except (TraceError, ValueError, TypeError) as error:
                reason = str(error).splitlines()[0]
                continue
            self.clusters = [c for c in self.clusters if c not in choice] + [merged]
            for member in merged.members:
                self.home[member] = merged
            return
        self.left[k] = reason

    def _of_source(self, operation: Operation) -> bool:
        return all(n in self.captured.parameters for n in operation.read)

    def _merged(self, clusters: Sequence[Cluster], k: int) -> Cluster:
        """One cluster of several and one more operation; raises TraceError where they cannot be traced together."""
        if len(clusters) == 1:
            old = clusters[0]
            trace = old.trace
            merged = Cluster([*old.members], trace, dict(old.values), [*old.inputs], [*old.calls], [*old.updates])
            count = len(trace.inputs), len(trace.calls)
            try:
                self._add(merged, k)
            except BaseException:
                del trace.inputs[count[0] :], trace.calls[count[1] :]
                raise
            return merged
        merged = Cluster([], Trace(), {}, [], [], [])
        for member in sorted({k, *(m for c in clusters for m in c.members)}):
            self._add(merged, member)
        return merged

    def _add(self, cluster: Cluster, k: int) -> None:
        known = self.known[k]
        call = known.call
        try:
            self._call(cluster, call)
            self._check_results(cluster, call, k)
            cluster.calls.append(call)
        except (TraceError, ValueError, TypeError):
            if not self.captured.autocast:
                raise
            self._call_autocast(cluster, call, k)
        for target, number in known.updates:
            self._check(cluster, number)
            cluster.updates.append((target, number))
        cluster.members.append(k)

    def _call(self, cluster: Cluster, call: Call) -> None:
        def value(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return self._value(cluster, argument.number)
            if isinstance(argument, Size):
                return int(argument.of.meta["example_value"].node.hint)
            return tuple(map(value, argument)) if isinstance(argument, tuple) else argument

        result = traced_call(cluster.trace, call.rule, [value(a) for a in call.arguments])
        results = result if isinstance(result, tuple) else (result,)
        for number, each in zip(call.results, results, strict=False):
            if number >= 0:
                cluster.values[number] = each

    def _call_autocast(self, cluster: Cluster, call: Call, k: int) -> None:
        """The operation on operands in the dtype that autocast computes in: that of its result."""
        dtype = dtype_name(self.captured.tensors[call.results[0]].dtype)
        casts: dict[int, int] = {}
        for number in references(call.arguments):
            value = self._value(cluster, number)
            if value.dtype != dtype and value.dtype not in ("bool", "int64"):
                casts[number] = self.fresh(number)
                cast = Call("to", (Ref(number), dtype), (casts[number],))
                self._call(cluster, cast)
                cluster.calls.append(cast)
        arguments = tuple(Ref(casts.get(a.number, a.number)) if isinstance(a, Ref) else a for a in call.arguments)
        call = Call(call.rule, arguments, call.results)
        self._call(cluster, call)
        self._check_results(cluster, call, k)
        cluster.calls.append(call)

    def _value(self, cluster: Cluster, number: int) -> Value:
        if number not in cluster.values:
            tensor = self.captured.tensors[number]
            dtype = dtype_name(tensor.dtype)
            if dtype is None:
                raise TraceError(f"an operand of dtype {tensor.dtype}")
            if is_traceable_wrapper_subclass(tensor):
                raise TraceError(f"an operand that is a {type(tensor).__name__}")
            if tensor.device.type not in ("cpu", "cuda"):
                raise TraceError(f"an operand on the device {tensor.device}")
            cluster.values[number] = Value.argument(cluster.trace, self._name(number), sizes(tensor), dtype)
            cluster.inputs.append(number)
        return cluster.values[number]

    def _name(self, number: int) -> str:
        # The same in layers that are alike: they share plans and kernels, whose text has these names.
        if number in self.captured.parameters:
            return ".".join(self.captured.parameters[number].split(".")[-2:])
        return "input" if number in self.captured.arguments else "value"

    def _check_results(self, cluster: Cluster, call: Call, k: int) -> None:
        own = self.captured.operations[k].results
        for number in call.results:
            if number in own:
                self._check(cluster, number)

    def _check(self, cluster: Cluster, number: int) -> None:
        """Shape and dtype have to be what PyTorch's are."""
        value, tensor = cluster.values[number], self.captured.tensors[number]
        if tuple(value.shape) != sizes(tensor) or value.dtype != dtype_name(tensor.dtype):
            raise TraceError(
                f"it would be {value.dtype} {tuple(value.shape)} where PyTorch gives {tensor.dtype} {sizes(tensor)}"
            )

    def _convex(self, k: int, clusters: Sequence[Cluster]) -> bool:
        """Whether nothing outside would have to run between the members."""
        group = {k, *(m for c in clusters for m in c.members)}
        joined = {m: id(c) for c in self.clusters if c not in clusters for m in c.members}
        # Walk back from what the group needs; meeting the group again on the way is a cycle.
        peers: dict[int, list[int]] = {}
        for member, key in joined.items():
            peers.setdefault(key, []).append(member)
        stack = [n for m in group for n in self.before[m] if n not in group]
        seen: set[int] = set()
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            for each in peers.get(joined.get(n, -1), [n]):
                seen.add(each)
                if any(b in group for b in self.before[each]):
                    return False
                stack += [b for b in self.before[each] if b not in seen]
        return True

    # Results
    def _finish(self) -> Partition:
        fused: dict[int, FusedChain] = {}
        # A chain that is left to PyTorch needs results of others, which may have been no outputs before.
        judged = {id(c): self._verdict(c, self._outside_uses()) for c in self.clusters}
        for cluster in list(self.clusters):
            if not judged[id(cluster)].gains:
                self._leave(cluster, judged[id(cluster)].text)
        used = self._outside_uses()
        for cluster in self.clusters:
            chain = self._chain(cluster, used)
            if chain is None:
                continue
            chain = replace(chain, note=judged[id(cluster)].text)
            for member in cluster.members:
                fused[member] = chain
        return Partition(self.captured, self._order(fused), self.left)

    def _leave(self, cluster: Cluster, reason: str) -> None:
        self.clusters.remove(cluster)
        for member in cluster.members:
            del self.home[member]
            self.left[member] = VIEW if rules.RULES[self.known[member].call.rule].idle else reason

    def _verdict(self, cluster: Cluster, used: set[int]) -> Verdict:
        if all(rules.RULES[c.rule].idle for c in cluster.calls):
            return Verdict(False, "nothing is computed")
        found = self._chain(cluster, used)
        if found is None:
            return Verdict(False, "its results are not needed")
        tensors = self.captured.tensors
        chain = found.chain.with_sizes(hints(found.sizes))
        return self.judge(chain, [tensors[n] for n in found.inputs], [tensors[n] for n in found.outputs])

    def _outside_uses(self) -> set[int]:
        """The values that something outside of their own cluster needs."""
        used = set(references(self.captured.result))
        for k, operation in enumerate(self.captured.operations):
            for number in operation.read:
                maker = self.home.get(self.producer.get(number, -1))
                if maker is None or maker is not self.home.get(k):
                    used.add(number)
        return used

    def _chain(self, cluster: Cluster, used: Iterable[int]) -> FusedChain | None:
        produced = [n for call in cluster.calls for n in call.results if n >= 0]
        used = set(used)
        outputs, views = self._apart([n for n in dict.fromkeys(produced) if n in used], cluster)
        if not outputs and not cluster.updates:
            return None  # what is left is a view of something outside
        numbers = {n: k for k, n in enumerate(cluster.inputs)}
        for number in produced:
            numbers.setdefault(number, len(numbers))
        nodes = list(dict.fromkeys(size.of for c in cluster.calls for size in symbolic(c.arguments)))

        def local(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return Ref(numbers[argument.number])
            if isinstance(argument, Size):
                return Size(nodes.index(argument.of))
            return tuple(map(local, argument)) if isinstance(argument, tuple) else argument

        calls = tuple(
            Call(c.rule, tuple(map(local, c.arguments)), tuple(numbers[n] if n >= 0 else -1 for n in c.results))
            for c in cluster.calls
        )
        updates = tuple((numbers[target], numbers[n]) for target, n in cluster.updates)
        changing = {target for target, _ in updates}
        state = self.captured.parameters
        fixed = frozenset(k for k, n in enumerate(cluster.inputs) if n in state and k not in changing)
        names = tuple(self._name(n) for n in cluster.inputs)
        chain = Chain(names, calls, tuple(numbers[n] for n in outputs), updates, fixed, len(nodes))
        members = tuple(sorted(cluster.members))
        return FusedChain(chain, tuple(cluster.inputs), tuple(outputs), members, tuple(views), tuple(nodes))

    def _apart(self, wanted: Sequence[int], cluster: Cluster) -> tuple[list[int], list[int]]:
        """Results of a chain, and the operations behind views of these, or of its inputs.

        PyTorch makes the views once more: they share memory with what they are views of, and have its strides.
        """
        outputs: dict[int, None] = {}
        views: dict[int, None] = {}
        made = {n for call in cluster.calls for n in call.results}

        def place(number: int) -> None:
            k = self.producer.get(number, -1)
            operation = self.captured.operations[k]
            base = operation.read[0] if k in self.known and operation.view and operation.read else -1
            if base < 0 or self.storages[base] != self.storages[number]:
                outputs[number] = None
                return
            if base in made:
                place(base)
            views[k] = None

        for number in wanted:
            place(number)
        return list(outputs), list(views)

    def _order(self, fused: dict[int, FusedChain]) -> list[FusedChain | int]:
        """Chains and single operations, each after what it needs, else as they were written."""
        group = {k: (fused[k].members[-1] if k in fused else k) for k in range(len(self.captured.operations))}
        needs: dict[int, set[int]] = {}
        for k, own in group.items():
            needs.setdefault(own, set()).update(group[b] for b in self.before[k] if group[b] != own)
        after: dict[int, list[int]] = {}
        for own, others in needs.items():
            for other in others:
                after.setdefault(other, []).append(own)
        waiting = {own: len(others) for own, others in needs.items()}
        free = [own for own, count in waiting.items() if not count]
        heapq.heapify(free)
        items: list[FusedChain | int] = []
        while free:
            own = heapq.heappop(free)
            item = fused.get(own, own)
            items.append(item)
            items += item.views if isinstance(item, FusedChain) else ()
            for later in after.get(own, ()):
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(free, later)
        assert not any(waiting.values()), "chains depend on each other in a circle"
        return items
