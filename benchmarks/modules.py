"""Wrapper modules around models of transformers and timm, for `networks`. Imports PyTorch."""

from __future__ import annotations

from typing import Any

import torch


class Encoder(torch.nn.Module):
    """The encoder alone of an encoder-decoder model."""

    def __init__(self, whole: Any):
        super().__init__()
        self.encoder = whole.get_encoder()

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.encoder(**inputs).last_hidden_state


class Images(torch.nn.Module):
    """A model under the keyword argument that transformers uses for images."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> Any:
        return self.model(pixel_values)
