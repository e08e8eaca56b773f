"""Copy modules: attributes in slot_attributes, and references to other modules within attributes."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections import deque
from typing import Any

import torch


def slot_attributes(module: Any) -> dict[str, Any]:
    """Return the attributes of a module that are in `__slots__`, not in its dictionary."""
    names = [n for c in type(module).__mro__ for n, v in vars(c).items() if inspect.ismemberdescriptor(v)]
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def replace_modules(value: Any, copies: dict[int, Any], depth: int = 0) -> Any:
    """Replace modules in nested containers, methods and partials by their copies; return the same object if none is."""
    if isinstance(value, torch.nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = copies.get(id(value.__self__), value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if depth > 8:
        return value
    if isinstance(value, functools.partial):
        parts = [replace_modules(v, copies, depth + 1) for v in (value.func, value.args, value.keywords)]
        same = all(a is b for a, b in zip(parts, (value.func, value.args, value.keywords), strict=True))
        return value if same else functools.partial(parts[0], *parts[1], **parts[2])
    if not isinstance(value, (list, tuple, dict, set, deque)):
        return value
    held = [*value, *value.values()] if isinstance(value, dict) else list(value)
    replaced = [replace_modules(v, copies, depth + 1) for v in held]
    if all(a is b for a, b in zip(replaced, held, strict=True)):
        return value
    if isinstance(value, tuple):
        return value._make(replaced) if hasattr(value, "_make") else tuple(replaced)
    copied: Any = copy.copy(value)
    copied.clear()
    copied.update(zip(replaced[: len(value)], replaced[len(value) :], strict=True)) if isinstance(value, dict) else None
    copied.update(replaced) if isinstance(value, set) else None
    copied.extend(replaced) if isinstance(value, (list, deque)) else None
    return copied
