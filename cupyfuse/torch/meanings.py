"""Which operations of a record a rule describes, which of them change memory that others see, what depends on what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import rules
from .chain import Call, Ref, references
from .record import Meta, Operation, Record, Submodule, storage_of


@dataclass
class Known:
    """An operation that a rule describes: a call on the record's values, and which of these it renews."""

    call: Call
    updates: list[tuple[int, int]]


class Meanings:
    """What each operation of a record is, and what has to run before what.

    Attributes
    ----------
    known : for operations that a rule describes
    left : for the others, why
    storages : for each value, a number that values share if they share memory
    producer : for each value, the operation that makes it
    before : for each operation, those that have to run first
    """

    def __init__(self, record: Record):
        self.record = record
        self.left: dict[int, str] = {}
        self.known: dict[int, Known] = {}
        self.storages = [_storage(t) for t in record.tensors]
        for k, operation in enumerate(record.operations):
            self._look_at(k, operation)
        self.producer: dict[int, int] = {}
        for k, operation in enumerate(record.operations):
            for number in (*operation.results, *(new for _, new in operation.renewed)):
                self.producer.setdefault(number, k)
        self.before = self._dependencies()

    # What each operation is
    def _look_at(self, k: int, operation: Operation) -> None:
        found = self._rule(operation)
        if isinstance(found, str):
            self.left[k] = found
            return
        rule, arguments, inplace = found
        if inplace and not self._functional(k, operation, rule, arguments):
            self.left[k] = "it changes a tensor in place that others can see"
            return
        if operation.ordered and not inplace and not rule.updates:
            self.left[k] = "it makes a tensor out of nothing"
            return
        results = list(operation.results)[:1]
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
        if not self.record.rebinds and any(self._read_after(k, target) for target, _ in updates):
            self.left[k] = "what it changes in place is read again"
            return
        self._renew(k, operation, updates)
        operation.ordered = False
        self.known[k] = Known(Call(rule.name, arguments, tuple(results)), updates)

    def _read_after(self, k: int, number: int) -> bool:
        return any(number in later.read for later in self.record.operations[k + 1 :])

    def _renew(self, k: int, operation: Operation, updates: list[tuple[int, int]]) -> None:
        """Let what comes later read the new values of what an operation changes."""
        if not self.record.rebinds:
            return
        for target, number in updates:
            self.storages[number] = self.storages[target]
            for later in self.record.operations[k + 1 :]:
                _rename(later, target, number)
            self.record.result = _renamed(self.record.result, target, number)
        operation.renewed = tuple(updates)

    def _rule(self, operation: Operation) -> tuple[rules.Rule, tuple[Any, ...], bool] | str:
        if operation.rule:
            return rules.RULES[operation.rule], operation.arguments, False
        if isinstance(operation.target, Submodule):
            return "the module is called as it is"
        found = rules.find(operation.target, operation.args, operation.kwargs)
        if found is None:
            return "cupyfuse has no rule for it"
        if isinstance(found, rules.Refused):
            return found.reason
        extra = [n for n in operation.results[1:] if n in self._used()]
        if extra and not found.rule.updates:
            return "more than its first result is used"
        return found.rule, found.arguments, found.inplace

    def _used(self) -> set[int]:
        if not hasattr(self, "_used_values"):
            self._used_values = set(references(self.record.result))
            for operation in self.record.operations:
                self._used_values.update(operation.read)
        return self._used_values

    def fresh(self, like: int) -> int:
        self.record.tensors.append(self.record.tensors[like])
        self.storages.append(-len(self.storages) - 1)
        return len(self.record.tensors) - 1

    def _functional(self, k: int, operation: Operation, rule: rules.Rule, arguments: tuple[Any, ...]) -> bool:
        """Give the result of an in-place operation a number of its own, if nobody else sees the memory it changes."""
        target = next(references(arguments), None)
        if not self.record.rebinds or target is None or operation.results != (target,):
            return False
        mine = self.storages[target]
        if mine in {self.storages[n] for n in (*self.record.arguments, *self.record.sources)}:
            return False
        dtype = self.record.tensors[target].dtype
        if any(self.record.tensors[n].dtype not in (dtype, torch.bool) for n in references(arguments)):
            return False  # out of place it would be of another dtype
        alike = {n for n, s in enumerate(self.storages) if s == mine and n != target}
        read_later = set(references(self.record.result))
        for other in self.record.operations[k + 1 :]:
            read_later.update(other.read)
        if alike & read_later:
            return False
        number = self.fresh(target)
        self.storages[number], self.storages[target] = mine, -number - 1
        operation.result, operation.written, operation.ordered = Ref(number), frozenset(), False
        operation.rule, operation.arguments, operation.view = rule.name, arguments, False
        for later in self.record.operations[k + 1 :]:
            _rename(later, target, number)
        self.record.result = _renamed(self.record.result, target, number)
        return True

    # What has to run before what
    def _dependencies(self) -> list[set[int]]:
        before: list[set[int]] = []
        readers: dict[int, list[int]] = {}
        writers: dict[int, int] = {}
        last_ordered: int | None = None
        barrier: int | None = None
        for k, operation in enumerate(self.record.operations):
            needs = set(operation.after)
            if operation.barrier:
                needs.update(range(barrier or 0, k))
            elif barrier is not None:
                needs.add(barrier)
            barrier = k if operation.barrier else barrier
            needs |= {self.producer[n] for n in operation.read if n in self.producer and self.producer[n] != k}
            touched = {self.storages[n] for n in operation.read}
            changed = {self.storages[n] for n in operation.written}
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


def _storage(tensor: Any) -> int:
    return tensor.storage if isinstance(tensor, Meta) else storage_of(tensor)


def _renamed(tree: Any, old: int, new: int) -> Any:
    return pytree.tree_map(lambda v: Ref(new) if isinstance(v, Ref) and v.number == old else v, tree)


def _rename(operation: Operation, old: int, new: int) -> None:
    operation.args, operation.kwargs, operation.arguments, operation.result = _renamed(
        (operation.args, operation.kwargs, operation.arguments, operation.result), old, new
    )
    if old in operation.written:
        operation.written = operation.written - {old} | {new}
