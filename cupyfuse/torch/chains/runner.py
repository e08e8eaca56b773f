"""Running chains: find what is ready for inputs like these, keep what weights alone decide, and differentiate.

A `Runner` belongs to one chain. For each combination of shapes, strides, dtypes and wanted gradients it keeps an
`Entry`: the plan, made ready to run, with what it has prepared from fixed inputs (parameters, buffers).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import TraceError
from .chain import Chain
from .executor import Entry, Options, Tensors
from .options import PLAIN, elsewhere, matmul_precision
from .prepacked import Budget
from .runtime import dtype_name

_MOST_ENTRIES = 256


@dataclass
class Cell:
    """Where a caller whose inputs are always of one kind keeps what is ready for them."""

    entry: Entry | None = None


class Runner:
    """A chain, ready for every combination of shapes that it has met.

    Called with the chain's inputs; returns its outputs as a list. Inputs that cannot be fused (subclasses of tensors,
    other devices, shapes that an operation refuses) run as PyTorch runs them, and `refusals` says why.
    """

    def __init__(self, chain: Chain, options: Options | None = None, budget: Budget | None = None):
        self.chain = chain
        self.options = options or Options()
        self.budget = budget or Budget()
        self.refusals: dict[str, int] = {}
        self._moving = [k for k in range(len(chain.names)) if k not in chain.fixed]
        self._fast: dict[Hashable, Entry] = {}
        self._entries: dict[Hashable, Entry | str] = {}
        self._lock = threading.RLock()
        self._sized: dict[tuple[int, ...], Runner] = {}

    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        entry = self.choose(tensors)
        return self.left(entry, tensors) if isinstance(entry, str) else entry(tensors)

    def again(self, cell: Cell, tensors: Tensors) -> Sequence[Any]:
        """A call with inputs of the shapes, strides and dtypes, and in the modes, of the others with the same cell."""
        entry = cell.entry
        precision = self.options.precision or matmul_precision()
        if entry is None or precision != entry.precision or not entry.is_for(tensors):
            found = self.choose(tensors)
            if isinstance(found, str):
                return self.left(found, tensors)
            entry = cell.entry = found
        return entry(tensors)

    def as_function(self) -> Callable[..., Any]:
        """What a graph calls: a function of the chain's inputs and sizes; it returns the outputs, a single one bare."""
        count, single = len(self.chain.names), len(self.chain.outputs) == 1

        def chain(*arguments: Any) -> Any:
            runner = self if not self.chain.sizes else self.sized(arguments[count:])
            outputs = runner(arguments[:count])
            return outputs[0] if single else outputs

        chain.__module__, chain.__qualname__ = __name__, "chain"
        return chain

    def sized(self, sizes: tuple[int, ...]) -> Runner:
        """The runner for these values of the chain's symbolic sizes."""
        if sizes not in self._sized:
            self._sized[sizes] = Runner(self.chain.with_sizes(sizes), self.options, self.budget)
        return self._sized[sizes]

    def choose(self, tensors: Tensors) -> Entry | str:
        """What is ready for these inputs, made ready if need be; or why they are left to PyTorch."""
        if elsewhere():
            return "a transform or a mode of PyTorch's is active"
        graded = torch.is_grad_enabled()
        key: list[Any] = [graded, self.options.precision or matmul_precision(), torch.get_default_dtype()]
        try:
            for k in self._moving:
                t = tensors[k]
                if type(t) not in PLAIN:
                    return f"{self.chain.names[k]} is a {type(t).__name__}"
                key += (t.shape, t.stride(), t.dtype, t.requires_grad, t.layout, t.is_neg(), t.device)
        except RuntimeError:
            return f"{self.chain.names[k]} has no strides"
        fast = tuple(key)
        entry = self._fast.get(fast)
        return entry if entry is not None and entry.is_for(tensors) else self._find(fast, tensors, graded)

    def left(self, reason: str, tensors: Tensors) -> list[Any]:
        """Run as PyTorch does, and remember why."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return eagerly(self.chain, tensors)

    @property
    def entries(self) -> list[Entry]:
        return [e for e in list(self._entries.values()) if isinstance(e, Entry)]

    @property
    def all_entries(self) -> list[Entry]:
        """Those of this runner, and of its like for other sizes."""
        return [*self.entries, *(e for runner in list(self._sized.values()) for e in runner.entries)]

    def refresh(self) -> None:
        """Have everything prepared anew."""
        for entry in self.all_entries:
            entry.forget()

    def release(self) -> None:
        """Let go of all memory that is held for fixed inputs, until the next call."""
        for entry in self.all_entries:
            entry.release()

    def _find(self, fast: Hashable, tensors: Tensors, graded: bool) -> Entry | str:
        """The entry for these inputs, made if need be; or why there can be none."""
        for k in self.chain.fixed:
            if type(tensors[k]) not in PLAIN:
                return f"{self.chain.names[k]} is a {type(tensors[k]).__name__}"
        try:
            fixed = tuple(
                (t.shape, t.stride(), t.dtype, t.requires_grad, t.layout, t.is_neg(), t.device, t.is_inference())
                for t in (tensors[k] for k in sorted(self.chain.fixed))
            )
        except RuntimeError:
            return "a parameter has no strides"
        key = (fast, fixed)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._make(tensors, graded)
                if len(self._entries) >= _MOST_ENTRIES:
                    self._entries.clear()
                    self._fast.clear()
                self._entries[key] = entry
            if isinstance(entry, Entry):
                entry.mark(tensors)
                self._fast[fast] = entry
        return entry

    def _make(self, tensors: Tensors, graded: bool) -> Entry | str:
        unfit = _unfit(self.chain, tensors)
        if unfit:
            return unfit
        needs = tuple(graded and t.requires_grad for t in tensors)
        try:
            return Entry(self.chain, self.options, tensors, needs, self.budget)
        except (TraceError, ValueError, TypeError) as error:
            return str(error).splitlines()[0]


def eagerly(chain: Chain, tensors: Tensors) -> list[Any]:
    """Run a chain with PyTorch's own operations, updates included."""
    results = chain.eager(tensors)
    outputs, updates = results[: len(chain.outputs)], results[len(chain.outputs) :]
    with torch.no_grad():
        for (k, _), value in zip(chain.updates, updates, strict=True):
            tensors[k].copy_(value)
    return outputs


_UNFIT = (
    "Negative",
    "Conjugate",
    "Sparse",
    "Quantized",
    "ZeroTensor",
    "Nested",
    "Mkldnn",
    "Meta",
    "FuncTorch",
    "Python",
)


def _unfit(chain: Chain, tensors: Tensors) -> str:
    """Why these tensors cannot be given to an engine; empty if they can."""
    places = {t.device for t in tensors}
    if len(places) > 1:
        return f"its tensors are on different devices: {', '.join(sorted(map(str, places)))}"
    if places and next(iter(places)).type not in ("cpu", "cuda"):
        return f"its tensors are on the device {next(iter(places))}"
    for name, t in zip(chain.names, tensors, strict=True):
        keys = str(torch._C._dispatch_keys(t))
        if t.layout is not torch.strided or any(word in keys for word in _UNFIT):
            return f"{name} is not a plain strided tensor"
        if dtype_name(t.dtype) is None:
            return f"{name} is of dtype {t.dtype}"
    return ""
