"""Pairs of neighbours along the last dimension that change places, as in rotary embeddings of interleaved halves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_support import Code

import cupyfuse.torch as ct
from cupyfuse.torch.rules.pairs import swap_pairs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_steps(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def by_halves(x: Any) -> Any:
    """As in GPT-J: the first index is given."""
    first, second = x[:, :, :, 0::2], x[:, :, :, 1::2]
    return torch.stack((-second, first), dim=-1).reshape(x.shape)


def by_unbind(x: Any) -> Any:
    first, second = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-second, first], dim=x.dim()).view(x.shape)


def by_indices(x: Any) -> Any:
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((pairs[..., -1].neg(), pairs[..., 0]), -1).flatten(3)


def by_select(x: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return torch.stack(tensors=(-pairs.select(-1, 1), pairs.select(-1, 0)), dim=-1).flatten(-2, -1)


def by_shape_of_another(x: Any) -> Any:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).view_as(x)


def by_keywords(x: Any) -> Any:
    first, second = torch.unbind(input=x.unflatten(-1, (-1, 2)), dim=-1)
    return torch.stack(dim=-1, tensors=(-second, first)).flatten(start_dim=-2)


ROTATIONS = [by_steps, by_halves, by_unbind, by_indices, by_select, by_shape_of_another, by_keywords]
SIGNS: dict[str, Callable[[Any], Any]] = {
    "neither": lambda x: torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2),
    "second": lambda x: torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2),
    "both": lambda x: torch.stack((-x[..., 1::2], -x[..., ::2]), -1).flatten(-2),
}


class Heads(nn.Module):
    """Queries of several heads, turned; `permuted` as (b, h, l, d) in the memory of (b, l, h, d)."""

    def __init__(self, rotate: Callable[[Any], Any], permuted: bool, turned: int = 8):
        super().__init__()
        self.rotate, self.permuted, self.turned = rotate, permuted, turned
        self.project = nn.Linear(12, 3 * 8)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        q = self.project(x).view(*x.shape[:2], 3, 8)
        q = q.transpose(1, 2) if self.permuted else q
        cos, sin = cos.unsqueeze(1 if self.permuted else 2), sin.unsqueeze(1 if self.permuted else 2)
        part, rest = q[..., : self.turned], q[..., self.turned :]
        part = part * cos + self.rotate(part) * sin
        return part if self.turned == 8 else torch.cat((part, rest), -1)


def operands(turned: int = 8, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[Any, Any, Any]:
    torch.manual_seed(batch)
    angles = torch.randn(batch, 5, turned, dtype=dtype)
    return torch.randn(batch, 5, 12, dtype=dtype), angles.cos(), angles.sin()


def run(module: Any, arguments: Any) -> list[Any]:
    """Return the result and all gradients."""
    given = [a.detach().clone().requires_grad_() for a in arguments]
    module.zero_grad()
    y = module(*given)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y, *(a.grad for a in given), *(p.grad for p in module.parameters())]


def compare(module: Any, fused: Any, arguments: Any) -> None:
    for ours, theirs in zip(run(fused, arguments), run(module, arguments), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("turned", [8, 4])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("rotate", ROTATIONS)
def test_rotary_embeddings_are_one_chain(rotate: Callable[[Any], Any], permuted: bool, turned: int) -> None:
    module = Heads(rotate, permuted, turned)
    fused = ct.fuse(module, only_gains=False)
    compare(module, fused, operands(turned))
    (chain,) = [c for c in fused.explain().fused if "swap_pairs" in c.operations]
    assert ("linear" in chain.operations) != permuted
    assert "reads" in str(fused.explain().details()) and "strided" not in str(fused.explain().details())


@pytest.mark.parametrize("sign", SIGNS)
def test_signs(sign: str) -> None:
    module = Heads(SIGNS[sign], permuted=False)
    fused = ct.fuse(module, only_gains=False)
    compare(module, fused, operands())
    assert any("swap_pairs" in c.operations for c in fused.explain().fused)


@pytest.mark.parametrize("negated", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_and_special_values(dtype: torch.dtype, negated: tuple[bool, bool]) -> None:
    """Elements move as they are: bits of zeros, infinities and NaN among them."""
    x = torch.randn(3, 4, 6, dtype=dtype)
    x[0, 0] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0])

    def code(x: Any) -> Any:
        parts = (-x[..., 1::2] if negated[0] else x[..., 1::2], -x[..., ::2] if negated[1] else x[..., ::2])
        return torch.stack(parts, -1).flatten(-2).abs(), torch.stack(parts, -1).flatten(-2) * 2

    fused = ct.fuse(Code(code), only_gains=False)
    for ours, theirs in zip(fused(x), code(x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert (torch.signbit(ours) == torch.signbit(theirs))[~theirs.isnan()].all()
    assert "swap_pairs" in fused.explain().fused[0].operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computed_rows_and_conversions(dtype: torch.dtype) -> None:
    """Of a product with a norm behind it, converted to float32 in between, as diffusion models do."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.norm = nn.Linear(12, 8), nn.RMSNorm(8)

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            q = self.norm(self.project(x))
            return (q.float() * cos + by_steps(q).float() * sin).to(q.dtype)

    module = Model().to(dtype)
    fused = ct.fuse(module, only_gains=False)
    exact = run(copy.deepcopy(module).double(), [a.double() for a in operands(dtype=dtype)])
    for ours, theirs, true in zip(
        run(fused, operands(dtype=dtype)), run(module, operands(dtype=dtype)), exact, strict=True
    ):
        step = torch.finfo(dtype).eps * true.abs().max()  # of bfloat16 norms PyTorch 2.11 rounds every intermediate
        assert (ours - true).abs().max() <= (theirs - true).abs().max() + 2 * step
    assert "swap_pairs" in fused.explain().fused[0].operations


