"""Check reductions and softmax on special values, along rows and down columns, in every kernel template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..api import functions as cf
from ..api.fuse import Fused
from ..ir.operators import REDUCTIONS
from ..trace import reduce
from . import specials
from .formats import Format
from .measure import Allowance
from .specials import Row
from .symbols import ANY_FINITE, allows, value
from .target import Failure, Target

# Row lengths by the template that they select: lanes of a warp, a streaming block, a block that holds the row, longer
# than one holds. The second length of each rules out vector loads.
LANES, STREAMED, HELD, LONG = (96, 97), (5000, 5001), (4096, 4097), (40000, 40001)
# Rows that several blocks share in column reductions, and numbers of columns; lengths of rows that blocks share.
SHARED, COLUMNS, SHARED_ROWS = 4000, (40, 41), (20000, 20001)
# Lengths to which rows of three cells are repeated, by axis; and for softmax.
_REPEATED_LENGTHS = {0: (*LANES, SHARED), 1: (*LANES, *STREAMED)}
_REPEATED_ROW_LENGTHS = (*LANES, *HELD, *LONG)
# Ulps of the final logarithm, division and rounding of a reduction.
FINAL_ULPS = 9.0


@cache
def all_reductions(axis: int, names: tuple[str, ...] = tuple(REDUCTIONS)) -> Fused:
    """Return one fused function that computes all reductions along an axis."""

    def reductions(x: Any) -> tuple[Any, ...]:
        return tuple(reduce(name, x, axis, keepdims=True) for name in names)

    return Fused(reductions)


@cache
def softmax_functions() -> Fused:
    """Return one fused function that computes softmax and log_softmax along rows."""

    def rows(x: Any) -> tuple[Any, ...]:
        return cf.softmax(x, axis=1), cf.log_softmax(x, axis=1)

    return Fused(rows)


def reduction_allowance(name: str, count: int) -> Allowance:
    """Return the allowance of a reduction of `count` elements, in ulps of `Reduction.scale`."""
    each = REDUCTIONS[name].ulps
    return Allowance(each * (count + FINAL_ULPS) if each else 0.0, text=f"n + {FINAL_ULPS:g}" if each else "0")


# Special values -----------------------------------------------------------------------------------------------------


def check_specials(target: Target, form: Format) -> int:
    """Compare results with every entry of the tables of rows, record failures, and return the number compared."""
    compared = 0
    for length in sorted({len(row.cells) for row in specials.reduction_rows()} - {0}):
        rows = [row for row in specials.reduction_rows() if len(row.cells) == length]
        compared += _check_reductions(target, form, rows, length, 1)
        compared += _check_reductions(target, form, rows, length, 0) if length > 1 else 0
    compared += _check_empty(target, form)
    ordinary = [row for row in specials.reduction_rows() if len(row.cells) == 3 and not _may_overflow(row)]
    for axis, lengths in _REPEATED_LENGTHS.items():
        for length in lengths:
            compared += _check_reductions(target, form, ordinary, length, axis)
    one_pass = tuple(name for name in REDUCTIONS if name != "logsumexp")  # logsumexp of float64 takes two passes
    for length in SHARED_ROWS:
        compared += _check_reductions(target, form, ordinary, length, 1, one_pass)
    for length in (1, 3):
        rows = [row for row in specials.softmax_rows() if len(row.cells) == length]
        compared += _check_softmax(target, form, rows, length)
    ordinary = [row for row in specials.softmax_rows() if len(row.cells) == 3]
    for length in _REPEATED_ROW_LENGTHS:
        compared += _check_softmax(target, form, ordinary, length)
    return compared


def _may_overflow(row: Row) -> bool:
    """Whether sums of more cells like a row's may overflow."""
    return any("max" in cell for cell in row.cells)


def _matrix(rows: Sequence[Row], length: int, form: Format) -> Any:
    """Return the rows' cells as a matrix, repeated to rows of a length."""
    return np.array([np.resize(form.rounded([value(c, form) for c in row.cells]), length) for row in rows])


def _expected_when_repeated(expected: str, name: str) -> str:
    """Return the entry for a row of repeated cells: infinities, NaN and first positions stay; other numbers change."""
    if name in REDUCTIONS and REDUCTIONS[name].gives_position:
        return expected
    if expected in ("inf", "-inf"):
        return "inf|-inf" if name == "prod" else expected
    return expected if expected == "nan" or (name == "softmax" and expected == "0") else ANY_FINITE


def _check_reductions(
    target: Target,
    form: Format,
    rows: Sequence[Row],
    length: int,
    axis: int,
    names: tuple[str, ...] = tuple(REDUCTIONS),
) -> int:
    """Compare reductions of rows repeated to `length` elements; return the number compared."""
    given = _matrix(rows, length, form)
    what = f"reductions of {length} elements along axis {axis}"
    results = target.run(
        all_reductions(axis, names), [given if axis == 1 else np.ascontiguousarray(given.T)], form, what
    )
    if results is None:
        return 0
    for name, result in zip(names, results, strict=True):
        for row, got in zip(rows, np.ravel(result), strict=True):
            expected = row.expected[name]
            if length != len(row.cells):
                expected = _expected_when_repeated(expected, name)
            ulps = reduction_allowance(name, length).ulps
            _check(target, form, name, f"{','.join(row.cells)} ({what})", expected, float(got), ulps)
    return len(names) * len(rows)


def _check_empty(target: Target, form: Format) -> int:
    """Compare all reductions of no elements, of which some raise an error; return the number compared."""
    (row,) = [row for row in specials.reduction_rows() if not row.cells]
    given = np.zeros((2, 0), form.dtype)
    for name, expected in row.expected.items():
        what = f"{name} of no elements"
        try:
            results = target.run(all_reductions(1, (name,)), [given], form, what)
        except ValueError as error:
            if expected != "error":
                target.failures.append(Failure(name, form.name, what, str(error), expected))
            continue
        if expected == "error":
            target.failures.append(Failure(name, form.name, what, repr(results), "a ValueError"))
        elif results is not None:
            _check(target, form, name, what, expected, float(np.ravel(results[0])[0]), 0.0)
    return len(row.expected)


def _check_softmax(target: Target, form: Format, rows: Sequence[Row], length: int) -> int:
    """Compare softmax and log_softmax of rows repeated to `length` elements; return the number compared."""
    given = _matrix(rows, length, form)
    what = f"rows of {length} elements"
    results = target.run(softmax_functions(), [given], form, what)
    if results is None:
        return 0
    ulps = length + FINAL_ULPS
    for name, result in zip(("softmax", "log_softmax"), results, strict=True):
        for row, got in zip(rows, result, strict=True):
            cells = row.expected[name].split(",")
            for i, cell in enumerate(cells):
                expected = cell if length == len(cells) else _expected_when_repeated(cell, name)
                for found in np.unique(got[i :: len(cells)].astype(np.float64)):
                    _check(target, form, name, f"{','.join(row.cells)} ({what})", expected, float(found), ulps)
    return len(results) * given.size


def _check(target: Target, form: Format, name: str, given: str, expected: str, got: float, ulps: float) -> None:
    """Compare one result with its entry; record a failure."""
    if not allows(expected, got, form, ulps, target.flushing(form)):
        target.failures.append(Failure(name, form.name, given, repr(got), expected))
