"""Run plans on PyTorch's tensors: in its memory, on its streams, with its cuBLAS handle.

CuPy compiles and loads the kernels; its current stream and memory pool are not used. NumPy runs the plans of CPU
tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ... import devices
from ...cuda.compile import check_process
from ...cuda.gemm import Blas, ForeignBlas, library_name
from ...cuda.launch_graph import LaunchGraph
from ...cuda.runtime import GpuRuntime, LibraryFunction
from ...devices import Device
from ...engines import cuda, row_blocks
from ...engines.cuda import CudaExecutable
from ...engines.numpy import NumpyExecutable
from ...errors import EngineError
from ...ir.library import LibraryCall
from ...plan.plan import Plan
from .tensors import TensorMemory, bump_version, from_numpy, to_numpy

Execute = Callable[..., list[torch.Tensor]]


def load(plan: Plan, tensors: Sequence[torch.Tensor]) -> Execute:
    """Load a plan for tensors like these: its arguments, then its prepacked weights.

    They have at most two dimensions and are on one device, a CPU or a GPU. They may require gradients, but nothing is
    recorded for autograd: call the plan under `torch.no_grad`.

    Returns
    -------
    callable
        `execute(tensors, outs=None)` returns the results. `outs` holds, for each, a tensor to write it to or None for
        a new one; None stands for new ones alone. That tensor has the result's shape and dtype and shares no memory
        with the arguments, which are read while it is written. Tensors in `outs`, and arguments that the plan changes,
        get a new version.

    Raises
    ------
    EngineError
        A kernel cannot be compiled or loaded, for instance because a CUDA graph is being captured.
    """
    index = tensors[0].get_device()
    if index < 0:
        return _CpuPlan(plan, tensors)
    execute: Execute = row_blocks.load(functools.partial(cuda.load, runtime=runtime_of(index)), plan, tensors)
    return execute


def begin(
    plan: Plan, tensors: Sequence[torch.Tensor], device: torch.device, conditional: bool = False
) -> Callable[[], Execute] | None:
    """Begin to compile the kernels of a plan, in other threads; return what loads it, as `load` does.

    `tensors` are those of `load`, or of the device "meta" with their shapes, dtypes and strides. None for CPUs, which
    compile nothing, and for plans in blocks, whose loading computes.
    """
    if device.type != "cuda" or plan.blocks is not None:
        return None
    return CudaExecutable(plan, tensors, runtime_of(device.index), conditional).load


def device_of(tensor: torch.Tensor) -> Device | None:
    """Return the GPU that a tensor is on; None for a CPU, and for a GPU that is not in the table."""
    return device_at(tensor.device)


def device_at(place: torch.device) -> Device | None:
    """Return the GPU of a PyTorch device, as `device_of`."""
    return _device(place.index) if place.type == "cuda" else None


@lru_cache(maxsize=64)
def _device(index: int) -> Device | None:
    """Return the entry of a GPU in the table, if it has one; without CuPy, whose import takes a second."""
    name = torch.cuda.get_device_properties(index).name
    return devices.find(name) if devices.is_known(name) else None


def require_engine(tensor: torch.Tensor) -> None:
    """Raise an `EngineError` where nothing can run a chain on the tensor's device, as without CuPy."""
    if tensor.is_cuda:
        runtime_of(tensor.get_device())


def is_capturing() -> bool:
    """Whether the current stream captures a CUDA graph."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())


class _CpuPlan:
    """A plan loaded for CPU tensors, whose memory NumPy works on."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]):
        self._execute = row_blocks.load(NumpyExecutable, plan, [to_numpy(t) for t in tensors])
        self._changed = [arg for arg, _ in plan.graph.effects]

    def __call__(
        self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor]:
        targets = None if outs is None else [None if out is None else to_numpy(out) for out in outs]
        results = self._execute([to_numpy(t) for t in tensors], targets)
        for arg in self._changed:
            bump_version(tensors[arg])
        if outs is None:
            return [from_numpy(result) for result in results]
        for out in outs:
            if out is not None:
                bump_version(out)
        return [from_numpy(result) if out is None else out for result, out in zip(results, outs, strict=True)]


class TorchRuntime(TensorMemory, GpuRuntime):
    """One GPU through PyTorch: its allocator, its current stream, its cuBLAS handle. CuPy compiles the kernels.

    Raises
    ------
    EngineError
        CuPy is missing, or the GPU cannot be used.
    """

    def __init__(self, index: int):
        check_process()
        if torch.version.cuda is None:
            raise EngineError("tensors on this GPU need a PyTorch for CUDA; this one was built for something else")
        try:
            import cupy  # noqa: F401
        except ImportError as error:
            line = torch.version.cuda.partition(".")[0]
            raise EngineError(
                f"tensors on a GPU need CuPy, which compiles the kernels: pip install 'cupyfuse[cu{line}]'"
            ) from error
        TensorMemory.__init__(self, torch.device("cuda", index))
        GpuRuntime.__init__(self, index, torch._C._cuda_getDevice)
        self.device = _device(index)
        self.processors = int(torch.cuda.get_device_properties(index).multi_processor_count)
        self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        # What PyTorch's own compiled code calls costs a third of `torch.empty`.
        self._empty = torch._C._dynamo.guards._empty_strided_cuda

    def made_current(self) -> AbstractContextManager[Any]:
        check_process()
        return torch.cuda.device(self._device)

    def allocator(self, shape: tuple[int, ...], dtype: torch.dtype, held: bool = True) -> Callable[[], torch.Tensor]:
        strides = [1]
        for n in reversed(shape[1:]):
            strides.append(strides[-1] * max(n, 1))
        return functools.partial(self._empty, shape, tuple(reversed(strides[: len(shape)])), dtype)

    def workspace(self, nbytes: int, held: bool = True) -> Any:
        # The next owner's launches on this stream come after ours; a captured graph has a pool of its own.
        tensor = self._empty((nbytes,), (1,), torch.uint8)
        return SimpleNamespace(ptr=tensor.data_ptr(), tensor=tensor)

    def record(self, launch: Callable[[Any], Any]) -> Callable[[Any], None]:
        """Record the kernels that `launch(stream)` launches; the returned function launches them on a stream.

        What `launch` returns, the memory that they work on, is kept.
        """
        with self.made_current():
            graph = LaunchGraph()
            graph.finish(launch(graph))
        return graph

    def is_capturing(self) -> bool:
        return is_capturing()

    def blas(self) -> Blas:
        return _blas()

    def library_function(
        self, call: LibraryCall, stored: dict[int, str], in_place: bool = False, in_any_order: Container[int] = ()
    ) -> LibraryFunction:
        raise EngineError(f"{call!r}: chains of PyTorch's operations have no library steps")


@lru_cache(maxsize=64)
def runtime_of(index: int) -> TorchRuntime:
    """Return the runtime of a GPU, by its index."""
    return TorchRuntime(index)


@lru_cache(maxsize=1)
def _blas() -> ForeignBlas:
    """Return PyTorch's cuBLAS: the library that PyTorch's own loads, or that of its CUDA version."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    major = str(torch.version.cuda).partition(".")[0]
    return ForeignBlas(torch._C._cuda_getCurrentBlasHandle, str(own) if own.exists() else library_name(major))
