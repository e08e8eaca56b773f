"""Measure times on the GPU and on the host: rivals in turn, order statistics of their samples.

The figures of a call are the methods of `Contest`; `FIGURES` says in words what each means.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .device import GRAPH_CALLS, Call, Device

# Figures: title, and what it means.
FIGURES = {
    "gpu_evicted": ("GPU, L2 evicted", "events around one call, the L2 cache overwritten before it"),
    "gpu_back_to_back": (
        "GPU, back to back",
        "events around many queued calls, per call; arguments that fit lie in the L2 cache",
    ),
    "gpu_graph": ("GPU, graph", "a replayed CUDA graph of 10 calls, per call"),
    "host": ("host", "the host's clock around calls that it does not wait for, per call"),
    "wall": ("wall", "the host's clock around one call, from an idle GPU to an idle GPU; the third in a row"),
    "gpu_queued": (
        "GPU, queued",
        "events around one call, queued behind a kernel that holds the stream for at most 20 ms, so that the GPU need "
        "not wait for the host; calls that take the host longer have gaps in them",
    ),
    "wall_loop": (
        "wall, loop",
        "the host's clock around a few calls in a row, from an idle GPU to an idle GPU, per call",
    ),
    "wall_least": (
        "wall, least",
        "the host's clock around one call, from an idle device to an idle device, the least of a few in a row",
    ),
}

_REPLAYS = 5  # of a graph, between two events
_HOST_CALLS = 20  # between two drains of the queue: far fewer launches than it holds (about 1000)


@dataclass(frozen=True)
class Summary:
    """Order statistics of repeated measurements, in microseconds."""

    n: int
    median: float
    minimum: float
    maximum: float
    lower_quartile: float
    upper_quartile: float


def summarize(samples: Sequence[float]) -> Summary:
    """Summarize one sample or more; quartiles by linear interpolation."""
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Summary(len(samples), statistics.median(samples), min(samples), max(samples), quartiles[0], quartiles[2])


def describe(error: BaseException) -> str:
    """Describe an error in one line, for a report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def is_turn(turn: int, turns: int, count: int) -> bool:
    """Tell whether a rival of `count` samples takes one in this turn, so that they spread evenly over `turns`."""
    return turn * count // turns != (turn + 1) * count // turns


def clamp(wanted: float, low: int, high: int) -> int:
    """Round `wanted` down to a whole number between `low` and `high`."""
    return high if not math.isfinite(wanted) else max(low, min(high, int(wanted)))


@dataclass(frozen=True)
class Cost:
    """Estimated GPU time (with gaps) and host time of a call, in microseconds."""

    gpu: float
    host: float

    @property
    def longer(self) -> float:
        return max(self.gpu, self.host)


