"""Kernel launches recorded as a CUDA graph, to be launched together.

The graph is built node by node, not captured from a stream: while any stream of a device captures, other threads must
not synchronise with the device.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ..errors import EngineError
from .driver import Dim, driver, takes_early_launches

# CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, once all blocks have let the next launch begin (`launch_order.cuh`); and
# CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
_LETS_NEXT_BEGIN, _PROGRAMMATIC = 1, 1


class _EdgeData(ctypes.Structure):
    """`CUgraphEdgeData` of the driver's interface."""

    _fields_ = (
        *((name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")),
        ("reserved", ctypes.c_ubyte * 5),
    )


_EARLY = _EdgeData(_LETS_NEXT_BEGIN, 0, _PROGRAMMATIC)


class _NodeParams(ctypes.Structure):
    """`CUDA_KERNEL_NODE_PARAMS_v1` of the driver's interface."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    )


class LaunchGraph:
    """A CUDA graph of kernel launches, one after the other. A launch on it, instead of a stream, is recorded.

    As on a stream, blocks may begin before the launch before theirs has ended, where the GPU can do that.

    Raises
    ------
    EngineError
        The driver refuses a call.
    """

    def __init__(self) -> None:
        self._driver = driver()
        self._executable = ctypes.c_void_p()
        self._graph = ctypes.c_void_p()
        self._last = ctypes.c_void_p()
        self._memory: Any = None
        self._early = takes_early_launches()
        self._check("cuGraphCreate", ctypes.byref(self._graph), 0)

    def add(self, function: int, grid: Dim, block: Dim, shared: int, arguments: int) -> None:
        """Add a launch behind the last one; `arguments` is the address of an array of pointers to the arguments."""
        params = _NodeParams(function, *grid, *block, shared, arguments, None)
        node, last = ctypes.c_void_p(), self._last
        after = (ctypes.byref(last), 1) if last.value and not self._early else (None, 0)
        self._check("cuGraphAddKernelNode", ctypes.byref(node), self._graph, *after, ctypes.byref(params))
        if last.value and self._early:
            ends = ctypes.byref(last), ctypes.byref(node)
            self._check("cuGraphAddDependencies_v2", self._graph, *ends, ctypes.byref(_EARLY), ctypes.c_size_t(1))
        self._last = node

    def finish(self, memory: Any) -> None:
        """Instantiate the graph; `memory`, which its kernels work on, is kept as long as the graph."""
        self._memory = memory
        self._check("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, 0)

    def __call__(self, stream: int) -> None:
        """Launch on a stream."""
        self._check("cuGraphLaunch", self._executable, stream)

    def _check(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; raise an error if it fails."""
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise EngineError(f"{name} failed with status {status}")

    def __del__(self) -> None:
        # The driver destroys a graph that still runs when it has ended.
        for name, handle in (("cuGraphExecDestroy", "_executable"), ("cuGraphDestroy", "_graph")):
            if getattr(self, handle, None):
                getattr(self._driver, name)(getattr(self, handle))
