"""Time on the GPU and on the host: rivals in turn, and statistics of what they took.

Figures that are taken of a call:

- `gpu_evicted`: events around one call, with the L2 cache overwritten just before. What the call costs when its
  arguments come from memory.
- `gpu_back_to_back`: events around many calls in a row, per call. Arguments that fit are in the L2 cache. The calls are
  all queued before the first one starts, so that the GPU never waits for the host: the figure to hold beside a graph's.
- `host`: the host's clock around many calls that it does not wait for, per call.
- `wall`: the host's clock around one call and the wait for its end, the third in a row.
- `gpu_queued`: events around one call that was queued behind a kernel that holds the stream, so that the GPU need not
  wait for the host. Of calls that take the host longer than the longest hold, gaps remain.
- `wall_loop`: the host's clock around a few calls in a row and the wait for their end, per call.

Single launches are also replayed as a CUDA graph (`gpu_graph`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .device import GRAPH_CALLS, Call, Device

_REPLAYS = 5  # replays of a graph between two events
_HOST_CALLS = 20  # calls between two drains of the queue: far fewer launches than it holds (about 1000)


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
    """Order statistics of `samples`, of which there must be one at least; quartiles by linear interpolation."""
    if not samples:
        raise ValueError("samples: expected one at least, got none")
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Summary(len(samples), statistics.median(samples), min(samples), max(samples), quartiles[0], quartiles[2])


def describe(error: BaseException) -> str:
    """An error in one line, for a report."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def due(turn: int, turns: int, count: int) -> bool:
    """Whether one with `count` samples takes part in this turn, so that its samples spread evenly over all `turns`."""
    return turn * count // turns != (turn + 1) * count // turns


def bounded(wanted: float, low: int, high: int) -> int:
    """`wanted` as a whole number between `low` and `high`."""
    return high if not math.isfinite(wanted) else max(low, min(high, int(wanted)))


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Cost:
    """What one call costs, roughly: GPU time (with gaps) and host time, in microseconds."""

    gpu: float
    host: float


