"""Modules that are fused from the start: the three heads, and common tails of networks.

Each is a plain module of PyTorch's operations, with the constructor, the random draws and the names of parameters of
the modules that it replaces, so that seeds and checkpoints carry over.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from .module import drop_in

Tensor: TypeAlias = torch.Tensor


@drop_in
class HeadLogSumExp(nn.Module):
    """Linear, logsumexp over the row, LeakyReLU twice, GELU twice.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    negative_slope : float
        Of each LeakyReLU.
    approximate : {"none", "tanh"}
        The form of GELU.

    Notes
    -----
    Takes (B, in_features), returns (B, 1). Parameters are those of `linear`, a `torch.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        negative_slope: float = 0.01,
        approximate: str = "none",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.negative_slope, self.approximate = negative_slope, approximate

    def forward(self, x: Tensor) -> Tensor:
        x = torch.logsumexp(self.linear(x), dim=1, keepdim=True)
        x = F.leaky_relu(F.leaky_relu(x, self.negative_slope), self.negative_slope)
        return F.gelu(F.gelu(x, approximate=self.approximate), approximate=self.approximate)


@drop_in
class HeadSum(nn.Module):
    """Linear, then sum, max, mean, logsumexp and logsumexp over the row, of which all but the sum see one element.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool

    Notes
    -----
    Takes (B, in_features), returns (B, 1). Parameters are those of `linear`, a `torch.nn.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sum(self.linear(x), dim=1, keepdim=True)
        x = torch.max(x, dim=1, keepdim=True)[0]
        x = torch.mean(x, dim=1, keepdim=True)
        x = torch.logsumexp(x, dim=1, keepdim=True)
        return torch.logsumexp(x, dim=1, keepdim=True)


@drop_in
class HeadSoftmax(nn.Module):
    """Linear, BatchNorm1d, a scale, softmax over the row.

    Parameters
    ----------
    in_features, out_features : int
    bn_eps : float
    bn_momentum : float or None
    scale_shape : tuple of int
        (1,) for one scale, (out_features,) for one a column; ones at first.
    bias : bool

    Notes
    -----
    Takes (B, in_features), returns (B, out_features). Parameters are those of `gemm`, a `torch.nn.Linear`, and of `bn`,
    a `torch.nn.BatchNorm1d`, and `scale`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bn_eps: float = 1e-5,
        bn_momentum: float | None = 0.1,
        scale_shape: tuple[int, ...] = (1,),
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(scale_shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.scale * self.bn(self.gemm(x)), dim=1)


# Linear layers with what follows them ------------------------------------------------------------------------------


@drop_in
class LinearLogSumExp(nn.Linear):
    """`torch.nn.Linear`, then logsumexp over the last dimension, (..., in_features) to (...).

    Takes the arguments of `torch.nn.Linear`, and has its parameters.
    """

    def forward(self, input: Tensor) -> Tensor:
        return torch.logsumexp(super().forward(input), dim=-1)


@drop_in
class LinearSoftmax(nn.Linear):
    """`torch.nn.Linear`, then softmax over the last dimension; arguments and parameters of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.softmax(super().forward(input), dim=-1)


@drop_in
class LinearLogSoftmax(nn.Linear):
    """`torch.nn.Linear`, then log-softmax over the last dimension; arguments and parameters of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(input), dim=-1)


@drop_in
class LinearGELU(nn.Linear):
    """`torch.nn.Linear`, then GELU in its exact form; arguments and parameters of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(super().forward(input))


@drop_in
class LinearSiLU(nn.Linear):
    """`torch.nn.Linear`, then SiLU; arguments and parameters of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


@drop_in
class LinearReLU(nn.Linear):
    """`torch.nn.Linear`, then ReLU; arguments and parameters of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


# Reductions ---------------------------------------------------------------------------------------------------------


@drop_in
class Softmax(nn.Softmax):
    """`torch.nn.Softmax`, fused."""


@drop_in
class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, fused."""
