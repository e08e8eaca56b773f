"""Rules of reductions: sums, products, extrema, moments, norms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ... import trace
from ...dtypes import is_float
from ...errors import first_line
from ...ir import graph as g
from ...ir.adjoints import exclusive_product
from ...trace import Tracer
from .axes import Dim, fold_dims, is_matrix, normalize_dims, reduced_shape
from .overloads import is_tensor
from .table import Adapted, Refused, leave_unfused, overload, rule
from .values import Value, pointwise, refuse, require_float

T = torch.Tensor


def reduce_dims(op: str, value: Value, dim: Dim, keepdim: bool = False, gradient: str = "") -> Value:
    """Reduce along dimensions; an empty tuple stands for all of them, as in most of PyTorch's reductions.

    `gradient` is an extremum's rule for ties where it is not that of `amax`, see `adjoints.extremum_adjoint`.
    """
    dims = normalize_dims(None if dim == () else dim, value.ndim, op)
    x, folded = fold_dims(value, dims, op)
    try:
        result = trace.reduce(op, x, folded)
    except ValueError as error:
        refuse(op, first_line(error))
    if op in ("max", "min") and result._node is not x._node:
        result = result._trace.array(_with_gradient(result._node, x._node, gradient), result._axes)
    return Value(result, reduced_shape(value.shape, dims, keepdim))


def _with_gradient(extremum: g.Node, x: g.Node, gradient: str) -> g.Node:
    """Set the rule for ties of an extremum of x (see `adjoints.extremum_adjoint`), which is one reduction or two."""
    inner = extremum.inputs[0]
    if inner is not x:
        # All elements that equal the extremum share its gradient, whichever row they are in.
        inner = replace(inner, gradient=gradient, partial=True)
    return replace(extremum, inputs=(inner,), gradient=gradient)


def _with_slope(result: Tracer, x: Tracer, slope: Tracer) -> Tracer:
    """Replace the derivative of a reduction of x by its slope in each element."""
    return x._trace.array(g.custom_derivative(result._node, (x._node, slope._node)), result._axes)


# Sums ---------------------------------------------------------------------------------------------------------------


@rule(reduces=True)
def sum(input: Value, dim: Dim = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    return reduce_dims("sum", _refuse_integers("sum", input.astype(dtype)), dim, keepdim)


@rule(reduces=True)
def mean(input: Value, dim: Dim = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    return reduce_dims("mean", require_float(input.astype(dtype), "mean"), dim, keepdim)


def _refuse_integers(name: str, value: Value) -> Value:
    """Return a value that is not of integers; refuse one that is."""
    if value.dtype == "int64":
        refuse(name, "integers")
    return value


def _prod_eager(x: Any, dim: int | None, keepdim: bool, dtype: str | None) -> Any:
    """Compute `torch.prod`, which takes no dim of None."""
    wanted = None if dtype is None else getattr(torch, dtype)
    return torch.prod(x, dtype=wanted) if dim is None else torch.prod(x, dim, keepdim, dtype=wanted)


@rule(eager=_prod_eager, reduces=True)
def prod(input: Value, dim: int | None = None, keepdim: bool = False, dtype: str | None = None) -> Value:
    value = _refuse_integers("prod", input.astype(dtype))
    if dim is None and is_float(value.dtype):
        return _product_of_all(value)
    return reduce_dims("prod", value, dim, keepdim)


def _product_of_all(value: Value) -> Value:
    """Multiply all elements, with PyTorch's derivative: where several are zero, it is zero for any cotangent."""
    x, dims = fold_dims(value, range(value.ndim), "prod")
    axes = tuple(a for a in (1, 0) if x._axes.long[a])
    tracer = trace.reduce("prod", x, dims)
    node, zero = x._node, g.const(0.0)
    is_zero = g.pointwise("equal", node, zero)
    zeros = g.pointwise("where", is_zero, g.cast(g.const(1.0), node.dtype), zero)
    for each in axes:
        zeros = g.reduce("sum", zeros, each)
    others = exclusive_product(node, tracer._node, axes)
    # A `where` in a derivative selects what the cotangent multiplies, so that zero excludes an infinite one. The outer
    # `where` below is meant so; the product of the others is a `where` too, and multiplies as a sum instead.
    factor = g.pointwise("add", others, zero)
    slope = g.pointwise("where", g.pointwise("greater", zeros, g.const(1.0)), zero, factor)
    return Value(_with_slope(tracer, x, x._trace.array(slope, x._axes)), ())


@rule(reduces=True)
def logsumexp(input: Value, dim: int | tuple[int, ...], keepdim: bool = False) -> Value:
    if dim == () and input.ndim:
        refuse("logsumexp", "no dimensions, an error in some versions of PyTorch")
    return reduce_dims("logsumexp", require_float(input, "logsumexp"), dim, keepdim)


# Extremes -----------------------------------------------------------------------------------------------------------


