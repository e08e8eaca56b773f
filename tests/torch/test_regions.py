"""Checkpointed regions: chains within them, what is kept, what is computed once more."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch_support import fused_chains
from torch_ways import WAYS, Code, graded, same, ways

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _region(m: Any, h: Any) -> Any:
    m.drop(h)
    return F.gelu(m.linear(m.drop(h))).softmax(-1)


# Without a compiler PyTorch's operator for regions recomputes with other random numbers, and so does "aot_eager".
DROPPED = [(p, way) for p in (0.0, 0.5) for way in WAYS if not p or way not in ("operators", "aot")]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("p", "way"), DROPPED)
def test_checkpointed_regions(p: float, way: str, reentrant: bool) -> None:

    def code(m: Any, x: Any) -> Any:
        return checkpoint(functools.partial(_region, m), x * 1, use_reentrant=reentrant).exp() * 2

    fused = same(Code(code, drop=nn.Dropout(p)), graded, way)
    if way == "fuse":
        assert ("linear", "gelu", "softmax") in fused_chains(fused) or p == 0
        assert not [part for part in ct.explain(fused).left if "mode" in part.reason]


def test_checkpointed_regions_keep_their_inputs_only() -> None:
    module = Code(lambda m, x: checkpoint(lambda h: F.gelu(m.linear(h)).softmax(-1), x * 1, use_reentrant=False) * 2)
    fused, x = ct.fuse(module), torch.randn(5, 12, requires_grad=True)
    fused(x)
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        fused(x)
    assert sum(t.shape == x.shape for t in kept) == 1


def _within(m: Any, x: Any) -> Any:
    def outer(h: Any) -> Any:
        return checkpoint(lambda y: F.gelu(m.linear(y)).softmax(-1), h * 2, use_reentrant=False).exp() * 2

    return checkpoint(outer, x * 1, use_reentrant=False).exp()


def _with_options(m: Any, x: Any) -> Any:
    region = lambda h, by=None: ((m.linear(h) * by).softmax(-1), h.exp() * 2)  # noqa: E731
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    a, b = checkpoint(region, x * 1, use_reentrant=False, by=x.detach().exp(), **options)
    return (a * b).softmax(-1)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(m: Any, x: Any) -> Any:
    context = functools.partial(create_selective_checkpoint_contexts, _policy)
    region = lambda h: F.gelu(m.linear(h)).softmax(-1)  # noqa: E731
    return checkpoint(region, x * 1, use_reentrant=False, context_fn=context).exp() * 2


def _transformed(m: Any, x: Any) -> Any:
    rows = torch.vmap(lambda r: (r * 2).softmax(-1))
    return checkpoint(lambda h: rows(m.linear(h)).exp(), x * 1, use_reentrant=False).softmax(-1)


@pytest.mark.rotates
@ways
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("code", [_within, _with_options, _selective, _transformed])
def test_regions_of_all_kinds(code: Any, way: str) -> None:
    same(Code(code), graded, way)


@pytest.mark.parametrize("regions", [1, 2])
def test_regions_that_change_buffers(regions: int) -> None:
    """In eager code too the running statistics are updated once more in the backward pass."""

    def code(m: Any, x: Any) -> Any:
        for _ in range(regions):
            x = checkpoint(lambda h: m.norm(m.linear(h)).softmax(-1), x * 1, use_reentrant=False).exp() * 2
        return x

    given = lambda: (torch.randn(5, 12, dtype=torch.float64, requires_grad=True),)  # noqa: E731
    same(Code(code, norm=nn.BatchNorm1d(12)).double(), given, "fuse")
