"""Batch norms of images in inference, and what follows them before the next convolution, in both orders of memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CHANNELS = 6
ORDERS = (torch.contiguous_format, torch.channels_last)


class Block(nn.Module):
    """Two convolutions with batch norms, and code for what comes between and behind them."""

    def __init__(self, code: Callable[..., Any]):
        super().__init__()
        self.code = code
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.other = nn.BatchNorm2d(CHANNELS, eps=0.01), nn.BatchNorm2d(CHANNELS, affine=False)
        self.relu = nn.ReLU(inplace=True)
        for norm in (self.norm, self.other):
            norm.running_mean.copy_(torch.linspace(-1, 1, CHANNELS))
            norm.running_var.copy_(torch.linspace(0.5, 2, CHANNELS))

    def forward(self, x: Any) -> Any:
        return self.code(self, x)


def _changed_behind_a_view(m: Block, x: Any) -> Any:
    y = m.norm(m.first(x))
    rows = y.permute(0, 2, 3, 1)
    return m.relu(y + 1) + rows.mul_(2).permute(0, 3, 1, 2)


def _read_before_it_changes(m: Block, x: Any) -> Any:
    y = m.norm(m.first(x))
    z = y * 2 + x
    return m.relu(y) + z.tanh()


def _squeezed(m: Block, x: Any) -> Any:
    y = F.silu(m.norm(m.first(x)))
    return y * torch.sigmoid(y.mean((2, 3), keepdim=True)) + x


CODE: dict[str, Callable[..., Any]] = {
    "an activation": lambda m, x: F.silu(m.norm(m.first(x))),
    "in place": lambda m, x: m.relu(m.norm(m.first(x))),
    "a residual": lambda m, x: m.relu(m.norm(m.first(x)) + x),
    "a residual added in place": lambda m, x: m.relu(m.norm(m.first(x)).add_(x)),
    "two norms": lambda m, x: F.relu(m.norm(m.first(x)) + m.other(m.second(x))),
    "one behind the other": lambda m, x: m.relu(m.other(m.second(m.relu(m.norm(m.first(x))))) + x),
    "no convolution": lambda m, x: F.relu(m.norm(x) - x),
    "a residual in another order": lambda m, x: F.relu(m.norm(m.first(x)) + x.permute(0, 1, 3, 2).contiguous().mT),
    "channels, rows and pixels": lambda m, x: F.gelu(
        m.norm(m.first(x)) * x[:1, :1] + x[:, :, :1, :1] - x[0, :, :1, :1]
    ),
    "behind a view": _changed_behind_a_view,
    "read before it changes": _read_before_it_changes,
    "squeezed": _squeezed,
    "both results": lambda m, x: (lambda y: (y, F.relu(y) + x))(m.norm(m.first(x))),
}
FUSED = ("an activation", "in place", "a residual", "a residual added in place", "two norms", "one behind the other")


@pytest.fixture(autouse=True)
def _convolutions_in_float32() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def images(*shape: int, order: torch.memory_format = torch.contiguous_format, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype=dtype, memory_format=order)


def results(block: Any, x: Any, gradients: bool) -> list[Any]:
    """Return all results, with the gradients of the input and the parameters, where these are asked for."""
    x = x.detach().requires_grad_(gradients)
    block.zero_grad()
    with torch.set_grad_enabled(gradients):
        found = block(x)
        found = list(found) if isinstance(found, tuple) else [found]
        if not gradients:
            return found
        sum((y * torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)).sum() for y in found).backward()
    return [*found, x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", CODE)
def test_results_and_strides_are_eagers(device: str, name: str, order: torch.memory_format, gradients: bool) -> None:
    block = Block(CODE[name]).eval().to(device, memory_format=order)
    fused = ct.fuse(copy.deepcopy(block), only_gains=False)
    for shape in ((2, CHANNELS, 5, 4), (3, CHANNELS, 7, 7), (1, CHANNELS, 1, 1)):
        x = images(*shape, order=order).to(device)
        ours, theirs = results(fused, x, gradients), results(block, x, gradients)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        outputs = len(theirs) if not gradients else 1
        assert [y.stride() for y in ours[:outputs]] == [y.stride() for y in theirs[:outputs]]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_a_norm_and_what_follows_are_one_chain(device: str, name: str, order: torch.memory_format) -> None:
    fused = ct.fuse(Block(CODE[name]).eval().to(device, memory_format=order), only_gains=False)
    with torch.no_grad():
        fused(images(2, CHANNELS, 5, 4, order=order).to(device))
    found = fused.explain()
    left = {operation for part in found.left for operation in part.operations}
    assert left <= {"conv2d", "permute", "flatten", "view_as"}
    assert all(plan.launches == 1 for part in found.fused for plan in part.plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_errors_are_no_larger_than_eagers(device: str, order: torch.memory_format, dtype: Any) -> None:
    block = Block(CODE["a residual"]).eval().to(device, dtype, memory_format=order)
    block.norm.float()  # statistics and weights in float32, as under autocast
    fused = ct.fuse(copy.deepcopy(block), only_gains=False)
    x = images(4, CHANNELS, 7, 5, order=order, dtype=dtype).to(device)
    with torch.no_grad():
        y = block.first(x).double()
        mean, var = block.norm.running_mean.double(), block.norm.running_var.double()
        exact = F.relu(F.batch_norm(y, mean, var, *(p.double() for p in block.norm.parameters()), eps=0.01) + x)
        ours, theirs = (float((f(x).double() - exact).norm()) for f in (fused, block))
    assert ours <= theirs * 1.001 + 1e-30


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_statistics_that_change_are_seen(device: str, order: torch.memory_format) -> None:
    block = Block(CODE["a residual"]).to(device, memory_format=order)
    fused = ct.fuse(copy.deepcopy(block), only_gains=False)
    x = images(3, CHANNELS, 4, 4, order=order).to(device)
    for training in (False, True, False):
        for module in (block, fused):
            module.train(training)
        for a, b in zip(results(fused, x, True), results(block, x, True), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused.norm.running_var, block.norm.running_var)


PERMUTED: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.mT,
    "every other row": lambda x: x[:, :, ::2],
    "images as channels": lambda x: x.repeat(3, 1, 1, 1).transpose(0, 1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last)[:, :, ::2],
}


@pytest.mark.parametrize("name", PERMUTED)
def test_inputs_in_no_format(device: str, name: str) -> None:
    block = Block(lambda m, x: F.relu(m.norm(PERMUTED[name](x)))).eval().to(device)
    fused = ct.fuse(copy.deepcopy(block), only_gains=False)
    x = images(2, CHANNELS, 6, 4).to(device)
    with torch.no_grad():
        ours, theirs = fused(x), block(x)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7)], ids=str)
def test_other_inputs_in_no_format(device: str, shape: tuple[int, ...]) -> None:
    norm = nn.Sequential(nn.BatchNorm1d(7), nn.ReLU()).eval().to(device)
    fused = ct.fuse(copy.deepcopy(norm), only_gains=False)
    x = torch.randn(shape, device=device).transpose(1, -1)
    x = x if len(shape) == 3 else torch.randn(shape[::-1], device=device).t()
    with torch.no_grad():
        ours, theirs = fused(x), norm(x)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_a_norm_alone_stays_as_it_is() -> None:
    fused = ct.fuse(Block(lambda m, x: m.second(m.norm(m.first(x)))).eval().to(memory_format=torch.channels_last))
    with torch.no_grad():
        fused(images(2, CHANNELS, 5, 4, order=torch.channels_last))
    found = fused.explain()
    assert {part.operations for part in found.left} <= {("conv2d",), ("batch_norm",)}
    assert all(part.operations == ("batch_norm",) for part in found.fused)
