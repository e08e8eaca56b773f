"""Tensors whose rows lie in blocks, as the heads of fused projections do: chains read them where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_support import Code

import cupyfuse.torch as ct
from cupyfuse.torch.chains.tensors import as_matrix, as_rows, folds, lies_in_rows

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def by_slices(y: Any, b: int, n: int) -> Any:
    return [y[..., k : k + 64].view(b, n, 4, 16).transpose(1, 2) for k in (0, 64)]


def by_unbind(y: Any, b: int, n: int) -> Any:
    q, k, _ = y.view(b, n, 3, 4, 16).unbind(2)
    return q.transpose(1, 2), k.transpose(1, 2)


def by_indices(y: Any, b: int, n: int) -> Any:
    y = y.view(b, n, 3, 4, 16)
    return y[:, :, 0].transpose(1, 2), y[:, :, 1].transpose(1, 2)


def by_permutation(y: Any, b: int, n: int) -> Any:
    q, k, _ = y.reshape(b, n, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k


def in_pairs(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class Heads(nn.Module):
    """Queries and keys of one projection, turned: a part of each, put together in C order, or all."""

    def __init__(self, cut: Callable[..., Any], turn: Callable[..., Any] = rotated, together: bool = False):
        super().__init__()
        self.cut, self.turn, self.together, self.project = cut, turn, together, nn.Linear(12, 3 * 64)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        found, length = [], cos.shape[-1]
        for heads in self.cut(self.project(x), *x.shape[:2]):
            turned = self.turn(heads[..., :length] if self.together else heads, cos[:, None], sin[:, None])
            found.append(torch.cat((turned, heads[..., length:]), -1) if self.together else turned)
        return tuple(found)


def run(module: Any, arguments: Any) -> list[Any]:
    """Return the results and all gradients."""
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in arguments]
    module.zero_grad()
    found = module(*given)
    found = list(found) if isinstance(found, tuple) else [found]
    sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in found).backward()
    return [*found, *(a.grad for a in given if a.requires_grad), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("cut", [by_slices, by_unbind, by_indices, by_permutation])
def test_heads_of_fused_projections(cut: Callable[..., Any]) -> None:
    module = Heads(cut)
    fused = ct.fuse(module, only_gains=False)
    for batch in (2, 3):
        x, angles = torch.randn(batch, 5, 12), torch.randn(batch, 5, 16)
        for ours, theirs in zip(run(fused, (x, angles, angles * 2)), run(module, (x, angles, angles * 2)), strict=True):
            torch.testing.assert_close(ours, theirs)
            assert ours.stride() == theirs.stride()
    turned = [chain for chain in fused.explain().fused if "cat" in chain.operations]
    details = str(fused.explain().details())
    assert turned and "copy" not in details and "contiguous" not in details


@pytest.mark.parametrize("length", [16, 8, 4])
@pytest.mark.parametrize("turn", [rotated, in_pairs])
@pytest.mark.parametrize("cut", [by_slices, by_unbind])
def test_heads_in_c_order(cut: Callable[..., Any], turn: Callable[..., Any], length: int) -> None:
    """What is put together is in C order, and reads the permuted heads where they are."""
    module = Heads(cut, turn, together=True)
    fused = ct.fuse(module, only_gains=False)
    x, angles = torch.randn(2, 5, 12), torch.randn(2, 5, length)
    for ours, theirs in zip(run(fused, (x, angles, angles * 2)), run(module, (x, angles, angles * 2)), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()
    assert any("cat" in chain.operations for chain in fused.explain().fused)
    details = str(fused.explain().details())
    if length > 4:  # else halves are no whole packs
        assert "copy" not in details and "strided" not in details and "contiguous" not in details


SHIFTED: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: (x[:, 1:] * 2).softmax(-1),
    "norm": lambda x: F.layer_norm(x[:, :-1], (8,)) + 1,
    "sum": lambda x: (x[:, 1:] - x[:, :-1]).square().sum(-1),
    "of_no_operation": lambda x: x[:, 1:].logsumexp(-1),
    "loss": lambda x: F.cross_entropy(x[:, :-1].flatten(0, 1), torch.arange(12) % 8),
    "columns": lambda x: x[:, 1:].mean((0, 1)) * 2,
    "product": lambda x: (x[:, 1:] @ torch.linspace(-1, 1, 24).view(8, 3)).relu(),
    "two_of_them": lambda x: torch.cat((x[:, 1:] * 2, x[:, :-1] + 1), -1),
    "part_of_a_part": lambda x: x[:, 1:, 2:6].exp() * 2,
}


@pytest.mark.parametrize("name", SHIFTED)
def test_all_rows_but_one_of_each_batch(name: str) -> None:
    module = Code(SHIFTED[name])
    fused = ct.fuse(module, only_gains=False)
    x = torch.randn(3, 5, 8)
    for ours, theirs in zip(run(fused, (x,)), run(module, (x,)), strict=True):
        torch.testing.assert_close(ours, theirs)
    compiled = torch.compile(module, backend="cupyfuse")
    torch.testing.assert_close(compiled(x), module(x))


def test_written_memory_is_read_as_it_is() -> None:
    def code(x: Any) -> Any:
        y = x * 1
        part = y[:, 1:]
        y.add_(1)
        shown = part * 2
        part.mul_(3)
        return shown + part, y

    x = torch.randn(3, 5, 8)
    for ours, theirs in zip(ct.fuse(Code(code), only_gains=False)(x), code(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_folding() -> None:
    x = torch.randn(3, 5, 3, 4, 8)
    q = x[:, :, 1]
    for rows in (q, q.transpose(1, 2), x[:, 1:, 1, 1]):
        assert lies_in_rows(rows) and not folds(rows)
        assert as_rows(rows).stride() == rows.stride() and as_rows(rows).data_ptr() == rows.data_ptr()
    whole = as_rows(x)
    assert folds(x) and whole.shape == (180, 8) and whole.data_ptr() == x.data_ptr()
    for other in (x[:, 1:, 1:, 1:], q.transpose(-1, -2), q[..., ::2], q.expand(2, *q.shape)[:, :, 1:]):
        assert not lies_in_rows(other) and torch.equal(as_rows(other), as_matrix(other))
