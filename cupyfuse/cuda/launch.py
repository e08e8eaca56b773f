"""Launches of kernels that take one struct, at little cost on the host."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .kernel import struct_packer

Dim = tuple[int, int, int]
Launch = Callable[[Sequence[Any], Any], None]


def launcher(function: Any, grid: Dim, block: Dim, form: str, shared: int = 0) -> Launch:
    """Prepare the launch of a kernel with structs of one format.

    Parameters
    ----------
    function : callable
        The kernel, as `Runtime.function` returns it.
    grid, block : tuple of int
    form : str
        Format of the struct's members, in the notation of Python's `struct`.
    shared : int
        Bytes of dynamic shared memory.

    Returns
    -------
    callable
        `launch(members, stream)`; the stream None is CuPy's current one, a `LaunchGraph` records the launch.
    """
    pack, as_value = struct_packer(form)

    def launch_by_function(members: Sequence[Any], stream: Any) -> None:
        function(grid, block, (as_value(pack(*members)),), shared, stream)

    if not getattr(function, "ptr", 0):
        return launch_by_function  # not a kernel of CuPy's

    from cupy.cuda import driver

    # CuPy's function inspects its arguments in every launch; its binding of the driver takes the address of a struct.
    # Each thread has a buffer for the struct, which is not in `buffers.free` while it is in use.
    launch_packed = functools.partial(driver.launchKernel, function.ptr, *grid, *block, shared)
    packed_struct = struct.Struct("=" + form)
    pack_into = packed_struct.pack_into
    buffers = threading.local()

    def launch(members: Sequence[Any], stream: Any) -> None:
        try:
            packed, address, _ = buffer = buffers.free.pop()
        except (AttributeError, IndexError):
            if stream is None or stream.ptr is not None:
                # In a new thread CuPy's function makes the device's context current.
                launch_by_function(members, stream)
                buffers.free = [_buffer(packed_struct.size)]
                return
            packed, address, _ = buffer = _buffer(packed_struct.size)
            buffers.free = []
        if stream is None:
            launch_by_function(members, stream)
        else:
            pack_into(packed, 0, *members)
            if stream.ptr is None:
                stream.add(function.ptr, grid, block, shared, address)
            else:
                launch_packed(stream.ptr, address, 0)
        buffers.free.append(buffer)

    return launch


def _buffer(size: int) -> tuple[Any, int, Any]:
    """Allocate a struct's memory; return it, the address of a pointer to it, as the driver asks, and the pointer."""
    packed = ctypes.create_string_buffer(size)
    pointer = ctypes.c_void_p(ctypes.addressof(packed))
    return packed, ctypes.addressof(pointer), pointer
