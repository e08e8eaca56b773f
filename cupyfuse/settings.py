"""What a plan is made for: the precision of products, the GPU, the memory that a call may take."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from . import devices
from .devices import Device

DEFAULT_WORKSPACE = 256 << 20


@dataclass(frozen=True)
class Settings:
    """Choices that shape a plan beside the function and its arguments.

    Attributes
    ----------
    precision : str
        One of `PRECISIONS`.
    device : Device or None
        The GPU that it is for; None where products are computed by NumPy, or by a GPU that nothing is known of.
    max_workspace : int
        Bytes that what has a row for each row of the results may take, where it can be computed in blocks of rows.
    keep_halves : bool
        Whether `bind` keeps the fp16 halves of bound operands.
    """

    precision: str = "highest"
    device: Device | None = devices.DEVICES[devices.DEFAULT]
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True


PRECISIONS = ("highest", "high", "medium", "ieee", "tf32")


def check_precision(value: str) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(map(repr, PRECISIONS))}, got {value!r}")
    return value


_current: ContextVar[str] = ContextVar("cupyfuse_precision", default="highest")


def current_precision() -> str:
    return _current.get()


@contextmanager
def precision(value: str) -> Iterator[None]:
    """Set the precision of float32 matrix products within a `with` block.

    Parameters
    ----------
    value : {"highest", "high", "medium", "ieee", "tf32"}
        "highest" (the default) is never less accurate than cuBLAS's float32 product, and several times faster where
        tensor cores can compute it from fp16 halves. "high" may lose a few bits against that, and errs at most a
        twentieth as much as TF32. "medium" rounds operands to bfloat16 (7 bits). "ieee" is cuBLAS's float32 product
        itself, and "tf32" rounds operands to TF32 (10 bits). Sums are kept in float32 throughout. Other dtypes are not
        affected.

    Raises
    ------
    ValueError
        The name is not one of these.
    """
    token = _current.set(check_precision(value))
    try:
        yield
    finally:
        _current.reset(token)


def check_workspace(value: int) -> int:
    if _bytes("max_workspace", value) <= 0:
        raise ValueError(f"max_workspace: expected a positive number of bytes, got {value}")
    return operator.index(value)


def check_prepared(value: int | None) -> int | None:
    if value is None:
        return None
    if _bytes("max_prepared", value) < 0:
        raise ValueError(f"max_prepared: expected a number of bytes from 0 on, got {value}; 0 keeps nothing")
    return operator.index(value)


def _bytes(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a number of bytes, got {type(value).__name__}")
    return operator.index(value)
