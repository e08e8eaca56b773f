"""Containers: flatten them into children, and rebuild them from other children."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .constants import nested_key
from .registry import Registration, registration


class Structure(NamedTuple):
    """A container, flattened.

    Attributes
    ----------
    key : hashable
        Type and all else that tells it apart from another with the same children.
    labels : sequence of str
        Of each child the suffix to the container's name, such as "[0]" or ".weight".
    children : list
    rebuild : callable
        Returns such a container of a list of other children.
    mutable : bool
        Whether a function may replace children in place.
    """

    key: Hashable
    labels: Sequence[str]
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]
    mutable: bool = True


def structure_of(value: Any) -> Structure | None:
    """Flatten a container of Python's, a dataclass, partial, bound method or registered object; None for others.

    Raises
    ------
    TypeError
        A key of a dict or an element of a set is not a constant, constants of a registered object are not hashable, a
        defaultdict has a factory that is no built-in type, or a partial has attributes.
    """
    cls = type(value)
    if cls is tuple or cls is list:
        return Structure((cls, len(value)), [f"[{i}]" for i in range(len(value))], list(value), cls, cls is list)
    if cls is dict:
        return _structure_of_dict(value)
    known = registration(cls)
    if known is not None:
        return _structure_of_registered(value, known)
    if cls in _DICTS:
        return _structure_of_dict(value)
    if cls is set:
        key = _keys_of(value, "a set with an element")
        return Structure((cls, key), [], [], lambda c: value.copy())
    if cls is collections.deque:
        labels = [f"[{i}]" for i in range(len(value))]
        return Structure((cls, len(value), value.maxlen), labels, list(value), lambda c: cls(c, value.maxlen))
    if cls in NAMESPACES:
        names = tuple(vars(value))
        children = list(vars(value).values())
        rebuild = functools.partial(_namespace, cls, names)
        return Structure((cls, names), _labels_of(".{}", names), children, rebuild)
    if is_namedtuple(cls):
        fields = _labels_of(".{}", value._fields)
        return Structure((cls,), fields, list(tuple.__iter__(value)), lambda c: tuple.__new__(cls, c), False)
    if is_dataclass(cls):
        attributes = dict(attributes_of(value))
        names = tuple(attributes)
        rebuild = functools.partial(_dataclass, cls, names)
        return Structure((cls, names), _labels_of(".{}", names), list(attributes.values()), rebuild)
    if cls is functools.partial:
        return _structure_of_partial(value)
    if cls is types.MethodType:
        labels = [".__func__", ".__self__"]
        return Structure((cls,), labels, [value.__func__, value.__self__], lambda c: types.MethodType(*c), False)
    return None


_ONLY_STRINGS = {str}
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
CONTAINERS_OF_KEYS = (*_DICTS, set)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
DEEPEST = 100  # levels of containers


def _keys_of(values: Iterable[Any], where: str) -> tuple[Hashable, ...]:
    """Return the keys of constants, in their order, or raise if one is no constant."""
    if set(map(type, values)) == _ONLY_STRINGS:
        return tuple(values)
    key = tuple(map(nested_key, values))
    if None in key:
        unknown = next(v for v in values if nested_key(v) is None)
        raise TypeError(f"{where} of type {type(unknown).__name__}: expected constants")
    return key


@functools.lru_cache(maxsize=4096)
def _labels_of(form: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of children by their names; cached, since each call of a fused function needs them.

    Strings alone: 1, True and 1.0 would share an entry.
    """
    return tuple(form.format(name) for name in names)


def _structure_of_dict(value: Any) -> Structure:
    """Flatten a dict, or one of the standard library's kinds of it."""
    cls: Any = type(value)
    key = _keys_of(value, "a dict with a key")
    names = tuple(value)
    labels = _labels_of("[{!r}]", names) if set(map(type, names)) == _ONLY_STRINGS else [f"[{k!r}]" for k in names]
    if cls is collections.defaultdict:
        factory = value.default_factory
        if factory is not None and not (isinstance(factory, type) and factory.__module__ == "builtins"):
            raise TypeError("a defaultdict that makes its values by a function: expected a built-in type, such as list")
        kind: Any = (cls, factory)
        rebuild: Any = functools.partial(cls, factory)
    else:
        kind, rebuild = cls, cls
    return Structure((kind, key), labels, list(value.values()), lambda c: rebuild(dict(zip(names, c, strict=True))))


