"""Native forms of NumPy's elementwise, shape, mask and dtype functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ..axes import as_shape, normalize_axes
from ..broadcasting import broadcast_to, expand, reshape
from ..library import call_library
from ..number import TracedNumber
from ..operations import apply, as_tracer, clip, count, trace_of
from ..places import argwhere, nonzero
from ..promotion import checked_number
from ..python_numbers import as_python, class_of, is_python
from ..shape_functions import SHAPE_FUNCTIONS
from ..tracer import Tracer
from ..user_code import fail, refuse_options, user_line
from ..value import NamedConstant
from .creation import full_like


def _full_like(a: Tracer, fill_value: Any, dtype: Any = None, **options: Any) -> Tracer:
    name = a._node.dtype if dtype is None else dtypes.name_of(dtype)
    if dtypes.is_opaque(name) and not isinstance(fill_value, Tracer):
        shape = options.get("shape")
        return a._trace.constant(np.full(a.shape if shape is None else shape, fill_value, name))
    fill = as_tracer(checked_number(name, fill_value, "unsafe"), a._trace)
    return full_like(fill, a, dtype=name, **options)


def _where(condition: Any, *choices: Any) -> Any:
    if not choices:
        return nonzero(condition)
    if len(choices) != 2:
        raise ValueError(f"either both or neither of x and y should be given\n  at {user_line()}")
    trace = trace_of((condition, *choices))
    mask = as_tracer(condition, trace)
    if mask._node.dtype != "bool":
        mask = apply("not_equal", mask, 0)
    return _as_array(apply("where", mask, *choices))


def _select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """Choose by the first true condition, as `numpy.select`: the choices and the default are promoted together."""
    conditions, choices = list(condlist), [*choicelist, default]
    if len(conditions) != len(choices) - 1:
        raise ValueError(f"list of cases must be same length as list of conditions\n  at {user_line()}")
    if not conditions:
        raise ValueError(f"select with an empty condition list is not possible\n  at {user_line()}")
    masks = [c if isinstance(c, Tracer) else np.asarray(c) for c in conditions]
    for k, mask in enumerate(masks):
        if mask.dtype != bool:
            raise TypeError(f"invalid entry {k} in condlist: should be boolean ndarray\n  at {user_line()}")
    choices = [float(c) if isinstance(c, NamedConstant) else c for c in choices]
    choices = [c if isinstance(c, (Tracer, TracedNumber)) or type(c) in _NUMBERS else np.asarray(c) for c in choices]
    promoted = dtypes.name_of(np.result_type(*map(_promoting, choices)))
    if dtypes.is_opaque(promoted):
        return call_library("select", [masks, choices[:-1], choices[-1]])
    for choice in choices[:-1]:
        # NumPy copies numbers as arrays of int64 and so on, but for the default.
        if type(choice) in _NUMBERS and not np.can_cast(np.asarray(choice), dtypes.to_numpy(promoted), "same_kind"):
            raise TypeError(f"choicelist: cannot cast {choice!r} to {promoted} by same_kind\n  at {user_line()}")
    trace = trace_of((*masks, *choices))
    if type(choices[-1]) is int and abs(choices[-1]) >= 2**63:
        choices[-1] = checked_number(promoted, choices[-1])
    *values, found = (as_tracer(c, trace).astype(promoted) for c in choices)
    for mask, value in zip(reversed(masks), reversed(values), strict=True):
        found = apply("where", as_tracer(mask, trace), value, found)
    return _as_array(found)


_NUMBERS = (int, float, complex)  # of Python's, which are weak


def _promoting(value: Any) -> Any:
    """Return what stands for a value in `np.result_type`: a number of its type for Python's and others', or a dtype."""
    if isinstance(value, Tracer):
        return class_of(value)() if is_python(value) else value.dtype
    return value.__class__(0) if isinstance(value, TracedNumber) or type(value) in _NUMBERS else value.dtype


def _as_array(x: Tracer) -> Tracer:
    """Return a result as an array even if it is 0-d, where NumPy's other functions return scalars."""
    x._is_array = True
    return x


