"""The operator tables: one row for each pointwise operator and each reduction.

A row holds an operator's name, NumPy semantics, CUDA expression, derivative, documentation and accuracy; see
`table.py`. Tracer, emission, NumPy engine, self-test, tests and documentation walk these tables: to add an activation,
add a row.

CUDA expressions name their operands `{0}`, `{1}`, `{2}` and write constants as `T(0.5)`, where `T` is float or double.
They agree with the NumPy semantics for ±inf and NaN too. Derivatives use a namespace `o` that holds every operator by
name, so that they apply to arrays (in tests) and to traced values (in a backward pass): `derivative(o, y, *x)` returns
one partial derivative for each operand, None where it is zero everywhere.
"""

from __future__ import annotations

from collections.abc import Collection

from . import activations, elementary, reductions
from .table import LIBRARY, UNDERFLOW_ERROR, Operator, Reduction

POINTWISE: dict[str, Operator] = {row.name: row for row in (*elementary.ROWS, *activations.ROWS)}
REDUCTIONS: dict[str, Reduction] = {row.name: row for row in reductions.ROWS}


def extended_extremum(name: str) -> str | None:
    """Return the extremum whose accumulator that of a reduction extends, if any."""
    about = REDUCTIONS[name].about
    return about if about is not None and REDUCTIONS[about].base else None


def extensions(names: Collection[str]) -> list[Reduction]:
    """Return the rows whose accumulators extend an extremum's for the reductions `names` about it, in their order."""
    wanted = {*names, *(REDUCTIONS[name].extends for name in names)}
    return [row for name, row in REDUCTIONS.items() if name in wanted and extended_extremum(name)]


def place_bits(n: int) -> int:
    """Return the bits in which accumulators hold a position among n elements, or one that is behind them."""
    return 32 if n < 1 << 32 else 64


# Python's names of comparisons, and those of their operators.
COMPARISONS = {
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
}
__all__ = [
    "COMPARISONS",
    "LIBRARY",
    "UNDERFLOW_ERROR",
    "POINTWISE",
    "REDUCTIONS",
    "Operator",
    "Reduction",
    "extended_extremum",
    "extensions",
    "place_bits",
]
