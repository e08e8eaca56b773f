"""Arithmetic, elementary functions, comparisons, logic and choices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from ..values import Value, refuse
from .meaning import as_mask, pointwise, promoted
from .spelling import Call, is_tensor, spell, spell_refused
from .table import Operand, Refused, rule

# Arithmetic ---------------------------------------------------------------------------------------------------------


def _swapped(*more: Any) -> Callable[..., Any]:
    return lambda input, other: (other, input, *more)


def _two(input: Any, other: Any) -> tuple[Any, Any]:
    return input, other


def _scaled(other: Operand, alpha: float) -> Operand:
    if alpha == 1:
        return other
    return pointwise("multiply", other, alpha) if isinstance(other, Value) else other * alpha


@rule("add", lambda a, b, alpha: operator.add(a, b) if alpha == 1 else torch.add(a, b, alpha=alpha))
def add(input: Operand, other: Operand, alpha: float = 1) -> Value:
    return pointwise("add", input, _scaled(other, alpha))


@rule("sub", lambda a, b, alpha: operator.sub(a, b) if alpha == 1 else torch.sub(a, b, alpha=alpha))
def sub(input: Operand, other: Operand, alpha: float = 1) -> Value:
    return pointwise("subtract", input, _scaled(other, alpha))


@rule("mul", operator.mul)
def mul(input: Operand, other: Operand) -> Value:
    return pointwise("multiply", input, other)


@rule("div", operator.truediv)
def div(input: Operand, other: Operand) -> Value:
    return pointwise("divide", input, other)


def _div(input: Any, other: Any, rounding_mode: Any = None) -> Any:
    if rounding_mode is not None:
        return Refused(f"division with rounding_mode={rounding_mode!r}")
    return input, other


T = torch.Tensor
spell("add", "add", operator.add, T.__add__, T.__radd__)
spell("add", operator.iadd, T.__iadd__, inplace=True)
spell("sub", "sub", "subtract", operator.sub, T.__sub__)
spell("sub", operator.isub, T.__isub__, inplace=True)
spell("sub", torch.rsub, adapt=lambda input, other, alpha=1: (other, input, alpha))
spell("sub", T.__rsub__, adapt=_swapped())
spell("mul", "mul", "multiply", operator.mul, T.__mul__, T.__rmul__)
spell("mul", operator.imul, T.__imul__, inplace=True)
spell("div", "div", "divide", "true_divide", operator.truediv, T.__truediv__, T.__div__, adapt=_div)
spell("div", operator.itruediv, T.__itruediv__, T.__idiv__, adapt=_div, inplace=True)
spell("div", T.__rdiv__, T.__rtruediv__, adapt=_swapped())


def _pow_eager(input: Any, exponent: Any) -> Any:
    return torch.pow(input, exponent)


@rule("pow", _pow_eager)
def pow(input: Operand, exponent: Operand) -> Value:
    """PyTorch has short forms for some exponents, which give other special values than a power does."""
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
        if exponent == -2:
            return pointwise("reciprocal", pointwise("square", base))
    return pointwise("power", input, exponent)


spell("pow", "pow", operator.pow, T.__pow__, adapt=lambda input, exponent: (input, exponent))
spell("pow", T.__ipow__, operator.ipow, adapt=lambda input, exponent: (input, exponent), inplace=True)
spell("pow", T.__rpow__, adapt=_swapped())


@rule("addcmul", lambda x, a, b, value: torch.addcmul(x, a, b, value=value))
def addcmul(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _scaled(pointwise("multiply", tensor1, tensor2), value))


@rule("addcdiv", lambda x, a, b, value: torch.addcdiv(x, a, b, value=value))
def addcdiv(input: Value, tensor1: Value, tensor2: Value, value: float = 1) -> Value:
    return pointwise("add", input, _scaled(pointwise("divide", tensor1, tensor2), value))


spell("addcmul", "addcmul")
spell("addcdiv", "addcdiv")


@rule("lerp", torch.lerp)
def lerp(input: Value, end: Value, weight: Operand) -> Value:
    """From the nearer end, as PyTorch does."""
    distance = pointwise("subtract", end, input)
    rest = pointwise("subtract", 1.0, weight) if isinstance(weight, Value) else 1.0 - weight
    near = _plus_product(input, weight, distance)
    far = pointwise("subtract", end, pointwise("multiply", distance, rest))
    if not isinstance(weight, Value):
        return near if abs(weight) < 0.5 else far
    return pointwise("where", pointwise("less", pointwise("absolute", weight), 0.5), near, far)


def _plus_product(x: Value, a: Operand, b: Operand) -> Value:
    return pointwise("add", x, pointwise("multiply", a, b))


spell("lerp", "lerp")

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
    spell(_name, _name)
spell("neg", "negative", operator.neg, T.__neg__)
spell("abs", "absolute", operator.abs, T.__abs__)
spell("atan", "arctan")
spell("trunc", "fix")


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


spell("rsqrt", "rsqrt")
spell("sign", "sign")
spell("round", "round", adapt=_round)
spell("positive", "positive", operator.pos, T.__pos__)
spell_refused("there is no operator for it", "erfc", "sgn", "frac", "fmod", "remainder", "floor_divide", "fmax", "fmin")


@rule("logaddexp", torch.logaddexp)
def logaddexp(input: Value, other: Value) -> Value:
    return pointwise("logaddexp", input, other)


@rule("maximum", torch.maximum)
def maximum(input: Value, other: Value) -> Value:
    return pointwise("maximum", input, other)


@rule("minimum", torch.minimum)
def minimum(input: Value, other: Value) -> Value:
    return pointwise("minimum", input, other)


spell("logaddexp", "logaddexp")
spell("maximum", "maximum")
spell("minimum", "minimum")

# Limits and choices -------------------------------------------------------------------------------------------------


@rule("clamp", torch.clamp)
def clamp(input: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    if min is None and max is None:
        refuse("clamp", "neither min nor max is given")
    if min is None:
        return pointwise("minimum", input, max)
    if max is None:
        return pointwise("maximum", input, min)
    return pointwise("clip", input, min, max)


spell("clamp", "clamp", "clip")
spell("clamp", "clamp_min", adapt=lambda input, min: (input, min))
spell("clamp", "clamp_max", adapt=lambda input, max: (input, None, max))


@rule("where", torch.where)
def where(condition: Value, input: Operand, other: Operand) -> Value:
    if condition.dtype != "bool":
        refuse("where", f"a condition of {condition.dtype}")
    return pointwise("where", condition, input, other)


def _where(condition: Any, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    if input is None or other is None:
        return Refused("the number of its results depends on values")
    return condition, input, other


spell("where", torch.where, adapt=lambda condition, input=None, other=None, **more: _where(condition, input, other))
spell("where", T.where, adapt=lambda self, condition, other=None: _where(condition, self, other))


@rule("masked_fill", torch.masked_fill)
def masked_fill(input: Value, mask: Value, value: Operand) -> Value:
    if mask.dtype != "bool":
        refuse("masked_fill", f"a mask of {mask.dtype}")
    if not is_float(input.dtype):
        refuse("masked_fill", f"an operand of {input.dtype}")
    if isinstance(value, Value):
        if value.ndim:
            refuse("masked_fill", "a value that has dimensions")
        value = value.astype(input.dtype)
    return pointwise("where", mask, value, input, dtype=input.dtype)


spell("masked_fill", "masked_fill")

# Comparisons and logic ----------------------------------------------------------------------------------------------

_COMPARISONS = {
    "gt": ("greater", "__gt__"),
    "ge": ("greater_equal", "__ge__"),
    "lt": ("less", "__lt__"),
    "le": ("less_equal", "__le__"),
    "eq": ("equal", "__eq__"),
    "ne": ("not_equal", "__ne__"),
}


def _comparison(op: str) -> Callable[[Operand, Operand], Value]:
    def traced(input: Operand, other: Operand) -> Value:
        return pointwise(op, input, other)

    return traced


def _enter_comparisons() -> None:
    for name, (op, method) in _COMPARISONS.items():
        compare = getattr(operator, name)
        rule(name, compare)(_comparison(op))
        # The in-place forms would have to write masks to floats.
        spell(name, getattr(torch, name), getattr(T, name), compare, getattr(T, method), adapt=_two)
        if op != "equal":  # torch.equal gives a Python bool
            spell(name, getattr(torch, op), getattr(T, op), adapt=_two)


_enter_comparisons()


@rule("logical_and", torch.logical_and)
def logical_and(input: Value, other: Value) -> Value:
    return pointwise("logical_and", as_mask(input), as_mask(other))


@rule("logical_or", torch.logical_or)
def logical_or(input: Value, other: Value) -> Value:
    return pointwise("logical_or", as_mask(input), as_mask(other))


@rule("logical_xor", torch.logical_xor)
def logical_xor(input: Value, other: Value) -> Value:
    return pointwise("not_equal", as_mask(input), as_mask(other))


@rule("logical_not", torch.logical_not)
def logical_not(input: Value) -> Value:
    return pointwise("logical_not", as_mask(input))


def _masks(name: str, *operands: Any) -> None:
    for value in operands:
        if not isinstance(value, bool) and not (isinstance(value, Value) and value.dtype == "bool"):
            refuse(name, "it is fused for masks only")


@rule("bitwise_and", operator.and_)
def bitwise_and(input: Operand, other: Operand) -> Value:
    _masks("bitwise_and", input, other)
    return pointwise("logical_and", input, other)


@rule("bitwise_or", operator.or_)
def bitwise_or(input: Operand, other: Operand) -> Value:
    _masks("bitwise_or", input, other)
    return pointwise("logical_or", input, other)


@rule("bitwise_xor", operator.xor)
def bitwise_xor(input: Operand, other: Operand) -> Value:
    _masks("bitwise_xor", input, other)
    return pointwise("not_equal", input, other)


@rule("bitwise_not", torch.bitwise_not)
def bitwise_not(input: Value) -> Value:
    _masks("bitwise_not", input)
    return pointwise("logical_not", input)


def _spell_logic() -> None:
    for name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        spell(name, getattr(torch, name), getattr(T, name))
    for name, plain in (("and", "and_"), ("or", "or_"), ("xor", "xor")):
        rule_name = f"bitwise_{name}"
        spell(rule_name, rule_name, getattr(operator, plain), getattr(T, f"__{name}__"), adapt=_two)
        spell(rule_name, getattr(T, f"__r{name}__"), adapt=_swapped())
        spell(rule_name, getattr(operator, f"i{name}"), getattr(T, f"__i{name}__"), adapt=_two, inplace=True)
    spell("bitwise_not", "bitwise_not", operator.invert, T.__invert__)


_spell_logic()

# Dtypes -------------------------------------------------------------------------------------------------------------


@rule("to", lambda x, dtype: x.to(getattr(torch, dtype)), view=True)
def to(input: Value, dtype: str) -> Value:
    if input.dtype == dtype:
        return input
    if dtype == "bool":
        return as_mask(input)
    if dtype == "int64" and is_float(input.dtype):
        refuse("to", "floats as integers")
    return input.astype(dtype)


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's takes a dtype, a device, both, or another tensor, and says whether to copy."""
    if kwargs.pop("copy", False) or (len(args) > 2 and args[-1] is True):
        return Refused("it asks for a copy")
    given = [*args, *kwargs.values()]
    dtypes = [a for a in given if isinstance(a, torch.dtype)]
    if any(isinstance(a, (str, torch.device)) for a in given) or (given and type(given[0]) is int):
        return Refused("it moves a tensor between devices")
    if given and is_tensor(given[0]):
        return Call((input, given[0]), "type_as")
    if not dtypes:
        return Call((input,), "identity")
    return input, dtypes[0]


def _cast(dtype: Any) -> Callable[..., Any]:
    return lambda input: (input, dtype)


@rule("type_as", lambda x, other: x.type_as(other), view=True)
def type_as(input: Value, other: Value) -> Value:
    return to(input, other.dtype)


def _type(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    if isinstance(dtype, torch.dtype):
        return input, dtype
    return Refused("a type by its name, or asked for")


spell("to", T.to, adapt=_to)
spell("to", T.type, adapt=_type)
spell("type_as", T.type_as, adapt=_two)
for _method, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("bool", torch.bool),
    ("long", torch.int64),
):
    spell("to", getattr(T, _method), adapt=_cast(_dtype))
