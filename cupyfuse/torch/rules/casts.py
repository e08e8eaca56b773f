"""Other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from .overloads import Call, is_tensor, overload, two
from .promotion import as_mask
from .table import Refused, rule
from .values import Value, refuse

T = torch.Tensor


@rule("to", lambda x, dtype: x.to(getattr(torch, dtype)), view=True)
def to(input: Value, dtype: str) -> Value:
    if input.dtype == dtype:
        return input
    if dtype == "bool":
        return as_mask(input)
    if dtype == "int64" and is_float(input.dtype):
        refuse("to", "floats as integers")
    return input.astype(dtype)


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's takes a dtype, a device, both, or another tensor, and says whether to copy."""
    if kwargs.pop("copy", False) or (len(args) > 2 and args[-1] is True):
        return Refused("it asks for a copy")
    given = [*args, *kwargs.values()]
    dtypes = [a for a in given if isinstance(a, torch.dtype)]
    if any(isinstance(a, (str, torch.device)) for a in given) or (given and type(given[0]) is int):
        return Refused("it moves a tensor between devices")
    if given and is_tensor(given[0]):
        return Call((input, given[0]), "type_as")
    if not dtypes:
        return Call((input,), "identity")
    return input, dtypes[0]


def _cast(dtype: Any) -> Callable[..., Any]:
    return lambda input: (input, dtype)


@rule("type_as", lambda x, other: x.type_as(other), view=True)
def type_as(input: Value, other: Value) -> Value:
    return to(input, other.dtype)


def _type(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    if isinstance(dtype, torch.dtype):
        return input, dtype
    return Refused("a type by its name, or asked for")


def _written_eager(x: Any, dtype: str) -> Any:
    wanted = getattr(torch, dtype)
    if not torch.can_cast(x.dtype, wanted):
        raise RuntimeError(f"result type {x.dtype} can't be cast to the desired output type {wanted}")
    return x.to(wanted)


@rule("written", _written_eager)
def written(input: Value, dtype: str) -> Value:
    """The result of an operation in place, as a first operand of that dtype holds it; see `inplace_result`."""
    if not torch.can_cast(getattr(torch, input.dtype), getattr(torch, dtype)):
        refuse("an operation in place", f"PyTorch writes no result of {input.dtype} to a tensor of {dtype}")
    return input.astype(dtype)


overload("to", T.to, adapt=_to)
overload("to", T.type, adapt=_type)
overload("type_as", T.type_as, adapt=two)
for _method, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("bool", torch.bool),
    ("long", torch.int64),
):
    overload("to", getattr(T, _method), adapt=_cast(_dtype))
