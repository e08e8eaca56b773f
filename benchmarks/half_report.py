"""The tables of 16-bit products."""

from __future__ import annotations

from collections.abc import Sequence

from . import half
from .lab import COMPILED, EAGER
from .report import FIGURES, Case, Column, list_notes, ratio, rival_columns, scientific, table

_TIME = "gpu_evicted"


def half_products(cases: Sequence[Case]) -> list[str]:
    """Write tables for each group: times, rates of our kernel and of cuBLAS and how they compare; errors."""
    name = Column("", lambda case: case.name)
    lines = []
    for group in half.GROUPS:
        found = [case for case in cases if case.group == group]
        if not found:
            continue
        notes: list[str] = []
        rates = [_rate(rival) for rival in (half.OWN, half.LIBRARY)]
        gains = [_gain(rival) for rival in (half.LIBRARY, EAGER, COMPILED)]
        lines += [f"## {group}", "", f"Microseconds, {FIGURES[_TIME][0]}; ×: {half.OWN} faster by.", ""]
        lines += table([name, *rival_columns(found, _TIME, notes), *rates, *gains], found)
        errors = rival_columns(found, "error", [], scientific)
        lines += ["Errors by Frobenius norms:", "", *table([name, *errors], found, min), *list_notes(notes)]
    return lines


def _rate(rival: str) -> Column:
    def cell(case: Case) -> float | None:
        rows, depth, columns = case.shape
        return ratio(2e-6 * rows * depth * columns, case.value(rival, _TIME))

    return Column(f"{rival}, TFLOP/s", cell)


def _gain(rival: str) -> Column:
    return Column(f"× {rival}", lambda case: ratio(case.value(rival, _TIME), case.value(half.OWN, _TIME)))
