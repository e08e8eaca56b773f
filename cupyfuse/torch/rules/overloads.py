"""Resolve calls of PyTorch's operations: which rule a callable stands for, and its canonical arguments.

A target is a callable as user code, `__torch_function__` or Dynamo see it, or a tensor's method by name. Most overloads
have the canonical parameters in order; the others come with an adapter, a function with PyTorch's parameters that
returns the canonical arguments, `Adapted` with more than these, or `Refused`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import numpy as np
import torch

from ...dtypes import NAMES
from .symbols import Size
from .table import OVERLOADS, RULES, UNFUSED, Adapted, Adapter, Found, Refused

# NumPy's names of parameters, which PyTorch takes too, and other names of the first one.
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input"}
_WITHOUT_EFFECT = ("_stacklevel", "memory_format", "non_blocking")
# Attributes that are operations.
_PROPERTIES = ("T", "mT", "data")
DTYPES = {getattr(torch, name): name for name in NAMES}


def is_tensor(argument: Any) -> bool:
    """Whether an argument stands for a tensor: it is no number, string, sequence, dtype or other option."""
    plain = (bool, int, float, complex, str, tuple, list, dict, slice, torch.dtype, torch.device, torch.memory_format)
    return argument is not None and argument is not Ellipsis and not isinstance(argument, (*plain, np.generic, Size))


def find(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | Refused | None:
    """Resolve a call to its rule and canonical arguments.

    Parameters
    ----------
    target : callable or str
        As `__torch_function__`, Dynamo or user code have it; a string is a method of tensors.
    args, kwargs
        Anything that is no number, string, dtype, sequence or None stands for a tensor.

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
        entry, unfused = OVERLOADS.get(target), UNFUSED.get(target)
    except TypeError:  # not hashable
        return None
    if unfused is not None:
        return Refused(unfused)
    if entry is None:
        return None
    kwargs = {name: value for name, value in kwargs.items() if name not in _WITHOUT_EFFECT}
    if kwargs.pop("out", None) is not None:
        return Refused("out= writes to a tensor that was given")
    try:
        found = (entry.adapt or _signature_adapter(entry.rule, target))(*args, **kwargs)
    except TypeError as error:
        return Refused(f"its arguments are not known: {error}")
    if isinstance(found, Refused):
        return found
    adapted = found if isinstance(found, Adapted) else Adapted(found)
    rule = RULES[adapted.rule or entry.rule]
    inplace = entry.inplace or adapted.inplace
    if inplace and rule.no_op:
        return Refused("it changes a tensor's shape in place")
    bound = rule.signature.bind(*adapted.arguments)
    bound.apply_defaults()
    try:
        return Found(rule, tuple(map(_as_constant, bound.arguments.values())), inplace)
    except TypeError as error:
        return Refused(str(error))


def _signature_adapter(rule: str, target: Any) -> Adapter:
    """Make an adapter that binds arguments by the target's own signature, then by canonical names."""

    def adapt(*args: Any, **kwargs: Any) -> Adapted:
        """Bind a call of the target to the rule's parameters; options that change no value are dropped."""
        signature = RULES[rule].signature
        own = _signature(target)  # its order of parameters may differ from the rule's
        if own is not None:
            bound = own.bind(*args, **kwargs)
            bound.apply_defaults()
            args, kwargs = (), dict(bound.arguments)
        kwargs = {_RENAMED.get(k, k) if k not in signature.parameters else k: v for k, v in kwargs.items()}
        for name in (*_WITHOUT_EFFECT, "out"):
            kwargs.pop(name, None)
        inplace = bool(kwargs.pop("inplace", False))
        canonical = signature.bind(*args, **kwargs)
        canonical.apply_defaults()
        return Adapted(tuple(canonical.arguments.values()), inplace=inplace)

    return adapt


def _signature(target: Any) -> inspect.Signature | None:
    """Return a Python function's signature; None for built-in functions, and for those that take `*args`."""
    if not isinstance(target, types.FunctionType):
        return None
    try:
        signature = inspect.signature(target)
    except ValueError:
        return None
    kinds = {p.kind for p in signature.parameters.values()}
    return None if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} else signature


def _as_constant(argument: Any) -> Any:
    """Convert an argument to the form that a chain stores; raise TypeError for one that it cannot store."""
    if isinstance(argument, (tuple, list)):
        return tuple(map(_as_constant, argument))
    if isinstance(argument, torch.dtype):
        if argument not in DTYPES:
            raise TypeError(f"{argument} is no dtype that cupyfuse computes with")
        return DTYPES[argument]
    if isinstance(argument, np.generic):
        return _as_constant(argument.item())
    if isinstance(argument, (complex, slice, dict, torch.device, torch.memory_format, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"an argument of type {type(argument).__name__} cannot be part of a chain")
    return argument