def across_rows(x: Any) -> Any:
    first, second = x.view(-1, 2).unbind(-1)
    return torch.stack((-second, first), -1).view(x.shape)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "in_order": lambda x: torch.stack((x[..., ::2], x[..., 1::2]), -1).flatten(-2),
    "of_two": lambda x: torch.stack((-x[..., 1::2], (x * 2)[..., ::2]), -1).flatten(-2),
    "threes": lambda x: torch.stack((x[..., 1::3], x[..., ::3]), -1).flatten(-2),
    "another_dimension": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2),
    "another_shape": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(0, 1),
    "transposed": lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).transpose(-1, -2).reshape(x.shape),
    "ends_before": lambda x: torch.stack((-x[..., 1:-2:2], x[..., :-2:2]), -1).flatten(-2),
    "same_half": lambda x: torch.stack((-x[..., 1::2], x[..., 1::2]), -1).flatten(-2),
    "twice_negated": lambda x: torch.stack((-x[..., 1::2].neg(), x[..., ::2]), -1).flatten(-2),
    "computed_halves": lambda x: torch.stack((-x[..., 1::2].exp(), x[..., ::2]), -1).flatten(-2),
    "third": lambda x: torch.stack((-x[..., 1::2], x[..., ::2], x[..., ::2]), -1).flatten(-2),
    "other_rows": lambda x: torch.stack((-x[1:, ..., 1::2], x[:-1, ..., ::2]), -1).flatten(-2),
    "numbers": lambda x: torch.stack((-x.sum()[...], x.sum()[...]), -1).view(2),
    "of_two_rows": lambda x: across_rows(x.view(-1, 3)),
    "one_pair": lambda x: torch.stack((-x[..., :2][..., 1::2], x[..., :2][..., ::2]), -1).flatten(-2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_swap(name: str, recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(4, 3, 12, requires_grad=True)
    code = OTHERS[name]
    found = []
    for function in (ct.fuse(Code(lambda x: code(x) * 3 + 1), only_gains=False), lambda x: code(x) * 3 + 1):
        y = function(x)
        (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), x)
        found.append((y, grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not [w.message for w in recwarn if "left a captured graph" in str(w.message)]


def written_before(x: Any) -> Any:
    """The halves are views: what is written to the tensor between them and the stack is seen."""
    y = x * 2
    first, second = y[..., 1::2], y[..., ::2]
    y.add_(1)
    turned = torch.stack((-first, second), -1).flatten(-2)
    y.mul_(3)
    return turned * 2 + y


def written_half(x: Any) -> Any:
    negated = -x[..., 1::2]
    negated[0] = 5
    return torch.stack((negated, x[..., ::2]), -1).flatten(-2) * 2


def written_stack(x: Any) -> Any:
    stacked = torch.stack((-x[..., 1::2], x[..., ::2]), -1)
    turned = stacked.flatten(-2)
    stacked[..., 0] = 5
    return turned * 2


def written_in_place(x: Any) -> Any:
    stacked = torch.stack((-x[..., 1::2], x[..., ::2]), -1)
    turned = stacked.flatten(-2)
    stacked.mul_(3)
    return turned * 2


def written_result(x: Any) -> Any:
    turned = by_steps(x)
    turned[..., 0] = 5
    return turned * 2 + x


@pytest.mark.parametrize("code", [written_before, written_half, written_stack, written_in_place, written_result])
def test_memory_that_is_written_to(code: Callable[[Any], Any]) -> None:
    x = torch.randn(4, 3, 12)
    torch.testing.assert_close(ct.fuse(Code(code), only_gains=False)(x), code(x))


def test_results_that_share_memory() -> None:
    x = torch.randn(4, 3, 12)

    def code(x: Any) -> Any:
        stacked = torch.stack((-x[..., 1::2], x[..., ::2]), -1)
        turned = stacked.flatten(-2)
        return stacked, turned, turned * 2

    stacked, turned, _ = ct.fuse(Code(code), only_gains=False)(x)
    turned.zero_()
    assert not stacked.any()


def detached_operand(x: Any) -> Any:
    first, second = x.detach().unbind(-1)
    return torch.stack((-second, first), -1).view(x.shape)


def detached_stack(x: Any) -> Any:
    first, second = x.view(x.shape).unbind(-1)
    return torch.stack((-second, first), -1).detach()


@pytest.mark.parametrize("code", [detached_operand, detached_stack])
def test_detached_pairs_have_no_gradient(code: Callable[[Any], Any]) -> None:
    """Rows of one pair: `detach` is a view of their shape."""
    x = torch.randn(4, 2, requires_grad=True)
    fused = ct.fuse(Code(lambda x: code(x) * 2 + x), only_gains=False)
    (grad,) = torch.autograd.grad(fused(x).sum(), x)
    torch.testing.assert_close(grad, torch.ones(4, 2))


def test_halves_without_gradients() -> None:
    """The stack is within the mode of gradients that its halves are not in."""

    def code(x: Any) -> Any:
        with torch.no_grad():
            first, second = -x[..., 1::2], x[..., ::2]
        return torch.stack((first, second), -1).flatten(-2) * x

    x = torch.randn(3, 8, requires_grad=True)
    found, expected = (torch.autograd.grad(c(x).sum(), x)[0] for c in (ct.fuse(Code(code), only_gains=False), code))
    torch.testing.assert_close(found, expected)


def test_integers_stay_with_pytorch() -> None:
    x = torch.arange(24).view(2, 12)
    fused = ct.fuse(Code(lambda x: by_steps(x) + 1), only_gains=False)
    torch.testing.assert_close(fused(x), by_steps(x) + 1)
    assert all("swap_pairs" not in c.operations for c in fused.explain().fused)


def test_batches_of_any_size() -> None:
    module = Heads(by_steps, permuted=True)
    fused = ct.fuse(module, only_gains=False)
    for batch in (2, 3, 7, 1):
        compare(module, fused, operands(batch=batch))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("first", "count"), [(0, 12), (0, 4), (0, 8), (4, 4), (10, 2), (2, 8)])
def test_parts_of_rows(rows: int, first: int, count: int) -> None:
    """Of an argument, also of a single row: read where they are, and so are their gradients."""

    def code(x: Any) -> Any:
        part = x[..., first : first + count]
        return by_steps(part) * part

    x = torch.randn(rows, 12, requires_grad=True)
    fused = ct.fuse(Code(code), only_gains=False)
    found = [torch.autograd.grad((y**2).sum(), x)[0] for y in (fused(x), code(x))]
    torch.testing.assert_close(*found)
    assert not fused.explain().left and "strided" not in str(fused.explain().details())


def test_second_derivatives() -> None:
    def derivative(function: Callable[[Any], Any], x: Any) -> Any:
        y = function(x)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), x)[0]

    x = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    fused = ct.fuse(Code(lambda x: by_steps(x.sin()) * x), only_gains=False)
    torch.testing.assert_close(derivative(fused, x), derivative(lambda x: by_steps(x.sin()) * x, x))


def test_the_function_that_pytorch_runs() -> None:
    """Where no chain takes it."""
    x = torch.randn(2, 3, 8)
    assert torch.equal(swap_pairs(x, True), by_steps(x))
    assert torch.equal(swap_pairs(x), SIGNS["neither"](x))
    assert torch.equal(swap_pairs(x, False, True), SIGNS["second"](x))
    module = Heads(by_steps, permuted=False)
    compare(module, torch.compile(module, backend="cupyfuse"), operands())
