"""Run plans on PyTorch's tensors: in its memory, on its streams, with its cuBLAS handle.

Kernels are compiled, loaded and launched through CuPy, whose current stream and memory pool stay out of it. Where
tensors are on the CPU, NumPy runs the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ... import devices
from ...cuda.compile import check_process, load_together
from ...cuda.gemm import Gemm, Operand, OwnersBlas, library_name
from ...cuda.kernel import Kernel
from ...cuda.runtime import Function, load_unless_capturing
from ...devices import Device
from ...engines import row_blocks
from ...engines.cuda import CudaExecutable
from ...engines.numpy import NumpyExecutable
from ...errors import EngineError
from ...plan.plan import Plan
from .tensors import Tensors, Workspace, changed, dtype_name, from_numpy, layout_of, to_numpy

__all__ = ["TorchRuntime", "device_of", "dtype_name", "layout_of", "on_device", "ready"]

Execute = Callable[[Sequence[torch.Tensor], Sequence["torch.Tensor | None"]], list[torch.Tensor]]


def ready(plan: Plan, tensors: Sequence[torch.Tensor]) -> Execute:
    """Make a plan ready for tensors like those given: the plan's arguments, then its prepared values.

    They have at most two dimensions and are on one device, a CPU or a GPU. They may require gradients: nothing is
    differentiated, and calls are meant to be made under `torch.no_grad`.

    Returns
    -------
    callable
        `execute(tensors, outs)` runs it and returns the results. `outs` holds, for each result, a tensor to write it to
        or None for a new one. It must have the result's shape and dtype and share no memory with the arguments, since
        it is written while they are read. Arguments that the plan changes, and tensors in `outs`, get a new version.

    Raises
    ------
    EngineError
        A kernel cannot be compiled or loaded, for instance because a CUDA graph is being captured.
    """
    index = tensors[0].get_device()
    if index < 0:
        return _OnCpu(plan, tensors)
    execute: Execute = row_blocks.load(functools.partial(CudaExecutable, runtime=on_device(index)), plan, tensors)
    return execute


def device_of(tensor: torch.Tensor) -> Device | None:
    """What plans may know of the GPU that a tensor is on; None for one that is not in the table, and for a CPU."""
    return on_device(tensor.get_device()).device if tensor.is_cuda else None


class _OnCpu:
    """A plan made ready for tensors on the CPU, which NumPy works on in place."""

    def __init__(self, plan: Plan, tensors: Sequence[torch.Tensor]):
        self.plan = plan
        self._execute = row_blocks.load(NumpyExecutable, plan, [to_numpy(t) for t in tensors])
        self._changing = [arg for arg, _ in plan.graph.effects]

    def __call__(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        targets = [None if out is None else to_numpy(out) for out in outs]
        results = self._execute([to_numpy(t) for t in tensors], targets)
        for arg in self._changing:
            changed(tensors[arg])
        given = [from_numpy(result) if out is None else out for result, out in zip(results, outs, strict=True)]
        for out in outs:
            if out is not None:
                changed(out)
        return given


class _Stream:
    """A stream as CuPy takes it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int):
        self.ptr = ptr


class TorchRuntime(Tensors):
    """One GPU through PyTorch: its allocator, its current stream, its cuBLAS handle; through CuPy its compiler.

    Parameters
    ----------
    index : int
        Of the GPU, as PyTorch counts.

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
        super().__init__(torch.device("cuda", index))
        self._index = index
        properties = torch.cuda.get_device_properties(index)
        self.device = devices.find(properties.name) if devices.is_known(properties.name) else None
        self.processors = int(properties.multi_processor_count)
        self._current, self._raw_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        self._empty = _allocation(self.place)

    def is_current(self) -> bool:
        check_process()
        return bool(self._current() == self._index)

    def made_current(self) -> AbstractContextManager[Any]:
        check_process()
        return torch.cuda.device(self._index)

    def stream(self) -> Any:
        return _Stream(self._raw_stream(self._index))

    def allocator(self, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        strides = [1]
        for n in reversed(shape[1:]):
            strides.append(strides[-1] * max(n, 1))
        return functools.partial(self._empty, shape, tuple(reversed(strides[: len(shape)])), dtype)

    def workspace(self, nbytes: int) -> Workspace:
        return Workspace(self._empty((nbytes,), (1,), torch.uint8))

    def function(self, kernel: Kernel) -> Function:
        return load_unless_capturing(kernel, self._index, torch.cuda.is_current_stream_capturing())

    def load_together(self, kernels: Sequence[Kernel]) -> None:
        if not torch.cuda.is_current_stream_capturing():
            load_together(kernels, self._index)

    def product(self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str) -> Gemm:
        return Gemm(left, right, dtype, out_dtype, precision, _blas())


def _allocation(place: torch.device) -> Callable[..., torch.Tensor]:
    """What makes a tensor on a device, the current one, of a shape, strides and a dtype.

    The function that PyTorch's own compiled code calls costs a third of what `torch.empty` does.
    """
    quick: Callable[..., torch.Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    return quick or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=place))


@lru_cache(maxsize=64)
def on_device(index: int) -> TorchRuntime:
    """The runtime of a GPU."""
    return TorchRuntime(index)


@lru_cache(maxsize=1)
def _blas() -> OwnersBlas:
    """PyTorch's cuBLAS: the one that its own library depends on, where the system can tell."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    major = str(torch.version.cuda).partition(".")[0]
    return OwnersBlas(torch._C._cuda_getCurrentBlasHandle, str(own) if own.exists() else library_name(major))
