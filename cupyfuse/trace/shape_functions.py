"""NumPy functions that rearrange the axes of traced arrays, or pick elements of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir import parts
from .axes import Axes, normalize_axes
from .broadcasting import expand
from .folds import in_fold, strides_of
from .labels import positions, take_along_axis
from .library import call_library
from .operations import apply
from .parts import put, select
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


def _diagonal(x: Tracer, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tracer:
    """`numpy.diagonal`, as a copy."""
    if x.ndim < 2:
        raise ValueError(f"diag requires an array of at least two dimensions\n  at {user_line()}")
    a, b = range(x.ndim)[axis1], range(x.ndim)[axis2]
    kept = [p for p in range(x.ndim) if p not in (a, b)]
    base, strides = strides_of(x._trace.array(in_fold(x, Axes.by_rows(x.shape)), Axes.by_rows(x.shape)))
    down, across = strides.get(a, 0), strides.get(b, 0)
    count = max(0, min(x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)))
    shape = (*(x.shape[p] for p in kept), count)
    axes = Axes.by_rows(shape)
    dims = [(x.shape[p], strides.get(p, 0)) for p in kept] + [(count, down + across)]
    first = max(offset, 0) * across - min(offset, 0) * down if count else 0
    return x._trace.array(parts.strided(base, dims, axes.node_shape, first), axes)


def _diag(v: Tracer, k: int = 0) -> Tracer:
    """`numpy.diag`: the diagonal of a matrix, or a matrix with a vector on its diagonal."""
    if v.ndim == 2:
        return _diagonal(v, k)
    if dtypes.is_opaque(v._node.dtype):
        return call_library("diag", [v, k])
    if v.ndim != 1:
        raise ValueError(f"diag: 1 or 2 dimensions are expected, got shape {v.shape}\n  at {user_line()}")
    n = v.shape[0] + abs(k)
    row, col = positions(v._trace, 2, 0, n), positions(v._trace, 2, 1, n)
    first = max(-k, 0)
    values = v if k == 0 else put(_zeros(v, n), select(slice(first, first + v.shape[0]), (n,)), v)
    zero = False if v._node.dtype == "bool" else 0
    return apply("where", apply("equal", row + k, col), values[:, None], zero).astype(v._node.dtype)


def _zeros(like: Tracer, n: int) -> Tracer:
    zero = like._trace.array(g.cast(g.const(0), like._node.dtype), ())
    return expand(zero, (n,))


SHAPE_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.diag: _diag,
    np.diagonal: _diagonal,
    np.take_along_axis: take_along_axis,
    np.swapaxes: lambda a, axis1, axis2: a.swapaxes(axis1, axis2),
    np.moveaxis: _moveaxis,
    np.rollaxis: _rollaxis,
    np.permute_dims: lambda a, axes=None: a.transpose(axes),
}
