"""NumPy functions that rearrange the axes of traced arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .axes import normalize_axes
from .tracer import Tracer
from .user_code import user_line


def _moveaxis(a: Tracer, source: Any, destination: Any) -> Tracer:
    given = [tuple(s) if isinstance(s, (tuple, list)) else s for s in (source, destination)]
    start, end = (normalize_axes(s, a.ndim, "moveaxis") for s in given)
    if len(start) != len(end):
        raise ValueError(
            f"moveaxis: source and destination need the same number of axes, got {source} and {destination}\n"
            f"  at {user_line()}"
        )
    order = [p for p in range(a.ndim) if p not in start]
    for new, old in sorted(zip(end, start, strict=True)):
        order.insert(new, old)
    return a.transpose(order)


def _rollaxis(a: Tracer, axis: int, start: int = 0) -> Tracer:
    (old,) = normalize_axes(axis, a.ndim, "rollaxis")
    new = start + a.ndim * (start < 0)
    return _moveaxis(a, old, new - (old < new))


SHAPE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.swapaxes: lambda a, axis1, axis2: a.swapaxes(axis1, axis2),
    np.moveaxis: _moveaxis,
    np.rollaxis: _rollaxis,
    np.permute_dims: lambda a, axes=None: a.transpose(axes),
    np.matrix_transpose: lambda x: x.mT,
    np.linalg.matrix_transpose: lambda x: x.mT,
}
