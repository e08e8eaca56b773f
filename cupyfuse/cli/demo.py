"""The demonstration: run the heads fused and unfused, check both against float64, and time them."""

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

# Tolerance in roundings of the result's dtype: sums in another order differ by some.
ROUNDINGS = 8
# A case is repeated until either limit is reached.
_SECONDS, _REPEATS = 2.0, 20
# Written before each timed call on a GPU, to evict the L2 cache.
_EVICTED_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """A head and how it is called. `bound` binds everything but the batch, as for serving a trained model."""

    title: str
    head: Fused
    bound: bool = True
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("head_logsumexp", heads.head_logsumexp),
    Case("head_sum", heads.head_sum),
    Case("head_softmax, inference", heads.head_softmax),
    # Weights change in every training step, so binding them gains nothing.
    Case("head_softmax, training", heads.head_softmax, bound=False, options={"training": True}),
)


@dataclass(frozen=True)
class Measurement:
    """Largest errors of a case against float64, median seconds of a call, and its plan."""

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
    """Measure the median seconds of each function, interleaved so that clock drift affects all alike."""
    timer = _seconds_on_host if xp is np else _EventTimer(xp)
    samples: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    for _ in range(_REPEATS):
        for function, seconds in zip(functions, samples, strict=True):
            seconds.append(timer(function))
        if time.perf_counter() - start > _SECONDS:
            break
    return [statistics.median(seconds) for seconds in samples]


def _seconds_on_host(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class _EventTimer:
    """Time a function between two events on the GPU, after evicting the L2 cache."""

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._evicted = cupy.empty(_EVICTED_BYTES, cupy.uint8)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def __call__(self, function: Callable[[], Any]) -> float:
        # The host runs ahead while the GPU writes, so that launch overhead is not measured.
        self._evicted.fill(0)
        self._start.record()
        function()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end)) * 1e-3


def measure(case: Case, xp: Any, inputs: dict[str, Any], y: Any) -> Measurement:
    """Run one case fused and unfused on the same data, compare both with float64, and time them."""
    arguments = {name: inputs[name] for name in case.head.signature.parameters if name in inputs}

    def fresh() -> dict[str, Any]:
        # Training changes these in place.
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
    # The checked calls also warm up: they compile kernels and compute what depends on bound weights.
    errors = [float(abs(function().astype(xp.float64) - expected.result).max()) for function in functions]
    dtype = dtypes.name_of(x.dtype)
    epsilon = 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2
    seconds = median_seconds(functions, xp)
    return Measurement(
        case, errors[0], errors[1], ROUNDINGS * epsilon * expected.error_scale, seconds[0], seconds[1], plan
    )


def run(rows: int, in_features: int, out_features: int, dtype: str, engine: str) -> list[Measurement]:
    """Measure every case on one set of data."""
    xp = array_module(engine)
    with Progress(2 + len(CASES)) as progress:
        progress.stage(f"drawing x {rows} x {in_features} and weight {out_features} x {in_features}, {dtype}")
        # Arguments of head_softmax include those of the other heads.
        drawn = heads.example_inputs(heads.head_softmax, rows, in_features, out_features, dtype)
        inputs = {name: xp.asarray(array) for name, array in drawn.items()}
        progress.stage("computing the linear map in float64, for reference")
        y = oracle.linear(inputs["x"], inputs["weight"], inputs["bias"], xp)
        results = []
        for case in CASES:
            progress.stage(f"running {case.title}")
            results.append(measure(case, xp, inputs, y))
    return results


# Report -------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def report(results: Sequence[Measurement]) -> str:
    """Format the results as two tables, with unfused beside fused columns."""
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
    """Align columns of text; the first two lines are the heading."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.insert(2, "-" * max(map(len, text)))
    return "\n".join(text)
