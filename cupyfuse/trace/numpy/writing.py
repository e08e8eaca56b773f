"""NumPy's functions that assign to elements of an array, such as `np.put` and `np.copyto`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...ir.library import writing_call
from ..library import call_library
from ..operations import apply
from ..promotion import Casting, checked_number
from ..tracer import Tracer
from ..user_code import fail, user_line
from ..watched import note


def _check_target(name: str, x: Any) -> Tracer:
    """Return the array that a function assigns to, or raise if it is not traced."""
    if not isinstance(x, Tracer):
        note([x])
        fail(f"np.{name}", "the array that it changes has to be an argument of the fused function or computed in it")
    return x


def _write_by_library(name: str, *arguments: Any, **options: Any) -> None:
    """Assign to an array the result of a library step, which writes to a copy of it."""
    x, *values = inspect.signature(getattr(np, name)).bind(*arguments, **options).args
    target = _check_target(name, x)
    target._assign(call_library(writing_call(name), [target, *values]))


def _copyto(dst: Any, src: Any, casting: Casting = "same_kind", where: Any = True) -> None:
    target = _check_target("copyto", dst)
    value = target._trace.tracer_of(checked_number(target._node.dtype, src, casting))
    if type(src) in (int, float) or casting != "same_kind":  # Python numbers take the dtype of the array
        if type(src) not in (int, float) and not np.can_cast(value.dtype, target.dtype, casting):
            raise TypeError(
                f"Cannot cast array data from {value.dtype!r} to {target.dtype!r} according to the rule {casting!r}"
                f"\n  at {user_line()}"
            )
        value = value.astype(target.dtype)
    target._assign_all(value if where is True else apply("where", where, value.astype(target.dtype), target))


def _fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    target = _check_target("fill_diagonal", a)
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
