"""Native forms of NumPy's reductions, nan-reductions, argmax and argmin, and averages."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...dtypes import compute_dtype
from ..axes import normalize_axes
from ..broadcasting import expand
from ..library import call_library
from ..number import TracedNumber
from ..operations import apply, as_tracer, count, reduce, variance
from ..tracer import Tracer
from ..user_code import fail, refuse_options, user_line
from ..value import NamedConstant, filled_with

_NEUTRAL = {"sum": 0, "prod": 1}
_COMBINED_BY = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}
_NO_VALUE = type(np._NoValue)  # of options that are left out


def _flag(keepdims: Any) -> bool:
    return not isinstance(keepdims, _NO_VALUE) and bool(keepdims)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are not left out."""
    return {k: v for k, v in options.items() if not isinstance(v, _NO_VALUE)}


def reduction(
    op: str,
    a: Tracer,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    keepdims: Any = False,
    initial: Any = None,
    where: Any = True,
) -> Any:
    """Reduce as `np.sum`, `np.prod`, `np.max` or `np.min`, for that op."""
    if isinstance(initial, _NO_VALUE):
        initial = None
    if initial is not None and op in ("max", "min"):
        initial = _initial_value(initial, a._node.dtype, a._trace)
    if where is not True and not isinstance(where, _NO_VALUE):
        neutral = _NEUTRAL.get(op, initial)
        if neutral is None:
            raise ValueError(f"np.{op}: where= needs initial=, as NumPy asks for\n  at {user_line()}")
        # In the array's own dtype, since NumPy leaves elements out without promoting the others.
        a = apply("where", mask_of(f"np.{op}", where), a, bool(neutral) if a._node.dtype == "bool" else neutral)
    if initial is not None and op in ("max", "min") and is_empty(a, axis):
        return filled_result(a, axis, _flag(keepdims), initial)
    result = reduce(op, a, axis, _flag(keepdims), dtype=dtype, out=out)
    if initial is None:
        return result
    return apply(_COMBINED_BY[op], result, _initial_value(initial, result._node.dtype, a._trace))


def mask_of(operation: str, where: Any) -> Any:
    """Return the mask of an operation's `where`; raise TypeError, as NumPy does, if it is an array of another dtype."""
    if isinstance(where, (list, tuple)):
        made: Any = np.asarray(where)  # of traced arrays it is one
        where = made if isinstance(made, Tracer) else made.astype(bool)
    if not isinstance(where, (Tracer, np.ndarray)):
        return bool(where)
    name = where._node.dtype if isinstance(where, Tracer) else str(where.dtype)
    if name != "bool":
        raise TypeError(f"{operation}: where: expected bools, got {name}; compare it, as in x != 0\n  at {user_line()}")
    return where


def _initial_value(initial: Any, dtype: str, trace: Any) -> Any:
    """Return the initial value of a reduction in the dtype of its result, to which NumPy converts it."""
    if isinstance(initial, (Tracer, TracedNumber, NamedConstant)):
        return as_tracer(initial, trace).astype(dtype)
    return filled_with(initial, dtypes.to_numpy(dtype))


def is_empty(a: Tracer, axis: Any) -> bool:
    """Whether a reduction along some axes is one of no elements."""
    return a.ndim > 0 and any(a.shape[p] == 0 for p in normalize_axes(axis, a.ndim))


def filled_result(a: Tracer, axis: Any, keepdims: bool, value: Any) -> Tracer:
    """Return the result of a reduction along some axes, in the array's dtype, with a value in each place."""
    positions = normalize_axes(axis, a.ndim)
    shape = tuple(1 if p in positions else n for p, n in enumerate(a.shape) if keepdims or p not in positions)
    return expand(as_tracer(_initial_value(value, a._node.dtype, a._trace), a._trace), shape)._as_result()


def extremum(op: str, a: Tracer, axis: Any = None, out: Any = None, keepdims: Any = False, **options: Any) -> Any:
    """Reduce as `np.max` or `np.min`, which have no parameter `dtype`."""
    return reduction(op, a, axis, None, out, keepdims, **options)


