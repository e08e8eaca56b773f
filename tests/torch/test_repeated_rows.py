"""Tensors that are broadcast along a dimension in the middle, such as masks of attention, are of a chain."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_ways import WAYS, Code

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Modulated(nn.Module):
    """A block of a diffusion transformer: scale, shift and gate are of each image."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulate, self.first, self.second = nn.Linear(8, 3 * width), nn.Linear(width, 48), nn.Linear(48, width)

    def forward(self, x: Any, condition: Any) -> Any:
        scale, shift, gate = self.modulate(F.silu(condition)).unflatten(-1, (3, -1)).unbind(1)
        y = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return x + self.second(F.gelu(self.first(y))) * gate.unsqueeze(1)


class Scores(nn.Module):
    """The softmax of attention whose scores have biases for keys, for pairs of tokens, and for those of each image."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.pairs = nn.Parameter(torch.randn(1, 1, 1, 16)), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Any, bias: Any) -> Any:
        return torch.softmax(x * 0.5 + bias + self.keys + self.pairs, -1)


class Masked(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return torch.softmax(x.masked_fill(mask > 1, -torch.inf), -1)


class Placed(nn.Module):
    """Learned positions, and a norm behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.norm = nn.Parameter(torch.randn(7, 32)), nn.LayerNorm(32)

    def forward(self, x: Any, other: Any) -> Any:
        return self.norm(x + self.positions) * other


class Computed(nn.Module):
    """What is broadcast is computed from a tensor: the mask of zeros of older models, and a scale about 1."""

    def forward(self, x: Any, mask: Any) -> Any:
        return torch.softmax((x + (1.0 - mask) * -9.0) * (1 + mask * 0.5), -1)


MODELS = {
    "modulated": (Modulated, (3, 7, 32), (3, 8)),
    "bias of keys": (Scores, (3, 2, 5, 16), (3, 1, 1, 16)),
    "bias of pairs": (Scores, (3, 2, 5, 16), (3, 1, 5, 16)),
    "slopes of heads": (Scores, (3, 2, 5, 16), (3, 2, 1, 16)),
    "a computed mask": (Computed, (3, 2, 5, 16), (3, 1, 1, 16)),
    "mask": (Masked, (3, 2, 5, 16), (3, 1, 1, 16)),
    "positions": (Placed, (3, 7, 32), (3, 1, 32)),
}


def run(model: nn.Module, *given: Any) -> list[Any]:
    """Return the output and all gradients, of a sum with weights of either sign."""
    given = tuple(g.detach().clone().requires_grad_() for g in given)
    model.zero_grad()
    out = model(*given)
    (out * torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)).sum().backward()
    return [out.detach(), *(g.grad for g in given if g.grad is not None), *(p.grad for p in model.parameters())]


def assert_as_close(found: list[Any], eager: list[Any], exact: list[Any]) -> None:
    for ours, theirs, wide in zip(found, eager, exact, strict=True):
        assert ours.shape == wide.shape
        # Sums of terms that cancel: of few numbers errors are those of another draw.
        allowed = 4 * (theirs - wide).norm() + 4 * torch.finfo(ours.dtype).eps * wide.norm()
        assert (ours - wide).norm() <= allowed


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_of_one_chain(device: str, name: str, dtype: torch.dtype) -> None:
    make, *shapes = MODELS[name]
    model = make().to(device, dtype)
    fused = ct.fuse(copy.deepcopy(model))
    for images in (3, 4, 2):  # the second one makes their number a symbol
        given = [torch.randn(images, *shape[1:], device=device).to(dtype) for shape in shapes]
        exact = run(copy.deepcopy(model).double(), *(g.double() for g in given))
        assert_as_close(run(fused, *given), run(model, *given), exact)
    left = [o for part in fused.explain().left for o in part.operations]
    assert not {"add", "mul", "masked_fill", "softmax"}.intersection(left)
    with torch.no_grad():
        assert_as_close([fused(*given)], [model(*given)], exact[:1])


def test_the_backend_fuses_them(device: str) -> None:
    model = Scores().to(device)
    compiled = torch.compile(copy.deepcopy(model), backend="cupyfuse", options={"cupyfuse.only_gains": False})
    x, bias = torch.randn(3, 2, 5, 16, device=device), torch.randn(3, 1, 5, 16, device=device)
    exact = run(copy.deepcopy(model).double(), x.double(), bias.double())
    assert_as_close(run(compiled, x, bias), run(model, x, bias), exact)


def test_views_of_what_is_broadcast(device: str) -> None:
    class Expanded(nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            return torch.softmax(x + mask[:, None, None].expand(-1, 1, x.shape[2], -1), -1)

    x, mask = torch.randn(3, 2, 5, 16, device=device), torch.randn(16, 3, device=device).t()
    fused = ct.fuse(Expanded())
    torch.testing.assert_close(fused(x, mask), Expanded()(x, mask))


def test_rows_that_begin_between_packs_are_left(device: str) -> None:
    fused, x, mask = ct.fuse(Masked()), torch.randn(3, 2, 5, 7, device=device), torch.randn(3, 1, 5, 7, device=device)
    torch.testing.assert_close(fused(x, mask), Masked()(x, mask))
    assert "masked_fill" in [o for part in fused.explain().left for o in part.operations]


def test_where_there_are_no_rows_chains_end(device: str, recwarn: pytest.WarningsRecorder) -> None:
    class Summed(nn.Module):
        def forward(self, x: Any, bias: Any) -> Any:
            return F.gelu(x * 2 + bias).square().sum()

    fused = ct.fuse(Summed(), only_gains=False)
    x, bias = torch.randn(3, 0, 4, 8, device=device), torch.randn(3, 1, 4, 8, device=device, requires_grad=True)
    fused(x, bias).backward()
    torch.testing.assert_close(bias.grad, torch.zeros_like(bias))
    assert not [w for w in recwarn.list if "cupyfuse left" in str(w.message)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_repeated_rows_are_added_up_before_they_are_rounded(way: str, dtype: torch.dtype) -> None:
    """Small ones do not vanish, large ones do not overflow, and infinite slopes meet their sum, as in eager."""

    def gradient(module: Any, x: Any, factors: Any) -> Any:
        x = x.clone().requires_grad_()
        (module(x, torch.ones(len(factors), 16)) * factors).sum().backward()
        return x.grad

    torch.manual_seed(0)
    x = torch.randn(6, 16).abs().to(dtype)
    slopes = torch.tensor([[1e5], [-0.99e5]])
    wide = Code(lambda m, x, c: x.float().unsqueeze(1) * c), Code(lambda m, x, c: (x * 3).float().unsqueeze(1) + c)
    for module in wide:
        for factors in (torch.full((4096, 1), 1e-8), slopes, torch.randn(256, 1)):
            expected = gradient(module, x, factors)
            assert expected.isfinite().all() and expected.any()
            torch.testing.assert_close(gradient(WAYS[way](module), x, factors), expected)
    root = Code(lambda m, x, c: x.sqrt().unsqueeze(1) * c)
    x = torch.zeros(2, 16)
    expected = gradient(root, x, -slopes)
    assert (expected == -torch.inf).all()
    torch.testing.assert_close(gradient(WAYS[way](root), x, -slopes), expected)
