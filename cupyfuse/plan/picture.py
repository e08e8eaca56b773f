"""Pictures of plans: SVG text, written without other libraries, and the HTML that notebooks show."""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from .. import devices
from ..devices import Device
from .report import cost, duration, heading, prepacked_heading, totals, workspace_lines
from .schedule import Step, base_of

Plan = Any  # `plan.Plan`, which imports this module

# The most steps drawn; of longer plans the rest is counted.
_MOST_STEPS = 100
_WIDTH, _MARGIN, _LINE = 960, 16, 16
# Columns: the numbers of steps, their text, the bars.
_NUMBER, _TEXT, _BAR, _BAR_WIDTH = 64, 88, 650, 190
# Of the monospaced fonts below an advance is at most 0.61 em; 12 px of font size.
_ADVANCE = 7.4
_TEXT_COLUMNS = int((_BAR - _TEXT - 12) / _ADVANCE)
_WHOLE_COLUMNS = int((_WIDTH - 2 * _MARGIN) / _ADVANCE)
_INK, _PALE, _MEMORY, _ARITHMETIC = "#1f2328", "#656d76", "#0969da", "#bf8700"
# Characters that XML does not allow, which a function's name can hold.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def svg(plan: Plan, gpu: str = devices.DEFAULT) -> str:
    """Draw the steps of a plan, with their bytes, launches and best possible times on a GPU; see `Plan.svg`."""
    device = devices.find(gpu)
    drawing = _Drawing()
    drawing.lines(heading(plan), bold=True)
    _draw_legend(drawing, device)
    parts = [plan, *([] if plan.prepare is None else [plan.prepare])]
    longest = max((max(part.step_times(step, device)) for part in parts for step in part.steps), default=0.0)
    _draw_steps(drawing, plan, device, longest)
    for text in workspace_lines(plan):
        drawing.lines(text)
    if plan.prepare is not None:
        drawing.gap()
        drawing.lines(prepacked_heading(plan), bold=True)
        _draw_steps(drawing, plan.prepare, device, longest)
    drawing.gap()
    for text in totals(plan, gpu):
        drawing.lines(text)
    return drawing.svg(f"Plan of {plan.name}")


def notebook_html(plan: Plan) -> str:
    """Return the picture of a plan as HTML, with its report as text to unfold."""
    return (
        f'<div style="overflow-x:auto">{svg(plan)}</div>\n'
        f"<details><summary>as text</summary><pre>{_escape(str(plan))}</pre></details>"
    )


class _Drawing:
    """The SVG elements so far, and `y`, the height that they take."""

    def __init__(self) -> None:
        self.y = float(_MARGIN)
        self._parts: list[str] = []

    def add(self, part: str) -> None:
        self._parts.append(part)

    def gap(self) -> None:
        self.y += _LINE / 2

    def text(self, x: float, y: float, text: str, **attributes: object) -> None:
        given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.add(f'<text x="{x:g}" y="{y:g}"{given}>{_escape(text)}</text>')

    def lines(self, text: str, bold: bool = False) -> None:
        """Write text over the whole width, in as many lines as it takes."""
        for line in textwrap.wrap(" ".join(text.split()), _WHOLE_COLUMNS):
            self.y += _LINE
            self.text(_MARGIN, self.y - 4, line, **({"font_weight": "bold"} if bold else {}))

    def svg(self, title: str) -> str:
        """Return the SVG image of all elements."""
        height = self.y + _MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" '
                f'height="{height:g}" role="img" font-family="ui-monospace, Menlo, Consolas, monospace" '
                f'font-size="12" fill="{_INK}">',
                f"<title>{_escape(title)}</title>",
                f'<rect width="{_WIDTH}" height="{height:g}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _escape(text: str) -> str:
    return html.escape(_NOT_XML.sub("\ufffd", text))


