"""Attributes that code reads of the user's classes and modules: which classes hold them, and their values."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Collection, Iterator, Set
from typing import Any

from .code import is_generated, is_library_module

MISSING = object()  # in place of the value of an attribute or variable that does not exist
HEAP_TYPE = 1 << 9  # the flag of a class that Python code defines


def contents_of(cell: types.CellType) -> Any:
    """Return what a closure cell holds; MISSING where its variable is not assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def is_library_class(cls: type, package: str) -> bool:
    """Whether a class is defined by a library.

    Its `__module__` alone does not tell: a class from `make_dataclass` may name the library's module, and one from
    `exec` names `builtins`. So the module has to hold the class by its qualified name.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or not is_library_module(module, package):
        return False
    found: Any = module
    for name in cls.__qualname__.split("."):
        if name == "<locals>":
            return found is not None  # a class local to a function of the library
        found = getattr(found, name, None)
    return found is cls


def user_bases(cls: type, package: str) -> list[Any]:
    """Return the user-defined classes in the method resolution order of a class, and the members of an enum."""
    bases: list[Any] = [b for b in cls.__mro__[:-1] if b.__flags__ & HEAP_TYPE and not is_library_class(b, package)]
    if bases and isinstance(cls, enum.EnumMeta):
        bases += {id(m): m for m in (*cls.__members__.values(), *cls._value2member_map_.values())}.values()
    return bases


def find_members(owner: Any, names: Set[str], package: str) -> list[tuple[Any, str, Any]]:
    """List the attributes of a class, a module or a function that code reading these names can reach.

    Each is (holder, name, value). Names that a module lacks are listed too, as MISSING.
    """
    if isinstance(owner, type):
        return [
            (base, name, value) for base in user_bases(owner, package) for name, value in named_members(base, names)
        ]
    namespace = vars(owner)
    reached = {*names, "__getattr__"} if isinstance(owner, types.ModuleType) else names & namespace.keys()
    return [(owner, name, namespace.get(name, MISSING)) for name in sorted(reached)]


def named_members(holder: Any, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class or enum member that code reading these names can reach, with their names.

    Of properties and the like it is their functions. Special methods are reached without being named.
    """
    for name, attribute in list(vars(holder).items()):
        special = name[:2] == "__"
        if not special and name not in names and not (name == "_value_" and "value" in names):
            continue
        value = _unwrap_descriptor(attribute)
        if special and name not in names and type(value) is not types.FunctionType:
            continue
        if not _is_builtin_descriptor(value) and not (
            type(value) is types.FunctionType and is_generated(value.__code__)
        ):
            yield name, value


def _unwrap_descriptor(attribute: Any) -> Any:
    """Return the function of a property, or of a static or class method; other attributes unchanged."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    if isinstance(attribute, (property, types.DynamicClassAttribute)):
        return attribute.fget
    return attribute.func if isinstance(attribute, functools.cached_property) else attribute


def _is_builtin_descriptor(attribute: Any) -> bool:
    """Whether a class attribute is what Python puts there for a slot or a namedtuple's field."""
    cls = type(attribute)
    return (
        hasattr(cls, "__get__")
        and cls.__module__ in ("builtins", "collections", "_collections")
        and cls not in (types.FunctionType, types.MethodType)
    )
