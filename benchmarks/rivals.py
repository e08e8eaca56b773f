"""The rivals in PyTorch. Imported only where PyTorch is installed; tensors share their memory with CuPy's arrays."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cupyfuse import dtypes

from .device import GRAPH_CALLS
from .plain import EPSILON, MOMENTUM, SLOPE


def share(array: Any) -> torch.Tensor:
    """A tensor over an array's memory; bfloat16 goes as its bits, which every version of DLPack can carry."""
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_double(tensor: torch.Tensor, xp: Any) -> Any:
    """The values of a tensor as a float64 array of `xp`."""
    return xp.from_dlpack(tensor.detach().to(torch.float64).contiguous())


def array(tensor: torch.Tensor, xp: Any) -> Any:
    """An array of `xp` over a tensor's memory: the reverse of `share`."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(dtypes.to_numpy("bfloat16"))
    return xp.from_dlpack(tensor)


def place() -> str:
    """Where the modules are."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def memory(forward: Callable[[], torch.Tensor], backward: bool) -> dict[str, float]:
    """What a call takes of the GPU's memory, by name, its result left out; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}

    def requests() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    forward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    first, asked = torch.cuda.memory_allocated(), requests()
    out = forward()
    asked, size = requests() - asked, out.numel() * out.element_size()
    held, most = torch.cuda.memory_allocated() - first - size, torch.cuda.max_memory_allocated() - first - size
    if not backward:
        return {"allocations": asked, "MB at most": most / 1e6}
    out.sum().backward()
    return {"MB kept for backward": held / 1e6, "MB at most": (torch.cuda.max_memory_allocated() - first) / 1e6}


def held() -> tuple[int, int]:
    """Bytes of the GPU's memory that tensors take, and that the allocator holds for them; zeros without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def peak(call: Callable[[], Any]) -> int:
    """The most bytes of the GPU's memory that tensors take during a call; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def _fixed(array: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(share(array), requires_grad=False)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x, 1)


def logsumexp_tail(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Bias, logsumexp, LeakyReLU twice, GELU twice; from (B, N) to (B, 1)."""
    return _activated_logsumexp(y + bias)


def _activated_logsumexp(y: torch.Tensor) -> torch.Tensor:
    s = torch.logsumexp(y, dim=1, keepdim=True)
    s = F.leaky_relu(F.leaky_relu(s, SLOPE), SLOPE)
    return F.gelu(F.gelu(s))


class LogsumexpHead(torch.nn.Module):
    """Linear, logsumexp, LeakyReLU twice, GELU twice; from (B, K) to (B, 1)."""

    def __init__(self, weight: Any, bias: Any):
        super().__init__()
        self.weight, self.bias = _fixed(weight), _fixed(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _activated_logsumexp(F.linear(x, self.weight, self.bias))


class SumHead(torch.nn.Module):
    """Linear, sum, max, mean, logsumexp, logsumexp, all over the row; from (B, K) to (B, 1)."""

    def __init__(self, weight: Any, bias: Any):
        super().__init__()
        self.weight, self.bias = _fixed(weight), _fixed(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = torch.sum(F.linear(x, self.weight, self.bias), dim=1, keepdim=True)
        s = torch.max(s, dim=1, keepdim=True)[0]
        s = torch.mean(s, dim=1, keepdim=True)
        s = torch.logsumexp(s, dim=1, keepdim=True)
        return torch.logsumexp(s, dim=1, keepdim=True)


class SoftmaxTail(torch.nn.Module):
    """BatchNorm, a scale, softmax over the row; from (B, N) to (B, N)."""

    def __init__(self, running_mean: Any, running_var: Any, gamma: Any, beta: Any, scale: Any):
        super().__init__()
        self.register_buffer("running_mean", share(running_mean))
        self.register_buffer("running_var", share(running_var))
        self.gamma, self.beta, self.scale = _fixed(gamma), _fixed(beta), _fixed(scale)
        self.eval()

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(
            y, self.running_mean, self.running_var, self.gamma, self.beta, self.training, MOMENTUM, EPSILON
        )
        return F.softmax(self.scale * y, dim=1)


class BiasedSoftmaxTail(torch.nn.Module):
    """Bias, then `SoftmaxTail`, with running statistics; from (B, N) to (B, N)."""

    def __init__(self, bias: Any, *tail: Any):
        super().__init__()
        self.bias = _fixed(bias)
        self.tail = SoftmaxTail(*tail)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.tail(y + self.bias)


class SoftmaxHead(torch.nn.Module):
    """Linear, BatchNorm, a scale, softmax over the row; from (B, K) to (B, N)."""

    def __init__(self, weight: Any, bias: Any, *tail: Any, training: bool = False):
        super().__init__()
        self.weight, self.bias = _fixed(weight), _fixed(bias)
        self.tail = SoftmaxTail(*tail)
        self.train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(F.linear(x, self.weight, self.bias))


def product(x: torch.Tensor, weight: torch.Tensor, precision: str) -> torch.Tensor:
    """``x @ weight.T`` with torch's float32 precision of that name, whatever the session's is."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return torch.matmul(x, weight.T)
    finally:
        torch.set_float32_matmul_precision(before)


HEADS: dict[str, Callable[..., torch.nn.Module]] = {
    "head_logsumexp": LogsumexpHead,
    "head_sum": SumHead,
    "head_softmax": SoftmaxHead,
}


def compiled(function: Callable[..., Any], mode: str = "default", backend: str = "inductor") -> Callable[..., Any]:
    """`torch.compile` for these very shapes."""
    return torch.compile(function, dynamic=False, mode=mode, backend=_backend(backend))


def _backend(name: str) -> Any:
    """A backend's name, or ours itself: a checkout that is not installed registers no name."""
    if name != "cupyfuse":
        return name
    from cupyfuse.torch.backend import backend

    return backend


def forget() -> None:
    """Drop what was compiled: past some shapes of one function, torch.compile falls back to eager without a word."""
    torch.compiler.reset()


def poison(size: int) -> None:
    """Leave a block of NaN in torch's allocator, for the next tensor of that many bytes."""
    torch.full((size,), 255, dtype=torch.uint8, device="cuda")


def release() -> None:
    """Give unused memory back to the driver, so that CuPy can have it."""
    torch.cuda.empty_cache()


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture calls in a CUDA graph of torch's; the result replays `GRAPH_CALLS` of them."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


@contextlib.contextmanager
def session(stream: int, precision: str) -> Iterator[None]:
    """Run torch on CuPy's stream, without gradients, with matrix products of that precision."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    same = torch.cuda.current_stream().cuda_stream == stream
    on_stream = contextlib.nullcontext() if same else torch.cuda.stream(torch.cuda.ExternalStream(stream))
    try:
        with torch.no_grad(), on_stream:
            yield
    finally:
        torch.set_float32_matmul_precision(before)
