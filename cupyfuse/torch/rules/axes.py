"""Map PyTorch's dimensions to the rows and columns of a fold, for reductions and permutations."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...trace import Tracer
from .values import Fold, Shape, Value, refuse, without_ones

Dim = int | tuple[int, ...] | None


def normalize_dims(dim: Dim, rank: int, operation: str) -> tuple[int, ...]:
    """Return the dimensions that a `dim` argument names, sorted and counted from the front; None names all."""
    if dim is None:
        return tuple(range(rank))
    dims = []
    for d in dim if isinstance(dim, tuple) else (dim,):
        if rank == 0 and d in (0, -1):
            continue
        if not -rank <= d < rank:
            refuse(operation, f"dimension {d} is out of range for {rank} dimensions")
        dims.append(d % rank)
    if len(set(dims)) != len(dims):
        refuse(operation, f"a dimension appears twice in {dim}")
    return tuple(sorted(dims))


def matrix_along(value: Value, dims: Sequence[int], operation: str) -> tuple[Tracer, int | None]:
    """Fold a value into a matrix of which `dims` are one axis and the other dimensions the other, at the least cost.

    Returns
    -------
    The matrix, and the axis, 0 or 1; None if `dims` are all dimensions and the value is a matrix already: both axes

    Raises
    ------
    TraceError
        The dimensions are neither the first nor the last ones.
    """
    shape, rank = value.shape, value.ndim
    # Dimensions of length one may be in either axis.
    inside = {p for p in dims if shape[p] != 1}
    others = {p for p in range(rank) if shape[p] != 1} - inside
    if not others:
        computed = value.tracer
        if computed.ndim == 2 and len(without_ones(computed.shape)) == 2:
            return computed, None
        return value.as_matrix((1, value.size)), 1
    choices: list[tuple[int, bool, Fold, int]] = []  # by cost, then whether more than one dimension is reduced
    for k in range(rank + 1):
        rows, columns = set(range(k)), set(range(k, rank))
        fold = (math.prod(shape[:k]), math.prod(shape[k:]))
        if inside <= columns and others <= rows:
            choices.append((value.fold_cost(fold), k != rank - 1, fold, 1))
        if inside <= rows and others <= columns:
            choices.append((value.fold_cost(fold), k != 1, fold, 0))
    if not choices:
        refuse(operation, f"dimensions {dims} of a value of shape {shape} are neither the first nor the last ones")
    _, _, fold, axis = min(choices)
    return value.as_matrix(fold), axis


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    """Return the shape that reducing along `dims` leaves."""
    return tuple(1 if p in dims else n for p, n in enumerate(shape) if keepdim or p not in dims)


def permute_dims(value: Value, order: tuple[int, ...], operation: str) -> Value:
    """Permute dimensions where that transposes a fold, or only moves dimensions of length one; refuse otherwise."""
    rank, shape = value.ndim, tuple(value.shape[p] for p in order)
    if rank == 2 and order == (1, 0):
        return Value(value.as_matrix().transpose(), shape)
    moving = [p for p in order if value.shape[p] != 1]
    if moving == sorted(moving):
        return value.view(shape)
    first = moving.index(min(moving))
    if moving[first:] + moving[:first] != sorted(moving):
        refuse(operation, f"the order {order} of a value of shape {value.shape} does not exchange rows and columns")
    k = moving[0]
    fold = (math.prod(value.shape[:k]), math.prod(value.shape[k:]))
    return Value(value.as_matrix(fold).transpose(), shape)
