"""What a row of the operator tables holds, and the numbers that rows state their accuracy in.

The tables are beside this: `elementary.py`, `activations.py` and `reductions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
Partials = tuple[Any, ...]

# Accuracy is stated in ulps, units in the last place of the result. For the functions that rows call CUDA documents at
# most 4, beyond the half ulp of the rounding itself; NumPy tests its own to 4.
LIBRARY = 4.5
# An operation of IEEE arithmetic.
ROUNDING = 0.5
# A factor that falls below the smallest normal number can be lost, and with it what it multiplies: at most so many
# smallest normal numbers, the factor's logarithm being what limits its partner (x exp(-x) at x = 708).
LOST = 1024.0


def combined(*parts: float) -> float:
    """The ulps of a chain that loses no digits: one of a part is worth at most two of the result; one rounding last."""
    return 2.0 * sum(parts) + ROUNDING


@dataclass(frozen=True)
class Operator:
    """One pointwise operator.

    Attributes
    ----------
    name : PyTorch's or NumPy's name
    arity : number of operands
    numpy : the meaning, on arrays of one dtype of 32 or 64 bits
    cuda : the same as a CUDA expression
    derivative : `derivative(o, y, *x)` gives one partial derivative for each operand
    doc : one line of documentation
    flops : cost, a multiplication being 1
    result : "float" (works in floats), "same" (any dtype) or "bool"
    ulps : the largest error that a sound implementation may have, in ulps of the result; 0 for exact operators
    scale : `scale(*x)`, where digits are lost inside: errors are in ulps of this wherever it is larger than the result
    """

    name: str
    arity: int
    numpy: Callable[..., Array]
    cuda: str
    derivative: Callable[..., Partials]
    doc: str
    flops: int = 1
    result: str = "float"
    ulps: float = 0.0
    scale: Callable[..., Array] | None = None

    @property
    def exact(self) -> bool:
        """Whether the result is one of the operands, or another number that every floating-point type holds."""
        return self.ulps == 0.0


@dataclass(frozen=True)
class Reduction:
    """One reduction along an axis.

    Attributes
    ----------
    name : NumPy's or SciPy's name
    numpy : `numpy(x, axis)`, which keeps the reduced axis
    accumulator : the device type in `kernels_cu/reductions.cuh` that combines elements, or None for a reduction that
        `rewrite/` composes from others
    read : the expression that reads the result from the accumulator
    derivative : `derivative(o, y, x)`, by element; a mean's division by their number, and that of the others by how
        many share an extreme, is left to what calls it
    doc : one line of documentation
    scale : `scale(x, axis)`: the sum that partial results round against, at most `ulps` of it for each element
    ulps : for each element; 0 for exact reductions
    flops : cost of an element, an addition being 1
    identity_on_one : whether the reduction of one element is that element
    about : the reduction whose result the derivative takes for `y`, and takes for a constant
    """

    name: str
    numpy: Callable[[Array, int], Array]
    accumulator: str | None
    read: str
    derivative: Callable[..., Any]
    doc: str
    scale: Callable[[Array, int], Array]
    ulps: float = 1.0
    flops: int = 1
    identity_on_one: bool = True
    about: str | None = None


def op(
    name: str, numpy: Callable[..., Array], cuda: str, derivative: Callable[..., Partials], doc: str, **more: Any
) -> Operator:
    """A row; its arity is that of the CUDA expression."""
    arity = 1 + max(int(d) for d in "012" if "{" + d + "}" in cuda)
    return Operator(name, arity, numpy, cuda, derivative, doc, **more)


def like(function: Callable[..., Array]) -> Callable[..., Array]:
    """Keep the operand's dtype where NumPy would widen it because of a Python constant of array type."""

    def call(*operands: Array) -> Array:
        return np.asarray(function(*operands), dtype=operands[0].dtype)

    return call


def zero(o: Any, y: Any, *x: Any) -> Partials:
    """The derivative of a step function."""
    return (None,) * len(x)
