"""Arithmetic, elementary functions, limits and choices."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...dtypes import is_float
from ...ir.operators import elementary
from ...ir.operators.table import Operator
from .promotion import can_cast, promote
from .table import RULES, F, Refused, leave_unfused, overload, rule, swapped_operands
from .values import Operand, Value, pointwise, refuse, require_float, with_slopes

T = torch.Tensor

# Arithmetic ---------------------------------------------------------------------------------------------------------


def _is_one(alpha: Any) -> bool:
    """Whether a factor changes nothing; PyTorch refuses True."""
    return alpha == 1 and not isinstance(alpha, bool)


def _times_alpha(input: Operand, other: Operand, alpha: float) -> Operand:
    """Multiply the second operand by alpha, in the dtype of the result."""
    if isinstance(alpha, bool):
        refuse("add", "a factor alpha that is a bool")
    if alpha == 1:
        return other
    dtype = promote(input, other)
    if not is_float(dtype) and (dtype == "bool" or isinstance(alpha, float)):
        refuse("add", f"a factor alpha of {type(alpha).__name__} beside {dtype}")
    return pointwise("multiply", other, alpha, dtype=dtype) if isinstance(other, Value) else other * alpha


def _eager_with_alpha(plain: Callable[..., Any], scaled: Callable[..., Any]) -> Callable[..., Any]:
    """Make the eager form of `add` and `sub`, which passes alpha only if it is not one."""
    return lambda a, b, alpha: plain(a, b) if _is_one(alpha) else scaled(a, b, alpha=alpha)


@rule("add", operator.add, T.__add__, T.__radd__, eager=_eager_with_alpha(operator.add, torch.add))
def add(input: Operand, other: Operand, alpha: float = 1) -> Value:
    """Trace `add`; the sum of masks is their union."""
    if promote(input, other) == "bool" and _is_one(alpha):
        return pointwise("logical_or", input, other)
    return pointwise("add", input, _times_alpha(input, other, alpha))


@rule("sub", "subtract", operator.sub, T.__sub__, eager=_eager_with_alpha(operator.sub, torch.sub))
def sub(input: Operand, other: Operand, alpha: float = 1) -> Value:
    if any(isinstance(o, bool) or (isinstance(o, Value) and o.dtype == "bool") for o in (input, other)):
        refuse("sub", "PyTorch subtracts no masks")
    return pointwise("subtract", input, _times_alpha(input, other, alpha))


@rule("mul", "multiply", operator.mul, T.__mul__, T.__rmul__, eager=operator.mul)
def mul(input: Operand, other: Operand) -> Value:
    """Trace `mul`; the product of masks is their intersection."""
    return pointwise("logical_and" if promote(input, other) == "bool" else "multiply", input, other)


def _div_arguments(input: Any, other: Any, rounding_mode: Any = None) -> Any:
    """Adapt `div`; refuse a rounding mode."""
    if rounding_mode is not None:
        return Refused(f"division with rounding_mode={rounding_mode!r}")
    return input, other


@rule(
    *("div", "divide", "true_divide", operator.truediv, T.__truediv__, T.__div__),
    eager=operator.truediv,
    adapt=_div_arguments,
)
def div(input: Operand, other: Operand) -> Value:
    return pointwise("divide", input, other)


overload("add", operator.iadd, T.__iadd__, inplace=True)
overload("sub", operator.isub, T.__isub__, inplace=True)
overload("sub", T.__rsub__, adapt=swapped_operands)
overload("sub", torch.rsub, adapt=lambda input, other, alpha=1: (other, input, alpha))
overload("mul", operator.imul, T.__imul__, inplace=True)
overload("div", operator.itruediv, T.__itruediv__, T.__idiv__, adapt=_div_arguments, inplace=True)
overload("div", T.__rdiv__, T.__rtruediv__, adapt=swapped_operands)


def _pow_arguments(input: Any, exponent: Any) -> Any:
    """Adapt `pow`, whose overloads name the exponent differently."""
    return input, exponent


# PyTorch's short forms for some exponents, which differ from powers at special values or in the last digits.
_POWERS: dict[float, Callable[[Value], Value]] = {
    1: lambda x: x,
    2: lambda x: pointwise("square", x),
    3: lambda x: pointwise("square", x) * x,
    0.5: lambda x: pointwise("sqrt", x),
    -0.5: lambda x: pointwise("reciprocal", pointwise("sqrt", x)),
    -1: lambda x: pointwise("reciprocal", x),
}


@rule("pow", operator.pow, T.__pow__, adapt=_pow_arguments)
def pow(input: Operand, exponent: Operand) -> Value:
    if isinstance(input, Value) and not isinstance(exponent, Value):
        dtype = promote(input, exponent)
        if not is_float(dtype):
            refuse("pow", f"powers of {input.dtype}")
        if exponent in _POWERS:
            return _POWERS[exponent](input.astype(dtype))
    return pointwise("power", input, exponent)


overload("pow", T.__ipow__, operator.ipow, adapt=_pow_arguments, inplace=True)
overload("pow", T.__rpow__, adapt=swapped_operands)


@rule()
def addcmul(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _times_alpha(input, tensor1 * tensor2, value))


@rule()
def addcdiv(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _times_alpha(input, tensor1 / tensor2, value))


@rule()
def lerp(input: Value, end: Value, weight: Operand) -> Value:
    """Trace `lerp`: interpolate from the nearer end, but differentiate as if from the first one, as PyTorch does."""
    distance, rest = end - input, 1.0 - weight
    near, far = input + weight * distance, end - distance * rest
    if not isinstance(weight, Value):
        return with_slopes(near if abs(weight) < 0.5 else far, (input, rest), (end, weight))
    value = pointwise("where", abs(weight) < 0.5, near, far)
    return with_slopes(value, (input, rest), (end, weight), (weight, distance))


# Functions of one operand -------------------------------------------------------------------------------------------


@rule()
def rsqrt(input: Value) -> Value:
    return pointwise("reciprocal", pointwise("sqrt", input))


@rule()
def sign(input: Value) -> Value:
    """Trace `sign`, which as in PyTorch is zero for NaN."""
    return pointwise("where", pointwise("isnan", input), 0.0, pointwise("sign", input))


def _round_arguments(input: Any, decimals: int = 0) -> Any:
    """Adapt `round`; refuse decimals."""
    return (input,) if decimals == 0 else Refused("rounding to decimals")


@rule(adapt=_round_arguments)
def round(input: Value) -> Value:
    return pointwise("rint", input)


@rule("positive", operator.pos, T.__pos__, view=True, no_op=True)
def positive(input: Value) -> Value:
    return input


leave_unfused(
    "cupyfuse has no operator for it", "erfc", "sgn", "frac", "fmod", "remainder", "floor_divide", "fmax", "fmin"
)


# PyTorch's names where they are others than the operator table's.
_INVERSES = {f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")}
_NAMES = {"negative": "neg", "absolute": "abs", "log_sigmoid": "logsigmoid"} | _INVERSES


def enter_unary_operators(rows: Iterable[Operator], module: str) -> None:
    """Enter a rule for each operator of one operand that PyTorch has too and that has none."""
    for row in rows:
        name = _NAMES.get(row.name, row.name)
        if row.arity == 1 and name not in (*RULES, "logical_not") and (hasattr(F, name) or hasattr(torch, name)):
            rule(name=name)(_unary(row.name, module))


def _unary(op: str, module: str) -> Callable[[Value], Value]:
    """Make the rule of an operator of one operand."""

    def traced(input: Value) -> Value:
        return pointwise(op, require_float(input, op) if op.startswith("is") else input)

    traced.__module__ = module  # by which the documentation groups rules
    return traced


enter_unary_operators(elementary.ROWS, __name__)
overload("neg", "negative", operator.neg, T.__neg__)
overload("abs", "absolute", operator.abs, T.__abs__)
for _alias, _name in _INVERSES.items():
    overload(_name, _alias)
overload("trunc", "fix")


def _binary(op: str) -> Callable[[Value, Value], Value]:
    """Make the rule of an operator of two operands."""

    def traced(input: Value, other: Value) -> Value:
        return pointwise(op, input, other)

    return traced


for _op in ("logaddexp", "maximum", "minimum"):
    rule(name=_op)(_binary(_op))
rule("atan2", "arctan2", name="atan2")(_binary("arctan2"))

# Limits and choices -------------------------------------------------------------------------------------------------

# The slope of `clamp` at its bounds: 1 before PyTorch 2.14, then 0 at numbers, and shared with tensors.
_OPEN = torch.__version__ >= (2, 14)


def _and(a: Value, b: Value) -> Value:
    return pointwise("logical_and", a, b)


def _clamp_integers(input: Value, min: Operand | None, max: Operand | None) -> Value:
    """Limit integers, of which none is infinite."""
    if min is not None:
        input = pointwise("maximum", input, min)
    return input if max is None else pointwise("minimum", input, max)


@rule("clamp", "clip")
def clamp(input: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    if min is None and max is None:
        refuse("clamp", "neither min nor max is given")
    bounds = [bound for bound in (min, max) if bound is not None]
    if not is_float(promote(input, *bounds)):
        return _clamp_integers(input, min, max)
    if any(isinstance(bound, float) and math.isnan(bound) for bound in bounds):
        refuse("clamp", "a bound of NaN means nothing in some versions of PyTorch")
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    limited = pointwise("clip", input, low, high)
    if not _OPEN:
        return limited
    if any(isinstance(bound, Value) for bound in bounds):
        if len(bounds) == 2:
            refuse("clamp", "two tensors as bounds, whose gradients are PyTorch's own where these meet")
        return pointwise("minimum" if min is None else "maximum", input, bounds[0])
    inside = [pointwise("greater", input, min)] if min is not None else []
    inside += [pointwise("less", input, max)] if max is not None else []
    slope = pointwise("where", functools.reduce(_and, inside), 1.0, 0.0, dtype=limited.dtype)
    return with_slopes(limited, (input, slope))


overload("clamp", "clamp_min", adapt=lambda input, min: (input, min))
overload("clamp", "clamp_max", adapt=lambda input, max: (input, None, max))


def _where_arguments(condition: Any, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """Adapt `where`; refuse the form of one operand."""
    if input is None or other is None:
        return Refused("the number of its results depends on values")
    return condition, input, other


@rule(torch.where, adapt=_where_arguments)
def where(condition: Value, input: Operand, other: Operand) -> Value:
    if condition.dtype != "bool":
        refuse("where", f"a condition of {condition.dtype}")
    return pointwise("where", condition, input, other)


overload("where", T.where, adapt=lambda self, condition, other=None: _where_arguments(condition, self, other))


@rule()
def masked_fill(input: Value, mask: Value, value: Operand) -> Value:
    if mask.dtype != "bool":
        refuse("masked_fill", f"a mask of {mask.dtype}")
    if not isinstance(value, Value):
        if promote(input, value) != input.dtype:
            refuse("masked_fill", f"a {type(value).__name__} in an operand of {input.dtype}")
    elif not can_cast(value.dtype, input.dtype):
        refuse("masked_fill", f"a value of {value.dtype} in an operand of {input.dtype}")
    elif value.ndim:
        refuse("masked_fill", "a value that has dimensions")
    else:
        value = value.astype(input.dtype)
    return pointwise("where", mask, value, input, dtype=input.dtype)
