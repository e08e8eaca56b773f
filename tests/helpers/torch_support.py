"""What tests of PyTorch's frontend share: comparisons, fused modules, tensors for the host's kernels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import HOST, missing_gpu
from torch import Tensor, nn

import cupyfuse.torch as ct
from cupyfuse import dtypes
from cupyfuse.engines import cuda, row_blocks
from cupyfuse.plan.plan import Plan
from cupyfuse.torch.backend import fuse_graph
from cupyfuse.torch.chains.chain import Chain
from cupyfuse.torch.chains.tensors import TensorMemory, from_numpy


def require_gpu() -> None:
    """Skip the test where PyTorch or CuPy finds no GPU."""
    if missing_gpu() or not torch.cuda.is_available():
        pytest.skip(missing_gpu() or "needs a GPU: PyTorch finds none")


class Code(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *tensors: Any) -> Any:
        return self.function(*tensors)


def warmed(call: Callable[[], Any], calls: int = 3) -> None:
    """As PyTorch asks for before a capture: a few calls on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(calls):
            call()
    torch.cuda.current_stream().wait_stream(side)


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture a call after two others; return the CUDA graph, and the results that each replay overwrites."""
    warmed(call, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def close(a: Any, b: Any, dtype: torch.dtype = torch.float32) -> None:
    """Equal but for roundings: sums of a few dozen numbers of size one, in another order."""
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def fused_chains(module: Any) -> list[tuple[str, ...]]:
    return [part.operations for part in ct.explain(module).fused]


def pair(module: nn.Module, device: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    """A module, its fused form with parameters of its own, and an input."""
    module = module.to(device, dtype)
    return module, ct.fuse(copy.deepcopy(module)), torch.randn(5, 12, device=device, dtype=dtype)


class Graphs:
    """A backend that keeps the graphs as the pass leaves them, and runs them as they are."""

    def __init__(self) -> None:
        self.seen: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        fuse_graph(module.graph)
        module.recompile()
        self.seen.append(module)
        return module.forward

    def chains(self) -> list[tuple[str, ...]]:
        nodes = [n for m in self.seen for n in m.graph.nodes if n.target is torch.ops.cupyfuse.chain.default]
        return [Chain.from_json(str(n.args[2])).operations for n in nodes]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class OnHost(TensorMemory):
    """Tensors on the CPU for kernels that run there (see host_cuda/README.md): new memory lies between guards."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        host = HOST.runtime
        self.processors, self.device = host.processors, host.device
        self.is_current, self.made_current, self.stream = host.is_current, host.made_current, host.stream
        self.workspace, self.product, self.biased_product = host.workspace, host.product, host.biased_product
        self.compile_ahead, self.function, self.tensor_map = host.compile_ahead, host.function, host.tensor_map
        self.clusters_at_once = host.clusters_at_once

    def allocator(self, shape: tuple[int, ...], dtype: Any, held: bool = True) -> Callable[[], Tensor]:
        kind = dtypes.to_numpy(_name_of(dtype))
        return lambda: from_numpy(np.asarray(HOST.runtime.empty(shape, kind)))

    def record(self, launch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return launch

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Tensor:
        return from_numpy(HOST.runtime.view(address, shape, dtypes.to_numpy(_name_of(dtype)), strides))

    def begin(self, plan: Plan, tensors: Any, device: torch.device) -> Callable[[], Any] | None:
        """Begin to load a plan, as on a GPU."""
        return None if plan.blocks is not None else cuda.CudaExecutable(plan, tensors, self).load

    def load(self, plan: Plan, tensors: Any) -> Callable[..., list[Tensor]]:
        """Load a plan for tensors on the CPU, whose kernels run here."""
        return row_blocks.load(functools.partial(cuda.load, runtime=self), plan, tensors)
