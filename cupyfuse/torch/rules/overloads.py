"""How PyTorch's operations are called: which callables mean which rule, and with what arguments.

A overload is a callable as user code, `__torch_function__` or Dynamo see it, or a tensor's method by name. Most have
the canonical parameters in their order; others come with an adapter, a function with PyTorch's own parameters that
returns the canonical arguments (or `Refused`, or a `Call` of another rule).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...dtypes import NAMES
from .symbols import Size
from .table import RULES, Found, Refused

Adapter = Callable[..., Any]
F = torch.nn.functional

# Where a name is looked for, with and without a trailing underscore.
_PLACES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch._C._nn, torch._C._VariableFunctions)
# NumPy's names for parameters, which PyTorch takes too, and the names of the first one.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input"}
# What changes nothing about a result.
_WITHOUT_MEANING = ("_stacklevel", "memory_format", "non_blocking")
# Attributes that are operations.
_PROPERTIES = ("T", "mT", "data")
DTYPES = {getattr(torch, name): name for name in NAMES}
_NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class Call:
    """What an adapter returns where it has more to say than the canonical arguments."""

    arguments: tuple[Any, ...]
    rule: str = ""
    inplace: bool = False


@dataclass(frozen=True)
class Overload:
    rule: str
    adapt: Adapter | None
    inplace: bool = False


OVERLOADS: dict[Any, Overload] = {}
# Operations that are known and never fused, and why.
UNFUSED: dict[Any, str] = {}


def is_tensor(argument: Any) -> bool:
    """Whether an argument stands for a tensor: whatever is nothing else."""
    plain = (bool, int, float, complex, str, tuple, list, dict, slice, torch.dtype, torch.device, torch.memory_format)
    return argument is not None and argument is not Ellipsis and not isinstance(argument, (*plain, np.generic, Size))


def overload(rule: str, *targets: Any, adapt: Adapter | None = None, inplace: bool = False) -> None:
    """Let callables, or all callables of a name, mean a rule.

    A string stands for the function, method and special function of that name wherever there is one, and for its
    in-place form.
    """
    for target in targets:
        if isinstance(target, str):
            for callable_ in _named(target):
                _enter(callable_, Overload(rule, adapt, inplace))
            for callable_ in _named(target + "_"):
                _enter(callable_, Overload(rule, adapt, True))
        else:
            _enter(target, Overload(rule, adapt, inplace))


def leave_unfused(reason: str, *targets: str) -> None:
    for target in targets:
        for callable_ in (*_named(target), *_named(target + "_")):
            UNFUSED[callable_] = reason


def _named(name: str) -> Iterable[Any]:
    """The operations of a name; what a place has imported under it for other purposes is no callable of PyTorch's."""
    for place in _PLACES:
        found = place.__dict__.get(name) if place is F else getattr(place, name, None)
        if callable(found) and not isinstance(found, (type, types.ModuleType)):
            yield found


def _enter(target: Any, overload: Overload) -> None:
    known = OVERLOADS.setdefault(target, overload)
    if known != overload:
        raise AssertionError(f"{target} means {known.rule} and {overload.rule}")


# Adapters that several rules have need of: methods name their second operand in ways of their own.


def two(input: Any, other: Any) -> tuple[Any, Any]:
    return input, other


def swapped(input: Any, other: Any) -> tuple[Any, Any]:
    return other, input


# Finding ------------------------------------------------------------------------------------------------------------


