"""NumPy functions and ufuncs of traced arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.operators import POINTWISE
from .axes import normalize_axes
from .broadcasting import broadcast_to, expand, reshape
from .operations import apply, as_tracer, clip, dot, mask_logic, matmul, power, reduce, trace_of, variance
from .tracer import Tracer
from .user_code import fail, user_line

# Names of NumPy, SciPy and CuPy that differ from the operator table's.
_UFUNC_ALIASES = {
    "true_divide": "divide",
    "abs": "absolute",
    "expit": "sigmoid",
    "log_expit": "log_sigmoid",
    "round": "rint",
    "cupy_where": "where",
}
_BITWISE = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "invert": "logical_not"}
_REDUCING_UFUNCS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}


def call_ufunc(name: str, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if method == "reduce" and name in _REDUCING_UFUNCS:
        axis = inputs[1] if len(inputs) > 1 else options.pop("axis", 0)
        return reduce(_REDUCING_UFUNCS[name], inputs[0], axis, **options)
    out = options.pop("out", None)
    if method != "__call__":
        fail(f"np.{name}.{method}", "only calls and .reduce are supported")
    for key, value in options.items():
        if not (key == "where" and value is True) and not (key == "casting" and value == "same_kind"):
            fail(f"np.{name} with {key}=", "that option is not supported in a fused function")
    result = _ufunc_value(name, inputs)
    if out is None:
        return result
    target = out[0] if isinstance(out, tuple) else out
    if not isinstance(target, Tracer):
        fail(f"np.{name} with out=", "the output array has to be an argument of the fused function or computed in it")
    return target._assign(result)


def _ufunc_value(name: str, inputs: tuple[Any, ...]) -> Any:
    name = _UFUNC_ALIASES.get(name, name)
    if name == "matmul":
        return matmul(*inputs)
    if name == "power":
        return power(*inputs)
    if name == "fabs":
        return apply("absolute", _integers_to_float(inputs[0]))
    if name == "positive":
        return +inputs[0]
    if name == "logical_xor":
        trace = trace_of(inputs)
        return apply("not_equal", *(apply("not_equal", as_tracer(i, trace), 0) for i in inputs))
    if name in _BITWISE:
        return mask_logic(_BITWISE[name], f"np.{name}", *inputs)
    if name in POINTWISE:
        return apply(name, *inputs)
    fail(f"np.{name}", "this function is not in the operator table")


def _as_float(x: Tracer) -> Tracer:
    return x if dtypes.is_float(x._node.dtype) else x.astype("float64")


def _integers_to_float(x: Tracer) -> Tracer:
    return x.astype("float64") if x._node.dtype == "int64" else x


def _like(fill: Callable[[Tracer, Any], float]) -> Callable[..., Tracer]:
    def call(x: Tracer, fill_value: Any = None, dtype: Any = None, **options: Any) -> Tracer:
        if options.get("shape") is not None:
            fail("np.full_like and the like with shape=", "that option is not supported in a fused function")
        value = fill_value if fill_value is not None else fill(x, fill_value)
        constant = as_tracer(value, x._trace)
        node = g.cast(constant._node, x._node.dtype if dtype is None else dtypes.name_of(dtype))
        result = expand(x._trace.array(node, constant._axes), x.shape)
        result._is_array = True
        return result

    return call


def _where(condition: Any, *choices: Any) -> Tracer:
    if len(choices) != 2:
        fail("np.where with one argument", "the number of results depends on values; give both choices")
    trace = trace_of((condition, *choices))
    mask = as_tracer(condition, trace)
    if mask._node.dtype != "bool":
        mask = apply("not_equal", mask, 0)
    return apply("where", mask, *choices)


def _norm(x: Tracer, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Tracer:
    x, axes = _as_float(x), len(normalize_axes(axis, x.ndim, "norm"))
    if ord is None or (ord == "fro" and axes == 2) or (ord == 2 and axes == 1):
        return apply("sqrt", reduce("sum", apply("square", x), axis, keepdims))
    if axes != 1:
        fail(f"np.linalg.norm with ord={ord!r}", "give one axis: matrix norms are not row operations")
    if ord == 1:
        return reduce("sum", apply("absolute", x), axis, keepdims)
    if ord == np.inf:
        return reduce("max", apply("absolute", x), axis, keepdims)
    fail(f"np.linalg.norm with ord={ord!r}", "orders 1, 2 and inf are supported")


def _nan_to_num(x: Tracer, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> Tracer:
    dtype = x._node.dtype
    if not dtypes.is_float(dtype):
        return x.copy() if copy else x
    largest = float.fromhex("0x1.fep127") if dtype == "bfloat16" else float(np.finfo(x.dtype).max)
    top, bottom = (largest if posinf is None else posinf), (-largest if neginf is None else neginf)
    infinite = apply("where", apply("greater", x, 0.0), float(top), float(bottom))
    finite = apply("where", apply("isinf", x), infinite, x)
    result = apply("where", apply("isnan", x), float(nan), finite).astype(dtype)
    return result if copy else x._assign(result)


def _expand_dims(x: Tracer, axis: Any) -> Tracer:
    axis = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    rank = x.ndim + len(axis)
    new = set(normalize_axes(axis, rank, "expand_dims"))
    return x[tuple(None if p in new else slice(None) for p in range(rank))]


def _var(
    x: Tracer, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False
) -> Any:
    return variance(x, axis, ddof, bool(keepdims), dtype=dtype, out=out)


def _std(
    x: Tracer, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: Any = False
) -> Any:
    return apply("sqrt", _var(x, axis, dtype, out, ddof, keepdims))


def _reduction(op: str) -> Callable[..., Tracer]:
    def call(a: Tracer, axis: Any = None, out: Any = None, keepdims: Any = False, **options: Any) -> Any:
        return reduce(op, a, axis, bool(keepdims), out=out, **options)

    return call


def _typed_reduction(op: str) -> Callable[..., Tracer]:
    def call(
        a: Tracer, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **more: Any
    ) -> Any:
        return reduce(op, a, axis, bool(keepdims), dtype=dtype, out=out, **more)

    return call


def _round(x: Tracer, decimals: int = 0, out: Any = None) -> Tracer:
    if decimals != 0 or out is not None:
        fail("np.round with decimals or out", "only rounding to integers is supported")
    return x.copy() if x._node.dtype == "int64" else apply("rint", x)


def _dot(a: Any, b: Any, out: Any = None) -> Tracer:
    if out is not None:
        fail("np.dot with out=", "that option is not supported in a fused function")
    return dot(a, b)


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: _typed_reduction("sum"),
    np.prod: _typed_reduction("prod"),
    np.mean: _typed_reduction("mean"),
    np.max: _reduction("max"),
    np.min: _reduction("min"),
    np.amax: _reduction("max"),
    np.amin: _reduction("min"),
    np.var: _var,
    np.std: _std,
    np.any: lambda a, axis=None, out=None, keepdims=False: a.any(axis, out, keepdims),
    np.all: lambda a, axis=None, out=None, keepdims=False: a.all(axis, out, keepdims),
    np.where: _where,
    np.clip: lambda a, a_min=None, a_max=None, out=None, *, min=None, max=None: clip(
        a, a_min if min is None else min, a_max if max is None else max, out=out
    ),
    np.dot: _dot,
    np.linalg.norm: _norm,
    np.nan_to_num: _nan_to_num,
    np.transpose: lambda a, axes=None: a.transpose(axes),
    np.expand_dims: _expand_dims,
    np.squeeze: lambda a, axis=None: a.squeeze(axis),
    np.reshape: lambda a, shape, order="C", copy=None: reshape(
        a, tuple(shape) if isinstance(shape, (tuple, list)) else (shape,), order
    ),
    np.ravel: lambda a, order="C": a.ravel(order),
    np.broadcast_to: lambda array, shape, subok=False: broadcast_to(
        array, tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    ),
    np.zeros_like: lambda a, dtype=None, **options: _like(lambda x, _: 0.0)(a, None, dtype, **options),
    np.ones_like: lambda a, dtype=None, **options: _like(lambda x, _: 1.0)(a, None, dtype, **options),
    np.full_like: _like(lambda x, value: value),
    np.copy: lambda a, order="K", subok=False: a.copy(),
    np.round: _round,
    np.around: _round,
    np.shape: lambda a: a.shape,
    np.ndim: lambda a: a.ndim,
    np.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
}


def call_function(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if func not in FUNCTIONS:
        name = f"{getattr(func, '__module__', 'numpy')}.{getattr(func, '__name__', func)}"
        fail(name, "this function cannot be part of a fused chain")
    try:
        return FUNCTIONS[func](*args, **options)
    except TypeError as error:
        if type(error) is TypeError:
            raise TypeError(f"np.{func.__name__}: {error}\n  at {user_line()}") from error
        raise
