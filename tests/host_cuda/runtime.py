"""The device that the engine sees: host memory between guards, kernels run by the shim, products by NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from host_cuda.library import HostCudaError, Library

from cupyfuse import dtypes
from cupyfuse.cuda.emit import Kernel

GUARD = 256
_GUARD_BYTE, _POISON = 0xA5, 0xFF
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
    """Memory between guards, every byte of it poisoned: as floats of any size it holds NaN."""

    def __init__(self, nbytes: int, asan: ctypes.CDLL | None):
        self.nbytes = nbytes
        whole = nbytes + 2 * GUARD + 256
        self._raw = np.empty(whole, np.uint8)
        start = -self._raw.ctypes.data % 256 + GUARD
        self.bytes = self._raw[start : start + nbytes]
        self.ptr = self._raw.ctypes.data + start
        self._guards = (self._raw[:start], self._raw[start + nbytes :])
        self.bytes[:] = _POISON
        for guard in self._guards:
            guard[:] = _GUARD_BYTE
            if asan is not None:
                asan.__asan_poison_memory_region(ctypes.c_void_p(guard.ctypes.data), ctypes.c_size_t(guard.nbytes))
        if asan is not None:
            weakref.finalize(self, _unpoison, asan, self._raw)

    def intact(self) -> bool:
        return all(bool((guard == _GUARD_BYTE).all()) for guard in self._guards)


def _unpoison(asan: ctypes.CDLL, raw: np.ndarray[Any, Any]) -> None:
    asan.__asan_unpoison_memory_region(ctypes.c_void_p(raw.ctypes.data), ctypes.c_size_t(raw.nbytes))


class HostRuntime:
    """A `cupyfuse.cuda.runtime.Runtime` without a GPU.

    Attributes
    ----------
    seed : int
        What the next launch draws the order of its threads from; each launch takes another.
    dry : bool
        Only collect the kernels, which are then compiled together; results hold nothing.
    """

    processors = 3

    def __init__(self, library: Library, address_sanitizer: bool = False):
        self.library = library
        self.seed = 0
        self.dry = False
        self.launched: set[str] = set()
        self._asan = ctypes.CDLL(None) if address_sanitizer else None
        self._live: dict[int, weakref.ref[Workspace]] = {}

    def is_current(self) -> bool:
        return True

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def workspace(self, nbytes: int) -> Workspace:
        memory = Workspace(nbytes, self._asan)
        self._live[id(memory)] = weakref.ref(memory, lambda _, key=id(memory): self._live.pop(key, None))
        return memory

    def empty(self, shape: Any, dtype: Any, order: str = "C") -> HostArray:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        memory = self.workspace(int(np.prod(shape)) * kind.itemsize)
        array = np.ndarray(shape, kind, memory.bytes, order=order).view(HostArray)  # type: ignore[call-overload]
        return _keeping(array, memory)

    def view(self, address: int, shape: Any, dtype: Any, strides: Any) -> np.ndarray[Any, Any]:
        kind = np.dtype(dtype)
        interface = {"data": (address, False), "shape": tuple(shape), "strides": tuple(strides), "version": 3}
        low = min((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        assert low >= 0 or address + low > 0
        holder = type("Holder", (), {"__array_interface__": interface | {"typestr": f"|V{kind.itemsize}"}})()
        return np.asarray(holder).view(kind) if kind.itemsize else np.asarray(holder)

    def function(self, kernel: Kernel) -> Callable[..., None]:
        self.library.want(kernel)
        launch = None if self.dry else self.library.launch(kernel)

        def run(grid: tuple[int, int, int], block: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
            nonlocal launch
            if self.dry:
                return
            launch = launch or self.library.launch(kernel)
            self.seed += 1
            self.launched.add(kernel.source)
            launch(arguments[0].tobytes(), grid, block, 0, self.seed)
            self.check(kernel.name)

        return run

    def product(self, left: Any, right: Any, dtype: str, out_dtype: str, precision: str) -> Callable[..., None]:
        kind, out_kind = dtypes.to_numpy(dtype), dtypes.to_numpy(out_dtype)
        wide = dtypes.to_numpy(dtypes.compute(dtype))

        def multiply(a: int, b: int, c: int) -> None:
            if self.dry:
                return
            x, y = (
                self.view(at, (o.rows, o.cols), kind, (o.row_stride * kind.itemsize, o.col_stride * kind.itemsize))
                for at, o in ((a, left), (b, right))
            )
            shape = (left.rows, right.cols)
            target = self.view(c, shape, out_kind, (right.cols * out_kind.itemsize, out_kind.itemsize))
            with np.errstate(all="ignore"):
                target[...] = (x.astype(wide) @ y.astype(wide)).astype(out_kind)

        return multiply

    def check(self, kernel: str) -> None:
        """After a launch: nobody has written outside of an array."""
        if self._asan is not None:
            return
        for reference in list(self._live.values()):
            memory = reference()
            if memory is not None and not memory.intact():
                raise HostCudaError(f"{kernel}: a write outside of an array of {memory.nbytes} bytes")


def _keeping(array: HostArray, memory: Workspace) -> HostArray:
    """Let the guards live as long as the array and its views do."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    weakref.finalize(base, lambda kept: None, memory)
    return array


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
    from cupyfuse import arrays

    before = arrays.CUPY_ARRAY, runtimes.on_device
    arrays.CUPY_ARRAY, runtimes.on_device = HostArray, lambda device: runtime  # type: ignore[assignment]
    try:
        yield runtime
    finally:
        arrays.CUPY_ARRAY, runtimes.on_device = before
