"""Compilation: the only place that calls NVRTC.

On a machine with a GPU, CuPy compiles and loads, and caches cubins on disk (in `~/.cupy/kernel_cache` or
CUPY_CACHE_DIR). The cache's key covers the source, so our headers are inlined first. If the cache cannot be used,
kernels are compiled without it. Without a GPU, `cubin` compiles for any architecture with the NVRTC of the CUDA wheels.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import EngineError
from .kernel import Kernel, inlined

OPTIONS = ("--std=c++17",)
_LOWEST_CAPABILITY = "7.5"  # that the tests compile for
# CUfunction_attributes by which a function may take more than 48 KiB of dynamic shared memory, and clusters of more
# than 8 blocks, which not every GPU has.
_MAX_DYNAMIC_SHARED_SIZE, _LARGE_CLUSTERS = 8, 14
_PORTABLE_CLUSTER = 8  # blocks
_functions: dict[tuple[str, str, int], Any] = {}  # loaded kernels by name, source and device
_lock = threading.Lock()  # of this module's state
_kernel_locks: dict[tuple[str, str, int], Any] = {}  # held while a kernel is compiled
_without_cache = False  # set once the cache on disk has failed
_used = False  # whether this process has used CUDA
forked = False  # whether it was forked from one that had


def load(kernel: Kernel, device: int) -> Any:
    """Compile and load a kernel on a device, which has to be current; once per process.

    The result takes the grid, the block, the arguments, the bytes of dynamic shared memory (`kernel.shared`) and the
    stream: any object with an address, `ptr`, or None for CuPy's current one.

    Raises
    ------
    EngineError
        The source does not compile, the GPU cannot run it, or this process cannot use CUDA.

    Warns
    -----
    RuntimeWarning
        Once per process: the cache on disk cannot be read or written, or holds an invalid binary.
    """
    key = (kernel.name, kernel.source, device)
    function = _functions.get(key)
    if function is None:
        check_process()
        with _lock:
            lock = _kernel_locks.setdefault(key, threading.Lock())
        with lock:
            function = _functions.get(key) or _load(kernel, device)
            _functions[key] = function
    return function


def load_together(kernels: Iterable[Kernel], device: int) -> None:
    """Compile and load kernels in parallel, one thread each: NVRTC releases Python's global lock.

    Errors are left to the later call of `load` for the kernel that fails.
    """
    missing = {key: k for k in kernels if (key := (k.name, k.source, device)) not in _functions}
    if len(missing) < 2:
        return
    import cupy

    def load_on_device(kernel: Kernel) -> None:
        with cupy.cuda.Device(device):
            load(kernel, device)

    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        wait([pool.submit(load_on_device, kernel) for kernel in missing.values()])


def _load(kernel: Kernel, device: int) -> Any:
    """Compile and load a kernel, and allow it its shared memory and its clusters."""
    import cupy

    try:
        function = _compile(kernel, inlined(kernel.source))
        if kernel.shared > 0:  # with its static memory it may need to opt in
            cupy.cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE, kernel.shared)
        if kernel.cluster > _PORTABLE_CLUSTER:
            cupy.cuda.driver.funcSetAttribute(function.ptr, _LARGE_CLUSTERS, 1)
        return function
    except (cupy.cuda.compiler.CompileException, RuntimeError, OSError) as error:
        capability = cupy.cuda.Device(device).compute_capability
        raise EngineError(
            f"the kernel {kernel.name} could not be compiled and loaded on GPU {device} (compute capability "
            f"{capability[:-1]}.{capability[-1:]}; cupyfuse is tested from {_LOWEST_CAPABILITY} on): {error}\n"
            "`python -m cupyfuse info` says what this machine lacks"
        ) from error


def _compile(kernel: Kernel, code: str) -> Any:
    """Compile and load a kernel through CuPy's cache on disk, or without it once that has failed."""
    import cupy

    if kernel.arch:
        return _compile_for_arch(kernel, code)
    if _without_cache:
        return _compile_in_memory(code, kernel.name)
    try:
        return cupy.RawModule(code=code, options=OPTIONS).get_function(kernel.name).kernel
    except (OSError, cupy.cuda.driver.CUDADriverError) as error:
        # If compiling without the cache succeeds, the cache failed, or a binary in it is invalid.
        function = _compile_in_memory(code, kernel.name)
        _disable_cache(error)
        return function


def _compile_in_memory(code: str, name: str) -> Any:
    """Compile and load a kernel without a cache on disk."""
    import cupy

    # CuPy itself adds -ftz=true where it compiles for its cache.
    binary, _ = cupy.cuda.compiler.compile_using_nvrtc(code, (*OPTIONS, "-ftz=true"), cache_in_memory=True)
    module = cupy.cuda.function.Module()
    module.load(binary)
    return module.get_function(name)


def _compile_for_arch(kernel: Kernel, code: str) -> Any:
    """Compile and load a kernel for an architecture that CuPy's compiler does not know, with a cache of our own."""
    import cupy

    options = (*OPTIONS, f"-arch=sm_{kernel.arch}", "-ftz=true")
    module = cupy.cuda.function.Module()
    path, binary = _read_cache(code, options)
    try:
        if binary:
            module.load(binary)
    except cupy.cuda.driver.CUDADriverError:
        binary = b""  # intact, but not loadable here
    if not binary:
        binary = _call_nvrtc(cupy.cuda.nvrtc, code, options)
        _write_cache(path, binary)
        module.load(binary)
    return module.get_function(kernel.name)


def _call_nvrtc(nvrtc: Any, code: str, options: tuple[str, ...]) -> bytes:
    """Compile to a cubin with CuPy's binding of NVRTC."""
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


def _read_cache(code: str, options: tuple[str, ...]) -> tuple[Path | None, bytes]:
    """Return the path of a source's cache file, None without a cache, and the binary in it, empty if there is none."""
    import cupy

    if _without_cache or os.environ.get("CUPY_CACHE_IN_MEMORY", "0") == "1":
        return None, b""
    version = cupy.cuda.nvrtc.getVersion()
    key = hashlib.sha256("\0".join((code, *options, str(version))).encode()).hexdigest()
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            file.write(hashlib.sha256(binary).digest() + binary)
        os.replace(file.name, path)
    except OSError as error:
        _disable_cache(error)


def _disable_cache(error: Exception) -> None:
    """Compile without the cache on disk from now on, and warn once that it failed."""
    global _without_cache
    with _lock:
        warned, _without_cache = _without_cache, True
    if warned:
        return
    warnings.warn(
        f"CuPy's kernel cache cannot be used ({error}), so this process compiles without it: set CUPY_CACHE_DIR to a "
        "writable directory, or empty the present one",
        RuntimeWarning,
        stacklevel=2,
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
    options = [option.encode() for option in (*OPTIONS, f"-arch={arch}", "-ftz=true")]
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
