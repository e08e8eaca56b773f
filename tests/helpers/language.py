"""What random chains are made of: operators and functions, as text and as bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bounds
from bounds import Value

# Operators that a chain calls by NumPy's name, and those that it calls by ours, some with numbers.
UNARY = ["negative", "absolute", "sign", "square", "sqrt", "reciprocal", "exp", "exp2", "expm1", "log", "log2", "log10"]
UNARY += ["log1p", "sin", "cos", "arctan", "sinh", "cosh", "tanh", "floor", "ceil", "rint", "trunc"]
ACTIVATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "erf": ("cf.erf({})", ()),
    "relu": ("cf.relu({})", ()),
    "relu6": ("cf.relu6({})", ()),
    "leaky_relu": ("cf.leaky_relu({}, 0.125)", (0.125,)),
    "gelu": ("cf.gelu({})", ()),
    "gelu_tanh": ('cf.gelu({}, "tanh")', ()),
    "silu": ("cf.silu({})", ()),
    "sigmoid": ("cf.sigmoid({})", ()),
    "log_sigmoid": ("cf.log_sigmoid({})", ()),
    "softplus": ("cf.softplus({}, 1.5, 10.0)", (1.5, 10.0)),
    "mish": ("cf.mish({})", ()),
    "elu": ("cf.elu({}, 0.75)", (0.75,)),
    "celu": ("cf.celu({}, 1.5)", (1.5,)),
    "selu": ("cf.selu({})", ()),
    "hardsigmoid": ("cf.hardsigmoid({})", ()),
    "hardswish": ("cf.hardswish({})", ()),
    "softsign": ("cf.softsign({})", ()),
    "hardtanh": ("cf.hardtanh({}, -0.5, 1.25)", (-0.5, 1.25)),
    "clip": ("np.clip({}, -0.5, 1.25)", (-0.5, 1.25)),
}
BINARY = {
    "add": "{} + {}",
    "subtract": "{} - {}",
    "multiply": "{} * {}",
    "divide": "{} / {}",
    "maximum": "np.maximum({}, {})",
    "minimum": "np.minimum({}, {})",
    "logaddexp": "np.logaddexp({}, {})",
    "power": "np.power({}, {})",
}
COMPARISONS = {"greater": ">", "greater_equal": ">=", "less": "<", "less_equal": "<=", "equal": "==", "not_equal": "!="}
REDUCTIONS: dict[str, Callable[[Value, Any], Value]] = {
    "sum": bounds.total,
    "mean": bounds.mean,
    "max": lambda x, axis: bounds.extreme(x, axis, "max"),
    "min": lambda x, axis: bounds.extreme(x, axis, "min"),
    "prod": bounds.product,
    "var": bounds.variance,
    "std": lambda x, axis: bounds.pointwise("sqrt", bounds.variance(x, axis), dtype=x.dtype),
    "logsumexp": bounds.logsumexp,
}
