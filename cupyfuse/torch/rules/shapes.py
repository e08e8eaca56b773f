"""Other looks at the same elements, and what changes nothing."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from .overloads import is_tensor, leave_unfused, overload, two
from .promotion import constant
from .table import Refused, rule
from .values import Shape, Value, expanded, permuted, positions, refuse

F = torch.nn.functional
T = torch.Tensor
_LOOK = {"view": True, "idle": True}

# Nothing changes ----------------------------------------------------------------------------------------------------


@rule("identity", lambda x: x, **_LOOK)
def identity(input: Value) -> Value:
    return input


@rule("contiguous", lambda x: x.contiguous(), **_LOOK)
def contiguous(input: Value) -> Value:
    return input


@rule("clone", torch.clone)
def clone(input: Value) -> Value:
    return input


@rule("detach", lambda x: x.detach(), **_LOOK)
def detach(input: Value) -> Value:
    return constant(input)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training and p != 0:
        return Refused("dropout in training draws random numbers; left to torch")
    return (input,)


_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
for _name in _DROPOUTS:
    # The Python functions train only if told to, the built-in ones have to be told.
    _default = {"alpha_dropout": False, "feature_alpha_dropout": False}.get(_name, True)
    overload(
        "identity",
        getattr(F, _name),
        adapt=lambda input, p=0.5, training=_default, inplace=False: _dropout(input, p, training),
    )
overload("identity", torch.dropout, torch.feature_dropout, adapt=lambda input, p, train: _dropout(input, p, train))
overload("identity", torch.alpha_dropout, adapt=lambda input, p, train: _dropout(input, p, train))
overload("contiguous", T.contiguous, adapt=lambda input, memory_format=None: (input,))
overload("clone", torch.clone, T.clone)
overload("detach", torch.detach, T.detach)
overload("detach", T.data.__get__, adapt=lambda input, *_: (input,))

# Shapes -------------------------------------------------------------------------------------------------------------


@rule("reshape", torch.reshape, **_LOOK)
def reshape(input: Value, shape: tuple[int, ...]) -> Value:
    known = math.prod(n for n in shape if n != -1)
    wanted = tuple(input.size // known if n == -1 and known else n for n in shape)
    if shape.count(-1) > 1 or min(wanted, default=0) < 0 or math.prod(wanted) != input.size:
        refuse("reshape", f"shape {input.shape} as {shape}")
    return input.viewed(wanted)


@rule("flatten", torch.flatten, **_LOOK)
def flatten(input: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    if not input.ndim:
        return input.viewed((1,))
    (start,) = positions(start_dim, input.ndim, "flatten")
    (end,) = positions(end_dim, input.ndim, "flatten")
    shape = input.shape
    return input.viewed((*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@rule("unflatten", torch.unflatten, **_LOOK)
def unflatten(input: Value, dim: int, sizes: tuple[int, ...]) -> Value:
    (p,) = positions(dim, input.ndim, "unflatten")
    known, length = math.prod(n for n in sizes if n != -1), input.shape[p]
    inner = tuple(length // known if n == -1 and known else n for n in sizes)
    if math.prod(inner) != length or min(inner, default=0) < 0:
        refuse("unflatten", f"{length} elements as {sizes}")
    return input.viewed((*input.shape[:p], *inner, *input.shape[p + 1 :]))


@rule("unsqueeze", torch.unsqueeze, **_LOOK)
def unsqueeze(input: Value, dim: int) -> Value:
    (p,) = positions(dim, input.ndim + 1, "unsqueeze")
    return input.viewed((*input.shape[:p], 1, *input.shape[p:]))


def _squeeze_eager(x: Any, dim: Any) -> Any:
    return torch.squeeze(x) if dim is None else torch.squeeze(x, dim)


@rule("squeeze", _squeeze_eager, **_LOOK)
def squeeze(input: Value, dim: int | tuple[int, ...] | None = None) -> Value:
    dims = positions(dim, input.ndim, "squeeze")
    return input.viewed([n for p, n in enumerate(input.shape) if p not in dims or n != 1])


@rule("t", torch.t, **_LOOK)
def t(input: Value) -> Value:
    if input.ndim > 2:
        refuse("t", f"a value of shape {input.shape}")
    return permuted(input, tuple(reversed(range(input.ndim))), "t")


@rule("transpose", torch.transpose, **_LOOK)
def transpose(input: Value, dim0: int, dim1: int) -> Value:
    order = list(range(input.ndim))
    if order:
        (a,), (b,) = (positions(d, input.ndim, "transpose") for d in (dim0, dim1))
        order[a], order[b] = order[b], order[a]
    return permuted(input, tuple(order), "transpose")


@rule("permute", torch.permute, **_LOOK)
def permute(input: Value, dims: tuple[int, ...]) -> Value:
    order = tuple(d % input.ndim for d in dims) if input.ndim else ()
    if sorted(order) != list(range(input.ndim)):
        refuse("permute", f"dimensions {dims} of a value of shape {input.shape}")
    return permuted(input, order, "permute")


@rule("expand", lambda x, shape: x.expand(shape), **_LOOK)
def expand(input: Value, shape: tuple[int, ...]) -> Value:
    extra = len(shape) - input.ndim
    if extra < 0 or -1 in shape[:extra]:
        refuse("expand", f"a value of shape {input.shape} does not expand to {shape}")
    return expanded(input, tuple(input.shape[p - extra] if n == -1 else n for p, n in enumerate(shape)))


@rule("expand_as", lambda x, other: x.expand_as(other), **_LOOK)
def expand_as(input: Value, other: Value) -> Value:
    return expanded(input, other.shape)


@rule("view_as", lambda x, other: x.reshape(other.shape), **_LOOK)
def view_as(input: Value, other: Value) -> Value:
    return reshape(input, other.shape)


def _sizes(sizes: tuple[Any, ...]) -> Any:
    """Sizes given one by one or as a sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if any(isinstance(n, torch.dtype) for n in sizes):
        return Refused("it looks at the bits of numbers as others")
    if any(is_tensor(n) or n is None for n in sizes):
        return Refused("sizes that are known only when it runs")
    return tuple(sizes)


