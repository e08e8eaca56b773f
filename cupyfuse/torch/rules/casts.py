"""Conversions to other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from .overloads import is_tensor
from .table import Adapted, Refused, binary_operands, overload, rule
from .values import Value, as_mask, refuse

T = torch.Tensor


def _to_arguments(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Adapt `to`, which takes a dtype, a device, both, or another tensor, and whether to copy."""
    if kwargs.pop("copy", False) or (len(args) > 2 and args[-1] is True):
        return Refused("it asks for a copy")
    given = [*args, *kwargs.values()]
    if any(isinstance(a, (str, torch.device)) for a in given) or (given and type(given[0]) is int):
        return Refused("it moves a tensor between devices")
    if given and is_tensor(given[0]):
        return Adapted((input, given[0]), "type_as")
    dtypes = [a for a in given if isinstance(a, torch.dtype)]
    return (input, dtypes[0]) if dtypes else Adapted((input,), "identity")


@rule(T.to, eager=lambda x, dtype: x.to(getattr(torch, dtype)), adapt=_to_arguments, view=True)
def to(input: Value, dtype: str) -> Value:
    if input.dtype == dtype:
        return input
    if dtype == "bool":
        return as_mask(input)
    if dtype == "int64" and is_float(input.dtype):
        refuse("to", "floats as integers")
    return input.astype(dtype)


def _type_arguments(input: Any, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Adapt `Tensor.type`; refuse names of types."""
    if isinstance(dtype, torch.dtype):
        return input, dtype
    return Refused("a type by its name, or asked for")


def _fixed_dtype_arguments(dtype: Any) -> Callable[..., Any]:
    """Make the adapter of a conversion to one dtype, such as `Tensor.half`."""
    return lambda input: (input, dtype)


overload("to", T.type, adapt=_type_arguments)
for _method, _dtype in (
    ("float", torch.float32),
    ("double", torch.float64),
    ("half", torch.float16),
    ("bfloat16", torch.bfloat16),
    ("bool", torch.bool),
    ("long", torch.int64),
):
    overload("to", getattr(T, _method), adapt=_fixed_dtype_arguments(_dtype))


@rule(T.type_as, eager=lambda x, other: x.type_as(other), adapt=binary_operands, view=True)
def type_as(input: Value, other: Value) -> Value:
    return to(input, other.dtype)
