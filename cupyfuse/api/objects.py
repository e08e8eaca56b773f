"""Objects of the user's own classes: the attributes that code may read of them, and objects that stand for them.

A signature gets such an object's type and the names of its attributes where it meets it. Their values follow once all
code is known that the call reaches: of those alone that this code names. What else an object holds, such as a counter,
a logger or a lock, makes no difference to a call; while it is traced an `Unread` has its place, of which every use is
an error.
"""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
import enum
import io
import types
import typing
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from .around import Role
from .members import HEAP_TYPE, is_library_class
from .structures import attributes_of, hides_attributes, holds_value, slots_of

# Bases that hold nothing, and methods by which libraries take an object for an array; one with `__del__` would be
# finalized with each object that stands for it.
_BASES_OF_ANY = {object, abc.ABC, typing.Generic, typing.Protocol}
_BASES_OF_ANY |= {found for found in vars(collections.abc).values() if isinstance(found, type)}
_SPECIAL = ("__array__", "__array_interface__", "__cuda_array_interface__", "__dlpack__", "__del__")
_plain: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()


def is_plain(cls: type, package: str) -> bool:
    """Whether objects of a class hold attributes and nothing else, which code of the user's alone reads.

    So it is where the user's own `class` statements define it and its bases. Dataclasses are not counted: methods that
    Python generates for them read all attributes.
    """
    if type(cls) is not type and type(cls).__eq__ is not type.__eq__:
        return False  # classes that keys could not tell apart
    known = _plain.get(cls)
    if known is None:
        known = _plain[cls] = {}
    found = known.get(package)
    if found is None:
        found = known[package] = _is_plain(cls, package)
    return found


def _is_plain(cls: type, package: str) -> bool:
    if cls is object or holds_value(cls) or issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls):
        return False
    if any(hasattr(cls, name) for name in _SPECIAL) or cls.__getattribute__ is not object.__getattribute__:
        return False
    for base in cls.__mro__:
        if base not in _BASES_OF_ANY and (not base.__flags__ & HEAP_TYPE or is_library_class(base, package)):
            return False
    if hides_attributes(cls):
        return False
    try:
        object.__new__(cls)
    except TypeError:  # a base that is written in C has memory of its own
        return False
    return True


class Span(NamedTuple):
    """Where the arrays and the numbers of an attribute or a variable begin and end among those of the signature."""

    first_leaf: int
    last_leaf: int
    first_number: int
    last_number: int


@dataclass(eq=False)
class HeldObject:
    """An object in a signature.

    Attributes
    ----------
    value : object
    name, subject : str
        What it is called, and what kind of thing that is, for messages.
    number : int
        Its number among those of the signature.
    role : Role
        What numbers in it are.
    scope : hashable
        The function around which it was met, for `Changes`.
    rebuilt : bool
        Whether another object stands for it while the function is traced; else the trace reads it itself.
    spans : dict
        Those of the attributes that were added, by name.
    """

    value: Any
    name: str
    subject: str
    number: int
    role: Role
    scope: Hashable
    rebuilt: bool
    spans: dict[str, Span] = field(default_factory=dict)


def empty_like(value: Any) -> Any:
    """Make an object of the same class, without attributes."""
    return object.__new__(type(value))


def set_attribute(made: Any, name: str, value: Any) -> None:
    """Set an attribute where `attributes_of` reads it, whatever the class makes of the name."""
    slot = dict(slots_of(type(made))).get(name)
    if slot is None:
        made.__dict__[name] = value
    else:
        slot.__set__(made, value)


def is_singular(value: Any) -> bool:
    """Whether code may tell a value from others by `is` alone: None, booleans, and sentinels made by `object()`."""
    return value is None or value is True or value is False or type(value) is object


def delete_attribute(value: Any, name: str) -> None:
    """Delete an attribute where `attributes_of` reads it."""
    slot = dict(slots_of(type(value))).get(name)
    if slot is None:
        del value.__dict__[name]
    else:
        slot.__delete__(value)


def names_of(value: Any) -> tuple[str, ...]:
    """Return the names of an object's attributes."""
    return tuple(name for name, _ in attributes_of(value))


class Unread:
    """Stands for an attribute that a signature does not have, while a function is traced: each use is an error.

    `message` is the error's.
    """

    __slots__ = ("_message",)

    def __init__(self, message: str):
        object.__setattr__(self, "_message", message)


def _refuse(self: Unread, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError(object.__getattribute__(self, "_message"))


# The special methods of these types are all that Python calls on its own; NumPy takes what it does not know for an
# object, and calls these.
_TYPES = (int, complex, str, dict, set, list, io.StringIO, types.FunctionType, types.CoroutineType)
_NO_USES = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__class_getitem__", "__del__"}
for _name in {name for cls in _TYPES for name in dir(cls)} - _NO_USES:
    if _name.startswith("__") and any(callable(getattr(cls, _name, None)) for cls in _TYPES):
        setattr(Unread, _name, _refuse)
for _name in ("matmul", "rmatmul", "imatmul", "deepcopy", "copy"):
    setattr(Unread, f"__{_name}__", _refuse)
