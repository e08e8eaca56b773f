"""Activations, and the exponentials that are normalised along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import trace
from ...ir import graph as g
from .overloads import Call, overload
from .promotion import along, cast_to, floats, pointwise, sloped
from .table import Refused, rule
from .values import Value, reduced_shape, refuse

F = torch.nn.functional
NN = torch._C._nn

# Without parameters: PyTorch's name -> the operator table's.
_PLAIN = {
    "relu": "relu",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "mish": "mish",
    "selu": "selu",
    "hardsigmoid": "hardsigmoid",
    "hardswish": "hardswish",
    "logsigmoid": "log_sigmoid",
}


def _plain(op: str) -> Callable[[Value], Value]:
    def traced(input: Value) -> Value:
        return pointwise(op, input)

    return traced


for _name, _op in _PLAIN.items():
    rule(_name, getattr(F, _name))(_plain(_op))
    overload(_name, _name)
overload("logsigmoid", "log_sigmoid")
overload("sigmoid", "expit")


def _limited(x: Value, low: float, high: float) -> Value:
    return pointwise("hardtanh", x, float(low), float(high))


@rule("hardtanh", F.hardtanh)
def hardtanh(input: Value, min_val: float = -1.0, max_val: float = 1.0) -> Value:
    return _limited(input, min_val, max_val)


@rule("relu6", F.relu6)
def relu6(input: Value) -> Value:
    return _limited(input, 0.0, 6.0)


@rule("leaky_relu", F.leaky_relu)
def leaky_relu(input: Value, negative_slope: float = 0.01) -> Value:
    return pointwise("leaky_relu", input, negative_slope)


@rule("rrelu", F.rrelu)
def rrelu(input: Value, lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> Value:
    """Outside of training, where the slope is not random."""
    return pointwise("leaky_relu", input, (lower + upper) / 2)


def _rrelu(
    input: Any,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    generator: Any = None,
) -> Any:
    if training:
        return Refused("rrelu in training draws random numbers; left to torch")
    return Call((input, lower, upper), inplace=inplace)


@rule("prelu", F.prelu)
def prelu(input: Value, weight: Value) -> Value:
    """One slope, or one for each channel, which are the second dimension."""
    if weight.size != 1:
        if input.ndim < 2 or weight.shape != (input.shape[1],):
            refuse("prelu", f"a weight of shape {weight.shape} beside an operand of shape {input.shape}")
        weight = weight.viewed((*weight.shape, *(1,) * (input.ndim - 2)))
    else:
        weight = weight.viewed(())
    if weight.dtype != input.dtype:
        refuse("prelu", f"a weight of {weight.dtype} beside an operand of {input.dtype}")
    return pointwise("leaky_relu", input, weight)


@rule("gelu", lambda x, approximate: F.gelu(x, approximate=approximate))
def gelu(input: Value, approximate: str = "none") -> Value:
    return pointwise("gelu_tanh" if approximate == "tanh" else "gelu", input)


@rule("elu", F.elu)
def elu(input: Value, alpha: float = 1.0) -> Value:
    return pointwise("elu", input, alpha)


@rule("celu", F.celu)
def celu(input: Value, alpha: float = 1.0) -> Value:
    if alpha == 0:
        refuse("celu", "PyTorch divides by alpha, which is 0")
    return pointwise("celu", input, alpha)


@rule("softplus", F.softplus)
def softplus(input: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    return pointwise("softplus", input, beta, threshold)


@rule("tanhshrink", F.tanhshrink)
def tanhshrink(input: Value) -> Value:
    return pointwise("subtract", input, pointwise("tanh", input))


@rule("softsign", F.softsign)
def softsign(input: Value) -> Value:
    """As PyTorch composes it, and so differentiates it."""
    return pointwise("divide", input, pointwise("add", pointwise("absolute", input), 1.0))


@rule("threshold", F.threshold)
def threshold(input: Value, threshold: float, value: float) -> Value:
    return pointwise("where", pointwise("less_equal", input, threshold), value, floats(input, "threshold"))


@rule("hardshrink", F.hardshrink)
def hardshrink(input: Value, lambd: float = 0.5) -> Value:
    inside = pointwise("greater_equal", input, -lambd), pointwise("less_equal", input, lambd)
    return pointwise("where", pointwise("logical_and", *inside), 0.0, floats(input, "hardshrink"))


@rule("softshrink", F.softshrink)
def softshrink(input: Value, lambd: float = 0.5) -> Value:
    """Within the limits x * 0, which keeps NaN; the slope of NaN is 1."""
    above = pointwise("subtract", input, lambd)
    below = pointwise("add", input, lambd)
    inner = pointwise("where", pointwise("less", input, -lambd), below, pointwise("multiply", input, 0.0))
    value = pointwise("where", pointwise("greater", input, lambd), above, inner)
    inside = pointwise("greater_equal", input, -lambd), pointwise("less_equal", input, lambd)
    slope = pointwise("where", pointwise("logical_and", *inside), 0.0, 1.0, dtype=value.dtype)
    return sloped(value, (input, slope))


overload("hardtanh", "hardtanh")
overload("relu6", "relu6")
overload("leaky_relu", "leaky_relu")
overload("rrelu", "rrelu", adapt=_rrelu)
overload("prelu", "prelu")
overload("gelu", "gelu")
overload("elu", "elu")
overload("celu", "celu")
overload("softplus", "softplus")
overload("tanhshrink", "tanhshrink")
overload("threshold", "threshold", F._threshold)
overload("hardshrink", "hardshrink")
overload("softshrink", "softshrink")
overload("softsign", "softsign")

# Along a dimension --------------------------------------------------------------------------------------------------


def _legacy_dim(dim: int | None, ndim: int) -> int:
    """The dimension that PyTorch takes where none is given, with a warning."""
    return (0 if ndim in (0, 1, 3) else 1) if dim is None else dim


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: Any, dim: int | None, dtype: str | None) -> Any:
        return function(input, _legacy_dim(dim, input.dim()), dtype=None if dtype is None else getattr(torch, dtype))

    return call


def _exponentials(input: Value, dim: int | None, dtype: str | None, name: str, logarithmic: bool, factor: int) -> Value:
    value = floats(cast_to(input, dtype), name)
    if factor < 0:
        value = pointwise("negative", value)
    x, axis, _ = along(value, _legacy_dim(dim, value.ndim), name)
    if 0 in value.shape:
        return value
    top = _constant(trace.reduce("max", x, axis, keepdims=True))
    distance = x - top
    total = trace.reduce("expsum", x, axis, keepdims=True) if axis is not None else _sum_exp(distance)
    result = distance - trace.apply("log", total) if logarithmic else trace.apply("exp", distance) / total
    return Value(result, value.shape)


def log_normalizer(input: Value, dim: int, name: str) -> tuple[Value, Value]:
    """The maximum along a dimension, a number for gradients, and the logarithm of the exponentials' sum beside it."""
    x, axis, dims = along(floats(input, name), dim, name)
    top = _constant(trace.reduce("max", x, axis, keepdims=True))
    total = trace.reduce("expsum", x, axis, keepdims=True) if axis is not None else _sum_exp(x - top)
    shape = reduced_shape(input.shape, dims, True)
    return Value(top, shape), Value(trace.apply("log", total), shape)


def _constant(x: Any) -> Any:
    """What exponentials are taken relative to counts as a number: the result does not depend on it."""
    return x._trace.array(g.stop_gradient(x._node), x._axes)


def _sum_exp(distance: Any) -> Any:
    return trace.reduce("sum", trace.apply("exp", distance), None, keepdims=True)


@rule("softmax", _eager(torch.softmax), reduces=True)
def softmax(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    return _exponentials(input, dim, dtype, "softmax", False, 1)


@rule("log_softmax", _eager(torch.log_softmax), reduces=True)
def log_softmax(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    """NaN along a dimension with +inf or NaN, as PyTorch has it."""
    return _exponentials(input, dim, dtype, "log_softmax", True, 1)


@rule("softmin", _eager(F.softmin), reduces=True)
def softmin(input: Value, dim: int | None = None, dtype: str | None = None) -> Value:
    return _exponentials(input, dim, dtype, "softmin", False, -1)


overload("softmax", "softmax")
overload("log_softmax", "log_softmax")
overload("softmin", "softmin")
