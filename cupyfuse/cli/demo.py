"""The demonstration: run the heads fused and in plain NumPy or CuPy, check both against float64, and time them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyfuse.heads as heads
from cupyfuse.heads import oracle
from cupyfuse.heads.plain import plain

from .. import dtypes
from ..api.fuse import Fused, fuse
from ..plan.plan import Plan
from ..plan.report import duration, quantity, report_of_steps
from ..selftest.machine import array_module
from ..selftest.progress import Progress
from ..selftest.report import align_columns

# The tolerance in roundings of the result's dtype: sums in another order differ by some.
ROUNDINGS = 8
# A case is timed until either limit is reached.
_SECONDS, _REPEATS = 2.0, 20
# Written before each timed call on a GPU, to evict the L2 cache.
_EVICTED_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """A head and how it is called; `bound` binds all arguments but the batch, as for serving a trained model."""

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
    """Largest errors of a case against float64, median seconds of a call, and the plan that ran."""

    case: Case
    error_plain: float
    error_fused: float
    tolerance: float
    seconds_plain: float
    seconds_fused: float
    plan: Plan

    @property
    def accurate(self) -> bool:
        """Whether the fused result is as near to float64 as the plain one; False for NaN."""
        return self.error_fused <= self.error_plain + self.tolerance


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
    """Measure the seconds of one call on the host's clock."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class _EventTimer:
    """Measures the seconds of a call between two events on the GPU, after evicting the L2 cache."""

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
    """Run one case fused and plain on the same data, compare both with float64, and time them.

    `inputs` are the arrays of all heads by name, and `y` is the linear map of x in float64.
    """
    arguments = {name: inputs[name] for name in case.head.signature.parameters if name in inputs}

    def own_arguments() -> dict[str, Any]:
        # Training changes the running statistics in place.
        return {**arguments, **{n: arguments[n].copy() for n in arguments if n.startswith("running")}, **case.options}

    plain_arguments, fused_arguments = own_arguments(), own_arguments()
    x = arguments["x"]
    as_written = plain(case.head, xp)
    head = fuse(case.head)  # of its own, so that its last plan is the one of these calls
    fused: Any = head
    if case.bound:
        del fused_arguments["x"]
        fused, fused_arguments = head.bind(**fused_arguments), {"x": x}
    functions: tuple[Callable[[], Any], ...] = (
        lambda: as_written(**plain_arguments),
        lambda: fused(**fused_arguments),
    )
    expected = oracle.evaluate_tail(case.head, y, inputs, case.options.get("training", False), xp)
    # The checked calls also warm up: they compile kernels and compute what depends on bound weights.
    error_plain, error_fused = (
        float(abs(function().astype(xp.float64) - expected.result).max()) for function in functions
    )
    dtype = dtypes.name_of(x.dtype)
    epsilon = 2.0**-8 if dtype == "bfloat16" else float(np.finfo(dtype).eps) / 2
    tolerance = ROUNDINGS * epsilon * expected.error_scale
    seconds_plain, seconds_fused = median_seconds(functions, xp)
    plan = fused.plans[-1]
    return Measurement(case, error_plain, error_fused, tolerance, seconds_plain, seconds_fused, plan)


def run(rows: int, in_features: int, out_features: int, dtype: str, engine: str) -> list[Measurement]:
    """Measure every case on the same data."""
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


def report(results: Sequence[Measurement], xp: Any) -> str:
    """Write the plans that ran, and two tables that compare fused with plain."""
    name = "NumPy" if xp is np else "CuPy"
    measured = [
        ("", "max error", "", "time", "", ""),
        ("head", name, "fused", name, "fused", "speedup"),
    ]
    planned = [
        ("", "calls ->", "bytes", "", "arithmetic", ""),
        ("", "launches", "as written", "fused", "as written", "fused"),
    ]
    for m in results:
        errors = f"{m.error_plain:.2g}", f"{m.error_fused:.2g}"
        times = duration(m.seconds_plain), duration(m.seconds_fused)
        measured.append((m.case.title, *errors, *times, f"{m.seconds_plain / m.seconds_fused:.3g}x"))
        calls, plan = m.plan.calls, m.plan
        launches = f"{len(calls)} -> {plan.launches}"
        moved = quantity(sum(c.reads + c.writes for c in calls), "B"), quantity(plan.reads + plan.writes, "B")
        work = quantity(sum(c.flops for c in calls), "FLOP"), quantity(plan.flops, "FLOP")
        planned.append((m.case.title, launches, *moved, *work))
    plans = [f"{m.case.title}\n{'-' * len(m.case.title)}\n{report_of_steps(m.plan)}" for m in results]
    notes = [
        f"{name}: the same in plain {name}, one operation at a time, 16-bit numbers in float32. Errors are against",
        "float64; times are medians of single calls. In inference weights are bound, and what depends on them alone is",
        "computed before; not in training. Above are the plans that ran; `explain HEAD` also says what was rewritten.",
        *(["Without a GPU NumPy runs their steps, with its own matrix product."] if xp is np else []),
        *_verdict(results),
    ]
    return "\n\n".join([*plans, _table(measured), _table(planned), "\n".join(notes)])


def _verdict(results: Sequence[Measurement]) -> list[str]:
    """Say that all fused results are accurate, or which are not."""
    worse = [
        f"LESS ACCURATE: {m.case.title}: error {m.error_fused:.3g} fused, {m.error_plain:.3g} plain, allowed beyond it "
        f"{m.tolerance:.3g} ({ROUNDINGS} roundings)"
        for m in results
        if not m.accurate
    ]
    return worse or ["Every fused result is as accurate as the plain one."]


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Write rows of cells as a table, of which the first two rows are the heading."""
    lines = align_columns(rows).split("\n")
    lines.insert(2, "-" * max(map(len, lines)))
    return "\n".join(lines)
