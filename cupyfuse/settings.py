"""Settings of plans: precision of matrix products, GPU, memory."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from . import devices
from .devices import Device

DEFAULT_WORKSPACE = 256 << 20


@dataclass(frozen=True)
class Settings:
    """Settings that a plan depends on beside the function and its arguments.

    Attributes
    ----------
    precision : str
        One of `PRECISIONS`.
    device : Device or None
        The target GPU; None for NumPy and for GPUs without an entry in `devices`.
    max_workspace : int
        Bytes of intermediate values beyond which a plan runs in blocks of rows or of columns, where it can.
    keep_halves : bool
        Whether `bind` keeps the fp16 hi/lo split of bound float32 operands.
    epilogues : str
        One of `EPILOGUES`: where our own GEMM kernels run the row program behind a product as their epilogue, and where
        they compute a 16-bit product at all. "measured": where that is faster by what was measured (of 16-bit products
        on this GPU, `Device.own_half`); "always": wherever they can; "never".
    on_gpu : bool
        Whether arrays are on a GPU; always with a `device`. One without an entry in `devices` has none.
    """

    precision: str = "highest"
    device: Device | None = devices.DEVICES[devices.DEFAULT]
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    epilogues: str = "measured"
    on_gpu: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_gpu", self.on_gpu or self.device is not None)


EPILOGUES = ("measured", "always", "never")
PRECISIONS = ("highest", "high", "medium", "ieee", "tf32")


def check_precision(value: str) -> str:
    """Return a precision, or raise ValueError if it is not one of `PRECISIONS`."""
    return _one_of("precision", value, PRECISIONS)


def _one_of(name: str, value: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


@contextmanager
def _within(variable: ContextVar[str], value: str) -> Iterator[None]:
    """Set a variable within a `with` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_current: ContextVar[str] = ContextVar("cupyfuse_precision", default="highest")


def current_precision() -> str:
    """Return the precision of the innermost `with precision(...)` block."""
    return _current.get()


def precision(value: str) -> _GeneratorContextManager[None]:
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
    return _within(_current, check_precision(value))


_epilogues: ContextVar[str] = ContextVar("cupyfuse_epilogues", default="measured")


def current_epilogues() -> str:
    """Return the choice of the innermost `with epilogues(...)` block."""
    return _epilogues.get()


def epilogues(value: str) -> _GeneratorContextManager[None]:
    """Choose where products have epilogues within a `with` block; for tests and benchmarks.

    Parameters
    ----------
    value : {"measured", "always", "never"}
        As `Settings.epilogues`.

    Raises
    ------
    ValueError
        Any other value.
    """
    return _within(_epilogues, _one_of("epilogues", value, EPILOGUES))


_plans_forced = False


def plans_are_forced() -> bool:
    """Whether a `with force_plans()` block is active in any thread."""
    return _plans_forced


def settings_of_call(precision: str | None) -> tuple[str, str, bool]:
    """Return what the key of a call consists of beside its signature.

    The precision, a function's own or else the current one; the current choice of epilogues; and whether plans are
    forced.
    """
    return precision or _current.get(), _epilogues.get(), _plans_forced


@contextmanager
def force_plans() -> Iterator[None]:
    """Run plans within a `with` block even where the function as written is faster; for tests, in every thread."""
    global _plans_forced
    before, _plans_forced = _plans_forced, True
    try:
        yield
    finally:
        _plans_forced = before


def check_workspace(value: int) -> int:
    """Return `max_workspace` as an int, or raise if it is not a positive number of bytes."""
    count = _check_bytes("max_workspace", value)
    if count <= 0:
        raise ValueError(f"max_workspace: expected a positive number of bytes, got {value}")
    return count


def check_prepared(value: int | None) -> int | None:
    """Return `max_prepared` as an int, None for no limit, or raise if it is not a number of bytes."""
    if value is None:
        return None
    count = _check_bytes("max_prepared", value)
    if count < 0:
        raise ValueError(f"max_prepared: expected a non-negative number of bytes, got {value}; 0 keeps nothing")
    return count


def check_flag(name: str, value: bool) -> bool:
    """Return an option, or raise TypeError unless it is a bool: any other would count as one by its truth, as "no"."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return bool(value)


def _check_bytes(name: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected a number of bytes, got {type(value).__name__}")
    return operator.index(value)
