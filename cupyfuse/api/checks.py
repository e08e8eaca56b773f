"""Checks of the options of public functions: each error names the option, what is expected, and what came."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np

from ..trace import NamedConstant, TracedNumber, Tracer, as_tracer

_NUMBERS = (numbers.Real, np.bool_, NamedConstant, TracedNumber)


def check_rank(name: str, value: Any, ndim: int, shape: str) -> None:
    """Raise ValueError if an argument has another rank; `shape` describes the expected one."""
    if getattr(value, "ndim", None) != ndim:
        raise ValueError(f"{name}: expected an array of shape {shape}, got {getattr(value, 'shape', value)}")


def is_known_number(value: Any) -> bool:
    """Whether a value is a real number of the call, which can be compared, not one that the call computes."""
    return isinstance(value, _NUMBERS) and not isinstance(value, Tracer)


def check_number(name: str, value: Any) -> None:
    """Raise TypeError if an option is no real number."""
    if not isinstance(value, _NUMBERS):
        got = "an array" if isinstance(value, (Tracer, np.ndarray)) else repr(value)
        raise TypeError(f"{name}: expected a number, got {got}")


def check_operand(name: str, value: Any) -> None:
    """Raise TypeError if an argument is neither an array, a number, nor a list of these."""
    if not isinstance(value, (*_NUMBERS, Tracer, np.ndarray, list, tuple)):
        raise TypeError(f"{name}: expected an array or a number, got {value!r}")


def check_integer(name: str, value: Any) -> int:
    """Return an option as an int, or raise TypeError if it is no integer."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def as_operand(name: str, value: Any, trace: Any) -> Tracer:
    """Return an array argument as a traced array, or raise TypeError if it is none, no number and no list."""
    check_operand(name, value)
    return as_tracer(value, trace)
