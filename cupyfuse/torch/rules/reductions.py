"""Sums and the like, extremes, moments, norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ... import trace
from ...dtypes import is_float
from ...ir import graph as g
from ...ir.adjoints import product_of_others
from ...ir.graph import Node
from ...trace import Tracer
from .overloads import Call, is_tensor, leave_unfused, overload
from .promotion import along, cast_to, count, floats, like_rows, pointwise, safe_sqrt, sloped_reduction
from .table import Refused, rule
from .values import Value, refuse

Dim = int | tuple[int, ...] | None
T = torch.Tensor


def _dtype(name: str | None) -> Any:
    return None if name is None else getattr(torch, name)


def reduced(op: str, value: Value, dim: Dim, keepdim: bool, name: str = "", gradient: str = "") -> Value:
    """Reduce along dimensions; an empty tuple stands for all of them, as in most of PyTorch's reductions.

    `gradient` says how that of an extreme goes to elements, where it is not as that of `amax`: see `gradients.py`.
    """
    x, axis, dims = along(value, None if dim == () else dim, name or op)
    try:
        result = trace.reduce(op, x, axis)
        if op in ("max", "min") and result._node is not x._node:
            result = result._trace.array(_graded(result._node, x._node, gradient), result._axes)
        return like_rows(result, value, dims, keepdim)
    except ValueError as error:
        refuse(name or op, str(error).splitlines()[0])


def _graded(extreme: Node, x: Node, gradient: str) -> Node:
    """An extreme of `x`, in one step or two, with the way its gradient goes."""
    inner = extreme.inputs[0]
    if inner is not x:
        # All elements that equal the extreme share its gradient, whichever row they are in.
        inner = replace(inner, gradient=gradient, partial=True)
    return replace(extreme, inputs=(inner,), gradient=gradient)


# Sums ---------------------------------------------------------------------------------------------------------------


@rule("sum", lambda x, dim, keepdim, dtype: torch.sum(x, dim, keepdim, dtype=_dtype(dtype)), reduces=True)
def sum(input: Value, dim: Dim = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    value = cast_to(input, dtype)
    if value.dtype == "int64":
        refuse("sum", "integers")
    return reduced("sum", value, dim, keepdim)


@rule("mean", lambda x, dim, keepdim, dtype: torch.mean(x, dim, keepdim, dtype=_dtype(dtype)), reduces=True)
def mean(input: Value, dim: Dim = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    return reduced("mean", floats(cast_to(input, dtype), "mean"), dim, keepdim)


def _prod_eager(x: Any, dim: int | None, keepdim: bool, dtype: str | None) -> Any:
    return torch.prod(x, dtype=_dtype(dtype)) if dim is None else torch.prod(x, dim, keepdim, dtype=_dtype(dtype))


@rule("prod", _prod_eager, reduces=True)
def prod(input: Value, dim: int | None = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    value = cast_to(input, dtype)
    if value.dtype == "int64":
        refuse("prod", "integers")
    result = reduced("prod", value, dim, keepdim)
    return result if dim is not None or not is_float(value.dtype) else _product_of_all(value, result)


def _product_of_all(value: Value, result: Value) -> Value:
    """With PyTorch's slopes: several zeros leave none, whatever the cotangent is."""
    x, axis, _ = along(value, None, "prod")
    axes = (1, 0) if axis is None else (axis,)
    tracer = trace.reduce("prod", x, axis)
    node, zero = x._node, g.const(0.0)
    zeros = g.pointwise("where", g.pointwise("equal", node, zero), g.cast(g.const(1.0), node.dtype), zero)
    for each in axes:
        zeros = g.reduce("sum", zeros, each)
    others = g.pointwise("add", product_of_others(node, tracer._node, axes), zero)  # a factor, not a choice
    slope = g.pointwise("where", g.pointwise("greater", zeros, g.const(1.0)), zero, others)
    return Value(sloped_reduction(tracer, x, x._trace.array(slope, x._axes)), result.shape)


@rule("logsumexp", torch.logsumexp, reduces=True)
def logsumexp(input: Value, dim: int | tuple[int, ...], keepdim: bool = False) -> Value:
    if dim == () and input.ndim:
        refuse("logsumexp", "no dimensions, an error in some versions of PyTorch")
    return reduced("logsumexp", floats(input, "logsumexp"), dim, keepdim)


overload("sum", "sum")
overload("mean", "mean")
overload("prod", "prod")
overload("logsumexp", "logsumexp")

# Extremes -----------------------------------------------------------------------------------------------------------


def _extreme(op: str, *, whole: bool = False) -> Callable[..., Value]:
    def of_all(input: Value) -> Value:
        return reduced(op, floats(input, op), None, False, gradient="chosen")

    def along_dims(input: Value, dim: Dim = (), keepdim: bool = False) -> Value:
        return reduced(op, floats(input, op), dim, keepdim)

    return of_all if whole else along_dims


def _extreme_dim(op: str) -> Callable[..., Value]:
    def along_dim(input: Value, dim: int, keepdim: bool = False) -> Value:
        """The values; where they are, PyTorch's second result, is not computed."""
        return reduced(op, floats(input, op), dim, keepdim, gradient="first")

    return along_dim


