"""What the engine asks of a device: memory, kernels that are ready to launch, products of matrices.

`CupyRuntime` is the one for CuPy's arrays. PyTorch's tensors have another (`torch/runtime.py`), and so have the tests,
which run the same kernels on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

from .. import devices, dtypes
from ..devices import Device
from ..errors import EngineError
from .compile import check_process, load, load_together
from .gemm import CupyBlas, Gemm, Operand
from .kernel import Kernel

Function = Callable[..., Any]


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

    def stream(self) -> Any:
        """What the launches of a call are given: the stream that is current when it begins."""

    def dtype(self, name: str) -> Any:
        """The element type of that name, as `allocator` and `view` take it."""

    def allocator(self, shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        """What makes arrays of undefined values, contiguous in C order; like `workspace` for graphs."""

    def workspace(self, nbytes: int) -> Any:
        """Memory with an address, `ptr`, for as long as the object lives, and as long as a graph that captures it."""

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
        """The memory at an address as an array, strides in elements."""

    def strides(self, array: Any) -> Sequence[int]:
        """How far apart neighbours are along each dimension, in elements."""

    def contiguous(self, array: Any) -> bool:
        """Whether the array's elements are neighbours in memory, in C order."""

    def copy(self, target: Any, source: Any) -> None:
        """Write the elements of an array to another one of the same shape and dtype."""

    def changed(self, array: Any) -> None:
        """A kernel has written to the memory of an array that the caller gave."""

    def load_together(self, kernels: Sequence[Kernel]) -> None:
        """Compile kernels in parallel, before `function` is called for each."""

    def function(self, kernel: Kernel) -> Function:
        """Load a kernel; the result takes the grid, the block, the arguments, `kernel.shared` and the stream."""

    def product(
        self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str
    ) -> Callable[[int, int, int, Any], None]:
        """A product of matrices, called with the addresses of both operands and of the result, and the stream."""


class ArraysLikeNumpys:
    """The part of a runtime that is the same for all arrays with NumPy's interface."""

    def dtype(self, name: str) -> Any:
        return dtypes.to_numpy(name)

    def strides(self, array: Any) -> Sequence[int]:
        return [s // array.itemsize for s in array.strides]

    def contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def changed(self, array: Any) -> None:
        pass  # these arrays do not count their versions


class CupyRuntime(ArraysLikeNumpys):
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

    def stream(self) -> Any:
        return self._cupy.cuda.get_current_stream()

    def allocator(self, shape: tuple[int, ...], dtype: Any) -> Callable[[], Any]:
        def empty() -> Any:
            return self._held(self._cupy.ndarray(shape, dtype))

        return empty

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
        return self._cupy.ndarray(shape, dtype, pointer, strides=[s * dtype.itemsize for s in strides])

    def function(self, kernel: Kernel) -> Function:
        return load_unless_capturing(kernel, self._device, self.is_capturing())

    def load_together(self, kernels: Sequence[Kernel]) -> None:
        if not self.is_capturing():
            load_together(kernels, self._device)

    def product(self, left: Operand, right: Operand, dtype: str, out_dtype: str, precision: str) -> Gemm:
        return Gemm(left, right, dtype, out_dtype, precision, CupyBlas())


def load_unless_capturing(kernel: Kernel, device: int, capturing: bool) -> Function:
    """The kernel, loaded, which must not happen while a CUDA graph is captured.

    Raises
    ------
    EngineError
        One is, or the kernel cannot be loaded.
    """
    if capturing:
        raise EngineError(
            "a CUDA graph is being captured, and a kernel would have to be loaded for it: make this call once with "
            "arguments of these shapes, dtypes and strides before the capture begins"
        )
    return load(kernel, device)


@lru_cache(maxsize=64)
def on_device(device: int) -> Runtime:
    """The runtime of a GPU."""
    return CupyRuntime(device)
