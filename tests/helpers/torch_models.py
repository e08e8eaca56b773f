"""Models that the tests of `cupyfuse.torch` fuse: heads, tails in all spellings, whole networks, awkward code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class HeadLogSumExp(nn.Module):
    def __init__(self, k: int = 12, n: int = 7):
        super().__init__()
        self.linear = nn.Linear(k, n)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        x = F.leaky_relu(F.leaky_relu(x, negative_slope=0.01), negative_slope=0.01)
        return F.gelu(F.gelu(x))


class HeadSum(nn.Module):
    def __init__(self, k: int = 12, n: int = 7):
        super().__init__()
        self.linear = nn.Linear(k, n)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sum(self.linear(x), dim=1, keepdim=True)
        x = torch.max(x, dim=1, keepdim=True)[0]
        x = torch.mean(x, dim=1, keepdim=True)
        return torch.logsumexp(torch.logsumexp(x, dim=1, keepdim=True), dim=1, keepdim=True)


class HeadSoftmax(nn.Module):
    def __init__(self, k: int = 12, n: int = 7, momentum: float | None = 0.1):
        super().__init__()
        self.gemm = nn.Linear(k, n)
        self.bn = nn.BatchNorm1d(n, momentum=momentum)
        self.scale = nn.Parameter(torch.ones(1))
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.scale * self.bn(self.gemm(x)))


class Written(nn.Module):
    """A chain as a function of a linear layer's result, or of its input and weight."""

    def __init__(self, tail: Callable[[Tensor], Tensor], k: int = 12, n: int = 8):
        super().__init__()
        self.linear = nn.Linear(k, n)
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.linear(x))


class Tail(nn.Module):
    """A chain as a function of the input."""

    def __init__(self, tail: Callable[..., Any]):
        super().__init__()
        self.tail = tail

    def forward(self, x: Any) -> Any:
        return self.tail(x)


class Products(nn.Module):
    """`torch.matmul(x, w.T)`, a bias of its own, a residual that is detached."""

    def __init__(self, k: int = 12, n: int = 8):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) / k**0.5)
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.matmul(x, self.weight.T) + self.bias
        kept = y.clone().detach()
        return (y.mean(dim=1, keepdim=True) * 2 - kept.logsumexp(1, keepdim=True)).sigmoid() + kept


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        y += 1
        y.mul_(0.5).clamp_(min=-1)
        return y.softmax(-1)


class Network(nn.Module):
    """Convolutions, blocks with chains of their own, a functional head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU())
        self.blocks = nn.ModuleList([Block(24) for _ in range(2)])
        self.head = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        return {"logits": logits, "probabilities": F.softmax(logits, dim=-1), "energy": -logits.logsumexp(-1)}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Branching(nn.Module):
    """Asks for a value of a tensor; its blocks do not."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Written(lambda y: F.gelu(y).logsumexp(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if x.sum() > 0 else -self.block(x)


class Counting(nn.Module):
    """Changes an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.gelu(self.linear(x)).sum(1)


class Listing(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.shape)
        return F.gelu(self.linear(x)).sum(1)


def groups(y: Tensor, width: int) -> Tensor:
    return F.avg_pool1d(y.unsqueeze(1), width).squeeze(1)


def whitened(y: Tensor, variance: Tensor, mean: Tensor) -> Tensor:
    return (y - mean) * (variance + 1e-5).rsqrt()


HEADS = (HeadLogSumExp, HeadSum, HeadSoftmax)

TAILS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid, sum, logsumexp": lambda y: torch.logsumexp(torch.sigmoid(y).sum(dim=1, keepdim=True), dim=0),
    "swish, scale": lambda y: y * torch.sigmoid(y) * 2.0,
    "scale, hardtanh, gelu": lambda y: F.gelu(F.hardtanh(y * 0.5, -2.0, 2.0)),
    "maximum, subtract, gelu": lambda y: F.gelu(
        y.amax(1, keepdim=True) - y.amax(1, keepdim=True).mean(1, keepdim=True)
    ),
    "minimum with a number": lambda y: torch.min(y, torch.tensor(0.5, dtype=y.dtype, device=y.device)) - 0.5,
    "average pool, gelu, scale, max": lambda y: (F.gelu(groups(y, 4)) * 2).amax(1),
    "add, swish, tanh, gelu, hardtanh": lambda y: F.hardtanh(F.gelu(torch.tanh(torch.sigmoid(y + 1) * y)), -1, 1),
    "residual": lambda y: y * 0.5 + y.clone().detach(),
    "log-softmax": lambda y: F.log_softmax(y, dim=1),
    "layer norm": lambda y: F.layer_norm(y, (y.shape[-1],)).relu(),
    "masked": lambda y: torch.where(y > 0, y, -1.0).masked_fill(y > 1, 1.0).softmax(-1),
    "statistics": lambda y: (y - y.mean(0)) / (y.var(0, unbiased=False) + 1e-5).sqrt(),
    "norm": lambda y: F.normalize(y, dim=-1),
    "norm of order 3": lambda y: F.normalize(y, 3.0, -1) * torch.linalg.vector_norm(y, 1.5, -1, keepdim=True),
    "both moments": lambda y: whitened(y, *torch.var_mean(y, -1, keepdim=True)) * torch.std_mean(y, -1)[1][:, None],
    "inverse functions": lambda y: y.tanh().asin() + y.asinh().atan2(y.abs().add(1.25).acosh()) - (y.sin() / 2).atanh(),
    "methods": lambda y: y.exp().add(1).log().mul(0.25).sub(y.mean(-1, keepdim=True)).abs().sqrt(),
    "numbers": lambda y: 1 / (1 + (2 - y) ** 2) - 3 * y / 4,
    "softplus, mish": lambda y: F.mish(F.softplus(y)).sum(-1, keepdim=True),
    "selu, elu, celu": lambda y: F.selu(y) + F.elu(y, 0.5) - F.celu(y, 1.5),
    "one column": lambda y: y.sum(1, keepdim=True).amax(1, keepdim=True).logsumexp(1),
}
TAILS |= {
    # Many equal elements: PyTorch gives the gradient to the first of them.
    "largest of ties": lambda y: y.relu().max(dim=1, keepdim=True).values * y.relu().max(0)[0],
    "smallest of ties": lambda y: torch.min(y.clamp(min=-0.1), 1)[0],
    "largest of neighbours": lambda y: F.max_pool1d(F.hardtanh(y).unsqueeze(1), 2).squeeze(1).sum(1),
    "shared among ties": lambda y: y.relu().amin(1) + y.relu().amax(1),
}
