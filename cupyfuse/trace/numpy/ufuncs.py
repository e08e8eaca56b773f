"""Ufuncs of NumPy, and of SciPy and CuPy by the same protocol, with their methods."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...ir.library import writing_call
from ...ir.operators import POINTWISE
from ..axes import normalize_axes
from ..library import call_library
from ..operations import apply, as_tracer, power, reduce, trace_of
from ..products import matmul
from ..tracer import Tracer
from ..user_code import fail, refuse_options, user_line
from .reductions import mask_of, reduction, truth
from .writing import assign_out, dtype_with_out, target_of, with_traced_operand

# NumPy's, SciPy's and CuPy's names of operators that are called otherwise in the operator table.
_ALIASES = {
    "true_divide": "divide",
    "abs": "absolute",
    "expit": "sigmoid",
    "log_expit": "log_sigmoid",
    "round": "rint",
    "cupy_where": "where",
    "mod": "remainder",
    "conj": "conjugate",
}
REDUCTIONS = {
    "add": "sum",
    "multiply": "prod",
    "maximum": "max",
    "minimum": "min",
    "logaddexp": "logsumexp",
    "logical_and": "all",
    "logical_or": "any",
}


# For options that are refused.
_WAYS_OUT = {
    **dict.fromkeys(("signature", "sig"), "convert the operands with .astype first, or give dtype="),
    "keepdims": "add the axis to the result, as in y[..., None]",
}


def call_ufunc(name: str, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a ufunc, or a method of one, on traced arrays."""
    out = options.pop("out", None)
    if isinstance(out, tuple) and len(out) > 1:
        return _call_into(name, inputs, options, out)
    target = out[0] if isinstance(out, tuple) else out
    if method == "reduce":
        return _reduce(name, inputs, options | ({} if target is None else {"out": target}))
    if method == "at":
        return _at(name, inputs)
    if target is not None:
        target = target_of(f"np.{name} with out=", target)
        inputs = with_traced_operand(inputs, target)
    converting = method in ("accumulate", "reduceat")
    if converting and target is not None and (dtype := dtype_with_out(inputs[0], target)) is not None:
        options.setdefault("dtype", dtype)
    if method == "outer":
        method, inputs = "__call__", _pairs_of(*inputs)
    if method != "__call__":
        result = call_library(f"{_numpy_name(name)}.{method}", inputs, options)
    else:
        converting = options.get("casting") == "unsafe"
        result = _call(name, inputs, options, target)
    if target is None:
        return result
    return target._assign_all(result.astype(target.dtype, copy=False) if converting else result)


