"""Images that a chain computes with their channels last, and what follows before the next convolution."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_support import Graphs

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CHANNELS = 6


class Block(nn.Module):
    """A block of ConvNeXt, with code for what follows its products."""

    def __init__(self, tail: Callable[..., Any]):
        super().__init__()
        self.tail = tail
        self.mix = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.first, self.second = nn.Linear(CHANNELS, 12), nn.Linear(12, CHANNELS)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CHANNELS))
        self.number = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Any) -> Any:
        y = self.mix(x).permute(0, 2, 3, 1)
        y = self.second(F.gelu(self.first(self.norm(y)))).permute(0, 3, 1, 2)
        return self.tail(self, x, y)


def run(block: nn.Module, x: Any) -> list[Any]:
    """Return the output and all gradients, those that there are."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    out = block(x)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out, x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


def check(tail: Callable[..., Any], x: Any) -> list[str]:
    """Compare a block with eager, strides too; return the operations of the chain that has its second product."""
    block = Block(tail)
    fused = ct.fuse(copy.deepcopy(block))
    for ours, theirs in zip(run(fused, x), run(block, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert fused(x).stride() == block(x).stride()
    chains = [part.operations for part in fused.explain().fused]
    return list(next(operations for operations in chains if operations.count("linear") == 2))


def images(*shape: int) -> Any:
    return torch.randn(*shape).to(memory_format=torch.channels_last)


JOINED = {
    "scale and residual": (lambda m, x, y: y * m.scale.view(1, -1, 1, 1) + x, ["mul", "add"]),
    "scale without the batch": (lambda m, x, y: x + y * m.scale[:, None, None], ["mul", "add"]),
    "numbers": (lambda m, x, y: (y * 2 - m.number) / 3, ["mul", "sub", "div"]),
    "several operands": (
        lambda m, x, y: torch.where(x > 0, y, torch.addcmul(x, y, y, value=0.5)),
        ["addcmul", "where"],
    ),
    "an activation": (lambda m, x, y: F.silu(y).relu(), ["silu", "relu"]),
}


@pytest.mark.parametrize("case", JOINED)
def test_they_are_of_one_chain(case: str) -> None:
    tail, operations = JOINED[case]
    found = check(tail, images(2, CHANNELS, 5, 4))
    assert [o for o in found if o in operations][-len(operations) :] == operations


APART = {
    "in place": (lambda m, x, y: y.mul_(m.scale.view(1, -1, 1, 1)).add_(x), "mul"),
    "a residual in another order": (lambda m, x, y: y + x.contiguous(), "add"),
    "channels side by side": (lambda m, x, y: torch.cat((y, x), 1) * 2, "cat"),
    "pixels side by side": (lambda m, x, y: torch.cat((y, x), -1) * 2, "cat"),
    "halves of the channels": (lambda m, x, y: F.glu(y * 2, 1) * 2, "glu"),
    "an element for each row": (lambda m, x, y: y * torch.linspace(0, 1, 5).view(5, 1), "mul"),
}


@pytest.mark.parametrize("case", APART)
def test_others_are_right(case: str) -> None:
    tail, operation = APART[case]
    assert operation not in check(tail, images(2, CHANNELS, 5, 4))


def test_what_follows_a_convolution_stays_with_it() -> None:
    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.last = nn.Conv1d(CHANNELS, 8, 1), nn.Linear(8, 5)

        def forward(self, x: Any) -> Any:
            return self.last(F.gelu(self.mix(x).transpose(1, 2)))

    model, x = After(), torch.randn(3, CHANNELS, 7)
    fused = ct.fuse(copy.deepcopy(model))
    for ours, theirs in zip(run(fused, x), run(model, x), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert "gelu" in fused.explain().fused[0].operations


def test_classes_of_transposed_labels_are_a_dimension_more() -> None:
    class Chosen(nn.Module):
        def forward(self, x: Any) -> Any:
            labels = (x * 2).argmax(-1).permute(0, 2, 1)  # of one pixel: in both orders
            return F.one_hot(labels, 5) * 1.5

    model, x = Chosen(), torch.randn(3, 1, 1, 5)
    torch.testing.assert_close(ct.fuse(model, only_gains=False)(x), model(x))


def test_batches_of_other_sizes() -> None:
    tail = JOINED["scale and residual"][0]
    block = Block(tail)
    fused = ct.fuse(copy.deepcopy(block))
    for shape in (
        (2, CHANNELS, 5, 4),
        (3, CHANNELS, 5, 4),
        (1, CHANNELS, 1, 1),
        (4, CHANNELS, 6, 7),
        (0, CHANNELS, 5, 4),
    ):
        x = images(*shape)
        torch.testing.assert_close(fused(x), block(x))


def test_results_that_are_changed_later() -> None:
    def tail(m: Any, x: Any, y: Any) -> Any:
        y = y * m.scale.view(1, -1, 1, 1)
        held = y.permute(0, 2, 3, 1)
        y += 1
        return held.sum(-1) + y.sum(1)

    check(tail, images(2, CHANNELS, 5, 4))


@pytest.mark.parametrize("dim", [1, -1])
def test_rows_side_by_side_are_no_operation_on_elements(dim: int) -> None:
    """Nor are gates: the last dimension of an image is not its channels."""

    def both(x: Any) -> tuple[Any, Any]:
        return torch.cat((x, x.exp()), dim).relu() * 2, F.glu(x.tanh(), dim).relu() * 2

    graphs = Graphs()
    compiled, x = torch.compile(both, backend=graphs), images(2, 4, 6, 6)
    for ours, theirs in zip(compiled(x), both(x), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


TAKEN = {
    "channels": lambda t: F.gelu(t * 2) + 1,
    "classes": lambda t: F.cross_entropy(t, torch.arange(10).view(2, 5) % 3),
}


@pytest.mark.parametrize("case", TAKEN)
def test_a_view_that_was_taken_without_gradients_has_none(case: str) -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            with torch.no_grad():
                t = y.transpose(1, 2)
            return TAKEN[case](t).sum() + y.sum()

    model, x = Cut(), torch.randn(2, 5, 4)
    fused = ct.fuse(copy.deepcopy(model), only_gains=False)
    for each in (model, fused):
        each(x).backward()
    torch.testing.assert_close(fused.linear.weight.grad, model.linear.weight.grad)