def _values(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, keepdim: function(x, dim, keepdim).values


def _max_or_min(name: str) -> Callable[..., Any]:
    """PyTorch's three functions of one name: of all elements, along a dimension, of two tensors."""

    def adapt(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        if not given:
            return Call((input,), name)
        if "other" in kwargs or (given and is_tensor(given[0])):
            return Call((input, given[0]), f"{name}imum")
        return Call(_dim_keepdim(input, *args, **kwargs), f"{name}_dim")

    return adapt


def _dim_keepdim(input: Any, dim: Any = None, keepdim: bool = False, axis: Any = None, keepdims: bool = False) -> Any:
    return input, axis if dim is None else dim, keepdim or keepdims


for _name in ("max", "min"):
    rule(_name, getattr(torch, _name), reduces=True)(_extreme(_name, whole=True))
    rule(f"{_name}_dim", _values(getattr(torch, _name)), reduces=True)(_extreme_dim(_name))
    rule(f"a{_name}", getattr(torch, f"a{_name}"), reduces=True)(_extreme(_name))
    overload(_name, _name, adapt=_max_or_min(_name))
    overload(f"a{_name}", f"a{_name}")
leave_unfused(
    "it looks for positions, or sorts, or adds up step by step",
    *("argmax", "argmin", "sort", "argsort", "topk", "kthvalue", "median", "cumsum", "cumprod", "logcumsumexp", "mode"),
)

# Moments ------------------------------------------------------------------------------------------------------------


def variance(input: Value, dim: Dim, correction: float, keepdim: bool, name: str) -> Value:
    value = floats(input, name)
    x, axis, dims = along(value, None if dim == () else dim, name)
    n = count(value.shape, dims)
    result = trace.variance(x, axis)
    if correction != 0:
        degrees = max(n - correction, 0)
        result = result * (n / degrees if degrees else math.inf if n else math.nan)
    slope = _variance_slope(x, axis, n - correction, whole=dim is None or not input.ndim)
    return like_rows(sloped_reduction(result, x, slope), value, dims, keepdim)


def _variance_slope(x: Tracer, axis: int | None, degrees: float, whole: bool) -> Tracer:
    """2 (x - mean) / degrees, as the mean's own slopes add up to 0; of all elements inf or NaN with no degrees."""
    centre = trace.reduce("mean", x, axis, keepdims=True)
    if whole and degrees <= 0:
        return trace.apply("where", trace.apply("equal", x, centre), math.nan, math.inf)
    return (x - centre) * (2.0 / degrees if degrees else math.inf)


def _moment_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, correction, keepdim: function(x, dim, correction=correction, keepdim=keepdim)


@rule("var", _moment_eager(torch.var), reduces=True)
def var(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> Value:
    return variance(input, dim, correction, keepdim, "var")


@rule("std", _moment_eager(torch.std), reduces=True)
def std(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> Value:
    return safe_sqrt(variance(input, dim, correction, keepdim, "std"), masked=True)


def _moment(input: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's take `(dim, unbiased, keepdim)`, `(unbiased)`, or `(dim, *, correction, keepdim)`."""
    given = dict(zip(("dim", "unbiased", "keepdim"), args, strict=False))
    if args and isinstance(args[0], bool):
        given = {"unbiased": args[0]}
    given |= {{"axis": "dim", "keepdims": "keepdim"}.get(k, k): v for k, v in kwargs.items()}
    unbiased = given.pop("unbiased", True)
    correction = given.pop("correction", None)
    dim, keepdim = given.pop("dim", None), given.pop("keepdim", False)
    if given:
        raise TypeError(", ".join(given))
    return input, dim, int(unbiased) if correction is None else correction, keepdim


overload("var", "var", adapt=_moment)
overload("std", "std", adapt=_moment)

# Norms --------------------------------------------------------------------------------------------------------------


def _norm_eager(x: Any, ord: float, dim: Dim, keepdim: bool, dtype: str | None) -> Any:
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=_dtype(dtype))


@rule("vector_norm", _norm_eager, reduces=True)
def vector_norm(
    input: Value, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: str | None = None
) -> Value:
    value = floats(cast_to(input, dtype), "vector_norm")
    if ord == 2:
        return safe_sqrt(reduced("sum", pointwise("square", value), dim, keepdim))
    if ord == 1:
        return reduced("sum", pointwise("absolute", value), dim, keepdim)
    if ord == math.inf:
        return reduced("max", pointwise("absolute", value), dim, keepdim, gradient="scaled")
    refuse("vector_norm", f"of order {ord}; orders 1, 2 and inf are fused")


def _vector_norm(
    input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, **more: Any
) -> Any:
    if ord not in (1, 2, math.inf):
        return Refused(f"a norm of order {ord}; orders 1, 2 and inf are fused")
    return input, ord, dim, keepdim, dtype


def _linalg_norm(input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if ord is None:
        return _vector_norm(input, 2, dim, keepdim, dtype)
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if isinstance(ord, str) or not isinstance(dim, int):
        return Refused("a norm of a matrix")
    return _vector_norm(input, ord, dim, keepdim, dtype)


def _norm(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    if p == "nuc":
        return Refused("a norm of a matrix")
    return _vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


def _norm_method(input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return _norm(input, p, dim, keepdim, None, dtype)


overload("vector_norm", torch.linalg.vector_norm, adapt=lambda x, *a, **k: _vector_norm(x, *a, **k))
overload("vector_norm", torch.linalg.norm, adapt=_linalg_norm)
overload("vector_norm", torch.norm, adapt=_norm)
overload("vector_norm", T.norm, adapt=_norm_method)
