"""Calls like earlier ones take a short way: backward passes by a generated function, inputs as they are, not folded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import HOST
from torch import nn
from torch_support import Graphs, OnHost, close, require_gpu

import cupyfuse.torch as ct
from cupyfuse.torch.chains import backward, compiled, executor
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.compiled import CompiledChain
from cupyfuse.torch.chains.matching import backward_call

gpu = pytest.mark.gpu


@pytest.fixture(params=["host", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cuda":
        require_gpu()
        return "cuda"
    HOST.require()
    runtime = OnHost()
    for module in (backward, compiled):
        monkeypatch.setattr(module, "load", runtime.load)
        monkeypatch.setattr(module, "begin", runtime.begin)
    return "cpu"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backward passes that were looked up by a key."""
    seen: list[Any] = []
    whole = Backward._find_loaded

    def find(self: Backward, given: Any, wanted: Any, arrays: Any) -> Any:
        seen.append((given, wanted, [a.stride() for a in arrays]))
        return whole(self, given, wanted, arrays)

    monkeypatch.setattr(Backward, "_find_loaded", find)
    monkeypatch.setattr(executor, "_compiled", {})  # another test may have compiled the chains
    return seen


@pytest.fixture
def folded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of inputs that were folded."""
    seen: list[torch.Size] = []
    whole = compiled.as_rows

    def fold(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return whole(tensor)

    monkeypatch.setattr(compiled, "as_rows", fold)
    return seen


class TwoResults(nn.Module):
    """One chain with two results, of which the second one ends in a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 20)
        self.scale = nn.Parameter(torch.rand(20))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.gelu(self.linear(x))
        return torch.softmax(y * self.scale, -1), y.sum(-1)