def _call_into(name: str, inputs: tuple[Any, ...], options: dict[str, Any], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Call a ufunc of several results, each written to its array of `out`, or returned where that is None."""
    where = _pop_where(options)
    if where is not True and any(target is None for target in out):
        fail(f"np.{name} with where=", "elements left out are undefined without out=; choose with np.where")
    traced = next((target for target in out if isinstance(target, Tracer)), None)
    inputs = inputs if traced is None else with_traced_operand(inputs, traced)
    results = _call(name, inputs, dict(options), None)
    written = []
    for target, result in zip(out, results, strict=True):
        if target is not None:
            target = target_of(f"np.{name} with out=", target)
            result = result.astype(target.dtype, copy=False) if options.get("casting") == "unsafe" else result
            result = result if where is True else apply("where", mask_of(f"np.{name}", where), result, target)
            result = target._assign_all(result)
        written.append(result)
    return tuple(written)


def _cast(name: str, value: Any, dtype: Any, casting: str) -> Any:
    """Convert an operand to the dtype in which a ufunc is told to compute."""
    given = np.dtype(value.dtype) if isinstance(value, Tracer) else np.asarray(value).dtype
    if type(value) not in (bool, int, float) and not np.can_cast(given, dtype, casting):  # type: ignore[arg-type]
        raise TypeError(
            f"np.{name}: cannot cast an operand from {given} to {np.dtype(dtype)} with casting rule {casting!r}; "
            f"convert it with .astype first\n  at {user_line()}"
        )
    return value.astype(dtype) if isinstance(value, Tracer) else np.asarray(value, dtype)[()]


def _at(name: str, inputs: tuple[Any, ...]) -> None:
    """Change an array in place as `ufunc.at`, by a library step."""
    array, index, *values = inputs
    x = target_of(f"np.{name}.at", array)
    x._assign(call_library(writing_call(f"{_numpy_name(name)}.at"), [x, index, *values]))


def _reduce(name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Reduce as `ufunc.reduce`; its options may be positional."""
    x, *rest = inputs
    options = (
        {"axis": 0} | dict(zip(("axis", "dtype", "out", "keepdims", "initial", "where"), rest, strict=False)) | options
    )
    x = as_tracer(x, trace_of((x, *options.values())))
    out = options.pop("out", None)
    if out is not None:
        out = target_of(f"np.{name}.reduce with out=", out)
        if options.get("dtype") is None and (dtype := dtype_with_out(x, out)) is not None:
            options["dtype"] = dtype
        return assign_out(name, out, _reduce(name, (x,), options), converting=True)
    if name in ("logical_and", "logical_or"):
        refuse_options(f"np.{name}.reduce", dtype=options.pop("dtype", None), initial=options.pop("initial", None))
        return truth(REDUCTIONS[name], x, **options)
    if name == "logaddexp":
        axis, keepdims = options.pop("axis"), options.pop("keepdims", False)
        x = loop_float(x) if options.get("dtype") is None else x
        return reduce(REDUCTIONS[name], x, axis, bool(keepdims), **options)
    if name in ("maximum", "minimum") and (dtype := options.pop("dtype", None)) is not None:
        x = x.astype(dtype)
    if name in REDUCTIONS:
        return reduction(REDUCTIONS[name], x, **options)
    return call_library(f"{_numpy_name(name)}.reduce", [x], options)


def _pairs_of(a: Any, b: Any) -> tuple[Tracer, Tracer]:
    """Return operands that a ufunc combines in all pairs of their elements, as `ufunc.outer` does."""
    trace = trace_of((a, b))
    # Numbers are arrays there, whose dtypes count.
    a, b = (as_tracer(v if isinstance(v, Tracer) else np.asarray(v), trace) for v in (a, b))
    return a[(..., *(None,) * b.ndim)], b


def _pop_where(options: dict[str, Any]) -> Any:
    """Take the option `where` from the others: True where all elements are computed."""
    where = options.pop("where", True)
    return True if isinstance(where, np.bool_) and where else where


def _numpy_name(name: str) -> str:
    """Return the name by which a library step finds a ufunc of NumPy's or of `scipy.special`, or of its functions."""
    if isinstance(getattr(np, name, None), np.ufunc):
        return name
    for module in ("scipy.special", "scipy.special._ufuncs"):
        if isinstance(getattr(sys.modules.get(module), name, None), np.ufunc):
            return f"{module}.{name}"
    fail(
        f"the ufunc {name}",
        "it is neither in the operator table nor one of NumPy's or of scipy.special's; compute by those, with np.where "
        "for branches, or call it outside of the fused function",
    )


def _call(name: str, inputs: tuple[Any, ...], options: dict[str, Any], target: Tracer | None) -> Any:
    """Call a ufunc with its options; where `where` is false, elements are those of `target`."""
    where = _pop_where(options)
    casting = options.pop("casting", "same_kind")
    if casting not in ("same_kind", "unsafe"):
        fail(f"np.{name} with casting={casting!r}", "that option is not supported; convert with .astype first")
    options = {k: v for k, v in options.items() if k not in ("order", "subok") and v is not None}
    dtype = options.pop("dtype", None)
    if (axes := _core_axes(name, inputs, options)) is not None:
        trace = trace_of(inputs)
        inputs = tuple(_moved(name, as_tracer(i, trace), chosen, True) for i, chosen in zip(inputs, axes, strict=False))
        result = _call(name, inputs, options | {"where": where, "casting": casting, "dtype": dtype}, None)
        return _moved(name, result, axes[-1], False) if len(axes) > len(inputs) else result
    for label in options:
        fail(f"np.{name} with {label}=", _WAYS_OUT.get(label, "leave that option out"))
    row = POINTWISE.get(_ALIASES.get(name, name))
    if dtype is None:
        result = _apply(name, inputs)
    elif row is None or row.result == "bool" or not dtypes.is_float(dtypes.name_of(dtype)):
        result = call_library(_numpy_name(name), inputs, {"dtype": np.dtype(dtype), "casting": casting})
    else:
        result = _apply(name, tuple(_cast(name, i, dtype, casting) for i in inputs))
    if where is True:
        return result
    if target is None:
        fail(f"np.{name} with where=", "elements left out are undefined without out=; choose with np.where")
    return apply("where", mask_of(f"np.{name}", where), result, target)


def _core_axes(name: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> list[tuple[int, ...]] | None:
    """Take the options `axis` and `axes` of a ufunc of vectors or matrices: the axes of its operands and its result.

    None if the call has neither.
    """
    given = {label: options.pop(label) for label in ("axis", "axes") if label in options}
    if given:  # NumPy's own errors, which depend on how many dimensions there are
        getattr(np, name)(*(np.empty((0,) * np.ndim(i)) for i in inputs), **given)
    axis, axes = given.get("axis"), given.get("axes")
    if axis is not None:
        return [(axis,)] * len(inputs)
    return None if axes is None else [tuple(a) if isinstance(a, (tuple, list)) else (a,) for a in axes]


def _moved(name: str, x: Tracer, axes: tuple[int, ...], to_end: bool) -> Tracer:
    """Return an array with axes moved to the end, or from there to their places."""
    axes = normalize_axes(axes, x.ndim, name)
    others = [p for p in range(x.ndim) if p not in axes]
    order = [*others, *axes]
    return x.transpose(order if to_end else [order.index(p) for p in range(x.ndim)])


def _apply(name: str, inputs: tuple[Any, ...]) -> Any:
    """Apply a ufunc without options: by operators of the table, or by a library step."""
    name = _ALIASES.get(name, name)
    trace = trace_of(inputs)
    if name == "matmul":
        return matmul(*inputs)
    if name == "power":
        return power(*inputs)
    if name == "positive":
        return +inputs[0]
    if name in COMPOSED:
        operands = [as_tracer(i, trace) for i in inputs]
        if not any(dtypes.is_opaque(o._node.dtype) for o in operands):
            return COMPOSED[name](*operands)
    if name in POINTWISE:
        return apply(name, *inputs)
    return call_library(_numpy_name(name), inputs)


# Ufuncs composed of several operators ---------------------------------------------------------------------------------


def loop_float(x: Tracer) -> Tracer:
    """Convert bools and integers to the float dtype in which NumPy's float ufuncs compute with them."""
    name = x._node.dtype
    if dtypes.is_float(name):
        return x
    small = {"bool": "float16", "int8": "float16", "uint8": "float16", "int16": "float32", "uint16": "float32"}
    return x.astype(small.get(name, "float64"))


def _apply_promoted(operation: Callable[..., Tracer], *operands: Tracer) -> Tracer:
    """Promote operands to one float dtype before an operation that uses each several times."""
    strong = [o._node.dtype for o in operands if o._node.op != "const"]
    scalars = [o._node.value for o in operands if o._node.op == "const"]
    dtype = dtypes.promote_weak([dtypes.promote(*strong)], scalars)
    floats = [o if o._node.op == "const" else loop_float(o.astype(dtype)) for o in operands]
    # An operation may end in a choice between numbers, which are float64.
    return operation(*floats).astype(next(f for f in floats if f._node.op != "const").dtype, copy=False)


def _ignoring_nan(op: str, a: Tracer, b: Tracer) -> Tracer:
    """Choose the maximum or minimum as `np.fmax` or `np.fmin`, which ignore a NaN beside a number."""
    if not any(dtypes.is_float(o._node.dtype) for o in (a, b)):
        return apply(op, a, b)
    inner = apply("where", apply("isnan", a), b, apply(op, a, b))
    return apply("where", apply("isnan", b), a, inner)


def _heaviside(x: Tracer, half: Tracer) -> Tracer:
    step = apply("where", x > 0, 1.0, apply("where", x == 0, half, 0.0))
    return apply("where", apply("isnan", x), x, step.astype((x + half)._node.dtype))


def _heaviside_promoted(x: Tracer, half: Tracer) -> Tracer:
    # NumPy takes the first float dtype that holds both: of int8 and uint8 float16, though they promote to int16.
    if not any(o._node.op == "const" for o in (x, half)):
        x, half = loop_float(x), loop_float(half)
    return _apply_promoted(_heaviside, x, half)


def _vecdot(a: Tracer, b: Tracer) -> Tracer:
    """Sum products along the last axis, as `numpy.vecdot`: integers wrap around in their dtype, bools stay bools."""
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"vecdot: expected last dimensions of one length, got {a.shape} and {b.shape}\n  at {user_line()}"
        )
    product = a * b
    return reduce("sum", product, -1).astype(product._node.dtype, copy=False)


def _xlogy(x: Tracer, y: Tracer) -> Tracer:
    is_zero = apply("logical_and", x == 0, apply("logical_not", apply("isnan", y)))
    return apply("where", is_zero, 0.0, x * apply("log", apply("where", is_zero, 1.0, y)))


def _xlog1py(x: Tracer, y: Tracer) -> Tracer:
    is_zero = apply("logical_and", x == 0, apply("logical_not", apply("isnan", y)))
    return apply("where", is_zero, 0.0, x * apply("log1p", apply("where", is_zero, 0.0, y)))


def _entr(x: Tracer) -> Tracer:
    inner = -x * apply("log", apply("where", x > 0, x, 1.0))
    value = apply("where", x > 0, inner, apply("where", x == 0, 0.0, -math.inf))
    return apply("where", apply("isnan", x), x, value)


def _rel_entr(x: Tracer, y: Tracer) -> Tracer:
    both_positive = apply("logical_and", x > 0, y > 0)
    a, b = (apply("where", both_positive, v, 1.0) for v in (x, y))
    ratio = a / b
    limits = np.finfo(dtypes.compute_dtype(ratio._node.dtype))
    in_range = apply("logical_and", ratio >= float(limits.tiny), ratio <= float(limits.max))
    # Numbers close to each other have the digits of their difference; of a ratio out of range, the logs are far apart.
    near = apply("logical_and", ratio > 0.5, ratio < 2.0)
    log = apply("where", in_range, apply("log", ratio), apply("log", a) - apply("log", b))
    inner = x * apply("where", near, apply("log1p", (a - b) / b), log)
    rest = apply("where", apply("logical_and", x == 0, y >= 0), 0.0, math.inf)
    value = apply("where", both_positive, inner, rest)
    return apply("where", apply("logical_or", apply("isnan", x), apply("isnan", y)), math.nan, value)


def _logit(x: Tracer) -> Tracer:
    # Near 1/2, where it is near 0, it has the digits of the distance.
    near = apply("logical_and", x > 0.3, x < 0.65)
    distance = apply("where", near, 2.0 * (x - 0.5), 0.0)
    return apply("where", near, apply("log1p", distance) - apply("log1p", -distance), apply("log", x / (1.0 - x)))


def _fabs(x: Tracer) -> Tracer:
    return apply("absolute", loop_float(x))


def _logical_xor(a: Tracer, b: Tracer) -> Tracer:
    return apply("not_equal", apply("not_equal", a, 0), apply("not_equal", b, 0))


COMPOSED: dict[str, Callable[..., Any]] = {
    "fabs": _fabs,
    "logical_xor": _logical_xor,
    "conjugate": lambda x: +x if x._node.dtype != "bool" else x.astype("int8"),
    "deg2rad": lambda x: loop_float(x) * (math.pi / 180),
    "radians": lambda x: loop_float(x) * (math.pi / 180),
    "rad2deg": lambda x: loop_float(x) * (180 / math.pi),
    "degrees": lambda x: loop_float(x) * (180 / math.pi),
    "fmax": partial(_ignoring_nan, "maximum"),
    "fmin": partial(_ignoring_nan, "minimum"),
    "heaviside": _heaviside_promoted,
    "divmod": lambda a, b: (a // b, a % b),
    "vecdot": _vecdot,
    "xlogy": partial(_apply_promoted, _xlogy),
    "xlog1py": partial(_apply_promoted, _xlog1py),
    "entr": partial(_apply_promoted, _entr),
    "rel_entr": partial(_apply_promoted, _rel_entr),
    "logit": partial(_apply_promoted, _logit),
}
