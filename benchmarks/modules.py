"""Modules that the networks of the benchmark are made of, beside those of libraries. Imports PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

Tensor = torch.Tensor


class Encoder(torch.nn.Module):
    """The encoder of a model of two halves, as a module that holds nothing else."""

    def __init__(self, whole: Any):
        super().__init__()
        self.encoder = whole.get_encoder()

    def forward(self, **inputs: Tensor) -> Any:
        return self.encoder(**inputs).last_hidden_state


class Images(torch.nn.Module):
    """A model under the keyword argument that transformers uses for images."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values)


def perceptron(depth: int, width: int, classes: int) -> torch.nn.Module:
    """Linear, BatchNorm, ReLU, `depth` times, and a classifier."""
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, classes))


def loss(output: Tensor, labels: Tensor | None) -> Tensor:
    """Cross-entropy with labels, or else the mean square, in float32 at least."""
    wide = output if output.dtype == torch.float64 else output.float()
    return wide.square().mean() if labels is None else F.cross_entropy(wide, labels)
