"""The operator table: one row an operator.

A row gives an operator's name, its arity, its NumPy meaning, its CUDA expression, its derivative and its document line.
Everything that needs to know operators walks this table: the tracer, emission, the NumPy engine, tests, documentation.
Adding an activation is adding a row.

CUDA expressions name their operands `{0}`, `{1}`, `{2}` and write constants as `T(0.5)`; `T` is float or double. They
give what the NumPy meaning gives for ±inf and NaN too. Derivatives are written against a namespace `o` that holds every
operator by name, so that the same text serves arrays (in tests) and traced values (in a backward pass):
`derivative(o, y, *x)` returns one partial derivative for each operand, None where it is zero everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import special

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
LN2 = math.log(2.0)
SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805

Array = Any
Partials = tuple[Any, ...]


@dataclass(frozen=True)
class Operator:
    """One pointwise operator. `result` is 'float' (works in floats), 'same' (any dtype) or 'bool'."""

    name: str
    arity: int
    numpy: Callable[..., Array]
    cuda: str
    derivative: Callable[..., Partials]
    doc: str
    flops: int = 1
    result: str = "float"


@dataclass(frozen=True)
class Reduction:
    """One reduction along an axis.

    `numpy(x, axis)` keeps the reduced axis. `accumulator` names the device type in `kernels_cu/reductions.cuh` that
    combines elements, or is None for a reduction that `rewrite.py` composes from others.
    """

    name: str
    numpy: Callable[[Array, int], Array]
    accumulator: str | None
    read: str
    derivative: Callable[..., Any]
    doc: str
    flops: int = 1
    identity_on_one: bool = True


def _expsum(x: Array, axis: int) -> Array:
    return np.exp(x - x.max(axis=axis, keepdims=True)).sum(axis=axis, keepdims=True)


def _logsumexp(x: Array, axis: int) -> Array:
    top = x.max(axis=axis, keepdims=True)
    return finite_or_zero(top) + log_relative(top, _expsum(x, axis))


def finite_or_zero(x: Array) -> Array:
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def log_relative(top: Array, total: Array) -> Array:
    return np.where(np.isfinite(top), np.log(total), top)


def _like(function: Callable[..., Array]) -> Callable[..., Array]:
    """Keep the operand's dtype where NumPy would widen it because of a Python constant of array type."""

    def call(*operands: Array) -> Array:
        return np.asarray(function(*operands), dtype=operands[0].dtype)

    return call


