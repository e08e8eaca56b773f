"""Rules of views (reshape, permute, indexing) and of operations that change nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from .axes import Dim, normalize_dims, permute_dims
from .overloads import is_tensor
from .parts import PART, columns
from .table import F, Refused, binary_operands, overload, rule
from .values import Value, expand_to, refuse, stop_gradient

T = torch.Tensor


def view_rule(*targets: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the rule of an operation that returns a view of its first operand, or that operand."""
    return rule(*targets, view=True, no_op=True, **options)


# Nothing changes ----------------------------------------------------------------------------------------------------


def _dropout_arguments(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Adapt dropout: the identity, except in training."""
    if training and p != 0:
        return Refused("dropout in training draws random numbers; left to torch")
    return (input,)


@view_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, eager=lambda x: x, adapt=_dropout_arguments)
def identity(input: Value) -> Value:
    return input


overload(
    *("identity", F.alpha_dropout, F.feature_alpha_dropout),
    adapt=lambda input, p=0.5, training=False, inplace=False: _dropout_arguments(input, p, training),
)
overload(
    *("identity", torch.dropout, torch.feature_dropout, torch.alpha_dropout),
    adapt=lambda input, p, train: _dropout_arguments(input, p, train),
)


@view_rule(T.contiguous, eager=T.contiguous, adapt=lambda input, memory_format=None: (input,))
def contiguous(input: Value) -> Value:
    return input


@rule(torch.clone, T.clone)
def clone(input: Value) -> Value:
    return input


@view_rule(torch.detach, T.detach)
def detach(input: Value) -> Value:
    return stop_gradient(input)


def _getter_arguments(input: Any, *_: Any) -> Any:
    """Adapt the getter of a property, which is called with the tensor's type as well."""
    return (input,)


overload("detach", T.data.__get__, adapt=_getter_arguments)
# What reads `x.data` in captured code: from PyTorch 2.13 on a function.
DATA_GETTERS = [T.data.__get__]
if (_data_getter := getattr(torch._C._autograd, "_get_data_attr", None)) is not None:
    DATA_GETTERS.append(_data_getter)
    overload("detach", _data_getter)

# Sizes --------------------------------------------------------------------------------------------------------------


def _as_sizes(sizes: tuple[Any, ...]) -> Any:
    """Return sizes that are given one by one or as a sequence; refuse those that are no numbers."""
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if any(isinstance(n, torch.dtype) for n in sizes):
        return Refused("it reinterprets the bits of its elements")
    if any(is_tensor(n) or n is None for n in sizes):
        return Refused("its sizes depend on the values of a tensor")
    return tuple(sizes)


def _sizes_arguments(input: Any, *sizes: Any, shape: Any = None, size: Any = None, dtype: Any = None) -> Any:
    """Adapt `(input, sizes)`, with sizes one by one, as a sequence or by keyword."""
    given = next((s for s in (shape, size, dtype) if s is not None), None)
    found = _as_sizes((given,) if given is not None else sizes)
    return found if isinstance(found, Refused) else (input, found)


def _dims_arguments(input: Any, *given: Any, dims: Any = None) -> Any:
    """Adapt `permute`, with dimensions one by one, as a sequence or by keyword."""
    return _sizes_arguments(input, *([dims] if dims is not None else given))


def _unflatten_arguments(input: Any, dim: int, sizes: Any) -> Any:
    """Adapt `unflatten`, with sizes as a sequence or a single one."""
    found = _as_sizes(tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,))
    return found if isinstance(found, Refused) else (input, dim, found)


