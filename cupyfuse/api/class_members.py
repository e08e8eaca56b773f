"""The part of a signature that code reads of classes and modules: their attributes, added once all else is."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Any

from .class_calls import GET_CLASSES, OF_CALLS, may_call
from .code import CLASS
from .constants import Identity
from .members import MISSING, find_members, user_bases
from .signature import Signature
from .variables import is_library_function


def add_members(signature: Signature) -> bool:
    """Add the attributes that functions read of all classes and modules met, and what the methods among them read.

    Returns
    -------
    bool
        Whether all that was added is immutable, as for `stable`.
    """
    if not signature.classes and not signature.wrappers and not any(map(vars, signature.functions)):
        return True
    signature.stable = True
    count = -1
    while count != (count := sum(_progress(signature)) + len(signature.classes) + len(signature.functions)):
        for owner, name in list(signature.classes.items()):
            _add_members_of(signature, owner, name)
        for function in (*signature.functions, *signature.wrappers):
            _add_members_of(signature, function, getattr(function, "__qualname__", str(function)))
    stable, signature.stable = signature.stable, False
    return stable


def _add_members_of(signature: Signature, owner: Any, name: str) -> None:
    """Add the attributes that functions read of a class, a module or a function, but those that were added before."""
    progress = _progress(signature)
    if signature.visited.get(id(owner)) == progress:
        return
    signature.visited[id(owner)] = progress
    found = find_members(owner, signature.attributes, signature.package)
    of_calls = isinstance(owner, type) and any(label in OF_CALLS for _, label, _ in found)
    if of_calls and not may_call(owner, signature):
        found = [m for m in found if m[1] not in OF_CALLS]
    if isinstance(owner, abc.ABCMeta):
        signature.key.append(abc.get_cache_token())  # changes when a class is registered as a virtual subclass
    if not isinstance(owner, type):
        signature.probes += [(vars(owner), label, value) for _, label, value in found]  # variables may be rebound
    elif type(owner) is not type and user_bases(type(owner), signature.package):
        signature.add_class(type(owner), f"type({name})")  # a metaclass of the user's, which class statements call
    new = [m for m in found if m[2] is not MISSING and (id(m[0]), m[1]) not in signature.members]
    signature.members.update((id(holder), label) for holder, label, _ in new)
    for _, label, value in new:
        if label == "__match_args__" and type(value) is tuple:
            signature.attributes.update(value)  # which `case Class(a, b)` reads
        elif label in GET_CLASSES and not is_library_function(value, signature.package):
            signature.attributes.add(CLASS)
    if getattr(owner, "_is_protocol", False):
        signature.attributes.update(_members_of_protocol(user_bases(owner, signature.package)))
    parts = [((Identity(holder), label), f"{name}.{label}", value) for holder, label, value in new]
    signature.add_compared_only(parts, f"{type(owner).__name__} {getattr(owner, '__name__', name)}", name)


def _progress(signature: Signature) -> tuple[int, ...]:
    """Return how much was read so far of what tells which attributes of classes code reaches."""
    return len(signature.attributes), len(signature.strings), len(signature.class_values)


def _members_of_protocol(bases: Iterable[type]) -> Iterator[str]:
    """Yield the names of the members of protocols that `isinstance` reads; special methods are read anyway."""
    for base in bases:
        for name in (*vars(base), *getattr(base, "__annotations__", ())):
            if not name.startswith(("__", "_abc_", "_is_")):
                yield name
