"""Modules around a linear layer, and the comparison of their steps with those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_support import pair

DOUBLE = torch.float64


class Code(nn.Module):
    """A linear layer, and what comes after it as a function of the module and the layer's result."""

    def __init__(self, code: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.code(self, self.linear(x))


def near(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, equal_nan=True)


def step(module: Any, x: Any) -> list[Any]:
    """The results, and the gradients of a weighted sum of them."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y = list(y) if isinstance(y, (list, tuple)) else [y]
    terms = [(t * torch.sin(torch.arange(1.0, t.numel() + 1).to(t)).view(t.shape)).sum() for t in y if t.requires_grad]
    if terms and torch.is_grad_enabled():
        sum(terms).backward()
    return [*(t.detach().clone() for t in y), x.grad, *(p.grad for p in module.parameters())]


def same_steps(module: nn.Module, change: Callable[[Any], Any] | None = None, times: int = 2) -> Any:
    """The same results and gradients at every call, and after a change of the module; returns the fused module."""
    plain, fused, x = pair(module, "cpu", DOUBLE)
    for _ in range(times):
        near(step(fused, x), step(plain, x))
    if change is not None:
        torch.manual_seed(1)
        change(plain)
        torch.manual_seed(1)
        change(fused)
        near(step(fused, x), step(plain, x))
    near(list(fused.buffers()), list(plain.buffers()))
    return fused