def _enter_extremes(name: str) -> None:
    """Enter rules for PyTorch's `max` (of all elements, along a dimension, of two tensors) and `amax`; or `min`."""
    function = getattr(torch, name)

    def resolve(input: Any, *args: Any, **kwargs: Any) -> Any:
        """Adapt `max(x)`, `max(x, other)` and `max(x, dim)`: each has a rule of its own."""
        given = [*args, *kwargs.values()]
        if not given:
            return Adapted((input,), name)
        if "other" in kwargs or is_tensor(given[0]):
            return Adapted((input, given[0]), f"{name}imum")
        return Adapted(_dim_arguments(input, *args, **kwargs), f"{name}_dim")

    @rule(name=name, adapt=resolve, reduces=True)
    def of_all(input: Value) -> Value:
        return reduce_dims(name, require_float(input, name), None, gradient="chosen")

    # Where the extrema are, PyTorch's second result, is not computed.
    @rule(name=f"{name}_dim", eager=lambda x, dim, keepdim: function(x, dim, keepdim).values, reduces=True)
    def along_dim(input: Value, dim: int, keepdim: bool = False) -> Value:
        return reduce_dims(name, require_float(input, name), dim, keepdim, gradient="first")

    @rule(name=f"a{name}", reduces=True)
    def along_dims(input: Value, dim: Dim = (), keepdim: bool = False) -> Value:
        return reduce_dims(name, require_float(input, name), dim, keepdim)


def _dim_arguments(input: Any, dim: Any = None, keepdim: bool = False, axis: Any = None, keepdims: bool = False) -> Any:
    """Bind the arguments of `max(x, dim)`, by PyTorch's names or NumPy's."""
    return input, axis if dim is None else dim, keepdim or keepdims


_enter_extremes("max")
_enter_extremes("min")