class Contest:
    """Rivals measured in turn, so that a drift of the machine meets all of them alike.

    `budget` is in GPU seconds for each rival and figure; the number of repeats is kept within bounds. `before` runs
    untimed before each call of `evicted` and `wall`. `failures` are the rivals that raised, which are measured no more.
    """

    def __init__(
        self, device: Device, calls: Mapping[str, Call], budget: float, before: Mapping[str, Call] | None = None
    ):
        self._device, self._calls, self._budget_us = device, dict(calls), budget * 1e6
        self._before: dict[str, Call] = {**dict.fromkeys(calls, lambda: None), **(before or {})}
        self.failures: dict[str, str] = {}
        self._costs: dict[str, Cost] = {}
        for name in self._calls:
            try:
                self._costs[name] = self._estimate(name)
            except Exception as error:
                self.failures[name] = describe(error)

    def _estimate(self, name: str, repeats: int = 3) -> Cost:
        call, before = self._calls[name], self._before[name]
        for _ in range(repeats):
            before()
            call()
        self._device.synchronize()
        start = self._device.record()
        began = time.perf_counter()
        for _ in range(repeats):
            before()
            call()
        host = time.perf_counter() - began
        gpu = self._device.elapsed(start, self._device.record())
        return Cost(max(gpu / repeats, 0.1), host * 1e6 / repeats)

    def _take(
        self, sample: Callable[[str, Cost], float], cost: Callable[[Cost], float], low: int, high: int
    ) -> dict[str, Summary]:
        """Sample all rivals in turn, each `low` to `high` times as its budget allows; turns rotate who is first.

        `cost` is the estimated time of one sample in microseconds. A rival that raises moves to `failures`.
        """
        running = {name: c for name, c in self._costs.items() if name not in self.failures}
        counts = {name: clamp(self._budget_us / cost(c), low, high) for name, c in running.items()}
        samples: dict[str, list[float]] = {name: [] for name in counts}
        names, turns = list(counts), max(counts.values(), default=0)
        for turn in range(turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name in self.failures or not is_turn(turn, turns, counts[name]):
                    continue
                try:
                    samples[name].append(sample(name, running[name]))
                except Exception as error:
                    self.failures[name] = describe(error)
        return {name: summarize(found) for name, found in samples.items() if found and name not in self.failures}

    def _between_events(self, call: Call, calls: int) -> float:
        start = self._device.record()
        for _ in range(calls):
            call()
        return self._device.elapsed(start, self._device.record()) / calls

    def _by_clock(self, call: Call, calls: int, wait: bool) -> float:
        self._device.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if wait:
            self._device.synchronize()
        spent = time.perf_counter() - began
        if not wait:
            self._device.synchronize()
        return spent * 1e6 / calls

    def evicted(self) -> dict[str, Summary]:
        """Measure GPU time of single calls, each after the L2 cache was overwritten."""

        def sample(name: str, cost: Cost) -> float:
            # The first call after a pause takes the host several times as long as one among many.
            self._device.hold(4.0 * cost.host + 300.0)
            self._before[name]()
            self._device.evict()
            return self._between_events(self._calls[name], 1)

        return self._take(sample, lambda cost: cost.gpu + 100.0, 7, 50)

    def back_to_back(self) -> dict[str, Summary]:
        """Measure GPU time per call of many queued calls."""

        def calls(cost: Cost) -> int:
            return clamp(20e3 / cost.gpu, 5, 50)

        def sample(name: str, cost: Cost) -> float:
            self._device.hold(1.5 * cost.host * calls(cost) + 50.0)
            return self._between_events(self._calls[name], calls(cost))

        return self._take(sample, lambda cost: cost.gpu * calls(cost), 5, 20)

    def queued(self) -> dict[str, Summary]:
        """Measure GPU time of single calls that are queued before their first kernel starts."""

        def sample(name: str, cost: Cost) -> float:
            self._device.hold(1.5 * cost.host + 300.0)
            return self._between_events(self._calls[name], 1)

        return self._take(sample, lambda cost: cost.longer + 100.0, 5, 30)

    def host(self) -> dict[str, Summary]:
        """Measure host time per call of calls that nobody waits for."""

        def sample(name: str, cost: Cost) -> float:
            return self._by_clock(self._calls[name], _HOST_CALLS, wait=False)

        gc.collect()
        gc.disable()
        try:
            return self._take(sample, lambda cost: cost.gpu * _HOST_CALLS, 5, 20)
        finally:
            gc.enable()

    def wall(self) -> dict[str, Summary]:
        """Measure host time of single calls from an idle GPU to an idle GPU; the third in a row, its caches warm."""

        def sample(name: str, cost: Cost) -> float:
            spent = 0.0
            for _ in range(3):
                self._before[name]()
                spent = self._by_clock(self._calls[name], 1, wait=True)
            return spent

        return self._take(sample, lambda cost: cost.gpu + 100.0, 7, 50)

    def wall_loop(self) -> dict[str, Summary]:
        """Measure host time per call of a few calls in a row, from an idle GPU to an idle GPU."""

        def calls(cost: Cost) -> int:
            return clamp(30e3 / cost.longer, 3, 20)

        def sample(name: str, cost: Cost) -> float:
            return self._by_clock(self._calls[name], calls(cost), wait=True)

        return self._take(sample, lambda cost: cost.longer * calls(cost) + 100.0, 5, 20)

    def wall_least(self) -> dict[str, Summary]:
        """Measure host time of single calls from an idle device to an idle device, the least of a few in a row."""

        def calls(cost: Cost) -> int:
            return clamp(10e3 / cost.longer, 1, 50)

        def sample(name: str, cost: Cost) -> float:
            return min(self._by_clock(self._calls[name], 1, wait=True) for _ in range(calls(cost)))

        return self._take(sample, lambda cost: cost.longer * calls(cost), 3, 1000)

    def replayed(self, replays: Mapping[str, Call]) -> tuple[dict[str, Summary], dict[str, str]]:
        """Measure GPU time per call of replayed graphs; also return the errors of those that failed."""
        inner = Contest(self._device, replays, budget=0.0)

        def sample(name: str, cost: Cost) -> float:
            self._device.hold(200.0)
            return self._between_events(replays[name], _REPLAYS) / GRAPH_CALLS

        return inner._take(sample, lambda cost: cost.gpu, 20, 20), inner.failures
