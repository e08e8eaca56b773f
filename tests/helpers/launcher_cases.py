"""Launches for the tests of the compiled launcher, on the stand-in of the driver."""

from __future__ import annotations

import ctypes
from typing import Any

from cupyfuse.cuda.structs import KernelCall, Struct, StructLaunch, integers, number, pointer
from cupyfuse.ir.numbers import Number

STREAM = 1 << 45
KERNELS: dict[int, ctypes.c_uint64] = {}  # by their handles, which the stand-in reads the sizes of structs at


class Function:
    """A kernel's function; `called` counts the calls that are CuPy's own."""

    def __init__(self) -> None:
        self._size = ctypes.c_uint64()
        self.ptr = ctypes.addressof(self._size)
        self.called = 0
        KERNELS[self.ptr] = self._size

    def __call__(self, *arguments: Any) -> None:
        self.called += 1


def struct_launch(layout: Struct, kernels: int = 1, **alignment: Any) -> StructLaunch:
    calls = [KernelCall(Function(), (k + 1, 2, 3), (32 * (k + 1), 1, 1), 16 * k) for k in range(kernels)]
    for call in calls:
        KERNELS[call.function.ptr].value = 8 * len(layout.members)
    return StructLaunch(calls, layout, **alignment)


def simple(**alignment: Any) -> StructLaunch:
    half = Number("x / 2", lambda numbers: numbers[0] / 2, lambda: 0.0)
    return struct_launch(pointer(0, 16) + integers(-3) + number(0.0, half, 1), **alignment)
