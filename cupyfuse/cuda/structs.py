"""Structs of arguments, and the kernels that are launched with them.

`launch.py` makes functions of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ir.numbers import Number
from .driver import Dim
from .tensor_map import WORDS, MatrixBoxes

# Addresses of arguments, results, the flag and the workspace's values, by slot; one slot may hold a call's numbers,
# and slots of their own hold the arrays that library steps take and give.
Addresses = list[Any]
# (addresses, stream); a stream is an address, None CuPy's current one; a `LaunchGraph` records the launch.
Launch = Callable[[Addresses, Any], None]


class TensorMap(NamedTuple):
    """A tensor map as member of a struct.

    Attributes
    ----------
    encode : callable
        Takes the addresses, and returns the words and what to hold until the launch.
    slot, start : int
        The slot of the matrix's address, and the bytes from there.
    matrix : MatrixBoxes or None
        What `tensor_map.encode` describes, where that is all that `encode` does with an aligned address; None where
        `encode` has to be called.
    """

    encode: Callable[[Addresses], tuple[Any, Any]]
    slot: int = -1
    start: int = 0
    matrix: MatrixBoxes | None = None


class KernelCall(NamedTuple):
    """A kernel, as `Runtime.function` returns it, with the grid and the dynamic shared memory of its launch."""

    function: Any
    grid: Dim
    block: Dim
    shared: int = 0


@dataclass(frozen=True)
class Struct:
    """The members of a kernel's struct, eight bytes each; structs are concatenated by `+`.

    Attributes
    ----------
    form : str
        Their format in the notation of Python's `struct`.
    members : tuple of int or float
        With 0 for what a launch fills in.
    pointers : tuple of (index of the member, slot of the address, bytes from there)
    numbers : tuple of (index of the member, slot of the float arguments, number)
    maps : tuple of (index of the first member, tensor map)
    """

    form: str = ""
    members: tuple[Any, ...] = ()
    pointers: tuple[tuple[int, int, int], ...] = ()
    numbers: tuple[tuple[int, int, Number], ...] = ()
    maps: tuple[tuple[int, TensorMap], ...] = ()

    def __add__(self, other: Struct) -> Struct:
        first = len(self.members)
        return Struct(
            self.form + other.form,
            self.members + other.members,
            self.pointers + tuple((first + index, slot, start) for index, slot, start in other.pointers),
            self.numbers + tuple((first + index, slot, source) for index, slot, source in other.numbers),
            self.maps + tuple((first + index, each) for index, each in other.maps),
        )


def integers(*values: int) -> Struct:
    """Return integers as members of a struct."""
    return Struct("q" * len(values), values)


def divisor(number: int) -> Struct:
    """Return the members of a positive integer that a kernel divides by: `Divisor` in kernels_cu/types.cuh.

    The quotient of a number n below 2^31 is (n m / 2^32 + n) / 2^shift, each rounded down, if 2^shift is at least the
    divisor d and m is 2^32 (2^shift - d) / d rounded up; see Granlund and Montgomery, Division by Invariant Integers
    using Multiplication (1994).
    """
    shift = (number - 1).bit_length()
    inverse = -(-((1 << 32) * ((1 << shift) - number)) // number)
    return integers(number, shift << 32 | inverse & 0xFFFFFFFF)


def pointer(slot: int, start: int = 0) -> Struct:
    """Return a pointer as member of a struct: `start` bytes behind the address in a slot."""
    return Struct("Q", (0,), ((0, slot, start),))


def number(value: float, source: Number | None = None, slot: int = -1) -> Struct:
    """Return a number as member of a struct; one with a `source` is computed from the numbers in a slot."""
    return Struct("d", (value,), numbers=((0, slot, source),) if source is not None else ())


def tensor_map(source: TensorMap) -> Struct:
    """Return a tensor map as members of a struct."""
    return Struct("Q" * WORDS, (0,) * WORDS, maps=((0, source),))


def with_padding(struct: Struct) -> Struct:
    """Return a struct as long as its kernel has it: tensor maps are aligned, and so is the end of what has some."""
    return struct + integers(*[0] * (-len(struct.members) % WORDS)) if struct.maps else struct


@dataclass(frozen=True)
class StructLaunch:
    """Kernels that are launched one after the other with the same struct.

    Attributes
    ----------
    kernels : sequence of KernelCall
    struct : Struct
    aligned : sequence of (slot of the address, bytes from there)
        Pointers in the struct that have to be multiples of `alignment`, a power of two.
    otherwise : Launch, optional
        Launched in the place of these kernels where they are not; given wherever `alignment` is more than 1.
    """

    kernels: Sequence[KernelCall]
    struct: Struct
    aligned: Sequence[tuple[int, int]] = ()
    alignment: int = 1
    otherwise: Launch | None = None
