"""Parse the tables of special values into cases."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ..ir.operators import POINTWISE, REDUCTIONS
from .pairs import PAIRS
from .tables import CASES, REDUCED, ROWS, UNARY


@dataclass(frozen=True)
class Case:
    """Operands of an operator and its expected result, as symbols."""

    operands: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Row:
    """Cells of a row, and the expected result of each reduction or row function."""

    cells: tuple[str, ...]
    expected: dict[str, str]


def _lines(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines() if line.strip()]


@cache
def pointwise() -> dict[str, tuple[Case, ...]]:
    """Return all cases by operator, with its parameters."""
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
    """Return all rows with the expected result of every reduction."""
    (_, *names), *rows = _lines(REDUCED)
    return tuple(Row(_cells(cells), dict(zip(names, results, strict=True))) for cells, *results in rows)


@cache
def along_rows() -> tuple[Row, ...]:
    """Return all rows with their softmax and log_softmax, one symbol for each cell."""
    (_, *names), *rows = _lines(ROWS)
    return tuple(Row(_cells(cells), dict(zip(names, results, strict=True))) for cells, *results in rows)


def _cells(text: str) -> tuple[str, ...]:
    return () if text == "empty" else tuple(text.split(","))


def expected_when_flushed(case: Case, cases: tuple[Case, ...]) -> str:
    """Return the expected results of a case on an engine that may flush subnormal operands to zero."""
    zeros = {"sub": "0", "-sub": "-0"}
    operands = tuple(zeros.get(o, o) for o in case.operands)
    return "|".join([case.expected, *(c.expected for c in cases if c.operands == operands != case.operands)])


def missing() -> list[str]:
    """Return the operators and reductions without special values."""
    there = {re.sub(r"\(.*", "", name) for name in pointwise()}
    reductions = {name for row in reduced() for name in row.expected}
    return sorted((set(POINTWISE) - there) | (set(REDUCTIONS) - reductions))
