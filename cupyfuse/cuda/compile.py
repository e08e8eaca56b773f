"""Compilation: the only place that calls NVRTC.

On a machine with a GPU, CuPy's NVRTC compiles, in threads of their own, and CuPy loads: the two steps of
`cupy.RawModule`, apart, since to load in another thread would break a CUDA graph that is being captured, and since
`RawModule` does not compile for sm_90a. Binaries are cached on disk beside CuPy's own (in `~/.cupy/kernel_cache` or
CUPY_CACHE_DIR). The cache's key covers the source, so our headers are inlined first. If the cache cannot be used,
kernels are compiled without it. Without a GPU, `cubin` compiles for any architecture with the NVRTC of the CUDA wheels.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ClusterError, EngineError
from .driver import most_clusters
from .kernel import Kernel, inlined

OPTIONS = ("--std=c++17", "-ftz=true")
_LOWEST_CAPABILITY = "7.5"  # that the tests compile for
# CUfunction_attributes by which a function may take more than 48 KiB of dynamic shared memory, and clusters of more
# than 8 blocks, which not every GPU has.
_MAX_DYNAMIC_SHARED_SIZE, _LARGE_CLUSTERS = 8, 14
_PORTABLE_CLUSTER = 8  # blocks
_Key = tuple[str, str, int]  # a kernel's name, its source and the device
_lock = threading.Lock()  # of this module's state
_kernel_locks: dict[_Key, Any] = {}  # held while a kernel is compiled and loaded
_without_cache = False  # set once the cache on disk has failed
_untold: Exception | None = None  # how, until `load` has warned: what other threads raise is lost
_used = False  # whether this process has used CUDA
forked = False  # whether it was forked from one that had


class _Binary(NamedTuple):
    """Machine code, or PTX for a GPU newer than the compiler; `cached` if it is from the disk."""

    code: bytes
    cached: bool


_MOST_BINARIES = 512  # some 50 KB each: backward passes that never come have kernels, too
_binaries: dict[_Key, _Binary] = {}  # compiled kernels that are not loaded yet
_functions: dict[_Key, Any] = {}  # loaded kernels


def load(kernel: Kernel, device: int) -> Any:
    """Compile and load a kernel on a device, which has to be current; once per process.

    The result takes the grid, the block, the arguments, the bytes of dynamic shared memory (`kernel.shared`) and the
    stream: any object with an address, `ptr`, or None for CuPy's current one.

    Raises
    ------
    ClusterError
        The GPU has no place for one of the kernel's clusters, of more than 8 blocks.
    EngineError
        The source does not compile, the GPU cannot run it, or this process cannot use CUDA.

    Warns
    -----
    RuntimeWarning
        Once per process: the cache on disk cannot be read or written.
    """
    key = (kernel.name, kernel.source, device)
    function = _functions.get(key)
    if function is None:
        check_process()
        with _lock_of(key):
            function = _functions.get(key) or _load(kernel, device, key)
            _functions[key] = function
        _warn_without_cache()
    return function


def compile_ahead(kernels: Iterable[Kernel], device: int) -> list[Future[None]]:
    """Begin to compile kernels in other threads: NVRTC releases Python's global lock.

    A later call of `load` waits for its kernel, and meets the error of one that fails again. Nothing is loaded, which
    would break a CUDA graph that is being captured. The futures are done when the threads are.
    """
    begun = []
    for key, kernel in {(k.name, k.source, device): k for k in kernels}.items():
        if key not in _functions and key not in _binaries:
            with contextlib.suppress(RuntimeError):  # Python is ending, and starts no threads
                begun.append(_threads().submit(_compile_ahead, kernel, device, key))
    return begun


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    # On a part of a large machine more threads would take the compiler's memory for each of its CPUs.
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(count or 1, "cupyfuse")


def _compile_ahead(kernel: Kernel, device: int, key: _Key) -> None:
    """Compile a kernel for `load`, unless another thread has, or is about to."""
    import cupy

    if _is_ending():
        return
    lock = _lock_of(key)
    if lock.acquire(blocking=False):
        try:
            if key not in _functions and key not in _binaries:
                with cupy.cuda.Device(device):
                    binary = _binary_of(kernel, device)
                with _lock:
                    _binaries[key] = binary
                    while len(_binaries) > _MOST_BINARIES:
                        _binaries.pop(next(iter(_binaries)), None)  # `load` reads it from the disk
        finally:
            lock.release()


def _is_ending() -> bool:
    """Whether Python is ending, which waits for its threads: nobody needs what is not compiled yet."""
    try:
        _threads().submit(int)
    except RuntimeError:
        return True
    return False


def _lock_of(key: _Key) -> Any:
    with _lock:
        return _kernel_locks.setdefault(key, threading.Lock())


def _load(kernel: Kernel, device: int, key: _Key) -> Any:
    """Compile and load a kernel, and allow it its shared memory and its clusters."""
    import cupy

    try:
        module = cupy.cuda.function.Module()
        with _lock:
            ahead = _binaries.pop(key, None)
        binary = ahead or _binary_of(kernel, device)
        try:
            module.load(binary.code)
        except cupy.cuda.driver.CUDADriverError:
            if not binary.cached:
                raise
            module.load(_binary_of(kernel, device, read=False).code)  # the cached one is whole, but no kernel
        function = module.get_function(kernel.name)
        if kernel.shared > 0:  # with its static memory it may need to opt in
            cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE, kernel.shared)
        if kernel.cluster > _PORTABLE_CLUSTER:
            cupy.cuda.driver.funcSetAttribute(function.ptr, _LARGE_CLUSTERS, 1)
            # The multiprocessors of a slice of a GPU, or near each other, may be too few.
            if not most_clusters(function.ptr, kernel.cluster, kernel.config.threads, kernel.shared):
                raise ClusterError(f"GPU {device} has no place for a cluster of {kernel.cluster} blocks at once")
        return function
    except ClusterError:
        raise
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        capability = cupy.cuda.Device(device).compute_capability
        raise EngineError(
            f"the kernel {kernel.name} could not be compiled and loaded on GPU {device} (compute capability "
            f"{capability[:-1]}.{capability[-1:]}; cupyfuse is tested from {_LOWEST_CAPABILITY} on): {error}\n"
            "`python -m cupyfuse info` says what this machine lacks"
        ) from error


def _binary_of(kernel: Kernel, device: int, read: bool = True) -> _Binary:
    """Read a kernel's binary from the cache on disk, or compile it and write it there."""
    import cupy

    code = inlined(kernel.source)
    arch = kernel.arch or cupy.cuda.Device(device).compute_capability
    path, binary = _read_cache(code, arch)
    if binary and read:
        return _Binary(binary, True)
    if kernel.arch:
        binary = _call_nvrtc(cupy.cuda.nvrtc, code, (*OPTIONS, f"-arch=sm_{arch}"))
    else:  # CuPy chooses PTX for GPUs that are newer than the compiler
        binary = bytes(cupy.cuda.compiler.compile_using_nvrtc(code, OPTIONS, cache_in_memory=True)[0])
    _write_cache(path, binary)
    return _Binary(binary, False)


