"""PyTorch's promotion of dtypes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from ...dtypes import is_float


def is_number(operand: Any) -> bool:
    return isinstance(operand, (bool, int, float))


def promote(*operands: Any) -> str:
    """Promote the dtypes of traced values and Python numbers to that of their result.

    Tensors with dimensions decide, unless those without are of a higher category (bool, integer, floating point), and
    these in turn unless the numbers are.
    """
    tensors = [v for v in operands if not is_number(v)]
    with_dimensions = _widest(v.dtype for v in tensors if v.ndim)
    without = _widest(v.dtype for v in tensors if not v.ndim)
    numbers = _widest(_number_dtype(v) for v in operands if is_number(v))
    return _higher_category(_higher_category(with_dimensions, without), numbers) or "bool"


def default_float() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def can_cast(source: str, target: str) -> bool:
    """Whether PyTorch writes results of one dtype to tensors of another."""
    return torch.can_cast(getattr(torch, source), getattr(torch, target))


def _number_dtype(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else default_float()


def _category(dtype: str) -> int:
    """Rank a dtype: 0 for bool, 1 for integers, 2 for floating point."""
    return 2 if is_float(dtype) else ("bool", "int64").index(dtype)


def _higher_category(first: str, second: str) -> str:
    """Return the first dtype, unless there is none or the second is of a higher category."""
    if not first or not second:
        return first or second
    return second if _category(second) > _category(first) else first


def _widest(dtypes: Iterable[str]) -> str:
    """Promote dtypes as PyTorch does those of tensors of equal rank; "" for no dtypes."""
    found = [getattr(torch, dtype) for dtype in dtypes]
    return str(functools.reduce(torch.promote_types, found)).removeprefix("torch.") if found else ""
