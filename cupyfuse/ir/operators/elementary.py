"""Elementary operators: arithmetic, NumPy's functions, rounding, selection, comparisons, and what rewrites need."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from . import special
from .table import LIBRARY, ROUNDING, Array, combined, op, zero

LN2 = math.log(2.0)


def finite_or_zero(x: Array) -> Array:
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def log_relative(top: Array, total: Array) -> Array:
    return np.where(np.isfinite(top), np.log(total), top)


def plus_log(top: Array, total: Array) -> Array:
    """Return top + log(total), in the next wider dtype and rounded once; `top` where `top` is infinite or NaN."""
    wide = np.float32 if top.dtype.itemsize == 2 else np.float64
    logarithm = top.astype(wide) + np.log(total.astype(wide))
    return np.where(np.isfinite(top), logarithm.astype(top.dtype), top)


def _clip(x: Array, low: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _nan_on_underflow(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Make a product or quotient NaN below 1e-30, where underflow loses digits that a later factor may scale up."""

    def call(a: Array, b: Array) -> Array:
        result = function(a, b)
        is_exact_zero = (a == 0) | (b == 0) if function is np.multiply else a == 0
        return np.where(is_exact_zero | ~(np.abs(result) < 1e-30), result, result.dtype.type(np.nan))

    return call


def _inverse_or_zero(o: Any, x: Any) -> Any:
    """Return 1 / x, or 0 for 0, as PyTorch's derivative of `atan2` has it."""
    return o.where(x == 0.0, 0.0, 1.0 / x)


def _cuda_logarithm(name: str) -> str:
    # CUDA's logarithm of a negative subnormal float64 is -inf.
    return f"({{0}} < T(0) ? T(nan) : {name}({{0}}))"


