"""Traced numbers that are Python's where the plain function runs, such as `x[mask].size`: weak in promotion.

Python's operators, `round`, `min` and `max` of them alone give such numbers again; NumPy's functions give its scalars.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..ir.library import PYTHON_INTEGER
from ..ir.operators import COMPARISONS, POINTWISE
from .user_code import fail, user_line
from .value import LONGEST_ITERATION, NamedConstant, TracedValue

_WEAK = (int, float, complex)  # Python's True is as strong as NumPy's
_CLASSES = (bool, *_WEAK, NamedConstant)
_BY_DTYPE: dict[str, type] = {"int64": int, "float64": float, "complex128": complex}
_WIDE = {"b": "bool", "i": "int64", "u": "int64", "c": "complex128"}  # by the kinds of dtypes, all but floats
_RAISING = ("truediv", "floordiv", "mod", "pow")
_LOGIC = (*COMPARISONS, "and", "or", "xor", "rand", "ror", "rxor")


def is_python(value: Any) -> bool:
    """Whether a value is a number of Python's, traced or not."""
    if isinstance(value, TracedValue):
        return bool(getattr(value, "_is_python", False))
    return value.__class__ in _CLASSES


def class_of(number: Any) -> type:
    """Return the class of a traced number that is Python's."""
    return _BY_DTYPE.get(number._node.dtype, bool)


def as_python(number: Any) -> Any:
    """Mark a traced scalar as a number that is Python's where the plain function runs."""
    number._is_python = True
    return number


def as_python_like(number: Any, source: Any) -> Any:
    """Mark a traced scalar as Python's if the one is that it is computed from."""
    number._is_python = source._is_python
    return number


def item_of(array: Any, *index: Any) -> Any:
    """Return the only element of an array, or the one at an index, as a number of Python's: `ndarray.item`."""
    if len(index) == 1 and isinstance(index[0], tuple):
        index = index[0]
    if len(index) not in (0, 1, array.ndim):
        raise ValueError(f"incorrect number of indices for array\n  at {user_line()}")
    if len(index) == 1 and array.ndim != 1:
        array = array.copy().ravel()
    found = array[tuple(map(operator.index, index))] if index else array
    if found.size != 1:
        raise ValueError(f"can only convert an array of size 1 to a Python scalar\n  at {user_line()}")
    scalar = found._trace.reshape(found._as_result(), (), "C")
    if found._node.dtype == "uint64":  # an integer of Python's, as int64 if that holds it
        return as_python(scalar._trace.call_library(PYTHON_INTEGER, [scalar, "int64"])._as_result())
    return as_python(scalar.astype(_WIDE.get(found.dtype.kind, "float64"))._as_result())


def list_of(array: Any) -> Any:
    """Return the elements of an array as numbers of Python's in lists, of a 0-d one its number: `ndarray.tolist`."""
    if not array.ndim:
        return item_of(array)
    if array.size > LONGEST_ITERATION:
        fail(
            f"a list of {array.size} numbers",
            "each would be traced by itself; return the array, and make it a list outside of the fused function",
        )
    return [list_of(array[i]) for i in range(len(array))]


def as_integer(scalar: Any) -> Any:
    """Return a traced scalar without its fraction as an integer of Python's; in the call, NaN and infinities raise."""
    number = item_of(scalar)
    if dtypes.is_float(number._node.dtype):
        return by_python("math.trunc", "int64", [number])
    return as_python(number.astype("int64")._as_result())


def rounded(array: Any, ndigits: int | None = None) -> Any:
    """Return what Python's `round` gives for a traced scalar."""
    if array.ndim:
        raise TypeError(f"type numpy.ndarray doesn't define __round__ method\n  at {user_line()}")
    found = array._trace.call_method("round", array, ndigits or 0)
    return as_integer(found) if ndigits is None else as_python_like(found, array)


def is_integer(scalar: Any) -> Any:
    """Return whether a traced scalar has no fraction, as its method of the name does."""
    if not dtypes.is_float(scalar._node.dtype):
        return True
    return as_python(np.isfinite(scalar) & (np.floor(scalar) == scalar))


METHODS_OF_NUMBERS: dict[str, Callable[..., Any]] = {"is_integer": is_integer}  # where the type has them


def is_weak(value: Any) -> bool:
    """Whether a value is a traced number that takes the dtype of arrays beside it."""
    return isinstance(value, TracedValue) and is_python(value) and value._node.dtype in _BY_DTYPE


def python_operator(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator's method that gives a number of Python's if all operands are."""

    @functools.wraps(method)
    def call(self: Any, *others: Any) -> Any:
        """Call the method on numbers as Python takes them: True as 1; a step computes what raises for some values."""
        if self._is_python and any(isinstance(o, (list, tuple, str)) for o in others):
            self._needs_value()  # as many copies of a list
        if not self._is_python or not all(map(is_python, others)):
            return method(self, *others)
        if self._node.dtype == "bool" and name not in _LOGIC:
            self = self.astype("int64")
        if (operation := name.removeprefix("r")) in _RAISING:
            operands = (others[0], self) if name != operation else (self, others[0])
            if _may_raise(operation, *operands):
                return by_python(f"operator.{operation}", _dtype_of_result(operation, *operands), operands)
        result = method(self, *others)
        return result if result is NotImplemented else as_python(result)

    return call


def _may_raise(name: str, left: Any, right: Any) -> bool:
    """Whether an operator raises for some values of its operands, or gives numbers of other types than of others."""
    if isinstance(right, TracedValue) or type(right) not in (bool, int, float):
        return True
    if name != "pow":
        return right == 0
    return right < 0 or float in (_kind_of(left), type(right))


def _dtype_of_result(name: str, left: Any, right: Any) -> str:
    """Return the dtype of what an operator that may raise gives."""
    if float in (_kind_of(left), _kind_of(right)) or name == "truediv":
        return "float64"
    return "float64" if name == "pow" and not isinstance(right, TracedValue) and right < 0 else "int64"


def by_python(function: str, dtype: str, operands: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """Add a step that computes a function of numbers, some traced, as Python does, with its errors."""
    trace = next(o._trace for o in operands if isinstance(o, TracedValue))
    given = [o if type(o) in _CLASSES else trace.tracer_of(o) for o in operands]
    result = trace.call_library(function, [dtype, *given], options)
    result._is_array = False
    return as_python(result)


def _kind_of(operand: Any) -> type:
    """Return whether a number of Python's is a float; others are integers, and True and False."""
    if isinstance(operand, TracedValue):
        return float if dtypes.is_float(operand._node.dtype) else int
    return float if issubclass(operand.__class__, float) else int


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
    return tuple(in_dtype_or_raise(o, d.name) if is_weak(o) else o for o, d in pairs)


def _type_of(operand: Any) -> Any:
    """Return int, float or complex for an operand that is weak in promotion, else its dtype."""
    if not isinstance(operand, TracedValue):
        return operand.__class__ if operand.__class__ in _WEAK else np.asarray(operand).dtype
    weak = operand._node.op == "const" or is_weak(operand)
    return _BY_DTYPE.get(operand._node.dtype, operand.dtype) if weak else operand.dtype


def _is_any_integer(dtype: str) -> bool:
    """Whether a dtype is one of integers."""
    return dtypes.is_integer(dtype) or dtype == "uint64"


def in_dtype_or_raise(x: Any, dtype: str) -> Any:
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
