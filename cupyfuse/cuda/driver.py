"""The CUDA driver by ctypes, for functions that CuPy does not bind."""

from __future__ import annotations

import ctypes
import sys
from functools import lru_cache
from typing import Any

from ..errors import EngineError


@lru_cache(maxsize=1)
def driver() -> Any:
    """Load the CUDA driver, and declare the functions used.

    Raises
    ------
    EngineError
        It is missing, or older than CUDA 12.
    """
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        library.cuGraphCreate.argtypes = [pointer, number]
        library.cuGraphAddKernelNode.argtypes = [pointer, pointer, pointer, ctypes.c_size_t, pointer]
        library.cuGraphInstantiateWithFlags.argtypes = [pointer, pointer, ctypes.c_ulonglong]
        library.cuGraphLaunch.argtypes = [pointer, pointer]
        library.cuGraphExecDestroy.argtypes = library.cuGraphDestroy.argtypes = [pointer]
        library.cuTensorMapEncodeTiled.argtypes = [
            *(pointer, ctypes.c_int, number, pointer, pointer, pointer, pointer, pointer),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ]
    except (OSError, AttributeError) as error:  # no such file, no such function
        raise EngineError(
            f"the CUDA driver was not found, or is older than CUDA 12: {error}; `python -m cupyfuse info` says what "
            "this machine has"
        ) from error
    return library
