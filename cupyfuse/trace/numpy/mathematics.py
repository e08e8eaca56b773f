"""Replacements of the functions of Python's `math`, while a function is traced: of numbers they give numbers.

What they compute of a traced number is computed in each call, by the originals; they would ask for its value.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from functools import update_wrapper
from types import BuiltinFunctionType
from typing import Any

from ..number import TracedNumber

# Of floats and integers, to a float or a bool. `exp2` and `cbrt` are new in Python 3.11.
_NAMES = (
    *("sqrt", "cbrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "hypot", "fabs"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("degrees", "radians", "erf", "erfc", "gamma", "lgamma", "copysign", "fmod", "remainder"),
    *("isfinite", "isinf", "isnan"),
)


class Function:
    """A function of `math` that also takes traced numbers; otherwise the function itself, equal to it.

    As a function written in C, it is no method of the class that holds it.
    """

    __wrapped__: Any

    def __init__(self, original: Callable[..., Any]):
        update_wrapper(self, original)

    # What `isinstance` reads.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return BuiltinFunctionType

    def __call__(self, /, *args: Any) -> Any:
        for value in args:
            if isinstance(value, TracedNumber):
                return value.computed(f"math.{self.__name__}", self.__wrapped__, args)  # type: ignore[attr-defined]
        return self.__wrapped__(*args)

    def __eq__(self, other: Any) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce__(self) -> Any:
        return pkgutil.resolve_name, (f"math:{self.__wrapped__.__name__}",)

    def __copy__(self) -> Function:
        return self

    def __deepcopy__(self, memo: Any) -> Function:
        return self


REPLACED = [(math, name, Function(getattr(math, name))) for name in _NAMES if hasattr(math, name)]
