"""Elementary operators that libraries compute: exponentials, logarithms, trigonometric and hyperbolic functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import special
from .table import LIBRARY, combined, op

LN2 = math.log(2.0)


def _inverse_or_zero(o: Any, x: Any) -> Any:
    """Return 1 / x, or 0 for 0, as PyTorch's derivative of `atan2` has it."""
    return o.where(x == 0.0, 0.0, 1.0 / x)


def _cuda_logarithm(name: str) -> str:
    # CUDA's logarithm of a negative subnormal float64 is -inf.
    return f"({{0}} < T(0) ? T(nan) : {name}({{0}}))"


ROWS = (
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
)