def _infer_size(sizes: tuple[int, ...], count: int) -> tuple[int, ...] | None:
    """Fill in a size of -1; return None where the sizes do not multiply to the count."""
    given = math.prod(n for n in sizes if n != -1)
    inferred = tuple(count // given if n == -1 and given else n for n in sizes)
    return inferred if min(inferred, default=0) >= 0 and math.prod(inferred) == count else None


@view_rule(torch.reshape, T.reshape, T.view, adapt=_sizes_arguments)
def reshape(input: Value, shape: tuple[int, ...]) -> Value:
    wanted = _infer_size(shape, input.size)
    if shape.count(-1) > 1 or wanted is None:
        refuse("reshape", f"shape {input.shape} as {shape}")
    return input.view(wanted)


@view_rule("flatten")
def flatten(input: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    if not input.ndim:
        return input.view((1,))
    (start,), (end,) = (normalize_dims(d, input.ndim, "flatten") for d in (start_dim, end_dim))
    shape = input.shape
    return input.view((*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


overload("flatten", "ravel", adapt=lambda input: (input, 0, -1))


@view_rule(torch.unflatten, T.unflatten, adapt=_unflatten_arguments)
def unflatten(input: Value, dim: int, sizes: tuple[int, ...]) -> Value:
    (p,) = normalize_dims(dim, input.ndim, "unflatten")
    inner = _infer_size(sizes, input.shape[p])
    if inner is None:
        refuse("unflatten", f"{input.shape[p]} elements as {sizes}")
    return input.view((*input.shape[:p], *inner, *input.shape[p + 1 :]))


@view_rule()
def unsqueeze(input: Value, dim: int) -> Value:
    (p,) = normalize_dims(dim, input.ndim + 1, "unsqueeze")
    return input.view((*input.shape[:p], 1, *input.shape[p:]))


@view_rule(eager=lambda x, dim: torch.squeeze(x) if dim is None else torch.squeeze(x, dim))
def squeeze(input: Value, dim: Dim = None) -> Value:
    dims = normalize_dims(dim, input.ndim, "squeeze")
    return input.view([n for p, n in enumerate(input.shape) if p not in dims or n != 1])


@view_rule(T.expand, torch.broadcast_to, T.broadcast_to, eager=T.expand, adapt=_sizes_arguments)
def expand(input: Value, shape: tuple[int, ...]) -> Value:
    extra = len(shape) - input.ndim
    if extra < 0 or -1 in shape[:extra]:
        refuse("expand", f"a value of shape {input.shape} does not expand to {shape}")
    return expand_to(input, tuple(input.shape[p - extra] if n == -1 else n for p, n in enumerate(shape)))


@view_rule(T.expand_as, eager=T.expand_as, adapt=binary_operands)
def expand_as(input: Value, other: Value) -> Value:
    return expand_to(input, other.shape)


@view_rule(T.view_as, T.reshape_as, eager=T.reshape_as, adapt=binary_operands)
def view_as(input: Value, other: Value) -> Value:
    return reshape(input, other.shape)


# Permutations -------------------------------------------------------------------------------------------------------


# What reads `x.T` and `x.mT` in captured code from PyTorch 2.14 on are operators.
@view_rule("t", T.T.__get__, torch.ops.aten.numpy_T, adapt=_getter_arguments)
def t(input: Value) -> Value:
    if input.ndim > 2:
        refuse("t", f"a value of shape {input.shape}")
    return permute_dims(input, tuple(reversed(range(input.ndim))), "t")


@view_rule("transpose", "swapaxes", "swapdims", adapt=lambda input, dim0, dim1: (input, dim0, dim1))
def transpose(input: Value, dim0: int, dim1: int) -> Value:
    order = list(range(input.ndim))
    if order:
        (a,), (b,) = (normalize_dims(d, input.ndim, "transpose") for d in (dim0, dim1))
        order[a], order[b] = order[b], order[a]
    elif not {dim0, dim1} <= {0, -1}:
        refuse("transpose", "a value without dimensions")  # only `.mT` takes it
    return permute_dims(input, tuple(order), "transpose")


overload("transpose", T.mT.__get__, torch.ops.aten.mT, adapt=lambda input, *_: (input, -2, -1))


@view_rule(torch.permute, T.permute, adapt=_dims_arguments)
def permute(input: Value, dims: tuple[int, ...]) -> Value:
    order = tuple(d % input.ndim for d in dims) if input.ndim else ()
    if sorted(order) != list(range(input.ndim)):
        refuse("permute", f"dimensions {dims} of a value of shape {input.shape}")
    return permute_dims(input, order, "permute")


# Indices ------------------------------------------------------------------------------------------------------------

_INDICES = {"new": None, "all": slice(None), "rest": Ellipsis}
Index = tuple[Any, ...]  # names in `_INDICES`, integers, and (start, stop) of slices that are not whole


def _getitem_arguments(input: Any, index: Any) -> Any:
    """Encode an index as a chain can store it; refuse slices with steps and what is no number."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if item is None or item is Ellipsis:
            items.append("new" if item is None else "rest")
        elif isinstance(item, slice) and item.step in (None, 1) and _are_numbers(item.start, item.stop):
            whole = item.start in (None, 0) and item.stop is None
            items.append("all" if whole else (item.start, item.stop))
        elif type(item) is int:
            items.append(item)
        else:
            return Refused(PART)
    return input, tuple(items)


def _are_numbers(*ends: Any) -> bool:
    return all(end is None or type(end) is int for end in ends)


def _getitem_eager(x: Any, index: Index) -> Any:
    return x[tuple(_INDICES[i] if isinstance(i, str) else slice(*i) if isinstance(i, tuple) else i for i in index)]


@view_rule(operator.getitem, T.__getitem__, eager=_getitem_eager, adapt=_getitem_arguments)
def getitem(input: Value, index: Index) -> Value:
    """Trace an index that keeps or adds dimensions, drops those of length one, and takes a part of the last one."""
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
        elif isinstance(i, tuple):
            length = rest.pop(0)
            first, last, _ = slice(*i).indices(length)
            shape.append(max(last - first, 0))
            if shape[-1] != length:
                if rest:  # it is not the last dimension
                    refuse("getitem", PART)
                input = columns(input, first, shape[-1], "getitem")
        elif rest.pop(0) != 1 or i not in (0, -1):
            refuse("getitem", PART)
    return input.view(shape + rest)
