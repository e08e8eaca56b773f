"""Launches of kernels that take one struct, at little cost on the host.

The launches of a plan become one generated function. It fills addresses and numbers into structs that were packed
beforehand, and hands these to the driver. Where the compiled launcher is installed (`launcher.py`), that launches on
streams of a GPU in its place.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..generated import define
from . import launcher
from .driver import early_launch, takes_early_launches
from .launch_graph import LaunchGraph
from .structs import KernelCall, Launch, StructLaunch
from .tensor_map import WORDS

Enqueue = Callable[[Any], None]  # launches one kernel on a stream
# What to call after the launches, None to use the buffers again; then of each struct its members as words, the same as
# doubles, and what enqueues each of its kernels.
_Buffers = tuple[Any, ...]


def sequence(launches: Sequence[StructLaunch | Launch]) -> Launch:
    """Compile launches, one after the other, to one function; the kernels' device has to be current.

    Each thread has structs of its own: a launch takes free ones, or packs some, and frees them once all is enqueued. So
    a launch within it, as by a finalizer, takes others; what a launch held that failed is dropped.
    """
    structs = [launch for launch in launches if isinstance(launch, StructLaunch)]
    if not structs and len(launches) == 1:
        return launches[0]  # type: ignore[return-value]
    local = threading.local()
    has_handles = all(getattr(call.function, "ptr", 0) for each in structs for call in each.kernels)

    def prepare(stream: Any) -> _Buffers:
        """Return structs that are not in use, and the way to launch them on a stream."""
        if isinstance(stream, LaunchGraph):
            return _buffers(structs, _recording, _drop)
        if stream is None or not has_handles:
            return _buffers(structs, _calling, _drop)
        quick = _buffers(structs, _early if takes_early_launches() else _plainly)
        if hasattr(local, "free"):
            return quick

        def begin_thread() -> None:
            local.free = [quick]

        # In a new thread the first launch is CuPy's own, which makes the device's context current.
        return _buffers(structs, _calling, begin_thread)

    lines, names = _write(launches)
    launch = define("launch", "at, stream", lines, {**names, "local": local, "prepare": prepare})
    return launcher.compile(launches, launch) if structs and has_handles else launch


def _write(launches: Iterable[StructLaunch | Launch]) -> tuple[list[str], dict[str, Any]]:
    """Write the body of the function, and list what it refers to by name, beside `local` and `prepare`.

    For one kernel, whose struct has a pointer to a vector and a number, the text is

        try:
            buffers = local.free.pop() if type(stream) is int else None
        except (AttributeError, IndexError):
            buffers = None
        buffers = buffers or prepare(stream)
        finish, words0, doubles0, run0_0 = buffers
        p0 = at[0]
        if (p0) & 15:
            other0(at, stream)
        else:
            words0[0] = p0
            doubles0[1] = number0_0(at[1])
            run0_0(stream)
        if finish is None:
            local.free.append(buffers)
        else:
            finish()
    """
    names: dict[str, Any] = {}
    unpacked: list[str] = []
    body: list[str] = []
    for k, launch in enumerate(launches):
        if not isinstance(launch, StructLaunch):
            names[f"other{k}"] = launch
            body.append(f"other{k}(at, stream)")
            continue
        runs = [f"run{k}_{j}" for j in range(len(launch.kernels))]
        unpacked += [f"words{k}", f"doubles{k}", *runs]
        layout = launch.struct
        pointers = {(slot, start): f"p{j}" for j, (_, slot, start) in enumerate(layout.pointers)}
        body += [f"{name} = at[{slot}]{f' + {start}' if start else ''}" for (slot, start), name in pointers.items()]
        filled = []
        for j, (index, source) in enumerate(layout.maps):
            names[f"map{k}_{j}"] = source.encode
            filled.append(f"words{k}[{index}:{index + WORDS}], held{k}_{j} = map{k}_{j}(at)")
        filled += [f"words{k}[{index}] = {pointers[slot, start]}" for index, slot, start in layout.pointers]
        for j, (index, slot, value) in enumerate(layout.numbers):
            names[f"number{k}_{j}"] = value.evaluate
            filled.append(f"doubles{k}[{index}] = number{k}_{j}(at[{slot}])")
        filled += [f"{run}(stream)" for run in runs]
        filled += [f"held{k}_{j} = None" for j in range(len(layout.maps))]
        checked = " | ".join(dict.fromkeys(pointers[each] for each in launch.aligned))
        if checked and launch.alignment > 1:
            names[f"other{k}"] = launch.otherwise
            body += [f"if ({checked}) & {launch.alignment - 1}:", f"    other{k}(at, stream)", "else:"]
            filled = [f"    {line}" for line in filled]
        body += filled
    if unpacked:
        taken = ["try:", "    buffers = local.free.pop() if type(stream) is int else None"]
        taken += ["except (AttributeError, IndexError):", "    buffers = None", "buffers = buffers or prepare(stream)"]
        body = [*taken, f"finish, {', '.join(unpacked)} = buffers", *body]
        body += ["if finish is None:", "    local.free.append(buffers)", "else:", "    finish()"]
    return body or ["pass"], names


# Structs and the ways to launch them --------------------------------------------------------------------------------

# Takes the kernel, the struct's memory and its address as a C value: drivers take the address of that.
_Way = Callable[[KernelCall, bytearray, ctypes.c_void_p], Enqueue]


def _buffers(structs: Iterable[StructLaunch], way: _Way, finish: Callable[[], None] | None = None) -> _Buffers:
    """Pack structs in memory of their own, and prepare the launches of their kernels."""
    found: list[Any] = [finish]
    for each in structs:
        packed = bytearray(struct.pack("=" + each.struct.form, *each.struct.members))
        address = ctypes.c_void_p(ctypes.addressof((ctypes.c_char * len(packed)).from_buffer(packed)))
        view = memoryview(packed)
        found += [view.cast("Q"), view.cast("d"), *(way(call, packed, address) for call in each.kernels)]
    return tuple(found)


def _drop() -> None:
    """Leave buffers to the garbage collector."""


def _calling(call: KernelCall, packed: bytearray, address: ctypes.c_void_p) -> Enqueue:
    """Call the runtime's function, which may inspect its arguments."""
    function, grid, block, shared = call
    value = np.frombuffer(packed, np.dtype((np.void, len(packed))))

    def enqueue(stream: Any) -> None:
        function(grid, block, (value,), shared, stream if stream is None else SimpleNamespace(ptr=stream))

    return enqueue


def _plainly(call: KernelCall, packed: bytearray, address: ctypes.c_void_p) -> Enqueue:
    """Call the driver, to which an address of the struct is enough; the launch begins when the one before it ends."""
    from cupy.cuda import driver

    function, grid, block, shared = call
    launch = functools.partial(driver.launchKernel, function.ptr, *grid, *block, shared)

    def enqueue(stream: int, arguments: int = ctypes.addressof(address), held: Any = address) -> None:
        launch(stream, arguments, 0)

    return enqueue


def _early(call: KernelCall, packed: bytearray, address: ctypes.c_void_p) -> Enqueue:
    """Call the driver; the launch's blocks may begin before the launch before it has ended."""
    function, grid, block, shared = call
    return early_launch(function.ptr, grid, block, shared, address)


def _recording(call: KernelCall, packed: bytearray, address: ctypes.c_void_p) -> Enqueue:
    """Add the launch to a graph, which copies the struct."""
    function, grid, block, shared = call

    def enqueue(graph: LaunchGraph) -> None:
        graph.add(function.ptr, grid, block, shared, ctypes.addressof(address))

    return enqueue
