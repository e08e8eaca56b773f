"""Whether the variables around functions still hold the objects that were read: one generated expression."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ..generated import Constants, define
from .members import MISSING, contents_of, user_bases
from .signature import Signature


def current_check(own: Signature, package: str, read: Collection[tuple[int, str]] = ()) -> Callable[[], bool]:
    """Return a function that tells whether all that was added to a stable signature still holds the same objects.

    But for variables that each call reads, given by the id of what holds each, and its name.
    The objects are held, so that their ids stay theirs.
    """
    constants = Constants(MISSING=MISSING, contents_of=contents_of, items_of=_items, cache_token=abc.get_cache_token)
    changes = " or ".join(_changes(own, package, read, constants.name)) or "False"
    lines = ["try:", f"    return not ({changes})"]
    lines += ["except (KeyError, ValueError):", "    return False"]  # a variable is gone, or a cell was emptied
    return define("is_current", "", lines, constants)


def _changes(
    own: Signature, package: str, read: Collection[tuple[int, str]], name: Callable[[Any], str]
) -> Iterator[str]:
    """Yield an expression for each change."""
    for holder, label, value in own.probes:
        if (id(holder), label) in read:
            continue
        variable = name(holder)
        if not isinstance(holder, dict):  # a closure cell
            was_filled = f"contents_of({variable}) is not MISSING"
            yield was_filled if value is MISSING else f"{variable}.cell_contents is not {name(value)}"
        elif value is MISSING:
            yield f"{name(label)} in {variable}"
        else:
            yield f"{variable}[{name(label)}] is not {name(value)}"
    for function in own.functions:
        variable, attributes = name(function), list(function.__dict__)
        yield f"{variable}.__code__ is not {name(function.__code__)}"
        yield f"{variable}.__defaults__ is not {name(function.__defaults__)}"
        yield f"{variable}.__kwdefaults__ is not {name(function.__kwdefaults__)}"
        yield f"list({variable}.__dict__) != {name(attributes)}" if attributes else f"{variable}.__dict__"
    for wrapper in own.wrappers:  # fused and cached functions
        yield f"list(vars({name(wrapper)})) != {name(list(vars(wrapper)))}"
    classes = [c for c in own.classes if isinstance(c, type)]
    for cls in classes:
        yield f"{name(cls)}.__mro__ is not {name(cls.__mro__)}"
    if any(isinstance(c, abc.ABCMeta) for c in classes):
        # It changes when a virtual subclass is registered.
        yield f"cache_token() != {name(abc.get_cache_token())}"
    for namespace in (vars(base) for c in classes for base in user_bases(c, package)):
        variable, held = name(namespace), list(namespace.values())
        name(held)  # to hold them
        yield f"list(map(id, {variable}.values())) != {name(list(map(id, held)))}"
        yield f"list({variable}) != {name(list(namespace))}"
    for container in own.containers:  # in library functions
        held = _items(container)
        name(held)  # to hold them
        yield f"list(map(id, items_of({name(container)}))) != {name(list(map(id, held)))}"


def _items(container: Any) -> list[Any]:
    """List the items of a container; of a dict its keys and values."""
    return [*container, *container.values()] if hasattr(container, "values") else list(container)
