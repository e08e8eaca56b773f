"""Which chains `fuse` chooses, and what it may keep: the cost model in force."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_models as models
from torch import nn
from torch.distributed.fsdp import fully_shard

import cupyfuse.torch as ct
from cupyfuse.torch.chains import compiled, executor
from cupyfuse.torch.chains.prepacked import Budget

pytestmark = [pytest.mark.choice, pytest.mark.usefixtures("fresh_dynamo")]


def fused_after(module: nn.Module, x: Any, **options: Any) -> Any:
    fused = ct.fuse(module, **options)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x), rtol=1e-2, atol=1e-2)
    return fused


def test_a_head_is_chosen() -> None:
    fused = fused_after(models.HeadLogSumExp(), torch.randn(64, 12))
    (part,) = fused.explain().fused
    assert "us of host against" in part.estimate and part.estimate in str(fused.explain())


def test_what_gains_nothing_is_left_with_both_estimates() -> None:
    """One cuBLAS product in bfloat16 is the same either way."""
    fused = fused_after(nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16))
    assert not fused.explain().fused
    (part,) = fused.explain().left
    assert part.operations == ("linear",) and "us of GPU against" in part.reason


def test_everything_on_request() -> None:
    x = torch.randn(4, 64)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    assert not fused_after(module, x).explain().fused
    assert len(fused_after(module, x, only_gains=False).explain().fused) == 1


def test_graphs_between_hooks_cost_the_host() -> None:
    """Those of `fully_shard`, in this process alone: a head that saves the host 50 us, one that saves the GPU more."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for rows, k, n, fuses in ((64, 12, 7, False), (2048, 1024, 4096, True)):
            fused = ct.fuse(fully_shard(models.HeadLogSumExp(k, n)))
            fused(torch.randn(rows, k))
            found = fused.explain()
            assert bool(found.fused) == fuses
            told = [*(part.estimate for part in found.fused), *(part.reason for part in found.left)]
            # More graphs on a machine with GPUs, whose hooks break them.
            assert told and all(re.search("[1-9]00 us of host for a graph between hooks", text) for text in told)
        fused = ct.fuse(fully_shard(nn.Sequential(nn.Linear(12, 7), nn.Softmax(-1))))  # PyTorch's own code
        fused(torch.randn(64, 12))
        assert "nn.Sequential, within hooks" in str(fused.explain())
    finally:
        dist.destroy_process_group()


def test_gradients_are_part_of_the_estimate() -> None:
    """Autograd's node costs the host more than one small operation saves it."""
    x = torch.randn(16, 64)
    module = nn.Sequential(nn.Hardtanh(), nn.Softmax(-1))
    with_gradients = ct.fuse(module)
    with_gradients(x.requires_grad_())
    reasons = [part.reason for part in with_gradients.explain().left]
    assert reasons and not with_gradients.explain().fused


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_limits_of_memory(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_prepared"):
        ct.fuse(nn.Linear(2, 2), max_prepared=value)


class TwoHeads(nn.Module):
    """Two chains, which sorting keeps apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = models.HeadSum(), models.HeadSum()

    def forward(self, x: Any) -> Any:
        return self.first(x) + self.second(x.sort(1)[0]).sort(0)[0]


def test_a_limit_of_memory_is_kept_to() -> None:
    """Frozen weights are kept on the CPU too: the sums of one head's columns fit, those of the other do not."""
    module, x = TwoHeads(), torch.randn(5, 12)
    one = fused_after(copy.deepcopy(module), x, frozen=True, max_prepared=64)
    every = fused_after(copy.deepcopy(module), x, frozen=True)
    none = fused_after(copy.deepcopy(module), x, frozen=True, max_prepared=0)
    assert 0 == none.explain().kept < one.explain().kept <= 64 < every.explain().kept
    assert "prepacked weights" in str(every.explain()) and "more than may be kept" in none.explain().details()


def test_what_is_let_go_does_not_count() -> None:
    class Kept:
        nbytes = 10

    budget, kept = Budget(15), Kept()
    budget.charge(kept)  # type: ignore[arg-type]
    assert budget.used == 10 and not budget.allows(6, -1) and budget.allows(5, -1)
    del kept
    assert budget.used == 0 and budget.allows(15, -1)


def test_what_cannot_be_planned_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no plan")

    monkeypatch.setattr(compiled, "build", refuse)
    layer, x, before = ct.LinearSoftmax(7, 11), torch.randn(3, 7), set(executor._compiled)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias).softmax(-1))
    assert set(executor._compiled) == before


class Block(nn.Module):
    """Behind attention: a layer, a residual and a norm, two layers with a GELU, a residual and a norm, three layers."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.out, self.up, self.down, *self.heads = (
            nn.Linear(*sizes, dtype=dtype)
            for sizes in ((width, width), (width, 4 * width), (4 * width, width), *[(width, width)] * 3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for _ in range(2))
        self.heads = nn.ModuleList(self.heads)

    def forward(self, attended: Any, x: Any) -> Any:
        x = self.norms[0](self.out(attended) + x)
        x = self.norms[1](self.down(nn.functional.gelu(self.up(x))) + x)
        return [x, *(head(x) for head in self.heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_left_for_what_is_between_them(dtype: torch.dtype) -> None:
    """In 16 bits and of many rows, where PyTorch's add their biases: the rest gains more alone than as one chain."""
    block = Block(768, dtype)
    rows = 32768 if dtype == torch.bfloat16 else 8192
    attended, x = (torch.randn(rows, 768, dtype=dtype) for _ in range(2))
    fused = ct.fuse(block)
    with torch.no_grad():
        for found, expected in zip(fused(attended, x), block(attended, x), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    parts = [part.operations for part in fused.explain().fused]
    if dtype == torch.float32:
        assert len(parts) == 1 and parts[0].count("linear") == 6
    else:
        assert parts == [("add", "layer_norm")] * 2
        left = {part.operations: part.reason for part in fused.explain().left}
        assert any(
            ops[0] == "linear" and why.startswith("what is around it gains more alone") for ops, why in left.items()
        )
