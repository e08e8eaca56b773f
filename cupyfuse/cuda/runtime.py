"""Runtimes: what the engine asks of a device, which is memory, loaded kernels and matrix products.

`CupyRuntime` serves CuPy's arrays. PyTorch's tensors have a runtime of their own (`torch/chains/runtime.py`), and so do
the tests, which run the same kernels on a CPU.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

from .. import devices, dtypes
from ..devices import Device
from ..errors import EngineError
from ..ir.library import LibraryCall
from ..plan.schedule import contiguous_strides
from . import compile, library_functions, tensor_map
from .biased_gemm import BiasedProduct
from .compile import check_process, compile_ahead, load
from .driver import most_clusters
from .gemm import BatchStrides, Blas, CupyBlas, Multiply, Operand, gemm
from .kernel import Kernel
from .tensor_map import MatrixBoxes

Function = Callable[..., Any]
LibraryFunction = Callable[[Sequence[Any]], list[Any]]


class Runtime(Protocol):
    """A device and its memory, as arrays of one library.

    Attributes
    ----------
    processors : int
        Number of multiprocessors.
    device : Device or None
        The GPU's entry in `devices.py`, if it has one.
    address : callable
        Returns the address of an array's first element.
    """

    processors: int
    device: Device | None
    address: Callable[[Any], int]

    @property
    def hold(self) -> Callable[..., None] | None:
        """Keeps arrays and memory that were allocated without being held, as long as `workspace` memory lives.

        It need not be called while the current stream is the default one; None where all is held.
        """

    def is_current(self) -> bool:
        """Whether the device is this thread's current one."""

    def made_current(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the device current."""

    def stream(self) -> int | None:
        """Return the address of the current stream; None for launches that run at once."""

    def dtype(self, name: str) -> Any:
        """Return the library's dtype of that name, which `allocator` and `view` take."""

    def allocator(self, shape: tuple[int, ...], dtype: Any, held: bool = True) -> Callable[[], Any]:
        """Return a function that allocates uninitialised C-contiguous arrays.

        They live as `workspace` memory; without `held`, once they were passed to `hold`.
        """

    def workspace(self, nbytes: int, held: bool = True) -> Any:
        """Allocate device memory at `ptr` of the result.

        It lives as long as that or a CUDA graph that captured its use; without `held`, once it was passed to `hold`.
        """

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
        """Return the memory at an address as an array; strides in elements."""

    def strides(self, array: Any) -> Sequence[int]:
        """Return the array's strides in elements."""

    def is_contiguous(self, array: Any) -> bool:
        """Whether the array is C-contiguous."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy an array into another one of the same shape and dtype."""

    def bump_version(self, array: Any) -> None:
        """Tell the array's library, if it counts versions of arrays, that a kernel wrote to a caller's array."""

    def compile_ahead(self, kernels: Sequence[Kernel]) -> None:
        """Begin to compile kernels in other threads; `function` will be called for each."""

    def function(self, kernel: Kernel) -> Function:
        """Load a kernel; call the result with the grid, the block, the arguments, `kernel.shared` and the stream."""

    def clusters_at_once(self, kernel: Kernel) -> int:
        """Return how many clusters of a kernel's blocks the device has room for at once, one at least."""

    def product(
        self,
        left: Operand,
        right: Operand,
        dtype: str,
        out_dtype: str,
        precision: str,
        batch_strides: BatchStrides | None = None,
        accumulate: bool = False,
    ) -> Multiply:
        """Prepare a matrix product; see `gemm`. Call the result with the addresses of A, B and C, and the stream."""

    def biased_product(self, left: Operand, right: Operand, dtype: str) -> Multiply:
        """Prepare a 16-bit product with a bias; see `BiasedProduct`, which tells what to call the result with."""

    def tensor_map(self, matrix: MatrixBoxes, address: int) -> tuple[int, ...]:
        """Encode the tensor map of a matrix at an address, as the 64-bit words of a `CUtensorMap`."""

    def library_function(
        self, call: LibraryCall, stored: dict[int, str], in_place: bool = False, in_any_order: Container[int] = ()
    ) -> LibraryFunction:
        """Return the array library's own function for a call: from operands in their shapes to all results.

        Those numbered in `stored` have the dtypes there, share no memory with any other array, and are C-contiguous but
        for those `in_any_order`. With `in_place` the first operand may be written to, and be the result.
        """


class NumpyLikeArrays:
    """The methods of a runtime that are the same for all arrays with NumPy's interface."""

    def dtype(self, name: str) -> Any:
        return dtypes.to_numpy(name)

    def strides(self, array: Any) -> Sequence[int]:
        return [s // array.itemsize for s in array.strides]

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.flags.c_contiguous)

    def copy(self, target: Any, source: Any) -> None:
        target[...] = source

    def bump_version(self, array: Any) -> None:
        pass  # these arrays have no version counter


class GpuRuntime(ABC):
    """The methods of a GPU's runtime that are the same whichever library owns its memory: kernels and products."""

    def __init__(self, device: int, current_device: Callable[[], int]):
        self._device, self._current_device = device, current_device

    def is_current(self) -> bool:
        if compile.forked:
            check_process()
        return self._current_device() == self._device

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""

    @abstractmethod
    def blas(self) -> Blas:
        """Return the library's cuBLAS."""

    def function(self, kernel: Kernel) -> Function:
        if self.is_capturing():
            raise EngineError(
                "kernels cannot be loaded while a CUDA graph is captured: make this call once with arguments of these "
                "shapes, dtypes and strides before the capture begins"
            )
        return load(kernel, self._device)

    def clusters_at_once(self, kernel: Kernel) -> int:
        address = load(kernel, self._device).ptr
        return max(1, most_clusters(address, kernel.cluster, kernel.config.threads, kernel.shared))

    def compile_ahead(self, kernels: Sequence[Kernel]) -> None:
        compile_ahead(kernels, self._device)

    def product(
        self,
        left: Operand,
        right: Operand,
        dtype: str,
        out_dtype: str,
        precision: str,
        batch_strides: BatchStrides | None = None,
        accumulate: bool = False,
    ) -> Multiply:
        return gemm(left, right, dtype, out_dtype, precision, self.blas(), batch_strides, accumulate)

    def biased_product(self, left: Operand, right: Operand, dtype: str) -> Multiply:
        return BiasedProduct(left, right, dtype, *self.blas().light_library())

    def tensor_map(self, matrix: MatrixBoxes, address: int) -> tuple[int, ...]:
        return tensor_map.encode(matrix, address)


class CupyRuntime(NumpyLikeArrays, GpuRuntime):
    """One GPU through CuPy: its memory pool, its current stream, its compiler and its cuBLAS."""

    def __init__(self, device: int):
        import cupy

        check_process()
        super().__init__(device, cupy.cuda.runtime.getDevice)
        self._cupy, self._current_stream = cupy, cupy.cuda.get_current_stream
        try:
            name = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
            self.device = devices.find(name) if devices.is_known(name) else None
            self.processors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineError(
                f"GPU {device} cannot be used: {error}; if this process was forked from one that has used CUDA, start "
                "it with multiprocessing.get_context('spawn') instead"
            ) from error
        self.address: Callable[[Any], int] = attrgetter("data.ptr")
        self._captured: list[Any] = []  # memory that captured graphs use

    def made_current(self) -> AbstractContextManager[Any]:
        check_process()
        return self._cupy.cuda.Device(self._device)

    def is_capturing(self) -> bool:
        stream = self._current_stream()
        return stream.ptr != 0 and bool(stream.is_capturing())

    def stream(self) -> int:
        address: int = self._current_stream().ptr
        return address

    def allocator(self, shape: tuple[int, ...], dtype: Any, held: bool = True) -> Callable[[], Any]:
        ndarray, hold = self._cupy.ndarray, self.hold
        if not held:
            return functools.partial(ndarray, shape, dtype)

        def empty() -> Any:
            array = ndarray(shape, dtype)
            hold(array)
            return array

        return empty

    def workspace(self, nbytes: int, held: bool = True) -> Any:
        memory = self._cupy.cuda.alloc(nbytes)
        if held:
            self.hold(memory)
        return memory

    def hold(self, *memory: Any) -> None:
        if self.is_capturing():
            # Replays of the graph use the memory, and nothing tells when the last one has run.
            self._captured += memory

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]) -> Any:
        cuda = self._cupy.cuda
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, 0, self, self._device), 0)
        return self._cupy.ndarray(shape, dtype, pointer, _strides_in_bytes(shape, strides, dtype.itemsize))

    def blas(self) -> Blas:
        return CupyBlas()

    def library_function(
        self, call: LibraryCall, stored: dict[int, str], in_place: bool = False, in_any_order: Container[int] = ()
    ) -> LibraryFunction:
        def missing() -> EngineError:
            return EngineError(
                f"{call!r} has no counterpart in CuPy {self._cupy.__version__}; call it outside of the fused function, "
                "or fuse for NumPy arrays"
            )

        try:
            function = library_functions.resolve(call, self._cupy, in_place)
        except AttributeError:
            raise missing() from None
        run = call.prepare(function, library_functions.arguments_of(call, self._cupy), stored)
        kept = [(k, self.dtype(name), k not in in_any_order) for k, name in stored.items()]
        convert, array_type, count = self._cupy.array, self._cupy.ndarray, sys.getrefcount

        def is_value(arrays: list[Any], k: int, dtype: Any, in_order: bool, operands: Sequence[Any]) -> bool:
            """Whether array `k`, of a dtype, has memory of its own: only this list holds it.

            It is C-contiguous, or else, if it need not be `in_order`, is a permutation of its axes that is.
            """
            if type(arrays[k]) is not array_type or arrays[k].dtype != dtype:
                return False
            if not arrays[k].flags.c_contiguous and (in_order or not _is_dense(arrays[k])):
                return False
            if count(arrays[k]) > _ONE_HOLDER:
                return False
            if arrays[k].base is not None and count(arrays[k].base) > _ONE_HOLDER:
                return False
            memory = arrays[k].data.mem  # also of views that have no base, as those of `as_strided`
            return all(operand.data.mem is not memory for operand in operands[: len(call.shapes)])  # numbers follow

        def run_for_values(operands: Sequence[Any]) -> list[Any]:
            try:
                results = run(operands)
            except NotImplementedError as error:  # such as `reduce` of most ufuncs
                raise missing() from error
            for k, dtype, in_order in kept:
                if in_place and results[k] is operands[0] and results[k].dtype == dtype:
                    continue
                if not is_value(results, k, dtype, in_order, operands):
                    results[k] = convert(results[k], dtype, order="C")
            if self.is_capturing():
                self.hold(*(results[k] for k in stored))
            return results

        return run_for_values


@lru_cache(maxsize=1024)
def _strides_in_bytes(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, ...] | None:
    """Return strides in bytes, given in elements; None for those of a C-contiguous array, which CuPy then computes."""
    return None if strides == contiguous_strides(shape) else tuple(s * itemsize for s in strides)


def _is_dense(array: Any) -> bool:
    """Whether the elements of an array, in the order of its strides, lie side by side."""
    if array.flags.f_contiguous:
        return True
    expected = array.itemsize
    for stride, length in sorted(zip(array.strides, array.shape, strict=True)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


# References to an array that only a list or another array holds, as `_is_value` counts them.
_ONE_HOLDER = sys.getrefcount([object()][0]) + 1


@lru_cache(maxsize=64)
def on_device(device: int) -> Runtime:
    """Return the runtime of a GPU through CuPy, one for each device."""
    return CupyRuntime(device)
