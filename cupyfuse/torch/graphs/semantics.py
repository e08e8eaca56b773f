"""Which operations of a record a rule describes, which of them change memory that others see, what depends on what."""

from __future__ import annotations

from dataclasses import dataclass

from .. import rules
from ..chains.chain import Call
from ..rules.symbols import Ref, references
from .captured import CapturedGraph, Operation, storage_of
from .importer import KEEPS_STATISTICS


@dataclass
class Known:
    """An operation that a rule describes: a call on the record's values, and (target, value) of what it updates."""

    call: Call
    updates: list[tuple[int, int]]


class GraphSemantics:
    """What each operation of a record is, and what has to run before what.

    Attributes
    ----------
    known : for operations that a rule describes
    left : for the others, why
    storages : for each value, a number that values share if they share memory
    producer : for each value, the operation that makes it
    before : for each operation, those that have to run first
    """

    def __init__(self, captured: CapturedGraph):
        self.captured = captured
        self.left: dict[int, str] = {}
        self.known: dict[int, Known] = {}
        self.storages = [storage_of(t) for t in captured.tensors]
        self._used = set(references(captured.result)).union(*(o.read for o in captured.operations))
        for k, operation in enumerate(captured.operations):
            self._look_at(k, operation)
        self.producer: dict[int, int] = {}
        for k, operation in enumerate(captured.operations):
            for number in operation.results:
                self.producer.setdefault(number, k)
        self.before = self._dependencies()

    # What each operation is
    def _look_at(self, k: int, operation: Operation) -> None:
        found = operation.left or self._rule(operation)
        if isinstance(found, str):
            self.left[k] = found
            return
        rule, arguments = found.rule, found.arguments
        if found.inplace:
            self.left[k] = "it changes a tensor in place that others can see"
            return
        if operation.ordered and not rule.updates:
            self.left[k] = "it makes a tensor out of nothing"
            return
        results = list(operation.results) if rule.several else list(operation.results[:1])
        updates: list[tuple[int, int]] = []
        training = bool(rule.updates) and arguments[rule.parameters.index("training")] is True
        for name in rule.updates:
            target = arguments[rule.parameters.index(name)]
            if isinstance(target, Ref) and training:
                number = self.fresh(target.number)
                updates.append((target.number, number))
                results.append(number)
            else:
                results.append(-1)
        operation.written |= {target for target, _ in updates}
        if any(target in later.read for target, _ in updates for later in self.captured.operations[k + 1 :]):
            self.left[k] = "what it changes in place is read again"
            return
        if any(target in self.captured.operations[n].read for target, _ in updates for n in self.left if n < k):
            # Its backward pass may have kept what a chain would change; PyTorch's own kernels change it unseen.
            self.left[k] = "what it changes in place was read before"
            return
        operation.ordered = False
        self.known[k] = Known(Call(rule.name, arguments, tuple(results)), updates)

    def _rule(self, operation: Operation) -> rules.Found | str:
        found = rules.find(operation.target, operation.args, operation.kwargs)
        if found is None:
            return "cupyfuse has no rule for it"
        if isinstance(found, rules.Refused):
            return found.reason
        alone = not found.rule.updates and not found.rule.several
        if alone and any(n in self._used for n in operation.results[1:]):
            return "more than its first result is used"
        return found

    def fresh(self, like: int) -> int:
        """A new value like another one."""
        self.captured.tensors.append(self.captured.tensors[like])
        self.storages.append(-len(self.storages) - 1)
        return len(self.captured.tensors) - 1

    # What has to run before what
    def _dependencies(self) -> list[set[int]]:
        before: list[set[int]] = []
        memories = self._memories()
        readers: dict[int, list[int]] = {}
        writers: dict[int, int] = {}
        last_ordered: int | None = None
        barrier: int | None = None
        for k, operation in enumerate(self.captured.operations):
            needs = set(operation.after)
            if operation.barrier:
                needs.update(range(barrier or 0, k))
            elif barrier is not None:
                needs.add(barrier)
            barrier = k if operation.barrier else barrier
            needs |= {self.producer[n] for n in operation.read if n in self.producer and self.producer[n] != k}
            touched = {memories[n] for n in operation.read}
            changed = {memories[n] for n in operation.written}
            needs |= {writers[s] for s in touched | changed if s in writers}
            for s in changed:
                needs |= set(readers.get(s, ()))
            if operation.ordered:
                if last_ordered is not None:
                    needs.add(last_ordered)
                last_ordered = k
            for s in touched:
                readers.setdefault(s, []).append(k)
            for s in changed:
                writers[s] = k
                readers[s] = []
            before.append({n for n in needs if n < k})
        return before

    def _memories(self) -> list[int]:
        """For each value, a number that values share if they may share memory.

        The tensors that a graph is captured with have a memory each. Those that it is called with later may share
        theirs, which matters as soon as one of them is changed: every input of its dtype counts as changed with it.
        """
        inputs = [*self.captured.arguments, *self.captured.parameters]
        own = {self.storages[n] for n in inputs}
        written = {n for o in self.captured.operations if o.name not in KEEPS_STATISTICS for n in o.written}
        dtypes = {self.captured.tensors[n].dtype for n in written if self.storages[n] in own}
        together: dict[int, int] = {}
        for dtype in dtypes:
            alike = [self.storages[n] for n in inputs if self.captured.tensors[n].dtype is dtype]
            together.update(dict.fromkeys(alike, alike[0]))
        return [together.get(storage, storage) for storage in self.storages]
