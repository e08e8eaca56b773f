"""What the engine asks of a device: memory, kernels that are ready to launch, products of matrices.

`CupyRuntime` is the one that users get. The tests have another, which runs the same kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

from .. import devices
from ..devices import Device
from ..errors import EngineError
from .compile import check_process, load
from .gemm import Gemm, Operand
from .kernel import Kernel

Dim = tuple[int, int, int]
Function = Callable[[Dim, Dim, tuple[Any, ...]], Any]


class Runtime(Protocol):
    """A device and its memory; arrays are of the runtime's own kind.

    Attributes
    ----------
    processors : int
        Multiprocessors, which bound how many blocks stay on the device at once.
    device : Device or None
        What plans may know of it; None for a GPU that is not in the table.
    address : callable
        The address of an array's first element.
    """

    processors: int
    device: Device | None
    address: Callable[[Any], int]

    def is_current(self) -> bool:
        """Whether launches and allocations of this thread go to the device."""

    def made_current(self) -> AbstractContextManager[Any]:
        """A context in which they do."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of undefined values, contiguous in C order; like `workspace` for graphs."""

    def workspace(self, nbytes: int) -> Any:
        """Memory with an address, `ptr`, for as long as the object lives, and as long as a graph that captures it."""

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
            name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
            self.device = devices.find(name) if devices.known(name) else None
            self.processors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(
                f"GPU {device} cannot be used: {error}; if this process was forked from one that has used CUDA, start "
                "it with multiprocessing.get_context('spawn') instead"
            ) from error
        self.address: Callable[[Any], int] = attrgetter("data.ptr")
        self._captured: list[Any] = []  # what graphs write to whenever they are replayed

    def is_current(self) -> bool:
        check_process()
        return bool(self._current() == self._device)

    def made_current(self) -> AbstractContextManager[Any]:
        check_process()
        return self._cupy.cuda.Device(self._device)

    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        stream = self._cupy.cuda.get_current_stream()
        return stream.ptr != 0 and bool(stream.is_capturing())

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._held(self._cupy.ndarray(shape, dtype))

    def workspace(self, nbytes: int) -> Any:
        return self._held(self._cupy.cuda.alloc(nbytes))

    def _held(self, memory: Any) -> Any:
        if self.is_capturing():
            # Replays use it after this call; for how long, nobody tells.
            self._captured.append(memory)
        return memory

    def view(self, address: int, shape: Sequence[int], dtype: Any, strides: Sequence[int]) -> Any:
        cuda = self._cupy.cuda
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, 0, self, self._device), 0)
        return self._cupy.ndarray(shape, dtype, pointer, strides=strides)

    def function(self, kernel: Kernel) -> Function:
        if self.is_capturing():
            raise EngineError(
                "a CUDA graph is being captured, and a kernel would have to be loaded for it: make this call once with "
                "arguments of these shapes, dtypes and strides before the capture begins"
            )
        return load(kernel, self._device)

    def product(self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str) -> Gemm:
        return Gemm(left, right, dtype, out_dtype, precision)


@lru_cache(maxsize=64)
def on_device(device: int) -> Runtime:
    """The runtime of a GPU."""
    return CupyRuntime(device)
