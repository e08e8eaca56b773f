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


class Sharp(Retrieval):
    """Sums of squares of the shares of a row, or of shares of these."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.memory.T * (4 / FEATURES**0.5)).softmax(-1)
        return (y if self.times == 1 else (y * 100).softmax(-1)).square().sum(-1)


@pytest.mark.parametrize("times", [1, 2])
def test_statistics_of_rows_that_one_pass_rounds_are_not_saved(times: int) -> None:
    """Probabilities are shares of a sum of the same pass: of the other pass's, gradients were 10 times off."""
    module, x = Sharp(times), torch.randn(ROWS, FEATURES, dtype=torch.float64)
    expected = gradients(copy.deepcopy(module), x.clone())
    eager = gradients(copy.deepcopy(module).bfloat16(), x.clone())
    ours = gradients(ct.fuse(module.bfloat16(), max_workspace=20_000), x.clone())
    for actual, plain, exact in zip(ours, eager, expected, strict=True):
        assert (actual - exact).norm() <= (plain - exact).norm()


def saved_of(*rules: tuple[Any, ...], max_workspace: int) -> list[str]:
    """What is saved of operations, each of the result of the one before, and whether products are recomputed.

    A linear layer is given by its width.
    """
    x, calls, names, width = Ref(0), list[Call](), ["x"], FEATURES
    metas: list[tuple[tuple[int, ...], str]] = [((ROWS, FEATURES), "bfloat16")]
    labels = 1 + sum(rule == "linear" for rule, *_ in rules)
    for rule, *arguments in rules:
        given = [Ref(labels) if a == "labels" else a for a in arguments]
        if rule == "linear":
            given = [Ref(len(names))]
            names.append(f"weight{len(names)}")
            metas.append(((arguments[0], width), "bfloat16"))
            width = arguments[0]
        bound = RULES[rule].signature.bind(x, *given)
        bound.apply_defaults()
        x = Ref(labels + 1 + len(calls))
        calls.append(Call(rule, bound.args, (x.number,)))
    chain = Chain((*names, "labels"), tuple(calls), (x.number,))
    needs = (*(True for _ in names), False)
    settings = Settings("highest", max_workspace=max_workspace)
    saving = Backward(chain.trace((*metas, ((ROWS,), "int64"))), needs, settings).saving
    return sorted(n.op for n in saving.nodes) + ["recomputed"] * ("are recomputed" in saving.note)


PRODUCT = 2 * ROWS * FEATURES  # bytes
SOFTMAX = [("linear", FEATURES), ("softmax", -1)]


def test_products_that_others_depend_on_are_saved_and_no_statistics_of_softmaxes() -> None:
    several = [*SOFTMAX * 3, ("sum", -1)]
    assert saved_of(*several, max_workspace=3 * PRODUCT).count("matmul") == 3
    assert saved_of(*several, max_workspace=3 * PRODUCT - 1) == ["matmul", "matmul", "recomputed"]


def test_statistics_of_a_loss_are_saved_beside_the_products_before_it() -> None:
    """So that the vocabulary of a masked language model can be taken in blocks, too."""
    loss = [("linear", 4 * FEATURES), ("cross_entropy", "labels", None, -100, "none")]
    logits = 4 * PRODUCT
    assert saved_of(*loss, max_workspace=logits - 1) == ["expsum", "max", "recomputed"]
    expected = ["expsum", "matmul", "max", "recomputed"]
    assert saved_of(("linear", FEATURES), ("gelu",), *loss, max_workspace=logits) == expected
    assert saved_of(*SOFTMAX, *loss, max_workspace=logits) == expected
