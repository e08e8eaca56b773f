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
    """Operands of an operator and its expected result, as the symbols of `tables.py`."""

    operands: tuple[str, ...]
    expected: str


@dataclass(frozen=True)
class Row:
    """Elements of a row, and the expected result of each reduction or of softmax and log_softmax, as symbols."""

    cells: tuple[str, ...]
    expected: dict[str, str]


def _lines(table: str) -> list[list[str]]:
    """Split a table into the words of its lines."""
    return [line.split() for line in table.strip().splitlines() if line.strip()]


@cache
def pointwise_cases() -> dict[str, tuple[Case, ...]]:
    """Return the cases of every operator, by its name with parameters."""
    found: dict[str, list[Case]] = {}
    (_, *inputs), *rows = _lines(UNARY)
    for name, *results in rows:
        found[name] = [Case((x,), y) for x, y in zip(inputs, results, strict=True)]
    name, right = "", []
    for first, *rest in _lines(PAIRS):
        if first in POINTWISE:
            name, right = first, rest
        else:
            found.setdefault(name, []).extend(Case((first, b), y) for b, y in zip(right, rest, strict=True))
    for first, *rest in _lines(CASES):
        end = rest.index("|")
        found.setdefault(first, []).append(Case(tuple(rest[:end]), rest[end + 1]))
    return {name: tuple(cases) for name, cases in found.items()}


@cache
def reduction_rows() -> tuple[Row, ...]:
    """Return all rows with the expected result of every reduction."""
    return _rows(REDUCED)


@cache
def softmax_rows() -> tuple[Row, ...]:
    """Return all rows with their softmax and log_softmax, one symbol for each cell."""
    return _rows(ROWS)


def _rows(table: str) -> tuple[Row, ...]:
    """Parse a table whose lines are the elements of a row and its results."""
    (_, *names), *lines = _lines(table)
    found = []
    for cells, *results in lines:
        elements = () if cells == "empty" else tuple(cells.split(","))
        found.append(Row(elements, dict(zip(names, results, strict=True))))
    return tuple(found)


def expected_when_flushed(case: Case, cases: tuple[Case, ...]) -> str:
    """Return the entry of a case for an engine that may flush subnormal operands to zero: also that for zeros."""
    zeros = {"sub": "0", "-sub": "-0"}
    operands = tuple(zeros.get(o, o) for o in case.operands)
    flushed = [c.expected for c in cases if c.operands == operands and operands != case.operands]
    return "|".join([case.expected, *flushed])


def missing() -> list[str]:
    """Return the operators on floats, and the reductions, without special values."""
    there = {re.sub(r"\(.*", "", name) for name in pointwise_cases()}
    reductions = {name for row in reduction_rows() for name in row.expected}
    operators = {name for name, row in POINTWISE.items() if row.takes_floats}
    return sorted((operators - there) | (set(REDUCTIONS) - reductions))
