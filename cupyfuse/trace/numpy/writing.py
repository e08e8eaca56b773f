"""Results written to `out` arrays, and NumPy's functions that assign to elements, as `np.put` and `np.copyto`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...ir.library import writing_call
from ..library import call_library, tracers_in
from ..operations import apply, as_tracer
from ..parts import without_leading_ones
from ..promotion import Casting, checked_number
from ..tracer import Tracer
from ..user_code import fail, user_line
from ..watched import note
from .signatures import signature_of

# Functions that convert results to any dtype of `out`, as ufuncs' reductions do; others only within the same kind.
_NAMES = """
    sum prod mean var max min amax amin any all argmax argmin nansum nanprod nanmax nanmin cumsum cumprod nancumsum
    nancumprod cumulative_sum cumulative_prod trace median nanmedian take compress choose
"""
CONVERTING = frozenset(_NAMES.split())


def target_of(operation: str, x: Any) -> Tracer:
    """Return the array that an operation writes to, or raise if it is not traced."""
    if not isinstance(x, Tracer):
        note([x])
        fail(
            operation,
            "the array that it changes has to be an argument of the fused function or computed in it; change a copy by "
            "np.array(a) of one that NumPy's functions did not make, as of random numbers",
        )
    return x


def with_traced_operand(values: tuple[Any, ...], other: Tracer) -> tuple[Any, ...]:
    """Return the operands of an operation, of which one at least is traced, as `other` is: its `out` or an option.

    Where none is, the arrays among them become constants of the trace; where there are no arrays, the first NumPy
    scalar does, or the first operand.
    """
    if not values or next(tracers_in(values), None) is not None:
        return values
    chosen = [k for k, value in enumerate(values) if isinstance(value, np.ndarray)]
    chosen = chosen or [next((k for k, value in enumerate(values) if isinstance(value, np.generic)), 0)]
    traced = {k: as_tracer(np.asarray(values[k]), other._trace) for k in chosen}
    return tuple(traced.get(k, value) for k, value in enumerate(values))


def dtype_with_out(x: Any, out: Tracer) -> str | None:
    """Return the dtype in which a reduction of floats to an `out` array computes; None for that of the operand."""
    if not isinstance(x, Tracer) or not dtypes.is_float(x._node.dtype):
        return None
    dtype = dtypes.promote(x._node.dtype, out._node.dtype)
    return dtype if dtype != x._node.dtype and dtypes.is_float(dtype) else None


def assign_out(name: str, out: Tracer, result: Tracer, converting: bool = False) -> Tracer:
    """Assign the result of a function to its `out` array; `converting` it to any dtype, as some functions do."""
    if out.shape != result.shape:
        raise ValueError(f"np.{name}: out has shape {out.shape}, the result {result.shape}\n  at {user_line()}")
    if converting or name in CONVERTING:
        result = result.astype(out.dtype, copy=False)
    assigned: Tracer = out._assign_all(result)
    return assigned


def _write_by_library(name: str, *arguments: Any, **options: Any) -> None:
    """Assign to an array the result of a library step, which writes to a copy of it."""
    x, *values = signature_of(getattr(np, name)).bind(*arguments, **options).args
    target = target_of(f"np.{name}", x)
    target._assign(call_library(writing_call(name), [target, *values]))


def _copyto(dst: Any, src: Any, casting: Casting = "same_kind", where: Any = True) -> None:
    target = target_of("np.copyto", dst)
    value = target._trace.tracer_of(checked_number(target._node.dtype, src, casting))
    if type(src) in (int, float) or casting != "same_kind":  # Python numbers take the dtype of the array
        if type(src) not in (int, float) and not np.can_cast(value.dtype, target.dtype, casting):
            raise TypeError(
                f"Cannot cast array data from {value.dtype!r} to {target.dtype!r} according to the rule {casting!r}"
                f"\n  at {user_line()}"
            )
        value = value.astype(target.dtype)
    value = without_leading_ones(value, target.ndim)
    target._assign_all(value if where is True else apply("where", where, value.astype(target.dtype), target))


def _fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    target = target_of("np.fill_diagonal", a)
    if target.ndim != 2 or wrap or (val.ndim if isinstance(val, Tracer) else np.ndim(val)):
        _write_by_library("fill_diagonal", target, val, wrap)
        return
    diagonal = target._trace.constant(np.eye(*target.shape, dtype=bool))
    value = target._trace.tracer_of(val)
    target._assign_all(apply("where", diagonal, value.astype(target.dtype), target))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.copyto: _copyto,
    np.fill_diagonal: _fill_diagonal,
    np.place: partial(_write_by_library, "place"),
    np.put: partial(_write_by_library, "put"),
    np.put_along_axis: partial(_write_by_library, "put_along_axis"),
    np.putmask: partial(_write_by_library, "putmask"),
}
