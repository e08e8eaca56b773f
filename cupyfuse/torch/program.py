"""A forward made of chains and PyTorch's operations, as one generated function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .chain import Ref
from .partition import Fused, Partition
from .record import STATISTICS, Operation, Record, Source, Submodule
from .rules import RULES
from .running import Cell, Runner


class Program:
    """What replaces a module's forward for arguments of one kind.

    Parameters
    ----------
    partition : Partition
    root : Module
        Where submodules that are called as they are are found by path.
    runners : callable
        Gives the `Runner` for a chain.

    Attributes
    ----------
    writes : bool
        Whether it changes an argument or a tensor of the module's in place, running statistics aside: then it matters
        whether these share memory.
    call : callable
        Takes the tensors among the forward's flattened arguments, returns what the forward returns.
    """

    def __init__(self, partition: Partition, root: torch.nn.Module, runners: Callable[[Fused], Runner]):
        self.partition = partition
        self.runners = [runners(chain) for chain in partition.chains]
        self._scope: dict[str, Any] = {}
        self._root = root
        record = partition.record
        self.writes = _writes(record)
        self._lines: list[str] = []
        last = self._last_uses()
        # An argument that is given twice is one value.
        seen: set[int] = set()
        parameters = []
        for k, n in enumerate(record.arguments):
            parameters.append(f"again{k}" if n in seen else f"v{n}")
            seen.add(n)
        for number, source in record.sources.items():
            if isinstance(source, Source):
                self._lines.append(f"v{number} = {self._hold(source.table)}[{source.key!r}]")
            else:
                self._lines.append(f"v{number} = {self._hold(source)}")
        chains = iter(self.runners)
        for k, item in enumerate(partition.items):
            if isinstance(item, Fused):
                self._chain(item, next(chains))
            else:
                self._operation(record.operations[item])
            gone = [f"v{n}" for n in last.get(k, ())]
            if gone:
                self._lines.append(f"del {', '.join(gone)}")
        if isinstance(record.result, Ref):
            self._lines.append(f"return v{record.result.number}")
        else:
            leaves, spec = pytree.tree_flatten(record.result)
            values = "".join(self._text(leaf) + ", " for leaf in leaves)
            self._lines.append(f"return {self._hold(pytree.tree_unflatten)}([{values}], {self._hold(spec)})")
        body = "\n    ".join(self._lines)
        self.source = f"def forward({', '.join(parameters)}):\n    {body}\n"
        exec(self.source, self._scope)
        self.call = self._scope["forward"]

    def _last_uses(self) -> dict[int, list[int]]:
        """For each item, the values that nothing needs after it."""
        record = self.partition.record
        kept = {*record.arguments, *record.sources}
        kept.update(leaf.number for leaf in pytree.tree_leaves(record.result) if isinstance(leaf, Ref))
        last: dict[int, int] = {}
        for k, item in enumerate(self.partition.items):
            if isinstance(item, Fused):
                touched = [*item.inputs, *item.outputs]
            else:
                operation = record.operations[item]
                touched = [*operation.read, *operation.results]
            for number in touched:
                last[number] = k
        gone: dict[int, list[int]] = {}
        for number, k in last.items():
            if number not in kept:
                gone.setdefault(k, []).append(number)
        return gone

    def _hold(self, value: Any) -> str:
        name = f"c{len(self._scope)}"
        self._scope[name] = value
        return name

    def _chain(self, fused: Fused, runner: Runner) -> None:
        inputs = ", ".join(f"v{n}" for n in fused.inputs)
        outputs = "".join(f"v{n}, " for n in fused.outputs)
        record = self.partition.record
        moving = [n for k, n in enumerate(fused.inputs) if k not in fused.chain.fixed]
        # What a program is called with is always of the same kind; what others make of it may not be.
        known = all(n in record.arguments for n in moving)
        call = f"{self._hold(runner.again)}({self._hold(Cell())}, " if known else f"{self._hold(runner)}("
        self._lines.append(f"{outputs + '= ' if outputs else ''}{call}({inputs},))")
        self._lines += [f"v{new} = v{own}" for new, own in fused.renewed]
        for n in fused.outputs:
            strides = _other_strides(record.tensors[n])
            if strides:
                self._lines.append(f"v{n} = {self._hold(_laid_out)}(v{n}, {strides})")

    def _operation(self, operation: Operation) -> None:
        if isinstance(operation.target, Submodule):
            function = self._hold(_Called(self._root, operation.target.path))
            arguments, named = operation.args, operation.kwargs
        elif operation.rule:
            function = self._hold(RULES[operation.rule].eager)
            arguments, named = operation.arguments, {}
        else:
            function = self._hold(operation.target)
            arguments, named = operation.args, operation.kwargs
        parts = [self._text(a) for a in arguments] + [f"{k}={self._text(v)}" for k, v in named.items()]
        call = f"{function}({', '.join(parts)})"
        result = operation.result
        if isinstance(result, Ref):
            self._lines.append(f"v{result.number} = {call}")
        else:
            leaves, _ = pytree.tree_flatten(result)
            targets = [f"v{leaf.number}" if isinstance(leaf, Ref) else "_" for leaf in leaves]
            if targets:
                self._lines.append(f"{', '.join(targets)}, = {self._hold(pytree.tree_leaves)}({call})")
            else:
                self._lines.append(call)
        self._lines += [f"v{new} = v{old}" for old, new in operation.renewed]

    def _text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return f"v{value.number}"
        if type(value) in (tuple, list, dict, slice) and _holds_refs(value):
            if isinstance(value, slice):
                return f"slice({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
            if isinstance(value, dict):
                return "{" + ", ".join(f"{k!r}: {self._text(v)}" for k, v in value.items()) + "}"
            inner = "".join(self._text(v) + ", " for v in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner})"
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        return self._hold(value)


def _other_strides(meta: Any) -> tuple[int, ...]:
    """The strides of a value where PyTorch's operations lay it out in another order; empty for the usual one."""
    strides: tuple[int, ...] = meta.strides
    wide = [(s, n) for s, n in zip(strides, meta.shape, strict=True) if n != 1]
    if 0 in meta.shape or any(s == 0 for s, _ in wide) or wide == sorted(wide, key=lambda each: -each[0]):
        return ()
    return strides


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)


class _Called:
    """A submodule that is called as it is, whichever it is at that time."""

    def __init__(self, root: torch.nn.Module, path: str):
        self.root, self.path = root, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.root.get_submodule(self.path)(*args, **kwargs)


def _holds_refs(value: Any) -> bool:
    return any(isinstance(leaf, Ref) for leaf in pytree.tree_leaves(value))


def _writes(record: Record) -> bool:
    counted = (*STATISTICS, "num_batches_tracked")
    seen = {record.tensors[n].storage for n in record.arguments} | {
        record.tensors[n].storage
        for n, source in record.sources.items()
        if not isinstance(source, Source) or source.key not in counted
    }
    return any(record.tensors[n].storage in seen for o in record.operations for n in o.written)