def _draw_legend(drawing: _Drawing, device: Device) -> None:
    """Draw what the colours of the bars mean, and the GPU that times are for."""
    drawing.y += _LINE + 4
    x = float(_BAR)
    for name, colour in (("memory", _MEMORY), ("arithmetic", _ARITHMETIC)):
        drawing.add(f'<rect x="{x:g}" y="{drawing.y - 9:g}" width="9" height="9" fill="{colour}"/>')
        drawing.text(x + 14, drawing.y, name, fill=_PALE)
        x += 24 + _ADVANCE * len(name)
    drawing.text(x, drawing.y, f"at best, {device.name}", fill=_PALE)
    drawing.y += 4


def _draw_steps(drawing: _Drawing, plan: Plan, device: Device, longest: float) -> None:
    """Draw each step: its number, what it computes, its cost, and bars of the times that bound it.

    The bar of `longest` seconds takes the whole width.
    """
    shown: Sequence[Step] = plan.steps[:_MOST_STEPS]
    times = [plan.step_times(step, device) for step in plan.steps]
    centres: list[float] = []
    for number, (step, pair) in enumerate(zip(shown, times, strict=False), 1):
        top = drawing.y + 10
        centres.append(top + _LINE / 2)
        drawing.text(_TEXT, top + 12, f"{step.kind} over {step.domain[0]} x {step.domain[1]}", font_weight="bold")
        described = textwrap.wrap(", ".join(step.fused), _TEXT_COLUMNS, max_lines=3, placeholder=" …")
        described += textwrap.wrap(step.how, _TEXT_COLUMNS) + textwrap.wrap(cost(step), _TEXT_COLUMNS)
        for i, line in enumerate(described, 1):
            drawing.text(_TEXT, top + 12 + i * _LINE, line, fill=_PALE)
        for i, (seconds, colour) in enumerate(zip(pair, (_MEMORY, _ARITHMETIC), strict=True)):
            # A bar of 1 pixel at least: a step that takes little is still seen.
            length = max(1.0, _BAR_WIDTH * seconds / longest) if seconds else 0.0
            y = top + 4 + i * 10
            drawing.add(f'<rect x="{_BAR}" y="{y:g}" width="{length:.1f}" height="9" fill="{colour}"/>')
        drawing.text(_BAR + _BAR_WIDTH + 8, top + 17, duration(max(pair)))
        drawing.y = top + 12 + len(described) * _LINE
        _draw_number(drawing, number, centres[-1])
    _draw_edges(drawing, shown, centres)
    if not plan.steps:
        drawing.lines("nothing to compute")
    if rest := times[_MOST_STEPS:]:
        drawing.lines(f"… and {len(rest)} more steps, at best {duration(sum(map(max, rest)))}")
    drawing.y += 6


def _draw_number(drawing: _Drawing, number: int, y: float) -> None:
    """Draw the number of a step in a circle."""
    drawing.add(f'<circle cx="{_NUMBER}" cy="{y:g}" r="11" fill="#ffffff" stroke="{_PALE}"/>')
    drawing.text(_NUMBER, y + 4, str(number), text_anchor="middle", font_size=10)


def _draw_edges(drawing: _Drawing, steps: Sequence[Step], centres: Sequence[float]) -> None:
    """Draw a line from each step to those that read what it writes, around the steps between."""
    writer = {node: i for i, step in enumerate(steps) for node in step.outputs}
    read = {
        (writer[base_of(node)], reader)
        for reader, step in enumerate(steps)
        for node in itertools.chain(step.inputs, step.repair_inputs)
        if writer.get(base_of(node), reader) < reader
    }
    for first, last in sorted(read):
        start, end = centres[first], centres[last]
        if last == first + 1:
            drawing.add(f'<path d="M{_NUMBER} {start + 11:g}V{end - 11:g}" stroke="{_PALE}" fill="none"/>')
            drawing.add(f'<path d="M{_NUMBER - 4} {end - 18:g}h8l-4 7z" fill="{_PALE}"/>')
            continue
        out = max(6.0, _NUMBER - 16 - 6 * (last - first))
        path = f"M{_NUMBER - 11} {start:g}C{out:g} {start:g} {out:g} {end:g} {_NUMBER - 13} {end:g}"
        drawing.add(f'<path d="{path}" stroke="{_PALE}" fill="none"/>')
        drawing.add(f'<path d="M{_NUMBER - 18} {end - 4:g}v8l7 -4z" fill="{_PALE}"/>')
