"""Results and their report: the data of a case, JSON, Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .device import GRAPH_CALLS
from .timing import Summary

FIGURES = {
    "gpu_evicted": "GPU, L2 evicted",
    "gpu_back_to_back": "GPU, back to back",
    "gpu_graph": "GPU, graph",
    "host": "host",
    "wall": "wall",
    "gpu_queued": "GPU, queued",
    "wall_loop": "wall, loop",
}
OUT_OF_TIME = "out of time"  # why a rival took no part, where that is nobody's fault
HOW_TIMED = """\
Medians in microseconds; the JSON file beside this one has the quartiles, extremes and counts. Rivals took turns within
one run.

- *GPU, L2 evicted*: events around one call, the L2 cache overwritten before it.
- *GPU, back to back*: events around many queued calls, per call; arguments that fit lie in the L2 cache.
"""
_HOW = f"""\
{HOW_TIMED}\
- *GPU, graph*: a replayed graph of {GRAPH_CALLS} calls, per call.
- *host*: the host's clock around calls that it does not wait for, per call.
- *error*: ‖result − reference‖ / ‖reference‖ against float64, the worst of a case's results.
- *cupyfuse, bound* had its weights prepared once by `bind`; *cupyfuse, unfused* is `head.__wrapped__`, the same
  functions called one after the other; *CuPy* are CuPy's own operations.
"""
_HOW_ROWS = """\
GB/s, by medians of GPU time, the L2 cache overwritten before each call; the JSON file beside this one has the times.
Softmax counts bytes read and written, logsumexp bytes read; the copy reads and writes half of that each.
*error*: cupyfuse's ‖result − reference‖ / ‖reference‖ against float64. Rivals took turns within one run.
"""


@dataclass
class Result:
    """What one rival did in one case.

    Attributes
    ----------
    rival : str
    error : float or None
        Relative error against float64, by norms; None where nothing was compared.
    times : dict of str to Summary
        By figure: "gpu_evicted", "gpu_back_to_back", "gpu_graph", "host", "wall".
    failure : str
        Why the rival took no part, or no part any more; empty where it did.
    missing : dict of str to str
        Figures that could not be taken, with the reason.
    max_error : float or None
        The largest error of an element, relative to what the case calls its size; None where that is not taken.
    """

    rival: str
    error: float | None = None
    times: dict[str, Summary] = field(default_factory=dict)
    failure: str = ""
    missing: dict[str, str] = field(default_factory=dict)
    max_error: float | None = None

    def median(self, figure: str) -> float | None:
        return self.times[figure].median if figure in self.times else None


@dataclass
class Case:
    """One thing computed by several rivals.

    Attributes
    ----------
    group, name : str
        Headings in the report.
    shape : tuple of int
        What it means is the benchmark's matter.
    dtype : str
    moved : int
        Bytes that the case must read and write at least; 0 where arithmetic is what takes the time.
    facts : dict of str to float
        What is known of the data, by name.
    """

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    moved: int = 0
    results: list[Result] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)

    def find(self, rival: str) -> Result | None:
        return next((r for r in self.results if r.rival == rival), None)

    def rate(self, result: Result, figure: str = "gpu_evicted") -> float | None:
        """GB/s: the bytes that must move over the median time."""
        median = result.median(figure)
        return self.moved / median / 1e3 if self.moved and median else None


@dataclass
class Report:
    """All cases of one run of one benchmark, with what it ran on."""

    benchmark: str
    environment: dict[str, Any]
    options: dict[str, Any]
    stopped: str = ""  # the error that ended the run before its last case
    cases: list[Case] = field(default_factory=list)

    def failed(self) -> list[str]:
        """Where cupyfuse itself failed or was wrong."""
        return [
            f"{case.group}, {case.name}: {result.rival}: {result.failure}"
            for case in self.cases
            for result in case.results
            if result.failure not in ("", OUT_OF_TIME) and result.rival.startswith("cupyfuse")
        ]

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def number(value: float | None) -> str:
    """Three or four digits: enough for a ratio, few enough to read."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def scientific(value: float | None) -> str:
    """An error, to two digits."""
    return "–" if value is None else f"{value:.1e}"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return [*lines, *("| " + " | ".join(escape(cell) for cell in row) + " |" for row in rows)]


