"""A chain compiled for one signature: the plan, loaded, and the backward passes that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ...ir.graph import Node
from ...plan.build import build
from ...plan.plan import Plan
from ...settings import Settings
from .backward import Backward
from .chain import TracedChain
from .runtime import load
from .tensors import Tensors, as_matrix, layout_of


class CompiledChain:
    """A chain compiled for inputs of fixed shapes, dtypes and strides on one device; it holds nothing of weights.

    Parameters
    ----------
    traced : TracedChain
    tensors : sequence of Tensor
        Like those that it will be called with.
    settings : Settings
    needs : sequence of bool
        For each input, whether its gradient is wanted: what is saved is chosen for these.
    saved : sequence of Node
        What is saved for backward passes, where `needs` does not choose.
    prepacked : frozenset of int
        The inputs from which weights are prepacked, by a plan of their own.
    in_place : bool
        Whether updates are written to the inputs; else they are results, behind the outputs.

    Attributes
    ----------
    plan : Plan
        Its results are the outputs, the updates unless made in place, and what is saved.
    returns_views : bool
        Whether some results are views of what the plan computes.
    """

    def __init__(
        self,
        traced: TracedChain,
        tensors: Tensors,
        settings: Settings,
        needs: Sequence[bool] = (),
        saved: Sequence[Node] = (),
        prepacked: frozenset[int] = frozenset(),
        in_place: bool = True,
    ):
        self.traced, self.settings, self.saved = traced, settings, saved
        self._backward: dict[tuple[bool, ...], Backward] = {}
        if any(needs):
            backward = self._backward[tuple(needs)] = Backward(traced, needs, settings)
            if any(backward.differentiable):
                self.saved = backward.saved
        self._prepacked, self._in_place = prepacked, in_place
        self._folded = [k for k, t in enumerate(tensors) if t.dim() > 2]
        self._layouts = dict(enumerate(map(layout_of, self.matrices(tensors))))
        self._execute: Any = None

    @cached_property
    def plan(self) -> Plan:
        return build(self.traced.as_traced(self.saved, self._in_place), self._layouts, self.settings, self._prepacked)

    @cached_property
    def _reshaped(self) -> list[tuple[int, tuple[int, ...]]]:
        """The results of which the plan has another shape, with the one that they are given."""
        values = self.traced.outputs
        if not self._in_place:
            values = [*values, *(self.traced.inputs[k] for k, _ in self.traced.chain.updates)]
        pairs = enumerate(zip(values, self.plan.outputs, strict=False))
        return [(k, tuple(value.shape)) for k, (value, output) in pairs if tuple(value.shape) != output.shape]

    @property
    def returns_views(self) -> bool:
        return bool(self._reshaped) or not all(output.direct for output in self.plan.outputs)

    def backward(self, needs: Sequence[bool]) -> Backward:
        """Return the backward pass for the gradients of these inputs."""
        key = tuple(needs)
        if key not in self._backward:
            self._backward[key] = Backward(self.traced, key, self.settings, self.saved)
        return self._backward[key]

    def matrices(self, tensors: Tensors) -> Tensors:
        """Fold the leading dimensions of the inputs into rows."""
        if not self._folded:
            return tensors
        matrices = list(tensors)
        for k in self._folded:
            matrices[k] = as_matrix(matrices[k])
        return matrices

    @property
    def loaded(self) -> bool:
        return self._execute is not None

    def load(self, arrays: Tensors) -> None:
        """Load the plan for arrays like these, as a call gets them."""
        self._execute = load(self.plan, arrays)
        self._outs = [None] * len(self.plan.outputs)

    def __call__(self, arrays: Tensors) -> list[Any]:
        """Run on matrices, then prepacked weights; return the plan's results in their own shapes."""
        if self._execute is None:
            self.load(arrays)
        results: list[Any] = self._execute(arrays, self._outs)
        for k, shape in self._reshaped:
            results[k] = results[k].reshape(shape)
        return results
