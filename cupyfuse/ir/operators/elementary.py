"""Elementary operators: arithmetic, NumPy's functions, rounding, selection, comparisons, and what rewrites need."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import transcendental
from .table import LIBRARY, ROUNDING, Array, combined, op, zero


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
    *transcendental.ROWS,
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
