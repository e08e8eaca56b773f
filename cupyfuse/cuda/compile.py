"""Compilation: the only place that calls NVRTC.

On a machine with a GPU, CuPy compiles and loads, and keeps cubins on disk (`~/.cupy/kernel_cache`, or wherever
CUPY_CACHE_DIR says). Its key covers the text that it is given, so our headers are put into the text before. Without a
GPU, `cubin` compiles for any architecture with the NVRTC of the CUDA wheels.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from ..errors import EngineError
from .emit import Kernel, inlined

OPTIONS = ("--std=c++17",)
_functions: dict[tuple[str, str, int], Any] = {}
_lock = threading.Lock()


def load(kernel: Kernel, device: int) -> Any:
    """The compiled kernel, ready to launch on a device (which has to be current).

    Raises
    ------
    EngineError
        The source does not compile, or the GPU cannot run it.
    """
    import cupy

    key = (kernel.name, kernel.source, device)
    function = _functions.get(key)
    if function is None:
        with _lock:
            try:
                module = cupy.RawModule(code=inlined(kernel.source), options=OPTIONS)
                function = module.get_function(kernel.name).kernel
            except (cupy.cuda.compiler.CompileException, cupy.cuda.driver.CUDADriverError) as error:
                raise EngineError(
                    f"the kernel {kernel.name} could not be compiled and loaded on GPU {device} "
                    f"(compute capability {cupy.cuda.Device(device).compute_capability}): {error}"
                ) from error
            _functions[key] = function
    return function


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
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
    _check(nvrtc, status)
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


def _check(nvrtc: Any, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise EngineError(f"NVRTC: {status}")
