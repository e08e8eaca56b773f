"""What the engine asks of a device: memory, kernels that are ready to launch, products of matrices.

`CupyRuntime` is the one that users get. The tests have another, which runs the same kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

from ..errors import EngineError
from .compile import check_process, load
from .emit import Kernel
from .gemm import Gemm, Operand

Dim = tuple[int, int, int]
Function = Callable[[Dim, Dim, tuple[Any, ...]], Any]


class Runtime(Protocol):
    """A device and its memory; arrays are of the runtime's own kind.

    Attributes
    ----------
    processors : int
        Multiprocessors, which bound how many blocks stay on the device at once.
    address : callable
        The address of an array's first element.
    """

    processors: int
    address: Callable[[Any], int]

    def is_current(self) -> bool:
        """Whether launches and allocations of this thread go to the device."""

    def made_current(self) -> AbstractContextManager[Any]:
        """A context in which they do."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of undefined values, contiguous in C order."""

    def workspace(self, nbytes: int) -> Any:
        """Memory with an address, `ptr`, for as long as the object lives."""

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
        """The memory at an address as an array, strides in bytes."""

    def function(self, kernel: Kernel) -> Function:
        """The kernel, compiled: called with the grid, the block and the arguments."""

    def product(
        self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str
    ) -> Callable[[int, int, int], None]:
        """A product of matrices, called with the addresses of both operands and of the result."""


class CupyRuntime:
    """One GPU through CuPy: its memory pool, its current stream, its compiler and its cuBLAS."""

    def __init__(self, device: int):
        import cupy

        check_process()
        self._cupy = cupy
        self._device = device
        self._current = cupy.cuda.runtime.getDevice
        try:
            self.processors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(
                f"GPU {device} cannot be used: {error}; if this process was forked from one that has used CUDA, start "
                "it with multiprocessing.get_context('spawn') instead"
            ) from error
        self.address: Callable[[Any], int] = attrgetter("data.ptr")
        self.empty = cupy.ndarray
        self.workspace = cupy.cuda.alloc

    def is_current(self) -> bool:
        check_process()
        return bool(self._current() == self._device)

    def made_current(self) -> AbstractContextManager[Any]:
        check_process()
        return self._cupy.cuda.Device(self._device)

    def view(self, address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int]) -> Any:
        cuda = self._cupy.cuda
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, 0, self, self._device), 0)
        return self._cupy.ndarray(shape, dtype, pointer, strides=strides)

    def function(self, kernel: Kernel) -> Function:
        return load(kernel, self._device)

    def product(self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str) -> Gemm:
        return Gemm(left, right, dtype, out_dtype, precision)


@lru_cache(maxsize=64)
def on_device(device: int) -> Runtime:
    """The runtime of a GPU."""
    return CupyRuntime(device)