def _clip(x: Array, low: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _safe(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """The function, with NaN for results so small (1e-30) that a later factor may bring up what underflow took away."""

    def call(a: Array, b: Array) -> Array:
        result = function(a, b)
        zero = (a == 0) | (b == 0) if function is np.multiply else a == 0
        return np.where(zero | ~(np.abs(result) < 1e-30), result, result.dtype.type(np.nan))

    return call


def _zero(o: Any, y: Any, *x: Any) -> Partials:
    return (None,) * len(x)


def _op(
    name: str, numpy: Callable[..., Array], cuda: str, derivative: Callable[..., Partials], doc: str, **more: Any
) -> Operator:
    arity = 1 + max(int(d) for d in "012" if "{" + d + "}" in cuda)
    return Operator(name, arity, numpy, cuda, derivative, doc, **more)


_HALF_NORMAL = f"T({SQRT_HALF!r})"

POINTWISE: dict[str, Operator] = {
    row.name: row
    for row in (
        # arithmetic
        _op("add", np.add, "{0} + {1}", lambda o, y, a, b: (1.0, 1.0), "Sum a + b.", result="same"),
        _op("subtract", np.subtract, "{0} - {1}", lambda o, y, a, b: (1.0, -1.0), "Difference a - b.", result="same"),
        _op("multiply", np.multiply, "{0} * {1}", lambda o, y, a, b: (b, a), "Product a * b.", result="same"),
        _op("divide", np.divide, "{0} / {1}", lambda o, y, a, b: (1.0 / b, -y / b), "Quotient a / b.", flops=4),
        _op(
            "power",
            np.power,
            "pow({0}, {1})",
            lambda o, y, a, b: (b * o.power(a, b - 1.0), y * o.log(a)),
            "a to the power b.",
            flops=20,
        ),
        _op("negative", np.negative, "-{0}", lambda o, y, x: (-1.0,), "Minus x.", result="same"),
        _op("absolute", np.absolute, "fabs({0})", lambda o, y, x: (o.sign(x),), "Absolute value."),
        _op(
            "sign",
            np.sign,
            "({0} != {0} ? {0} : T(({0} > 0) - ({0} < 0)))",
            _zero,
            "-1, 0 or 1, the sign of x; NaN for NaN.",
        ),
        _op("square", np.square, "{0} * {0}", lambda o, y, x: (2.0 * x,), "x squared.", result="same"),
        _op("sqrt", np.sqrt, "sqrt({0})", lambda o, y, x: (0.5 / y,), "Square root.", flops=4),
        _op("reciprocal", np.reciprocal, "T(1) / {0}", lambda o, y, x: (-y * y,), "1 / x.", flops=4),
        # exponentials and logarithms
        _op("exp", np.exp, "exp({0})", lambda o, y, x: (y,), "e to the x.", flops=8),
        _op("exp2", np.exp2, "exp2({0})", lambda o, y, x: (LN2 * y,), "2 to the x.", flops=8),
        _op("expm1", np.expm1, "expm1({0})", lambda o, y, x: (y + 1.0,), "exp(x) - 1, accurate near 0.", flops=12),
        _op("log", np.log, "log({0})", lambda o, y, x: (1.0 / x,), "Natural logarithm.", flops=8),
        _op("log2", np.log2, "log2({0})", lambda o, y, x: (1.0 / (x * LN2),), "Logarithm to base 2.", flops=8),
        _op(
            "log10",
            np.log10,
            "log10({0})",
            lambda o, y, x: (1.0 / (x * math.log(10.0)),),
            "Logarithm to base 10.",
            flops=8,
        ),
        _op(
            "log1p",
            np.log1p,
            "log1p({0})",
            lambda o, y, x: (1.0 / (x + 1.0),),
            "log(1 + x), accurate near 0.",
            flops=12,
        ),
        _op(
            "logaddexp",
            np.logaddexp,
            f"({{0}} == {{1}} ? {{0}} + T({LN2!r}) : nan_max({{0}}, {{1}}) + log1p(exp(-fabs({{0}} - {{1}}))))",
            lambda o, y, a, b: (o.exp(a - y), o.exp(b - y)),
            "log(exp(a) + exp(b)).",
            flops=24,
        ),
        # trigonometric and hyperbolic
        _op("sin", np.sin, "sin({0})", lambda o, y, x: (o.cos(x),), "Sine.", flops=12),
        _op("cos", np.cos, "cos({0})", lambda o, y, x: (-o.sin(x),), "Cosine.", flops=12),
        _op("tan", np.tan, "tan({0})", lambda o, y, x: (1.0 + y * y,), "Tangent.", flops=20),
        _op("arctan", np.arctan, "atan({0})", lambda o, y, x: (1.0 / (1.0 + x * x),), "Inverse tangent.", flops=20),
        _op("sinh", np.sinh, "sinh({0})", lambda o, y, x: (o.cosh(x),), "Hyperbolic sine.", flops=16),
        _op("cosh", np.cosh, "cosh({0})", lambda o, y, x: (o.sinh(x),), "Hyperbolic cosine.", flops=16),
        _op("tanh", np.tanh, "tanh({0})", lambda o, y, x: (1.0 - y * y,), "Hyperbolic tangent.", flops=16),
        _op(
            "erf",
            special.erf,
            "erf({0})",
            lambda o, y, x: (2.0 / math.sqrt(math.pi) * o.exp(-x * x),),
            "Error function.",
            flops=20,
        ),
        # rounding
        _op("floor", np.floor, "floor({0})", _zero, "Largest integer not above x."),
        _op("ceil", np.ceil, "ceil({0})", _zero, "Smallest integer not below x."),
        _op("rint", np.rint, "rint({0})", _zero, "Nearest integer, halves to even."),
        _op("trunc", np.trunc, "trunc({0})", _zero, "Integer part of x."),
        # selection
        _op(
            "maximum",
            np.maximum,
            "nan_max({0}, {1})",
            lambda o, y, a, b: (o.where(a >= b, 1.0, 0.0), o.where(a >= b, 0.0, 1.0)),
            "Larger of a and b; NaN if either is.",
            result="same",
        ),
        _op(
            "minimum",
            np.minimum,
            "nan_min({0}, {1})",
            lambda o, y, a, b: (o.where(a <= b, 1.0, 0.0), o.where(a <= b, 0.0, 1.0)),
            "Smaller of a and b; NaN if either is.",
            result="same",
        ),
        _op(
            "clip",
            _clip,
            "nan_min(nan_max({0}, {1}), {2})",
            lambda o, y, x, a, b: (o.where(y == x, 1.0, 0.0), o.where(x < a, 1.0, 0.0), o.where(x > b, 1.0, 0.0)),
            "x limited to [low, high]; hardtanh is clip(x, -1, 1).",
            flops=2,
            result="same",
        ),
        _op(
            "where",
            np.where,
            "({0} ? {1} : {2})",
            lambda o, y, c, a, b: (None, o.where(c, 1.0, 0.0), o.where(c, 0.0, 1.0)),
            "a where the condition holds, else b.",
            result="same",
        ),
        # comparisons and logic
        _op("greater", np.greater, "{0} > {1}", _zero, "a > b.", result="bool"),
        _op("greater_equal", np.greater_equal, "{0} >= {1}", _zero, "a >= b.", result="bool"),
        _op("less", np.less, "{0} < {1}", _zero, "a < b.", result="bool"),
        _op("less_equal", np.less_equal, "{0} <= {1}", _zero, "a <= b.", result="bool"),
        _op("equal", np.equal, "{0} == {1}", _zero, "a == b.", result="bool"),
        _op("not_equal", np.not_equal, "{0} != {1}", _zero, "a != b.", result="bool"),
        _op("logical_and", np.logical_and, "({0} != 0) && ({1} != 0)", _zero, "Both are non-zero.", result="bool"),
        _op("logical_or", np.logical_or, "({0} != 0) || ({1} != 0)", _zero, "One at least is non-zero.", result="bool"),
        _op("logical_not", np.logical_not, "{0} == 0", _zero, "x is zero.", result="bool"),
        _op("isnan", np.isnan, "isnan({0})", _zero, "x is NaN.", result="bool"),
        _op("isinf", np.isinf, "isinf({0})", _zero, "x is +inf or -inf.", result="bool"),
        _op("isfinite", np.isfinite, "isfinite({0})", _zero, "x is neither infinite nor NaN.", result="bool"),
        # activations, with PyTorch's names
        _op(
            "relu",
            lambda x: np.maximum(x, x.dtype.type(0)),
            "({0} < T(0) ? T(0) : {0})",
            lambda o, y, x: (o.where(x > 0.0, 1.0, 0.0),),
            "max(x, 0).",
        ),
        _op(
            "relu6",
            _like(lambda x: np.minimum(np.maximum(x, 0.0), 6.0)),
            "nan_min(nan_max({0}, T(0)), T(6))",
            lambda o, y, x: (o.where(y == x, 1.0, 0.0),),
            "x limited to [0, 6].",
            flops=2,
        ),
        _op(
            "leaky_relu",
            lambda x, slope: np.where(x > 0, x, x * slope),
            "({0} > T(0) ? {0} : {0} * {1})",
            lambda o, y, x, slope: (o.where(x > 0.0, 1.0, slope), o.where(x > 0.0, 0.0, x)),
            "x where positive, else slope * x.",
            flops=2,
        ),
        _op(
            "gelu",
            _like(lambda x: 0.5 * x * special.erfc(-x * x.dtype.type(SQRT_HALF))),
            f"T(0.5) * {{0}} * erfc(-{{0}} * {_HALF_NORMAL})",
            lambda o, y, x: (0.5 * o.add(1.0, o.erf(x * SQRT_HALF)) + x * o.exp(-0.5 * x * x) * INV_SQRT_2PI,),
            "Gaussian error linear unit, x * Phi(x), exact erf form.",
            flops=24,
        ),
        _op(
            "gelu_tanh",
            _like(lambda x: 0.5 * x * (1.0 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))),
            f"T(0.5) * {{0}} * (T(1) + tanh(T({SQRT_2_OVER_PI!r}) * ({{0}} + T(0.044715) * {{0}} * {{0}} * {{0}})))",
            lambda o, y, x: (_gelu_tanh_slope(o, x),),
            "GELU in its tanh approximation.",
            flops=24,
        ),
        _op(
            "silu",
            _like(lambda x: x / (1.0 + np.exp(-x))),
            "{0} / (T(1) + exp(-{0}))",
            lambda o, y, x: (o.sigmoid(x) * (1.0 + x * o.sigmoid(-x)),),
            "x * sigmoid(x), also called swish.",
            flops=14,
        ),
        _op(
            "sigmoid",
            _like(lambda x: 1.0 / (1.0 + np.exp(-x))),
            "T(1) / (T(1) + exp(-{0}))",
            lambda o, y, x: (y * (1.0 - y),),
            "1 / (1 + exp(-x)).",
            flops=14,
        ),
        _op(
            "log_sigmoid",
            _like(lambda x: np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))),
            "nan_min({0}, T(0)) - log1p(exp(-fabs({0})))",
            lambda o, y, x: (o.sigmoid(-x),),
            "log(sigmoid(x)).",
            flops=22,
        ),
        _op(
            "softplus",
            lambda x, beta, threshold: np.where(x * beta > threshold, x, np.log1p(np.exp(x * beta)) / beta),
            "({0} * {1} > {2} ? {0} : log1p(exp({0} * {1})) / {1})",
            lambda o, y, x, beta, threshold: (
                o.where(x * beta > threshold, 1.0, o.sigmoid(x * beta)),
                o.where(x * beta > threshold, 0.0, (x * o.sigmoid(x * beta) - y) / beta),
                None,
            ),
            "log(1 + exp(beta x)) / beta; x itself where beta x > threshold.",
            flops=26,
        ),
        _op(
            "mish",
            lambda x: x * np.tanh(np.log1p(np.exp(x))),
            "{0} * tanh(log1p(exp({0})))",
            lambda o, y, x: (
                o.tanh(o.log1p(o.exp(x))) + x * (1.0 - o.square(o.tanh(o.log1p(o.exp(x))))) * o.sigmoid(x),
            ),
            "x * tanh(softplus(x)).",
            flops=40,
        ),
        _op(
            "elu",
            lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
            "({0} > T(0) ? {0} : {1} * expm1({0}))",
            lambda o, y, x, alpha: (o.where(x > 0.0, 1.0, y + alpha), o.where(x > 0.0, 0.0, o.expm1(x))),
            "x where positive, else alpha * (exp(x) - 1).",
            flops=14,
        ),
        _op(
            "celu",
            lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
            "({0} > T(0) ? {0} : {1} * expm1({0} / {1}))",
            lambda o, y, x, alpha: (
                o.where(x > 0.0, 1.0, y / alpha + 1.0),
                o.where(x > 0.0, 0.0, o.expm1(x / alpha) - x / alpha * o.exp(x / alpha)),
            ),
            "x where positive, else alpha * (exp(x / alpha) - 1).",
            flops=18,
        ),
        _op(
            "selu",
            _like(lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(x))),
            f"T({SELU_SCALE!r}) * ({{0}} > T(0) ? {{0}} : T({SELU_ALPHA!r}) * expm1({{0}}))",
            lambda o, y, x: (o.where(x > 0.0, SELU_SCALE, y + SELU_SCALE * SELU_ALPHA),),
            "Scaled ELU with the self-normalising constants.",
            flops=14,
        ),
        _op(
            "hardsigmoid",
            _like(lambda x: np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0),
            "nan_min(nan_max({0} + T(3), T(0)), T(6)) / T(6)",
            lambda o, y, x: (o.where(o.absolute(x) < 3.0, 1.0 / 6.0, 0.0),),
            "relu6(x + 3) / 6.",
            flops=6,
        ),
        _op(
            "hardswish",
            _like(lambda x: x * np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0),
            "{0} * nan_min(nan_max({0} + T(3), T(0)), T(6)) / T(6)",
            lambda o, y, x: (o.where(x < -3.0, 0.0, o.where(x > 3.0, 1.0, x / 3.0 + 0.5)),),
            "x * relu6(x + 3) / 6.",
            flops=7,
        ),
        _op(
            "softsign",
            _like(lambda x: x / (1.0 + np.abs(x))),
            "{0} / (T(1) + fabs({0}))",
            lambda o, y, x: (1.0 / o.square(1.0 + o.absolute(x)),),
            "x / (1 + |x|).",
            flops=6,
        ),
        # factors that rewrites multiply together ahead of the value they scale
        _op(
            "safe_multiply",
            _safe(np.multiply),
            "({0} == T(0) || {1} == T(0) || fabs({0} * {1}) >= T(1e-30) ? {0} * {1} : T(nan))",
            lambda o, y, a, b: (b, a),
            "a * b; NaN where it would lose digits to underflow, which sends its readers to their exact forms.",
            flops=4,
        ),
        _op(
            "safe_divide",
            _safe(np.divide),
            "({0} == T(0) || fabs({0} / {1}) >= T(1e-30) ? {0} / {1} : T(nan))",
            lambda o, y, a, b: (1.0 / b, -y / b),
            "a / b; NaN where it would lose digits to underflow, which sends its readers to their exact forms.",
            flops=7,
        ),
        # what logsumexp needs beside its reductions
        _op(
            "finite_or_zero",
            finite_or_zero,
            "(isfinite({0}) ? {0} : T(0))",
            lambda o, y, x: (o.where(o.isfinite(x), 1.0, 0.0),),
            "x, or 0 where x is infinite or NaN.",
        ),
        _op(
            "log_relative",
            log_relative,
            "(isfinite({0}) ? log({1}) : {0})",
            lambda o, y, top, total: (None, 1.0 / total),
            "log(total) of a sum of exponentials taken relative to top; top itself where that is infinite or NaN.",
            flops=9,
        ),
    )
}


