"""Strides of arrays whose elements are in the order "C" or "F"."""

from __future__ import annotations

import math
from typing import Any


def in_upper_case(order: Any) -> Any:
    """Return an order of elements, for which NumPy takes letters of either case, in upper case."""
    return order.upper() if isinstance(order, str) else order


def contiguous_strides(shape: tuple[int, ...], itemsize: int, order: str = "C") -> tuple[int, ...]:
    """Return the strides, in bytes, of a contiguous array in the order "C" or "F"."""
    if in_upper_case(order) == "F":
        return contiguous_strides(shape[::-1], itemsize)[::-1]
    return tuple(itemsize * math.prod(shape[p + 1 :]) for p in range(len(shape)))


def are_contiguous(strides: tuple[int, ...], shape: tuple[int, ...], itemsize: int, order: str) -> bool:
    """Whether strides, in bytes, are those of a contiguous array in the order "C" or "F", which has elements."""
    held = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    expected = itemsize
    for n, stride in reversed(held) if order == "C" else held:
        if stride != expected:
            return False
        expected *= n
    return True
