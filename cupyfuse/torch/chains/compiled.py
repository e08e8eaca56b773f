"""A chain compiled for one signature: its loaded plan and its backward passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ...ir.kinds import is_product
from ...plan.build import build
from ...plan.plan import Plan
from ...settings import Settings
from .backward import Backward
from .chain import TracedChain
from .runtime import begin, load
from .saving import SavedValues
from .tensors import Tensors, as_matrix, as_rows, layout_of, lies_in_rows


class CompiledChain:
    """A chain compiled for inputs of fixed shapes, dtypes and strides on one device; it holds no tensors.

    Parameters
    ----------
    tensors : inputs like those that it will be called with
    needs : for each input, whether its gradient is wanted; the values saved for the backward pass are chosen for these
    saving : the values saved for the backward pass, if they are not chosen by `needs`
    prepacked : the inputs from which weights are prepacked, by a plan of their own
    checked : whether each call checks that these are unchanged
    in_place : whether updates are written to the inputs, and gradients of two inputs may be one tensor; else updates
        are results, after the outputs, and no results share memory

    Attributes
    ----------
    execute : runs the plan on `arguments`, then prepacked weights; None until it is loaded
    """

    def __init__(
        self,
        traced: TracedChain,
        tensors: Tensors,
        settings: Settings,
        needs: Sequence[bool] = (),
        saving: SavedValues | None = None,
        prepacked: frozenset[int] = frozenset(),
        checked: bool = False,
        in_place: bool = True,
    ):
        self.traced, self.settings, self.saving = traced, settings, saving or SavedValues([])
        self._backward: dict[tuple[bool, ...], Backward] = {}
        if any(needs):
            backward = self._backward[tuple(needs)] = Backward(traced, needs, settings, distinct=not in_place)
            if any(backward.differentiable):
                self.saving = backward.saving
        self._prepacked, self._checked, self._in_place = prepacked, checked, in_place
        self._folded = [k for k, t in enumerate(tensors) if t.dim() > 2]
        self._folding_copies = not all(lies_in_rows(tensors[k]) for k in self._folded)
        self._layouts = dict(enumerate(map(layout_of, self.matrices(tensors))))
        self._begun: tuple[Any, Any] = None, None  # layouts of arguments, and what loads the plan for them
        self.execute: Any = None

    @cached_property
    def plan(self) -> Plan:
        """The plan, whose results are the outputs, the updates unless made in place, and the saved values."""
        traced = self.traced.as_traced(self.saving.nodes, self._in_place)
        plan = build(traced, self._layouts, self.settings, self._prepacked, self._checked)
        plan.saving = self.saving.note
        return plan

    @property
    def returns_views(self) -> bool:
        """Whether results may be views of what the plan computes."""
        return not all(output.direct for output in self.plan.outputs)

    def backward(self, needs: Sequence[bool]) -> Backward:
        """Return the backward pass for the gradients of these inputs."""
        key = tuple(needs)
        if key not in self._backward:
            self._backward[key] = Backward(self.traced, key, self.settings, self.saving, distinct=not self._in_place)
        return self._backward[key]

    def matrices(self, tensors: Tensors) -> Tensors:
        """Fold the leading dimensions of the inputs into rows."""
        if not self._folded:
            return tensors
        matrices = list(tensors)
        for k in self._folded:
            matrices[k] = (as_matrix if k in self._prepacked else as_rows)(matrices[k])
        return matrices

    def arguments(self, tensors: Tensors) -> Tensors:
        """Return the inputs as `execute` takes them: folded, unless it reads no more of them than their addresses.

        Those that weights are prepacked from are always folded: the plan that prepacks reads their shapes.
        """
        if not self._reads_addresses:
            return self.matrices(tensors)
        if self._prepacked.isdisjoint(self._folded):
            return tensors
        return [as_matrix(t) if k in self._prepacked else t for k, t in enumerate(tensors)]

    @property
    def is_loaded(self) -> bool:
        return self.execute is not None

    @property
    def _reads_addresses(self) -> bool:
        """Whether the loaded plan reads only the addresses of its arguments, which folding does not change."""
        return not self._folding_copies and getattr(self.execute, "quick", None) is not None

    @property
    def takes_tensors(self) -> bool:
        """Whether `execute` takes the inputs as they are."""
        return not self._folded or self._reads_addresses

    @cached_property
    def has_products(self) -> bool:
        """Whether the plan depends on the precision of products."""
        return any(map(is_product, self.traced.as_traced().graph.order))

    def prepare(self, arrays: Tensors, device: torch.device) -> None:
        """Begin to compile the kernels for arguments of these layouts, which may be tensors of the device "meta"."""
        if self._begun[1] is None:
            self._begun = _layouts_of(arrays), begin(self.plan, arrays, device)

    def load(self, arrays: Tensors) -> None:
        """Load the plan for arguments like these."""
        layouts, finish = self._begun
        is_begun = finish is not None and layouts == _layouts_of(arrays)
        self.execute = finish() if is_begun else load(self.plan, arrays)

    def __call__(self, arrays: Tensors) -> list[Any]:
        """Run on `arguments`, then prepacked weights; return the plan's results."""
        if self.execute is None:
            self.load(arrays)
        results: list[Any] = self.execute(arrays)
        return results


def _layouts_of(arrays: Tensors) -> Any:
    return [(a.shape, a.stride(), a.dtype) for a in arrays]