def _nan_to_num(x: Tracer, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Tracer:
    """Replace NaN and infinities as `numpy.nan_to_num`; with `copy=False`, in the array itself."""
    dtype = x._node.dtype
    if not dtypes.is_float(dtype):
        return x._as_result() if copy else x
    largest = float.fromhex("0x1.fep127") if dtype == "bfloat16" else float(np.finfo(x.dtype).max)
    limits = (largest if posinf is None else posinf), (-largest if neginf is None else neginf)
    top, bottom, nan = (v if isinstance(v, TracedNumber) else float(v) for v in (*limits, nan))
    infinite = apply("where", apply("greater", x, 0.0), top, bottom)
    finite = apply("where", apply("isinf", x), infinite, x)
    result = apply("where", apply("isnan", x), nan, finite).astype(dtype)
    if copy:
        return result
    return x._assign_all(result) if x.ndim else x._updated(result)._as_result()


def _expand_dims(x: Tracer, axis: Any) -> Tracer:
    axis = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    rank = x.ndim + len(axis)
    new = set(normalize_axes(axis, rank, "expand_dims"))
    return x[(*(None if p in new else slice(None) for p in range(rank)), ...)]


def _reshape(a: Tracer, shape: Any, order: str = "C", *, copy: Any = None) -> Tracer:
    result = reshape(a.copy("K") if copy else a, as_shape(shape), order)
    if copy is False and result._parent is not a:
        fail("np.reshape with copy=False", "whether it copies depends on how the array lies in memory; leave copy out")
    return result


def _round(a: Tracer, decimals: int = 0, out: Any = None) -> Any:
    """Scale by a power of ten, round to even, and scale back, as `numpy.round` does."""
    refuse_options("np.round", out=out)
    decimals = operator.index(decimals)
    if a._node.dtype == "bool" and decimals == 0:
        return apply("rint", a)
    if not dtypes.is_float(a._node.dtype):
        keeps = decimals >= 0 and dtypes.is_integer(a._node.dtype)
        return a._as_result() if keeps else call_library("round", [a, decimals])
    if decimals == 0:
        return apply("rint", a)
    scale = 10.0 ** abs(decimals)
    return apply("rint", a * scale) / scale if decimals > 0 else apply("rint", a / scale) * scale


def _clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None) -> Tracer:
    """Clip as `numpy.clip`, which makes an array of a number that it clips: of its dtype, which counts."""
    a = a.read() if isinstance(a, TracedNumber) else a
    a = np.asarray(a) if isinstance(a, (bool, int, float)) else a
    return clip(a, a_min if min is None else min, a_max if max is None else max, out=out)


def _fix(x: Tracer, out: Any = None) -> Any:
    refuse_options("np.fix", out=out)
    return apply("trunc", x)


def _isclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Tracer:
    """Compare as `numpy.isclose`, with a tolerance relative to the second array."""
    trace = trace_of((a, b))
    x, y = as_tracer(a, trace), as_tracer(b, trace)
    if any(dtypes.is_complex(v._node.dtype) for v in (x, y)):
        return call_library("isclose", [a, b], {"rtol": rtol, "atol": atol, "equal_nan": equal_nan})
    if type(b) in (int, bool):
        y = as_tracer(float(b), trace)
    elif y._node.op != "const" and not dtypes.is_float(y._node.dtype):
        y = y.astype("float64")
    near = apply("less_equal", apply("absolute", x - y), atol + rtol * apply("absolute", y))
    result = apply("logical_or", apply("logical_and", near, apply("isfinite", y)), apply("equal", x, y))
    if equal_nan:
        both = apply("logical_and", apply("isnan", x), apply("isnan", y))
        result = apply("logical_or", result, both)
    return result


def _allclose(a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False) -> Tracer:
    result: Tracer = as_python(_isclose(a, b, rtol, atol, equal_nan).all())
    return result