def heading(report: Report) -> list[str]:
    """Title, machine, versions and options."""
    known = {key: value for key, value in report.environment.items() if key != "gpu"}
    lines = [f"# Benchmark `{report.benchmark}` on {report.environment['gpu']}", ""]
    lines += [", ".join(f"{key} {value or 'not installed or not known'}" for key, value in known.items()) + ".", ""]
    lines += ["Options: " + ", ".join(f"{key} {value}" for key, value in report.options.items()) + ".", ""]
    return [*lines, *([f"**Stopped early:** {report.stopped}", ""] if report.stopped else [])]


def heads_markdown(report: Report, base: str) -> str:
    """One table a case: rivals down, figures across, and how many times faster than `base` each is."""
    lines = [*heading(report), *_HOW.splitlines(), ""]
    group = ""
    for case in report.cases:
        if case.group != group:
            group = case.group
            lines += [f"## {group}", ""]
        moved = f", {case.moved / 1e6:.1f} MB to move" if case.moved else ""
        lines += [f"### {case.name}", "", f"{' x '.join(map(str, case.shape))} {case.dtype}{moved}", ""]
        lines += case_table(case, base)
    return "\n".join(lines).rstrip() + "\n"


def case_table(case: Case, base: str, compared: str = "gpu_back_to_back") -> list[str]:
    """Rivals down, errors and figures across, and `compared` beside that of `base`; then what failed, and why."""
    figures = [f for f in FIGURES if any(f in r.times or f in r.missing for r in case.results)]
    reference = case.find(base)
    against = reference.median(compared) if reference else None
    elementwise = any(r.max_error is not None for r in case.results)
    header = ["", "error", *(["max error"] if elementwise else []), *(FIGURES[f] for f in figures)]
    header += ["GB/s, L2 evicted"] if case.moved else []
    header += [f"× {base}, {FIGURES[compared].removeprefix('GPU, ')}"] if against else []
    rows, notes = [], []
    for result in case.results:
        row = [result.rival, scientific(result.error), *([scientific(result.max_error)] if elementwise else [])]
        row += [number(result.median(f)) for f in figures]
        row += [number(case.rate(result))] if case.moved else []
        mine = result.median(compared)
        row += [number(against / mine) if mine else "–"] if against else []
        rows.append(row)
        notes += [f"- {result.rival}: {result.failure}"] if result.failure else []
        notes += [f"- {result.rival}, {FIGURES[f]}: {reason}" for f, reason in result.missing.items()]
    return [*table(header, rows), "", *notes, *([""] if notes else [])]


def rows_markdown(report: Report) -> str:
    """One table a group: row lengths down, rivals across, in GB/s; failures as numbered notes."""
    lines = [*heading(report)]
    lines += [*_HOW_ROWS.splitlines(), ""]
    for group in dict.fromkeys(case.group for case in report.cases):
        lines += [f"## {group}", "", *_group_table([case for case in report.cases if case.group == group])]
    return "\n".join(lines).rstrip() + "\n"


def across(cases: Sequence[Case], cell: Callable[[Case, Result], str], notes: list[str]) -> dict[str, list[str]]:
    """The column of each rival over some cases; failures are marks, and their texts go to `notes`."""
    columns: dict[str, list[str]] = {result.rival: [] for case in cases for result in case.results}
    for case in cases:
        for name, column in columns.items():
            result = case.find(name)
            failure = result.failure if result else "not run"
            if failure and failure not in notes:
                notes.append(failure)
            mark = f"[{notes.index(failure) + 1}]" if failure else ""
            text = cell(case, result) if result else ""
            column.append(" ".join(part for part in (text, mark) if part) or "–")
    return columns


def numbered(notes: Sequence[str]) -> list[str]:
    return [*(f"{i}. {note}" for i, note in enumerate(notes, 1)), *([""] if notes else [])]


def _group_table(cases: Sequence[Case]) -> list[str]:
    def rate(case: Case, result: Result) -> str:
        found = case.rate(result)
        return number(found) if found else ""

    notes: list[str] = []
    columns = across(cases, rate, notes)
    errors = [next((r.error for r in case.results if r.rival == "cupyfuse"), None) for case in cases]
    rows = zip((f"{case.shape[1]}" for case in cases), *columns.values(), map(scientific, errors), strict=True)
    return [*table(["columns", *columns, "error"], rows), "", *numbered(notes)]
