"""Objects that hold others: how they come apart into children, and are made again of other ones."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from .constants import nested_key
from .registry import registration


class Structure(NamedTuple):
    """An object that holds others.

    Attributes
    ----------
    key : hashable
        All that tells it apart from another with the same children.
    labels : list of str
        What follows the object's name in that of each child.
    children : list
    rebuild : callable
        Makes the object again, of a list of other children.
    mutable : bool
        Whether a function may put other children into it.
    """

    key: Hashable
    labels: list[str]
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]
    mutable: bool = True


def structure_of(value: Any) -> Structure | None:
    """Take an object apart; None if it is none of the types that can be."""
    cls = type(value)
    if cls is tuple or cls is list:
        return Structure((cls, len(value)), [f"[{i}]" for i in range(len(value))], list(value), cls, cls is list)
    if cls is dict:
        keys = tuple(map(nested_key, value))
        if None in keys:
            strange = next(k for k in value if nested_key(k) is None)
            raise TypeError(f"a dict with a key of type {type(strange).__name__}: expected constants as keys")
        labels = list(value)
        return Structure(
            (cls, keys), [f"[{k!r}]" for k in labels], list(value.values()), lambda c: dict(zip(labels, c, strict=True))
        )
    known = registration(cls)
    if known is not None:
        children, constants = known.flatten(value)
        children = list(children)
        key = nested_key(constants)
        if key is None:
            try:
                hash(constants)
            except TypeError as error:
                raise TypeError(f"the constants of a registered {cls.__name__} are not hashable: {error}") from error
            key = (type(constants), constants)
        unflatten = known.unflatten
        numbers = [f"[{i}]" for i in range(len(children))]
        return Structure((cls, key), numbers, children, lambda c: unflatten(constants, c), known.mutable)
    if is_namedtuple(cls):
        return Structure((cls,), [f".{k}" for k in value._fields], list(value), lambda c: tuple.__new__(cls, c), False)
    if is_dataclass(cls):
        attributes = dict(_attributes(value))
        names = list(attributes)
        return Structure(
            (cls, tuple(names)), [f".{k}" for k in names], list(attributes.values()), lambda c: _remade(cls, names, c)
        )
    if cls is functools.partial:
        if vars(value):
            raise TypeError("a functools.partial with attributes of its own: expected none")
        count, keywords = len(value.args), list(value.keywords)
        return Structure(
            (cls, count, tuple(keywords)),
            [".func", *(f".args[{i}]" for i in range(count)), *(f".keywords[{k!r}]" for k in keywords)],
            [value.func, *value.args, *value.keywords.values()],
            lambda c: functools.partial(c[0], *c[1 : count + 1], **dict(zip(keywords, c[count + 1 :], strict=True))),
            False,
        )
    if cls is types.MethodType:
        return Structure(
            (cls,), [".__func__", ".__self__"], [value.__func__, value.__self__], lambda c: _bound(*c), False
        )
    return None


def _bound(function: Any, instance: Any) -> Any:
    return types.MethodType(function, instance)


def is_namedtuple(cls: type) -> bool:
    """Whether objects of a type are tuples with names and nothing else."""
    return cls.__bases__ == (tuple,) and hasattr(cls, "_fields") and not cls.__dictoffset__


def is_dataclass(cls: type) -> bool:
    """Whether objects of a type are dataclasses whose attributes are all that they hold."""
    return dataclasses.is_dataclass(cls) and not issubclass(cls, _WITH_VALUES)


# Types whose objects have a value beside their attributes.
_WITH_VALUES = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray, np.generic, type)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__[:-1]:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                yield name, slot.__get__(value)


def _remade(cls: type, names: list[str], children: list[Any]) -> Any:
    """Make a dataclass of its attributes, without its `__init__`, which may compute others."""
    made: Any = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)
    return made
