"""Detect on the host that weights may have changed since they were prepacked.

A tensor's version misses many writes: those of fused optimizers, of `parameter.data.add_(...)`, of gathers of sharded
parameters. So optimizer steps and computed gradients are counted too: weights usually change after those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from .tensors import Tensors


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


optimizer_steps = Counter()  # of all of PyTorch's optimizers
_NO_GRADIENTS = Counter()
_gradients = WeakIdKeyDictionary()


def gradient_counter(tensor: torch.Tensor) -> Counter:
    """Return the count of gradients that fused backward passes have produced for a tensor."""
    return _gradients.setdefault(tensor, Counter())


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer_steps.value += 1


register_optimizer_step_post_hook(_count_step)


class _RecordedInput(NamedTuple):
    """A fixed input as it was when it was recorded."""

    number: int
    tensor: Any
    alias: Any  # keeps the memory from being given, at the same address, to another tensor
    dtype: Any
    requires_grad: bool
    version: int  # -1 where any will do
    counter: Counter
    gradients: int


class FixedInputs:
    """The fixed inputs of the last recorded call of a chain, for comparison with those of the next.

    Parameters
    ----------
    numbers : which inputs of the chain are fixed
    prepacked : those that weights are prepacked from
    trained : those for which optimizer steps and gradients count as changes; `gradients` has their gradient counters
    """

    def __init__(self, numbers: Sequence[int], prepacked: Sequence[int], trained: Sequence[int]):
        self._numbers, self._prepacked, self._trained = numbers, frozenset(prepacked), trained
        self._seen: list[_RecordedInput] = []
        self._sources: list[tuple[int, Any]] = []  # the prepacked ones and their tensors: every call compares them
        self._steps = 0
        self.gradients: list[tuple[int, Counter]] = []

    @property
    def recorded(self) -> bool:
        return bool(self._seen)

    def record(self, tensors: Tensors) -> None:
        """Record the fixed inputs of a call."""
        self._steps = optimizer_steps.value
        self.gradients = [(k, gradient_counter(tensors[k])) for k in self._trained]
        counters = dict(self.gradients)
        seen = []
        for k in self._numbers:
            t, counter = tensors[k], counters.get(k, _NO_GRADIENTS)
            version = t._version if k in self._prepacked and not t.is_inference() else -1
            seen.append(_RecordedInput(k, t, t.detach(), t.dtype, t.requires_grad, version, counter, counter.value))
        self._seen = seen
        self._sources = [(s.number, s.tensor) for s in seen if s.number in self._prepacked]

    def unchanged(self, tensors: Tensors) -> bool:
        """Whether these are the recorded tensors, with no sign of a change."""
        if self._trained and self._steps != optimizer_steps.value:
            return False
        # Written out, because every call asks.
        for k, tensor, alias, dtype, requires_grad, version, counter, gradients in self._seen:
            t = tensors[k]
            if (
                t is not tensor
                or not t.is_set_to(alias)
                or t.dtype is not dtype
                or t.requires_grad is not requires_grad
                or (version >= 0 and t._version != version)
                or counter.value != gradients
            ):
                return False
        return True

    def record_changes(self, tensors: Tensors) -> bool:
        """Record new values of the recorded tensors; False, and nothing is recorded, where there are other tensors."""
        for s in self._seen:
            t = tensors[s.number]
            same = t is s.tensor and t.is_set_to(s.alias) and t.dtype is s.dtype
            if not same or t.requires_grad is not s.requires_grad:
                return False
        self._steps = optimizer_steps.value
        self._seen = [
            s._replace(version=s.version if s.version < 0 else s.tensor._version, gradients=s.counter.value)
            for s in self._seen
        ]
        return True

    def replaced(self, tensors: Tensors) -> bool:
        """Whether a prepacked input is another tensor than the recorded one, or lies in other memory."""
        return any(
            tensors[s.number] is not s.tensor or not tensors[s.number].is_set_to(s.alias)
            for s in self._seen
            if s.number in self._prepacked
        )

    def same_tensors(self, tensors: Tensors) -> bool:
        """Whether the prepacked inputs are the recorded tensors, changed or not."""
        return all(tensors[k] is tensor for k, tensor in self._sources)

    def expire(self) -> None:
        """Make `unchanged` return False until the next record."""
        self._seen = [s._replace(dtype=None) for s in self._seen]

    def forget(self) -> None:
        """Drop references to the tensors; the next ones count as replaced."""
        self._seen = [s._replace(tensor=None, alias=None) for s in self._seen]
        self._sources = [(k, None) for k, _ in self._sources]
