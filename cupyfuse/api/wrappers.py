"""Functions of libraries that wrap the user's: context managers, dispatchers, decorators."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import arrays
from .code import is_generated, is_library_module
from .members import written_bases


class Held(NamedTuple):
    """What a function of a library holds that is none of the library's.

    Attributes
    ----------
    values : list of (str, object)
        By name: functions, classes, modules, objects of the user's classes, arrays.
    probes : list of (dict or cell, name, object)
        The cells and attributes that may lead there, and what they held.
    containers : list of (list, dict or set)
        Those that may lead there.
    """

    values: list[tuple[str, Any]]
    probes: list[tuple[Any, str, Any]]
    containers: list[Any]


# Functions that hold nothing of the user's: a library does not change what its own functions hold.
_holding_nothing: weakref.WeakKeyDictionary[types.FunctionType, set[str]] = weakref.WeakKeyDictionary()


def held_by(function: types.FunctionType, package: str, is_library: Callable[[types.FunctionType], bool]) -> Held:
    """Find what a function of a library holds in its closure and attributes that is none of the library's."""
    if not (function.__closure__ or function.__dict__) or package in _holding_nothing.get(function, ()):
        return Held([], [], [])
    values: list[tuple[str, Any]] = []
    probes: list[tuple[Any, str, Any]] = []
    containers: list[Any] = []
    seen: set[int] = set()
    # By name, and whether an object of the library holds them: objects that it holds in turn are not looked into.
    waiting: list[tuple[str, Any, bool]] = [(function.__name__, function, False)]

    def look(name: str, found: Iterable[tuple[str, Any]], within: bool) -> None:
        waiting.extend((name + label, value, within) for label, value in found)

    while waiting:
        name, value, within = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (dict, types.MappingProxyType)):
            containers.append(value)
            look(name, ((f"[{i}]", held) for i, pair in enumerate(value.items()) for held in pair), within)
        elif isinstance(value, (tuple, list, set, frozenset)):
            containers.append(value)
            look(name, ((f"[{i}]", held) for i, held in enumerate(value)), within)
        elif isinstance(value, types.MethodType):
            look(name, [("", value.__func__), (".__self__", value.__self__)], within)
        elif type(value) is functools.partial:
            look(name, [("", value.func), (".args", value.args), (".keywords", value.keywords)], within)
        elif isinstance(value, types.FunctionType) and is_library(value):
            variables = _variables(value)
            probes += variables
            look(name, ((f".{label}", held) for _, label, held in variables), within)
        elif _is_users(value, package):
            values.append((name, value))
        elif not within and type(getattr(value, "__dict__", None)) is dict and not isinstance(value, types.ModuleType):
            variables = [(vars(value), label, held) for label, held in vars(value).items()]
            probes += variables
            look(name, ((f".{label}", held) for _, label, held in variables), True)
    if not values:
        _holding_nothing.setdefault(function, set()).add(package)
        return Held([], [], [])
    return Held(values, probes, containers)


def _variables(function: types.FunctionType) -> list[tuple[Any, str, Any]]:
    """Return the closure cells and attributes of a function: (cell or dict, name, value)."""
    found: list[tuple[Any, str, Any]] = []
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found.append((cell, name, cell.cell_contents))
    return found + [(function.__dict__, name, value) for name, value in function.__dict__.items()]


def _is_users(value: Any, package: str) -> bool:
    if isinstance(value, types.FunctionType):
        return not is_generated(value.__code__)
    if isinstance(value, types.ModuleType):
        return not is_library_module(value, package)
    if isinstance(value, type):
        return bool(written_bases(value, package))
    # An object with `__wrapped__` is a wrapper in C, as that of `functools.lru_cache`.
    return bool(written_bases(type(value), package)) or arrays.is_array(value) or hasattr(value, "__wrapped__")
