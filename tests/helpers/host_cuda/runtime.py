"""The device that the engine sees: host memory between guards, kernels run by the shim, products by NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import numpy as np

from cupyfuse import dtypes
from cupyfuse.cuda.gemm import BatchStrides, Operand
from cupyfuse.cuda.kernel import Kernel
from cupyfuse.cuda.runtime import NumpyLikeArrays
from cupyfuse.cuda.tensor_map import WORDS, MatrixBoxes
from cupyfuse.devices import Device
from cupyfuse.ir.library import LibraryCall
from host_cuda.library import HostCudaError, Library

PAGE = mmap.PAGESIZE
GUARD = 256
# Where memory ends beside a page: like CuPy's pool as far as the widest access goes, not to its 512 bytes.
ALIGNMENT = 16
_PROCESS = ctypes.CDLL(None)
_GUARD, _POISON = b"\xa5", 0xFF
_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap names it since 3.13
DEVICE = "host"


class Memory:
    """What an array's `data` is in CuPy: an address on a device."""

    def __init__(self, ptr: int):
        self.ptr = ptr
        self.device_id = DEVICE


class HostArray(np.ndarray[Any, Any]):
    """A NumPy array that the library takes for one on a device."""

    @property
    def data(self) -> Memory:  # type: ignore[override]
        return Memory(self.ctypes.data)

    def get(self) -> np.ndarray[Any, Any]:
        return np.array(self, subok=False)


