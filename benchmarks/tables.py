"""The Markdown of a report: its heading, how it was measured, tables of cases, what was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .report import Case, Report, Requirement, Result, check, ratio
from .timing import FIGURES

ERROR = "- *error*: ‖result − reference‖ / ‖reference‖ against float64"
Form = Callable[[Any], str]


def number(value: float | None) -> str:
    """Format a time or ratio with three or four digits, what is tiny with two, a count with all."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return str(value)
    if 0 < value < 0.005:
        return scientific(value)
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def scientific(value: float | None) -> str:
    """Format an error, to two digits."""
    return "–" if value is None else f"{value:.1e}"


def yes_or_no(holds: bool | None) -> str:
    return "not measured" if holds is None else "yes" if holds else "no"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cell: Callable[[Any], Any]  # returns the value of a row: text, a number, or None
    form: Form = number  # formats numbers
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


def rival_columns(cases: Sequence[Case], what: str, notes: list[str], form: Form = number) -> list[Column]:
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


def case_table(case: Case, base: str, compared: Sequence[str] = (), milliseconds: bool = False) -> list[str]:
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
    columns += [Column(FIGURES[f].title + unit, value(f, scale)) for f in figures]
    columns += [Column("GB/s, L2 evicted", value("GB/s"))] if case.bytes_moved else []
    for what in compared if case.find(base) else ():
        columns.append(Column(f"× {base}, {FIGURES[what].title.removeprefix('GPU, ')}", faster(what)))
    of_rivals = dict.fromkeys(name.partition(", ")[0] for name in case.facts if ", " in name)
    columns += [Column(name, fact(name)) for name in of_rivals]
    notes = [f"- {r.rival}: {r.failure}" for r in case.results if r.failure]
    notes += [f"- {r.rival}, {FIGURES[f].title}: {reason}" for r in case.results for f, reason in r.missing.items()]
    return [*table(columns, case.results), *notes, *([""] if notes else [])]


def case_tables(
    report: Report,
    base: str,
    compared: Sequence[str] = (),
    about: Mapping[str, str] | None = None,
    milliseconds: bool = False,
) -> list[str]:
    """Write a table a case, by group; `about` says what a group is."""
    lines = []
    for group, cases in report.groups().items():
        lines += [f"## {group}", "", *([about[group], ""] if about else [])]
        for case in cases:
            moved = f", {case.bytes_moved / 1e6:.1f} MB to move" if case.bytes_moved else ""
            lines += [f"### {case.name}", "", f"{case.size} {case.dtype}{moved}", ""]
            lines += case_table(case, base, compared, milliseconds)
    return lines


def findings_table(requirements: Iterable[Requirement], cases: list[Case]) -> list[str]:
    """Write what was asked beside what was found, case by case."""
    findings = sorted(check(requirements, cases), key=lambda f: cases.index(f.case))
    rivals = dict.fromkeys(rival for finding in findings for rival in finding.found)
    beside = [Column(rival, lambda f, rival=rival: f.found.get(rival, "")) for rival in rivals]
    columns = [Column("", lambda f: f.title), Column("asked", lambda f: f.asked), *beside]
    columns.append(Column("holds", lambda f: yes_or_no(f.holds)))
    return ["## What was asked", "", *table(columns, findings), "## How it was measured", ""]


def explain(figures: Iterable[str], text: str, unit: str = "microseconds") -> list[str]:
    """Explain a report: its unit, its figures, then the rest."""
    intro = f"Medians in {unit}; the JSON file beside this one has the quartiles, extremes and counts."
    explained = [f"- *{FIGURES[f].title}*: {FIGURES[f].meaning}." for f in figures]
    return [f"{intro} Rivals took turns within one run.", "", *explained, *text.splitlines(), ""]


def heading(report: Report) -> list[str]:
    """Write title, machine, versions and options."""
    known = {key: value for key, value in report.environment.items() if key != "gpu"}
    lines = [f"# Benchmark `{report.benchmark}` on {report.environment['gpu']}", ""]
    lines += [", ".join(f"{key} {value or 'not installed or not known'}" for key, value in known.items()) + ".", ""]
    lines += ["Options: " + ", ".join(f"{key} {value}" for key, value in report.options.items()) + ".", ""]
    return [*lines, *([f"**Stopped early:** {report.stopped}", ""] if report.stopped else [])]


Body = Callable[[Report], list[str]]  # writes what follows a report's heading


def markdown(report: Report, body: Body) -> str:
    return "\n".join([*heading(report), *body(report)]).rstrip() + "\n"


def write(report: Report, body: Body, folder: Path, name: str) -> str:
    """Write JSON and Markdown; return the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / f"{name}.json")
    text = markdown(report, body)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text
