"""The GPU as timing needs it: events, L2 eviction, a kernel that holds the stream, graphs. All through CuPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Call = Callable[[], Any]

GRAPH_CALLS = 10  # calls captured in one graph
_LONGEST_HOLD_US = 20_000.0

# Keeps a stream busy for a while, so that what is queued behind it can then run without gaps.
_HOLD = r"""
extern "C" __global__ void hold(long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < (unsigned long long)nanoseconds);
}
"""


@dataclass(frozen=True)
class _Replay:
    """A captured graph, and what must live as long: the stream whose memory it uses, the call with its arrays."""

    graph: Any
    kept: tuple[Any, ...]

    def __call__(self) -> None:
        self.graph.launch()


class NoGpu(RuntimeError):
    """There is no CuPy here, or no GPU that it can use."""


class Device:
    """The GPU that is current in CuPy, as far as timing needs it. Everything runs on CuPy's current stream.

    Raises
    ------
    NoGpu
        CuPy cannot be imported, or finds no GPU.
    """

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
        """An event at this point of the stream."""
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def elapsed(self, start: Any, end: Any) -> float:
        """Microseconds between two events; waits for the later."""
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def evict(self) -> None:
        """Overwrite the L2 cache. What was written then goes to memory while the next call runs, to its cost."""
        self._scratch.data.memset_async(1, self._scratch.nbytes)

    def hold(self, microseconds: float) -> None:
        """Keep the stream busy, so that the host can queue work behind it."""
        self._kernel((1,), (1,), (np.int64(1e3 * min(microseconds, _LONGEST_HOLD_US)),))

    def copy(self, target: Any, source: Any) -> None:
        """Copy a contiguous array by the driver's own means."""
        target.data.copy_from_device_async(source.data, source.nbytes)

    def capture(self, call: Call) -> Call:
        """Capture calls that CuPy's stream can record; the result replays `GRAPH_CALLS` of them."""
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
                self._abandon(stream)
                raise
            graph = stream.end_capture()
        self.synchronize()
        return _Replay(graph, (stream, call))

    @staticmethod
    def _abandon(stream: Any) -> None:
        try:
            stream.end_capture()
        except Exception:  # the call that broke the capture has the reason; this one only ends it
            return
