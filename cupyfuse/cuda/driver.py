"""The CUDA driver by ctypes, for functions that CuPy does not bind."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ..errors import EngineError

Dim = tuple[int, int, int]
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # the CUlaunchAttributeID
_LEAST_DRIVER = 12030  # whose graphs hold such launches


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
        library.cuLaunchKernelEx.restype = ctypes.c_int  # `early_launch` prepares its arguments
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


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver's interface, with a value of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` of the driver's interface."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def early_launch(
    function: int, grid: Dim, block: Dim, shared: int, arguments: ctypes.c_void_p
) -> Callable[[int], None]:
    """Prepare a launch whose blocks may begin before the launch before it on the stream has ended.

    The kernel has to wait for that itself (`follow_earlier_launches` in `launch_order.cuh`).

    Parameters
    ----------
    function : int
        Address of the `CUfunction`.
    grid, block : tuple of int
    shared : int
        Bytes of dynamic shared memory.
    arguments : ctypes.c_void_p
        A pointer to the kernel's only argument.

    Returns
    -------
    callable
        Launches on a stream; raises EngineError if the driver refuses.
    """
    attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1))
    config = _LaunchConfig(*grid, *block, shared, None, ctypes.pointer(attribute), 1)
    launch = driver().cuLaunchKernelEx
    config_at, handle, arguments_at = ctypes.byref(config), ctypes.c_void_p(function), ctypes.byref(arguments)

    def enqueue(stream: int) -> None:
        config.stream = stream
        if status := launch(config_at, handle, arguments_at, None):
            raise EngineError(f"cuLaunchKernelEx failed with status {status}")

    return enqueue


def current_device() -> int:
    """Return the number of the thread's current device."""
    from cupy.cuda import runtime

    device: int = runtime.getDevice()
    return device


def most_clusters(function: int, cluster: int, threads: int, shared: int) -> int:
    """Return how many clusters of a kernel can be on the current device at once.

    Parameters
    ----------
    function : int
        Address of the `CUfunction`, which says how its blocks form clusters.
    cluster : int
        Blocks of a cluster.
    threads, shared : int
        Of a block, and its bytes of dynamic shared memory.

    Raises
    ------
    EngineError
        The driver refuses to tell.
    """
    count, config = ctypes.c_int(), _LaunchConfig(cluster, 1, 1, threads, 1, 1, shared, None, None, 0)
    status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config))
    if status:
        raise EngineError(f"cuOccupancyMaxActiveClusters failed with status {status}")
    return count.value


def takes_early_launches() -> bool:
    """Whether the current device, and its driver, let a launch begin before the one before it has ended."""
    return _takes_early_launches(current_device())


@lru_cache(maxsize=64)
def _takes_early_launches(device: int) -> bool:
    import cupy

    capability = int(cupy.cuda.Device(device).compute_capability)
    return capability >= 90 and cupy.cuda.runtime.driverGetVersion() >= _LEAST_DRIVER
