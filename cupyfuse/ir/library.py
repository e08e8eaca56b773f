"""Calls of NumPy's or CuPy's own functions on whole arrays: what the nodes of operator `library` run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from ..errors import EngineError


@dataclass(frozen=True)
class Operand:
    """The place of an array in the arguments of a call: that of the node's input number `index`."""

    index: int


@dataclass(frozen=True)
class LibraryCall:
    """One call of a library's function; its results are as many nodes.

    Calls are equal if they do the same: the arguments compare by `repr`, which tells -0.0 from 0.0.

    Attributes
    ----------
    function : str
        The public name beneath the library's namespace, as in "sort" or "linalg.svd".
    arguments, options
        What it is called with, nested; an `Operand` stands for each array.
    shapes, results : tuple of tuple of int
        The shapes of the operands, and of the results.
    """

    function: str
    arguments: tuple[Any, ...] = field(compare=False)
    options: dict[str, Any] = field(compare=False)
    shapes: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    key: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.arguments!r} {sorted(self.options.items())!r}")

    def __repr__(self) -> str:
        return f"np.{self.function}"

    def found_in(self, namespace: Any) -> Callable[..., Any]:
        """Return the function of a library; AttributeError if the library lacks it."""
        found: Callable[..., Any] = attrgetter(self.function)(namespace)
        return found

    def run(self, function: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
        """Call the function on arrays; returns all of its results."""
        operands = [a.reshape(shape) for a, shape in zip(arrays, self.shapes, strict=True)]
        arguments, options = (replace_operands(given, operands) for given in (self.arguments, self.options))
        result = function(*arguments, **options)
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        shapes = tuple(tuple(getattr(r, "shape", ())) for r in found)
        if shapes != self.results:
            raise EngineError(f"{self!r}: results of shapes {self.results} were planned, the library returned {shapes}")
        return found


def replace_operands(value: Any, operands: Sequence[Any]) -> Any:
    """Put arrays in the places of operands, in nested tuples, lists and dicts."""
    if isinstance(value, Operand):
        return operands[value.index]
    if isinstance(value, (tuple, list)):
        return type(value)([replace_operands(v, operands) for v in value])
    if isinstance(value, dict):
        return {k: replace_operands(v, operands) for k, v in value.items()}
    return value
