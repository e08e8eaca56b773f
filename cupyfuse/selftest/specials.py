"""The special values of `tables.py` and `pairs.py`, as cases that an engine can be asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ..ir.operators import POINTWISE, REDUCTIONS
from .pairs import PAIRS
from .tables import CASES, REDUCED, ROWS, UNARY


@dataclass(frozen=True)
class Case:
    """An operator on single operands, as symbols."""

    operands: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Row:
    """A row of cells, and what each reduction (or each cell of a function of rows) has to give."""

    cells: tuple[str, ...]
    expected: dict[str, str]


def _lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines() if line.strip()]


@cache
def pointwise() -> dict[str, tuple[Case, ...]]:
    """All cases by operator; operators of one operand with the numbers they are called with."""
    found: dict[str, list[Case]] = {}
    (_, *inputs), *rows = _lines(UNARY)
    for name, *results in rows:
        found[name] = [Case((x,), y) for x, y in zip(inputs, results, strict=True)]
    name, top = "", []
    for first, *rest in _lines(PAIRS):
        if first in POINTWISE:
            name, top = first, rest
        else:
            found.setdefault(name, []).extend(Case((first, b), y) for b, y in zip(top, rest, strict=True))
    for first, *rest in _lines(CASES):
        end = rest.index("|")
        found.setdefault(first, []).append(Case(tuple(rest[:end]), rest[end + 1]))
    return {name: tuple(cases) for name, cases in found.items()}


@cache
def reduced() -> tuple[Row, ...]:
    """All rows with the results of every reduction."""
    (_, *names), *rows = _lines(REDUCED)
    return tuple(Row(_cells(cells), dict(zip(names, results, strict=True))) for cells, *results in rows)


@cache
def along_rows() -> tuple[Row, ...]:
    """All rows with what softmax and log_softmax make of them; one symbol a cell, joined by commas."""
    (_, *names), *rows = _lines(ROWS)
    return tuple(Row(_cells(cells), dict(zip(names, results, strict=True))) for cells, *results in rows)


def _cells(text: str) -> tuple[str, ...]:
    return () if text == "empty" else tuple(text.split(","))


def taken_for_zero(case: Case, cases: tuple[Case, ...]) -> str:
    """What an engine may give that takes subnormal operands for zero, beside what the case expects."""
    zeros = {"sub": "0", "-sub": "-0"}
    operands = tuple(zeros.get(o, o) for o in case.operands)
    return "|".join([case.expected, *(c.expected for c in cases if c.operands == operands != case.operands)])


def missing() -> list[str]:
    """Operators and reductions that no table has a row for."""
    there = {re.sub(r"\(.*", "", name) for name in pointwise()}
    reductions = {name for row in reduced() for name in row.expected}
    return sorted((set(POINTWISE) - there) | (set(REDUCTIONS) - reductions))
