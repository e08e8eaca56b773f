"""Products that are too large to be saved: which of them the backward pass computes again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cupyfuse.torch as ct
from cupyfuse.settings import Settings
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.symbols import Ref

ROWS, FEATURES, ENTRIES = 256, 64, 128


class Retrieval(nn.Module):
    """Look rows up in a memory several times, each time by what was found before: each time multiplies errors."""

    def __init__(self, times: int):
        super().__init__()
        self.memory = nn.Parameter(torch.randn(ENTRIES, FEATURES, dtype=torch.float64))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = (x @ self.memory.T * 0.5).softmax(-1) @ self.memory
        return x


def gradients(module: Any, x: Tensor) -> list[Tensor]:
    given = x.to(module.memory.dtype).requires_grad_()
    result = module(given)
    result.backward(torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view_as(result).to(result.dtype))
    return [given.grad.double(), module.memory.grad.double()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_workspace", [100_000, 200_000, 300_000])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_errors_of_several_softmaxes_are_of_the_size_of_eager_s(
    times: int, max_workspace: int, dtype: torch.dtype
) -> None:
    """Each statistic belongs to the rows that it is used with."""
    module, x = Retrieval(times), torch.randn(ROWS, FEATURES, dtype=torch.float64)
    expected = gradients(copy.deepcopy(module), x.clone())
    eager = gradients(copy.deepcopy(module).to(dtype), x.clone())
    ours = gradients(ct.fuse(module.to(dtype), max_workspace=max_workspace), x.clone())
    for actual, plain, exact in zip(ours, eager, expected, strict=True):
        limit = 2 * (plain - exact).norm() + 16 * torch.finfo(dtype).eps * exact.norm()
        assert (actual - exact).norm() <= limit


@pytest.mark.parametrize("times", [1, 2])
def test_statistics_of_rows_that_one_pass_rounds_are_not_saved(times: int) -> None:
    """Probabilities are shares of a sum of the same pass: of the other pass's, gradients were 10 times off."""

    class Sharp(Retrieval):
        def forward(self, x: Tensor) -> Tensor:
            y = (x @ self.memory.T * 0.5).softmax(-1)
            return (y * 100).softmax(-1) if self.times > 1 else y

    module, x = Sharp(times), torch.randn(ROWS, FEATURES, dtype=torch.float64)
    expected = gradients(copy.deepcopy(module), x.clone())
    eager = gradients(copy.deepcopy(module).bfloat16(), x.clone())
    ours = gradients(ct.fuse(module.bfloat16(), max_workspace=20_000), x.clone())
    for actual, plain, exact in zip(ours, eager, expected, strict=True):
        assert (actual - exact).norm() <= 2 * (plain - exact).norm()


def saved_of(times: int, max_workspace: int) -> list[str]:
    """What is saved of so many softmaxes behind products, each by the result of the one before, and what is said."""
    calls: list[Call] = []

    def add(rule: str, *arguments: Any) -> Ref:
        bound = RULES[rule].signature.bind(*arguments)
        bound.apply_defaults()
        calls.append(Call(rule, bound.args, (2 + len(calls),)))
        return Ref(1 + len(calls))

    x = Ref(0)
    for _ in range(times):
        x = add("linear", x, Ref(1))
        x = add("softmax", x, -1)
    result = add("sum", x, -1)
    chain = Chain(("x", "weight"), tuple(calls), (result.number,))
    metas = (((ROWS, FEATURES), "bfloat16"), ((FEATURES, FEATURES), "bfloat16"))
    saving = Backward(chain.trace(metas), (True, True), Settings("highest", max_workspace=max_workspace)).saving
    return [n.op for n in saving.nodes] + ["recomputed"] * ("recomputed" in saving.note)


def test_products_that_others_depend_on_are_saved_and_no_statistics() -> None:
    product = 2 * ROWS * FEATURES
    assert saved_of(3, 3 * product).count("matmul") == 3
    assert saved_of(3, 3 * product - 1) == ["matmul", "matmul", "recomputed"]
    assert saved_of(1, product) == ["matmul"]
