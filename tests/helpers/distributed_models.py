"""Small models for the tests with two processes, and how they are trained there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch_models as models
from torch import nn
from torch.nn import functional as F

WIDTH = 12
STEPS = 5


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return F.log_softmax(self.head(x), -1)


class Transformer(nn.Module):
    """One block: causal attention of three heads over four positions, an MLP, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.mlp = nn.Linear(WIDTH, WIDTH), models.Block(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Any) -> Any:
        h = x.view(-1, 4, WIDTH)
        q, k, v = (t.view(*h.shape[:2], 3, 4).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + self.proj(mixed)
        return torch.softmax(self.head(h + self.mlp(h)), -1)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight

    def forward(self, x: Any) -> Any:
        return torch.logsumexp(self.outer(F.gelu(self.inner(x))), -1, keepdim=True)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=5e-2, momentum=0.9),
    # Gradients that are zero but for rounding stay so: they are small beside eps.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, fused=True),
}


def data(rank: int, step: int, device: Any = "cpu", rows: int = 8) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator).to(device)


def whole(tensor: Any) -> Any:
    """All of a tensor that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def trained(module: Any, optimizer: str, rank: int, steps: int = STEPS, accumulate: Any = None) -> tuple[Any, Any]:
    """The losses of a few steps, and the parameters and buffers afterwards.

    `accumulate(module, last)` is a context for each of two backward passes a step; without it there is one.
    """
    chosen = OPTIMIZERS[optimizer](module.parameters())
    losses = []
    for step in range(steps):
        chosen.zero_grad()
        for turn in range(1 if accumulate is None else 2):
            with accumulate(module, turn == 1) if accumulate is not None else _nothing():
                loss = (gathered(module(data(rank, 2 * step + turn))).float() - 0.3).square().mean()
                loss.backward()
            losses.append(float(loss.detach()))
        chosen.step()
    return losses, [whole(t) for t in (*module.parameters(), *module.buffers())]


def gathered(y: Any) -> Any:
    return y.full_tensor() if hasattr(y, "full_tensor") else y


@contextmanager
def _nothing() -> Iterator[None]:
    yield