class Contest:
    """Rivals that are measured in turn, so that a drift of the machine meets all of them alike.

    Parameters
    ----------
    device : Device
    calls : mapping of str to callable
        What to time, by the rival's name. Each is called a few times first.
    budget : float
        GPU seconds to spend on each rival for each figure; few and many repeats are kept within bounds.
    before : mapping of str to callable, optional
        What to do before each call, by the rival's name. It is not timed, and done for `evicted` and `wall` alone.

    Attributes
    ----------
    failures : dict of str to str
        Rivals that raised, with the error; they take part no more.
    """

    def __init__(
        self, device: Device, calls: Mapping[str, Call], budget: float, before: Mapping[str, Call] | None = None
    ):
        self._device = device
        self._calls = dict(calls)
        self._before = dict(before or {})
        self._budget_us = budget * 1e6
        self.failures: dict[str, str] = {}
        self._costs: dict[str, Cost] = {}
        for name, call in self._calls.items():
            try:
                self._costs[name] = self._estimate(call, self._before.get(name, _nothing))
            except Exception as error:
                self.failures[name] = describe(error)

    def _estimate(self, call: Call, before: Call) -> Cost:
        for _ in range(3):
            before()
            call()
        self._device.synchronize()
        repeats = 3
        start = self._device.record()
        began = time.perf_counter()
        for _ in range(repeats):
            before()
            call()
        host = time.perf_counter() - began
        gpu = self._device.elapsed(start, self._device.record())
        return Cost(max(gpu / repeats, 0.1), host * 1e6 / repeats)

    def _in_turn(self, counts: Mapping[str, int], sample: Callable[[str], float]) -> dict[str, Summary]:
        """Take `counts[name]` samples of each rival, spread over the whole time and starting with another each turn."""
        samples: dict[str, list[float]] = {name: [] for name in counts}
        names = list(counts)
        turns = max(counts.values(), default=0)
        for turn in range(turns):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                if name in self.failures or not due(turn, turns, counts[name]):
                    continue
                try:
                    samples[name].append(sample(name))
                except Exception as error:
                    self.failures[name] = describe(error)
        return {name: summarize(taken) for name, taken in samples.items() if taken and name not in self.failures}

    def _running(self) -> dict[str, Cost]:
        return {name: cost for name, cost in self._costs.items() if name not in self.failures}

    def evicted(self) -> dict[str, Summary]:
        """GPU time of single calls, each after the L2 cache was overwritten."""
        device, costs = self._device, self._running()

        def sample(name: str) -> float:
            call = self._calls[name]
            # The first call after a pause takes the host several times as long as one among many.
            device.hold(4.0 * costs[name].host + 300.0)
            self._before.get(name, _nothing)()
            device.evict()
            start = device.record()
            call()
            return device.elapsed(start, device.record())

        return self._in_turn({n: bounded(self._budget_us / (c.gpu + 100.0), 7, 50) for n, c in costs.items()}, sample)

    def back_to_back(self) -> dict[str, Summary]:
        """GPU time per call of many queued calls."""
        device, costs = self._device, self._running()
        calls = {name: bounded(20e3 / cost.gpu, 5, 50) for name, cost in costs.items()}

        def sample(name: str) -> float:
            call, repeats = self._calls[name], range(calls[name])
            device.hold(1.5 * costs[name].host * calls[name] + 50.0)
            start = device.record()
            for _ in repeats:
                call()
            return device.elapsed(start, device.record()) / calls[name]

        counts = {name: bounded(self._budget_us / (cost.gpu * calls[name]), 5, 20) for name, cost in costs.items()}
        return self._in_turn(counts, sample)

    def host(self) -> dict[str, Summary]:
        """Host time per call of calls that nobody waits for."""
        device, costs = self._device, self._running()

        def sample(name: str) -> float:
            call = self._calls[name]
            device.synchronize()
            began = time.perf_counter()
            for _ in range(_HOST_CALLS):
                call()
            spent = time.perf_counter() - began
            device.synchronize()
            return spent * 1e6 / _HOST_CALLS

        counts = {name: bounded(self._budget_us / (cost.gpu * _HOST_CALLS), 5, 20) for name, cost in costs.items()}
        gc.collect()
        gc.disable()
        try:
            return self._in_turn(counts, sample)
        finally:
            gc.enable()

    def wall(self) -> dict[str, Summary]:
        """Host time of single calls, each from an idle GPU to an idle GPU, after two that find caches cold."""
        device, costs = self._device, self._running()

        def sample(name: str) -> float:
            call = self._calls[name]
            taken = 0.0
            for _ in range(3):
                self._before.get(name, _nothing)()
                device.synchronize()
                began = time.perf_counter()
                call()
                device.synchronize()
                taken = time.perf_counter() - began
            return taken * 1e6

        return self._in_turn({n: bounded(self._budget_us / (c.gpu + 100.0), 7, 50) for n, c in costs.items()}, sample)

    def queued(self) -> dict[str, Summary]:
        """GPU time of single calls that are queued before the first of their kernels starts."""
        device, costs = self._device, self._running()

        def sample(name: str) -> float:
            device.hold(1.5 * costs[name].host + 300.0)
            start = device.record()
            self._calls[name]()
            return device.elapsed(start, device.record())

        counts = {n: bounded(self._budget_us / (max(c.gpu, c.host) + 100.0), 5, 30) for n, c in costs.items()}
        return self._in_turn(counts, sample)

    def wall_loop(self) -> dict[str, Summary]:
        """Host time per call of a few calls in a row, from an idle GPU to an idle GPU."""
        device = self._device
        taken = {name: max(cost.gpu, cost.host) for name, cost in self._running().items()}
        calls = {name: bounded(30e3 / t, 3, 20) for name, t in taken.items()}

        def sample(name: str) -> float:
            device.synchronize()
            began = time.perf_counter()
            for _ in range(calls[name]):
                self._calls[name]()
            device.synchronize()
            return (time.perf_counter() - began) * 1e6 / calls[name]

        return self._in_turn(
            {n: bounded(self._budget_us / (t * calls[n] + 100.0), 5, 20) for n, t in taken.items()}, sample
        )

    def replayed(self, replays: Mapping[str, Call]) -> tuple[dict[str, Summary], dict[str, str]]:
        """GPU time per call of replayed graphs, and the errors of those that failed; others stay in the contest."""
        device = self._device
        inner = Contest(device, replays, self._budget_us / 1e6)

        def sample(name: str) -> float:
            device.hold(200.0)
            start = device.record()
            for _ in range(_REPLAYS):
                replays[name]()
            return device.elapsed(start, device.record()) / (_REPLAYS * GRAPH_CALLS)

        return inner._in_turn(dict.fromkeys(inner._running(), 20), sample), inner.failures