def _is_infinity(infinity: float, x: Tracer, out: Any = None) -> Tracer:
    """Compare with one infinity, as `np.isposinf` or `np.isneginf`."""
    refuse_options("np.isposinf and np.isneginf", out=out)
    return apply("equal", x, infinity)


def _at_least(rank: int, *arrays: Any) -> Any:
    """Return arrays with axes added up to a rank, as `np.atleast_1d`, `np.atleast_2d` or `np.atleast_3d`."""
    trace = trace_of(arrays)
    # Complex numbers are no constants that a plan can return.
    found = tuple(_with_rank(rank, as_tracer(np.asarray(a) if type(a) is complex else a, trace)) for a in arrays)
    return found[0] if len(found) == 1 else found


def _with_rank(rank: int, x: Tracer) -> Tracer:
    """Add axes to one array; of rank 3, after the last axis too."""
    if x.ndim >= rank:
        return x
    if rank == 3:
        return x[None, :, None] if x.ndim == 1 else x[..., None] if x.ndim == 2 else x[None, None, None]
    return x[(None,) * (rank - x.ndim)]


def _meshgrid(*vectors: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy") -> Any:
    """Make a grid as `numpy.meshgrid`: of views that broadcast, copied if asked."""
    trace = trace_of(vectors)
    found = [as_tracer(v, trace) for v in vectors]
    found = [x.flatten() if copy else x.reshape(-1) for x in found]
    if indexing not in ("xy", "ij"):
        raise ValueError(f"meshgrid: indexing {indexing!r} is neither 'xy' nor 'ij'\n  at {user_line()}")
    varying = list(range(len(found)))  # for each axis of the grid, the vector that varies along it
    if indexing == "xy" and len(found) > 1:
        varying[:2] = 1, 0
    open_grid = [x[tuple(slice(None) if v == k else None for v in varying)] for k, x in enumerate(found)]
    if sparse:
        return tuple(open_grid)
    shape = tuple(found[k].shape[0] for k in varying)
    return tuple(expand(x, shape) if copy else broadcast_to(x, shape) for x in open_grid)


def _compress(condition: Any, a: Any, axis: Any = None, out: Any = None) -> Any:
    """Select elements as `numpy.compress`: along an axis as a mask there does, and none behind a shorter mask."""
    if not isinstance(condition, Tracer):
        return np.take(a, np.flatnonzero(condition), axis=axis)
    if condition.ndim != 1:
        raise ValueError(f"compress: expected a condition of one dimension, got {condition.ndim}\n  at {user_line()}")
    if axis is None:
        return _extract(condition, a)
    x = as_tracer(a, trace_of((condition, a)))
    (p,) = normalize_axes((axis,), x.ndim, "compress")
    before = (slice(None),) * p
    return x[(*before, slice(condition.size))][(*before, condition != 0)]


def _extract(condition: Any, arr: Any) -> Any:
    """Return the masked elements of a flattened array; a shorter mask selects none of the last."""
    mask = np.ravel(condition) != 0
    return as_tracer(arr, trace_of((condition, arr))).ravel()[: mask.size][mask]


def _ix(*vectors: Any) -> tuple[Tracer, ...]:
    trace = trace_of(vectors)
    found = [as_tracer(v, trace) for v in vectors]
    if any(x.ndim != 1 or x._node.dtype == "bool" for x in found):
        fail("np.ix_", "vectors of integers are expected: how many elements a mask selects depends on values")
    return tuple(x[(None,) * k + (..., *(None,) * (len(found) - 1 - k))] for k, x in enumerate(found))


def _diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = np._NoValue, append: Any = np._NoValue) -> Any:
    """Return differences of neighbours as `numpy.diff`, of masks whether they differ.

    Values to put before or behind are joined to the array by a library step.
    """
    x = as_tracer(a, trace_of((a, prepend, append)))
    if n < 0:
        raise ValueError(f"diff: expected n of at least 0, got {n}\n  at {user_line()}")
    if n == 0:
        return x
    if x.ndim == 0:
        raise ValueError(f"diff: expected an array of at least one dimension\n  at {user_line()}")
    (p,) = normalize_axes((axis,), x.ndim, "diff")
    parts = [*_end_of_diff(prepend, x, p), x, *_end_of_diff(append, x, p)]
    if len(parts) > 1:
        x = call_library("concatenate", [parts], {"axis": p})
    before = (slice(None),) * p
    for _ in range(n):
        pair = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = apply("not_equal" if x._node.dtype == "bool" else "subtract", *pair)
    return x


