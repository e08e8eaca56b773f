"""Weights that change: a module beside its fused form, and the ways to write to a weight, counted by PyTorch or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_support import OnHost

import cupyfuse.torch as ct
from cupyfuse.torch.chains import compiled, executor, prepacked


class Launching(OnHost):
    """As on a GPU, with streams that a test chooses."""

    current = 0

    def __init__(self) -> None:
        super().__init__()
        self.stream = lambda: self.current
        self.recordings = 0

    def record(self, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        self.recordings += 1
        return super().record(launch)

    @classmethod
    def in_place_of_gpu(cls, monkeypatch: pytest.MonkeyPatch) -> Launching:
        """Take tensors of the CPU for a GPU's: their chains are run, checked and prepared by the kernels."""
        runtime = cls()

        def weight_cache(plan: Any, matrices: Any, frozen: bool, budget: Any) -> Any:
            assert plan.conditional
            return (prepacked.FrozenCache if frozen else prepacked.CheckedCache)(plan, matrices, budget)

        for module in (compiled, prepacked):
            monkeypatch.setattr(module, "load", runtime.load)
        monkeypatch.setattr(compiled, "begin", runtime.begin)
        for module in (executor, prepacked):
            monkeypatch.setattr(module, "is_capturing", lambda: False)
        monkeypatch.setattr(prepacked, "runtime_of", lambda index: runtime)
        monkeypatch.setattr(executor, "weight_cache", weight_cache)
        monkeypatch.setattr(executor, "_is_cacheable", lambda t: not t.is_inference())
        return runtime


def sizes(device: str) -> tuple[int, int, int]:
    """Rows, columns, outputs: on a GPU large enough for halves to be kept, and for rows to be sampled."""
    return (64, 512, 768) if device == "cuda" else (5, 40, 9)


def pair(head: Any, device: str, **options: Any) -> tuple[Any, Any, Any]:
    """A module, its fused form with parameters of its own, and an input."""
    rows, k, n = sizes(device)
    plain = head(k, n).to(device)
    plain.eval()
    return plain, ct.fuse(copy.deepcopy(plain), **options), torch.randn(rows, k, device=device)


def entries(fused: Any) -> list[Any]:
    return [e for runner in fused.__dict__["_cupyfuse"].runners for e in runner.executors]


def checks(fused: Any) -> bool:
    """Whether something is kept, and checked by the device."""
    return any(isinstance(e._weights, prepacked.CheckedCache) for e in entries(fused))


def layer(module: Any) -> Any:
    return next(m for m in module.modules() if isinstance(m, nn.Linear))


def agree(fused: Any, plain: Any, x: Any) -> None:
    with torch.no_grad():
        got, want = fused(x), plain(x)
    size = float(want.abs().max().clamp(min=1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * size)


# Ways to change a weight --------------------------------------------------------------------------------------------


def data_add(weight: Any) -> None:
    weight.data += 0.25


def data_copy(weight: Any) -> None:
    weight.data.copy_(weight.data * -1.5)


def preserved(weight: Any) -> None:
    """As gathers of sharded parameters write."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.mul_(-1.5)


def one_row(weight: Any) -> None:
    weight.data[weight.shape[0] // 2] += 1


def one_column(weight: Any) -> None:
    weight.data[:, weight.shape[1] // 2 + 1] += 1


def averaged(weight: Any) -> None:
    weight.data.lerp_(torch.ones_like(weight), 0.1)


def swapped(weight: Any) -> None:
    weight.data = weight.data * 1.5


def in_place(weight: Any) -> None:
    with torch.no_grad():
        weight[0, 0] += 3


def through_numpy(weight: Any) -> None:
    if weight.is_cuda:
        weight.data += 0.25
    else:
        weight.detach().numpy()[...] += 0.25


WAYS = [data_add, data_copy, preserved, one_row, one_column, averaged, swapped, in_place, through_numpy]