def _enter_positions(name: str) -> None:
    """Enter the rule of `argmax` or `argmin`: the first position of the extreme, or of NaN."""

    @rule(name=name, reduces=True)
    def position(input: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        dims = normalize_dims(dim, input.ndim, name)
        x, folded = fold_dims(require_float(input, name), dims, name)
        if is_matrix(x, folded):
            refuse(name, "the position among all elements of a matrix")
        try:
            found = trace.reduce(name, x, folded)
        except ValueError as error:
            refuse(name, first_line(error))
        return Value(found, reduced_shape(input.shape, dims, keepdim)).astype("int64")


_enter_positions("argmax")
_enter_positions("argmin")
leave_unfused(
    "it sorts, or adds up step by step",
    *("sort", "argsort", "topk", "kthvalue", "median", "cumsum", "cumprod", "logcumsumexp", "mode"),
)

# Moments ------------------------------------------------------------------------------------------------------------


def _variance_arguments(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Adapt PyTorch's `(dim, unbiased, keepdim)`, `(unbiased)` and `(dim, *, correction, keepdim)`."""
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


@rule(adapt=_variance_arguments, reduces=True)
def var(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> Value:
    return _variance(input, dim, correction, keepdim, "var")


@rule(adapt=_variance_arguments, reduces=True)
def std(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> Value:
    return _sqrt_zero_slope(_variance(input, dim, correction, keepdim, "std"), masked=True)


@rule(adapt=_variance_arguments, reduces=True, several=True)
def var_mean(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> tuple[Value, Value]:
    return var(input, dim, correction, keepdim), mean(input, dim, keepdim)


@rule(adapt=_variance_arguments, reduces=True, several=True)
def std_mean(input: Value, dim: Dim = None, correction: float = 1, keepdim: bool = False) -> tuple[Value, Value]:
    return std(input, dim, correction, keepdim), mean(input, dim, keepdim)


def _variance(value: Value, dim: Dim, correction: float, keepdim: bool, name: str) -> Value:
    """Trace `var`, with PyTorch's derivative where no degrees of freedom are left."""
    dims = normalize_dims(None if dim == () else dim, require_float(value, name).ndim, name)
    x, folded = fold_dims(value, dims, name)
    degrees = math.prod(value.shape[p] for p in dims) - correction
    result = trace.variance(x, folded, correction)
    slope = _variance_slope(x, folded, degrees, whole=dim is None or not value.ndim)
    return Value(_with_slope(result, x, slope), reduced_shape(value.shape, dims, keepdim))


def _variance_slope(x: Tracer, dims: tuple[int, ...], degrees: float, whole: bool) -> Tracer:
    """Return the derivative of a variance in each element: 2 (x - mean) / degrees of freedom.

    The mean's own derivatives add up to zero. Without degrees of freedom, that of all elements (`whole`) is inf or NaN.
    """
    centre = trace.reduce("mean", x, dims, keepdims=True)
    if whole and degrees <= 0:
        return trace.apply("where", trace.apply("equal", x, centre), math.nan, math.inf)
    return (x - centre) * (2.0 / degrees if degrees else math.inf)


def _sqrt_zero_slope(total: Value, masked: bool = False) -> Value:
    """Take the square root, whose slope at zero is zero, as in PyTorch, not infinity.

    `masked`, for deviations, cuts the gradient there for any cotangent; norms rely on the squares' slope of zero.
    """
    zero = pointwise("equal", total, 0.0)
    return pointwise("where", zero, 0.0 if masked else total, pointwise("sqrt", pointwise("where", zero, 1.0, total)))


# Norms --------------------------------------------------------------------------------------------------------------


def refused_order(ord: Any) -> str:
    """Say why a norm of that order is not fused; empty if it is."""
    return "" if isinstance(ord, (int, float)) and not math.isnan(ord) else f"a norm of order {ord}"


def _vector_norm_arguments(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None, **options: Any
) -> Any:
    """Adapt `torch.linalg.vector_norm`; refuse what is no order."""
    reason = refused_order(ord)
    return Refused(reason) if reason else (x, ord, dim, keepdim, dtype)


def _linalg_norm_arguments(
    input: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Adapt `torch.linalg.norm`; refuse norms of matrices."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if isinstance(ord, str) or (ord is not None and not isinstance(dim, int)):
        return Refused("a norm of a matrix")
    return _vector_norm_arguments(input, 2 if ord is None else ord, dim, keepdim, dtype)


def _method_norm_arguments(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """Adapt `Tensor.norm`."""
    if p == "nuc":
        return Refused("a norm of a matrix")
    return _vector_norm_arguments(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


def _norm_arguments(
    input: Any, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    """Adapt `torch.norm`, whose `out` may come by position."""
    if out is not None:
        return Refused("out= writes to a tensor that was given")
    return _method_norm_arguments(input, p, dim, keepdim, dtype)


def _vector_norm_eager(x: Any, ord: float, dim: Dim, keepdim: bool, dtype: str | None) -> Any:
    return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=None if dtype is None else getattr(torch, dtype))


@rule(torch.linalg.vector_norm, eager=_vector_norm_eager, adapt=_vector_norm_arguments, reduces=True)
def vector_norm(
    input: Value, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: str | None = None
) -> Value:
    value = require_float(input.astype(dtype), "vector_norm")
    if ord == 2:
        return _sqrt_zero_slope(reduce_dims("sum", pointwise("square", value), dim, keepdim))
    if ord == 1:
        return reduce_dims("sum", abs(value), dim, keepdim)
    if ord == 0:
        # the sign, which is 0 there: PyTorch's norm has a gradient, of zeros
        present = pointwise("where", pointwise("not_equal", value, 0.0), 1.0, pointwise("sign", value))
        return reduce_dims("sum", present, dim, keepdim)
    if math.isinf(ord):
        return reduce_dims("max" if ord > 0 else "min", abs(value), dim, keepdim, gradient="scaled")
    return _norm_of_order(value, float(ord), dim, keepdim)


def _norm_of_order(value: Value, order: float, dim: Dim, keepdim: bool) -> Value:
    """Trace the norm of an order other than 0, 1, 2 and infinity, with PyTorch's derivative."""
    dims = normalize_dims(None if dim == () else dim, value.ndim, "vector_norm")
    x, folded = fold_dims(value, dims, "vector_norm")
    raised = _raised(trace.apply("absolute", x), order)
    norm, alongside = (
        trace.apply("power", trace.reduce("sum", raised, folded, keepdims), 1.0 / order) for keepdims in (False, True)
    )
    return Value(_with_slope(norm, x, _norm_slope(x, alongside, order)), reduced_shape(value.shape, dims, keepdim))


def _raised(size: Tracer, exponent: float) -> Tracer:
    """Raise to a power, to 2 and 3 by products: `pow` takes as long as 20 of these."""
    square = trace.apply("square", size)
    if exponent in (2, 3):
        return square if exponent == 2 else square * size
    return trace.apply("power", size, exponent)


def _norm_slope(x: Tracer, norm: Tracer, order: float) -> Tracer:
    """Return the derivative of a norm in each element: sign(x) (|x| / norm)^(order - 1).

    Of orders above 1 it is 0, for any cotangent, where the norm is; of those below 1 in elements that are 0.
    """
    scaled = trace.apply("sign", x) * _raised(trace.apply("absolute", x), order - 1)
    if order < 1:
        scaled = trace.apply("where", trace.apply("equal", x, 0.0), 0.0, scaled)
    slope = scaled / trace.apply("power", norm, order - 1)
    return slope if order < 1 else trace.apply("where", trace.apply("equal", norm, 0.0), 0.0, slope)


overload("vector_norm", torch.linalg.norm, adapt=_linalg_norm_arguments)
overload("vector_norm", torch.norm, adapt=_norm_arguments)
overload("vector_norm", T.norm, adapt=_method_norm_arguments)
