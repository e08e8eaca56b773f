"""The row programs of `python -m benchmarks rows`: fused, in PyTorch, and as NumPy code for the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import cupyfuse as cf


@dataclass(frozen=True)
class RowProgram:
    """One program over the rows of matrices.

    Attributes
    ----------
    written : callable
        `written(special, *matrices, *vectors)`: NumPy code, with softmax and its like from `special`.
    torch : callable
        `torch(F, *matrices, *vectors)`: the same in PyTorch; `F` is `torch.nn.functional`.
    matrices, vectors : int
        How many operands are matrices, and how many have an element for each column.
    reduces : bool
        Whether the result has one element for each row.
    """

    written: Callable[..., Any]
    torch: Callable[..., Any]
    matrices: int = 1
    vectors: int = 0
    reduces: bool = False

    @cached_property
    def fused(self) -> cf.Fused:
        """The fused function of the operands."""
        written = self.written
        return cf.fuse(lambda *operands: written(cf, *operands))

    @property
    def passes(self) -> int:
        """How often at least as many bytes as a matrix has are read or written."""
        return self.matrices + (not self.reduces)


def _activations(s: Any, x: Any) -> Any:
    y = s.logsumexp(x, axis=1)
    for _ in range(2):
        y = np.where(y > 0, y, y * 0.01)
    for _ in range(2):
        y = 0.5 * y * (1 + s.erf(y * 0.5**0.5))
    return y


def _layer_norm(s: Any, x: Any, gamma: Any, beta: Any) -> Any:
    centred = x - x.mean(axis=1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 1e-5) * gamma + beta


def _rms_norm(s: Any, x: Any, gamma: Any) -> Any:
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6) * gamma


def _standardised(s: Any, x: Any) -> Any:
    return s.softmax((x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True), axis=1)


def _standardised_in_torch(F: Any, x: Any) -> Any:
    return F.softmax((x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True), 1)


PROGRAMS: dict[str, RowProgram] = {
    "softmax": RowProgram(lambda s, x: s.softmax(x, axis=1), lambda F, x: F.softmax(x, 1)),
    "logsumexp": RowProgram(lambda s, x: s.logsumexp(x, axis=1), lambda F, x: x.logsumexp(1), reduces=True),
    "log_softmax": RowProgram(lambda s, x: s.log_softmax(x, axis=1), lambda F, x: F.log_softmax(x, 1)),
    "logsumexp_activations": RowProgram(
        _activations,
        lambda F, x: F.gelu(F.gelu(F.leaky_relu(F.leaky_relu(x.logsumexp(1))))),
        reduces=True,
    ),
    "sum": RowProgram(lambda s, x: x.sum(axis=1), lambda F, x: x.sum(1), reduces=True),
    "max": RowProgram(lambda s, x: x.max(axis=1), lambda F, x: x.amax(1), reduces=True),
    "layer_norm": RowProgram(
        _layer_norm, lambda F, x, gamma, beta: F.layer_norm(x, x.shape[1:], gamma, beta, 1e-5), vectors=2
    ),
    "rms_norm": RowProgram(_rms_norm, lambda F, x, gamma: F.rms_norm(x, x.shape[1:], gamma, 1e-6), vectors=1),
    "residual_rms_norm": RowProgram(
        lambda s, x, r, gamma: _rms_norm(s, x + r, gamma),
        lambda F, x, r, gamma: F.rms_norm(x + r, x.shape[1:], gamma, 1e-6),
        matrices=2,
        vectors=1,
    ),
    "affine_softmax": RowProgram(
        lambda s, x, gamma, beta: s.softmax(x * gamma + beta, axis=1),
        lambda F, x, gamma, beta: F.softmax(x * gamma + beta, 1),
        vectors=2,
    ),
    "softmax_backward": RowProgram(
        lambda s, dy, y: (dy - (dy * y).sum(axis=1, keepdims=True)) * y,
        lambda F, dy, y: (dy - (dy * y).sum(1, keepdim=True)) * y,
        matrices=2,
    ),
    "standardised_softmax": RowProgram(_standardised, _standardised_in_torch),
    "entropy": RowProgram(
        lambda s, x: -(s.softmax(x, axis=1) * s.log_softmax(x, axis=1)).sum(axis=1),
        lambda F, x: -(F.softmax(x, 1) * F.log_softmax(x, 1)).sum(1),
        reduces=True,
    ),
}
