"""What a chain keeps from call to call: values of fixed inputs (parameters, buffers), and when they may be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..plan import Plan
from .runtime import ready


@dataclass(frozen=True)
class _Part:
    """Some of the results: their numbers, the numbers of the inputs they need, and what computes them."""

    results: tuple[int, ...]
    needed: list[int]
    execute: Callable[..., Any]

    @classmethod
    def of(cls, plan: Plan, results: tuple[int, ...], matrices: Sequence[Any]) -> _Part:
        needed = [int(n.attrs["arg"]) for n in plan.graph.inputs]
        return cls(results, needed, ready(plan, [matrices[k] for k in needed]))

    def run(self, matrices: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            return list(self.execute([matrices[k] for k in self.needed], outs))


class Prepared:
    """The results of a preparing plan, and the streams on which they are known to be there.

    Parameters
    ----------
    plan : Plan
    matrices : sequence of Tensor
        The inputs of the chain, of at most two dimensions; the plan takes some of them.

    Attributes
    ----------
    arrays : list of Tensor
    needed : list of int
        The numbers of the inputs that they are prepared from.
    """

    def __init__(self, plan: Plan, matrices: Sequence[Any]):
        self._plan = plan
        self._device = matrices[0].get_device()
        self._parts: list[_Part] | None = None  # what can be prepared apart, once that is wanted
        self._whole = _Part.of(plan, tuple(range(len(plan.outputs))), matrices)
        self.needed = self._whole.needed
        self.arrays = self.run(matrices)
        self._note()

    def run(self, matrices: Sequence[Any]) -> list[Any]:
        """New results, which are not kept."""
        return self._whole.run(matrices, [None] * len(self._whole.results))

    def again(self, matrices: Sequence[Any], changed: set[int]) -> None:
        """Prepare anew what these inputs have changed: in place, unless another stream may still be reading."""
        here = self._device < 0 or torch._C._cuda_getCurrentRawStream(self._device) == self._stream
        if not (self.arrays and here and (self._device < 0 or not self._others)):
            self.arrays = self.run(matrices)
        elif changed.issuperset(self.needed) or not self._plan.apart:
            self._whole.run(matrices, self.arrays)
        else:
            if self._parts is None:
                self._parts = [_Part.of(plan, numbers, matrices) for numbers, plan in self._plan.apart]
            for part in self._parts:
                if not changed.isdisjoint(part.needed):
                    part.run(matrices, [self.arrays[k] for k in part.results])
        self._note()

    def release(self) -> None:
        """Let go of the memory; `again` takes new memory."""
        self.arrays = []

    def enter_stream(self) -> None:
        """Have the current stream wait for the arrays, if they were written on another."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream == self._stream or stream in self._others:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for array in self.arrays:
            array.record_stream(current)
        self._others.add(stream)

    def _note(self) -> None:
        if self._device < 0:
            return
        self._stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._others: set[int] = set()
        self._event: Any = None
        if not torch.cuda.is_current_stream_capturing():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))
