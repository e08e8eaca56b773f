"""What a plan depends on of the numbers that calls bring."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ..ir.numbers import Number
from .constants import value_key


@dataclass(frozen=True)
class Dependence:
    """What numbers a plan serves: those with the same values at some positions, and for which conditions hold.

    Attributes
    ----------
    positions : tuple of int
    conditions : tuple of (Number, bool or None)
        Each with the outcome that it has to have; None where it has to be computed, to a value of its type.
    """

    positions: tuple[int, ...] = ()
    conditions: tuple[tuple[Number, bool | None], ...] = ()

    def covers(self, numbers: Sequence[float]) -> bool:
        """Whether the conditions hold."""
        try:
            for number, outcome in self.conditions:
                found = number.evaluate(numbers)  # a bool of Python's or of NumPy's
                if outcome is not None and bool(found) is not outcome:
                    return False
            return True
        except (ArithmeticError, TypeError, ValueError):  # the function may not come to it
            return False

    def values(self, numbers: Sequence[float]) -> tuple[Hashable, ...]:
        """Return the key of the values that have to be the same."""
        return tuple([value_key(numbers[i]) for i in self.positions])