ROWS = (
    # arithmetic
    op("add", np.add, "{0} + {1}", lambda o, y, a, b: (1.0, 1.0), "Sum a + b.", result="same", ulps=ROUNDING),
    op(
        "subtract",
        np.subtract,
        "{0} - {1}",
        lambda o, y, a, b: (1.0, -1.0),
        "Difference a - b.",
        result="same",
        ulps=ROUNDING,
    ),
    op("multiply", np.multiply, "{0} * {1}", lambda o, y, a, b: (b, a), "Product a * b.", result="same", ulps=ROUNDING),
    op(
        "divide",
        np.divide,
        "{0} / {1}",
        lambda o, y, a, b: (1.0 / b, -y / b),
        "Quotient a / b.",
        flops=4,
        ulps=ROUNDING,
        quick="quick_quotient({0}, {1})",
    ),
    op(
        "power",
        np.power,
        "pow({0}, {1})",
        lambda o, y, a, b: (
            o.where(b == 0.0, 0.0, b * o.power(a, b - 1.0)),
            y * o.where(o.logical_and(a == 0.0, b >= 0.0), 0.0, o.log(a)),
        ),
        "a to the power b.",
        flops=20,
        ulps=LIBRARY,
    ),
    op(
        "fmod",
        np.fmod,
        "fmod({0}, {1})",
        lambda o, y, a, b: (1.0, -o.trunc(a / b)),
        "Remainder of a / b with the sign of a; 0 for integers by 0.",
        flops=20,
        result="same",
    ),
    op(
        "remainder",
        np.remainder,
        "remainder_of({0}, {1})",
        lambda o, y, a, b: (1.0, -o.floor_divide(a, b)),
        "Remainder of a / b with the sign of b; 0 for integers by 0.",
        flops=20,
        result="same",
        ulps=ROUNDING,
    ),
    op(
        "floor_divide",
        np.floor_divide,
        "floor_quotient({0}, {1})",
        zero,
        "Largest integer not above a / b; 0 for integers by 0.",
        flops=24,
        result="same",
        ulps=combined(ROUNDING),
    ),
    op("negative", np.negative, "-{0}", lambda o, y, x: (-1.0,), "Minus x.", result="same"),
    op(
        "absolute",
        np.absolute,
        "fabs({0})",
        # The sign as a factor, not a selection; 0 for NaN.
        lambda o, y, x: (o.where(x > 0.0, 1.0, 0.0) - o.where(x < 0.0, 1.0, 0.0),),
        "Absolute value.",
    ),
    op(
        "sign",
        np.sign,
        "({0} != {0} ? {0} : T(({0} > 0) - ({0} < 0)))",
        zero,
        "-1, 0 or 1, the sign of x; NaN for NaN.",
    ),
    op("square", np.square, "{0} * {0}", lambda o, y, x: (2.0 * x,), "x squared.", result="same", ulps=ROUNDING),
    op(
        "sqrt",
        np.sqrt,
        "sqrt({0})",
        lambda o, y, x: (0.5 / y,),
        "Square root.",
        flops=4,
        ulps=ROUNDING,
        quick="quick_sqrt({0})",
    ),
    op(
        "reciprocal",
        np.reciprocal,
        "T(1) / {0}",
        lambda o, y, x: (-y * y,),
        "1 / x.",
        flops=4,
        ulps=ROUNDING,
        quick="quick_reciprocal({0})",
    ),
    # exponentials and logarithms
    op(
        "exp",
        np.exp,
        "exp({0})",
        lambda o, y, x: (y,),
        "e to the x.",
        flops=8,
        ulps=LIBRARY,
        quick="quick_exp({0})",
    ),
    op("exp2", np.exp2, "exp2({0})", lambda o, y, x: (LN2 * y,), "2 to the x.", flops=8, ulps=LIBRARY),
    op(
        "expm1",
        np.expm1,
        "expm1({0})",
        lambda o, y, x: (y + 1.0,),
        "exp(x) - 1, accurate near 0.",
        flops=12,
        ulps=LIBRARY,
        quick="quick_expm1({0})",
    ),
    op(
        "log",
        np.log,
        _cuda_logarithm("log"),
        lambda o, y, x: (1.0 / x,),
        "Natural logarithm.",
        flops=8,
        ulps=LIBRARY,
        quick=f"quick_log({{0}}, T({LN2!r}))",
    ),
    op(
        "log2",
        np.log2,
        _cuda_logarithm("log2"),
        lambda o, y, x: (1.0 / (x * LN2),),
        "Logarithm to base 2.",
        flops=8,
        ulps=LIBRARY,
        quick="quick_log({0}, T(1))",
    ),
    op(
        "log10",
        np.log10,
        _cuda_logarithm("log10"),
        lambda o, y, x: (1.0 / (x * math.log(10.0)),),
        "Logarithm to base 10.",
        flops=8,
        ulps=LIBRARY,
        quick=f"quick_log({{0}}, T({LN2 / math.log(10.0)!r}))",
    ),
    op(
        "log1p",
        np.log1p,
        "log1p({0})",
        lambda o, y, x: (1.0 / (x + 1.0),),
        "log(1 + x), accurate near 0.",
        flops=12,
        ulps=LIBRARY,
        quick="quick_log1p({0})",
    ),
    op(
        "logaddexp",
        np.logaddexp,
        f"({{0}} == {{1}} ? {{0}} + T({LN2!r}) : nan_max({{0}}, {{1}}) + log1p(exp(-fabs({{0}} - {{1}}))))",
        lambda o, y, a, b: (o.sigmoid(a - b), o.sigmoid(b - a)),
        "log(exp(a) + exp(b)).",
        flops=24,
        ulps=combined(LIBRARY, LIBRARY),
        scale=lambda a, b: 1 + np.abs(np.maximum(a, b)),
        quick="quick_logaddexp({0}, {1})",
        quick_flops=17,
    ),
    # trigonometric and hyperbolic
    op("sin", np.sin, "sin({0})", lambda o, y, x: (o.cos(x),), "Sine.", flops=12, ulps=LIBRARY),
    op("cos", np.cos, "cos({0})", lambda o, y, x: (-o.sin(x),), "Cosine.", flops=12, ulps=LIBRARY),
    op("tan", np.tan, "tan({0})", lambda o, y, x: (1.0 + y * y,), "Tangent.", flops=20, ulps=LIBRARY),
    op(
        "arcsin",
        np.arcsin,
        "asin({0})",
        lambda o, y, x: (o.reciprocal(o.sqrt(1.0 - x * x)),),
        "Inverse sine.",
        flops=20,
        ulps=LIBRARY,
    ),
    op(
        "arccos",
        np.arccos,
        "acos({0})",
        lambda o, y, x: (-o.reciprocal(o.sqrt(1.0 - x * x)),),
        "Inverse cosine.",
        flops=20,
        ulps=LIBRARY,
    ),
    op(
        "arctan",
        np.arctan,
        "atan({0})",
        lambda o, y, x: (1.0 / (1.0 + x * x),),
        "Inverse tangent.",
        flops=20,
        ulps=LIBRARY,
    ),
    op(
        "arctan2",
        np.arctan2,
        "atan2({0}, {1})",
        lambda o, y, a, b: (b * _inverse_or_zero(o, a * a + b * b), -a * _inverse_or_zero(o, a * a + b * b)),
        "Angle of the point (b, a), between -pi and pi.",
        flops=28,
        ulps=LIBRARY,
    ),
    op(
        "sinh",
        np.sinh,
        "sinh({0})",
        lambda o, y, x: (o.cosh(x),),
        "Hyperbolic sine.",
        flops=16,
        ulps=LIBRARY,
        quick="quick_sinh({0})",
    ),
    op(
        "cosh",
        np.cosh,
        "cosh({0})",
        lambda o, y, x: (o.sinh(x),),
        "Hyperbolic cosine.",
        flops=16,
        ulps=LIBRARY,
        quick="quick_cosh({0})",
    ),
    op(
        "tanh",
        np.tanh,
        "tanh({0})",
        lambda o, y, x: (1.0 - y * y,),
        "Hyperbolic tangent.",
        flops=16,
        ulps=LIBRARY,
        quick="quick_tanh({0})",
    ),
    op(
        "arcsinh",
        np.arcsinh,
        "asinh({0})",
        lambda o, y, x: (o.reciprocal(o.sqrt(x * x + 1.0)),),
        "Inverse hyperbolic sine.",
        flops=24,
        ulps=LIBRARY,
    ),
    op(
        "arccosh",
        np.arccosh,
        "acosh({0})",
        lambda o, y, x: (o.reciprocal(o.sqrt(x * x - 1.0)),),
        "Inverse hyperbolic cosine.",
        flops=24,
        ulps=LIBRARY,
    ),
    op(
        "arctanh",
        np.arctanh,
        "atanh({0})",
        lambda o, y, x: (1.0 / (1.0 - x * x),),
        "Inverse hyperbolic tangent.",
        flops=24,
        ulps=LIBRARY,
    ),
    op(
        "erf",
        special.erf,
        "erf({0})",
        lambda o, y, x: (2.0 / math.sqrt(math.pi) * o.exp(-x * x),),
        "Error function.",
        flops=20,
        ulps=LIBRARY,
        quick="quick_erf({0})",
    ),
    # rounding
    op("floor", np.floor, "floor({0})", zero, "Largest integer not above x."),
    op("ceil", np.ceil, "ceil({0})", zero, "Smallest integer not below x."),
    op("rint", np.rint, "rint({0})", zero, "Nearest integer, halves to even."),
    op("trunc", np.trunc, "trunc({0})", zero, "Integer part of x."),
    # selection
    op(
        "maximum",
        np.maximum,
        "nan_max({0}, {1})",
        lambda o, y, a, b: (
            o.where(a == b, 0.5, o.where(a < b, 0.0, 1.0)),
            o.where(a == b, 0.5, o.where(a > b, 0.0, 1.0)),
        ),
        "Larger of a and b; NaN if either is.",
        result="same",
    ),
    op(
        "minimum",
        np.minimum,
        "nan_min({0}, {1})",
        lambda o, y, a, b: (
            o.where(a == b, 0.5, o.where(a > b, 0.0, 1.0)),
            o.where(a == b, 0.5, o.where(a < b, 0.0, 1.0)),
        ),
        "Smaller of a and b; NaN if either is.",
        result="same",
    ),
    op(
        "clip",
        _clip,
        "nan_min(nan_max({0}, {1}), {2})",
        lambda o, y, x, a, b: (
            o.where(o.logical_and(x >= a, x <= b), 1.0, 0.0),
            o.where(o.logical_and(a < b, x < a), 1.0, 0.0),
            o.where(o.logical_or(x > b, b < a), 1.0, 0.0),
        ),
        "x limited to [low, high]; slope 1 on the closed interval.",
        flops=2,
        result="same",
    ),
    op(
        "where",
        np.where,
        "({0} ? {1} : {2})",
        lambda o, y, c, a, b: (None, o.where(c, 1.0, 0.0), o.where(c, 0.0, 1.0)),
        "a where the condition holds, else b.",
        result="same",
    ),
    # comparisons and logic
    op("greater", np.greater, "{0} > {1}", zero, "a > b.", result="bool"),
    op("greater_equal", np.greater_equal, "{0} >= {1}", zero, "a >= b.", result="bool"),
    op("less", np.less, "{0} < {1}", zero, "a < b.", result="bool"),
    op("less_equal", np.less_equal, "{0} <= {1}", zero, "a <= b.", result="bool"),
    op("equal", np.equal, "{0} == {1}", zero, "a == b.", result="bool"),
    op("not_equal", np.not_equal, "{0} != {1}", zero, "a != b.", result="bool"),
    op("logical_and", np.logical_and, "({0} != 0) && ({1} != 0)", zero, "Both are non-zero.", result="bool"),
    op("logical_or", np.logical_or, "({0} != 0) || ({1} != 0)", zero, "One at least is non-zero.", result="bool"),
    op("logical_not", np.logical_not, "{0} == 0", zero, "x is zero.", result="bool"),
    op("isnan", np.isnan, "isnan({0})", zero, "x is NaN.", result="bool"),
    op("isinf", np.isinf, "isinf({0})", zero, "x is +inf or -inf.", result="bool"),
    op("isfinite", np.isfinite, "isfinite({0})", zero, "x is neither infinite nor NaN.", result="bool"),
    # bits of integers; counts of shifts below zero are like those above the width
    op("bitwise_and", np.bitwise_and, "{0} & {1}", zero, "Bits set in both integers.", result="int"),
    op("bitwise_or", np.bitwise_or, "{0} | {1}", zero, "Bits set in one integer at least.", result="int"),
    op("bitwise_xor", np.bitwise_xor, "{0} ^ {1}", zero, "Bits set in one integer alone.", result="int"),
    op("invert", np.invert, "~{0}", zero, "Bits not set in x.", result="int"),
    op(
        "left_shift",
        np.left_shift,
        "shifted_left({0}, {1})",
        zero,
        "Bits of a moved up by b places; 0 for b beyond its width.",
        flops=2,
        result="int",
    ),
    op(
        "right_shift",
        np.right_shift,
        "shifted_right({0}, {1})",
        zero,
        "Bits of a moved down by b places; 0 or -1, the sign of a, for b beyond its width.",
        flops=2,
        result="int",
    ),
    # factors that rewrites combine before they scale a value
    op(
        "safe_multiply",
        _nan_on_underflow(np.multiply),
        "({0} == T(0) || {1} == T(0) || fabs({0} * {1}) >= T(1e-30) ? {0} * {1} : T(nan))",
        lambda o, y, a, b: (b, a),
        "a * b; NaN where underflow would lose digits, so that guards take their exact form.",
        ulps=ROUNDING,
    ),
    op(
        "safe_divide",
        _nan_on_underflow(np.divide),
        "({0} == T(0) || fabs({0} / {1}) >= T(1e-30) ? {0} / {1} : T(nan))",
        lambda o, y, a, b: (1.0 / b, -y / b),
        "a / b; NaN where underflow would lose digits, so that guards take their exact form.",
        flops=4,
        ulps=ROUNDING,
    ),
    # for logsumexp
    op(
        "finite_or_zero",
        finite_or_zero,
        "(isfinite({0}) ? {0} : T(0))",
        lambda o, y, x: (o.where(o.isfinite(x), 1.0, 0.0),),
        "x, or 0 where x is infinite or NaN.",
    ),
    op(
        "log_relative",
        log_relative,
        "(isfinite({0}) ? log({1}) : {0})",
        lambda o, y, top, total: (None, 1.0 / total),
        "log(total); top where top is infinite or NaN.",
        flops=9,
        ulps=LIBRARY,
    ),
    op(
        "plus_log",
        plus_log,
        "(isfinite({0}) ? plus_log({0}, {1}) : {0})",
        lambda o, y, top, total: (1.0, 1.0 / total),
        "top + log(total), rounded once; top where it is infinite or NaN.",
        flops=14,
        ulps=LIBRARY,
        scale=lambda top, total: np.abs(top) + np.abs(np.log(np.abs(total))),
    ),
)
