"""Launches of kernels that take one struct, with little of the host's time."""

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
    """A kernel made ready to be launched with structs of one form.

    Parameters
    ----------
    function : callable
        The kernel as a runtime gives it.
    grid, block : tuple of int
    form : str
        The struct's members, as `struct` writes them.
    shared : int
        Bytes of dynamic shared memory.

    Returns
    -------
    callable
        `launch(members, stream)`; without a stream, on CuPy's current one.
    """
    pack, as_value = struct_packer(form)

    def plainly(members: Sequence[Any], stream: Any) -> None:
        function(grid, block, (as_value(pack(*members)),), shared, stream)

    if not getattr(function, "ptr", 0):
        return plainly  # no kernel of CuPy's

    from cupy.cuda import driver

    # CuPy's function finds out for each launch what its arguments are. Its binding of the driver's function takes the
    # address of packed ones: the memory for them is each thread's own, and taken away while it is in use.
    quickly = functools.partial(driver.launchKernel, function.ptr, *grid, *block, shared)
    members_of = struct.Struct("=" + form)
    pack_into = members_of.pack_into
    memory = threading.local()

    def launch(members: Sequence[Any], stream: Any) -> None:
        try:
            packed, address, _ = taken = memory.free.pop()
        except (AttributeError, IndexError):
            plainly(members, stream)  # in a new thread, CuPy then makes the device's context its current one
            memory.free = [_room(members_of.size)]
            return
        if stream is None:
            plainly(members, stream)
        else:
            pack_into(packed, 0, *members)
            quickly(stream.ptr, address, 0)
        memory.free.append(taken)

    return launch


def _room(size: int) -> tuple[Any, int, Any]:
    """Memory for a struct; the address of its address, as the driver takes arguments; what lies there."""
    packed = ctypes.create_string_buffer(size)
    pointer = ctypes.c_void_p(ctypes.addressof(packed))
    return packed, ctypes.addressof(pointer), pointer
