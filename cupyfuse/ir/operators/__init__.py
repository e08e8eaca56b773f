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

from . import activations, elementary, reductions
from .table import LIBRARY, UNDERFLOW_ERROR, Operator, Reduction

POINTWISE: dict[str, Operator] = {row.name: row for row in (*elementary.ROWS, *activations.ROWS)}
REDUCTIONS: dict[str, Reduction] = {row.name: row for row in reductions.ROWS}

# Python's names of comparisons, and those of their operators.
COMPARISONS = {
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "less",
    "le": "less_equal",
    "eq": "equal",
    "ne": "not_equal",
}
__all__ = ["COMPARISONS", "LIBRARY", "UNDERFLOW_ERROR", "POINTWISE", "REDUCTIONS", "Operator", "Reduction"]
