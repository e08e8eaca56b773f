"""Resolve the operations of a captured graph to rules, and find which have to run before which."""

from __future__ import annotations

from dataclasses import dataclass

from .. import rules
from ..chains.chain import Call
from ..chains.eligibility import is_sharded
from ..rules.symbols import Ref, references
from .captured import CapturedGraph, Operation, keeps_placement, storage_of
from .written_memory import merged_inputs


@dataclass
class Fusible:
    """An operation that has a rule: its call, and the (target, new value) pairs of what it updates in place."""

    call: Call
    updates: list[tuple[int, int]]


class ResolvedGraph:
    """A captured graph with the rules and the dependencies of its operations.

    Attributes
    ----------
    fusible : the operations that have a rule, by number
    unfused : why the others are left to PyTorch, by number
    storages : for each value, a number that identifies its memory
    producer : for each value that an operation returns, that operation
    before : for each operation, those that have to run before it
    """

    def __init__(self, captured: CapturedGraph):
        self.captured = captured
        self.fusible: dict[int, Fusible] = {}
        self.unfused: dict[int, str] = {}
        self.storages = [storage_of(t) for t in captured.tensors]
        self._used = set(references(captured.result)).union(*(o.read for o in captured.operations))
        for k, operation in enumerate(captured.operations):
            found = self._classify(k, operation)
            if isinstance(found, str):
                self.unfused[k] = found
            else:
                self.fusible[k] = found
        self.producer: dict[int, int] = {}
        for k, operation in enumerate(captured.operations):
            for number in operation.results:
                self.producer.setdefault(number, k)
        self.before = self._dependencies()

    def _classify(self, k: int, operation: Operation) -> Fusible | str:
        """Return an operation's call and updates, or why it is left to PyTorch; set what it writes to and its order."""
        found = operation.refusal or self._resolve(operation)
        if isinstance(found, str):
            return found
        rule, arguments = found.rule, found.arguments
        if found.inplace:
            return "it writes in place to a tensor that others alias"
        if operation.ordered and not rule.updates:
            return "it has no tensor among its arguments"
        results = list(operation.results if rule.several else operation.results[:1])
        updates: list[tuple[int, int]] = []
        for target in rule.updated(arguments):
            if not isinstance(target, Ref):
                results.append(-1)  # not updated in this call
                continue
            results.append(self.new_value(target.number))
            updates.append((target.number, results[-1]))
        operation.written |= {target for target, _ in updates}
        if any(target in later.read for target, _ in updates for later in self.captured.operations[k + 1 :]):
            return "what it updates in place is read later"
        if any(target in self.captured.operations[n].read for target, _ in updates for n in self.unfused if n < k):
            # Its backward pass may have kept what a chain would change; PyTorch's own kernels change it unseen.
            return "what it updates in place was read before by an operation that is left to PyTorch"
        operation.ordered = False
        return Fusible(Call(rule.name, arguments, tuple(results)), updates)

    def _resolve(self, operation: Operation) -> rules.Found | str:
        """Return an operation's rule and canonical arguments, or why it is left to PyTorch."""
        if keeps_placement(operation, self.captured.tensors):
            return rules.Found(rules.RULES["identity"], (Ref(operation.read[0]),))
        found = rules.find(operation.target, operation.args, operation.kwargs)
        if found is None:
            return "cupyfuse has no rule for it"
        if isinstance(found, rules.Refused):
            return found.reason
        moves_parts = rules.moves_parts(found.rule.name, found.arguments)
        if moves_parts and any(is_sharded(self.captured.tensors[n]) for n in operation.read):
            return "a part of a DTensor's rows, or several side by side"
        several = found.rule.several or found.rule.updates
        if not several and any(n in self._used for n in operation.results[1:]):
            return "more than its first result is used"
        return found

    def new_value(self, like: int) -> int:
        """Add a value with the shape and dtype of another, in memory of its own; return its number."""
        self.captured.tensors.append(self.captured.tensors[like])
        self.storages.append(-len(self.storages) - 1)
        return len(self.captured.tensors) - 1

    def _dependencies(self) -> list[set[int]]:
        """Find, for each operation, those that have to run before it.

        These are its producers, the barrier before it, uses of the same memory if one of the two writes to it, and for
        an ordered operation, such as a random draw, the ordered one before it.
        """
        before: list[set[int]] = []
        merged = merged_inputs(self.captured)
        memories = [merged.get(storage, storage) for storage in self.storages]
        readers: dict[int, list[int]] = {}
        writers: dict[int, int] = {}
        last_ordered: int | None = None
        barrier: int | None = None
        for k, operation in enumerate(self.captured.operations):
            needs = set(operation.depends_on)
            if operation.barrier:
                needs.update(range(barrier or 0, k))
            elif barrier is not None:
                needs.add(barrier)
            barrier = k if operation.barrier else barrier
            needs |= {self.producer[n] for n in operation.read if n in self.producer and self.producer[n] != k}
            read = {memories[n] for n in operation.read}
            written = {memories[n] for n in operation.written}
            needs |= {writers[s] for s in read | written if s in writers}
            for s in written:
                needs |= set(readers.get(s, ()))
            if operation.ordered:
                if last_ordered is not None:
                    needs.add(last_ordered)
                last_ordered = k
            for s in read:
                readers.setdefault(s, []).append(k)
            for s in written:
                writers[s] = k
                readers[s] = []
            before.append({n for n in needs if n < k})
        return before
