"""Rules of parts of rows: neighbouring columns, and rows put side by side.

Kernels read rows from any column on, and write them there. Parts of other dimensions are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...ir.concats import columns_of, concat
from ...trace import Axes, Tracer
from ...trace.folds import CopyNeeded, refolded
from .axes import normalize_dims
from .promotion import promote
from .table import Refused, leave_unfused, rule
from .values import Value, pointwise, refuse

PART = "a part of a tensor"
_SIDE_BY_SIDE = "tensors put side by side"

# Rules of views that may leave elements out.
PARTS = ("getitem", "narrow", "chunk", "split")


def takes_part(name: str, arguments: Sequence[Any]) -> bool:
    """Whether a call, of the rule of this name, may show a part of its operand's rows alone."""
    # Slices are tuples in the indices of `getitem`.
    return name in PARTS and (name != "getitem" or any(isinstance(item, tuple) for item in arguments[1]))


def moves_parts(name: str, arguments: Sequence[Any]) -> bool:
    """Whether a call, of the rule of this name, takes a part of rows, puts rows side by side, or swaps pairs."""
    return name in ("cat", "swap_pairs") or takes_part(name, arguments)


leave_unfused(
    PART,
    *("tensor_split", "unbind", "select", "index_select"),
    *("unsafe_chunk", "unsafe_split", "hsplit", "vsplit", "split_with_sizes"),
)
leave_unfused(_SIDE_BY_SIDE, "stack", "hstack", "vstack", "dstack")


def by_rows(value: Value, operation: str) -> Tracer:
    """Fold a value so that its last dimension is along the columns; refuse one that would be copied for that."""
    try:
        return refolded(value.settled, Axes.by_rows(value.shape))
    except CopyNeeded:
        refuse(operation, PART)


def columns(value: Value, first: int, count: int, operation: str) -> Value:
    """Return neighbouring elements along the last dimension of a value."""
    shape = (*value.shape[:-1], count)
    if count == value.shape[-1]:
        return value
    if 0 in (*shape, value.size):
        refuse(operation, PART)
    x = by_rows(value, operation)
    return Value(x._trace.array(columns_of(x._node, first, count), Axes.by_rows(shape)))


def _along_last(input: Value, dim: int, operation: str) -> int:
    """Return the length of the last dimension, which `dim` has to be."""
    if not input.ndim or normalize_dims(dim, input.ndim, operation) != (input.ndim - 1,):
        refuse(operation, PART)
    return input.shape[-1]


def _pieces(input: Value, sizes: list[int], operation: str) -> tuple[Value, ...]:
    """Cut a value along its last dimension."""
    found, first = [], 0
    for size in sizes:
        found.append(columns(input, first, size, operation))
        first += size
    return tuple(found)


@rule(view=True, no_op=True, eager=torch.Tensor.narrow)
def narrow(input: Value, dim: int, start: int, length: int) -> Value:
    whole = _along_last(input, dim, "narrow")
    if not isinstance(start, int) or length < 0 or not 0 <= start + whole * (start < 0) <= whole - length:
        refuse("narrow", PART)
    return columns(input, start % whole if whole else 0, length, "narrow")


@rule(view=True, no_op=True, several=True)
def chunk(input: Value, chunks: int, dim: int = 0) -> tuple[Value, ...]:
    whole = _along_last(input, dim, "chunk")
    if not whole:
        refuse("chunk", PART)  # PyTorch returns several parts of nothing
    size = max(1, -(-whole // chunks))
    return _pieces(input, [min(size, whole - k) for k in range(0, whole, size)], "chunk")


def _split_arguments(tensor: Any, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> Any:
    """Adapt `split`, whose function and method name their parameters differently."""
    sizes = split_size_or_sections if split_size is None else split_size
    return tensor, tuple(sizes) if isinstance(sizes, (tuple, list)) else sizes, dim


@rule(view=True, no_op=True, several=True, eager=torch.Tensor.split, adapt=_split_arguments)
def split(tensor: Value, sizes: int | tuple[int, ...], dim: int = 0) -> tuple[Value, ...]:
    whole = _along_last(tensor, dim, "split")
    if isinstance(sizes, int):
        sizes = tuple(min(sizes, whole - k) for k in range(0, whole, max(sizes, 1)))
    if sum(sizes) != whole or min(sizes, default=0) <= 0:
        refuse("split", f"{whole} elements as {sizes}")
    return _pieces(tensor, list(sizes), "split")


@rule()
def glu(input: Value, dim: int = -1) -> Value:
    half, odd = divmod(_along_last(input, dim, "glu"), 2)
    if odd:
        refuse("glu", f"{input.shape[-1]} elements")
    value, gate = _pieces(input, [half, half], "glu")
    return pointwise("multiply", value, pointwise("sigmoid", gate))


def _cat_arguments(tensors: Any, dim: Any = 0, *, axis: Any = None) -> Any:
    """Adapt `cat`, and refuse what is no sequence of tensors, such as one tensor that is cut into rows."""
    dim = dim if axis is None else axis
    return (tuple(tensors), dim) if isinstance(tensors, (tuple, list)) else Refused(_SIDE_BY_SIDE)


@rule("cat", "concat", "concatenate", eager=torch.cat, adapt=_cat_arguments)
def cat(tensors: tuple[Value, ...], dim: int = 0) -> Value:
    dtype, first = promote(*tensors), tensors[0]
    if any(t.ndim != first.ndim or (t.size == 0 and 0 in t.shape[:-1]) for t in tensors):
        refuse("cat", _SIDE_BY_SIDE)  # PyTorch takes empty vectors among others
    if any(normalize_dims(dim, t.ndim, "cat") != (t.ndim - 1,) or t.shape[:-1] != first.shape[:-1] for t in tensors):
        refuse("cat", _SIDE_BY_SIDE)
    tensors = tuple(t for t in tensors if t.size)  # as what is left of heads that are turned as a whole is empty
    if not tensors:
        refuse("cat", _SIDE_BY_SIDE)
    found = [by_rows(t.astype(dtype), "cat") for t in tensors]
    shape = (*first.shape[:-1], sum(t.shape[-1] for t in tensors))
    return Value(found[0]._trace.array(concat([x._node for x in found]), Axes.by_rows(shape)))
