"""`TracedNumber`: a float argument of the fused function, whose value differs from call to call of one plan."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir.numbers import Number, function_of_numbers
from .tracer import Tracer

_NUMBERS = (int, float, bool)


class TracedNumber:
    """A Python float to the user's code; a parameter of the kernels.

    Arithmetic with other Python numbers is computed in each call. Whatever else needs the value reads it, and the plan
    then serves calls with that value only.
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
            return NotImplemented  # the traced array takes the call
        return getattr(ufunc, method)(*(float(i) if type(i) is TracedNumber else i for i in inputs), **options)

    def __reduce__(self) -> Any:
        return float, (float(self),)


def argument(position: int, name: str, value: float, read: set[int], trace: Any) -> TracedNumber:
    """Return the float argument at a position; reading its value adds the position to `read`."""

    def concrete() -> float:
        read.add(position)
        return value

    return TracedNumber(Number(f"n{position}", lambda numbers: numbers[position], concrete), name, trace)


def _arithmetic(name: str, swapped: bool) -> Callable[[TracedNumber, Any], Any]:
    function = getattr(operator, name)

    def method(self: TracedNumber, other: Any) -> Any:
        if type(other) is not TracedNumber and type(other) not in _NUMBERS:
            return NotImplemented
        right = other._number if type(other) is TracedNumber else other
        operands = (right, self._number) if swapped else (self._number, right)
        return TracedNumber(function_of_numbers(name, function, operands), self.name, self._trace)

    return method


def _reading(name: str) -> Callable[..., Any]:
    def method(self: TracedNumber, *others: Any) -> Any:
        return getattr(float(self), name)(*(float(o) if type(o) is TracedNumber else o for o in others))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "mod", "floordiv"):
    setattr(TracedNumber, f"__{_name}__", _arithmetic(_name, swapped=False))
    setattr(TracedNumber, f"__r{_name}__", _arithmetic(_name, swapped=True))
for _name in ("neg", "pos", "abs"):
    _unary = getattr(operator, _name)
    setattr(
        TracedNumber,
        f"__{_name}__",
        lambda self, name=_name, function=_unary: TracedNumber(
            function_of_numbers(name, function, (self._number,)), self.name, self._trace
        ),
    )
for _name in ("bool", "int", "trunc", "floor", "ceil", "round", "hash", "repr", "str", "format", "divmod", "rdivmod"):
    setattr(TracedNumber, f"__{_name}__", _reading(f"__{_name}__"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _reading(f"__{_name}__"))