def _end_of_diff(end: Any, x: Tracer, axis: int) -> list[Any]:
    """Return the array to put at an end, if any: a number is repeated to one slice."""
    if end is np._NoValue:
        return []
    shape = tuple(1 if k == axis else length for k, length in enumerate(x.shape))
    return [end if np.ndim(end) else np.broadcast_to(end, shape)]


def _call_on_dtypes(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a NumPy function that depends on the dtypes of arrays alone, which are known while tracing."""
    return function(*(np.zeros((), a.dtype) if isinstance(a, Tracer) else a for a in arguments))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.round: _round,
    np.around: _round,
    np.fix: _fix,
    np.diff: _diff,
    np.isclose: _isclose,
    np.allclose: _allclose,
    np.isposinf: partial(_is_infinity, math.inf),
    np.isneginf: partial(_is_infinity, -math.inf),
    np.atleast_1d: partial(_at_least, 1),
    np.atleast_2d: partial(_at_least, 2),
    np.atleast_3d: partial(_at_least, 3),
    np.meshgrid: _meshgrid,
    np.ix_: _ix,
    np.compress: _compress,
    np.extract: _extract,
    np.result_type: lambda *arguments: np.result_type(*(a.dtype if isinstance(a, Tracer) else a for a in arguments)),
    np.common_type: partial(_call_on_dtypes, np.common_type),
    np.iscomplexobj: partial(_call_on_dtypes, np.iscomplexobj),
    np.isrealobj: partial(_call_on_dtypes, np.isrealobj),
    np.can_cast: lambda from_, to, casting="safe": np.can_cast(from_.dtype, to, casting),
    np.min_scalar_type: lambda a, /: a.dtype,
    np.diag_indices_from: lambda arr: np.diag_indices(arr.shape[0], arr.ndim),
    np.tril_indices_from: lambda arr, k=0: np.tril_indices(arr.shape[-2], k, arr.shape[-1]),
    np.triu_indices_from: lambda arr, k=0: np.triu_indices(arr.shape[-2], k, arr.shape[-1]),
    np.matrix_transpose: lambda x, /: x.mT,
    np.linalg.matrix_transpose: lambda x, /: x.mT,
    np.astype: lambda x, dtype, /, *, copy=True, device=None: x.astype(dtype, copy=copy),
    np.real: lambda val: val.real,
    np.imag: lambda val: val.imag,
    np.empty_like: lambda prototype, dtype=None, **options: _full_like(prototype, 0.0, dtype, **options),
    np.where: _where,
    np.select: _select,
    np.nonzero: nonzero,
    np.argwhere: argwhere,
    np.flatnonzero: lambda a: nonzero(a.ravel())[0],
    np.clip: _clip,
    np.nan_to_num: _nan_to_num,
    np.transpose: lambda a, axes=None: a.transpose(axes),
    np.expand_dims: _expand_dims,
    np.squeeze: lambda a, axis=None: a.squeeze(axis),
    np.reshape: _reshape,
    np.ravel: lambda a, order="C": a.ravel(order),
    np.broadcast_to: lambda array, shape, subok=False: broadcast_to(array, as_shape(shape)),
    np.zeros_like: lambda a, dtype=None, **options: _full_like(a, 0.0, dtype, **options),
    np.ones_like: lambda a, dtype=None, **options: _full_like(a, 1.0, dtype, **options),
    np.full_like: _full_like,
    np.copy: lambda a, order="K", subok=False: _as_array(a.copy(order)),
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: count,
    **SHAPE_FUNCTIONS,
}