def shaped(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return equal values in another order in memory."""
    if how == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if how == "apart":
        wide = x.new_empty((*x.shape[:-1], x.shape[-1] + 4))
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x.expand(x.shape) if how == "expanded" else x.contiguous()


Given = tuple[str | None, str | None]
CONTIGUOUS: Given = ("contiguous", "contiguous")
STEPS: list[tuple[Given, tuple[bool, bool, bool, bool]]] = [
    (CONTIGUOUS, (True, True, True, True)),
    (CONTIGUOUS, (True, True, True, True)),
    (("contiguous", None), (True, True, True, True)),
    ((None, "contiguous"), (True, True, True, True)),
    ((None, "apart"), (True, True, True, True)),
    (("transposed", "contiguous"), (True, True, True, True)),
    (("apart", "apart"), (True, False, True, True)),
    (("apart", "apart"), (False, True, True, False)),
    (CONTIGUOUS, (False, False, True, False)),
    (CONTIGUOUS, (True, True, True, True)),
]


@pytest.mark.parametrize("shape", [(6, 12), (2, 3, 12), (2, 1, 3, 12), (1, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_call_gets_its_own_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Other cotangents, layouts and wanted gradients, called twice each and in turn, as exact as eager's."""
    torch.manual_seed(0)
    plain = TwoResults().to(device, dtype)
    exact = copy.deepcopy(plain).double()
    fused = ct.fuse(copy.deepcopy(plain), only_gains=False)
    for given, wanted in [*STEPS, *reversed(STEPS)]:
        for _ in range(2):
            start, results = torch.randn(shape, dtype=dtype), []
            weights = [torch.randn(s, dtype=dtype) for s in ((*shape[:-1], 20), shape[:-1])]
            for module, kind in ((exact, torch.float64), (plain, dtype), (fused, dtype)):
                x = start.to(device, kind, copy=True).requires_grad_(wanted[0])
                parameters = list(module.parameters())
                for p, want in zip(parameters, wanted[1:], strict=True):
                    p.requires_grad_(want)
                outputs = module(x)
                pairs = [
                    (out, shaped(weight.to(device, kind), how))
                    for out, weight, how in zip(outputs, weights, given, strict=True)
                    if how is not None and out.requires_grad
                ]
                sources = [t for t in (x, *parameters) if t.requires_grad]
                ends, cotangents = zip(*pairs, strict=True)
                grads = torch.autograd.grad(ends, sources, cotangents, allow_unused=True)
                results.append([*(out.detach() for out in outputs), *grads])
            for expected, eager, found in zip(*results, strict=True):
                assert (expected is None) == (found is None)
                if expected is not None:
                    # Terms of sums are of size one, and may cancel.
                    rounding = 4 * torch.finfo(dtype).eps * max(1.0, float(expected.norm()))
                    assert (found.double() - expected).norm() <= 1.5 * (eager.double() - expected).norm() + rounding


def test_backward_passes_are_looked_up_once(device: str, searches: list[Any]) -> None:
    fused = ct.fuse(TwoResults().to(device), only_gains=False)
    x = torch.randn(2, 3, 12, device=device, requires_grad=True)
    for count in (1, 1, 1):
        for out in (fused(x)[0], fused(x)[0]):
            out.backward(torch.ones_like(out))
        assert len(searches) == count
    for _ in range(3):  # two in turn
        for how in ("apart", "contiguous"):
            out = fused(x)[0]
            out.backward(shaped(torch.ones_like(out), how))
    assert len(searches) == 2


def test_backward_passes_of_operators_are_looked_up_once(device: str, searches: list[Any]) -> None:
    """As compilers run them."""
    model = TwoResults().to(device)
    compiled_model = torch.compile(copy.deepcopy(model), backend=Graphs())
    x = torch.randn(2, 3, 12, device=device)
    for _ in range(3):
        for each in (model, compiled_model):
            first, second = each(x)
            (first.sin().sum() + second.sum()).backward()
    for expected, got in zip(model.parameters(), compiled_model.parameters(), strict=True):
        assert expected.grad is not None and got.grad is not None
        torch.testing.assert_close(got.grad, expected.grad, rtol=1e-5, atol=1e-5)
    assert len(searches) == 1


def test_saved_tensors_that_come_back_otherwise_are_noticed(device: str, searches: list[Any]) -> None:
    """As hooks of saved tensors may give them back, which move activations to another memory and back."""
    plain = nn.Sequential(nn.Linear(12, 20), nn.GELU()).to(device)
    fused = ct.fuse(copy.deepcopy(plain), only_gains=False)
    x = torch.randn(6, 12, device=device)
    expected = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))

    def gradients(unpack: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            return torch.autograd.grad(fused(x).sum(), list(fused.parameters()))

    for unpack in (torch.clone, torch.clone, lambda t: shaped(t, "transposed"), lambda t: shaped(t, "apart")):
        for got, want in zip(gradients(unpack), expected, strict=True):
            close(got, want)
    assert len(searches) >= 3


def test_inputs_of_many_dimensions_are_not_folded(device: str, folded: list[torch.Size]) -> None:
    model = nn.Sequential(nn.Linear(12, 20), nn.Softmax(-1)).to(device)
    fused = ct.fuse(copy.deepcopy(model), only_gains=False)
    with torch.no_grad():
        x = torch.randn(2, 3, 12, device=device)
        close(fused(x), model(x))
        assert folded, "the first call plans for matrices"
        folded.clear()
        for _ in range(3):
            x = torch.randn(2, 3, 12, device=device)
            close(fused(x), model(x))
        assert not folded
        linear = model[0]
        for permuted in (torch.randn(3, 2, 12, device=device).transpose(0, 1) for _ in range(2)):
            folded.clear()
            close(ct.linear_softmax(permuted, linear.weight, linear.bias), model(permuted))
        for reversed_rows in (torch.randn(2, 12, 3, device=device).transpose(1, 2) for _ in range(2)):
            folded.clear()
            close(ct.linear_softmax(reversed_rows, linear.weight, linear.bias), model(reversed_rows))
        assert reversed_rows.shape in folded, "rows whose elements are apart are copied"


def test_compiled_chains_fold_what_they_prepack_from(device: str) -> None:
    """`arguments` leaves inputs as they are only where no weights are prepacked from them."""
    from cupyfuse.settings import Settings
    from cupyfuse.torch.chains.chain import metas_of
    from cupyfuse.torch.functions import Step, build_chain
    from cupyfuse.torch.rules.symbols import Ref

    chain = build_chain((Step("mul", (Ref(1),)), Step("softmax", (-1,))), ("input", "scale"))
    tensors = [torch.randn(2, 3, 12, device=device), torch.randn(2, 3, 12, device=device)]
    for prepacked, expected in ((frozenset[int](), [3, 3]), (frozenset([1]), [3, 2])):
        made = CompiledChain(chain.trace(metas_of(tensors)), tensors, Settings(), prepacked=prepacked)
        made.load(made.matrices(tensors))
        assert [t.dim() for t in made.arguments(tensors)] == expected


def test_generated_calls_compare_all_that_they_rely_on() -> None:
    kept, cotangent = torch.randn(4, 6), torch.randn(4, 6)

    def run(arrays: Any) -> Any:
        return [torch.stack(list(arrays)).sum(0), "unused"]

    call = backward_call([kept], {1: cotangent}, 3, [0], (True, False, True), run, [0, None, lambda: "zeros"])
    good = [kept], (None, cotangent, "not read"), (True, False, True)
    found = call(*good)
    assert found is not None and torch.equal(found[0], kept + cotangent) and found[1:] == [None, "zeros"]
    wide, column = torch.randn(4, 8)[:, :6], torch.randn(6, 4).t()
    for other in (
        ([wide], *good[1:]),
        ([kept[:2]], *good[1:]),
        ([kept.to("meta")], *good[1:]),
        (good[0], (None, column, None), good[2]),
        (good[0], (None, cotangent[:2], None), good[2]),
        (good[0], (None, None, None), good[2]),
        (good[0], (cotangent, cotangent, None), good[2]),
        (*good[:2], (True, True, True)),
    ):
        assert call(*other) is None


def test_another_thread_may_forget_the_last_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a pass whose cotangents are copied, between this one's check and its call."""

    class Forgotten:
        def __init__(self) -> None:
            self.value: Any = None

        def __get__(self, owner: Any, kind: Any) -> Any:
            value, self.value = self.value, None
            return value

        def __set__(self, owner: Any, value: Any) -> None:
            self.value = value

    monkeypatch.setattr(Backward, "_like_last", Forgotten(), raising=False)
    plain = TwoResults().to(device)
    fused = ct.fuse(copy.deepcopy(plain), only_gains=False)
    x = torch.randn(6, 12, device=device)
    expected = torch.autograd.grad(plain(x)[0].norm(), list(plain.parameters()))
    for _ in range(4):
        for got, want in zip(torch.autograd.grad(fused(x)[0].norm(), list(fused.parameters())), expected, strict=True):
            close(got, want)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1)], ids=str)
def test_results_whose_dimensions_are_stored_in_another_order(order: tuple[int, ...], device: str) -> None:
    """Tensors have no `transpose` of all dimensions, as NumPy's and CuPy's arrays do."""

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (torch.sin(x) * y).permute(order).mean(1, keepdim=True)

    x, y = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, 4, device=device)
    expected = Mean()(x, y)
    found = ct.fuse(Mean(), only_gains=False)(x, y)
    close(found, expected)
    assert found.stride() == expected.stride()
