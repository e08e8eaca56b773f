"""Grow clusters of operations that run together.

Operations with a rule join the clusters of what they read, as long as no operation that stays with PyTorch has to run
in between, and as long as the whole can be traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import TraceError, first_line
from ...trace import Trace
from .. import rules
from ..chains.chain import Call, traced_call
from ..chains.eligibility import is_sharded
from ..chains.tensors import concrete_sizes, dtype_name
from ..explain import VIEW
from ..rules.symbols import Ref, references, size_hint, substitute
from ..rules.values import Value
from .captured import CapturedGraph, Operation
from .resolution import ResolvedGraph


@dataclass
class Cluster:
    """Operations that run together, traced so far."""

    members: list[int] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    values: dict[int, Value] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)

    def copy(self) -> Cluster:
        """Copy all but the trace, so that a failed attempt to grow leaves the original as it was."""
        return Cluster([*self.members], self.trace, dict(self.values), [*self.inputs], [*self.calls], [*self.updates])

    @property
    def produced(self) -> list[int]:
        return [n for call in self.calls for n in call.results if n >= 0]

    @property
    def no_op(self) -> bool:
        return all(rules.RULES[c.rule].no_op for c in self.calls)


class Clusters(ResolvedGraph):
    """The clusters of a captured graph.

    Attributes
    ----------
    clusters : list of Cluster
    cluster_of : the cluster of each operation that is in one

    Operations in `apart` are left to PyTorch, for these reasons.
    """

    def __init__(self, captured: CapturedGraph, apart: Mapping[int, str] = MappingProxyType({})):
        super().__init__(captured)
        self.unfused.update(apart)
        self.clusters: list[Cluster] = []
        self.cluster_of: dict[int, Cluster] = {}
        # A fused view would be a copy, which misses writes to the memory; `as_strided` reads memory as it lies.
        unfused = [o for k, o in enumerate(captured.operations) if k not in self.fusible or k in apart]
        changed = {self.storages[n] for o in unfused for n in o.written}
        strided = {self.storages[n] for o in captured.operations if o.name.startswith("as_strided") for n in o.read}
        for k in self.fusible:
            operation = captured.operations[k]
            if k in apart:
                continue
            if operation.view and self.storages[operation.results[0]] in changed:
                self.unfused[k] = "its memory is written in place elsewhere"
            elif any(self.storages[n] in strided for n in operation.results):
                self.unfused[k] = "its memory is viewed by `as_strided`"
            else:
                self._place(k, operation)

    @cached_property
    def changing_inputs(self) -> set[int]:
        """The memory of the graph's inputs, such as statistics in buffers, that its operations write to.

        The next call changes it again, perhaps before this one's backward pass.
        """
        inputs = {self.storages[n] for n in self.captured.inputs}
        return inputs & {self.storages[n] for operation in self.captured.operations for n in operation.written}

    def outside_uses(self) -> set[int]:
        """Find the values that are read outside of their own cluster."""
        used = set(references(self.captured.result))
        for k, operation in enumerate(self.captured.operations):
            for number in operation.read:
                maker = self.cluster_of.get(self.producer.get(number, -1))
                if maker is None or maker is not self.cluster_of.get(k):
                    used.add(number)
        return used

    def leave(self, cluster: Cluster, reason: str) -> None:
        """Leave a cluster's operations to PyTorch."""
        self.clusters.remove(cluster)
        for member in cluster.members:
            del self.cluster_of[member]
            self.unfused[member] = VIEW if rules.RULES[self.fusible[member].call.rule].no_op else reason

    def input_name(self, number: int) -> str:
        """Name an input of a chain, alike in layers that are alike: these share plans, whose text has the names."""
        if number in self.captured.parameters:
            return ".".join(self.captured.parameters[number].split(".")[-2:])
        return "input" if number in self.captured.arguments else "value"

    # Growing
    def _place(self, k: int, operation: Operation) -> None:
        """Add an operation to the clusters of its operands, merged if there are several, or to a new one."""
        homes = (self.cluster_of.get(self.producer.get(number, -1)) for number in operation.read)
        near = list({id(c): c for c in homes if c is not None}.values())
        if operation.view and not near:
            # PyTorch's views cost nothing. But a chain may prepack what is computed of parameters, and writes the
            # gradient of a part of its input among zeros. Products read a part of a parameter where it is, as a view.
            call, parameters = self.fusible[k].call, self.captured.parameters
            if all(n in parameters for n in operation.read) == rules.takes_part(call.rule, call.arguments):
                self.unfused[k] = VIEW
                return
        choices = [near] if near else []
        choices += [[c] for c in reversed(near)] if len(near) > 1 else []
        reason = ""
        for choice in [*choices, []]:
            if choice and not self._is_convex(k, choice):
                reason = "an operation that is left to PyTorch has to run in between"
                continue
            try:
                merged = self._merge(choice, k)
            except (TraceError, ValueError, TypeError) as error:
                reason = first_line(error)
                continue
            self.clusters = [c for c in self.clusters if c not in choice] + [merged]
            self.cluster_of.update(dict.fromkeys(merged.members, merged))
            return
        self.unfused[k] = reason

    def _is_convex(self, k: int, clusters: Sequence[Cluster]) -> bool:
        """Whether no operation outside of the clusters has to run between theirs and operation `k`."""
        group = {k, *(m for c in clusters for m in c.members)}
        # Walk back from what the group needs, whole clusters at a time; meeting the group again is a cycle.
        runs_with = {m: c.members for c in self.clusters if c not in clusters for m in c.members}
        stack = [n for m in group for n in self.before[m] if n not in group]
        seen: set[int] = set()
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            for each in runs_with.get(n, [n]):
                seen.add(each)
                if any(b in group for b in self.before[each]):
                    return False
                stack += [b for b in self.before[each] if b not in seen]
        return True

    def _merge(self, clusters: Sequence[Cluster], k: int) -> Cluster:
        """Trace clusters and operation `k` as one cluster; raise `TraceError` where that is impossible."""
        if len(clusters) != 1:
            merged = Cluster()
            for member in sorted({k, *(m for c in clusters for m in c.members)}):
                self._append(merged, member)
            return merged
        merged, trace = clusters[0].copy(), clusters[0].trace
        count = len(trace.inputs), len(trace.calls)
        try:
            self._append(merged, k)
        except BaseException:
            del trace.inputs[count[0] :], trace.calls[count[1] :]
            raise
        return merged

    def _append(self, cluster: Cluster, k: int) -> None:
        """Trace operation `k` at the end of a cluster, under autocast with its operands cast if need be."""
        fusible = self.fusible[k]
        try:
            self._trace(cluster, fusible.call, k)
        except (TraceError, ValueError, TypeError):
            if not self.captured.autocast:
                raise
            self._trace(cluster, self._cast_operands(cluster, fusible.call), k)
        for target, number in fusible.updates:
            self._check_meta(cluster, number)
            if target in cluster.produced:
                raise TraceError("it updates in place what the chain computes")
            cluster.updates.append((target, number))
        cluster.members.append(k)

    def _trace(self, cluster: Cluster, call: Call, k: int | None = None) -> None:
        """Trace a call; results of operation `k` must have PyTorch's shapes and dtypes."""
        arguments = [
            substitute(a, lambda ref: self._value(cluster, ref.number), lambda size: size_hint(size.symbol))
            for a in call.arguments
        ]
        result = traced_call(cluster.trace, call.rule, arguments)
        for number, value in zip(call.results, result if isinstance(result, tuple) else (result,), strict=False):
            if number >= 0:
                cluster.values[number] = value
        for number in call.results if k is not None else ():
            if number in self.captured.operations[k or 0].results:
                self._check_meta(cluster, number)
        cluster.calls.append(call)

    def _cast_operands(self, cluster: Cluster, call: Call) -> Call:
        """Cast a call's operands to the dtype that autocast computes in, which is that of the result."""
        dtype = dtype_name(self.captured.tensors[call.results[0]].dtype)
        casts: dict[int, int] = {}
        for number in references(call.arguments):
            if self._value(cluster, number).dtype not in (dtype, "bool", "int64"):
                casts[number] = self.new_value(number)
                self._trace(cluster, Call("to", (Ref(number), dtype), (casts[number],)))
        arguments = tuple(Ref(casts.get(a.number, a.number)) if isinstance(a, Ref) else a for a in call.arguments)
        return Call(call.rule, arguments, call.results)

    def _value(self, cluster: Cluster, number: int) -> Value:
        """Return the traced value of a tensor in a cluster; one from outside becomes an argument."""
        if number not in cluster.values:
            tensor = self.captured.tensors[number]
            dtype = dtype_name(tensor.dtype)
            if dtype is None:
                raise TraceError(f"an operand of dtype {tensor.dtype}")
            if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
                raise TraceError(f"an operand that is a {type(tensor).__name__}")
            if tensor.device.type not in ("cpu", "cuda"):
                raise TraceError(f"an operand on the device {tensor.device}")
            shape = concrete_sizes(tensor.shape)
            cluster.values[number] = Value.argument(cluster.trace, self.input_name(number), shape, dtype)
            cluster.inputs.append(number)
        return cluster.values[number]

    def _check_meta(self, cluster: Cluster, number: int) -> None:
        """Raise `TraceError` unless a traced value has the shape and dtype that PyTorch gave it."""
        value, tensor = cluster.values[number], self.captured.tensors[number]
        shape = concrete_sizes(tensor.shape)
        if tuple(value.shape) != shape or value.dtype != dtype_name(tensor.dtype):
            raise TraceError(
                f"it would be {value.dtype} {tuple(value.shape)} where PyTorch gives {tensor.dtype} {shape}"
            )
