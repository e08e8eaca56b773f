"""Traced numbers that are Python's where the plain function runs, such as `x[mask].size`: weak in promotion.

Python's operators, `round`, `min` and `max` of them alone give such numbers again; NumPy's functions give its scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..ir.library import PYTHON_INTEGER
from ..ir.operators import COMPARISONS, POINTWISE
from .value import NamedConstant, TracedValue

_WEAK = (int, float, complex)  # Python's True is as strong as NumPy's
_CLASSES = (bool, *_WEAK, NamedConstant)
_BY_DTYPE: dict[str, type] = {"int64": int, "float64": float, "complex128": complex}
_LOGIC = (*COMPARISONS, "and", "or", "xor", "rand", "ror", "rxor")


def is_python(value: Any) -> bool:
    """Whether a value is a number of Python's, traced or not."""
    if isinstance(value, TracedValue):
        return bool(getattr(value, "_is_python", False))
    return value.__class__ in _CLASSES


def as_python(number: Any) -> Any:
    """Mark a traced scalar as a number that is Python's where the plain function runs."""
    number._is_python = True
    return number


def is_weak(value: Any) -> bool:
    """Whether a value is a traced number that takes the dtype of arrays beside it."""
    return isinstance(value, TracedValue) and is_python(value) and value._node.dtype in _BY_DTYPE


def python_operator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's method that gives a number of Python's if all operands are."""

    @functools.wraps(method)
    def call(self: Any, *others: Any) -> Any:
        """Call the method on numbers as Python takes them: True as 1, and negative powers of integers as floats."""
        if self._is_python and any(isinstance(o, (list, tuple, str)) for o in others):
            self._needs_value()  # as many copies of a list
        if not self._is_python or not all(map(is_python, others)):
            return method(self, *others)
        if self._node.dtype == "bool" and name not in _LOGIC:
            self = self.astype("int64")
        if name == "pow" and type(others[0]) is int and others[0] < 0:
            self = self.astype("float64")
        result = method(self, *others)
        return result if result is NotImplemented else as_python(result)

    return call


# Promotion ------------------------------------------------------------------------------------------------------------


def weakened(op: str, operands: list[Any]) -> list[Any]:
    """Return the operands of a pointwise operator with those that are weak in the dtypes that they take there."""
    if not any(map(is_weak, operands)):
        return operands
    values = operands[1:] if op == "where" else operands
    strong = [t._node.dtype for t in values if not is_weak(t) and t._node.op != "const"]
    if not strong:
        return operands
    dtype = dtypes.promote_weak(strong, [kind(0) for t in values if isinstance(kind := _type_of(t), type)])
    if not _is_any_integer(dtype):
        found = [t.astype(dtype) if is_weak(t) else t for t in values]
    elif POINTWISE[op].result == "bool":
        return operands  # integers of all sizes compare as they are
    elif not isinstance(getattr(np, op, None), np.ufunc):  # of `where`, which lets them wrap around, and `clip`
        found = [t.astype(dtype, copy=False) if is_weak(t) else t for t in values]
    else:
        found = list(weak_in_loop_dtypes(getattr(np, op), values))
    return [*operands[: len(operands) - len(values)], *found]


def weak_in_loop_dtypes(ufunc: Any, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Return the operands of a ufunc with those that are weak in the dtypes of the loop that NumPy chooses."""
    types = [_type_of(o) for o in operands]
    if not any(map(is_weak, operands)) or not any(isinstance(t, np.dtype) for t in types):
        return tuple(operands)
    try:
        loop = ufunc.resolve_dtypes((*types, *[None] * ufunc.nout))
    except TypeError:
        return tuple(operands)
    pairs = zip(operands, loop[: len(operands)], strict=True)
    return tuple(_checked(o, d.name) if is_weak(o) else o for o, d in pairs)


def _type_of(operand: Any) -> Any:
    """Return int, float or complex for an operand that is weak in promotion, else its dtype."""
    if not isinstance(operand, TracedValue):
        return operand.__class__ if operand.__class__ in _WEAK else np.result_type(operand)
    weak = operand._node.op == "const" or is_weak(operand)
    return _BY_DTYPE.get(operand._node.dtype, operand.dtype) if weak else operand.dtype


def _is_any_integer(dtype: str) -> bool:
    """Whether a dtype is one of integers."""
    return dtypes.is_integer(dtype) or dtype == "uint64"


def _checked(x: Any, dtype: str) -> Any:
    """Return a number in a dtype; in one of integers that may not hold it by a step that raises NumPy's error."""
    if x._node.dtype != "int64" or dtype == "int64" or not _is_any_integer(dtype):
        return x.astype(dtype, copy=False)
    return x._trace.call_library(PYTHON_INTEGER, [x, dtype])


def limit_for(dtype: str, limit: Any) -> Any:
    """Return a limit of `numpy.clip` as arrays of a dtype take it: integers beyond theirs are no limits."""
    if dtype not in dtypes.NARROW or not is_weak(limit) or limit._node.dtype != "int64":
        return limit
    bounds = np.iinfo(dtype)
    return limit._trace.apply("clip", limit, int(bounds.min), int(bounds.max)).astype(dtype)
