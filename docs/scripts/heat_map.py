"""Write docs/rows.svg: how near row programs come to a copy's speed, by program, length and dtype.

The figures are those of the report of `python -m benchmarks rows`.

python -m docs.scripts.heat_map
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from benchmarks.report import Case, Report

ROOT = Path(__file__).resolve().parents[2]
PICTURE, REPORT = ROOT / "docs" / "rows.svg", ROOT / "benchmarks" / "results" / "nvidia-h200" / "rows.json"
OURS, COPY = "cupyfuse", "device copy"
LABEL, WIDTH, HEIGHT, TOP, GAP = 146, 40, 18, 44, 34  # pixels; of a cell, above the first panel, between panels
# Colours by the fraction of a copy's speed, and those between in proportion.
SCALE = ((0.4, (207, 34, 46)), (0.7, (234, 190, 63)), (0.9, (130, 190, 90)), (1.0, (26, 127, 55)))


def fraction(case: Case) -> float | None:
    """Return the time of a copy of as many bytes over cupyfuse's; None where one of them was not measured."""
    ours, copy = case.value(OURS, "gpu_evicted"), case.value(COPY, "gpu_evicted")
    return copy / ours if ours and copy else None


def colour(value: float) -> str:
    """Return the colour of a fraction, by straight lines between the points of `SCALE`."""
    value = min(max(value, SCALE[0][0]), SCALE[-1][0])
    for (low, first), (high, last) in itertools.pairwise(SCALE):
        if value <= high:
            part = (value - low) / (high - low)
            return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(first, last, strict=True))
    raise AssertionError("the last point of the scale bounds the value")


def picture() -> str:
    """Return the SVG: a panel for each dtype, a row for each program, a column for each length."""
    fields = json.loads(REPORT.read_text(encoding="utf-8"))
    report = Report(**{**fields, "cases": [Case.from_json(case) for case in fields["cases"]]})
    lengths = sorted({case.shape[1] for case in report.cases})
    panels = list(dict.fromkeys(case.dtype for case in report.cases))
    groups = report.groups()
    parts, top = [], TOP
    for dtype in panels:
        parts.append(f'<text x="4" y="{top - 5}" font-weight="bold">{dtype}</text>')
        for i, length in enumerate(lengths):
            x = LABEL + (i + 0.5) * WIDTH
            parts.append(f'<text x="{x:.0f}" y="{top - 5}" font-size="9" text-anchor="middle">{length}</text>')
        for group in [group for group, cases in groups.items() if cases[0].dtype == dtype]:
            parts.append(f'<text x="4" y="{top + 13}">{group.removesuffix(" " + dtype).replace("_", " ")}</text>')
            for case in groups[group]:
                value, x = fraction(case), LABEL + lengths.index(case.shape[1]) * WIDTH
                if value is not None:
                    size = f'width="{WIDTH - 1}" height="{HEIGHT - 1}"'
                    parts.append(f'<rect x="{x}" y="{top}" {size} fill="{colour(value)}"/>')
                    x, y = x + WIDTH // 2, top + 13
                    parts.append(f'<text x="{x}" y="{y}" fill="#fff" text-anchor="middle">{value:.2f}</text>')
            top += HEIGHT
        top += GAP
    width, height = LABEL + len(lengths) * WIDTH + 4, top - GAP + 8
    title = f"Speed of row programs, of a copy's, by the length of rows: one {report.environment['gpu']}, L2 evicted"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#768390">'
    )
    return "\n".join([head, f'<text x="4" y="16" font-size="13">{title}</text>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
