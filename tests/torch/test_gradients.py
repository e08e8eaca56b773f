"""Gradients through fused modules: equal to eager's, to any order, however autograd is used."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_models as models
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_steps import Code, same_steps
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct
from cupyfuse.torch.chains import autograd


def gradients(module: nn.Module, x: Any, weights: Callable[[Any], Any] = torch.sin) -> list[Any]:
    """Of a sum weighted by position, by the input and every parameter."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    (y * weights(torch.arange(y.numel(), device=y.device, dtype=y.dtype)).view(y.shape)).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", models.HEADS)
def test_the_heads(head: type[nn.Module], training: bool, device: str) -> None:
    plain, fused, x = pair(head(), device, torch.float64)
    plain.train(training), fused.train(training)
    for _ in range(2):
        for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert len(fused_chains(fused)) == 1


@pytest.mark.parametrize("name", models.TAILS)
def test_chains(name: str, device: str) -> None:
    plain, fused, x = pair(models.Written(models.TAILS[name]), device, torch.float64)
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    assert fused_chains(fused)


@pytest.mark.parametrize("head", models.HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_single_and_half_precision(head: type[nn.Module], dtype: torch.dtype, device: str) -> None:
    plain, fused, x = pair(head(), device, dtype)
    exact = copy.deepcopy(plain).double()
    truth = gradients(exact, x.double())
    largest = max(t.abs().max() for t in truth)
    for got, eager, wanted in zip(gradients(fused, x), gradients(plain, x), truth, strict=True):
        error, allowed = (got.double() - wanted).abs().max(), (eager.double() - wanted).abs().max()
        assert got.dtype == dtype
        # No further from the truth than eager, but for some roundings of what cancels in it.
        assert error <= 2 * allowed + 16 * torch.finfo(dtype).eps * largest


@pytest.mark.rotates
@pytest.mark.parametrize("head", models.HEADS)
def test_gradcheck(head: type[nn.Module], device: str) -> None:
    _, fused, x = pair(head(), device, torch.float64)
    names = [name for name, _ in fused.named_parameters()]

    def run(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(fused, dict(zip(names, values, strict=True)), x)

    values = [p.detach().clone().requires_grad_() for p in fused.parameters()]
    assert torch.autograd.gradcheck(run, (x.requires_grad_(), *values))
    assert torch.autograd.gradgradcheck(run, (x, *values))


def test_data_of_a_tensor_is_in_a_chain(fresh_dynamo: None) -> None:
    """As `detach` is: a straight-through estimator, such as that of a quantised activation, is one chain."""

    def quantised(module: nn.Module, y: Tensor) -> Tensor:
        return (y + ((y * 4).round() / 4 - y).data).exp()

    fused = same_steps(Code(quantised))
    (operations,) = fused_chains(fused)
    assert operations[0] == "linear" and operations[-1] == "exp"
    same_steps(Code(lambda module, y: (y.data.clamp_(-0.5, 0.5), y.cos())[1]))  # what is written to is not


def test_results_that_are_changed_through_data(fresh_dynamo: None) -> None:
    """PyTorch's formulas read what they saved as it is in the backward pass: here, what `.data` has made of it."""
    for of_part in (False, True):

        def doubled(module: nn.Module, y: Tensor, of_part: bool = of_part) -> Tensor:
            z = y.sigmoid()
            (z.data[:2] if of_part else z.data).mul_(2)
            return z * 3

        same_steps(Code(doubled))


def test_what_is_detached_gets_no_gradient(device: str) -> None:
    plain, fused, x = pair(models.Products(), device, torch.float64)
    for got, wanted in zip(gradients(fused, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    fused = ct.fuse(models.Written(lambda y: (y.detach().exp(), y.logsumexp(1), y > 0)).to(device))
    a, b, c = fused(torch.randn(5, 12, device=device))
    assert not a.requires_grad and b.requires_grad and not c.requires_grad


def test_frozen_parameters(device: str) -> None:
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


def test_some_gradients_of_some_outputs(device: str) -> None:
    tail = lambda y: (y.softmax(1), y.logsumexp(1), F.gelu(y))  # noqa: E731
    plain, fused, x = pair(models.Written(tail), device, torch.float64)
    for pick in (0, 1, 2):
        wanted = torch.autograd.grad(plain(x)[pick].sin().sum(), [plain.linear.bias])
        got = torch.autograd.grad(fused(x)[pick].sin().sum(), [fused.linear.bias])
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


class SumThenNorm(nn.Module):
    """A residual and its norm: the gradients of both operands are equal."""

    def __init__(self, features: int = 12):
        super().__init__()
        self.norm = nn.LayerNorm(features)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.norm(x + y)


@pytest.mark.parametrize("way", ["fuse", "backend"])
@pytest.mark.parametrize("shape", [(7, 12), (3, 5, 12)], ids=str)
def test_equal_gradients_are_of_each_operand_alone(way: str, shape: tuple[int, ...], device: str) -> None:
    """However they are kept: neither changes with the other, nor with what comes after."""
    plain = SumThenNorm().to(device)
    fused = ct.fuse(copy.deepcopy(plain)) if way == "fuse" else torch.compile(copy.deepcopy(plain), backend="cupyfuse")
    operands = [torch.randn(shape, device=device) for _ in range(2)]
    found = []
    for module in (plain, fused):
        x, y = (t.clone().requires_grad_() for t in operands)
        for _ in range(2):  # accumulated
            module(x, y).sin().sum().backward()
        assert x.grad.data_ptr() != y.grad.data_ptr()
        x.grad.zero_()
        found.append(y.grad)
        x.grad, y.grad = None, None
        hooked = x + 0
        hooked.register_hook(lambda g: g * 2)
        module(hooked, y).sin().sum().backward()
        found += [x.grad, y.grad]
        found += torch.autograd.grad(module(x, y).sin().sum(), [x, y])
    for got, wanted in zip(found[5:], found[:5], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[6], 2 * found[7])


@pytest.mark.parametrize("shapes", [((2, 3, 12), (3, 2, 12)), ((6, 12), (72,)), ((6, 12), (12, 6))], ids=str)
def test_equal_gradients_of_operands_of_other_shapes(shapes: tuple[tuple[int, ...], ...], device: str) -> None:
    norm = SumThenNorm().to(device)

    class Reshaped(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return norm(x.reshape(6, 12), y.t() if y.shape == (12, 6) else y.reshape(6, 12))

    operands = [torch.randn(s, device=device) for s in shapes]
    found = []
    for module in (Reshaped(), ct.fuse(Reshaped())):
        x, y = (t.clone().requires_grad_() for t in operands)
        module(x, y).sin().sum().backward()
        found.append((x.grad, y.grad))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_only_addends_share_a_gradient(device: str) -> None:
    """What eager has as two tensors may not be one: views of it would share its memory, and change with it."""
    norm = nn.LayerNorm(12).to(device)
    forms: dict[str, Callable[[Any, Any], Any]] = {
        "added": lambda x, y: x + y,
        "negated": lambda x, y: x - (-y),
        "scaled": lambda x, y: 1 * x + 1 * y,
        "used again": lambda x, y: (x + y) + 0 * y,
    }
    for name, form in forms.items():

        class Formed(nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor, form: Any = form) -> Any:
                return norm(form(x.view(6, 12), y.view(6, 12)))

        found = []
        for module in (Formed(), ct.fuse(Formed())):
            x, y = (torch.randn(72, device=device, requires_grad=True) for _ in range(2))
            module(x, y).sin().sum().backward()
            found.append(x.grad.data_ptr() == y.grad.data_ptr())
        assert found[0] == (name == "added")
        assert not found[1] or found[0], name


@pytest.fixture(params=["apart", "together"])
def saving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a chain saves what second derivatives alone read; PyTorch 2.11 can save no single tensor."""
    if request.param == "together":
        monkeypatch.setattr(autograd, "_save", None)
    elif autograd._save is None:
        pytest.skip("this PyTorch can save no single tensor")
    return str(request.param)


def test_second_derivatives(saving: str, device: str) -> None:
    results = []
    plain, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    for module in (plain, fused):
        z = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(z).sum(), z, create_graph=True)
        first.square().sum().backward()
        results.append([z.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)


COTANGENTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "batched": lambda y, x, c: torch.autograd.grad(y, x, torch.eye(5).to(c), is_grads_batched=True)[0],
    "of vmap": lambda y, x, c: torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(
        torch.eye(5).to(c)
    ),
    "negated when read": lambda y, x, c: torch.autograd.grad(y, x, torch._neg_view(c))[0],
    "zeros without memory": lambda y, x, c: torch.autograd.grad(
        y, x, torch._efficientzerotensor(5, dtype=c.dtype, device=c.device)
    )[0],
    "repeated": lambda y, x, c: torch.autograd.grad(y, x, c[2:3].expand(5))[0],
}


@pytest.mark.parametrize("kind", COTANGENTS)
def test_cotangents_that_are_more_than_memory(kind: str, device: str) -> None:
    """They run as PyTorch's own operations, whose gradients have no graph that nobody asked for."""
    plain, fused, x = pair(models.Written(lambda y: y.logsumexp(1)), device, torch.float64)
    cotangent = torch.arange(1.0, 6.0, dtype=x.dtype, device=device)
    found = []
    for module in (fused, plain):
        z = x.clone().requires_grad_()
        found.append(COTANGENTS[kind](module(z), z, cotangent))
    assert fused_chains(fused) and not found[0].requires_grad
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool, device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    wanted = gradients(plain, x)
    fused.zero_grad()
    z = x.clone().requires_grad_()
    y = checkpoint(fused, z, use_reentrant=reentrant)
    (y * torch.sin(torch.arange(5, device=x.device, dtype=x.dtype)).view(5, 1)).sum().backward()
    for got, want in zip([z.grad, *(p.grad for p in fused.parameters())], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_weight_changed_before_the_backward_pass_is_an_error(device: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp(), device)
    y = fused(x.requires_grad_())
    with torch.no_grad():
        fused.linear.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_second_derivatives_alone_read_may_be_changed(saving: str, device: str) -> None:
    """PyTorch keeps no argument of a product by a frozen weight; a chain keeps it for second derivatives."""
    _, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    fused.requires_grad_(False)

    def gradient(changes: bool, **options: Any) -> Any:
        leaf = x.detach().clone().requires_grad_()
        argument = leaf * 1
        y = fused(argument).sum()
        if changes:
            argument.mul_(2.0)
        (found,) = torch.autograd.grad(y, leaf, **options)
        return found

    if saving == "apart":
        torch.testing.assert_close(gradient(True), gradient(False))
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(True)
    assert gradient(False, create_graph=True).requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(True, create_graph=True)


def test_what_second_derivatives_alone_read_is_freed(saving: str, device: str) -> None:
    """By the backward pass, though the graph lives on; hooks of saved tensors see it."""
    _, fused, x = pair(models.HeadLogSumExp(), device, torch.float64)
    fused.requires_grad_(False)
    argument = x.requires_grad_() * 1
    memory, packed = weakref.ref(argument), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.data_ptr()) or t, lambda t: t):
        y = fused(argument).sum()
    assert argument.data_ptr() in packed
    del argument
    y.backward(retain_graph=True)
    assert memory() is not None
    y.backward()
    assert memory() is None and y.grad_fn is not None


def test_features_of_inference_mode(device: str) -> None:
    """PyTorch saves what it computes from them, a chain the features."""
    head = nn.Sequential(nn.LayerNorm(12, elementwise_affine=False), nn.Linear(12, 7), nn.Softmax(1))
    plain, fused, x = pair(head, device, torch.float64)
    with torch.inference_mode():
        features = x * 2
    for given in (x * 2, features, features):
        found = []
        for module in (plain, fused):
            module.zero_grad()
            module(given).square().sum().backward()
            found.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*found)
    assert fused_chains(fused)


def test_backward_twice_is_pytorchs_error(device: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp(), device)
    loss = fused(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_of_tensors_and_of_gradients(device: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp(), device)
    seen: list[Any] = []
    fused.linear.weight.register_hook(lambda g: seen.append("weight"))
    fused.register_full_backward_hook(lambda m, a, b: seen.append("module"))
    fused(x).sum().backward()
    assert sorted(seen) == ["module", "weight"]


def test_autocast(device: str) -> None:
    plain, fused, x = pair(models.HeadSoftmax(), device)
    with torch.autocast(device, torch.bfloat16):
        wanted, got = gradients(plain, x), gradients(fused, x)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)


def test_saved_memory_is_no_more_than_eagers(device: str) -> None:
    """What autograd holds of a call between the passes, beside parameters and arguments."""
    for head in models.HEADS:
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


def test_training_takes_the_same_steps(device: str) -> None:
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


# What infinite cotangents and NaN come to ---------------------------------------------------------------------------

INF, NAN = math.inf, math.nan
ROWS = ((2.0, 2.0, 2.0), (1.0, -2.0, 3.0), (0.0, 0.0, 0.0), (NAN, 1.0, 2.0), (1.0, NAN, NAN), (INF, 1.0, -1.0))
POOLED = (
    (1.0, NAN, NAN, 2.0),
    (NAN, NAN, 1.0, NAN),
    (1.0, 1.0, 0.0, 0.0),
    (INF, INF, -INF, -INF),
    (3.0, 2.0, 1.0, NAN),
)
ENDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    # Masked after the division, where it is zero.
    "1 / std": (ROWS, lambda x: 1 / x.std(-1, keepdim=True)),
    "log of std": (ROWS, lambda x: x.std(-1).log()),
    "sqrt of std of columns": (ROWS, lambda x: x.T.std(0, correction=0).sqrt()),
    "log of std of all": (((1.0, 1.0), (1.0, 1.0)), lambda x: (x + 0).std().log()),
    # Products.
    "log of norm": (ROWS, lambda x: x.norm(dim=-1).log()),
    "sqrt of norm of all": (((0.0, 0.0), (0.0, 0.0)), lambda x: (x + 0).norm().sqrt()),
    "sqrt of norm 1": (ROWS, lambda x: x.norm(1, -1).sqrt()),
    "norm inf": (ROWS, lambda x: (x + 0).norm(INF, -1)),
    "log of norm inf": (ROWS, lambda x: x.norm(INF, -1).log()),
    "norm inf of all": (ROWS, lambda x: (x + 0).norm(INF) * 3),
    "sqrt of abs": (ROWS, lambda x: x.abs().sqrt()),
    "log of leaky_relu(0)": (ROWS, lambda x: F.leaky_relu(x, 0.0).log()),
    "log of leaky_relu": (ROWS, lambda x: F.leaky_relu(x, 0.25).log()),
    "log of x * 0": (ROWS, lambda x: (x * 0).log()),
    "log of x times a choice": (ROWS, lambda x: (x * torch.where(x.detach() > 1, 1.0, 0.0)).log()),
    "log of x times its sign": (ROWS, lambda x: (x * torch.sign(x)).log()),
    "inf * power": (ROWS, lambda x: torch.pow(x.detach(), (x * 0.0 + 1).exp()) * INF),
    "inf * power of a power": (ROWS, lambda x: torch.pow(torch.relu(x.detach()), x.square()) * INF),
    # Choices.
    "log of relu": (ROWS, lambda x: torch.relu(x).log()),
    "log of clamp": (ROWS, lambda x: x.clamp(0, 1).log()),
    "log of where": (ROWS, lambda x: torch.where(x > 1, x, 0.0).log()),
    "inf * softshrink": (((0.0, 0.25, 1.0, -1.0),), lambda x: F.softshrink(x) * INF),
    "inf * max": (((1.0, 2.0), (2.0, 0.0)), lambda x: (x + 0).max() * INF),
    "inf * amax of all": (((1.0, 2.0), (2.0, 0.0)), lambda x: (x + 0).amax() * INF),
    "inf * amin": (ROWS, lambda x: (x + 0).amin(-1) * INF),
    "max of a row": (ROWS, lambda x: (x + 0).max(-1)[0] * 3),
    "amax of a row": (ROWS, lambda x: (x + 0).amax(-1) * 3),
    "max": (ROWS, lambda x: (x + 0).max() * 3),
    "min": (ROWS, lambda x: (x + 0).min() * 3),
    "amax": (ROWS, lambda x: (x + 0).amax() * 3),
    "amin": (ROWS, lambda x: (x + 0).amin() * 3),
    "max of maxima": (ROWS, lambda x: (x + 0).amax(-1).max() * 3),
    "max_pool1d(2)": (POOLED, lambda x: F.max_pool1d(x + 0, 2) * 3),
    "max_pool1d(4)": (POOLED, lambda x: F.max_pool1d((x + 0)[:, None], 4) * 3),
}


@pytest.mark.rotates
@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_infinite_cotangents_and_nan(name: str, dtype: torch.dtype) -> None:
    rows, function = ENDS[name]
    found = []
    plain = models.Tail(function)
    fused = ct.fuse(plain)
    for module in (plain, fused):
        x = torch.tensor(rows, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    assert fused_chains(fused)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