class Workspace:
    """Memory that ends (or, every other one, begins) beside a page that nobody may touch; the other side is guarded by
    bytes that must not change. Every byte of it is poisoned: as floats of any size it holds NaN.

    With AddressSanitizer, which names the line of an access, guards that it knows are on both sides instead.
    """

    _count = itertools.count()

    def __init__(self, nbytes: int, asan: bool):
        self.nbytes = nbytes
        pages = -(-(nbytes + GUARD) // PAGE) * PAGE
        # Arrays hold on to this one, as the base of what they look at.
        self.raw = np.frombuffer(mmap.mmap(-1, pages + 2 * PAGE), np.uint8)
        at_the_end = next(self._count) % 2
        step = GUARD if asan else ALIGNMENT
        self.start = PAGE + ((pages - nbytes) // step * step if at_the_end else 0)
        self.ptr = self.raw.ctypes.data + self.start
        self.bytes[:] = _POISON
        first, last = self.raw[:PAGE], self.raw[PAGE + pages :]
        for guard in guards(self.raw, self.start, nbytes):
            guard[:] = ord(_GUARD)
        if asan:
            for guard in (first, last, *guards(self.raw, self.start, nbytes)):
                _poison(guard.ctypes.data, guard.nbytes)
            weakref.finalize(self.raw, _unpoison, self.raw.ctypes.data, self.raw.nbytes)
        else:
            for page in (first, last):
                _PROCESS.mprotect(ctypes.c_void_p(page.ctypes.data), ctypes.c_size_t(PAGE), 0)

    @property
    def bytes(self) -> np.ndarray[Any, Any]:
        return self.raw[self.start : self.start + self.nbytes]


def untouched(memory: np.ndarray[Any, Any]) -> bool:
    return not memory.tobytes().strip(_GUARD)


def guards(raw: np.ndarray[Any, Any], start: int, nbytes: int) -> tuple[np.ndarray[Any, Any], ...]:
    """What lies between the forbidden pages and the memory."""
    return raw[PAGE:start], raw[start + nbytes : -PAGE]


def _poison(address: int, nbytes: int) -> None:
    _PROCESS.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _unpoison(address: int, nbytes: int) -> None:
    _PROCESS.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


class HostRuntime(NumpyLikeArrays):
    """A `cupyfuse.cuda.runtime.Runtime` without a GPU.

    Attributes
    ----------
    seed : int
        What the next launch draws the order of its threads from; each launch takes another.
    dry : bool
        Only collect the kernels, which are then compiled together; results hold nothing.
    """

    processors = 3
    hold = None
    device: Device | None = None

    def __init__(self, library: Library, address_sanitizer: bool = False):
        self.library = library
        self.seed = 0
        self.dry = False
        self.launched: set[str] = set()
        self._asan = address_sanitizer
        self._lock = threading.Lock()
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # (what arrays look at, where it begins, bytes)

    def is_current(self) -> bool:
        return True

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def workspace(self, nbytes: int, held: bool = True) -> Workspace:
        memory = Workspace(nbytes, self._asan)
        key = memory.ptr
        self._live[key] = weakref.ref(memory.raw, lambda _: self._live.pop(key, None)), memory.start, nbytes
        return memory

    def empty(self, shape: Any, dtype: Any, order: str = "C") -> HostArray:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        memory = self.workspace(int(np.prod(shape)) * kind.itemsize)
        return np.ndarray(shape, kind, memory.bytes, order=order).view(HostArray)  # type: ignore[call-overload]

    def allocator(self, shape: Any, dtype: Any, held: bool = True) -> Callable[[], HostArray]:
        return lambda: self.empty(shape, dtype)

    def stream(self) -> None:
        """Launches run at once."""

    def view(self, address: int, shape: Any, dtype: Any, strides: Any) -> np.ndarray[Any, Any]:
        kind = np.dtype(dtype)
        strides = tuple(s * kind.itemsize for s in strides)
        interface = {"data": (address, False), "shape": tuple(shape), "strides": strides, "version": 3}
        low = min(((n - 1) * s for n, s in zip(shape, strides, strict=True)), default=0) if 0 not in shape else 0
        assert low >= 0 or address + low > 0
        holder = type("Holder", (), {"__array_interface__": interface | {"typestr": f"|V{kind.itemsize}"}})()
        return np.asarray(holder).view(kind) if kind.itemsize else np.asarray(holder)

    def compile_ahead(self, kernels: Sequence[Kernel]) -> None:
        for kernel in kernels:
            self.library.want(kernel)

    def function(self, kernel: Kernel) -> Callable[..., None]:
        self.library.want(kernel)
        launch = None if self.dry else self.library.launch(kernel)

        def run(
            grid: tuple[int, int, int],
            block: tuple[int, int, int],
            arguments: tuple[Any, ...],
            shared: int = kernel.shared,
            stream: Any = None,
        ) -> None:
            nonlocal launch
            if self.dry:
                return
            with self._lock:
                launch = launch or self.library.launch(kernel)
                self.seed += 1
                self.launched.add(kernel.source)
                launch(arguments[0].tobytes(), grid, block, shared, self.seed)
                self.check(kernel.name)

        return run

    def clusters_at_once(self, kernel: Kernel) -> int:
        return max(1, self.processors * kernel.config.blocks // kernel.cluster)

    def product(
        self,
        left: Any,
        right: Any,
        dtype: str,
        out_dtype: str,
        precision: str,
        batch_strides: BatchStrides | None = None,
        accumulate: bool = False,
    ) -> Callable[..., None]:
        kind, out_kind = dtypes.to_numpy(dtype), dtypes.to_numpy(out_dtype)
        wide = dtypes.to_numpy(dtypes.compute_dtype(dtype))

        def multiply(a: int, b: int, c: int, stream: Any = None) -> None:
            if self.dry:
                return
            strides = batch_strides or BatchStrides(1, 0, 0)
            count, between = strides.count, (strides.left, strides.right)
            x, y = (
                self.view(at, (count, o.rows, o.cols), kind, (step, o.row_stride, o.col_stride))
                for at, o, step in ((a, left, between[0]), (b, right, between[1]))
            )
            shape = (count, left.rows, right.cols)
            target = self.view(c, shape, out_kind, (left.rows * right.cols, right.cols, 1))
            if any(np.may_share_memory(target, operand) for operand in (x, y)):
                raise HostCudaError("a product is written over one of its operands, which cuBLAS does not allow")
            with np.errstate(all="ignore"):
                product = (x.astype(wide) @ y.astype(wide)).astype(out_kind)
                target[...] = target + product if accumulate else product

        return multiply

    def biased_product(self, left: Any, right: Any, dtype: str) -> Callable[..., None]:
        kind, wide = dtypes.to_numpy(dtype), np.float32

        def multiply(a: int, b: int, bias: int, c: int, stream: Any = None) -> None:
            if self.dry:
                return
            operands = [
                self.view(at, (o.rows, o.cols), kind, (o.row_stride, o.col_stride)).astype(wide)
                for at, o in ((a, left), (b, right), (bias, Operand(1, right.cols, 0, 1)))
            ]
            target = self.view(c, (left.rows, right.cols), kind, (right.cols, 1))
            with np.errstate(all="ignore"):
                target[...] = (operands[0] @ operands[1] + operands[2]).astype(kind)

        return multiply

    def tensor_map(self, matrix: MatrixBoxes, address: int) -> tuple[int, ...]:
        """What shim.cpp reads, instead of the driver's words."""
        assert matrix.box[1] * matrix.itemsize in (32, 64, 128), "the widths that are swizzled"
        assert matrix.box[0] <= 256, "the longest box"
        words = (address, matrix.length, matrix.lines, matrix.stride, *matrix.box[::-1], matrix.itemsize)
        return (*words, *(0,) * (WORDS - len(words)))

    def library_function(
        self, call: LibraryCall, stored: dict[int, str], in_place: bool = False, in_any_order: Container[int] = ()
    ) -> Callable[[Sequence[Any]], list[Any]]:
        run = call.prepare(call.resolve_in(np, in_place), needed=stored)

        def function(operands: Sequence[Any]) -> list[Any]:
            with np.errstate(all="ignore"):
                if in_place:
                    return run(operands)
                count = len(call.shapes)  # numbers follow the arrays
                results = run([*(np.array(x, subok=False, copy=None) for x in operands[:count]), *operands[count:]])
            for k, name in stored.items():  # their memory is between guards
                # Nothing may rely on the order of some.
                array = self.empty(call.results[k], dtypes.to_numpy(name), "F" if k in in_any_order else "C")
                array[...] = results[k]
                results[k] = array
            return results

        return function

    @contextlib.contextmanager
    def only_collecting(self) -> Iterator[None]:
        """Calls launch nothing: their kernels are collected, and compiled together at the end."""
        self.dry = True
        try:
            yield
        finally:
            self.dry = False
        self.library.compile()

    def reserved(self, rows: int, cols: int, dtype: str) -> HostArray:
        """An array of more memory than there is: pages exist once they are written to."""
        kind = np.dtype(dtype)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, rows * cols * kind.itemsize, flags=flags)
        return np.frombuffer(memory, kind).reshape(rows, cols).view(HostArray)

    def check(self, kernel: str) -> None:
        """After a launch: nobody has written outside of an array."""
        if self._asan:
            return
        # A copy is made at once; while a list of items is made, garbage collection may remove some.
        for key, (reference, start, nbytes) in self._live.copy().items():
            raw = reference()
            if raw is not None and not all(map(untouched, guards(raw, start, nbytes))):
                self._live.pop(key, None)
                raise HostCudaError(f"{kernel}: a write outside of an array of {nbytes} bytes")


class HostArrays:
    """The part of an array library's namespace that tests use, on arrays between guards."""

    ndarray = HostArray

    def __init__(self, runtime: HostRuntime):
        self._runtime = runtime

    def empty(self, shape: Any, dtype: Any = np.float64, order: str = "C") -> HostArray:
        return self._runtime.empty(shape, dtype, order)

    def asarray(self, values: Any, dtype: Any = None) -> HostArray:
        if isinstance(values, HostArray) and dtype in (None, values.dtype):
            return values
        values = np.asarray(values, dtype)
        array = self.empty(values.shape, values.dtype)
        array[...] = values
        return array

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return self.asarray(result) if isinstance(result, np.ndarray) else result

        return call if callable(function) and not isinstance(function, type) else function


@contextlib.contextmanager
def installed(runtime: HostRuntime) -> Iterator[HostRuntime]:
    """Let the library find `runtime` where a HostArray says that it lies."""
    import cupyfuse.cuda.runtime as runtimes
    from cupyfuse.api import arrays

    before = arrays.CUPY_ARRAY, arrays.upload, runtimes.on_device
    arrays.CUPY_ARRAY, arrays.upload = HostArray, lambda values, device: HostArrays(runtime).asarray(values)
    runtimes.on_device = lambda device: runtime  # type: ignore[assignment]
    try:
        yield runtime
    finally:
        arrays.CUPY_ARRAY, arrays.upload, runtimes.on_device = before
