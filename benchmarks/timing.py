"""Measure times on the GPU and on the host: rivals in turn, order statistics of their samples."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .device import GRAPH_CALLS, Call, Device

_DISPLACING = 1 << 22  # bytes, more than a core's own caches hold


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


class Timed(NamedTuple):
    """A rival's call, what runs untimed before it, and estimates of a call's time in microseconds."""

    call: Call
    before: Call
    host: float
    longer: float  # of host and GPU


# Samples: each measures so many calls of a rival, and returns the microseconds of one -------------------------------


def _between_events(device: Device, call: Call, calls: int) -> float:
    start = device.record()
    for _ in range(calls):
        call()
    return device.elapsed(start, device.record()) / calls


def _by_clock(device: Device, call: Call, calls: int, wait: bool = True) -> float:
    device.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    if wait:
        device.synchronize()
    return (time.perf_counter() - began) * 1e6 / calls


def _evicted(device: Device, rival: Timed, calls: int) -> float:
    # The first call after a pause takes the host several times as long as one among many.
    device.hold(4.0 * rival.host + 300.0)
    rival.before()
    device.evict()
    return _between_events(device, rival.call, calls)


def _queued(device: Device, rival: Timed, calls: int) -> float:
    device.hold(1.5 * rival.host * calls + 300.0)
    return _between_events(device, rival.call, calls)


def _graph(device: Device, rival: Timed, calls: int) -> float:
    device.hold(200.0)
    return _between_events(device, rival.call, calls) / GRAPH_CALLS


def _host(device: Device, rival: Timed, calls: int) -> float:
    gc.disable()
    try:
        return _by_clock(device, rival.call, calls, wait=False)
    finally:
        gc.enable()


def _host_within(device: Device, rival: Timed, calls: int) -> float:
    others = np.zeros(_DISPLACING, np.uint8)
    device.synchronize()
    spent = 0.0
    gc.disable()
    try:
        for _ in range(calls):
            np.add(others, 1, out=others)
            began = time.perf_counter()
            rival.call()
            spent += time.perf_counter() - began
    finally:
        gc.enable()
    return spent * 1e6 / calls


def _wall(device: Device, rival: Timed, calls: int) -> float:
    spent = 0.0
    for _ in range(calls):
        rival.before()
        spent = _by_clock(device, rival.call, 1)
    return spent


def _wall_loop(device: Device, rival: Timed, calls: int) -> float:
    return _by_clock(device, rival.call, calls)


def _wall_least(device: Device, rival: Timed, calls: int) -> float:
    return min(_by_clock(device, rival.call, 1) for _ in range(calls))


class Figure(NamedTuple):
    """What can be measured of a call: the words for it in a report, and how it is sampled."""

    title: str
    meaning: str
    sample: Callable[[Device, Timed, int], float]
    repeats: tuple[int, int]  # the fewest and the most samples of a rival
    calls: tuple[int, int]  # the fewest and the most calls of a sample
    span: float = 0.0  # microseconds that the calls of a sample should take


FIGURES = {
    "gpu_evicted": Figure(
        "GPU, L2 evicted", "events around one call, the L2 cache overwritten before it", _evicted, (7, 50), (1, 1)
    ),
    "gpu_back_to_back": Figure(
        "GPU, back to back",
        "events around many queued calls, per call; arguments that fit lie in the L2 cache",
        _queued, (5, 20), (5, 50), 20e3,
    ),
    "gpu_graph": Figure("GPU, graph", "a replayed CUDA graph of 10 calls, per call", _graph, (20, 20), (5, 5)),
    "host": Figure(
        "host", "the host's clock around calls that it does not wait for, per call",
        _host, (5, 20), (20, 20),  # far fewer launches than the queue holds (about 1000)
    ),
    "host_within": Figure(
        "host, caches displaced",
        "the host's clock around calls that it does not wait for, per call; 4 MB of other data pass through the caches "
        "before each, as within a model",
        _host_within, (5, 20), (20, 20),
    ),
    "wall": Figure(
        "wall", "the host's clock around one call, from an idle GPU to an idle GPU; the third in a row",
        _wall, (7, 50), (3, 3),
    ),
    "gpu_queued": Figure(
        "GPU, queued",
        "events around one call, queued behind a kernel that holds the stream for at most 20 ms, so that the GPU need "
        "not wait for the host; calls that take the host longer have gaps in them",
        _queued, (5, 30), (1, 1),
    ),
    "wall_loop": Figure(
        "wall, loop", "the host's clock around a few calls in a row, from an idle GPU to an idle GPU, per call",
        _wall_loop, (5, 20), (3, 20), 30e3,
    ),
    "wall_least": Figure(
        "wall, least",
        "the host's clock around one call, from an idle device to an idle device, the least of a few in a row",
        _wall_least, (3, 1000), (1, 50), 10e3,
    ),
}  # fmt: skip


class Contest:
    """Rivals measured in turn, so that a drift of the machine meets all of them alike.

    `budget` is in seconds for each rival and figure; the number of repeats is kept within bounds. `before` runs untimed
    before each call of `gpu_evicted` and `wall`. `failures` are the rivals that raised, which are measured no more.
    """

    def __init__(
        self, device: Device, calls: Mapping[str, Call], budget: float, before: Mapping[str, Call] | None = None
    ):
        self._device, self._budget_us = device, budget * 1e6
        self.failures: dict[str, str] = {}
        self._running: dict[str, Timed] = {}
        for name, call in calls.items():
            try:
                self._running[name] = _estimate(device, call, (before or {}).get(name, lambda: None))
            except Exception as error:
                self.failures[name] = describe(error)

    def measure(self, name: str) -> dict[str, Summary]:
        """Take a figure of all rivals, each as often as its budget allows; turns rotate who is first."""
        figure, running = FIGURES[name], self._running
        calls = {rival: clamp(figure.span / timed.longer, *figure.calls) for rival, timed in running.items()}
        costs = {rival: timed.longer * calls[rival] + 100.0 for rival, timed in running.items()}
        counts = {rival: clamp(self._budget_us / cost, *figure.repeats) for rival, cost in costs.items()}
        samples: dict[str, list[float]] = {rival: [] for rival in counts}
        rivals, turns = list(counts), max(counts.values(), default=0)
        for turn in range(turns):
            first = turn % len(rivals)
            for rival in rivals[first:] + rivals[:first]:
                if rival not in running or not is_turn(turn, turns, counts[rival]):
                    continue
                try:
                    samples[rival].append(figure.sample(self._device, running[rival], calls[rival]))
                except Exception as error:
                    self.failures[rival] = describe(error)
                    del running[rival]
        return {rival: summarize(samples[rival]) for rival in running}


def _estimate(device: Device, call: Call, before: Call, repeats: int = 3) -> Timed:
    """Warm a call up, and estimate its time on the host and on the GPU."""
    for _ in range(repeats):
        before()
        call()
    device.synchronize()
    start = device.record()
    began = time.perf_counter()
    for _ in range(repeats):
        before()
        call()
    host = (time.perf_counter() - began) * 1e6 / repeats
    gpu = device.elapsed(start, device.record()) / repeats
    return Timed(call, before, host, max(gpu, host, 0.1))
