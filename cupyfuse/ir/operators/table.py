"""Rows of the tables of operators, and units of accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
Partials = tuple[Any, ...]

# Accuracy is stated in ulps, units in the last place of the result. CUDA documents at most 4 for the functions used,
# beyond the half ulp of the rounding itself; NumPy tests its own to 4.
LIBRARY = 4.5
# Of an operation of IEEE arithmetic.
ROUNDING = 0.5
# Error of a product of which one factor underflows, in units of the smallest normal number: the other factor is at most
# the logarithm of the first one (x exp(-x) at x = 708).
UNDERFLOW_ERROR = 1024.0


def combined(*parts: float) -> float:
    """Bound the ulps of a chain of operations without cancellation: two for each ulp of a part, and a last rounding."""
    return 2.0 * sum(parts) + ROUNDING


@dataclass(frozen=True)
class Operator:
    """One pointwise operator.

    Attributes
    ----------
    name : PyTorch's or NumPy's name
    arity : number of operands
    numpy : the semantics, on arrays of one dtype of 32 or 64 bits
    cuda : the CUDA expression
    derivative : `derivative(o, y, *x)` gives one partial derivative for each operand, see the package's docstring
    doc : one line of documentation
    flops : cost relative to a multiplication
    result : "float" (works in floats), "same" (any dtype), "int" (integers alone) or "bool"
    ulps : the largest error allowed, in ulps of the result; 0 for exact operators
    scale : `scale(*x)`, for operators that cancel inside: errors are in ulps of the larger of this and the result
    quick : a cheaper CUDA expression for 16-bit results, with a relative error below 1e-5 more; empty for none
    quick_flops : what that costs, if it is not about `flops`: 0.9 for each instruction, and 5 for each approximate one
        (MUFU), which agrees with what `silu` (14) and `gelu` (24) cost by measurement
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
    quick: str = ""
    quick_flops: int = 0

    @property
    def exact(self) -> bool:
        """Whether the result is never rounded."""
        return self.ulps == 0.0

    @property
    def takes_floats(self) -> bool:
        """Whether there is a result of floats."""
        return self.result != "int"

    @property
    def gives_integers(self) -> bool:
        """Whether the result of integers is an integer, computed in int64 as in floats."""
        return self.result in ("same", "int")


@dataclass(frozen=True)
class Reduction:
    """One reduction along an axis.

    Attributes
    ----------
    name : NumPy's or SciPy's name
    numpy : `numpy(x, axis)`, which keeps the reduced axis
    accumulator : the device type in `kernels_cu/reductions.cuh`, or None if `rewrite/` lowers it to other reductions
    read : the method call that reads the result from the accumulator
    derivative : `derivative(o, y, x)` by each element; the caller divides by the number of elements, or of ties
    doc : one line of documentation
    scale : `scale(x, axis)`: the magnitude of partial results, which errors are relative to
    ulps : error for each element reduced, in ulps of `scale`; 0 for exact reductions
    flops : cost of an element relative to an addition
    identity_on_one : whether the reduction of one element is that element
    about : the reduction of the same elements whose result `derivative` takes as `y`; by default this one
    words : numbers that the accumulator holds, or those by which it extends another
    base : of an extremum, the device type that reductions about it extend, those of the same elements one after the
        other, in the order of the table; it gives the extremum, too. It holds two numbers
    extends : of a reduction about an extremum, another one whose accumulator it needs to extend
    gives_position : whether the result is a position along the axis, an int64
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
    words: int = 1
    base: str = ""
    extends: str = ""
    gives_position: bool = False


def op(
    name: str, numpy: Callable[..., Array], cuda: str, derivative: Callable[..., Partials], doc: str, **more: Any
) -> Operator:
    """Build an operator, with the arity of its CUDA expression."""
    arity = 1 + max(int(d) for d in "012" if "{" + d + "}" in cuda)
    return Operator(name, arity, numpy, cuda, derivative, doc, **more)


def keep_dtype(function: Callable[..., Array]) -> Callable[..., Array]:
    """Make a function return its first operand's dtype, also where NumPy would widen it."""

    def call(*operands: Array) -> Array:
        return np.asarray(function(*operands), dtype=operands[0].dtype)

    return call


def zero(o: Any, y: Any, *x: Any) -> Partials:
    """Return the partial derivatives of a step function: None, for zero everywhere."""
    return (None,) * len(x)
