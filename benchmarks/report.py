"""Results of a benchmark as data, their JSON, and the one writer of Markdown tables."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .timing import Summary

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
}
OUT_OF_TIME = "out of time"  # why a rival took no part; not a failure


@dataclass
class Result:
    """What one rival did in one case."""

    rival: str
    error: float | None = None  # ||result - reference|| / ||reference|| against float64
    times: dict[str, Summary] = field(default_factory=dict)  # by figure
    failure: str = ""  # why the rival took no part, or no part any more
    missing: dict[str, str] = field(default_factory=dict)  # figures that could not be taken, with the reason
    max_error: float | None = None  # the largest error of an element, relative to its size in the case


@dataclass
class Case:
    """One thing computed by several rivals; group and name are headings in the report."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    moved: int = 0  # bytes that the case must read and write at least; 0 where arithmetic takes the time
    results: list[Result] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # of the data by name, of a rival by "name, rival"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """Rebuild a case from a report's JSON."""
        results = [
            Result(**{**result, "times": {figure: Summary(**times) for figure, times in result["times"].items()}})
            for result in fields["results"]
        ]
        return cls(**{**fields, "shape": tuple(fields["shape"]), "results": results})

    def find(self, rival: str) -> Result | None:
        return next((r for r in self.results if r.rival == rival), None)

    def value(self, rival: str, what: str) -> float | None:
        """Return a rival's "error", "max_error", "GB/s", or median of a figure; None where it failed or has none."""
        result = self.find(rival)
        if result is None or result.failure:
            return None
        if what in ("error", "max_error"):
            return result.error if what == "error" else result.max_error
        if what == "GB/s":
            time = self.value(rival, "gpu_evicted")
            return self.moved / time / 1e3 if self.moved and time else None
        return result.times[what].median if what in result.times else None

    @property
    def unmeasured(self) -> bool:
        """Whether there was no time for any rival."""
        return all(result.failure == OUT_OF_TIME for result in self.results)


@dataclass
class Report:
    """All cases of one run of one benchmark, with what it ran on."""

    benchmark: str
    environment: dict[str, Any]
    options: dict[str, Any]
    stopped: str = ""  # the error that ended the run before its last case
    cases: list[Case] = field(default_factory=list)

    def failed(self) -> list[str]:
        """List where cupyfuse itself failed or was wrong."""
        return [
            f"{case.group}, {case.name}: {result.rival}: {result.failure}"
            for case in self.cases
            for result in case.results
            if result.failure not in ("", OUT_OF_TIME) and result.rival.startswith("cupyfuse")
        ]

    def groups(self) -> dict[str, list[Case]]:
        """Return the cases by group, in the order in which the groups came."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.group, []).append(case)
        return found

    def write_json(self, path: Path) -> None:
        write_json(path, dataclasses.asdict(self))


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: an aborted run leaves the old file or the new one."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def merge(cases: Iterable[Case]) -> list[Case]:
    """Keep one case of each group and name, the last that was measured, where the first stood; order by group."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases:
        key = case.group, case.name
        if key not in found or not case.unmeasured:
            found[key] = case
    groups = list(dict.fromkeys(group for group, _ in found))
    return sorted(found.values(), key=lambda case: groups.index(case.group))


# Markdown -----------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Format a time or ratio, with three or four digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def scientific(value: float | None) -> str:
    """Format an error, to two digits."""
    return "–" if value is None else f"{value:.1e}"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cell: Callable[[Any], Any]  # returns the value of a row: text, a number, or None
    form: Callable[[float | None], str] = number  # formats numbers
    rival: bool = False  # whether its numbers compete with those of the other such columns


