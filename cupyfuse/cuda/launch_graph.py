"""Kernel launches recorded as a CUDA graph, to be launched together.

The graph is built node by node, not captured from a stream: while any stream of a device captures, other threads must
not synchronise with the device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import EngineError
from .driver import driver

Dim = tuple[int, int, int]


class _NodeParams(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v1` of the driver's interface."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class LaunchGraph:
    """Launches in their order. It takes the place of a stream where `launch.launcher`'s functions are to be recorded.

    Raises
    ------
    EngineError
        The driver refuses a call.
    """

    ptr = None  # no stream's

    def __init__(self) -> None:
        self._driver = driver()
        self._executable = ctypes.c_void_p()
        self._graph = ctypes.c_void_p()
        self._last = ctypes.c_void_p()
        self._memory: Any = None
        self._check("cuGraphCreate", ctypes.byref(self._graph), 0)

    def add(self, function: int, grid: Dim, block: Dim, shared: int, arguments: int) -> None:
        """Add a launch behind the ones before; `arguments` is the address of pointers to them, which are copied."""
        params = _NodeParams(function, *grid, *block, shared, arguments, None)
        node, last = ctypes.c_void_p(), self._last
        after = (ctypes.byref(last), 1) if last.value else (None, 0)
        self._check("cuGraphAddKernelNode", ctypes.byref(node), self._graph, *after, ctypes.byref(params))
        self._last = node

    def finish(self, memory: Any) -> None:
        """Make the graph ready to launch; `memory` is what its kernels work on, kept for as long as the graph."""
        self._memory = memory
        self._check("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, 0)

    def __call__(self, stream: Any) -> None:
        """Launch on a stream."""
        self._check("cuGraphLaunch", self._executable, stream.ptr)

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise EngineError(f"{name} failed with status {status}")

    def __del__(self) -> None:
        # A graph that still runs is destroyed when it has ended.
        for name, handle in (("cuGraphExecDestroy", "_executable"), ("cuGraphDestroy", "_graph")):
            if getattr(self, handle, None):
                getattr(self._driver, name)(getattr(self, handle))
