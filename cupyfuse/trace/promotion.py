"""Promotion of operands: the dtypes in which NumPy computes with bools, integers and complex numbers.

Kernels compute with bool, int64 and floats. Narrower integers are computed as int64 and cast back, which wraps around
as in NumPy. Where that does not serve (powers of integers, uint64, complex numbers) NumPy's or CuPy's own ufunc is a
library step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.operators import POINTWISE
from .tracer import Tracer
from .user_code import fail, user_line

UFUNCS: dict[str, np.ufunc] = {
    name: ufunc for name in POINTWISE if isinstance(ufunc := getattr(np, name, None), np.ufunc)
}
_UNCHANGED_INTEGERS = ("floor", "ceil", "trunc")
_ADVICE = {
    "subtract": "use ~, ^ or np.logical_not, as NumPy asks for",
    "negative": "use ~, ^ or np.logical_not, as NumPy asks for",
}


Casting = Literal["same_kind", "unsafe"]


@dataclass(frozen=True)
class Converted:
    """Operands in the dtypes in which an operator computes.

    Attributes
    ----------
    operands : list of Tracer
    result : str
        The dtype to cast the result to; empty for no cast.
    library : bool
        Whether a library step computes the result from the original operands.
    """

    operands: list[Tracer]
    result: str = ""
    library: bool = False


def convert(op: str, operands: list[Tracer]) -> Converted:
    """Convert the operands of a pointwise operator as NumPy does.

    Raises
    ------
    TraceError
        NumPy has no loop for these dtypes.
    OverflowError
        A Python integer does not fit into the dtype of the arrays.
    """
    strong = [t._node.dtype for t in operands if t._node.op != "const"]
    values = operands[1:] if op == "where" else operands
    dtype = g.promoted_dtype(t._node for t in values)
    if not POINTWISE[op].takes_floats and (dtypes.is_float(dtype) or dtypes.is_complex(dtype)):
        fail(f"{op} of {dtype} arrays", "it works on integers and masks (comparisons); convert with .astype first")
    if all(map(dtypes.is_float, strong)) and not dtypes.is_opaque(dtype):
        _check_floats(operands)
        return Converted(operands)
    if any(map(dtypes.is_opaque, (*strong, dtype))):
        return Converted(operands, library=True)
    if op in UFUNCS and not any(map(dtypes.is_float, strong)):
        return _by_loop(op, operands, dtype)
    if dtypes.is_integer(dtype) and op in ("where", "clip"):
        # NumPy's `where` lets integers wrap around; those beyond int64 are refused here (NumPy: from 2^64 on).
        _check_range(values, "int64" if op == "where" else dtype)
        return Converted(_as_int64(operands), dtype if dtype != "int64" else "")
    return Converted(operands)


def _by_loop(op: str, operands: list[Tracer], dtype: str) -> Converted:
    """Convert bools and integers, of a promoted dtype, to the dtypes of the ufunc loop that NumPy chooses."""
    kinds = [type(t._node.value) if t._node.op == "const" else t.dtype for t in operands]
    given = [np.dtype(bool) if k is bool else k for k in kinds]
    try:
        *loop, result = (d.name for d in UFUNCS[op].resolve_dtypes((*given, None)))
    except TypeError:
        fail(f"{op} of {' and '.join(sorted({str(t.dtype) for t in operands}))} arrays", _ADVICE.get(op, _NO_LOOP))
    if any(map(dtypes.is_opaque, (*loop, result))):
        return Converted(operands, library=True)
    if dtypes.is_float(result) or all(map(dtypes.is_float, loop)):
        return Converted([_cast(t, name) for t, name in zip(operands, loop, strict=True)])
    if result != "bool" and POINTWISE[op].gives_integers:
        _check_range(operands, dtype)
        # NumPy computes masks alone as int8.
        integers = [_cast(t, "int64") for t in operands] if dtype == "bool" else _as_int64(operands)
        return Converted(integers, result if result in dtypes.NARROW else "")
    if result == "bool":
        has_integers = any(dtypes.is_integer(t._node.dtype) for t in operands if t._node.op != "const")
        return Converted([_comparable(t) if has_integers else t for t in _as_int64(operands)])
    if op in _INTEGER_FORMS:
        return Converted(_as_int64(operands), result if result in dtypes.NARROW else "")
    return Converted(operands, library=True)


_NO_LOOP = "NumPy refuses it as well; convert the operands with .astype first"


def _cast(x: Tracer, dtype: str) -> Tracer:
    """Cast an array; numbers stay as they are."""
    return x if x._node.op == "const" else x._trace.array(g.cast(x._node, dtype), x._axes)


def _as_int64(operands: Sequence[Tracer]) -> list[Tracer]:
    """Cast the operands of narrow integer dtypes to int64."""
    return [_cast(t, "int64") if t._node.dtype in dtypes.NARROW else t for t in operands]


def _check_range(operands: Sequence[Tracer], dtype: str) -> None:
    """Raise OverflowError if a Python integer does not fit into the dtype of the arrays, as NumPy does."""
    if not dtypes.is_integer(dtype):
        return
    limits = np.iinfo(dtype)
    for t in operands:
        value = t._node.value
        if t._node.op == "const" and not limits.min <= value <= limits.max:
            raise OverflowError(f"Python integer {value} out of bounds for {dtype}\n  at {user_line()}")


def _check_floats(operands: Sequence[Tracer]) -> None:
    """Raise OverflowError if a Python integer is too large for a float, as which arrays of floats take it."""
    for t in operands:
        if t._node.op == "const" and type(t._node.value) is int:
            try:
                float(t._node.value)
            except OverflowError as error:
                raise OverflowError(f"{error}\n  at {user_line()}") from None


def _comparable(x: Tracer) -> Tracer:
    """Return an operand of a comparison of integers: infinity for a Python integer that int64 cannot hold."""
    value, int64 = x._node.value, np.iinfo(np.int64)
    if x._node.op != "const" or type(value) is not int or int64.min <= value <= int64.max:
        return x
    return x._trace.array(g.const(math.inf if value > 0 else -math.inf), x._axes)


def checked_number(dtype: str, value: Any, casting: Casting | None = None) -> Any:
    """Check that an array of a dtype can hold what is written to it, if that is a Python number; return it.

    Without `casting` it is assigned, with it copied as by `np.copyto`. An integer that int64 cannot hold is returned as
    the array holds it; all others unchanged, since writing casts them.

    Raises
    ------
    OverflowError, ValueError, TypeError
        The array cannot hold the number.
    """
    if type(value) not in (int, float):
        return value
    held = np.zeros((), dtypes.to_numpy(dtype))
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of bfloat16's overflows
            if casting is None:
                held[()] = value
            else:
                np.copyto(held, value, casting=casting)
    except (OverflowError, ValueError, TypeError) as error:
        raise type(error)(f"{error}\n  at {user_line()}") from error
    return held.item() if type(value) is int and not -(2**63) <= value < 2**63 else value


def _sign(x: Tracer) -> Tracer:
    return (x > 0).astype("int64") - (x < 0).astype("int64")


# Operators on bool or int64, where the row of the table is a function of floats.
_INTEGER_FORMS: dict[str, Callable[[Tracer], Tracer]] = {
    "absolute": lambda x: x._as_result() if x._node.dtype == "bool" else x._trace.apply("maximum", x, -x),
    "sign": _sign,
    **dict.fromkeys(_UNCHANGED_INTEGERS, Tracer.copy),
}


_MASK_FORMS = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "not_equal",
    "invert": "logical_not",
}


def mask_form(op: str, operands: Sequence[Tracer]) -> str:
    """Return the logical operator for an operator on bits whose operands are all masks; others as they are."""
    return _MASK_FORMS.get(op, op) if all(t._node.dtype == "bool" for t in operands) else op


def integer_form(op: str, operands: list[Tracer]) -> Callable[[Tracer], Tracer] | None:
    """Return the form of a unary operator for bool and int64 where the table's is for floats only; else None."""
    return None if dtypes.is_float(operands[0]._node.dtype) else _INTEGER_FORMS.get(op)
