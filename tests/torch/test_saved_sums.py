"""What is saved of 16-bit linear layers for the backward pass: their sum with the bias, rounded once, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_ways import operators

import cupyfuse.torch as ct
from cupyfuse import devices
from cupyfuse.plan.build import build
from cupyfuse.settings import Settings
from cupyfuse.torch.chains import saving
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.rules.symbols import Ref

HALF = (torch.float16, torch.bfloat16)
FEATURES, CLASSES = 24, 40
WAYS: dict[str, Callable[[Any], Any]] = {"fuse": ct.fuse, "operator": lambda m: torch.compile(m, backend=operators)}

TAILS: dict[str, Callable[[Tensor], Any]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda y: y.softmax(-1),
    "logits and loss": lambda y: (y, y.logsumexp(-1)),
    "layer_norm": lambda y: F.layer_norm(y, (CLASSES,)),
    "softmax of columns": lambda y: y.softmax(0),
    "variance of columns": lambda y: F.batch_norm(y, None, None, training=True) if len(y) > 1 else y.tanh(),
    "two layers": lambda y: F.gelu(y) @ torch.linspace(-1, 1, CLASSES * 3, device=y.device).to(y).view(CLASSES, 3),
}


class Layer(nn.Module):
    def __init__(self, tail: Callable[..., Any], bias: bool = True):
        super().__init__()
        self.linear, self.tail = nn.Linear(FEATURES, CLASSES, bias), tail

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.tail(self.linear(x), *more)


def step(module: Any, x: Tensor, *more: Tensor) -> list[Tensor]:
    """Results, and gradients by the input and the parameters, in float64."""
    x = x.detach().clone().requires_grad_()
    found = module(x, *more)
    results = list(found) if isinstance(found, tuple) else [found]
    weights = [torch.arange(1.0, y.numel() + 1).sin().view(y.shape).to(y) for y in results]
    grads = torch.autograd.grad(results, [x, *module.parameters()], weights)
    return [t.detach().double() for t in (*results, *grads)]


def no_further_than_eager(module: Any, way: str, x: Tensor, *more: Tensor, least: float = 0.0) -> None:
    """Every tensor's error is at most twice eager's, or two roundings of the tensor's norm, or twice `least`."""
    exact = step(copy.deepcopy(module).double(), x.double(), *more)
    eager, fused = step(copy.deepcopy(module), x, *more), step(WAYS[way](copy.deepcopy(module)), x, *more)
    unit = torch.finfo(x.dtype).eps / 2
    for found, expected, truth in zip(fused, eager, exact, strict=True):
        floor = max(float((expected - truth).norm()), unit * float(truth.norm()), least)
        assert float((found - truth).norm()) <= 2 * floor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("name", TAILS)
def test_a_bias_that_cancels_the_product(name: str, rows: int, dtype: torch.dtype, way: str) -> None:
    """The product is of size 100, and its sum with the bias of size one."""
    module, x = Layer(TAILS[name]), torch.randn(rows, FEATURES)
    with torch.no_grad():
        module.linear.weight.mul_(0.5)
        module.linear.weight[:, 0] += 10
        module.linear.bias.copy_(torch.randn(CLASSES) - 100)
    x[:, 0] = 10
    no_further_than_eager(module.to(dtype), way, x.to(dtype))


def twice_the_largest(y: Tensor) -> Tensor:
    """Gradients compare elements with the maximum, and so these are saved."""
    return torch.where(y == y.amax(-1, keepdim=True), 2 * y, y)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of rows": F.cross_entropy,
    "of columns": lambda y, labels: F.cross_entropy(y.t(), labels),
    "of values saved for a maximum": lambda y, labels: F.cross_entropy(twice_the_largest(F.silu(y)), labels),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_exponentials_belong_to_what_is_saved(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the label's probability is nearly 1, its gradient is what is left of the logits' roundings: nothing."""
    monkeypatch.setattr(saving, "_RESIDENT", 16)  # statistics of longer rows are saved as well
    labels = torch.arange(CLASSES)
    module = Layer(LOSSES[name])
    with torch.no_grad():
        module.linear.weight.copy_(torch.randn(CLASSES, FEATURES) * 0.1)
        directions = torch.linalg.pinv(torch.cat([module.linear.weight, torch.eye(FEATURES)]))[:, :CLASSES].t()
        x = 21.7 * directions / directions.norm(dim=1, keepdim=True) / module.linear.weight.norm(dim=1, keepdim=True)
        for _ in range(200):  # features whose logits are 21.7 at the label, and as small as they can be elsewhere
            logits = x @ module.linear.weight.t()
            x -= 0.5 * (logits - 21.7 * torch.eye(CLASSES)) @ module.linear.weight
    module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    probabilities = module.linear(x).double().softmax(0 if name == "of columns" else 1).diagonal()
    assert float(probabilities.detach().median()) > 0.5
    no_further_than_eager(module, way, x, labels)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y - y.mean(0),
    "mean of an activation": lambda y: F.silu(y) - F.silu(y).mean(0),
    "batch norm of an activation": lambda y: F.batch_norm(F.gelu(y), None, None, training=True) if len(y) > 1 else y,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_columns_belong_to_what_is_saved(name: str, rows: int, bias: bool, way: str) -> None:
    """Equal rows are their mean: what is left, and multiplied by up to 300, is a rounding that one pass alone has.

    It is one of float32 at most, not of 16 bits.
    """

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Layer(STATISTICS[name], bias), nn.Linear(CLASSES, 3)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x))

    x = torch.randn(1, FEATURES).repeat(rows, 1) * 3
    no_further_than_eager(Twice().to(torch.bfloat16), way, x.to(torch.bfloat16), least=1e-3)


def plan_of(tail: tuple[str, tuple[Any, ...]], rows: int = 4096) -> Any:
    """The forward pass in training of a linear layer and an operation of its result, on an H200."""
    rule, more = tail
    chain = Chain(
        ("input", "weight", "bias"),
        (Call("linear", (Ref(0), Ref(1), Ref(2)), (3,)), Call(rule, (Ref(3), *more), (4,))),
        outputs=(4,),
    )
    traced = chain.trace((((rows, 768), "bfloat16"), ((3072, 768), "bfloat16"), ((3072,), "bfloat16")))
    settings = Settings("highest", devices.DEVICES["H200"])
    backward = Backward(traced, (True, True, True), settings)
    assert [node.op for node in backward.saving.nodes] == ["divide" if rule == "softmax" else "add"]  # or the result
    return build(traced.as_traced(backward.saving.nodes), None, settings)


@pytest.mark.parametrize("tail", [("softmax", (-1, None)), ("gelu", ("none",))], ids=str)
def test_what_is_saved_is_read_as_it_is_stored(tail: tuple[str, tuple[Any, ...]]) -> None:
    """No float32 product is written for a row program beside it."""
    plan = plan_of(tail)
    product, rest = plan.steps
    assert product.fused == ("matmul", "add") and "stored in bfloat16" in product.how
    assert product.writes == 2 * 4096 * 3072 and rest.reads == product.writes
