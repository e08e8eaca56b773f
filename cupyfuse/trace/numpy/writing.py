"""NumPy's functions that write to an array by index: the traced array takes the value that it would then have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...ir.library import WRITING
from ..library import call_library
from ..operations import apply
from ..tracer import Tracer
from ..user_code import fail


def _target(name: str, x: Any) -> Tracer:
    if not isinstance(x, Tracer):
        fail(f"np.{name}", "the array that it changes has to be an argument of the fused function or computed in it")
    return x


def _written(name: str) -> Callable[..., None]:
    def call(x: Any, *arguments: Any, **options: Any) -> None:
        target = _target(name, x)
        target._assign(call_library(WRITING + name, [target, *arguments], options), assigned=True)

    return call


def _copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    target = _target("copyto", dst)
    if casting != "same_kind":
        fail("np.copyto with casting=", "that option is not supported; convert with .astype first")
    value = target._trace.tracer_of(src)
    target._assign(value if where is True else apply("where", where, value.astype(target.dtype), target))


def _fill_diagonal(a: Any, val: Any, wrap: bool = False) -> None:
    target = _target("fill_diagonal", a)
    if target.ndim != 2 or wrap or np.ndim(val if not isinstance(val, Tracer) else np.empty(val.shape)):
        return _written("fill_diagonal")(target, val, wrap=wrap)
    diagonal = target._trace.constant(np.eye(*target.shape, dtype=bool))
    value = target._trace.tracer_of(val)
    target._assign(apply("where", diagonal, value.astype(target.dtype), target))
    return None


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.copyto: _copyto,
    np.fill_diagonal: _fill_diagonal,
    np.place: _written("place"),
    np.put: _written("put"),
    np.put_along_axis: _written("put_along_axis"),
    np.putmask: _written("putmask"),
}
