"""Launches of kernels that take one struct, at little cost on the host."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .driver import Dim, EarlyLaunch, takes_early_launches
from .kernel import struct_packer

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

    # CuPy's function inspects its arguments in every launch; the driver takes the address of a struct. Each thread has
    # structs of its own, with their launches; one that is in use is not in `buffers.free`.
    packed_struct = struct.Struct("=" + form)
    pack_into = packed_struct.pack_into
    buffers = threading.local()
    launch_type = EarlyLaunch if takes_early_launches() else _PlainLaunch

    def new_buffer() -> tuple[Any, int, Callable[[int], None]]:
        """Allocate a struct's memory; return it, the address of a pointer to it, and its launch on a stream."""
        packed = ctypes.create_string_buffer(packed_struct.size)
        pointer = ctypes.c_void_p(ctypes.addressof(packed))
        return packed, ctypes.addressof(pointer), launch_type(function.ptr, grid, block, shared, pointer)

    def launch(members: Sequence[Any], stream: Any) -> None:
        try:
            packed, address, enqueue = buffer = buffers.free.pop()
        except (AttributeError, IndexError):
            if stream is None or stream.ptr is not None:
                # In a new thread CuPy's function makes the device's context current.
                launch_by_function(members, stream)
                buffers.free = [new_buffer()]
                return
            packed, address, enqueue = buffer = new_buffer()
            buffers.free = []
        if stream is None:
            launch_by_function(members, stream)
        else:
            pack_into(packed, 0, *members)
            if stream.ptr is None:
                stream.add(function.ptr, grid, block, shared, address)
            else:
                enqueue(stream.ptr)
        buffers.free.append(buffer)

    return launch


class _PlainLaunch:
    """A launch that begins once the one before it on the stream has ended; with the parameters of `EarlyLaunch`."""

    def __init__(self, function: int, grid: Dim, block: Dim, shared: int, arguments: ctypes.c_void_p):
        from cupy.cuda import driver

        self._launch = functools.partial(driver.launchKernel, function, *grid, *block, shared)
        self._arguments, self._address = arguments, ctypes.addressof(arguments)

    def __call__(self, stream: int) -> None:
        self._launch(stream, self._address, 0)
