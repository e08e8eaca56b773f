"""Arithmetic, elementary functions, comparisons, logic and choices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from .overloads import leave_unfused, overload, swapped
from .promotion import pointwise, promoted, sloped
from .table import Operand, Refused, rule
from .values import Value, refuse

# Arithmetic ---------------------------------------------------------------------------------------------------------


def _scaled(input: Operand, other: Operand, alpha: float) -> Operand:
    """The second operand times alpha, in the dtype of the result."""
    if isinstance(alpha, bool):
        refuse("add", "a factor alpha that is a bool")
    if alpha == 1:
        return other
    dtype = promoted(input, other)
    if not is_float(dtype) and (dtype == "bool" or isinstance(alpha, float)):
        refuse("add", f"a factor alpha of {type(alpha).__name__} beside {dtype}")
    return pointwise("multiply", other, alpha, dtype=dtype) if isinstance(other, Value) else other * alpha


def _eager(plain: Callable[..., Any], scaling: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Any, b: Any, alpha: Any) -> Any:
        one = alpha == 1 and not isinstance(alpha, bool)  # which PyTorch refuses
        return plain(a, b) if one else scaling(a, b, alpha=alpha)

    return call


def _masks(input: Operand, other: Operand) -> bool:
    """Whether the result is a mask: sums of masks are unions, products are intersections."""
    return promoted(input, other) == "bool"


@rule("add", _eager(operator.add, torch.add))
def add(input: Operand, other: Operand, alpha: float = 1) -> Value:
    if _masks(input, other) and alpha == 1 and not isinstance(alpha, bool):
        return pointwise("logical_or", input, other)
    return pointwise("add", input, _scaled(input, other, alpha))


@rule("sub", _eager(operator.sub, torch.sub))
def sub(input: Operand, other: Operand, alpha: float = 1) -> Value:
    if any(isinstance(o, bool) or (isinstance(o, Value) and o.dtype == "bool") for o in (input, other)):
        refuse("sub", "PyTorch subtracts no masks")
    return pointwise("subtract", input, _scaled(input, other, alpha))


@rule("mul", operator.mul)
def mul(input: Operand, other: Operand) -> Value:
    if _masks(input, other):
        return pointwise("logical_and", input, other)
    return pointwise("multiply", input, other)


@rule("div", operator.truediv)
def div(input: Operand, other: Operand) -> Value:
    return pointwise("divide", input, other)


def _div(input: Any, other: Any, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        return Refused(f"division with rounding_mode={rounding_mode!r}")
    return input, other


T = torch.Tensor
overload("add", "add", operator.add, T.__add__, T.__radd__)
overload("add", operator.iadd, T.__iadd__, inplace=True)
overload("sub", "sub", "subtract", operator.sub, T.__sub__)
overload("sub", operator.isub, T.__isub__, inplace=True)
overload("sub", torch.rsub, adapt=lambda input, other, alpha=1: (other, input, alpha))
overload("sub", T.__rsub__, adapt=swapped)
overload("mul", "mul", "multiply", operator.mul, T.__mul__, T.__rmul__)
overload("mul", operator.imul, T.__imul__, inplace=True)
overload("div", "div", "divide", "true_divide", operator.truediv, T.__truediv__, T.__div__, adapt=_div)
overload("div", operator.itruediv, T.__itruediv__, T.__idiv__, adapt=_div, inplace=True)
overload("div", T.__rdiv__, T.__rtruediv__, adapt=swapped)


@rule("pow", torch.pow)
def pow(input: Operand, exponent: Operand) -> Value:
    """Powers by the short forms that PyTorch has for some exponents, which give other special values or last digits."""
    if isinstance(input, Value) and not isinstance(exponent, Value):
        dtype = promoted(input, exponent)
        base = input if is_float(dtype) else refuse("pow", f"powers of {input.dtype}")
        base = base.astype(dtype)
        if exponent == 1:
            return base
        if exponent == 2:
            return pointwise("square", base)
        if exponent == 3:
            return pointwise("multiply", pointwise("square", base), base)
        if exponent == 0.5:
            return pointwise("sqrt", base)
        if exponent == -0.5:
            return pointwise("reciprocal", pointwise("sqrt", base))
        if exponent == -1:
            return pointwise("reciprocal", base)
    return pointwise("power", input, exponent)


overload("pow", "pow", operator.pow, T.__pow__, adapt=lambda input, exponent: (input, exponent))
overload("pow", T.__ipow__, operator.ipow, adapt=lambda input, exponent: (input, exponent), inplace=True)
overload("pow", T.__rpow__, adapt=swapped)


@rule("addcmul", lambda x, a, b, value: torch.addcmul(x, a, b, value=value))
def addcmul(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _scaled(input, pointwise("multiply", tensor1, tensor2), value))


@rule("addcdiv", lambda x, a, b, value: torch.addcdiv(x, a, b, value=value))
def addcdiv(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _scaled(input, pointwise("divide", tensor1, tensor2), value))


overload("addcmul", "addcmul")
overload("addcdiv", "addcdiv")


@rule("lerp", torch.lerp)
def lerp(input: Value, end: Value, weight: Operand) -> Value:
    """From the nearer end, as PyTorch does; differentiated as if from the first one."""
    distance = pointwise("subtract", end, input)
    rest = pointwise("subtract", 1.0, weight) if isinstance(weight, Value) else 1.0 - weight
    near = _plus_product(input, weight, distance)
    far = pointwise("subtract", end, pointwise("multiply", distance, rest))
    if not isinstance(weight, Value):
        return sloped(near if abs(weight) < 0.5 else far, (input, rest), (end, weight))
    value = pointwise("where", pointwise("less", pointwise("absolute", weight), 0.5), near, far)
    return sloped(value, (input, rest), (end, weight), (weight, distance))


def _plus_product(x: Value, a: Operand, b: Operand) -> Value:
    return pointwise("add", x, pointwise("multiply", a, b))


overload("lerp", "lerp")

# Functions of one operand -------------------------------------------------------------------------------------------

# PyTorch's name -> the operator table's.
_UNARY = {
    "neg": "negative",
    "abs": "absolute",
    "square": "square",
    "sqrt": "sqrt",
    "reciprocal": "reciprocal",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log2": "log2",
    "log10": "log10",
    "log1p": "log1p",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "atan": "arctan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "erf": "erf",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "isnan": "isnan",
    "isinf": "isinf",
    "isfinite": "isfinite",
}


def _unary(op: str) -> Callable[[Value], Value]:
    def traced(input: Value) -> Value:
        if op.startswith("is") and not is_float(input.dtype):
            refuse(op, f"an operand of {input.dtype}")
        return pointwise(op, input)

    return traced


for _name, _op in _UNARY.items():
    rule(_name, getattr(torch, _name))(_unary(_op))
    overload(_name, _name)
overload("neg", "negative", operator.neg, T.__neg__)
overload("abs", "absolute", operator.abs, T.__abs__)
overload("atan", "arctan")
overload("trunc", "fix")


@rule("rsqrt", torch.rsqrt)
def rsqrt(input: Value) -> Value:
    return pointwise("reciprocal", pointwise("sqrt", input))


@rule("sign", torch.sign)
def sign(input: Value) -> Value:
    """Zero for NaN, as PyTorch has it."""
    return pointwise("where", pointwise("isnan", input), 0.0, pointwise("sign", input))


@rule("round", torch.round)
def round(input: Value) -> Value:
    return pointwise("rint", input)


def _round(input: Any, decimals: int = 0) -> Any:
    return (input,) if decimals == 0 else Refused("rounding to decimals")


@rule("positive", torch.positive, view=True, idle=True)
def positive(input: Value) -> Value:
    return input


overload("rsqrt", "rsqrt")
overload("sign", "sign")
overload("round", "round", adapt=_round)
overload("positive", "positive", operator.pos, T.__pos__)
leave_unfused("there is no operator for it", "erfc", "sgn", "frac", "fmod", "remainder", "floor_divide", "fmax", "fmin")


@rule("logaddexp", torch.logaddexp)
def logaddexp(input: Value, other: Value) -> Value:
    return pointwise("logaddexp", input, other)


@rule("maximum", torch.maximum)
def maximum(input: Value, other: Value) -> Value:
    return pointwise("maximum", input, other)


@rule("minimum", torch.minimum)
def minimum(input: Value, other: Value) -> Value:
    return pointwise("minimum", input, other)


overload("logaddexp", "logaddexp")
overload("maximum", "maximum")
overload("minimum", "minimum")

# Limits and choices -------------------------------------------------------------------------------------------------


@rule("clamp", torch.clamp)
def clamp(input: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    if min is None and max is None:
        refuse("clamp", "neither min nor max is given")
    given = [bound for bound in (min, max) if bound is not None]
    if not is_float(promoted(input, *given)):
        refuse("clamp", "arithmetic on integers")
    if any(isinstance(bound, float) and math.isnan(bound) for bound in given):
        refuse("clamp", "a bound of NaN means nothing in some versions of PyTorch")
    # An element that equals a bound keeps its gradient, where `maximum` would share it.
    return pointwise("clip", input, -math.inf if min is None else min, math.inf if max is None else max)


overload("clamp", "clamp", "clip")
overload("clamp", "clamp_min", adapt=lambda input, min: (input, min))
overload("clamp", "clamp_max", adapt=lambda input, max: (input, None, max))


@rule("where", torch.where)
def where(condition: Value, input: Operand, other: Operand) -> Value:
    if condition.dtype != "bool":
        refuse("where", f"a condition of {condition.dtype}")
    return pointwise("where", condition, input, other)


def _where(condition: Any, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    if input is None or other is None:
        return Refused("the number of its results depends on values")
    return condition, input, other


overload("where", torch.where, adapt=lambda condition, input=None, other=None, **more: _where(condition, input, other))
overload("where", T.where, adapt=lambda self, condition, other=None: _where(condition, self, other))


@rule("masked_fill", torch.masked_fill)
def masked_fill(input: Value, mask: Value, value: Operand) -> Value:
    if mask.dtype != "bool":
        refuse("masked_fill", f"a mask of {mask.dtype}")
    if not isinstance(value, Value) and promoted(input, value) != input.dtype:
        refuse("masked_fill", f"a {type(value).__name__} in an operand of {input.dtype}")
    if isinstance(value, Value):
        if not torch.can_cast(getattr(torch, value.dtype), getattr(torch, input.dtype)):
            refuse("masked_fill", f"a value of {value.dtype} in an operand of {input.dtype}")
        if value.ndim:
            refuse("masked_fill", "a value that has dimensions")
        value = value.astype(input.dtype)
    return pointwise("where", mask, value, input, dtype=input.dtype)


overload("masked_fill", "masked_fill")