def _call_nvrtc(nvrtc: Any, code: str, options: tuple[str, ...]) -> bytes:
    """Compile to a cubin with CuPy's binding of NVRTC, for an architecture that CuPy's compiler does not know."""
    program = nvrtc.createProgram(code, "cupyfuse.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def cache_folder() -> Path:
    """Return the folder in which CuPy, and we beside it, cache compiled kernels."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache"))


def _read_cache(code: str, arch: str) -> tuple[Path | None, bytes]:
    """Return the path of a source's cache file, None without a cache, and the binary in it, empty if there is none."""
    import cupy

    if _without_cache or os.environ.get("CUPY_CACHE_IN_MEMORY", "0") == "1":
        return None, b""
    version = cupy.cuda.nvrtc.getVersion()
    key = hashlib.sha256("\0".join((code, *OPTIONS, arch, str(version))).encode()).hexdigest()
    path = cache_folder() / f"cupyfuse_{key[:40]}.cubin"
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return path, b""
    except OSError as error:
        _disable_cache(error)
        return None, b""
    # The checksum before the binary tells files that were written in part.
    binary = content[32:]
    return path, binary if hashlib.sha256(binary).digest() == content[:32] else b""


def _write_cache(path: Path | None, binary: bytes) -> None:
    """Write a binary behind its checksum, in one step: other processes never see a part of it."""
    if path is None:
        return
    part = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = file.name
            file.write(hashlib.sha256(binary).digest() + binary)
        os.replace(part, path)
        part = ""
    except OSError as error:
        _disable_cache(error)
    finally:
        if part:
            with contextlib.suppress(OSError):
                os.unlink(part)


def _disable_cache(error: Exception) -> None:
    """Compile without the cache on disk from now on; `load` warns that it failed."""
    global _without_cache, _untold
    with _lock:
        if not _without_cache:
            _without_cache, _untold = True, error


def _warn_without_cache() -> None:
    """Warn once if the cache on disk has failed."""
    global _untold
    with _lock:
        error, _untold = _untold, None
    if error is not None:
        warnings.warn(
            f"CuPy's kernel cache cannot be used ({error}), so this process compiles without it: set CUPY_CACHE_DIR to "
            "a writable directory, or empty the present one",
            RuntimeWarning,
            stacklevel=3,
        )


# Processes ----------------------------------------------------------------------------------------------------------


def check_process() -> None:
    """Check that this process may use CUDA. To be called before each use.

    Raises
    ------
    EngineError
        This process was forked from one that had used it.
    """
    global _used
    _used = True
    if forked:
        raise EngineError(
            "CUDA cannot be used in a process that was forked from one that has used it; start processes with "
            "multiprocessing.get_context('spawn'), or before the first use of the GPU"
        )


def _after_fork() -> None:
    """Reset the locks in a forked process, and remember whether its parent had used CUDA."""
    global _lock, forked
    _lock = threading.Lock()  # a thread of the parent may hold the old one
    _kernel_locks.clear()
    _threads.cache_clear()
    forked = _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# Without a GPU ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    """Import NVRTC from NVIDIA's wheels."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise EngineError(
            "compiling without a GPU needs NVRTC: pip install cuda-bindings nvidia-cuda-nvrtc-cu12"
        ) from error
    return nvrtc


def cubin(source: str, arch: str) -> bytes:
    """Compile to machine code for an architecture such as 'sm_90', without a GPU.

    Raises
    ------
    EngineError
        NVRTC is not installed, or the source does not compile; the message has the compiler's log.
    """
    nvrtc = _nvrtc()
    text = inlined(source).encode()
    status, program = nvrtc.nvrtcCreateProgram(text, b"cupyfuse.cu", 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EngineError(f"NVRTC could not create a program: {status}")
    options = [option.encode() for option in (*OPTIONS, f"-arch={arch}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    try:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise EngineError(f"NVRTC for {arch}: {log.decode(errors='replace').strip()}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        result = b" " * size
        nvrtc.nvrtcGetCUBIN(program, result)
        return result
    finally:
        nvrtc.nvrtcDestroyProgram(program)
