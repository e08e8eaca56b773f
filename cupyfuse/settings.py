"""Settings of plans: precision of products, GPU, memory."""

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
    """The settings that a plan depends on beside the function and its arguments.

    Attributes
    ----------
    precision : str
        One of `PRECISIONS`.
    device : Device or None
        The target GPU; None for NumPy and for GPUs without an entry in `devices`.
    max_workspace : int
        Bytes of intermediate values beyond which a plan runs in blocks of rows, where it can.
    keep_halves : bool
        Whether `bind` keeps the hi/lo splits of bound operands.
    epilogues : str
        One of `EPILOGUES`: where our own kernel computes a 16-bit product, with the row program behind it as its
        epilogue. "measured": where the GPU's table has a rate for it (`Device.own_half`) by which it is faster;
        "always": wherever it can; "never".
    """

    precision: str = "highest"
    device: Device | None = devices.DEVICES[devices.DEFAULT]
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    epilogues: str = "measured"


EPILOGUES = ("measured", "always", "never")
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
        tensor cores compute it from hi/lo splits of the operands. "high", "medium" and "tf32" allow operands of 11
        bits, as TF32 has: the product is cuBLAS's in TF32, or one of fp16 operands with a scale for each row where that
        is faster. "ieee" is cuBLAS's float32 product. All accumulate in float32. Other dtypes are not affected.

    Raises
    ------
    ValueError
        Any other value.
    """
    token = _current.set(check_precision(value))
    try:
        yield
    finally:
        _current.reset(token)


_epilogues: ContextVar[str] = ContextVar("cupyfuse_epilogues", default="measured")


def current_epilogues() -> str:
    return _epilogues.get()


@contextmanager
def epilogues(value: str) -> Iterator[None]:
    """Choose within a `with` block where 16-bit products run by our own kernel; for tests and benchmarks.

    Parameters
    ----------
    value : {"measured", "always", "never"}
        As `Settings.epilogues`.

    Raises
    ------
    ValueError
        Any other value.
    """
    if value not in EPILOGUES:
        raise ValueError(f"epilogues: expected one of {', '.join(map(repr, EPILOGUES))}, got {value!r}")
    token = _epilogues.set(value)
    try:
        yield
    finally:
        _epilogues.reset(token)


_always_plan = False


def plans_are_forced() -> bool:
    return _always_plan


@contextmanager
def force_plans() -> Iterator[None]:
    """Run plans on the CPU within a `with` block, for every thread, also where the function as written is faster."""
    global _always_plan
    before, _always_plan = _always_plan, True
    try:
        yield
    finally:
        _always_plan = before


def check_workspace(value: int) -> int:
    if _bytes("max_workspace", value) <= 0:
        raise ValueError(f"max_workspace: expected a positive number of bytes, got {value}")
    return operator.index(value)


def check_prepared(value: int | None) -> int | None:
    if value is None:
        return None
    if _bytes("max_prepared", value) < 0:
        raise ValueError(f"max_prepared: expected a non-negative number of bytes, got {value}; 0 keeps nothing")
    return operator.index(value)


def _bytes(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a number of bytes, got {type(value).__name__}")
    return operator.index(value)