def mean(
    a: Tracer, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    if where is True or isinstance(where, _NO_VALUE):
        return reduce("mean", a, axis, _flag(keepdims), dtype=dtype, out=out)
    return _mean_of(a, _full_mask("np.mean", where, a), axis, dtype, out, _flag(keepdims))


def _mean_of(a: Tracer, mask: Tracer, axis: Any, dtype: Any, out: Any, keepdims: bool) -> Tracer:
    """Compute the mean of the elements that a mask selects, with sums and numbers of elements of 32 bits at least."""
    kind = a._node.dtype if dtype is None else dtypes.name_of(dtype)
    if dtype is None and not dtypes.is_float(kind) and not dtypes.is_complex(kind):
        kind = "float64"  # in which NumPy sums integers for a mean
    total = reduction("sum", a, axis, compute_dtype(kind) if dtypes.is_float(kind) else kind, out, keepdims, where=mask)
    return (total / reduce("sum", mask, axis, keepdims).astype(total._node.dtype)).astype(kind)


def _full_mask(operation: str, where: Any, a: Tracer) -> Tracer:
    """Return the mask of an operation's `where`, broadcast to the shape of an array."""
    mask = as_tracer(mask_of(operation, where), a._trace)
    return a._trace.expand(mask, a.shape) if mask.shape != a.shape else mask


def var(
    a: Tracer,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
    mean: Any = None,
    correction: Any = None,
) -> Any:
    ddof, keepdims = _degrees("var", ddof, correction), _flag(keepdims)
    where, mean = _where_and_mean(where, mean)
    kind = _checked_kind("var", a, dtype)
    if where is None and mean is None:
        # In the wider of both dtypes: NumPy squares the distances in it, and sums them in `dtype`.
        result = variance(a if kind is None else a.astype(_wider(a, kind), copy=False), axis, ddof, keepdims, out=out)
        return (result if kind is None else result.astype(kind, copy=False))._as_result()
    total, number = _squared_distances(a, kind, axis, keepdims, where, mean)
    degrees = apply("maximum", number.astype("float64") - float(ddof), 0.0).astype(total._node.dtype)
    return (total / degrees).astype(kind or _kind_of_distances(a, mean))


def _where_and_mean(where: Any, mean: Any) -> tuple[Any, Any]:
    """Return these options, None for what is left out."""
    is_left_out = where is True or isinstance(where, _NO_VALUE)
    return None if is_left_out else where, None if isinstance(mean, _NO_VALUE) else mean


def _degrees(name: str, ddof: float, correction: Any) -> float:
    """Return the degrees of freedom that a variance lacks, given as either option."""
    if correction is None or isinstance(correction, _NO_VALUE):
        return ddof
    if ddof != 0:
        raise ValueError(f"np.{name}: ddof={ddof} and correction={correction}: give one of them\n  at {user_line()}")
    return float(correction)


def _checked_kind(name: str, a: Tracer, dtype: Any) -> str | None:
    """Return the name of the dtype that a variance is asked for in; None if it is in that of the array."""
    if dtype is None:
        return None
    kind = dtypes.name_of(dtype)
    if not dtypes.is_float(kind) or dtypes.is_complex(a._node.dtype):
        fail(
            f"np.{name} with dtype={kind} of a {a._node.dtype} array", "give a real float dtype, or convert the result"
        )
    return kind


def _wider(a: Tracer, kind: str) -> str:
    """Return the float dtype that holds values of an array and of another float dtype."""
    return dtypes.promote(a._node.dtype if dtypes.is_float(a._node.dtype) else "float64", kind)


def _kind_of_distances(a: Tracer, mean: Any) -> str:
    """Return the dtype of the distances of elements from a given mean, if any."""
    if not dtypes.is_float(a._node.dtype):
        return "float64"
    return a._node.dtype if mean is None else apply("subtract", a, mean)._node.dtype


def _squared_distances(
    a: Tracer, kind: str | None, axis: Any, keepdims: bool, where: Any, mean: Any
) -> tuple[Tracer, Tracer]:
    """Return the sums of squared distances from a mean, of the elements that a mask selects, and their numbers."""
    if dtypes.is_complex(a._node.dtype):
        fail("np.var with where= or mean= of complex numbers", "add the variances of x.real and x.imag")
    mask = _full_mask("np.var", True if where is None else where, a)
    wide = a.astype(compute_dtype(_wider(a, kind or _kind_of_distances(a, None))), copy=False)
    if mean is None:
        mean = _mean_of(wide, mask, axis, None, None, True)
    total = reduce("sum", apply("where", mask, apply("square", wide - mean), 0.0), axis, keepdims)
    return total, reduce("sum", mask, axis, keepdims)


def std(*args: Any, **options: Any) -> Any:
    return apply("sqrt", var(*args, **options))


def truth(op: str, a: Tracer, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
    """Reduce as `np.any` or `np.all`."""
    if where is not True and not isinstance(where, _NO_VALUE):
        a = apply("where", mask_of(f"np.{op}", where), apply("not_equal", a, 0), op == "all")
    return getattr(a, op)(axis, out, _flag(keepdims))


def count_nonzero(a: Tracer, axis: Any = None, *, keepdims: bool = False) -> Tracer:
    return reduce("sum", apply("not_equal", a, 0), axis, _flag(keepdims))


def ptp(a: Tracer, axis: Any = None, out: Any = None, keepdims: Any = False) -> Tracer:
    keepdims = _flag(keepdims)
    high = reduce("max", a, axis, keepdims, out=out)
    return high - reduce("min", a, axis, keepdims)


def average(a: Tracer, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = False) -> Any:
    """Compute `numpy.average`; weights that sum to zero give NaN or infinity instead of ZeroDivisionError."""
    trace = a._trace if isinstance(a, Tracer) else weights._trace
    a = as_tracer(a, trace)
    keepdims = _flag(keepdims)
    if weights is None:
        mean = reduce("mean", a, axis, keepdims)
        if not mean.size:
            # NumPy divides the number of elements by that of means.
            raise ZeroDivisionError(f"division by zero\n  at {user_line()}")
        number = _initial_value(float(count(a, axis)), mean._node.dtype, trace)
        total = expand(as_tracer(number, trace), mean.shape)._as_result()
    else:
        w = weights if isinstance(weights, Tracer) else as_tracer(np.asarray(weights), trace)
        if w.shape != a.shape:
            w = _weights_along(w, axis, a)
        if not dtypes.is_float(a._node.dtype) and not dtypes.is_complex(a._node.dtype):
            a = a.astype("float64")
        total = reduce("sum", trace.expand(w, a.shape).astype((a * w)._node.dtype), axis, keepdims)
        mean = reduce("sum", a * w, axis, keepdims) / total
    return (mean, total) if returned else mean


def _weights_along(w: Tracer, axis: Any, a: Tracer) -> Tracer:
    """Return weights of the elements along some axes of an array, in their order, with its other axes of length one."""
    if axis is None:
        raise TypeError(
            f"average: weights of shape {w.shape} for an array of shape {a.shape} need axis=\n  at {user_line()}"
        )
    axes = normalize_axes(axis, a.ndim, "average")
    expected = tuple(a.shape[p] for p in axes)
    if w.shape != expected:
        raise ValueError(f"average: weights of shape {w.shape} for elements of shape {expected}\n  at {user_line()}")
    in_order = w.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    return in_order[tuple(slice(None) if p in axes else None for p in range(a.ndim))]


# Ignoring NaN -------------------------------------------------------------------------------------------------------


def nan_reduction(op: str, a: Tracer, axis: Any = None, *args: Any, **options: Any) -> Any:
    """Reduce as `np.nansum` or `np.nanprod`."""
    if dtypes.is_float(a._node.dtype):
        a = apply("where", apply("isnan", a), float(_NEUTRAL[op]), a)
    return reduction(op, a, axis, *args, **_given(options))


def _not_nan(a: Tracer) -> Tracer:
    return apply("logical_not", apply("isnan", a))


def nan_extreme(op: str, a: Tracer, axis: Any = None, out: Any = None, keepdims: Any = False, **options: Any) -> Any:
    """Reduce as `np.nanmax` or `np.nanmin`; NaN where all elements are NaN."""
    keepdims, given = _flag(keepdims), _given(options)
    where, initial = given.pop("where", True), given.pop("initial", None)
    if not dtypes.is_float(a._node.dtype):
        return extremum(op, a, axis, out, keepdims, initial=initial, where=where)
    if where is not True and initial is None:
        raise ValueError(f"np.nan{op}: where= needs initial=, as NumPy asks for\n  at {user_line()}")
    if initial is not None and is_empty(a, axis):
        return filled_result(a, axis, keepdims, initial)
    selected, limit = _not_nan_where(where, a), -math.inf if op == "max" else math.inf
    found = reduce(op, apply("where", selected, a, limit), axis, keepdims, out=out)
    found = apply("where", reduce("sum", selected, axis, keepdims) > 0, found, math.nan)
    if initial is None:
        return found
    first = _initial_value(initial, found._node.dtype, a._trace)
    return a._trace.call_ufunc(f"f{op}", "__call__", (found, first), {})  # which ignores NaN


def nanmean(
    a: Tracer, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    if not dtypes.is_float(a._node.dtype):
        return mean(a, axis, dtype, out, keepdims, where=where)
    _check_inexact("nanmean", a, dtype)
    return _mean_of(a, _not_nan_where(where, a), axis, dtype, out, _flag(keepdims))


def _check_inexact(name: str, a: Tracer, dtype: Any) -> None:
    """Raise what NumPy raises where NaN is left out of floats, for a result of another kind."""
    if dtype is not None and not (dtypes.is_float(kind := dtypes.name_of(dtype)) or dtypes.is_complex(kind)):
        raise TypeError(f"np.{name}: dtype: expected a float dtype for {a._node.dtype}, got {kind}\n  at {user_line()}")


def _not_nan_where(where: Any, a: Tracer) -> Tracer:
    """Return the mask of elements that are numbers, and that `where` selects."""
    where, _ = _where_and_mean(where, None)
    return _not_nan(a) if where is None else apply("logical_and", _not_nan(a), mask_of("np.nanmean", where))


def nanvar(
    a: Tracer,
    axis: Any = None,
    dtype: Any = None,
    out: Any = None,
    ddof: float = 0,
    keepdims: Any = False,
    *,
    where: Any = True,
    mean: Any = None,
    correction: Any = None,
) -> Any:
    """Compute `numpy.nanvar`; NaN where there are no degrees of freedom."""
    if not dtypes.is_float(a._node.dtype):
        return var(a, axis, dtype, out, ddof, keepdims, where=where, mean=mean, correction=correction)
    refuse_options("np.nanvar", out=out)
    ddof, keepdims = _degrees("nanvar", ddof, correction), _flag(keepdims)
    _check_inexact("nanvar", a, dtype)
    kind = _checked_kind("nanvar", a, dtype) or a._node.dtype
    _, mean = _where_and_mean(where, mean)
    total, number = _squared_distances(a, kind, axis, keepdims, _not_nan_where(where, a), mean)
    degrees = (number.astype("float64") - float(ddof)).astype(total._node.dtype)
    return apply("where", degrees > 0, total / degrees, math.nan).astype(kind)


def nanstd(*args: Any, **options: Any) -> Any:
    return apply("sqrt", nanvar(*args, **options))


# Positions of extrema -----------------------------------------------------------------------------------------------


def arg_extreme(op: str, a: Tracer, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> Any:
    """Find the first position of the extreme, or of NaN, as `np.argmax` or `np.argmin` for op "max" or "min"."""
    keepdims = _flag(keepdims)
    refuse_options(f"np.arg{op}", out=out)
    if isinstance(axis, (tuple, list)):
        raise TypeError(f"np.arg{op}: axis: expected an integer or None, got {axis!r}\n  at {user_line()}")
    if a.ndim == 0 or a._node.dtype in ("int64", *dtypes.OPAQUE):
        return call_library(f"arg{op}", [a], {"axis": axis, "keepdims": keepdims})
    if axis is None:
        flat = arg_extreme(op, a.flatten(), 0, keepdims=True)
        return flat.reshape((1,) * a.ndim) if keepdims else flat[0]
    (p,) = normalize_axes(axis, a.ndim, f"arg{op}")
    if not dtypes.is_float(a._node.dtype):  # which holds these integers exactly
        a = a.astype("float32" if dtypes.ITEMSIZE[a._node.dtype] <= 2 else "float64")
    return reduce(f"arg{op}", a, p, keepdims)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: partial(reduction, "sum"),
    np.prod: partial(reduction, "prod"),
    np.mean: mean,
    np.max: partial(extremum, "max"),
    np.min: partial(extremum, "min"),
    np.amax: partial(extremum, "max"),
    np.amin: partial(extremum, "min"),
    np.var: var,
    np.std: std,
    np.any: partial(truth, "any"),
    np.all: partial(truth, "all"),
    np.count_nonzero: count_nonzero,
    np.ptp: ptp,
    np.average: average,
    np.nansum: partial(nan_reduction, "sum"),
    np.nanprod: partial(nan_reduction, "prod"),
    np.nanmax: partial(nan_extreme, "max"),
    np.nanmin: partial(nan_extreme, "min"),
    np.nanmean: nanmean,
    np.nanvar: nanvar,
    np.nanstd: nanstd,
    np.argmax: partial(arg_extreme, "max"),
    np.argmin: partial(arg_extreme, "min"),
}
