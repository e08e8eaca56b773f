"""What only a GPU has: graphs that are captured and replayed, streams, the allocator, the precision of products."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch_models as models
from support import missing_gpu
from torch import nn
from torch_support import warmed

import cupyfuse.torch as ct

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu() or "there is a GPU")]


def pair(head: Any, k: int = 256, n: int = 512, rows: int = 128) -> tuple[Any, Any, Any]:
    """Large enough for products from halves, where there are any."""
    plain = head(k, n).cuda()
    return plain, ct.fuse(copy.deepcopy(plain)), torch.randn(rows, k, device="cuda")


@pytest.mark.parametrize("head", models.HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_calls_see_new_inputs_and_new_weights(head: Any, dtype: torch.dtype) -> None:
    plain, fused, x = pair(head)
    plain, fused, x = plain.to(dtype).eval(), fused.to(dtype).eval(), x.to(dtype)
    with torch.no_grad():
        warmed(lambda: fused(x))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fused(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            exact = copy.deepcopy(plain).double()(x.double())
            error, allowed = (y - exact).abs().max(), (plain(x) - exact).abs().max()
            assert error <= 2 * allowed + 4 * torch.finfo(dtype).eps * exact.abs().max()
            for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
                p.mul_(0.9), q.mul_(0.9)


def test_a_training_step_can_be_captured() -> None:
    plain, fused, x = pair(models.HeadSoftmax)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)

    def step(module: Any, optimizer: Any) -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = module(x).log().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warmed(lambda: step(fused, optimizer))
    for _ in range(3):
        step(plain, reference)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(fused, optimizer)
    for _ in range(4):
        graph.replay()
        wanted = step(plain, reference)
        torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-4)


def test_weights_that_a_replay_changes_are_seen() -> None:
    """A replay counts no versions of what it writes to."""
    _, fused, x = pair(models.HeadSum)
    weight = fused.linear.weight

    def step() -> None:
        fused(x)
        with torch.no_grad():
            weight.mul_(1.5)

    with torch.no_grad():
        fused(x)
    warmed(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(fused(x), models.HeadSum.forward(fused, x), rtol=1e-4, atol=1e-2)
        graph.replay()
    with torch.no_grad():
        torch.testing.assert_close(fused(x), models.HeadSum.forward(fused, x), rtol=1e-4, atol=1e-1)


def test_reduce_overhead() -> None:
    plain, _, x = pair(models.HeadLogSumExp)
    from cupyfuse.torch.backend import backend

    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(plain), backend=backend, options={"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn_like(x)
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_capture_without_a_call_before_leaves_the_chain_to_pytorch() -> None:
    """As often as there are captures, with a warning that says what to do; a call outside of one fuses."""
    plain, fused, x = pair(models.HeadLogSumExp, 257, 509, 131)
    plain(x)  # cuBLAS has its workspace
    torch.cuda.synchronize()
    for _ in range(4):
        graph = torch.cuda.CUDAGraph()
        warning = pytest.warns(RuntimeWarning, match="before the capture begins")
        with torch.no_grad(), warning, torch.cuda.graph(graph):
            result = fused(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, plain(x).detach(), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        fused(x)
    (part,) = fused.explain().fused
    assert len(part.plans) == 1


def test_weights_prepared_on_another_stream_are_waited_for() -> None:
    plain, fused, x = pair(models.HeadSum, 4096, 4096)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with torch.no_grad():
        for turn in range(12):
            torch.cuda.synchronize()
            plain.linear.weight.add_(1e-3), fused.linear.weight.add_(1e-3)
            torch.cuda.synchronize()
            results = []
            for stream in streams[turn % 3 :] + streams[: turn % 3]:
                with torch.cuda.stream(stream):
                    results.append(fused(x))
            torch.cuda.synchronize()
            for y in results:
                torch.testing.assert_close(y, plain(x), rtol=1e-4, atol=1e-2)


def test_threads_with_streams_of_their_own() -> None:
    plain, fused, _ = pair(models.HeadLogSumExp)
    inputs = [torch.randn(64 + 16 * (k % 3), 256, device="cuda") for k in range(6)]
    wanted = [plain(x).detach() for x in inputs]
    torch.cuda.synchronize()
    failures: list[Any] = []

    def work(k: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    y = fused(inputs[k])
                torch.cuda.current_stream().synchronize()
                torch.testing.assert_close(y.detach(), wanted[k], rtol=1e-5, atol=1e-5)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("head", models.HEADS)
def test_allocations_are_results_and_one_workspace(head: Any) -> None:
    _, fused, x = pair(head)
    with torch.no_grad():
        for _ in range(3):
            fused(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = fused(x)
        taken = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert taken <= 2 and y is not None


def test_what_is_prepared_is_given_back() -> None:
    _, fused, x = pair(models.HeadLogSumExp, 1024, 1024)
    with torch.no_grad():
        fused(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    fused.cpu()
    assert torch.cuda.memory_allocated() < held - 1024 * 1024 * 4


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_precision_follows_pytorchs(precision: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        fused(x)
        (part,) = ct.explain(fused).fused
        assert [plan.precision for plan in part.plans] == [precision]
    finally:
        torch.set_float32_matmul_precision(before)
    own = ct.fuse(models.HeadLogSumExp(256, 512).cuda(), precision="ieee")
    own(x)
    assert ct.explain(own).fused[0].plans[0].precision == "ieee"


def test_devices_must_agree() -> None:
    _, fused, x = pair(models.HeadLogSumExp)
    with pytest.raises(RuntimeError, match="device"):
        fused(x.cpu())


def test_a_model_in_parallel_on_one_device() -> None:
    plain, fused, x = pair(models.HeadLogSumExp)
    parallel = nn.DataParallel(fused, device_ids=[0])
    torch.testing.assert_close(parallel(x), plain(x), rtol=1e-5, atol=1e-5)


def test_no_synchronisation_hides_in_a_call() -> None:
    _, fused, x = pair(models.HeadSoftmax)
    fused(x)
    fused(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(x)
        fused(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Distances(nn.Module):
    """A softmax of scores and a bias by the distance of positions, which is computed on the CPU and then moved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-1])
        distance = (places[:, None] - places).float().square().sqrt()
        return torch.softmax(x * 0.125 - (distance * 0.1).tanh().to(x.device, x.dtype), -1)


@pytest.mark.choice
def test_what_a_model_computes_on_the_cpu_is_left_to_pytorch() -> None:
    plain, fused, x = Distances(), ct.fuse(Distances()), torch.randn(64, 256, 256, device="cuda")
    torch.testing.assert_close(fused(x), plain(x))
    found = ct.explain(fused)
    assert any("NumPy" in part.reason for part in found.left), str(found)
    assert [part.operations[-1] for part in found.fused] == ["softmax"], str(found)
