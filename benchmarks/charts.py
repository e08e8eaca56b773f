"""The plots of a report. Matplotlib is imported only here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .families import FAMILIES
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


# Of a matrix product: a colour for the precision, a mark for the library.
_PRECISION_COLORS = {
    "highest": "tab:green",
    "ieee": "tab:olive",
    "float32": "tab:red",
    "high": "tab:cyan",
    "tf32": "tab:blue",
    "TF32": "tab:blue",
    "medium": "tab:purple",
    "bfloat16": "tab:purple",
}
_LIBRARY_MARKS = {
    "cupyfuse": ("o", 5),
    "cuBLAS": ("s", 9),
    "torch": ("D", 7),
}  # and sizes: equals do not hide each other
_NO_ERROR = 1e-10  # where a logarithmic axis has an error of 0


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _title(report: Report) -> str:
    versions = ", ".join(f"{k} {report.environment[k]}" for k in ("cupy", "torch") if report.environment.get(k))
    return f"{report.environment['gpu']}, {versions}" if versions else str(report.environment["gpu"])


@contextlib.contextmanager
def _panels(report: Report, path: Path, count: int, height: float, legend: bool = False) -> Iterator[Any]:
    """Panels in two columns, to be drawn on, and then written; with `legend`, one for all of them."""
    pyplot = _pyplot()
    rows = max(1, -(-count // 2))
    drawing, axes = pyplot.subplots(rows, 2, figsize=(13, height * rows), squeeze=False, layout="constrained")
    for panel in axes.flat[count:]:
        panel.set_visible(False)
    yield axes.flat[:count]
    labelled = {
        label: mark for panel in axes.flat for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if legend and labelled:
        drawing.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=4, fontsize=8)
    drawing.suptitle(_title(report))
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def _grouped(cases: Sequence[Case]) -> dict[str, list[Case]]:
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return groups


def heads(report: Report, path: Path, figure: str = "gpu_back_to_back") -> None:
    """A panel a case: a bar for each rival's GPU time, on a logarithmic axis."""
    cases = [case for case in report.cases if any(figure in r.times for r in case.results)]
    with _panels(report, path, len(cases), 3.2) as panels:
        for panel, case in zip(panels, cases, strict=True):
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


def rows(report: Report, path: Path) -> None:
    """A panel a group: GB/s over the length of the row, a line for each rival."""
    groups = _grouped(report.cases)
    with _panels(report, path, len(groups), 4) as panels:
        for panel, (group, cases) in zip(panels, groups.items(), strict=True):
            _lines(panel, sorted(cases, key=lambda case: case.shape[1]))
            panel.set_title(group, fontsize=10)


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


def gemm(report: Report, path: Path) -> None:
    """A panel a family: max error over time, a mark for each rival; a panel a sweep: max error over K."""
    groups = _grouped(report.cases)
    single = [(case.name, [case]) for group in groups.values() for case in group if case.name in FAMILIES]
    swept = [(name, group) for name, group in groups.items() if group[0].name not in FAMILIES]
    with _panels(report, path, len(single) + len(swept), 4, legend=True) as panels:
        for panel, (title, cases) in zip(panels, single + swept, strict=True):
            over_time = cases[0].name in FAMILIES
            _errors(panel, sorted(cases, key=lambda case: case.shape[1]), over_time)
            panel.set_xlabel("GPU time per call, L2 evicted, µs" if over_time else "K")
            panel.set_ylabel("max |error| / (|x| |weight|ᵀ)")
            panel.set_title(title, fontsize=10)
            panel.grid(alpha=0.3)


def _errors(panel: Any, cases: Sequence[Case], over_time: bool) -> None:
    """Max errors on two logarithmic axes; a filled mark had operands prepared before."""
    for name in dict.fromkeys(result.rival for case in cases for result in case.results):
        points = []
        for case in cases:
            result = case.find(name)
            place = result.median("gpu_evicted") if result and over_time else case.shape[1]
            if result and result.max_error is not None and not result.failure and place:
                points.append((place, max(result.max_error, _NO_ERROR)))
        if points:
            library, _, rest = name.partition(" ")
            precision, prepared, _ = rest.partition(",")
            shape, size = _LIBRARY_MARKS.get(library, ("x", 5))
            style: dict[str, Any] = {
                "marker": shape,
                "markersize": size,
                "color": _PRECISION_COLORS.get(precision, "0.5"),
            }
            style |= {"fillstyle": "full" if prepared else "none", "linestyle": "none" if over_time else "-"}
            panel.plot(*zip(*points, strict=True), label=name, linewidth=0.8, **style)
    panel.set_xscale("log", subs=[2, 5])
    panel.set_yscale("log")
    if over_time:
        panel.xaxis.set_major_formatter(lambda microseconds, _: number(microseconds))
        panel.xaxis.set_minor_formatter(lambda microseconds, _: number(microseconds))