def _structure_of_registered(value: Any, known: Registration) -> Structure:
    """Take an object of a registered type apart; its constants are part of the key."""
    cls = type(value)
    flattened = known.flatten(value)
    if not isinstance(flattened, (tuple, list)) or len(flattened) != 2 or not isinstance(flattened[0], Iterable):
        got = type(flattened).__name__
        raise TypeError(f"flatten of a registered {cls.__name__}: expected a pair (children, constants), got {got}")
    children, constants = list(flattened[0]), flattened[1]
    key = nested_key(constants)
    if key is None:
        try:
            hash(constants)
        except TypeError as error:
            raise TypeError(f"the constants of a registered {cls.__name__} are not hashable: {error}") from error
        key = (type(constants), constants)
    labels = [f"[{i}]" for i in range(len(children))]
    unflatten = functools.partial(known.unflatten, constants)
    rebuild = (lambda c: with_attributes_of(value, unflatten(c))) if known.own else unflatten
    return Structure((cls, key), labels, children, rebuild, known.mutable)


def with_attributes_of(original: Any, rebuilt: Any) -> Any:
    """Return a rebuilt fused or cached function with the attributes that the original was given."""
    vars(rebuilt).update({n: v for n, v in vars(original).items() if n not in vars(rebuilt)})
    return rebuilt


def _structure_of_partial(value: functools.partial[Any]) -> Structure:
    """Take a `functools.partial` apart into its function and what it binds."""
    if vars(value):
        raise TypeError("a functools.partial with attributes of its own: expected none")
    count, keywords = len(value.args), list(value.keywords)
    return Structure(
        (functools.partial, count, tuple(keywords)),
        [".func", *(f".args[{i}]" for i in range(count)), *(f".keywords[{k!r}]" for k in keywords)],
        [value.func, *value.args, *value.keywords.values()],
        lambda c: functools.partial(c[0], *c[1 : count + 1], **dict(zip(keywords, c[count + 1 :], strict=True))),
        bool(keywords),  # a dict
    )


def is_record(cls: type) -> bool:
    """Whether a type is dict, or a namedtuple or dataclass whose objects are no enum members, specs or arrays.

    `Signature` flattens such objects at once, without looking for what else they could be.
    """
    if cls is dict:
        return True
    found = _records.get(cls)
    if found is None:
        other = issubclass(cls, (enum.Enum, arrays.Spec)) or hasattr(cls, "__dlpack__")
        found = _records[cls] = not other and (is_namedtuple(cls) or is_dataclass(cls))
    return found


_records: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_namedtuple(cls: type) -> bool:
    """Whether a type is a namedtuple without further attributes."""
    return cls.__bases__ == (tuple,) and hasattr(cls, "_fields") and not cls.__dictoffset__


def is_dataclass(cls: type) -> bool:
    """Whether a type is a dataclass whose attributes are all that its objects hold."""
    return dataclasses.is_dataclass(cls) and not holds_value(cls)


def holds_value(cls: type) -> bool:
    """Whether objects of a type have a value beside their attributes."""
    return issubclass(cls, _VALUE_TYPES)


_VALUE_TYPES = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset, np.ndarray, np.generic, type)


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, in its `__dict__` and in slots."""
    yield from getattr(value, "__dict__", {}).items()
    for name, slot in slots_of(type(value)):
        try:  # not `hasattr`, which would call a `__getattr__` of the class
            found = slot.__get__(value)
        except AttributeError:  # without a value
            continue
        yield name, found


def slots_of(cls: type) -> list[tuple[str, Any]]:
    """Return the name and the descriptor of each slot of a class and of its bases."""
    found = _slots.get(cls)
    if found is None:
        members = {n: m for base in reversed(cls.__mro__[:-1]) for n, m in vars(base).items()}
        found = _slots[cls] = [(n, m) for n, m in members.items() if isinstance(m, types.MemberDescriptorType)]
    return found


def hides_attributes(cls: type) -> bool:
    """Whether `attributes_of` misses attributes: those of slots under a name that a subclass has again, or all.

    The latter where a class defines its `__dict__` itself.
    """
    members = [(name, member) for base in cls.__mro__[:-1] for name, member in vars(base).items()]
    slots = [name for name, member in members if isinstance(member, types.MemberDescriptorType)]
    own_dicts = [m for name, m in members if name == "__dict__" and not isinstance(m, types.GetSetDescriptorType)]
    return bool(own_dicts) or len(slots) > len(slots_of(cls))


_slots: weakref.WeakKeyDictionary[type, list[tuple[str, Any]]] = weakref.WeakKeyDictionary()


def _namespace(cls: type, names: tuple[str, ...], children: list[Any]) -> Any:
    return cls(**dict(zip(names, children, strict=True)))


def _dataclass(cls: type, names: tuple[str, ...], children: list[Any]) -> Any:
    """Build a dataclass from its attributes, without its `__init__`, which may compute others."""
    made: Any = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)
    return made
