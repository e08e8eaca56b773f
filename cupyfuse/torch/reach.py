"""What code can read beside its arguments: methods of classes, globals, what closures hold, found from functions."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "cupyfuse", "numpy"}
_UNREAD = ("__init__", "extra_repr", "reset_parameters", "_load_from_state_dict", "_save_to_state_dict")
# What every module has beside what its user gave it.
OWN = {
    "_parameters",
    "_buffers",
    "_modules",
    "_cupyfuse",
    "_non_persistent_buffers_set",
    "_is_full_backward_hook",
    *torch.nn.Module().__dict__,
} - {"training"}
_MOST_DEPTH = 4


def users(thing: Any) -> bool:
    """Whether a class, a function or a module of Python's is a user's rather than a library's."""
    name = getattr(thing, "__name__" if isinstance(thing, types.ModuleType) else "__module__", "")
    return str(name).partition(".")[0] not in _LIBRARIES


def classes(kind: type) -> list[type]:
    """The user's among the classes that a class inherits from."""
    return [c for c in kind.__mro__ if users(c) and "_cupyfuse_original" not in vars(c)]


def functions(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """The functions that can be called through a value."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
        yield from functions(value.__func__, depth)
    elif isinstance(value, (property, functools.cached_property)):
        yield from functions(value.fget if isinstance(value, property) else value.func, depth)
    elif depth < 3 and isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from functions(part, depth + 1)
    elif depth < 3 and isinstance(value, (list, tuple, deque)):
        for part in value:
            yield from functions(part, depth + 1)
    elif depth < 3 and isinstance(value, dict):
        for part in value.values():
            yield from functions(part, depth + 1)
    elif depth < 3 and not isinstance(value, (type, types.ModuleType, torch.Tensor, torch.nn.Module)):
        yield from methods(type(value), depth + 1)


def methods(kind: type, depth: int = 0) -> Iterator[types.FunctionType]:
    """The functions of the user's classes that a class inherits from."""
    for c in classes(kind):
        for name, value in vars(c).items():
            called = name == "__call__" or not (name.startswith("__") or name in _UNREAD)
            if called and not isinstance(value, (list, tuple, dict)):
                yield from functions(value, depth + 1)


def functions_of(module: torch.nn.Module) -> Iterator[types.FunctionType]:
    """The functions that a module's forward can call: its methods, and those in its attributes."""
    yield from methods(type(module))
    for key, value in module.__dict__.items():
        if key not in OWN:
            yield from functions(value)


def reads(found: Iterable[types.FunctionType]) -> list[tuple[Any, str, Any]]:
    """What functions, and those that they call, can read: (owner, key, value).

    The owner is a dictionary of globals, a cell of a closure, or an object with the attribute `key`.
    """
    result: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    seen: set[int] = set()
    waiting = [(function, 0) for function in found]
    while waiting:
        function, depth = waiting.pop()
        if id(function) in seen or depth > _MOST_DEPTH or not users(function):
            continue
        seen.add(id(function))
        names = list(dict.fromkeys(_names(function.__code__)))
        scope = function.__globals__
        entries: list[tuple[Any, str, Any]] = [(scope, name, scope[name]) for name in names if name in scope]
        entries += [(cell, "", content(cell)) for cell in function.__closure__ or ()]
        for owner, key, value in entries:
            if (id(owner), key) in result:
                continue
            result[id(owner), key] = owner, key, value
            waiting += [(inner, depth + 1) for inner in functions(value)]
            if has_members(value) and len(entries) < 1000:
                table = vars(value)
                entries += [(value, name, table[name]) for name in names if name in table]
    return list(result.values())


def has_members(value: Any) -> bool:
    """Whether code reads values through attributes of a value."""
    if isinstance(value, (types.ModuleType, type)):
        return users(value)
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, types.FunctionType, functools.partial))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def content(cell: Any) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return types