def table(columns: Sequence[Column], rows: Iterable[Any], best: Callable[..., float] | None = None) -> list[str]:
    """Write a Markdown table, the first column text, the others figures; `best` (min, max) of rivals in bold."""
    lines = ["| " + " | ".join(c.title for c in columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for row in rows:
        values = [column.cell(row) for column in columns]
        rivals = [v for c, v in zip(columns, values, strict=True) if c.rival and isinstance(v, (int, float))]
        winner = best(rivals) if best and len(rivals) > 1 else None
        cells = []
        for column, value in zip(columns, values, strict=True):
            text = value if isinstance(value, str) else column.form(value)
            text = text.replace("|", "\\|").replace("\n", " ")
            cells.append(f"**{text}**" if column.rival and winner is not None and value == winner else text)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def rival_columns(
    cases: Sequence[Case], what: str, notes: list[str], form: Callable[[float | None], str] = number
) -> list[Column]:
    """Return a column for each rival of some cases; failures are marks whose texts go to `notes`."""

    def column(rival: str) -> Column:
        def cell(case: Case) -> Any:
            result = case.find(rival)
            failure = result.failure if result else "not run"
            if not failure:
                return case.value(rival, what)
            if failure not in notes:
                notes.append(failure)
            return f"[{notes.index(failure) + 1}]"

        return Column(rival, cell, form, rival != "device copy")

    return [column(rival) for rival in dict.fromkeys(r.rival for case in cases for r in case.results)]


def list_notes(notes: Sequence[str]) -> list[str]:
    """List the failures that the marks of `rival_columns` stand for, once the tables are written."""
    return [*(f"{i}. {note}" for i, note in enumerate(notes, 1)), *([""] if notes else [])]


def ratio(a: float | None, b: float | None) -> float | None:
    """Divide, where both are known."""
    if a is None or b is None:
        return None
    return a / b if b else 1.0 if a == 0 else float("inf")


def case_table(case: Case, base: str, compared: Sequence[str], milliseconds: bool = False) -> list[str]:
    """Write a case: a row a rival, with errors, figures, ratios to `base` and facts; then what failed, and why."""
    figures = [f for f in FIGURES if any(f in r.times or f in r.missing for r in case.results)]
    scale, unit = (1e-3, ", ms") if milliseconds else (1.0, "")

    def value(what: str, factor: float = 1.0) -> Callable[[Result], float | None]:
        def cell(result: Result) -> float | None:
            found = case.value(result.rival, what)
            return None if found is None else found * factor

        return cell

    def faster(what: str) -> Callable[[Result], float | None]:
        return lambda result: ratio(case.value(base, what), case.value(result.rival, what))

    def fact(name: str) -> Callable[[Result], float | None]:
        return lambda result: case.facts.get(f"{name}, {result.rival}")

    columns = [Column("", lambda result: result.rival), Column("error", lambda result: result.error, scientific)]
    if any(r.max_error is not None for r in case.results):
        columns.append(Column("max error", lambda result: result.max_error, scientific))
    columns += [Column(FIGURES[f][0] + unit, value(f, scale)) for f in figures]
    columns += [Column("GB/s, L2 evicted", value("GB/s"))] if case.moved else []
    for what in compared if case.find(base) else ():
        columns.append(Column(f"× {base}, {FIGURES[what][0].removeprefix('GPU, ')}", faster(what)))
    of_rivals = dict.fromkeys(name.partition(", ")[0] for name in case.facts if ", " in name)
    columns += [Column(name, fact(name)) for name in of_rivals]
    notes = [f"- {r.rival}: {r.failure}" for r in case.results if r.failure]
    notes += [f"- {r.rival}, {FIGURES[f][0]}: {reason}" for r in case.results for f, reason in r.missing.items()]
    return [*table(columns, case.results), *notes, *([""] if notes else [])]


def case_heading(case: Case) -> list[str]:
    moved = f", {case.moved / 1e6:.1f} MB to move" if case.moved else ""
    return [f"### {case.name}", "", f"{' x '.join(map(str, case.shape))} {case.dtype}{moved}", ""]


def heading(report: Report) -> list[str]:
    """Write title, machine, versions and options."""
    known = {key: value for key, value in report.environment.items() if key != "gpu"}
    lines = [f"# Benchmark `{report.benchmark}` on {report.environment['gpu']}", ""]
    lines += [", ".join(f"{key} {value or 'not installed or not known'}" for key, value in known.items()) + ".", ""]
    lines += ["Options: " + ", ".join(f"{key} {value}" for key, value in report.options.items()) + ".", ""]
    return [*lines, *([f"**Stopped early:** {report.stopped}", ""] if report.stopped else [])]
