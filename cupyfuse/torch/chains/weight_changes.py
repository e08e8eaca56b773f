"""Signs that a weight may have changed, beside its version, which many ways of writing to memory do not count.

Fused optimizers, `parameter.data.add_(...)` and gathers of sharded parameters leave versions as they were. Steps of
optimizers and gradients that were computed are counted here: whoever trains changes weights after those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary


class Count:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


steps = Count()  # of all of PyTorch's optimizers
NEVER = Count()
_gradients = WeakIdKeyDictionary()


def gradients_of(tensor: torch.Tensor) -> Count:
    """How often a fused chain's backward pass has produced a gradient for this tensor."""
    found = _gradients.get(tensor)
    if found is None:
        found = _gradients[tensor] = Count()
    return found


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    steps.value += 1


register_optimizer_step_post_hook(_stepped)
