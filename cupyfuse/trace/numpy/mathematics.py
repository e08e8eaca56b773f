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
from ..user_code import user_line
from .replacement import Replacement

# Of floats and integers. `exp2` and `cbrt` are new in Python 3.11.
_TO_FLOAT = (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot", "fabs"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("degrees", "radians", "erf", "erfc", "gamma", "lgamma", "copysign", "fmod", "remainder"),
    *("ldexp", "nextafter", "ulp"),
)
_TO_INTEGER = ("ceil", "floor", "trunc", "gcd", "lcm", "isqrt", "factorial", "comb", "perm")
_TO_BOOL = ("isfinite", "isinf", "isnan", "isclose")
_DTYPES = {
    name: dtype
    for names, dtype in ((_TO_FLOAT, "float64"), (_TO_INTEGER, "int64"), (_TO_BOOL, "bool"))
    for name in names
}


class Function(Replacement):
    """A function of `math` that also takes traced numbers."""

    def __init__(self, original: Callable[..., Any]):
        super().__init__(original, "math")

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        name = self.__wrapped__.__name__
        for value in args:
            if type(value) is Tracer and not value.ndim:
                _check_has_trunc(name, value)
                return by_python(f"math.{name}", _DTYPES[name], args, options)
        for value in args:
            if isinstance(value, TracedNumber) and not options:
                return value.computed(f"math.{name}", self.__wrapped__, args)
        return self.__wrapped__(*args, **options)


def _check_has_trunc(name: str, scalar: Tracer) -> None:
    """Raise Python's error for `math.trunc` of a number of NumPy's that is none of Python's."""
    cls = scalar.__class__
    if name == "trunc" and not hasattr(cls, "__trunc__"):
        raise TypeError(f"type numpy.{cls.__name__} doesn't define __trunc__ method\n  at {user_line()}")


REPLACED = [(math, name, Function(getattr(math, name))) for name in _DTYPES if hasattr(math, name)]
