"""Gradients through fused modules: equal to eager's, to any order, however autograd is used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_models as models
from test_torch_fuse import DEVICES, HEADS, close, device, fused_chains, pair  # noqa: F401
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cupyfuse.torch as ct


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gradients(module: nn.Module, x: Any, weights: Callable[[Any], Any] = torch.sin) -> list[Any]:
    """Of a sum weighted by position, by the input and every parameter."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    (y * weights(torch.arange(y.numel(), device=y.device, dtype=y.dtype)).view(y.shape)).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_the_heads(head: type[nn.Module], training: bool, device: str) -> None:  # noqa: F811
    plain, fused, x = pair(head(), device, torch.float64)
    plain.train(training), fused.train(training)
    for _ in range(2):
        for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert len(fused_chains(fused)) == 1


@pytest.mark.parametrize("name", models.TAILS)
def test_chains(name: str, device: str) -> None:  # noqa: F811
    plain, fused, x = pair(models.Written(models.TAILS[name]), device, torch.float64)
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    assert fused_chains(fused)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_and_half_precision(head: type[nn.Module], dtype: torch.dtype, device: str) -> None:  # noqa: F811
    plain, fused, x = pair(head(), device, dtype)
    exact = copy.deepcopy(plain).double()
    truth = gradients(exact, x.double())
    largest = max(t.abs().max() for t in truth)
    for got, eager, wanted in zip(gradients(fused, x), gradients(plain, x), truth, strict=True):
        error, allowed = (got.double() - wanted).abs().max(), (eager.double() - wanted).abs().max()
        assert got.dtype == dtype
        # No further from the truth than eager, but for some roundings of what cancels in it.
        assert error <= 2 * allowed + 16 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("head", HEADS)
def test_gradcheck(head: type[nn.Module], device: str) -> None:  # noqa: F811
    _, fused, x = pair(head(), device, torch.float64)
    names = [name for name, _ in fused.named_parameters()]

    def run(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(fused, dict(zip(names, values, strict=True)), x)

    values = [p.detach().clone().requires_grad_() for p in fused.parameters()]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *values))
    assert torch.autograd.gradgradcheck(run, (x, *values))


def test_what_is_detached_gets_no_gradient(device: str) -> None:  # noqa: F811
    plain, fused, x = pair(models.Products(), device, torch.float64)
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    fused = ct.fuse(models.Written(lambda y: (y.detach().exp(), y.logsumexp(1), y > 0)).to(device))
    a, b, c = fused(torch.randn(5, 12, device=device))
    assert not a.requires_grad and b.requires_grad and not c.requires_grad


def test_frozen_parameters(device: str) -> None:  # noqa: F811
    plain, fused, x = pair(models.HeadSoftmax(), device, torch.float64)
    for module in (plain, fused):
        module.gemm.requires_grad_(False)
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    plain.gemm.weight.requires_grad_(), fused.gemm.weight.requires_grad_()
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        assert (got is None) == (wanted is None)


def test_some_gradients_of_some_outputs(device: str) -> None:  # noqa: F811
    tail = lambda y: (y.softmax(1), y.logsumexp(1), F.gelu(y))  # noqa: E731
    plain, fused, x = pair(models.Written(tail), device, torch.float64)
    for pick in (0, 1, 2):
        wanted = torch.autograd.grad(plain(x)[pick].sin().sum(), [plain.linear.bias])
        got = torch.autograd.grad(fused(x)[pick].sin().sum(), [fused.linear.bias])
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_second_derivatives(device: str) -> None:  # noqa: F811
    results = []
    plain, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    for module in (plain, fused):
        z = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(z).sum(), z, create_graph=True)
        first.square().sum().backward()
        results.append([z.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, device: str) -> None:  # noqa: F811
    plain, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    wanted = gradients(plain, x)
    fused.zero_grad()
    z = x.clone().requires_grad_()
    y = checkpoint(fused, z, use_reentrant=reentrant)
    (y * torch.sin(torch.arange(5, device=x.device, dtype=x.dtype)).view(5, 1)).sum().backward()
    for got, want in zip([z.grad, *(p.grad for p in fused.parameters())], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_weight_changed_before_the_backward_pass_is_an_error(device: str) -> None:  # noqa: F811
    _, fused, x = pair(models.HeadLogSumExp(), device)
    y = fused(x.requires_grad_())
    with torch.no_grad():
        fused.linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_is_pytorchs_error(device: str) -> None:  # noqa: F811
    _, fused, x = pair(models.HeadLogSumExp(), device)
    loss = fused(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_of_tensors_and_of_gradients(device: str) -> None:  # noqa: F811
    _, fused, x = pair(models.HeadLogSumExp(), device)
    seen: list[Any] = []
    fused.linear.weight.register_hook(lambda g: seen.append("weight"))
    fused.register_full_backward_hook(lambda m, a, b: seen.append("module"))
    fused(x).sum().backward()
    assert sorted(seen) == ["module", "weight"]


def test_autocast(device: str) -> None:  # noqa: F811
    plain, fused, x = pair(models.HeadSoftmax(), device)
    with torch.autocast(device, torch.bfloat16):
        wanted, got = gradients(plain, x), gradients(fused, x)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_saved_memory_is_no_more_than_eagers(device: str) -> None:  # noqa: F811
    """What autograd holds of a call between the passes, beside parameters and arguments."""
    for head in HEADS:
        held = []
        plain, fused, x = pair(head(), device)
        for module in (plain, fused):
            storages: dict[int, int] = {}
            own = {t.untyped_storage().data_ptr() for t in (x, *module.parameters(), *module.buffers())}

            def pack(t: Any, storages: Any = storages, own: Any = own) -> Any:
                storage = t.untyped_storage()
                if storage.data_ptr() not in own:
                    storages[storage.data_ptr()] = storage.nbytes()
                return t

            kept = []
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                kept.append(module(x))
            held.append(sum(storages.values()))
        assert held[1] <= held[0], head


def test_training_takes_the_same_steps(device: str) -> None:  # noqa: F811
    plain, fused, _ = pair(models.HeadSoftmax(), device, torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, fused)]
    for _ in range(10):
        x = torch.randn(9, 12, device=device, dtype=torch.float64)
        target = torch.randint(7, (9,), device=device)
        losses = []
        for module, optimizer in zip((plain, fused), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.nll_loss(module(x).log(), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        close(losses[1], losses[0], torch.float32)
    for p, q in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
