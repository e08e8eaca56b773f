"""Rules of activations, and of softmax and its like along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import trace
from ...ir.operators import activations as operators
from ...trace.exponentials import relative_to_max
from .axes import fold_dims, normalize_dims, reduced_shape
from .pointwise import enter_unary_operators
from .table import Adapted, F, Refused, overload, rule
from .values import Value, pointwise, refuse, require_float, with_slopes


@rule()
def hardtanh(input: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    return pointwise("hardtanh", input, float(min_val), float(max_val))


@rule()
def relu6(input: Value) -> Value:
    return pointwise("hardtanh", input, 0.0, 6.0)


@rule()
def leaky_relu(input: Value, negative_slope: float = 0.01) -> Value:
    return pointwise("leaky_relu", input, negative_slope)


def _rrelu_arguments(
    input: Any,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Any = None,
) -> Any:
    """Adapt `rrelu`; refuse training."""
    if training:
        return Refused("rrelu in training draws random numbers; left to torch")
    return Adapted((input, lower, upper), inplace=inplace)


@rule(adapt=_rrelu_arguments)
def rrelu(input: Value, lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> Value:
    return pointwise("leaky_relu", input, (lower + upper) / 2)


@rule()
def prelu(input: Value, weight: Value) -> Value:
    """Trace `prelu` with one slope, or with one for each channel, the second dimension."""
    if weight.size == 1:
        weight = weight.view(())
    elif input.ndim < 2 or weight.shape != (input.shape[1],):
        refuse("prelu", f"a weight of shape {weight.shape} beside an operand of shape {input.shape}")
    else:
        weight = weight.per_dim(1, input.ndim)
    if weight.dtype != input.dtype:
        refuse("prelu", f"a weight of {weight.dtype} beside an operand of {input.dtype}")
    return pointwise("leaky_relu", input, weight)


@rule()
def gelu(input: Value, approximate: str = "none") -> Value:
    if approximate not in ("none", "tanh"):
        refuse("gelu", f"approximate is neither 'none' nor 'tanh' but {approximate!r}")
    return pointwise("gelu_tanh" if approximate == "tanh" else "gelu", input)


@rule()
def elu(input: Value, alpha: float = 1.0) -> Value:
    return pointwise("elu", input, alpha)


@rule()
def celu(input: Value, alpha: float = 1.0) -> Value:
    if alpha == 0:
        refuse("celu", "PyTorch divides by alpha, which is 0")
    return pointwise("celu", input, alpha)


@rule()
def softplus(input: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    return pointwise("softplus", input, beta, threshold)


@rule()
def tanhshrink(input: Value) -> Value:
    return input - pointwise("tanh", input)


@rule()
def softsign(input: Value) -> Value:
    # Not the operator of that name: composed as in PyTorch, for the same gradients.
    return input / (abs(input) + 1.0)


@rule("threshold", F._threshold)
def threshold(input: Value, threshold: float, value: float) -> Value:
    return pointwise("where", input <= threshold, value, require_float(input, "threshold"))


@rule()
def hardshrink(input: Value, lambd: float = 0.5) -> Value:
    return pointwise("where", (input >= -lambd) & (input <= lambd), 0.0, require_float(input, "hardshrink"))


@rule()
def softshrink(input: Value, lambd: float = 0.5) -> Value:
    """Trace `softshrink`: x * 0 within the limits, which keeps NaN; the slope of NaN is 1."""
    inner = pointwise("where", input < -lambd, input + lambd, input * 0.0)
    value = pointwise("where", input > lambd, input - lambd, inner)
    slope = pointwise("where", (input >= -lambd) & (input <= lambd), 0.0, 1.0, dtype=value.dtype)
    return with_slopes(value, (input, slope))


enter_unary_operators(operators.ROWS, __name__)
overload("logsigmoid", "log_sigmoid")
overload("sigmoid", "expit")

# Along a dimension --------------------------------------------------------------------------------------------------


def _implicit_dim(dim: int | None, ndim: int) -> int:
    """Return `dim`, or the dimension that PyTorch takes for None."""
    return (0 if ndim in (0, 1, 3) else 1) if dim is None else dim


def _softmax_eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make the eager form of a softmax: a dim of None is the implicit one, the dtype a name."""

    def call(input: Any, dim: int | None, dtype: str | None) -> Any:
        return function(input, _implicit_dim(dim, input.dim()), dtype=None if dtype is None else getattr(torch, dtype))

    return call


def log_normalizer(input: Value, dim: int, name: str) -> tuple[Value, Value]:
    """Return max(x) and log(sum(exp(x - max(x)))) along a dimension; their sum is logsumexp(x)."""
    dims = normalize_dims(dim, input.ndim, name)
    top, total = relative_to_max(*fold_dims(require_float(input, name), dims, name))
    shape = reduced_shape(input.shape, dims, True)
    return Value(top, shape), Value(trace.apply("log", total), shape)


def _softmax(value: Value, dim: int | None, name: str, log: bool = False) -> Value:
    """Trace softmax, or its logarithm, along a dimension; None stands for the one that `_implicit_dim` picks."""
    dims = normalize_dims(_implicit_dim(dim, value.ndim), value.ndim, name)
    x, folded = fold_dims(require_float(value, name), dims, name)
    if 0 in value.shape:
        return value
    top, total = relative_to_max(x, folded)
    result = x - top - trace.apply("log", total) if log else trace.apply("exp", x - top) / total
    return Value(result, value.shape)


@rule(eager=_softmax_eager(torch.softmax), reduces=True)
def softmax(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    return _softmax(input.astype(dtype), dim, "softmax")


@rule(eager=_softmax_eager(torch.log_softmax), reduces=True)
def log_softmax(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    """Trace `log_softmax`, which as in PyTorch is NaN along a dimension with +inf or NaN."""
    return _softmax(input.astype(dtype), dim, "log_softmax", log=True)


@rule(eager=_softmax_eager(F.softmin), reduces=True)
def softmin(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    return _softmax(-require_float(input.astype(dtype), "softmin"), dim, "softmin")
