"""Settings of the moment: the precision of matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .settings import check_precision

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
