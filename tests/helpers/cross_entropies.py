"""Linear layer and cross entropy in PyTorch's operations, with all options of `linear_cross_entropy`."""

from __future__ import annotations

from typing import Any

import torch

F = torch.nn.functional
REDUCTIONS = ("none", "mean", "sum")
# Options to test; tests put weights in the place of a true `class_weight`.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.25},
    {"ignore_index": 7},
    {"z_loss": 0.01},
    {"soft_cap": 2.0},
    {"temperature": 0.7},
    {"class_weight": True},
    {"class_weight": True, "label_smoothing": 0.1, "z_loss": 0.1, "soft_cap": 3.0, "temperature": 1.5},
]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Draw from the standard normal distribution."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Any, w: Any, target: Any, b: Any = None, **options: Any) -> Any:
    """Compute what `linear_cross_entropy` does, in PyTorch's operations."""
    own = {name: options.pop(name, None) for name in ("z_loss", "soft_cap", "temperature")}
    y = F.linear(x, w, b)
    if own["soft_cap"] is not None:
        y = own["soft_cap"] * torch.tanh(y / own["soft_cap"])
    if own["temperature"] is not None:
        y = y / own["temperature"]
    class_weight, reduction = options.pop("class_weight", None), options.pop("reduction", "mean")
    loss = F.cross_entropy(y, target, class_weight, reduction=reduction, **options)
    if not own["z_loss"]:
        return loss
    penalty = own["z_loss"] * y.logsumexp(1) ** 2
    counted = torch.ones_like(penalty)
    if not target.is_floating_point():
        counted = (target != options.get("ignore_index", -100)).to(y.dtype)
        counted = counted * (1 if class_weight is None else class_weight[target.clamp(min=0)])
    total = (penalty * counted).sum()
    return loss + {"none": penalty * counted, "sum": total, "mean": total / counted.sum()}[reduction]
