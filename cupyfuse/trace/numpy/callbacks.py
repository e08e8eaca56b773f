"""NumPy's functions that call a Python function, which is traced on each row, or on masked elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..axes import normalize_axes
from ..library import tracers_in
from ..operations import as_tracer
from ..tracer import Tracer
from ..user_code import fail, user_line
from ..value import LONGEST_ITERATION
from .lists import stacked


def _apply_along_axis(func1d: Any, axis: Any, arr: Tracer, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to each vector along an axis, which the axes of its result replace."""
    (along,) = normalize_axes(axis, arr.ndim, "apply_along_axis")
    others = tuple(n for p, n in enumerate(arr.shape) if p != along)
    indices = list(np.ndindex(*others))
    if not 0 < len(indices) <= LONGEST_ITERATION:
        fail(
            f"np.apply_along_axis over {len(indices)} rows",
            "each would be traced by itself; write it for the whole array, as in x.sum(axis=0)",
        )
    moved = arr.transpose(*(p for p in range(arr.ndim) if p != along), along)
    results = [as_tracer(func1d(moved[i], *args, **kwargs), arr._trace) for i in indices]
    result = as_tracer(np.stack(results), arr._trace).reshape(*others, *results[0].shape)
    new, after = range(len(others), result.ndim), range(along, len(others))
    return result.transpose(*range(along), *new, *after)


def _apply_over_axes(func: Any, a: Tracer, axes: Any) -> Tracer:
    """Apply a function along one axis after another, each of which it keeps or drops."""
    result = a
    for given in axes if isinstance(axes, (list, tuple)) else (axes,):
        (axis,) = normalize_axes(given, a.ndim, "apply_over_axes")
        found = as_tracer(func(result, axis), a._trace)
        result = found if found.ndim == a.ndim else found[(slice(None),) * axis + (None,)]
        if result.ndim != a.ndim:
            raise ValueError(
                f"apply_over_axes: the function gives {found.ndim} dimensions of {a.ndim}, and may drop one\n"
                f"  at {user_line()}"
            )
    return result


def _piecewise(x: Any, condlist: Any, funclist: Any, *args: Any, **kw: Any) -> Any:
    """Evaluate a function on the elements of each condition, as `numpy.piecewise`; the last true condition decides."""
    x = as_tracer(x, next(tracers_in((x, condlist)))._trace)
    if isinstance(condlist, (list, tuple)):
        several = x.ndim == 0 or isinstance(condlist[0], list) or np.ndim(condlist[0]) > 0
    else:
        several = np.ndim(condlist) > min(x.ndim, 1)
    conditions = [as_tracer(stacked(c), x._trace) for c in (condlist if several else [condlist])]
    conditions = [c if c._node.dtype == "bool" else c != 0 for c in conditions]
    if len(funclist) == len(conditions) + 1:
        rest = ~conditions[0]
        for c in conditions[1:]:
            rest = rest & ~c
        conditions.append(rest)
    if len(funclist) != len(conditions):
        raise ValueError(
            f"piecewise: {len(conditions)} conditions take as many functions, or one more; got {len(funclist)}\n"
            f"  at {user_line()}"
        )
    result: Any = np.zeros_like(x)
    for condition, function in zip(conditions, funclist, strict=True):
        if callable(function):
            result[condition] = function(x[condition], *args, **kw)
        else:
            result[condition] = function
    return result


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.apply_along_axis: _apply_along_axis,
    np.apply_over_axes: _apply_over_axes,
    np.piecewise: _piecewise,
}
