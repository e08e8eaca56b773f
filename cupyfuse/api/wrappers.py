"""Library functions that wrap the user's: context managers, dispatchers, decorators."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import arrays
from .code import is_generated, is_library_module
from .members import contents_of, user_bases


class Held(NamedTuple):
    """The user's objects that a library function holds.

    Attributes
    ----------
    values : list of (str, object)
        Functions, classes, modules, objects of the user's classes and arrays, by name.
    probes : list of (dict or cell, name, object)
        The variables on the way to them, with what they held.
    containers : list of (list, dict or set)
        The containers on the way to them.
    """

    values: list[tuple[str, Any]]
    probes: list[tuple[Any, str, Any]]
    containers: list[Any]


# Functions that hold nothing of the user's, by package; a library does not change what its own functions hold.
_holding_nothing: weakref.WeakKeyDictionary[types.FunctionType, set[str]] = weakref.WeakKeyDictionary()


def held_by(function: types.FunctionType, package: str, is_library: Callable[[types.FunctionType], bool]) -> Held:
    """Search the closure and attributes of a library function for objects of the user's.

    `package` is the user's, and `is_library` tells whether a function is a library's.
    """
    if not (function.__closure__ or function.__dict__) or package in _holding_nothing.get(function, ()):
        return Held([], [], [])
    values: list[tuple[str, Any]] = []
    probes: list[tuple[Any, str, Any]] = []
    containers: list[Any] = []
    seen: set[int] = set()
    # (name, value, whether an object of the library holds it); the search goes into one level of such objects.
    waiting: list[tuple[str, Any, bool]] = [(function.__name__, function, False)]

    def push(name: str, children: Iterable[tuple[str, Any]], within_object: bool) -> None:
        waiting.extend((name + label, value, within_object) for label, value in children)

    while waiting:
        name, value, within_object = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, types.MappingProxyType)):
            containers.append(value)
            push(name, ((f"[{i}]", held) for i, pair in enumerate(value.items()) for held in pair), within_object)
        elif isinstance(value, (tuple, list, set, frozenset)):
            containers.append(value)
            push(name, ((f"[{i}]", held) for i, held in enumerate(value)), within_object)
        elif isinstance(value, types.MethodType):
            push(name, [("", value.__func__), (".__self__", value.__self__)], within_object)
        elif type(value) is functools.partial:
            push(name, [("", value.func), (".args", value.args), (".keywords", value.keywords)], within_object)
        elif isinstance(value, types.FunctionType) and is_library(value):
            variables = _variables(value)
            probes += variables
            push(name, ((f".{label}", held) for _, label, held in variables), within_object)
        elif _is_user_defined(value, package):
            values.append((name, value))
        elif not within_object and _has_plain_dict(value):
            variables = [(vars(value), label, held) for label, held in vars(value).items()]
            probes += variables
            push(name, ((f".{label}", held) for _, label, held in variables), True)
    if not values:
        _holding_nothing.setdefault(function, set()).add(package)
        return Held([], [], [])
    return Held(values, probes, containers)


def _variables(function: types.FunctionType) -> list[tuple[Any, str, Any]]:
    """Return the closure cells and attributes of a function: (cell or dict, name, value)."""
    found: list[tuple[Any, str, Any]] = []
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        found.append((cell, name, contents_of(cell)))
    return found + [(function.__dict__, name, value) for name, value in function.__dict__.items()]


def _has_plain_dict(value: Any) -> bool:
    return type(getattr(value, "__dict__", None)) is dict and not isinstance(value, types.ModuleType)


def _is_user_defined(value: Any, package: str) -> bool:
    """Whether a value is an array, or a function, class, module or object that no library defines."""
    if isinstance(value, types.FunctionType):
        return not is_generated(value.__code__)
    if isinstance(value, types.ModuleType):
        return not is_library_module(value, package)
    if isinstance(value, type):
        return bool(user_bases(value, package))
    # An object with `__wrapped__` is a wrapper written in C, such as `functools.lru_cache` returns.
    return bool(user_bases(type(value), package)) or arrays.is_array(value) or hasattr(value, "__wrapped__")
