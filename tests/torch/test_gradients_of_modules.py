"""Gradients of modules as people write them: frozen parameters, ties, hooks, changes in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_models import Tail
from torch_steps import DOUBLE, Code, near, same_steps, step
from torch_support import pair

import cupyfuse.torch as ct


@pytest.mark.parametrize("trained", [[], ["0.bias"], ["0.weight"], ["0.weight", "0.bias"]], ids=str)
@pytest.mark.parametrize("of_input", [True, False])
def test_second_derivatives_where_some_are_frozen(trained: list[str], of_input: bool, device: str) -> None:
    plain, fused, x = pair(nn.Sequential(nn.Linear(12, 7), nn.GELU(), nn.Softmax(1)), device, DOUBLE)
    found: list[Any] = []
    for module in (plain, fused):
        for name, p in module.named_parameters():
            p.requires_grad_(name in trained)
        z = x.clone().requires_grad_(of_input)
        wanted = [z] * of_input + [p for p in module.parameters() if p.requires_grad]
        if not wanted:
            return
        first = torch.autograd.grad(module(z).sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), wanted, allow_unused=True)
        found.append([*(g.detach() for g in first), *second])
    near(found[1], found[0])


def test_steps_have_gradients_of_zero(device: str) -> None:
    plain, fused, x = pair(Code(lambda m, y: y.exp().floor() * 2), device, DOUBLE)
    near(step(fused, x), step(plain, x))
    assert fused(x).requires_grad


@pytest.mark.parametrize(
    "code",
    [
        lambda m, y: m.scale.log10().trunc() + y,
        lambda m, y: m.scale * 2 + m.scale.reciprocal().round(),
        lambda m, y: m.scale.rsqrt().sign() * y,
    ],
    ids=["logarithm", "reciprocal", "root"],
)
def test_steps_have_first_derivatives_of_zero_in_a_graph(code: Any, device: str) -> None:
    """No gradient reads the argument of a step; what stood for it had infinite slopes."""
    module = Code(code)
    module.scale = nn.Parameter(torch.rand(12) + 0.5)
    plain, fused, x = pair(module, device, DOUBLE)
    found = []
    for each in (plain, fused):
        y = each(x)
        of = list(each.parameters())
        found.append(torch.autograd.grad(y.sum(), of, create_graph=True, allow_unused=True, materialize_grads=True))
    near(found[1], found[0])


def test_a_transpose_of_a_number_is_differentiated_twice(device: str) -> None:
    plain, fused, x = pair(Code(lambda m, y: y.exp().mean().mT * 2 + y.sum()), device, DOUBLE)
    found = []
    for module in (plain, fused):
        (first,) = torch.autograd.grad(module(x), module.linear.bias, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), module.linear.bias))
    near(found[1], found[0])
    assert fused.explain().fused


class Doubled(torch.autograd.Function):
    """As most of users' functions, it is called with zeros for no gradient, and has some then."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_only_compared_has_no_gradient(frozen: bool, device: str) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.threshold = nn.Linear(12, 12), nn.Parameter(torch.rand(12))

        def forward(self, x: Any, scores: Any) -> Any:
            return torch.where(scores * 2 > self.threshold, self.linear(x), 0.1).exp()

    plain, fused, x = pair(Gated(), device)
    before = torch.randn(5, 12, device=device)
    for module in (plain, fused):
        module.linear.requires_grad_(not frozen)
        scores, called = before.clone().requires_grad_(), []
        module.threshold.register_hook(called.append)
        x.requires_grad_()
        for _ in range(2):
            module(x, Doubled.apply(scores)).sum().backward()
        assert scores.grad is None and module.threshold.grad is None and not called
        assert x.grad is not None and (module.linear.weight.grad is None) == frozen


def test_counts_of_elements_have_a_gradient(device: str) -> None:
    plain, fused, x = pair(Code(lambda m, y: y.relu().norm(p=0, dim=1)), device, DOUBLE)
    near(fused(x), plain(x))
    fused(x).sum().backward()
    assert not any(p.grad.any() for p in fused.parameters())


