"""Copies of module trees: what copied modules hold beside their submodules, and outside of their dictionaries."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections import deque
from typing import Any

import torch


def slots(module: Any) -> dict[str, Any]:
    """What a module holds outside of its dictionary."""
    names = [n for c in type(module).__mro__ for n, v in vars(c).items() if inspect.ismemberdescriptor(v)]
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def exchanged(value: Any, done: dict[int, Any], depth: int = 0) -> Any:
    """What refers to original modules, made to refer to the fused ones; else the same object."""
    if isinstance(value, torch.nn.Module):
        return done.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = done.get(id(value.__self__), value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if depth > 8:
        return value
    if isinstance(value, functools.partial):
        parts = [exchanged(v, done, depth + 1) for v in (value.func, value.args, value.keywords)]
        same = all(a is b for a, b in zip(parts, (value.func, value.args, value.keywords), strict=True))
        return value if same else functools.partial(parts[0], *parts[1], **parts[2])
    if not isinstance(value, (list, tuple, dict, set, deque)):
        return value
    held = list(value.values()) if isinstance(value, dict) else list(value)
    made = [exchanged(v, done, depth + 1) for v in held]
    if all(a is b for a, b in zip(made, held, strict=True)):
        return value
    if isinstance(value, tuple):
        return value._make(made) if hasattr(value, "_make") else tuple(made)
    copied: Any = copy.copy(value)
    copied.clear()
    copied.update(zip(value, made, strict=True)) if isinstance(value, dict) else None
    copied.update(made) if isinstance(value, set) else None
    copied.extend(made) if isinstance(value, (list, deque)) else None
    return copied
