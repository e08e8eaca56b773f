"""Gradients of 16-bit results with limits, of which a loss outside of the chain reads how far they are from these."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_ways import WAYS

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Tail(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor], columns: int = 4):
        super().__init__()
        self.linear, self.code = nn.Linear(6, columns), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear(x) * 8)


def of_zeros(y: Tensor) -> Tensor:
    return F.binary_cross_entropy(y, torch.zeros_like(y))


CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]] = {
    "sigmoid": (torch.sigmoid, of_zeros, 4),
    "one column": (torch.sigmoid, of_zeros, 1),
    "squeezed": (lambda z: z.sigmoid().squeeze(-1), of_zeros, 1),
    "limited": (lambda z: z.sigmoid().clamp(1e-6, 1 - 1e-6), of_zeros, 4),
    "transposed": (lambda z: z.sigmoid().t(), of_zeros, 4),
    "of rows": (lambda z: z.mean(-1).sigmoid(), of_zeros, 4),
    "tanh": (torch.tanh, lambda y: -torch.log(1 - y.square() + 1e-6).mean(), 4),
    "softmax": (lambda z: z.softmax(-1), lambda y: -torch.log(1 - y + 1e-6).mean(), 4),
    "softmin of columns": (lambda z: F.softmin(z, 0), lambda y: -torch.log(1 - y + 1e-6).mean(), 4),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_belong_to_the_rounded_result(name: str, way: str) -> None:
    """Of a probability that is rounded to 1 the gradient is 0; a loss divides by 1e-12 there, and by 1e-6."""
    code, loss, columns = CASES[name]
    plain = Tail(code, columns).to(torch.bfloat16)
    fused = WAYS[way](copy.deepcopy(plain))
    x = torch.randn(50, 6).to(torch.bfloat16)
    for module in (plain, fused):
        loss(module(x)).backward()
    torch.testing.assert_close(fused.linear.bias.grad, plain.linear.bias.grad, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("name", ["sigmoid", "of rows", "softmax"])
def test_products_that_do_not_fit_are_not_needed(name: str) -> None:
    code, loss, columns = CASES[name]
    plain = Tail(code, columns).to(torch.bfloat16)
    fused = ct.fuse(copy.deepcopy(plain), max_workspace=1)
    x = torch.randn(50, 6).to(torch.bfloat16)
    for module in (plain, fused):
        loss(module(x)).backward()
    torch.testing.assert_close(fused.linear.bias.grad, plain.linear.bias.grad, rtol=0.1, atol=0.02)


def changed(module: Any) -> Tensor:
    y = module(torch.ones(5, 6, dtype=torch.bfloat16))
    y.mul_(2)
    y.sum().backward()
    return module.linear.bias.grad


def test_the_result_itself_is_saved() -> None:
    fused = WAYS["fuse"](Tail(torch.sigmoid).to(torch.bfloat16))
    y = fused(torch.ones(5, 6, dtype=torch.bfloat16))
    assert y.data_ptr() in [t.data_ptr() for t in y.grad_fn.saved_tensors]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed(fused)


def test_quotients_may_be_changed_in_place() -> None:
    """PyTorch's division saves its operands, not its result."""
    plain = Tail(lambda z: z.exp() / z.exp().sum(-1, keepdim=True)).to(torch.bfloat16)
    fused = WAYS["fuse"](copy.deepcopy(plain))
    torch.testing.assert_close(changed(fused), changed(plain), rtol=0.1, atol=0.02)
