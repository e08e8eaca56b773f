"""Settings of the moment: the precision of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

PRECISIONS = ("highest", "high", "medium", "ieee")
_current: ContextVar[str] = ContextVar("cupyfuse_precision", default="highest")


def check_precision(value: str) -> str:
    if value not in PRECISIONS:
        raise ValueError(f"precision: expected one of {', '.join(map(repr, PRECISIONS))}, got {value!r}")
    return value


def current_precision() -> str:
    return _current.get()


@contextmanager
def precision(value: str) -> Iterator[None]:
    """Set the precision of float32 matrix products within a `with` block.

    Parameters
    ----------
    value : {"highest", "high", "medium", "ieee"}
        "highest" (the default) is never less accurate than cuBLAS's float32 product; "ieee" is that product itself;
        "high" rounds operands to TF32 (10 bits of mantissa) and "medium" to bfloat16 (7 bits), both with float32
        accumulation. The meanings are those of `torch.set_float32_matmul_precision`. Other dtypes are not affected.

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
