"""The demonstration: the reference heads on this machine, fused and unfused, checked against float64 and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyfuse.heads as heads
from cupyfuse.heads import oracle

from .. import dtypes
from ..api.fuse import Fused
from ..plan.plan import Plan
from ..plan.report import quantity
from ..selftest.machine import array_module
from ..selftest.progress import Progress

# Accuracy is judged in roundings of the result's own dtype: two correct evaluations in another order differ by some.
ROUNDINGS = 8
# Repeated until this many seconds or calls have gone by, whichever comes first; medians are reported.
_SECONDS, _REPEATS = 2.0, 20
# Written between two timings on a GPU, so that no call finds its arguments in the second-level cache.
_EVICTED_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """One head in one way of use. `bound` fixes everything but the batch, as serving a trained model does."""

    title: str
    head: Fused
    bound: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("head_logsumexp", heads.head_logsumexp),
    Case("head_sum", heads.head_sum),
    Case("head_softmax, inference", heads.head_softmax),
    # Weights change with every step of training, so nothing is gained by binding them.
    Case("head_softmax, training", heads.head_softmax, bound=False, options={"training": True}),
)


@dataclass(frozen=True)
class Measured:
    """What one case came to: largest errors against float64, median seconds of one call, and its plan."""

    case: Case
    error_unfused: float
    error_fused: float
    tolerance: float
    seconds_unfused: float
    seconds_fused: float
    plan: Plan

    @property
    def accurate(self) -> bool:
        """Whether the fused result is as near to float64 as the unfused one; False for NaN."""
        return self.error_fused <= self.error_unfused + self.tolerance


# Measuring ----------------------------------------------------------------------------------------------------------


def median_seconds(functions: Sequence[Callable[[], Any]], xp: Any) -> list[float]:
    """Median time of one call of each function, taken in turn so that a drift of the clock meets all alike."""
    timed = _seconds_on_host if xp is np else _EventTimer(xp)
    times: list[list[float]] = [[] for _ in functions]
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        for function, taken in zip(functions, times, strict=True):
            taken.append(timed(function))
        if time.perf_counter() - begun > _SECONDS:
            break
    return [statistics.median(taken) for taken in times]


def _seconds_on_host(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class _EventTimer:
    """Seconds between two events on the GPU, the cache evicted before the first."""

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._evicting = cupy.empty(_EVICTED_BYTES, cupy.uint8)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def __call__(self, function: Callable[[], Any]) -> float:
        # While the GPU writes, the host runs ahead: the time then is the GPU's, not that of the launches.
        self._evicting.fill(0)
        self._start.record()
        function()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end)) * 1e-3


def measure(case: Case, xp: Any, inputs: dict[str, Any], y: Any) -> Measured:
    """Run one case fused and unfused on the same data, compare both with float64, and time them."""
    arguments = {name: inputs[name] for name in case.head.signature.parameters if name in inputs}

    def fresh() -> dict[str, Any]:
        # Training changes these in place; each run starts from the same ones.
        return {**arguments, **{n: arguments[n].copy() for n in arguments if n.startswith("running")}, **case.options}

    unfused, fused = fresh(), fresh()
    x = arguments["x"]
    if case.bound:
        fixed = {name: value for name, value in fused.items() if name != "x"}
        bound = case.head.bind(**fixed)
        plan = bound.plan(x)
        functions: tuple[Callable[[], Any], ...] = (lambda: case.head.__wrapped__(**unfused), lambda: bound(x))
    else:
        plan = case.head.plan(**fused)
        functions = (lambda: case.head.__wrapped__(**unfused), lambda: case.head(**fused))
    expected = oracle.evaluate_tail(case.head, y, inputs, case.options.get("training", False), xp)
    # The calls that are checked also warm up: kernels are compiled, bound weights prepared.
    errors = [float(abs(function().astype(xp.float64) - expected.result).max()) for function in functions]
    dtype = dtypes.name_of(x.dtype)
    epsilon = 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2
    seconds = median_seconds(functions, xp)
    return Measured(
        case, errors[0], errors[1], ROUNDINGS * epsilon * expected.error_scale, seconds[0], seconds[1], plan
    )


def run(rows: int, in_features: int, out_features: int, dtype: str, engine: str) -> list[Measured]:
    """Measure every case on one set of data."""
    xp = array_module(engine)
    with Progress(2 + len(CASES)) as progress:
        progress.stage(f"drawing x {rows} x {in_features} and weight {out_features} x {in_features}, {dtype}")
        # The one head that takes all the others' arguments too: their data are the same.
        drawn = heads.example_inputs(heads.head_softmax, rows, in_features, out_features, dtype)
        inputs = {name: xp.asarray(array) for name, array in drawn.items()}
        progress.stage("computing the linear map in float64, for reference")
        y = oracle.linear(inputs["x"], inputs["weight"], inputs["bias"], xp)
        results = []
        for case in CASES:
            progress.stage(f"running {case.title}")
            results.append(measure(case, xp, inputs, y))
    return results


# Telling ------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def report(results: Sequence[Measured]) -> str:
    """The results as two tables, unfused beside fused in every pair of columns."""
    measured = [("", "max error", "", "time", "", ""), ("head", *("unfused", "fused") * 2, "speedup")]
    planned = [("", "calls ->", "bytes", "", "arithmetic", ""), ("", "launches", *("unfused", "fused") * 2)]
    for m in results:
        errors = f"{m.error_unfused:.2g}", f"{m.error_fused:.2g}"
        times = duration(m.seconds_unfused), duration(m.seconds_fused)
        measured.append((m.case.title, *errors, *times, f"{m.seconds_unfused / m.seconds_fused:.3g}x"))
        calls, plan = m.plan.calls, m.plan
        launches = f"{len(calls)} -> {plan.launches}"
        moved = quantity(sum(c.reads + c.writes for c in calls), "B"), quantity(plan.reads + plan.writes, "B")
        work = quantity(sum(c.flops for c in calls), "FLOP"), quantity(plan.flops, "FLOP")
        planned.append((m.case.title, launches, *moved, *work))
    return f"{_aligned(measured)}\n\n{_aligned(planned)}"


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Columns of text; the first two lines are the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(2, "-" * max(map(len, text)))
    return "\n".join(text)
