"""PyTorch's side of the benchmarks. Imported only where PyTorch is; tensors share memory with CuPy's arrays."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from cupyfuse import dtypes

from .device import GRAPH_CALLS

MODELS = Path(__file__).resolve().parent.parent / "examples" / "kernel_benchmark"


# Tensors and arrays -------------------------------------------------------------------------------------------------


def as_tensor(array: Any) -> torch.Tensor:
    """Return a tensor over an array's memory; bfloat16 goes as its bits, which every version of DLPack can carry."""
    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def as_array(tensor: torch.Tensor, xp: Any) -> Any:
    """Return an array of `xp` over a tensor's memory: the reverse of `as_tensor`."""
    tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        return xp.from_dlpack(tensor.view(torch.int16)).view(dtypes.to_numpy("bfloat16"))
    return xp.from_dlpack(tensor)


def as_double(tensor: torch.Tensor, xp: Any) -> Any:
    """Convert a tensor to a float64 array of `xp`."""
    return xp.from_dlpack(tensor.detach().to(torch.float64).contiguous())


# Memory -------------------------------------------------------------------------------------------------------------


def device_type() -> str:
    """Return the modules' device: "cuda", or "cpu" without a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Memory(NamedTuple):
    """Bytes that tensors took before a call; the most during it and those after it, beyond that; its allocations."""

    before: int = 0
    peak: int = 0
    kept: int = 0  # the call's result among them
    allocations: int = 0


def measure_memory(call: Callable[[], Any]) -> Memory:
    """Measure a call's GPU memory; zeros without a GPU."""
    if not torch.cuda.is_available():
        return Memory()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, allocations = torch.cuda.memory_allocated(), _count_allocations()
    result = call()  # held until the memory is read
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return Memory(before, peak, after, _count_allocations() - allocations)


def _count_allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def memory_held() -> tuple[int, int]:
    """Return the bytes that tensors take and that the allocator holds for them; zeros without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def poison(size: int) -> None:
    """Leave a block of NaN in torch's allocator, for the next tensor of that many bytes."""
    torch.full((size,), 255, dtype=torch.uint8, device="cuda")


def release() -> None:
    """Drop what was compiled, and return unused memory to the driver, so that CuPy can have it."""
    reset_compiler()
    gc.collect()
    torch.cuda.empty_cache()


# What is computed ---------------------------------------------------------------------------------------------------


def load(name: str, shape: tuple[int, int, int]) -> Any:
    """Import the kernel benchmark of a head, for a shape (B, K, N)."""
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a compiler looks up what its functions refer to
    spec.loader.exec_module(module)
    module.batch_size, module.in_features, module.out_features = shape  # type: ignore[attr-defined]
    return module


def parameter_names(name: str) -> dict[str, str]:
    """Map the arguments of a head's function to the parameters and buffers of its module."""
    linear = "gemm" if name == "head_softmax" else "linear"
    names = {"weight": f"{linear}.weight", "bias": f"{linear}.bias"}
    if name == "head_softmax":
        names |= {"gamma": "bn.weight", "beta": "bn.bias", "scale": "scale"}
        names |= {"running_mean": "bn.running_mean", "running_var": "bn.running_var"}
    return names


class _AddBias(torch.nn.Module):
    def __init__(self, bias: torch.Tensor):
        super().__init__()
        self.bias = torch.nn.Parameter(bias)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + self.bias


def head(name: str, arguments: Mapping[str, Any], training: bool = False) -> torch.nn.Module:
    """Build a head's plain module over the memory of CuPy's arrays, without gradients.

    Without a weight among the arguments it is the head of what `x @ weight.T` has given.
    """
    source = load(name, (1, arguments["weight"].shape[1] if "weight" in arguments else 1, arguments["bias"].size))
    with torch.device("meta"):
        module: torch.nn.Module = source.Model(*source.get_init_inputs())
    if name == "head_softmax":
        module.bn.num_batches_tracked = None  # the function counts no batches either
    names = {argument: parameter for argument, parameter in parameter_names(name).items() if argument in arguments}
    if "weight" not in arguments:
        setattr(module, names["bias"].partition(".")[0], _AddBias(as_tensor(arguments["bias"])))
    state = {parameter: as_tensor(arguments[argument]) for argument, parameter in names.items()}
    module.load_state_dict(state, strict=False, assign=True)  # a counter of batches would be set again
    return module.requires_grad_(False).train(training)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 1)


def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x, 1)


def product(x: torch.Tensor, weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Compute ``x @ weight.T`` at torch's float32 precision of that name."""
    with matmul_precision(precision):
        return torch.matmul(x, weight.T)


def linear_then(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a linear map, and what the benchmark of 16-bit products calls `name` of it."""
    then = {"": lambda y: y, "gelu": F.gelu, "logsumexp": logsumexp, "softmax": softmax}
    return then[name](F.linear(x, weight, bias))


@dataclass
class Step:
    """What is timed of a module or loss: the forward pass, and the backward pass where there are `leaves`."""

    forward: Callable[[], torch.Tensor]
    leaves: Sequence[torch.Tensor] = ()  # whose gradients are taken
    cotangent: torch.Tensor | None = None  # of the result, if that is no number

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> torch.Tensor:
        self.drop_gradients()
        result = self.forward()
        if self.leaves:
            result.backward(self.cotangent)
        return result

    def results(self) -> list[torch.Tensor]:
        """Return the result and the gradients in float64."""
        found = [self().detach().double()]
        return found + [torch.zeros_like(t).double() if t.grad is None else t.grad.double() for t in self.leaves]


# Running it ---------------------------------------------------------------------------------------------------------


def compile_static(
    function: Callable[..., Any], mode: str = "default", backend: Any = "inductor"
) -> Callable[..., Any]:
    """Compile with torch.compile for fixed shapes."""
    if backend == "cupyfuse":  # a checkout that is not installed registers no name
        from cupyfuse.torch.backend import backend
    return torch.compile(function, dynamic=False, mode=mode, backend=backend)


def reset_compiler() -> None:
    """Drop what was compiled: past some shapes of one function, torch.compile falls back to eager without a word."""
    torch.compiler.reset()


def capture(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `GRAPH_CALLS` calls in a CUDA graph of torch's; return its launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(GRAPH_CALLS):
            call()
    return graph.replay


@contextlib.contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set torch's float32 precision of matrix products for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def session(stream: int, precision: str) -> Iterator[None]:
    """Run torch on CuPy's stream, without gradients, with matrix products of that precision."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU")
    same = torch.cuda.current_stream().cuda_stream == stream
    on_stream = contextlib.nullcontext() if same else torch.cuda.stream(torch.cuda.ExternalStream(stream))
    with matmul_precision(precision), torch.no_grad(), on_stream:
        yield
