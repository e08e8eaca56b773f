"""The plots of a report. Matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import Case, Report, number

_COLORS = {
    "cupyfuse": "tab:green",
    "cupyfuse, bound": "darkgreen",
    "cupyfuse, unfused": "yellowgreen",
    "torch eager": "tab:orange",
    "torch.compile": "tab:red",
    "torch.compile, max-autotune": "darkred",
    "device copy": "0.5",
}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _title(report: Report) -> str:
    versions = ", ".join(f"{k} {report.environment[k]}" for k in ("cupy", "torch") if report.environment.get(k))
    return f"{report.environment['gpu']}, {versions}" if versions else str(report.environment["gpu"])


def heads(report: Report, path: Path, figure: str = "gpu_back_to_back") -> None:
    """A panel a case: a bar for each rival's GPU time, on a logarithmic axis."""
    pyplot = _pyplot()
    cases = [case for case in report.cases if any(figure in r.times for r in case.results)]
    columns = 2
    count = max(1, -(-len(cases) // columns))
    drawing, axes = pyplot.subplots(count, columns, figsize=(13, 3.2 * count), squeeze=False, layout="constrained")
    for panel in axes.flat[len(cases) :]:
        panel.set_visible(False)
    for panel, case in zip(axes.flat, cases, strict=False):
        results = [r for r in case.results if figure in r.times][::-1]
        names = [r.rival for r in results]
        medians = [r.times[figure].median for r in results]
        panel.barh(names, medians, color=[_COLORS.get(name, "tab:blue") for name in names])
        for place, median in enumerate(medians):
            panel.annotate(number(median), (median, place), xytext=(3, 0), textcoords="offset points", va="center")
        panel.set_xscale("log")
        panel.set_xlim(min(medians) / 3, max(medians) * 3)
        panel.set_xlabel("GPU time per call, µs")
        panel.set_title(f"{case.name}\n{' x '.join(map(str, case.shape))} {case.dtype}", fontsize=10)
    drawing.suptitle(_title(report))
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def rows(report: Report, path: Path) -> None:
    """A panel a group: GB/s over the length of the row, a line for each rival."""
    pyplot = _pyplot()
    groups: dict[str, list[Case]] = {}
    for case in report.cases:
        groups.setdefault(case.group, []).append(case)
    columns = 2
    count = max(1, -(-len(groups) // columns))
    drawing, axes = pyplot.subplots(count, columns, figsize=(13, 4 * count), squeeze=False, layout="constrained")
    for panel in axes.flat[len(groups) :]:
        panel.set_visible(False)
    for panel, (group, cases) in zip(axes.flat, groups.items(), strict=False):
        _lines(panel, sorted(cases, key=lambda case: case.shape[1]))
        panel.set_title(group, fontsize=10)
    drawing.suptitle(_title(report))
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def _lines(panel: Any, cases: Sequence[Case]) -> None:
    for name in dict.fromkeys(result.rival for case in cases for result in case.results):
        points = []
        for case in cases:
            result = case.find(name)
            rate = case.rate(result) if result else None
            if rate:
                points.append((case.shape[1], rate))
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=_COLORS.get(name))
    panel.set_xscale("log", base=2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("elements in a row")
    panel.set_ylabel("GB/s")
    panel.grid(alpha=0.3)
    if panel.get_lines():
        panel.legend(fontsize=8)
