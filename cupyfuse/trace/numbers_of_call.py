"""The numbers that a traced call brings, and what a trace finds out about them: its conditions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

from ..ir.numbers import Number, function_of_numbers

ERRORS = (ArithmeticError, TypeError, ValueError)  # of arithmetic and of functions of numbers
_MOST_CONDITIONS = 64  # of a plan


class NumbersOfCall:
    """The numbers that the traced call brings, and what the trace finds out about them.

    Parameters
    ----------
    values : sequence of float or int
    opened : container of int
        Positions of the constants that are traced.
    branches : bool
        Whether comparisons are conditions of the plan; else they read the values of their numbers.
    around : container of int
        Positions of the numbers that are no arguments. They are constants unless opened, as integers are.
    arrays : bool
        Whether arrays that are made of numbers are traced; else they read their values.
    closed : bool
        Whether all numbers are constants, whatever the others say.

    Attributes
    ----------
    makes_arrays : bool
        Whether there are such arrays.
    read : set of int
        Positions of the numbers whose values the trace depends on.
    conditions : dict
        Comparisons of numbers that it depends on, and how they turned out, by their texts; and numbers that have to be
        of the types that they have in the traced call, with None.
    """

    def __init__(
        self,
        values: Sequence[float],
        opened: Container[int] = (),
        branches: bool = True,
        around: Container[int] = (),
        arrays: bool = False,
        closed: bool = False,
    ):
        self.arrays, self.makes_arrays, self._closed = arrays, False, closed
        self.values, self._opened, self._branches, self._around = values, opened, branches, around
        self.read: set[int] = set()
        self.conditions: dict[str, tuple[Number, bool | None]] = {}
        self._comparisons = 0  # among them

    def number(self, position: int) -> Number | float:
        """Return the number at a position, or its value where that is a constant of the plan."""
        value = self.values[position]

        def read() -> float:
            self.read.add(position)
            return value

        is_constant = (type(value) is not float or position in self._around) and position not in self._opened
        if self._closed or is_constant:
            return read()
        return Number(f"n{position}", operator.itemgetter(position), read, frozenset({position}))

    def holds(self, condition: Number) -> bool:
        """Return whether a condition holds for this call; the plan then serves calls alone with the same outcome.

        Beyond so many conditions, which each call evaluates, the values of their numbers are read instead.
        """
        outcome = bool(condition.evaluate(self.values))
        if condition.text in self.conditions:
            return outcome
        if self._branches and self._comparisons < _MOST_CONDITIONS:
            self.conditions[condition.text] = condition, outcome
            self._comparisons += 1
        else:
            self.read.update(condition.positions)
        return outcome

    def type_of(self, name: str, function: Callable[..., Any], operands: Sequence[Number | float]) -> type:
        """Return the type of a function's result for this call, or raise what the function raises.

        The plan then serves calls with the same type alone, or those where the function raises it. These conditions are
        not among those that are counted, since each call computes the function anyway.
        """
        values = [o.evaluate(self.values) if isinstance(o, Number) else o for o in operands]
        try:
            kind = type(function(*values))
        except ERRORS as error:
            name = f"{name} raises {type(error).__name__}"
            raises = function_of_numbers(name, _raises(function, type(error)), operands, bool)
            self.conditions[raises.text] = raises, True
            raise
        number = function_of_numbers(f"{name} as {kind.__name__}", function, operands, kind)
        self.conditions[number.text] = number, None
        return kind

    def check_divisor(self, divisor: Number | float) -> None:
        """Raise ZeroDivisionError if a number is zero in this call; others of the plan are calls where it is not."""
        if isinstance(divisor, Number):
            is_zero = not self.holds(function_of_numbers("ne", operator.ne, (divisor, 0), bool))
        else:
            is_zero = divisor == 0
        if is_zero:
            raise ZeroDivisionError("division by zero")


def _raises(function: Callable[..., Any], expected: type) -> Callable[..., bool]:
    """Return a function that tells whether another one raises an error of a type."""

    def raises(*values: Any) -> bool:
        try:
            function(*values)
        except ERRORS as error:
            return type(error) is expected
        return False

    return raises
