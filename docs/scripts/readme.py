"""Write the README's results and plan, docs/speedups.svg and docs/plan.svg.

Results are from the reports in benchmarks/results.

python docs/scripts/readme.py
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

from cupyfuse.cli import main

ROOT = Path(__file__).resolve().parents[2]
README, CHART, PICTURE = ROOT / "README.md", ROOT / "docs" / "speedups.svg", ROOT / "docs" / "plan.svg"
REPORTS = ROOT / "benchmarks" / "results" / "nvidia-h200"

Cells = dict[str, dict[str, str]]  # a table's cells by row and column


class Case(NamedTuple):
    """One row of the README's table: a case of a report, and the rows of its table to quote."""

    title: str
    report: str
    section: str
    case: str
    column: str
    unit: str
    rivals: tuple[str | None, str | None, str]  # eager, compiled, cupyfuse


HEAD = ("torch eager", "torch.compile", "cupyfuse, bound")
EVICTED, WALL = "GPU, L2 evicted", "wall, loop, ms"
FUSE, BACKEND = "cupyfuse.torch.fuse", "cupyfuse backend"
CASES = (
    Case("`head_sum`, float32", "heads", "The heads", "head_sum", EVICTED, "µs", HEAD),
    Case("`head_sum`, float32, unbound", "heads", "The heads", "head_sum", EVICTED, "µs", (*HEAD[:2], "cupyfuse")),
    Case("`head_logsumexp`, float32", "heads", "The heads", "head_logsumexp", EVICTED, "µs", HEAD),
    Case("`head_logsumexp`, float32 at \"high\"", "heads-high", "The heads", "head_logsumexp", EVICTED, "µs", HEAD),
    Case("`head_logsumexp`, bfloat16", "heads-bfloat16", "The heads", "head_logsumexp", EVICTED, "µs", HEAD),
    Case("`head_softmax`, float32", "heads", "The heads", "head_softmax, inference", EVICTED, "µs", HEAD),
    Case(
        "`head_softmax`, float32 at \"high\"", "heads-high", "The heads", "head_softmax, inference", EVICTED, "µs", HEAD
    ),
    Case("`head_softmax`, bfloat16", "heads-bfloat16", "The heads", "head_softmax, inference", EVICTED, "µs", HEAD),
    Case(
        "Product alone, float32", "gemm", "Families of data", "head", EVICTED, "µs",
        ("torch float32", None, "cupyfuse highest, bound"),
    ),
    *(
        Case(
            f"Loss over 128256 classes, bfloat16, {mode}", "losses", section, "8192 x 4096 x 128256, bfloat16",
            EVICTED, "µs", (*HEAD[:2], "cupyfuse.torch"),
        )
        for section, mode in (("Forward", "forward"), ("Forward and backward", "and backward"))
    ),
    *(
        Case(f"{title}, {mode}", "models", section, f"{model}, large", WALL, "ms", (*HEAD[:2], ours))
        for title, model, section, mode, ours in (
            ("BERT-base", "bert", 'Inference, float32 at "highest"', "float32, inference", FUSE),
            ("Llama, 8 layers", "llama", 'Inference, float32 at "highest"', "float32, inference", BACKEND),
            ("ViT-B/16", "vit", 'Training step, float32 at "highest"', "float32, training step", BACKEND),
            ("BERT-base", "bert", "Inference, bfloat16", "bfloat16, inference", BACKEND),
            ("Llama, 8 layers", "llama", "Training step, bfloat16", "bfloat16, training step", BACKEND),
        )
    ),
)  # fmt: skip


def tables(report: str) -> dict[tuple[str, str], Cells]:
    """Parse the tables of a report, by section and case."""
    found: dict[tuple[str, str], Cells] = {}
    section = case = ""
    columns: list[str] = []
    for line in (REPORTS / f"{report}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section, case = line[3:], ""
        elif line.startswith("### "):
            case = line[4:]
        elif not line.startswith("|"):
            columns = []
        elif not columns:
            columns = _cells(line)
        elif not line.startswith("|---"):
            row = _cells(line)
            found.setdefault((section, case), {})[row[0]] = dict(zip(columns, row, strict=True))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def results_table() -> str:
    """Return the README's table."""
    lines = ["| | torch eager | torch.compile | cupyfuse | faster than eager |", "|---|---:|---:|---:|---:|"]
    for case in CASES:
        rows = tables(case.report)[case.section, case.case]
        times = [None if name is None else rows[name][case.column] for name in case.rivals]
        shown = [f"{time} {case.unit}" if time else "" for time in times]
        faster = float(times[0] or "nan") / float(times[2] or "nan")
        lines.append(f"| {case.title} | {' | '.join(shown)} | {faster:.3g}× |")
    return "\n".join(lines) + "\n"


# The chart ----------------------------------------------------------------------------------------------------------

PANELS = (('Inference, float32 at "highest"', "float32 inference"), ("Inference, bfloat16", "bfloat16 inference"))
BARS = (("torch.compile", "#8c959f"), (FUSE, "#2da44e"), (BACKEND, "#0969da"))
LABEL, WIDTH, BAR, GAP, TOP = 90, 290, 9, 12, 62
SCALE = 60.0  # pixels of a speed-up of 1


def chart() -> str:
    """Return an SVG of speed-ups over PyTorch eager, one group of bars for each model."""
    speedups = tables("models")
    models = [case for section, case in speedups if section == PANELS[0][0] and case.endswith(", large")]
    height = TOP + len(models) * (len(BARS) * BAR + GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + 2 * WIDTH} {height}" '
        'font-family="sans-serif" font-size="11" fill="#768390">',
        '<text x="4" y="16" font-size="13">Times faster than PyTorch eager, one NVIDIA H200</text>',
    ]
    for i, (name, colour) in enumerate(BARS):
        x = LABEL + 150 * i
        parts.append(f'<rect x="{x}" y="26" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="35">{name}</text>')
    for panel, (section, title) in enumerate(PANELS):
        left = LABEL + panel * WIDTH
        parts.append(f'<text x="{left}" y="{TOP - 8}">{title}</text>')
        parts.append(f'<path d="M{left + SCALE} {TOP}V{height - 8}" stroke="#8c959f" stroke-dasharray="2 3"/>')
        for i, model in enumerate(models):
            y = TOP + i * (len(BARS) * BAR + GAP)
            if panel == 0:
                parts.append(f'<text x="4" y="{y + 18}">{model.partition(",")[0]}</text>')
            for j, (name, colour) in enumerate(BARS):
                faster = speedups[section, model][name]["× torch eager, wall, loop"]
                width, row = float(faster) * SCALE, y + j * BAR
                parts.append(f'<rect x="{left}" y="{row}" width="{width:.1f}" height="{BAR - 1}" fill="{colour}"/>')
                parts.append(f'<text x="{left + width + 3:.1f}" y="{row + BAR - 1}" font-size="8">{faster}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def readme() -> str:
    """Return the README with its generated parts brought up to date."""
    text = README.read_text(encoding="utf-8")
    for name, part in (("results", results_table()), ("plan", f"```\n{plan()}```\n")):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, tail = text.partition(begin)[0], text.partition(end)[2]
        text = f"{head}{begin}\n\n{part}\n{end}{tail}"
    return text


def plan() -> str:
    """Return what `python -m cupyfuse explain head_sum --bound` prints."""
    return explained("head_sum", "--bound")


def picture() -> str:
    """Return the picture of the page about plans."""
    return explained("head_softmax", "--bound", "--svg")


def explained(*arguments: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(["explain", *arguments])
    return output.getvalue()


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")
    CHART.write_text(chart(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
