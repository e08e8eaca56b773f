"""The operator tables: one row an operator, one row a reduction.

A row gives an operator's name, its NumPy meaning, its CUDA expression, its derivative, its document line and how exact
it is; `rows.py` says more. Everything that needs to know operators walks these tables: tracer, emission, the NumPy
engine, the self-test, tests, documentation. Adding an activation is adding a row.

CUDA expressions name their operands `{0}`, `{1}`, `{2}` and write constants as `T(0.5)`; `T` is float or double. They
give what the NumPy meaning gives for ±inf and NaN too. Derivatives are written against a namespace `o` that holds every
operator by name, so that the same text serves arrays (in tests) and traced values (in a backward pass):
`derivative(o, y, *x)` returns one partial derivative for each operand, None where it is zero everywhere.
"""

from __future__ import annotations

from . import activations, elementary, reductions
from .table import LIBRARY, LOST, Operator, Reduction

POINTWISE: dict[str, Operator] = {row.name: row for row in (*elementary.ROWS, *activations.ROWS)}
REDUCTIONS: dict[str, Reduction] = {row.name: row for row in reductions.ROWS}

__all__ = ["LIBRARY", "LOST", "POINTWISE", "REDUCTIONS", "Operator", "Reduction"]
