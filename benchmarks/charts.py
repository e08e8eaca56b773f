"""The plots of reports. Matplotlib is imported only here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
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
# Of a matrix product.
_PRECISIONS = {"highest": "tab:green", "ieee": "tab:olive", "float32": "tab:red", "high": "tab:cyan"}
_PRECISIONS |= {"tf32": "tab:blue", "TF32": "tab:blue", "medium": "tab:purple", "bfloat16": "tab:purple"}
_MARKS = {"cupyfuse": ("o", 5), "cuBLAS": ("s", 9), "torch": ("D", 7)}
_NO_ERROR = 1e-10  # where a logarithmic axis has an error of 0


@contextlib.contextmanager
def _panels(report: Report, path: Path, count: int, height: float, legend: bool = False) -> Iterator[Any]:
    """Open panels in two columns to draw on, and write them; with `legend`, one for all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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
    known = report.environment
    drawing.suptitle(", ".join([known["gpu"], *(f"{k} {known[k]}" for k in ("cupy", "torch") if known.get(k))]))
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def _points(
    cases: Sequence[Case], x: Callable[[Case, str], Any], y: Callable[[Case, str], Any]
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each rival's points over some cases, where both coordinates are known."""
    for name in dict.fromkeys(result.rival for case in cases for result in case.results):
        found = [(x(case, name), y(case, name)) for case in cases]
        points = [(a, b) for a, b in found if a and b is not None]
        if points:
            yield name, list(zip(*points, strict=True))


def heads(report: Report, path: Path, figure: str) -> None:
    """Draw a panel a case: a bar for each rival's GPU time, on a logarithmic axis."""
    cases = [case for case in report.cases if any(figure in r.times for r in case.results)]
    with _panels(report, path, len(cases), 3.2) as panels:
        for panel, case in zip(panels, cases, strict=True):
            medians = {r.rival: r.times[figure].median for r in case.results[::-1] if figure in r.times}
            panel.barh(list(medians), list(medians.values()), color=[_COLORS.get(name, "tab:blue") for name in medians])
            for place, median in enumerate(medians.values()):
                panel.annotate(number(median), (median, place), xytext=(3, 0), textcoords="offset points", va="center")
            panel.set_xscale("log")
            panel.set_xlim(min(medians.values()) / 3, max(medians.values()) * 3)
            panel.set_xlabel("GPU time per call, µs")
            panel.set_title(f"{case.name}\n{' x '.join(map(str, case.shape))} {case.dtype}", fontsize=10)


def rows(report: Report, path: Path) -> None:
    """Draw a panel a group: GB/s over the length of the row, a line for each rival."""
    groups = report.groups()
    with _panels(report, path, len(groups), 4, legend=True) as panels:
        for panel, (group, cases) in zip(panels, groups.items(), strict=True):
            ordered = sorted(cases, key=lambda case: case.shape[1])
            for name, points in _points(ordered, lambda case, _: case.shape[1], lambda case, r: case.value(r, "GB/s")):
                panel.plot(*points, marker="o", markersize=3, label=name, color=_COLORS.get(name))
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set(xlabel="elements in a row", ylabel="GB/s")
            panel.set_title(group, fontsize=10)
            panel.grid(alpha=0.3)


def gemm(report: Report, path: Path) -> None:
    """Draw a panel a family: max error over time, a mark for each rival; a panel a sweep: max error over K."""
    groups = report.groups()
    single = [(case.name, [case]) for case in report.cases if case.name in FAMILIES]
    swept = [(name, cases) for name, cases in groups.items() if cases[0].name not in FAMILIES]
    with _panels(report, path, len(single) + len(swept), 4, legend=True) as panels:
        for panel, (title, cases) in zip(panels, single + swept, strict=True):
            over_time = cases[0].name in FAMILIES
            _errors(panel, sorted(cases, key=lambda case: case.shape[1]), over_time)
            panel.set_xlabel("GPU time per call, L2 evicted, µs" if over_time else "K")
            panel.set_ylabel("max |error| / (|x| |weight|ᵀ)")
            panel.set_title(title, fontsize=10)
            panel.grid(alpha=0.3)


def _errors(panel: Any, cases: Sequence[Case], over_time: bool) -> None:
    """Draw max errors on two logarithmic axes; a filled mark had operands prepacked or rounded before."""

    def place(case: Case, rival: str) -> float | None:
        return case.value(rival, "gpu_evicted") if over_time else case.shape[1]

    def error(case: Case, rival: str) -> float | None:
        found = case.value(rival, "max_error")
        return None if found is None else max(found, _NO_ERROR)

    for name, points in _points(cases, place, error):
        library, _, rest = name.partition(" ")
        precision, before, _ = rest.partition(",")
        mark, size = _MARKS.get(library, ("x", 5))
        style = {"fillstyle": "full" if before else "none", "linestyle": "none" if over_time else "-"}
        style |= {"color": _PRECISIONS.get(precision, "0.5"), "marker": mark}
        panel.plot(*points, label=name, linewidth=0.8, markersize=size, **style)
    panel.set_xscale("log", subs=[2, 5])
    panel.set_yscale("log")
    if over_time:
        panel.xaxis.set_major_formatter(lambda microseconds, _: number(microseconds))
        panel.xaxis.set_minor_formatter(lambda microseconds, _: number(microseconds))


CHARTS: dict[str, Callable[[Report, Path], None]] = {
    "heads": functools.partial(heads, figure="gpu_back_to_back"),
    "torch": functools.partial(heads, figure="gpu_evicted"),
    "rows": rows,
    "gemm": gemm,
}