def _with_sizes(input: Any, *sizes: Any, shape: Any = None, size: Any = None, dtype: Any = None) -> Any:
    given = next((s for s in (shape, size, dtype) if s is not None), None)
    found: Shape | Refused = _sizes((given,) if given is not None else sizes)
    return found if isinstance(found, Refused) else (input, found)


def _with_dims(input: Any, *given: Any, dims: Any = None) -> Any:
    return _with_sizes(input, *([dims] if dims is not None else given))


def _unflatten(input: Any, dim: int, sizes: Any) -> Any:
    found: Shape | Refused = _sizes(tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,))
    return found if isinstance(found, Refused) else (input, dim, found)


overload("reshape", torch.reshape, T.reshape, T.view, adapt=_with_sizes)
overload("flatten", "flatten")
overload("flatten", "ravel", adapt=lambda input: (input, 0, -1))
overload("unflatten", torch.unflatten, T.unflatten, adapt=_unflatten)
overload("unsqueeze", "unsqueeze")
overload("squeeze", "squeeze")
overload("t", "t", T.T.__get__, adapt=lambda input, *_: (input,))
overload("transpose", "transpose", "swapaxes", "swapdims", adapt=lambda input, dim0, dim1: (input, dim0, dim1))
overload("transpose", T.mT.__get__, adapt=lambda input, *_: (input, -2, -1))
overload("permute", torch.permute, T.permute, adapt=_with_dims)
overload("expand", T.expand, torch.broadcast_to, T.broadcast_to, adapt=_with_sizes)
overload("expand_as", T.expand_as, adapt=two)
overload("view_as", T.view_as, T.reshape_as, adapt=two)

# Parts and joints of tensors: a kernel reads and writes values that it can address as rows x columns from their start.
leave_unfused("a part of a tensor", "chunk", "split", "tensor_split", "unbind", "narrow", "select", "glu")
leave_unfused(
    "a part of a tensor", "index_select", "unsafe_chunk", "unsafe_split", "hsplit", "vsplit", "split_with_sizes"
)
leave_unfused("tensors put side by side", "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack")

# Indices ------------------------------------------------------------------------------------------------------------

_INDICES = {"new": None, "all": slice(None), "rest": Ellipsis}


def _index_eager(x: Any, index: tuple[Any, ...]) -> Any:
    return x[tuple(_INDICES[i] if isinstance(i, str) else i for i in index)]


@rule("getitem", _index_eager, **_LOOK)
def getitem(input: Value, index: tuple[Any, ...]) -> Value:
    """New dimensions, and the only element of dimensions of length one."""
    taken = len(index) - index.count("new") - index.count("rest")
    if taken > input.ndim or index.count("rest") > 1:
        refuse("getitem", f"too many indices for a value of shape {input.shape}")
    rest = list(input.shape)
    shape: list[int] = []
    for i in index:
        if i == "new":
            shape.append(1)
        elif i == "rest":
            kept = input.ndim - taken
            shape, rest = shape + rest[:kept], rest[kept:]
        elif i == "all":
            shape.append(rest.pop(0))
        elif rest.pop(0) != 1 or i not in (0, -1):
            refuse("getitem", "a part of a tensor")
    return input.viewed(shape + rest)


def _getitem(input: Any, index: Any) -> Any:
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


overload("getitem", operator.getitem, T.__getitem__, adapt=_getitem)
