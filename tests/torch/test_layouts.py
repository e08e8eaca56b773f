"""Values that PyTorch keeps in another order in memory: results have its strides, chains pass each other C order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_support import Graphs

import cupyfuse.torch as ct
from cupyfuse.torch.chains.runner import Runner


class Encoder(nn.Module):
    """Blocks on the permuted result of a convolution, as in encoders of speech: residuals keep its order in memory."""

    def __init__(self, read: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 12, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.read = read

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.sin(self.conv(x)).permute(0, 2, 1)
        given = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            mixed = torch.fft.fft(norm(x), dim=1).real  # which no chain takes
            x = x + layer(mixed).sin()
            given.append(self.read(x))
        return (F.softmax(x, -1), x, *(each for each in given if each is not x))


def compare(module: Encoder, fused: Any, trained: bool) -> None:
    x = torch.randn(2, 4, 7, dtype=torch.float64)
    found = []
    for each in (module, fused):
        with torch.set_grad_enabled(trained):
            results = each(x)
        found.append(results)
        if trained:
            each.zero_grad()
            sum((r * torch.arange(r.numel()).view(r.shape).sin()).sum() for r in results).backward()
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)  # sums of hundreds of numbers
        assert got.stride() == expected.stride()
        assert got.requires_grad == expected.requires_grad
    if trained:
        gradients = [[p.grad for p in each.parameters()] for each in (module, fused)]
        for expected, got in zip(*gradients, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


READERS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x,
    "strides": lambda x: x.as_strided((5,), (1,)).clone(),
    "a view": lambda x: x.transpose(1, 2).reshape(-1).clone(),
    "another operation": lambda x: torch.fft.rfft(x, dim=1).real,
    "a change of a copy": lambda x: x.clone().mul_(2),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("trained", [False, True])
def test_results_and_gradients_are_pytorchs(name: str, trained: bool) -> None:
    module = Encoder(READERS[name]).double()
    other = copy.deepcopy(module)
    compare(module, ct.fuse(other, only_gains=False), trained)


@pytest.mark.parametrize("trained", [False, True])
def test_a_value_that_is_changed_in_place_is_read_as_changed(trained: bool) -> None:
    module = Encoder(lambda x: (x.detach().mul_(1.5), x)[1]).double()
    compare(module, ct.fuse(copy.deepcopy(module), only_gains=False), trained)


def test_chains_give_each_other_what_they_computed() -> None:
    """One copy at most for each result that PyTorch lays out otherwise and something but a chain reads."""
    graphs = Graphs()
    module = Encoder()
    compiled = torch.compile(copy.deepcopy(module), backend=graphs, fullgraph=True)
    with torch.no_grad():
        compiled(torch.randn(2, 4, 7))
    (graph,) = graphs.seen
    assert len(graphs.chains()) >= 3
    nodes = graph.graph.nodes
    results = set(graph.graph.output_node().all_input_nodes)
    laid_out = [n for n in nodes if n.target == "contiguous" and any(u.target == "permute" for u in n.users)]
    assert len(laid_out) <= len(results), "those between chains are gone"
    for node in laid_out:
        assert set(next(iter(node.users)).users) <= {graph.graph.output_node()}
    copied = [n.args[0] for n in nodes if n.target == "contiguous" and n not in laid_out]
    assert copied and len(set(copied)) == len(copied), "each value is copied once"


def test_the_backward_pass_reads_the_copy_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permuted input that two chains read, and the backward pass of one, is copied once."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ordered = torch.sort(self.norm(x), 1).values  # PyTorch's, and no view
            return F.softmax(ordered * x, -1)

    read: list[bool] = []
    whole = Runner.__call__

    def call(self: Runner, tensors: Any) -> Any:
        read.extend(t.is_contiguous() for t in tensors)
        return whole(self, tensors)

    monkeypatch.setattr(Runner, "__call__", call)
    module = Two().double()
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    x = torch.randn(2, 12, 7, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(2, 7, 12, dtype=torch.float64)
    gradients = [torch.autograd.grad((each(x) * weight).sum(), [x, *each.parameters()]) for each in (module, fused)]
    for expected, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    assert len(read) >= 4 and all(read)


def test_chains_read_results_of_chains_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    read: list[Any] = []
    whole = Runner.__call__

    def call(self: Runner, tensors: Any) -> Any:
        read.extend(t for t in tensors if any(t is result for result in given))
        results = whole(self, tensors)
        given.extend(results)
        return results

    monkeypatch.setattr(Runner, "__call__", call)
    fused = ct.fuse(Encoder(), only_gains=False)
    with torch.no_grad():
        fused(torch.randn(2, 4, 7))
    assert len([t for t in read if t.dim() == 3]) >= 2, "the residuals"


def both_ways(module: nn.Module) -> list[Any]:
    """Return a module with its chains called directly, and as operators."""
    return [ct.fuse(copy.deepcopy(module), only_gains=False), torch.compile(copy.deepcopy(module), backend=Graphs())]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_copy_made_without_gradients_is_not_read_with_them(mode: Callable[[], Any]) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with mode():
                weights = F.softmax(x * 2, -1)
                mixed = torch.fft.fft(weights, dim=1).real
            return F.softmax(x * 3, -1) + mixed, F.log_softmax(x * x, -1)

    x = torch.randn(2, 12, 7, dtype=torch.float64).transpose(1, 2).requires_grad_()
    weight = torch.randn(2, 7, 12, dtype=torch.float64)
    expected = torch.autograd.grad(sum((r * weight).sum() for r in Two()(x)), x)
    for module in both_ways(Two()):
        results = module(x)
        assert all(r.requires_grad for r in results)
        torch.testing.assert_close(torch.autograd.grad(sum((r * weight).sum() for r in results), x), expected)


def test_a_copy_is_not_read_once_an_input_is_changed_that_may_share_its_memory() -> None:
    """Captured with inputs of separate memory, and called with two views of one."""

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mixed = torch.fft.fft(F.softmax(x * 2, -1), dim=1).real
            y.mul_(2)
            return F.softmax(x * 3 + mixed, -1)

    for module in both_ways(Two()):
        for shared in (False, True):
            start, found = torch.randn(2, 12, 7, dtype=torch.float64), []
            for each in (Two(), module):
                memory = start.clone()
                found.append(
                    each(memory.transpose(1, 2), memory.view(-1) if shared else torch.randn(start.numel()).double())
                )
            torch.testing.assert_close(*found)
