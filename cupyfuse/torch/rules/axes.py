"""Dimensions of traced tensors, for reductions and permutations."""

from __future__ import annotations

from collections.abc import Sequence

from ...trace import Axes, Tracer, normalize_axes
from ...trace.folds import CopyNeeded, fold_along, refolded
from .values import Shape, Value, refuse

Dim = int | tuple[int, ...] | None


def normalize_dims(dim: Dim, rank: int, operation: str) -> tuple[int, ...]:
    """Return the dimensions that a `dim` argument names, sorted and counted from the front; None names all."""
    dims = normalize_axes(dim, max(rank, 1), operation)
    return tuple(sorted(dims)) if rank else ()


def fold_dims(value: Value, dims: Sequence[int], operation: str) -> tuple[Tracer, tuple[int, ...]]:
    """Fold a value so that `dims` are all of its rows, all of its columns, or both.

    Returns
    -------
    The value, and those of its dimensions to reduce: for a reduction of all elements, of a tracer of any shape

    Raises
    ------
    TraceError
        The dimensions are neither the first nor the last ones.
    """
    x = value.settled
    if all(n == 1 or p in dims for p, n in enumerate(value.shape)):
        x, dims = value.tracer, range(value.tracer.ndim)
    try:
        x = refolded(x, fold_along(x, dims))
    except CopyNeeded:
        refuse(operation, f"dimensions {dims} of a value of shape {x.shape} are neither the first nor the last ones")
    return x, tuple(p for p in dims if x.shape[p] != 1) or tuple(dims)


def is_matrix(x: Tracer, dims: Sequence[int]) -> bool:
    """Whether `dims` are along both rows and columns that are longer than one."""
    return all(axes and set(axes) <= set(dims) for axes in x._axes.long)


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    """Return the shape that reducing along `dims` leaves."""
    return tuple(1 if p in dims else n for p, n in enumerate(shape) if keepdim or p not in dims)


def permute_dims(value: Value, order: tuple[int, ...], operation: str) -> Value:
    """Permute dimensions where that transposes a fold, or only moves dimensions of length one; refuse otherwise."""
    moving = [p for p in order if value.shape[p] != 1]
    if moving == sorted(moving):
        return value.view([value.shape[p] for p in order])
    first = moving.index(min(moving))
    if moving[first:] + moving[:first] != sorted(moving):
        refuse(operation, f"the order {order} does not exchange rows and columns")
    k, dims = moving[0], tuple(range(value.ndim))
    return Value(refolded(value.settled, Axes(value.shape, dims[:k], dims[k:])).transpose(order))
