"""Replacements of functions of Python's `math` during a trace: given traced numbers, they return traced numbers.

Each call computes these by the originals, which would read the values while the function is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..number import TracedNumber
from ..python_numbers import by_python
from ..tracer import Tracer
from .replacement import Replacement

# Of floats and integers, to a float, an integer or a bool. `exp2` and `cbrt` are new in Python 3.11.
_NAMES = (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot", "fabs"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("degrees", "radians", "erf", "erfc", "gamma", "lgamma", "copysign", "fmod", "remainder"),
    *("isfinite", "isinf", "isnan", "ceil", "floor"),
)
_DTYPES = dict.fromkeys(("isfinite", "isinf", "isnan"), "bool") | dict.fromkeys(("ceil", "floor"), "int64")


class Function(Replacement):
    """A function of `math` that also takes traced numbers."""

    def __init__(self, original: Callable[..., Any]):
        super().__init__(original, "math")

    def __call__(self, /, *args: Any) -> Any:
        for value in args:
            if type(value) is Tracer and not value.ndim:
                name = self.__wrapped__.__name__
                return by_python(f"math.{name}", _DTYPES.get(name, "float64"), args)
        for value in args:
            if isinstance(value, TracedNumber):
                return value.computed(f"math.{self.__wrapped__.__name__}", self.__wrapped__, args)
        return self.__wrapped__(*args)


REPLACED = [(math, name, Function(getattr(math, name))) for name in _NAMES if hasattr(math, name)]
