"""`TracedNumber`: a float argument of a fused function, whose calls share a plan for all its values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.numbers import Number, function_of_numbers
from .tracer import Tracer

_NUMBERS = (int, float, bool)


class TracedNumber:
    """A float to the user's code, and a parameter of the kernels.

    Arithmetic with Python's real numbers gives another traced number, computed in each call. Every other use reads the
    value, and the plan is then valid for that value only.
    """

    __slots__ = ("_number", "_trace", "name")

    def __init__(self, number: Number, name: str, trace: Any):
        self._number, self.name, self._trace = number, name, trace

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float

    def __float__(self) -> float:
        return self._number.read()

    def __getattr__(self, name: str) -> Any:
        return getattr(float(self), name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(float(self), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(type(i) is Tracer for i in inputs):
            return NotImplemented  # Tracer.__array_ufunc__ takes the call
        return getattr(ufunc, method)(*(float(i) if type(i) is TracedNumber else i for i in inputs), **options)

    def __reduce__(self) -> Any:
        return float, (float(self),)


def float_argument(position: int, name: str, value: float, read: set[int], trace: Any) -> TracedNumber:
    """Make the traced number of a float argument; reading its value adds its position to `read`."""

    def read_value() -> float:
        read.add(position)
        return value

    return TracedNumber(Number(f"n{position}", lambda numbers: numbers[position], read_value), name, trace)


def _arithmetic(name: str, swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    """Return a binary operator's method, or its reflected one, which computes with traced numbers."""
    function = getattr(operator, name)

    def method(self: TracedNumber, other: Any) -> Any:
        if type(other) is complex:
            return function(other, float(self)) if swapped else function(float(self), other)
        if type(other) is not TracedNumber and type(other) not in _NUMBERS:
            return NotImplemented
        right = other._number if type(other) is TracedNumber else other
        operands = (right, self._number) if swapped else (self._number, right)
        return TracedNumber(function_of_numbers(name, function, operands), self.name, self._trace)

    return method


def _unary_arithmetic(name: str) -> Callable[[TracedNumber], TracedNumber]:
    """Return a unary operator's method, which computes with traced numbers."""
    function = getattr(operator, name)
    return lambda self: TracedNumber(function_of_numbers(name, function, (self._number,)), self.name, self._trace)


def _reading(name: str) -> Callable[..., Any]:
    """Return a method of float, which reads the value."""

    def method(self: TracedNumber, *others: Any) -> Any:
        return getattr(float(self), name)(*(float(o) if type(o) is TracedNumber else o for o in others))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(TracedNumber, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(TracedNumber, f"__r{_name}__", _arithmetic(_name, swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(TracedNumber, f"__{_name}__", _unary_arithmetic(_name))
for _name in ("bool", "int", "trunc", "floor", "ceil", "round", "hash", "repr", "str", "format", "divmod", "rdivmod"):
    setattr(TracedNumber, f"__{_name}__", _reading(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _reading(f"__{_name}__"))
