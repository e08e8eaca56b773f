"""Weights change where only a GPU shows it: replays of graphs, streams, threads, and what a check waits for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_models as models
from changing_weights import agree, averaged, data_add, data_copy, layer, one_column, one_row, pair, preserved, sizes
from torch import nn
from torch.nn import functional as F
from torch_support import captured, require_gpu

import cupyfuse.torch as ct

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> None:
    require_gpu()


def near(got: Any, want: Any) -> None:
    size = float(want.abs().max().clamp(min=1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * size)


@pytest.mark.parametrize("way", [data_add, data_copy, preserved, one_row, one_column, averaged])
@pytest.mark.parametrize("head", models.HEADS)
def test_replays_see_changes(head: Any, way: Callable[[Any], None], cuda: None) -> None:
    plain, fused, x = pair(head, "cuda")
    with torch.no_grad():
        graph, y = captured(lambda: fused(x))
        for turn in range(4):
            way(layer(plain).weight), way(layer(fused).weight)
            graph.replay()
            near(y, plain(x))
            if turn % 2:
                agree(fused, plain, x)


def test_replays_and_calls_take_turns(cuda: None) -> None:
    """With two sets of weights: what one knows, the other has overwritten."""
    plain, fused, x = pair(models.HeadSum, "cuda")
    first, second = layer(plain).weight.detach().clone(), torch.randn_like(layer(plain).weight)
    with torch.no_grad():
        graph, y = captured(lambda: fused(x))
        for value in (first, second, first, first, second):
            for module in (plain, fused):
                layer(module).weight.data.copy_(first)
            graph.replay()
            near(y, plain(x))
            for module in (plain, fused):
                layer(module).weight.data.copy_(value)
            agree(fused, plain, x)


def test_replays_see_a_refresh(cuda: None) -> None:
    plain, fused, x = pair(models.HeadSum, "cuda")
    with torch.no_grad():
        graph, y = captured(lambda: fused(x))
        for k in range(3):
            for module in (plain, fused):
                layer(module).weight.data[7, k] += 100
            fused.refresh()
            graph.replay()
            near(y, plain(x))


def test_a_captured_training_step(cuda: None) -> None:
    plain, fused, x = pair(models.HeadLogSumExp, "cuda")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True, capturable=True) for m in (plain, fused)]

    def step(module: Any, optimizer: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = (module(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph, loss = captured(lambda: step(fused, optimizers[1]))
    for _ in range(2):
        step(plain, optimizers[0])
    for _ in range(6):
        graph.replay()
        near(loss.detach(), step(plain, optimizers[0]).detach())
    agree(fused, plain, x)


def test_graphs_outlive_a_release(cuda: None) -> None:
    """What a graph writes to stays its own, though the module has let go of it."""
    plain, fused, x = pair(models.HeadSum, "cuda")
    with torch.no_grad():
        graph, y = captured(lambda: fused(x))
        for runner in fused.__dict__["_cupyfuse"].runners:
            runner.release()
        torch.cuda.synchronize()
        taken = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(16)]
        for module in (plain, fused):
            layer(module).weight.data.mul_(-1.5)
        graph.replay()
        near(y, plain(x))
        assert all(bool(t.isnan().all()) for t in taken)
        agree(fused, plain, x)


def test_more_streams_and_graphs_than_states(cuda: None) -> None:
    plain, fused, x = pair(models.HeadSum, "cuda")
    with torch.no_grad():
        fused(x)
        graphs = [captured(lambda: fused(x)) for _ in range(36)]
        for _ in range(2):
            for module in (plain, fused):
                layer(module).weight.data.mul_(-1.25)
            for graph, y in graphs:
                graph.replay()
                near(y, plain(x))
            agree(fused, plain, x)


@pytest.mark.parametrize("head", models.HEADS)
def test_streams_check_for_themselves(head: Any, cuda: None) -> None:
    plain, fused, x = pair(head, "cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    values = [torch.randn_like(layer(plain).weight) / 16 for _ in range(2)]
    with torch.no_grad():
        for turn in range(12):
            torch.cuda.synchronize()
            for module in (plain, fused):
                layer(module).weight.data.copy_(values[turn // 2 % 2])
            torch.cuda.synchronize()
            results = []
            for stream in streams[turn % 3 :][: 1 + turn % 2]:
                with torch.cuda.stream(stream):
                    results.append(fused(x))
            torch.cuda.synchronize()
            for y in results:
                near(y, plain(x))


def test_threads_with_weights_of_their_own(cuda: None) -> None:
    plain, fused, x = pair(models.HeadSum, "cuda")
    agree(fused, plain, x)
    (runner,) = fused.__dict__["_cupyfuse"].runners
    linear = layer(plain)
    sets = [[(1 + n) * p.detach() for p in (linear.weight, linear.bias)] for n in range(4)]
    wanted = [models.HeadSum.forward(SimpleNamespace(linear=lambda x, s=s: F.linear(x, *s)), x) for s in sets]
    torch.cuda.synchronize()
    failures: list[Any] = []

    def work(n: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream() if n % 2 else None):
                for _ in range(20):
                    got = runner([x, *sets[n]])[0]
                    torch.cuda.current_stream().synchronize()
                    near(got, wanted[n])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_no_synchronisation_hides_in_a_check(cuda: None) -> None:
    _, fused, x = pair(models.HeadLogSumExp, "cuda")
    fused(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            fused(x)
            layer(fused).weight.data.mul_(1.5)
            fused(x)
            fused.refresh()
            fused(x)
        fused(x).sum().backward()
        fused(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cublas_prepares_is_prepared_in_every_call(cuda: None) -> None:
    class Product(nn.Module):
        def __init__(self, k: int, n: int):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(k, 32)), nn.Parameter(torch.randn(32, n))

        def forward(self, x: Any) -> Any:
            return F.softmax(x @ (self.first @ self.second) / 64, -1)

    rows, k, n = sizes("cuda")
    plain = Product(k, n).cuda()
    fused, x = ct.fuse(copy.deepcopy(plain)), torch.randn(rows, k, device="cuda")
    for _ in range(3):
        agree(fused, plain, x)
        for module in (plain, fused):
            module.first.data.mul_(1.25)
    for plan in ct.explain(fused).fused[0].plans:
        if plan.prepare is not None and not plan.prepare.conditional:
            assert "prepacked in every call" in str(plan)
