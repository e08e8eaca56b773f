"""Kinds of arguments: what of a call's arguments a record depends on, as a key, and as a quick test."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .modes import PLAIN

_CONSTANTS = (int, bool, str, float, type(None), torch.dtype, torch.device)
_SCOPE = {
    "strided": torch.strided,
    "graded": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "autocast": torch._C._is_any_autocast_enabled,
    "alias": torch._C._is_alias_of,
}


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Hashable]:
    """The tensors among the arguments, and a key of everything else that a record depends on; None if there is none."""
    key: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    if torch._C._is_any_autocast_enabled():
        key += [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")]
    leaves: Any = args
    if kwargs or not all(type(a) in PLAIN for a in args):
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key.append(spec)
    tensors = []
    for value in leaves:
        kind = type(value)
        if kind in PLAIN:
            if value.layout is not torch.strided or value.is_nested or value.__dict__:
                return [], None
            tensors.append(value)
            key += (kind, value.shape, value.stride(), value.dtype, value.requires_grad, value.is_neg(), value.device)
        elif isinstance(value, _CONSTANTS):
            key += (kind, value.hex() if isinstance(value, float) else value)
        else:
            return [], None
    if len(tensors) > 1:
        # Which are the same, and which share memory: what is written through one is then read through another.
        for names in ([id(t) for t in tensors], [t.untyped_storage()._cdata for t in tensors]):
            key.append(tuple(map(names.index, names)))
    return tensors, tuple(key)


def quick_test(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[tuple[Any, ...]], bool] | None:
    """Whether positional arguments are of the kind of these: compiled, for what is asked at every call.

    None where that is not simple: other arguments than a few tensors that share no memory, autocast. It may raise
    `RuntimeError` for tensors without strides.
    """
    simple = not kwargs and 0 < len(args) <= 4 and all(type(a) in PLAIN for a in args)
    if not simple or torch._C._is_any_autocast_enabled():
        return None
    if len({a.untyped_storage()._cdata for a in args}) < len(args):
        return None
    scope: dict[str, Any] = dict(_SCOPE)
    terms = [
        f"len(args) == {len(args)}",
        f"graded() is {torch.is_grad_enabled()}",
        f"inference() is {torch.is_inference_mode_enabled()}",
        "not autocast()",
    ]
    for k, a in enumerate(args):
        facts = {"shape": a.shape, "stride()": a.stride(), "dtype": a.dtype, "device": a.device}
        scope[f"kind{k}"] = type(a)
        terms += [f"type(args[{k}]) is kind{k}", f"args[{k}].layout is strided", f"not args[{k}].is_nested"]
        terms.append(f"not args[{k}].__dict__")
        terms += [f"args[{k}].requires_grad is {a.requires_grad}", f"args[{k}].is_neg() is {a.is_neg()}"]
        for n, (read, value) in enumerate(facts.items()):
            scope[f"v{k}_{n}"] = value
            terms.append(f"args[{k}].{read} == v{k}_{n}")
        terms += [f"not alias(args[{k}], args[{other}])" for other in range(k)]
    exec(f"def fits(args):\n    return {' and '.join(terms)}\n", scope)
    fits: Callable[[tuple[Any, ...]], bool] = scope["fits"]
    return fits
