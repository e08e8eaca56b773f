"""Modules in every way in which their chains run, and what a call leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cupyfuse.torch as ct
from cupyfuse.torch.backend import fuse_module
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.cost import decision
from cupyfuse.torch.graphs.lowering import AsOperator


class Code(nn.Module):
    """A linear layer and a function of the module and its inputs."""

    def __init__(self, code: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("memory", torch.linspace(0.5, 1.5, 60).view(5, 12))
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.code(self, *args, **kwargs)


def operators(module: torch.fx.GraphModule, inputs: Any) -> Any:
    fuse_module(module, AsOperator(Options()), decision.judge_for(Options(), compiled=True))
    return module.forward


def compiled(module: torch.fx.GraphModule, inputs: Any) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(operators(module, inputs).__self__, inputs)


WAYS: dict[str, Callable[[Any], Any]] = {
    "fuse": ct.fuse,
    "operators": lambda m: torch.compile(m, backend=operators),
    "aot": lambda m: torch.compile(m, backend=compiled),
}


def tensors(tree: Any) -> list[Any]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def step(module: Any, arguments: Callable[[], tuple[Any, ...]]) -> dict[str, Any]:
    """Everything that a call and its backward pass leave behind."""
    torch.manual_seed(3)
    module.zero_grad()
    given = arguments()
    results = tensors(module(*given))
    seen = {"strides": [t.stride() for t in results], "graded": [t.requires_grad for t in results]}
    seen["results"] = [t.detach().clone() for t in results]
    terms = [(t * torch.arange(1.0, t.numel() + 1).to(t).view(t.shape).sin()).sum() for t in results if t.requires_grad]
    if terms:
        sum(terms).backward()
    seen["arguments"] = [t.detach().clone() for t in tensors(given)]
    seen["state"] = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    seen["gradients"] = [t.grad for t in (*tensors(given), *module.parameters()) if t.is_leaf]
    return seen


def same(module: nn.Module, arguments: Callable[[], tuple[Any, ...]], way: str, calls: int = 2) -> Any:
    """The same as eager's at every call; returns the fused module."""
    fused = WAYS[way](copy.deepcopy(module))
    for _ in range(calls):
        want = step(module, arguments)
        torch.testing.assert_close(step(fused, arguments), want, rtol=1e-4, atol=1e-5, equal_nan=True)
    return fused


def graded() -> tuple[Any, ...]:
    return (torch.randn(5, 12, requires_grad=True),)


def plain() -> tuple[Any, ...]:
    return (torch.randn(5, 12),)


def ways(test: Any) -> Any:
    return pytest.mark.parametrize("way", WAYS)(test)
