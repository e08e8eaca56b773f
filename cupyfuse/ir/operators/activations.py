"""Activations, with PyTorch's names and formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import special
from .table import LIBRARY, ROUNDING, Array, combined, keep_dtype, op

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
SELU_ALPHA = 1.6732632423543772
SELU_SCALE = 1.0507009873554805

# More than any derivative of gelu_tanh's exponent where its sigmoid is neither 0 nor 1.
_MOST_RATE = 1e30
# CUDA documents 5 ulps for erfc; `special.py` measures 5.6.
_ERFC = 6.0


def _gelu(x: Array) -> Array:
    return 0.5 * x * special.erfc(-x * x.dtype.type(SQRT_HALF))


def _softplus(x: Array, beta: Array, threshold: Array) -> Array:
    # Beyond 40 the logarithm is its argument in all dtypes.
    return np.where(x * beta > np.minimum(threshold, 40), x, np.log1p(np.exp(x * beta)) / beta)


def _gelu_slope(x: Array) -> Array:
    return 0.5 * special.erfc(-x * x.dtype.type(SQRT_HALF)) + x * np.exp(-0.5 * x * x) * INV_SQRT_2PI


def _gelu_slope_terms(x: Array) -> Array:
    """Return the sum of the magnitudes of the two terms of gelu_slope."""
    return 0.5 * special.erfc(-x * x.dtype.type(SQRT_HALF)) + np.abs(x) * np.exp(-0.5 * x * x) * INV_SQRT_2PI


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _gated_slope(x: Array, z: Array, rate: Any) -> Array:
    """Return the derivative of x sigmoid(z), where z has the derivative `rate`; NaN where x is infinite."""
    high = _sigmoid(z)
    return high + high * _sigmoid(-z) * x * rate


def _gelu_tanh_argument(x: Any) -> Any:
    """Return z, by which gelu_tanh(x) is x sigmoid(z)."""
    return 2.0 * SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)


def _gelu_tanh_rate(x: Any) -> Any:
    """Return the derivative of that z."""
    return 2.0 * SQRT_2_OVER_PI * (1.0 + 0.134145 * x * x)


def _gelu_tanh_slope(x: Array) -> Array:
    # Far out a sigmoid is 0: times an infinite rate that would be NaN.
    return _gated_slope(x, _gelu_tanh_argument(x), np.minimum(_gelu_tanh_rate(x), _MOST_RATE))


def _gelu_tanh_slope_terms(x: Array) -> Array:
    """Return the sum of the magnitudes of the terms of gelu_tanh_slope, with what the rounding of z adds to them."""
    z = _gelu_tanh_argument(x)
    return _gated_slope(np.abs(x), z, np.minimum(_gelu_tanh_rate(x), _MOST_RATE)) * (1.0 + np.minimum(np.abs(z), 1e3))


def _gelu_tanh_slope_derivative(o: Any, x: Any) -> Any:
    # Where a sigmoid is 0, nothing that it multiplies may be infinite.
    z, rate = _gelu_tanh_argument(x), o.minimum(_gelu_tanh_rate(x), _MOST_RATE)
    low, high = o.sigmoid(-z), o.sigmoid(z)
    both, bend = low * high, 4.0 * 0.134145 * SQRT_2_OVER_PI * x
    return 2.0 * both * rate + both * rate * x * ((low - high) * rate) + both * x * bend


ROWS = (
    op(
        "relu",
        lambda x: np.maximum(x, x.dtype.type(0)),
        "({0} < T(0) ? T(0) : {0})",
        lambda o, y, x: (o.where(x <= 0.0, 0.0, 1.0),),
        "max(x, 0).",
    ),
    op(
        "relu6",
        keep_dtype(lambda x: np.minimum(np.maximum(x, 0.0), 6.0)),
        "nan_min(nan_max({0}, T(0)), T(6))",
        lambda o, y, x: (o.where(o.logical_or(x <= 0.0, x >= 6.0), 0.0, 1.0),),
        "x limited to [0, 6].",
        flops=2,
    ),
    op(
        "hardtanh",
        lambda x, low, high: np.minimum(np.maximum(x, low), high),
        "nan_min(nan_max({0}, {1}), {2})",
        lambda o, y, x, a, b: (
            o.where(o.logical_or(x <= a, x >= b), 0.0, 1.0),
            o.where(x <= a, 1.0, 0.0),
            o.where(x >= b, 1.0, 0.0),
        ),
        "x limited to [low, high]; slope 1 on the open interval.",
        flops=2,
        result="same",
    ),
    op(
        "leaky_relu",
        lambda x, slope: np.where(x > 0, x, x * slope),
        "({0} > T(0) ? {0} : {0} * {1})",
        lambda o, y, x, slope: (o.where(x > 0.0, 1.0, slope), o.where(x > 0.0, 0.0, x)),
        "x where positive, else slope * x.",
        flops=2,
        ulps=ROUNDING,
    ),
    op(
        "gelu",
        keep_dtype(_gelu),
        "gelu({0})",
        lambda o, y, x: (o.gelu_slope(x),),
        "Gaussian error linear unit, x * Phi(x), exact erf form.",
        flops=24,
        ulps=combined(_ERFC, ROUNDING),
        scale=lambda x: np.abs(_gelu(x)) * (1 + x * x),
        quick="quick_gelu({0})",
    ),
    op(
        "gelu_slope",
        keep_dtype(_gelu_slope),
        "gelu_slope({0})",
        lambda o, y, x: (o.exp(-0.5 * x * x) * INV_SQRT_2PI * (2.0 - x * x),),
        "Derivative of gelu, Phi(x) + x phi(x).",
        flops=26,
        ulps=combined(_ERFC, LIBRARY, 2 * ROUNDING),
        scale=lambda x: _gelu_slope_terms(x) * (1 + x * x),
        quick="quick_gelu_slope({0})",
    ),
    op(
        "gelu_tanh",
        keep_dtype(lambda x: 0.5 * x * (1.0 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))),
        f"T(0.5) * {{0}} * (T(1) + tanh(T({SQRT_2_OVER_PI!r}) * ({{0}} + T(0.044715) * {{0}} * {{0}} * {{0}})))",
        lambda o, y, x: (o.gelu_tanh_slope(x),),
        "GELU in its tanh approximation.",
        flops=24,
        ulps=combined(LIBRARY, 3 * ROUNDING),
        scale=np.abs,
        quick="quick_divide({0}, T(1) + quick_exp("
        f"T({-2 * SQRT_2_OVER_PI!r}) * ({{0}} + T(0.044715) * {{0}} * {{0}} * {{0}})))",
        quick_flops=18,
    ),
    op(
        "gelu_tanh_slope",
        keep_dtype(_gelu_tanh_slope),
        f"gated_slope({{0}}, T({2 * SQRT_2_OVER_PI!r}) * ({{0}} + T(0.044715) * {{0}} * {{0}} * {{0}}), "
        f"nan_min(T({2 * SQRT_2_OVER_PI!r}) * (T(1) + T(0.134145) * {{0}} * {{0}}), T({_MOST_RATE!r})))",
        lambda o, y, x: (_gelu_tanh_slope_derivative(o, x),),
        "Derivative of gelu_tanh.",
        flops=30,
        ulps=combined(LIBRARY, 4 * ROUNDING),
        scale=_gelu_tanh_slope_terms,
        quick=f"quick_gated_slope({{0}}, T({2 * SQRT_2_OVER_PI!r}) * ({{0}} + T(0.044715) * {{0}} * {{0}} * {{0}}), "
        f"nan_min(T({2 * SQRT_2_OVER_PI!r}) * (T(1) + T(0.134145) * {{0}} * {{0}}), T({_MOST_RATE!r})))",
        quick_flops=24,
    ),
    op(
        "silu",
        keep_dtype(lambda x: x / (1.0 + np.exp(-x))),
        "{0} / (T(1) + exp(-{0}))",
        lambda o, y, x: (o.silu_slope(x),),
        "x * sigmoid(x), also called swish.",
        flops=14,
        ulps=combined(LIBRARY, ROUNDING),
        quick="quick_divide({0}, T(1) + quick_exp(-{0}))",
    ),
    op(
        "silu_slope",
        keep_dtype(lambda x: _gated_slope(x, x, 1.0)),
        "gated_slope({0}, {0}, T(1))",
        lambda o, y, x: (o.sigmoid(x) * o.sigmoid(-x) * (2.0 + x * (o.sigmoid(-x) - o.sigmoid(x))),),
        "Derivative of silu, sigmoid(x) (1 + x sigmoid(-x)).",
        flops=20,
        ulps=combined(LIBRARY, 3 * ROUNDING),
        scale=lambda x: _gated_slope(np.abs(x), x, 1.0),
        quick="quick_gated_slope({0}, {0}, T(1))",
        quick_flops=16,
    ),
    op(
        "sigmoid",
        keep_dtype(lambda x: 1.0 / (1.0 + np.exp(-x))),
        "sigmoid({0})",
        lambda o, y, x: (y * (1.0 - y),),
        "1 / (1 + exp(-x)).",
        flops=14,
        ulps=combined(LIBRARY, ROUNDING),
        quick="quick_divide(T(1), T(1) + quick_exp(-{0}))",
    ),
    op(
        "log_sigmoid",
        keep_dtype(lambda x: np.minimum(x, 0.0) - np.log1p(np.exp(-np.abs(x)))),
        "nan_min({0}, T(0)) - log1p(exp(-fabs({0})))",
        lambda o, y, x: (o.sigmoid(-x),),
        "log(sigmoid(x)).",
        flops=22,
        ulps=combined(LIBRARY, LIBRARY),
        quick="quick_log_sigmoid({0})",
        quick_flops=14,
    ),
    op(
        "softplus",
        _softplus,
        "({0} * {1} > {2} ? {0} : (nan_max({0} * {1}, T(0)) + log1p(exp(-fabs({0} * {1})))) / {1})",
        lambda o, y, x, beta, threshold: (
            o.where(x * beta > threshold, 1.0, o.sigmoid(x * beta)),
            o.where(x * beta > threshold, 0.0, (x * o.sigmoid(x * beta) - y) / beta),
            None,
        ),
        "log(1 + exp(beta x)) / beta; x itself where beta x > threshold.",
        flops=26,
        ulps=combined(LIBRARY, LIBRARY),
        scale=lambda x, beta, threshold: _softplus(x, beta, threshold) * (1 + np.abs(x * beta)),
        quick="quick_choice({0} * {1} > {2}, {0}, quick_quotient(quick_softplus({0} * {1}), {1}))",
        quick_flops=15,
    ),
    op(
        "mish",
        lambda x: x * np.tanh(np.log1p(np.exp(x))),
        "{0} * tanh(log1p(exp({0})))",
        lambda o, y, x: (o.tanh(o.log1p(o.exp(x))) + x * (1.0 - o.square(o.tanh(o.log1p(o.exp(x))))) * o.sigmoid(x),),
        "x * tanh(softplus(x)).",
        flops=40,
        ulps=combined(LIBRARY, LIBRARY, LIBRARY),
        quick="quick_mish({0})",
        quick_flops=18,
    ),
    op(
        "elu",
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x)),
        "({0} > T(0) ? {0} : {1} * expm1({0}))",
        lambda o, y, x, alpha: (o.where(x <= 0.0, alpha * o.exp(x), 1.0), o.where(x <= 0.0, o.expm1(x), 0.0)),
        "x where positive, else alpha * (exp(x) - 1).",
        flops=14,
        ulps=combined(LIBRARY),
        quick="quick_choice({0} > T(0), {0}, {1} * quick_expm1({0}))",
    ),
    op(
        "celu",
        lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(x / alpha)),
        "({0} > T(0) ? {0} : {1} * expm1({0} / {1}))",
        lambda o, y, x, alpha: (
            o.where(x <= 0.0, o.exp(x / alpha), 1.0),
            o.where(x <= 0.0, o.expm1(x / alpha) - x / alpha * o.exp(x / alpha), 0.0),
        ),
        "x where positive, else alpha * (exp(x / alpha) - 1).",
        flops=18,
        ulps=combined(LIBRARY, ROUNDING),
        quick="quick_choice({0} > T(0), {0}, {1} * quick_expm1(quick_quotient({0}, {1})))",
    ),
    op(
        "selu",
        keep_dtype(lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(x))),
        f"T({SELU_SCALE!r}) * ({{0}} > T(0) ? {{0}} : T({SELU_ALPHA!r}) * expm1({{0}}))",
        lambda o, y, x: (o.where(x <= 0.0, SELU_SCALE * SELU_ALPHA * o.exp(x), SELU_SCALE),),
        "Scaled ELU with the self-normalising constants.",
        flops=14,
        ulps=combined(LIBRARY, 3 * ROUNDING),
        quick=f"T({SELU_SCALE!r}) * quick_choice({{0}} > T(0), {{0}}, T({SELU_ALPHA!r}) * quick_expm1({{0}}))",
    ),
    op(
        "hardsigmoid",
        keep_dtype(lambda x: np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0),
        "nan_min(nan_max({0} + T(3), T(0)), T(6)) / T(6)",
        lambda o, y, x: (o.where(o.absolute(x) < 3.0, 1.0 / 6.0, 0.0),),
        "relu6(x + 3) / 6.",
        flops=6,
        ulps=combined(ROUNDING),
        quick=f"nan_min(nan_max({{0}} + T(3), T(0)), T(6)) * T({1 / 6!r})",
    ),
    op(
        "hardswish",
        # Divides first, unlike PyTorch, whose product overflows.
        keep_dtype(lambda x: x * (np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0)),
        "{0} * (nan_min(nan_max({0} + T(3), T(0)), T(6)) / T(6))",
        lambda o, y, x: (o.where(x <= -3.0, 0.0, o.where(x < 3.0, x / 3.0 + 0.5, 1.0)),),
        "x * relu6(x + 3) / 6.",
        flops=7,
        ulps=combined(2 * ROUNDING),
        quick=f"{{0}} * (nan_min(nan_max({{0}} + T(3), T(0)), T(6)) * T({1 / 6!r}))",
    ),
    op(
        "softsign",
        keep_dtype(lambda x: x / (1.0 + np.abs(x))),
        "{0} / (T(1) + fabs({0}))",
        lambda o, y, x: (1.0 / o.square(1.0 + o.absolute(x)),),
        "x / (1 + |x|).",
        flops=6,
        ulps=combined(ROUNDING),
        quick="quick_quotient({0}, T(1) + fabs({0}))",
    ),
)
