"""What code can read beside its arguments: methods of classes, globals, what closures hold, found from functions."""

from __future__ import annotations

import dis
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
_MOST_FUNCTIONS = 1000
_DEFAULTS = ("__defaults__", "__kwdefaults__")


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


def asks_for_types(module: torch.nn.Module) -> bool:
    """Whether a module's forward, or user code that it calls by name, asks for the type of anything but itself."""
    table = {name: value for c in reversed(classes(type(module))) for name, value in vars(c).items()}
    table |= {name: value for name, value in module.__dict__.items() if name not in OWN}
    start = getattr(module, "_cupyfuse_original", type(module)).forward
    waiting = [*functions(module.__dict__.get("forward", start))]
    seen: set[types.FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function in seen or len(seen) > _MOST_FUNCTIONS or not users(function):
            continue
        seen.add(function)
        if "type" not in function.__globals__ and any(map(_asks, _codes(function.__code__))):
            return True
        for name in _names(function.__code__):
            for value in (table.get(name), function.__globals__.get(name)):
                waiting += functions(value) if value is not None and not isinstance(value, type) else ()
        for cell in function.__closure__ or ():
            value = content(cell)
            waiting += functions(value) if value is not types and not isinstance(value, type) else ()
    return False


def _asks(code: types.CodeType) -> bool:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL")]
    for step, following in zip(steps, [*steps[1:], *steps[-1:]], strict=True):
        own = following.opname.startswith("LOAD_FAST") and following.argval == "self"
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval == "type" and not own:
            return True
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval == "__class__":
            return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def reads(found: Iterable[types.FunctionType]) -> list[tuple[Any, str, Any]]:
    """What functions, and those that they call, can read: (owner, key, value).

    The owner is a dictionary of globals, a cell of a closure, an object with the attribute `key`, or a function, whose
    defaults it has.
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
        entries += [(function, name, getattr(function, name)) for name in _DEFAULTS if getattr(function, name)]
        for owner, key, value in entries:
            if (id(owner), key) in result:
                continue
            result[id(owner), key] = owner, key, value
            waiting += [(inner, depth + 1) for inner in functions(value)]
            if has_members(value) and len(entries) < 1000:
                for place in (value, *classes(value if isinstance(value, type) else type(value))):
                    table = getattr(place, "__dict__", {})
                    entries += [(place, name, table[name]) for name in names if name in table]
    return list(result.values())


def has_members(value: Any) -> bool:
    """Whether code reads values through attributes of a value."""
    if isinstance(value, (types.ModuleType, type)):
        return users(value)
    return hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, types.FunctionType, functools.partial))


def _names(code: types.CodeType) -> Iterator[str]:
    for each in _codes(code):
        yield from each.co_names


def content(cell: Any) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return types
