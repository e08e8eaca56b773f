"""The variables around a function: default values, closure cells, globals."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any

from . import arrays
from .code import is_library, is_library_module, reads_of
from .constants import constant_key
from .members import contents_of
from .objects import is_plain
from .registry import registration
from .structures import DEEPEST, NAMESPACES, is_dataclass, structure_of

CachedFunction = type(functools.lru_cache(lambda: None))


def is_library_function(function: types.FunctionType, package: str) -> bool:
    """Whether a function belongs to the standard library, or to an installed package other than `package`."""
    return is_library(function.__code__.co_filename, function.__globals__.get("__name__") or "", package)


def read_by_attribute(value: Any, package: str) -> bool:
    """Whether a variable cannot be compared as a whole, but only the attributes that code reads of it."""
    return has_attributes(value, package) and not (type(value) in NAMESPACES and is_known(value, package))


def has_attributes(value: Any, package: str) -> bool:
    """Whether code may read attributes of an object that are no part of its type: of a module, or the user's object."""
    if isinstance(value, types.ModuleType):
        return not is_library_module(value, package)
    if (
        isinstance(value, (type, types.FunctionType, tuple, list, dict, set, collections.deque))
        or constant_key(value) is not None
    ):
        return False
    cls = type(value)
    if arrays.is_array(value) or cls in (types.MethodType, functools.partial, CachedFunction):
        return False
    return registration(cls) is None and not is_dataclass(cls) and not is_plain(cls, package)


def is_known(value: Any, package: str, within: tuple[int, ...] = ()) -> bool:
    """Whether a signature can have all of a value: constants, arrays, functions, classes, objects of the user's classes
    and containers of these.

    `within` are the ids of the containers that hold it.
    """
    if isinstance(value, (type, types.FunctionType, types.ModuleType, CachedFunction)) or arrays.is_array(value):
        return True
    if constant_key(value) is not None or is_plain(type(value), package):
        return True
    try:
        structure = structure_of(value)
    except TypeError:  # the container holds what none may
        return False
    if structure is None or id(value) in within or len(within) > DEEPEST:
        return False
    return all(is_known(child, package, (*within, id(value))) for child in structure.children)


def defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the default values of parameters, with a name for each."""
    for i, value in enumerate(function.__defaults__ or ()):
        yield f"__defaults__[{i}]", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield f"__kwdefaults__[{name!r}]", value


def variables_of(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the closure cells and globals that a function's code reads: (cell or dict of globals, name, value).

    The value of a closure cell that is not assigned is MISSING.
    """
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        yield cell, name, contents_of(cell)
    namespace = function.__globals__
    for name in reads_of(function.__code__).globals:
        if name in namespace:
            yield namespace, name, namespace[name]
