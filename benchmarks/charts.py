"""One plot a report: bars of a case's rivals, or lines over the rows' length or K. Matplotlib is imported only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .report import Case, Report, number

# By benchmark: what is drawn and its label, and the label of the axis that cases of several lengths are drawn over.
CHARTS = {
    "heads": ("gpu_back_to_back", "GPU time per call, µs", ""),
    "torch": ("gpu_evicted", "GPU time per call, L2 evicted, µs", ""),
    "rows": ("GB/s", "GB/s", "elements in a row"),
    "gemm": ("max_error", "max |error| / (|x| |weight|ᵀ)", "K"),
}
_NO_ERROR = 1e-10  # where a logarithmic axis has an error of 0


def draw(report: Report, path: Path) -> None:
    """Draw a panel a case or, for cases of several lengths, a panel a group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    what, label, axis = CHARTS[report.benchmark]
    panels: list[tuple[str, list[Case]]] = []
    for group, cases in report.groups().items():
        several = axis and len({case.shape[1] for case in cases}) > 1
        panels += [(group, cases)] if several else [(case.name, [case]) for case in cases]
    rows = max(1, -(-len(panels) // 2))
    figure, axes = pyplot.subplots(rows, 2, figsize=(13, 3.6 * rows), squeeze=False, layout="constrained")
    for place, panel in enumerate(axes.flat):
        if place < len(panels):
            title, cases = panels[place]
            panel.set_title(title, fontsize=10)
            (_lines if len(cases) > 1 else _bars)(panel, cases, what)
            panel.set(**({"xlabel": axis, "ylabel": label} if len(cases) > 1 else {"xlabel": label}))
        else:
            panel.set_visible(False)
    known = report.environment
    figure.suptitle(", ".join([known["gpu"], *(f"{k} {known[k]}" for k in ("cupy", "torch") if known.get(k))]))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(panel: Any, cases: list[Case], what: str) -> None:
    values = {r.rival: cases[0].value(r.rival, what) for r in cases[0].results[::-1]}
    known = {rival: max(value, _NO_ERROR) for rival, value in values.items() if value is not None}
    panel.barh(list(known), list(known.values()), color=["tab:green" if "cupyfuse" in r else "0.6" for r in known])
    for place, value in enumerate(known.values()):
        text = f"{value:.1e}" if value < 0.01 else number(value)
        panel.annotate(text, (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    panel.set_xscale("log")
    panel.set_xlim(min(known.values(), default=1) / 3, max(known.values(), default=1) * 3)


def _lines(panel: Any, cases: list[Case], what: str) -> None:
    for rival in dict.fromkeys(result.rival for case in cases for result in case.results):
        points = [(case.shape[1], case.value(rival, what)) for case in sorted(cases, key=lambda case: case.shape[1])]
        known = [(length, max(value, _NO_ERROR)) for length, value in points if value is not None]
        if known:
            panel.plot(*zip(*known, strict=True), marker="o", markersize=3, linewidth=0.8, label=rival)
    panel.set_xscale("log", base=2)
    panel.set_yscale("linear" if what == "GB/s" else "log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
