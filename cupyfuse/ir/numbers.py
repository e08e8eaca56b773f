"""Numbers that each call brings: float and integer arguments of a fused function, and functions of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Numbers = Sequence[float]  # the float and integer arguments of one call


class Number:
    """A number that is known when a plan runs, not when it is made.

    Attributes
    ----------
    text : str
        The expression; numbers of the same text are equal.
    evaluate : callable
        Computes the number from the arguments of a call.
    read : callable
        Returns the number for the call that is being traced. The plan then serves calls with the same arguments only.
    positions : frozenset of int
        Of the arguments that it is computed of.
    size : int
        How many arguments and functions the expression has, repeated ones as often as they are in its text.
    """

    __slots__ = ("evaluate", "positions", "read", "size", "text")

    def __init__(
        self,
        text: str,
        evaluate: Callable[[Numbers], float],
        read: Callable[[], float],
        positions: frozenset[int] = frozenset(),
        size: int = 1,
    ):
        self.text, self.evaluate, self.read, self.positions, self.size = text, evaluate, read, positions, size

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return type(other) is Number and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def function_of_numbers(
    name: str, function: Callable[..., Any], operands: Sequence[Number | float], kind: type = float
) -> Number:
    """Return the number `function(*operands)`, computed anew in each call; `name` names the function in its text.

    Calls where the result is not of the type `kind` raise TypeError.
    """
    text = f"{name}({', '.join(map(repr, operands))})"
    numbers = [o for o in operands if isinstance(o, Number)]

    def call(*values: Any) -> float:
        result: Any = function(*values)
        found: type = type(result)
        if found is not kind:
            raise TypeError(f"a {kind.__name__} became a {found.__name__} in {text}; pass the result as an argument")
        return result

    return Number(
        text,
        evaluate=_evaluation(call, operands),
        read=lambda: call(*[o.read() if isinstance(o, Number) else o for o in operands]),
        positions=frozenset[int]().union(*(o.positions for o in numbers)),
        size=1 + sum(o.size for o in numbers),
    )


def _evaluation(call: Callable[..., float], operands: Sequence[Number | float]) -> Callable[[Numbers], float]:
    """Return what computes a function from the numbers of a call, in little time for one operand or two."""
    if len(operands) > 2:
        return lambda numbers: call(*[o.evaluate(numbers) if isinstance(o, Number) else o for o in operands])
    first, last = operands[0], operands[-1]
    if not isinstance(first, Number):
        assert isinstance(last, Number)
        of_last = last.evaluate
        return lambda numbers: call(first, of_last(numbers))
    of_first = first.evaluate
    if len(operands) == 1:
        return lambda numbers: call(of_first(numbers))
    if not isinstance(last, Number):
        return lambda numbers: call(of_first(numbers), last)
    of_second = last.evaluate
    return lambda numbers: call(of_first(numbers), of_second(numbers))