def _gelu_tanh_slope(o: Any, x: Any) -> Any:
    t = o.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * SQRT_2_OVER_PI * (1.0 + 0.134145 * x * x)


def _mean_square(x: Array, axis: int) -> Array:
    return np.square(x - x.mean(axis=axis, keepdims=True)).mean(axis=axis, keepdims=True)


REDUCTIONS: dict[str, Reduction] = {
    row.name: row
    for row in (
        Reduction(
            "sum", lambda x, axis: x.sum(axis=axis, keepdims=True), "Sum", "total()", lambda o, y, x: 1.0, "Sum."
        ),
        Reduction(
            "prod",
            lambda x, axis: x.prod(axis=axis, keepdims=True),
            "Product",
            "total()",
            lambda o, y, x: y / x,
            "Product.",
        ),
        Reduction(
            "max",
            lambda x, axis: x.max(axis=axis, keepdims=True),
            "Max",
            "top()",
            lambda o, y, x: o.where(x == y, 1.0, 0.0),
            "Largest element; NaN if one is.",
        ),
        Reduction(
            "min",
            lambda x, axis: x.min(axis=axis, keepdims=True),
            "Min",
            "bottom()",
            lambda o, y, x: o.where(x == y, 1.0, 0.0),
            "Smallest element; NaN if one is.",
        ),
        Reduction(
            "expsum",
            _expsum,
            "ExpSum",
            "total()",
            lambda o, y, x: y,
            "Sum of exp(x - max x).",
            flops=10,
            identity_on_one=False,
        ),
        Reduction(
            "moment2",
            _mean_square,
            "Moments",
            "variance()",
            lambda o, y, x: 2.0 * (x - y),
            "Mean squared distance from the mean (biased variance), in one pass by Welford's and Chan's updates.",
            flops=5,
            identity_on_one=False,
        ),
        Reduction(
            "mean",
            lambda x, axis: x.mean(axis=axis, keepdims=True),
            None,
            "",
            lambda o, y, x: 1.0,
            "Arithmetic mean.",
        ),
        Reduction(
            "logsumexp",
            _logsumexp,
            None,
            "",
            lambda o, y, x: o.exp(x - y),
            "log of the sum of exponentials, stable.",
            flops=10,
        ),
    )
}
