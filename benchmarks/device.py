"""Control the GPU for timing: events, L2 eviction, a kernel that holds the stream, graphs. All through CuPy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], Any]

GRAPH_CALLS = 10  # calls captured in one graph
_LONGEST_HOLD_US = 20_000.0

# Keeps a stream busy, so that what is queued behind it can then run without gaps.
_HOLD = r"""
extern "C" __global__ void hold(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)nanoseconds);
}
"""


class NoGpu(RuntimeError):
    """CuPy is missing, or finds no GPU."""


class Host:
    """The CPU in a GPU's place: a call is done when it returns."""

    name = "cpu"
    synchronize = staticmethod(lambda: None)
    record = staticmethod(time.perf_counter)

    def elapsed(self, start: float, end: float) -> float:
        return (end - start) * 1e6


class Device:
    """CuPy's current GPU and stream; raises `NoGpu` without."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise NoGpu(f"the benchmarks need CuPy and an NVIDIA GPU: {error}") from error
        if not cupy.cuda.is_available():
            raise NoGpu("the benchmarks need an NVIDIA GPU; CuPy finds none (is the driver loaded?)")
        self._cupy = cupy
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.name: str = properties["name"].decode()
        self.l2_bytes = int(properties["l2CacheSize"])
        self._scratch = cupy.empty(2 * self.l2_bytes or 1 << 27, dtype=cupy.uint8)
        self._kernel = cupy.RawKernel(_HOLD, "hold")
        self.hold(1.0)
        self.synchronize()

    def synchronize(self) -> None:
        self._cupy.cuda.runtime.deviceSynchronize()

    def record(self) -> Any:
        """Record an event at this point of the stream."""
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        """Return the microseconds between two events, waiting for the later one."""
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def evict(self) -> None:
        """Overwrite the L2 cache. Its write-back then happens during the next call, to that call's cost."""
        self._scratch.data.memset_async(1, self._scratch.nbytes)

    def hold(self, microseconds: float) -> None:
        """Keep the stream busy, so that the host can queue work behind it."""
        self._kernel((1,), (1,), (np.int64(1e3 * min(microseconds, _LONGEST_HOLD_US)),))

    def copy(self, target: Any, source: Any) -> None:
        """Copy a contiguous array with the driver's own copy."""
        target.data.copy_from_device_async(source.data, source.nbytes)

    def capture(self, call: Call) -> Call:
        """Capture `GRAPH_CALLS` calls in a CUDA graph; return its launch."""
        stream = self._cupy.cuda.Stream(non_blocking=True)
        self.synchronize()
        with stream:
            call()  # memory pools go by stream
            stream.synchronize()
            stream.begin_capture()
            try:
                for _ in range(GRAPH_CALLS):
                    call()
            except BaseException:
                with contextlib.suppress(Exception):  # the call that broke the capture has the reason
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        self.synchronize()
        kept = graph, stream, call  # the graph uses the stream's memory and the call's arrays
        return lambda: kept[0].launch()
