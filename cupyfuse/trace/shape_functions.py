"""Native forms of NumPy's functions that rearrange axes, and of diagonals, splits and flips."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir import slices
from .axes import Axes, normalize_axes
from .broadcasting import broadcast_to, expand
from .folds import in_fold, refolded, strides_of
from .labels import positions, take_along_axis
from .library import call_library
from .operations import apply, as_tracer, trace_of
from .parts import put, select
from .tracer import Tracer
from .user_code import reraise, user_line


def _moveaxis(a: Tracer, source: Any, destination: Any) -> Tracer:
    """Move axes as `numpy.moveaxis`."""
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
    """Return the diagonal as `numpy.diagonal`: a read-only view."""
    offset = operator.index(offset)
    if x.ndim < 2:
        raise ValueError(f"diag requires an array of at least two dimensions\n  at {user_line()}")
    (a,), (b,) = (normalize_axes(axis, x.ndim, "diagonal") for axis in (axis1, axis2))
    if a == b:
        raise ValueError(f"diagonal: axis1 and axis2 cannot be the same\n  at {user_line()}")
    return x._make_view(_pick_diagonal, _refuse_assignment, (offset, a, b))


def writable_diagonal(x: Tracer, a: int, b: int) -> Tracer:
    """Return the diagonal of two axes of one length as its last axis: a view that can be changed, as einsum's."""
    return x._make_view(_pick_diagonal, _put_diagonal, (0, a, b))


def _refuse_assignment(x: Tracer, selection: tuple[int, int, int], value: Tracer) -> Tracer:
    raise ValueError(f"assignment destination is read-only: the diagonal of an array\n  at {user_line()}")


def _pick_diagonal(x: Tracer, selection: tuple[int, int, int]) -> Tracer:
    """Copy the diagonal of two axes, which becomes the last axis; `selection` is (offset, axis, axis)."""
    base, axes, dims, first = _strides_of_diagonal(refolded(x, Axes.by_rows(x.shape)), *selection)
    return x._trace.array(slices.strided_copy(base, dims, axes.node_shape, first), axes)


def _put_diagonal(x: Tracer, selection: tuple[int, int, int], value: Tracer) -> Tracer:
    """Return a copy of an array with its diagonal replaced."""
    if not value.size:
        return x.copy()
    x = refolded(x, Axes.by_rows(x.shape))
    base, axes, dims, first = _strides_of_diagonal(x, *selection)
    node = slices.put(base, g.broadcast(in_fold(value, axes), axes.node_shape), dims, first)
    return x._trace.array(node if base is x._node else g.transpose(node), x._axes)


def _strides_of_diagonal(x: Tracer, offset: int, a: int, b: int) -> tuple[g.Node, Axes, list[tuple[int, int]], int]:
    """Return an array's node as stored, the axes of the diagonal, and its dimensions and first element in the node."""
    kept = [p for p in range(x.ndim) if p not in (a, b)]
    base, strides = strides_of(x)
    down, across = strides.get(a, 0), strides.get(b, 0)
    count = max(0, min(x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)))
    axes = Axes.by_rows((*(x.shape[p] for p in kept), count))
    dims = [(x.shape[p], strides.get(p, 0)) for p in kept] + [(count, down + across)]
    return base, axes, dims, max(offset, 0) * across - min(offset, 0) * down if count else 0


def _python_code_of(function: Any) -> Callable[..., Any]:
    """Return NumPy's own Python code of a function, which slices the array that it is given."""

    def call(*args: Any, **options: Any) -> Any:
        """Run NumPy's Python code on traced arrays; its errors get the user's line."""
        try:
            return function._implementation(*args, **options)
        except (TypeError, ValueError, IndexError) as error:
            if "\n  at " in str(error):
                raise
            reraise(f"np.{function.__name__}", error)

    return call


_flip = _python_code_of(np.flip)


def _rot90(m: Tracer, k: int = 1, axes: Any = (0, 1)) -> Tracer:
    first, second = normalize_axes(tuple(axes), m.ndim, "rot90")
    swapped: Tracer = m.swapaxes(first, second) if k % 2 else m[...]
    flipped = ((), first, (first, second), second)[k % 4]
    return swapped[...] if flipped == () else _flip(swapped, flipped)


def _unstack(x: Tracer, /, *, axis: int = 0) -> tuple[Tracer, ...]:
    moved = _moveaxis(x, axis, 0)
    return tuple(moved[i] for i in range(len(moved)))


def _broadcast_arrays(*arrays: Any, subok: bool = False) -> tuple[Tracer, ...]:
    trace = trace_of(arrays)
    given = [as_tracer(a, trace) for a in arrays]
    try:
        shape = np.broadcast_shapes(*(x.shape for x in given))
    except ValueError as error:
        reraise("np.broadcast_arrays", error)
    return tuple(x if x.shape == shape else broadcast_to(x, shape) for x in given)


def _diag(v: Tracer, k: int = 0) -> Tracer:
    """Return the diagonal of a matrix, or a matrix with a vector on its diagonal, as `numpy.diag`."""
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
    **{function: _python_code_of(function) for function in (np.split, np.array_split, np.hsplit, np.vsplit, np.dsplit)},
    np.flip: _flip,
    np.flipud: lambda m: _flip(m, 0),
    np.fliplr: lambda m: _flip(m, 1),
    np.rot90: _rot90,
    np.unstack: _unstack,
    np.broadcast_arrays: _broadcast_arrays,
    np.linalg.diagonal: lambda x, /, *, offset=0: _diagonal(x, offset, -2, -1),
    np.take_along_axis: take_along_axis,
    np.swapaxes: lambda a, axis1, axis2: a.swapaxes(axis1, axis2),
    np.moveaxis: _moveaxis,
    np.rollaxis: _rollaxis,
    np.permute_dims: lambda a, axes=None: a.transpose(axes),
}