def find(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | Refused | None:
    """The rule and the canonical arguments of a call.

    Parameters
    ----------
    target : callable or str
        As `__torch_function__`, Dynamo or user code have it; a string is a method of tensors.
    args, kwargs
        Its arguments; anything that is no number, string, dtype, sequence or None stands for a tensor.

    Returns
    -------
    Found, or Refused for what cannot be fused, or None for an operation that is not in the table
    """
    if target is getattr:
        if args[1] not in _PROPERTIES:
            return None
        target, args = args[1], args[:1]
    if isinstance(target, str):
        member: Any = getattr(torch.Tensor, target, None)
        target = member.__get__ if target in _PROPERTIES else member
    try:
        overload, refused = OVERLOADS.get(target), UNFUSED.get(target)
    except TypeError:  # not hashable
        return None
    if refused is not None:
        return Refused(refused)
    if overload is None:
        return None
    kwargs = {name: value for name, value in kwargs.items() if name not in _WITHOUT_MEANING}
    if kwargs.pop("out", None) is not None:
        return Refused("out= writes to a tensor that was given")
    try:
        called = (overload.adapt or _by_signature(overload.rule, target))(*args, **kwargs)
    except TypeError as error:
        return Refused(f"its arguments are not known: {error}")
    if isinstance(called, Refused):
        return called
    if not isinstance(called, Call):
        called = Call(called)
    rule = RULES[called.rule or overload.rule]
    inplace = overload.inplace or called.inplace
    if inplace and rule.idle:
        return Refused("it changes a tensor's shape in place")
    filled = _filled(rule.signature, called.arguments)
    try:
        return Found(rule, tuple(map(_plain, filled)), inplace)
    except TypeError as error:
        return Refused(str(error))


def inplace_result(result: Any, dtype: torch.dtype) -> Found | Refused:
    """The call that turns the result of an operation in place into what its first operand holds after it.

    An operation in place computes in the promoted dtype of all operands, as the same operation out of place does, and
    keeps the dtype of the first one: `y += z` of a float32 `y` and a float64 `z` adds in float64 and rounds once.

    Parameters
    ----------
    result
        What stands for the result of the rule of a `Found` that is in place.
    dtype : torch.dtype
        The first operand's.

    Returns
    -------
    Found, which is traced to nothing where the dtypes agree, or Refused for a dtype that no graph has
    """
    if dtype not in DTYPES:
        return Refused(f"{dtype} is no type that cupyfuse computes with")
    return Found(RULES["written"], (result, DTYPES[dtype]))


def _filled(signature: inspect.Signature, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    bound = signature.bind(*arguments)
    bound.apply_defaults()
    return tuple(bound.arguments.values())


def _by_signature(rule: str, target: Any) -> Adapter:
    """Bind arguments to the parameters of a Python function by its own signature, then canonically by name."""

    def adapt(*args: Any, **kwargs: Any) -> Call:
        signature = RULES[rule].signature
        own = _signature(target)
        if own is not None:
            bound = own.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = (), dict(bound.arguments)
        kwargs = {_RENAMED.get(k, k) if k not in signature.parameters else k: v for k, v in kwargs.items()}
        for name in (*_WITHOUT_MEANING, "out"):
            kwargs.pop(name, None)
        inplace = bool(kwargs.pop("inplace", False))
        if "size_average" in kwargs:
            raise TypeError("size_average")
        canonical = signature.bind(*args, **kwargs)
        canonical.apply_defaults()
        return Call(tuple(canonical.arguments.values()), inplace=inplace)

    return adapt


def _signature(target: Any) -> inspect.Signature | None:
    """A Python function's own signature; built-in ones have none, and `*args` say nothing."""
    if not isinstance(target, types.FunctionType):
        return None
    try:
        signature = inspect.signature(target)
    except ValueError:
        return None
    kinds = {p.kind for p in signature.parameters.values()}
    return None if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} else signature


def _plain(argument: Any) -> Any:
    """An argument as a chain can write it down."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_plain, argument))
    if isinstance(argument, torch.dtype):
        if argument not in DTYPES:
            raise TypeError(f"{argument} is no type that cupyfuse computes with")
        return DTYPES[argument]
    if isinstance(argument, np.generic):
        return _plain(argument.item())
    if isinstance(argument, (complex, slice, dict, torch.device, torch.memory_format, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"an argument of type {type(argument).__name__} cannot be part of a chain")
    return argument
