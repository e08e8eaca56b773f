"""Rules of views (reshape, permute, indexing) and of operations that change nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from .axes import Dim, normalize_dims, permute_dims
from .overloads import is_tensor
from .table import F, Refused, leave_unfused, overload, rule, two
from .values import Value, expand_to, refuse, stop_gradient

T = torch.Tensor


def view(*targets: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a rule whose result is a view of its first operand, or that operand."""
    return rule(*targets, view=True, idle=True, **options)


# Nothing changes ----------------------------------------------------------------------------------------------------


def _outside_training(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p != 0:
        return Refused("dropout in training draws random numbers; left to torch")
    return (input,)


def _alpha_outside_training(input: Any, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
    return _outside_training(input, p, training)


@view(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, eager=lambda x: x, adapt=_outside_training)
def identity(input: Value) -> Value:
    return input


overload("identity", F.alpha_dropout, F.feature_alpha_dropout, adapt=_alpha_outside_training)
overload(
    *("identity", torch.dropout, torch.feature_dropout, torch.alpha_dropout),
    adapt=lambda input, p, train: _outside_training(input, p, train),
)


@view(T.contiguous, eager=T.contiguous, adapt=lambda input, memory_format=None: (input,))
def contiguous(input: Value) -> Value:
    return input


@rule(torch.clone, T.clone)
def clone(input: Value) -> Value:
    return input


@view(torch.detach, T.detach)
def detach(input: Value) -> Value:
    return stop_gradient(input)


def _getter(input: Any, *_: Any) -> Any:
    return (input,)


overload("detach", T.data.__get__, adapt=_getter)

# Sizes --------------------------------------------------------------------------------------------------------------


def _as_sizes(sizes: tuple[Any, ...]) -> Any:
    """Sizes given one by one or as a sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if any(isinstance(n, torch.dtype) for n in sizes):
        return Refused("it reinterprets the bits of its elements")
    if any(is_tensor(n) or n is None for n in sizes):
        return Refused("its sizes depend on the values of a tensor")
    return tuple(sizes)


def _with_sizes(input: Any, *sizes: Any, shape: Any = None, size: Any = None, dtype: Any = None) -> Any:
    given = next((s for s in (shape, size, dtype) if s is not None), None)
    found = _as_sizes((given,) if given is not None else sizes)
    return found if isinstance(found, Refused) else (input, found)


def _with_dims(input: Any, *given: Any, dims: Any = None) -> Any:
    return _with_sizes(input, *([dims] if dims is not None else given))


def _with_inner_sizes(input: Any, dim: int, sizes: Any) -> Any:
    found = _as_sizes(tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,))
    return found if isinstance(found, Refused) else (input, dim, found)


def _infer(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Fill in a size of -1; None where the sizes do not give the count."""
    given = math.prod(n for n in sizes if n != -1)
    inferred = tuple(count // given if n == -1 and given else n for n in sizes)
    return inferred if min(inferred, default=0) >= 0 and math.prod(inferred) == count else None


@view(torch.reshape, T.reshape, T.view, adapt=_with_sizes)
def reshape(input: Value, shape: tuple[int, ...]) -> Value:
    wanted = _infer(shape, input.size)
    if shape.count(-1) > 1 or wanted is None:
        refuse("reshape", f"shape {input.shape} as {shape}")
    return input.view(wanted)


@view("flatten")
def flatten(input: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    if not input.ndim:
        return input.view((1,))
    (start,), (end,) = (normalize_dims(d, input.ndim, "flatten") for d in (start_dim, end_dim))
    shape = input.shape
    return input.view((*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


overload("flatten", "ravel", adapt=lambda input: (input, 0, -1))


@view(torch.unflatten, T.unflatten, adapt=_with_inner_sizes)
def unflatten(input: Value, dim: int, sizes: tuple[int, ...]) -> Value:
    (p,) = normalize_dims(dim, input.ndim, "unflatten")
    inner = _infer(sizes, input.shape[p])
    if inner is None:
        refuse("unflatten", f"{input.shape[p]} elements as {sizes}")
    return input.view((*input.shape[:p], *inner, *input.shape[p + 1 :]))


@view()
def unsqueeze(input: Value, dim: int) -> Value:
    (p,) = normalize_dims(dim, input.ndim + 1, "unsqueeze")
    return input.view((*input.shape[:p], 1, *input.shape[p:]))


@view(eager=lambda x, dim: torch.squeeze(x) if dim is None else torch.squeeze(x, dim))
def squeeze(input: Value, dim: Dim = None) -> Value:
    dims = normalize_dims(dim, input.ndim, "squeeze")
    return input.view([n for p, n in enumerate(input.shape) if p not in dims or n != 1])


@view(T.expand, torch.broadcast_to, T.broadcast_to, eager=T.expand, adapt=_with_sizes)
def expand(input: Value, shape: tuple[int, ...]) -> Value:
    extra = len(shape) - input.ndim
    if extra < 0 or -1 in shape[:extra]:
        refuse("expand", f"a value of shape {input.shape} does not expand to {shape}")
    return expand_to(input, tuple(input.shape[p - extra] if n == -1 else n for p, n in enumerate(shape)))


@view(T.expand_as, eager=T.expand_as, adapt=two)
def expand_as(input: Value, other: Value) -> Value:
    return expand_to(input, other.shape)


@view(T.view_as, T.reshape_as, eager=T.reshape_as, adapt=two)
def view_as(input: Value, other: Value) -> Value:
    return reshape(input, other.shape)


# Permutations -------------------------------------------------------------------------------------------------------


@view("t", T.T.__get__, adapt=_getter)
def t(input: Value) -> Value:
    if input.ndim > 2:
        refuse("t", f"a value of shape {input.shape}")
    return permute_dims(input, tuple(reversed(range(input.ndim))), "t")


@view("transpose", "swapaxes", "swapdims", adapt=lambda input, dim0, dim1: (input, dim0, dim1))
def transpose(input: Value, dim0: int, dim1: int) -> Value:
    order = list(range(input.ndim))
    if order:
        (a,), (b,) = (normalize_dims(d, input.ndim, "transpose") for d in (dim0, dim1))
        order[a], order[b] = order[b], order[a]
    return permute_dims(input, tuple(order), "transpose")


overload("transpose", T.mT.__get__, adapt=lambda input, *_: (input, -2, -1))


@view(torch.permute, T.permute, adapt=_with_dims)
def permute(input: Value, dims: tuple[int, ...]) -> Value:
    order = tuple(d % input.ndim for d in dims) if input.ndim else ()
    if sorted(order) != list(range(input.ndim)):
        refuse("permute", f"dimensions {dims} of a value of shape {input.shape}")
    return permute_dims(input, order, "permute")


# Indices ------------------------------------------------------------------------------------------------------------

# Kernels read and write rows x columns from the start of a tensor.
leave_unfused(
    "a part of a tensor",
    *("chunk", "split", "tensor_split", "unbind", "narrow", "select", "glu", "index_select"),
    *("unsafe_chunk", "unsafe_split", "hsplit", "vsplit", "split_with_sizes"),
)
leave_unfused("tensors put side by side", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack")

_INDICES = {"new": None, "all": slice(None), "rest": Ellipsis}


def _storable_index(input: Any, index: Any) -> Any:
    """Encode an index as a chain can store it: names in `_INDICES`, and integers; refuse parts of dimensions."""
    items: list[str | int] = []
    for item in index if isinstance(index, tuple) else (index,):
        if item is None or item is Ellipsis:
            items.append("new" if item is None else "rest")
        elif isinstance(item, slice) and item.start in (None, 0) and item.stop is None and item.step in (None, 1):
            items.append("all")
        elif type(item) is int:
            items.append(item)
        else:
            return Refused("a part of a tensor")
    return input, tuple(items)


def _index_eager(x: Any, index: tuple[Any, ...]) -> Any:
    return x[tuple(_INDICES[i] if isinstance(i, str) else i for i in index)]


@view(operator.getitem, T.__getitem__, eager=_index_eager, adapt=_storable_index)
def getitem(input: Value, index: tuple[Any, ...]) -> Value:
    """New dimensions, and the only element of dimensions of length one."""
    indexed = len(index) - index.count("new") - index.count("rest")
    if indexed > input.ndim or index.count("rest") > 1:
        refuse("getitem", f"too many indices for a value of shape {input.shape}")
    rest = list(input.shape)
    shape: list[int] = []
    for i in index:
        if i == "new":
            shape.append(1)
        elif i == "rest":
            kept = input.ndim - indexed
            shape, rest = shape + rest[:kept], rest[kept:]
        elif i == "all":
            shape.append(rest.pop(0))
        elif rest.pop(0) != 1 or i not in (0, -1):
            refuse("getitem", "a part of a tensor")
    return input.view(shape + rest)
