"""Functions of libraries that wrap the user's: context managers, dispatchers, decorators."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
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
        The cells and attributes that lead there, and what they held.
    mutable : bool
        Whether lists, dicts or sets are among what leads there.
    """

    values: list[tuple[str, Any]]
    probes: list[tuple[Any, str, Any]]
    mutable: bool


# Functions that hold nothing of the user's: a library does not change what its own functions hold.
_holding_nothing: weakref.WeakKeyDictionary[types.FunctionType, set[str]] = weakref.WeakKeyDictionary()


def held_by(function: types.FunctionType, package: str, is_library: Callable[[types.FunctionType], bool]) -> Held:
    """Find what a function of a library holds in its closure and attributes that is none of the library's."""
    if not (function.__closure__ or function.__dict__) or package in _holding_nothing.get(function, ()):
        return Held([], [], False)
    values: list[tuple[str, Any]] = []
    probes: list[tuple[Any, str, Any]] = []
    mutable = False
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [(function.__name__, function)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType) and is_library(value):
            for cell, label in zip(value.__closure__ or (), value.__code__.co_freevars, strict=True):
                try:
                    probes.append((cell, label, cell.cell_contents))
                except ValueError:
                    continue  # not assigned yet
            probes += [(value.__dict__, label, held) for label, held in value.__dict__.items()]
            waiting += [(f"{name}.{label}", held) for _, label, held in probes if id(held) not in seen]
        elif isinstance(value, (dict, types.MappingProxyType)):
            mutable = True
            waiting += [(f"{name}[{i}]", held) for i, pair in enumerate(value.items()) for held in pair]
        elif isinstance(value, (tuple, list, set, frozenset)):
            mutable = mutable or isinstance(value, (list, set))
            waiting += [(f"{name}[{i}]", held) for i, held in enumerate(value)]
        elif isinstance(value, types.MethodType):
            waiting += [(name, value.__func__), (f"{name}.__self__", value.__self__)]
        elif type(value) is functools.partial:
            waiting += [(name, value.func), (f"{name}.args", value.args), (f"{name}.keywords", value.keywords)]
        elif _is_users(value, package):
            values.append((name, value))
    if not values:
        _holding_nothing.setdefault(function, set()).add(package)
        return Held([], [], False)
    return Held(values, probes, mutable)


def _is_users(value: Any, package: str) -> bool:
    if isinstance(value, types.FunctionType):
        return not is_generated(value.__code__)
    if isinstance(value, types.ModuleType):
        return not is_library_module(value, package)
    if isinstance(value, type):
        return bool(written_bases(value, package))
    # An object with `__wrapped__` is a wrapper in C, as that of `functools.lru_cache`.
    return bool(written_bases(type(value), package)) or arrays.is_array(value) or hasattr(value, "__wrapped__")