@pytest.mark.rotates
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, nn.Identity])
@pytest.mark.parametrize(
    "tail",
    [
        lambda y: y.amin(0),
        lambda y: y.max(0)[0],
        lambda y: y.amax(-1),
        lambda y: y.max(),
        lambda y: torch.linalg.vector_norm(y, float("inf"), 0),
    ],
    ids=["amin(0)", "max(0)", "amax(-1)", "max", "norm"],
)
def test_extremes_of_computed_values(tail: Any, norm: Any, device: str) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        plain, fused, _ = pair(nn.Sequential(norm(12), Tail(tail)), device, DOUBLE)
        x = torch.randn(40, 12, device=device, dtype=DOUBLE)
        near(step(fused, x), step(plain, x))


@pytest.mark.parametrize(
    "tail",
    [
        lambda y: y.clamp(min=0),
        lambda y: y.clamp_max(1),
        lambda y: y.clamp(0, 1),
        lambda y: y.clamp(1, 1),
        lambda y: y.clamp(min=y.new_tensor([-1.0, 0, 0, 1, 1, 2])),
        lambda y: y.clamp(max=y.new_tensor(1.0)),
        lambda y: y.clamp(y.new_zeros(6), y.new_ones(6)),
        lambda y: F.hinge_embedding_loss(y, y.detach().sign(), margin=1.0, reduction="none"),
        lambda y: F.margin_ranking_loss(y, -y, y.detach().sign(), margin=2.0, reduction="none"),
        lambda y: y.max(),
        lambda y: y.amax((0, 1)),
        lambda y: torch.maximum(y, torch.zeros_like(y)),
    ],
    ids=[
        *("clamp(min)", "clamp(max)", "clamp", "clamp to a number"),
        *("clamp(min tensor)", "clamp(max tensor)", "clamp tensors"),
        *("hinge", "margin", "max", "amax", "maximum"),
    ],
)
def test_gradients_of_ties(tail: Any, device: str) -> None:
    x = torch.randint(-2, 3, (4, 6), device=device).to(DOUBLE)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    plain = Tail(lambda y: tail(y * 1) * 1)
    near(step(ct.fuse(plain), x), step(plain, x))


def test_hooks_of_parameters_that_get_no_gradient() -> None:
    """A chain is one node of autograd: they see zeros, where PyTorch would not call them."""
    seen: list[Any] = []
    module = Code(lambda m, y: ((y * m.a).softmax(1), (y * m.b).softmax(1)))
    module.a, module.b = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(12))
    _, fused, x = pair(module, "cpu", DOUBLE)
    fused.b.register_hook(seen.append)
    fused(x)[0].sin().sum().backward()
    assert fused.a.grad is not None and all(not g.any() for g in seen)


def _told(y: Any) -> Any:
    if y.requires_grad:
        y.register_hook(lambda g: 3 * g)
    return y


@pytest.mark.parametrize(
    "code",
    [
        lambda m, y: _told(y.exp().softmax(-1)).exp(),
        lambda m, y: y.mul(2).detach_().exp() * y,
        lambda m, y: y.mul(2).detach().requires_grad_().exp().softmax(-1),
        lambda m, y: y.exp().softmax(-1).T.contiguous().flatten().flatten(),
    ],
    ids=["hook", "detach_", "requires_grad_", "flat"],
)
def test_what_autograd_is_told_within(code: Any) -> None:
    same_steps(Code(code))


@pytest.mark.parametrize("shape", [(2, 3, 4), (4, 6), (5,)], ids=str)
def test_results_can_be_changed_in_place(shape: tuple[int, ...], device: str) -> None:
    plain = nn.Sequential(nn.Tanh(), nn.GELU(), nn.LeakyReLU(0.1))
    fused, found = ct.fuse(plain), []
    for module in (plain, fused):
        torch.manual_seed(0)
        x = torch.randn(shape, device=device, dtype=DOUBLE, requires_grad=True)
        y = module(x)
        y += 1
        y[0] = 0
        y.sum().backward()
        found.append((y.detach(), x.grad))
    near(found[1], found[0])


@pytest.mark.parametrize(
    "code",
    [
        lambda y: (y.softmax(-1).transpose(0, 1) * 2).flatten(),
        lambda y: (y.softmax(-1).transpose(1, 0) + y.contiguous().softmax(-1).transpose(1, 0)).flatten().flatten(),
        lambda y: (y.exp().T * 2).reshape(-1, 1, 2),
        lambda y: (y.lerp(y, 0.3) * 2).softmax(-1).T.add(1).ravel(),
    ],
)
def test_transposed_results_take_other_shapes(code: Any) -> None:
    same_steps(Code(lambda m, y: code(y)))
