"""The report of the cost model: predicted beside measured times, and what wrong decisions cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .report import Case, Report, heading, number, table

OURS, EAGER, INDUCTOR = "cupyfuse", "PyTorch eager", "Inductor"
NOTHING = "a compiled function that computes nothing"
FIGURE, HOST = "gpu_back_to_back", "host"
# Facts of a case: what the model says, in microseconds.
PREDICTED = (
    "predicted: our GPU time",
    "predicted: our host time",
    "predicted: their GPU time",
    "predicted: their host",
)
NAMES = ("our GPU", "our host", "their GPU", "their host")

_HOW = """\
Medians in microseconds of one call, in training forward and backward. *GPU*: events around many queued calls, per call.
*host*: the host's clock around calls that it does not wait for; of Inductor, less that of a compiled function of the
same inputs that computes nothing. *lost*: by the decision, where the longer of GPU and host is waited for.
"""


@dataclass(frozen=True)
class Comparison:
    """A case as the model has it and as it was measured, in microseconds: our GPU, our host, their GPU, their host."""

    case: Case
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def chosen(self) -> bool:
        """Whether the model runs the chain through this library."""
        return _gains(self.predicted)

    @property
    def right(self) -> bool:
        return self.chosen == _gains(self.measured)

    @property
    def lost(self) -> float:
        """Microseconds that the decision costs where whatever takes longer, GPU or host, is waited for."""
        ours, theirs = max(self.measured[:2]), max(self.measured[2:])
        return (ours if self.chosen else theirs) - min(ours, theirs)

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(p / m if m > 0 else math.nan for p, m in zip(self.predicted, self.measured, strict=True))


def _gains(times: tuple[float, ...]) -> bool:
    """The rule of `cupyfuse.torch.cost` for times in microseconds."""
    from cupyfuse.torch.cost.estimate import Estimate, Time

    a, b, c, d = (t * 1e-6 for t in times)
    return Estimate(Time(a, b), Time(c, d)).gains()


def comparisons(report: Report) -> Iterator[Comparison]:
    """The cases that were measured and estimated."""
    for case in report.cases:
        theirs = case.find(INDUCTOR) or case.find(EAGER)
        ours, nothing = case.find(OURS), case.find(NOTHING)
        if ours is None or theirs is None or set(PREDICTED) - set(case.facts):
            continue
        found = [r.median(f) for r in (ours, theirs) for f in (FIGURE, HOST)]
        if any(f is None for f in found):
            continue
        measured = [float(f) for f in found if f is not None]
        if nothing is not None:
            measured[3] = max(measured[3] - (nothing.median(HOST) or 0.0), 0.1)
        yield Comparison(case, tuple(case.facts[name] for name in PREDICTED), tuple(measured))


def costs_markdown(report: Report) -> str:
    found = list(comparisons(report))
    wrong = [c for c in found if not c.right]
    lines = [*heading(report)]
    lines += [
        f"{len(found)} of {len(report.cases)} cases were measured and estimated. The model decides as the measurements "
        f"do in {len(found) - len(wrong)} of them; what it chooses takes "
        f"{sum(c.lost for c in found):.0f} us longer than the best choices, which take "
        f"{sum(min(max(c.measured[:2]), max(c.measured[2:])) for c in found):.0f} us in all.",
        "",
        *_HOW.splitlines(),
        "",
        "## Predicted over measured",
        "",
        *table(["", *NAMES], _spread(found)),
        "",
    ]
    if wrong:
        rows = [(*_named(c.case), _decision(c), *map(number, c.measured), number(c.lost)) for c in wrong]
        lines += ["## Wrong decisions", "", *table(["", "", "model", *NAMES, "lost"], rows), ""]
    for group in dict.fromkeys(c.case.group for c in found):
        lines += [f"## {group}", ""]
        header = ["", "model", "right", *(f"{n}, of model" for n in NAMES), *NAMES]
        rows = [
            (_named(c.case)[1], _decision(c), "yes" if c.right else "no", *map(number, (*c.predicted, *c.measured)))
            for c in found
            if c.case.group == group
        ]
        lines += [*table(header, rows), ""]
    failed = [(case, result) for case in report.cases for result in case.results if result.failure]
    failures = [f"- {', '.join(_named(case))}: {result.rival}: {result.failure}" for case, result in failed]
    lines += ["## What failed", "", *failures, ""] if failures else []
    return "\n".join(lines).rstrip() + "\n"


def _spread(found: list[Comparison]) -> list[tuple[str, ...]]:
    """Quantiles of the ratios of predicted to measured times."""
    rows = []
    for group in ("", *dict.fromkeys(c.case.group for c in found)):
        columns = [[c.ratios[k] for c in found if group in ("", c.case.group)] for k in range(4)]
        rows.append((group or "all: lowest, median, highest", *(_low_median_high(column) for column in columns)))
    return rows


def _low_median_high(values: list[float]) -> str:
    kept = sorted(v for v in values if math.isfinite(v))
    return " / ".join(map(number, (kept[0], statistics.median(kept), kept[-1]))) if kept else "–"


def _named(case: Case) -> tuple[str, str]:
    return case.group, f"{case.name} {' x '.join(map(str, case.shape))} {case.dtype}"


def _decision(comparison: Comparison) -> str:
    return "fused" if comparison.chosen else "left"


def no_chart(report: Any, path: Path) -> None:
    """These results have no picture."""
