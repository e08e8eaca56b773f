"""Whether the variables around functions still hold the objects that were read: one generated expression."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ..generated import Constants, define
from .members import MISSING, contents_of, user_bases
from .signature import Signature


def current_check(
    own: Signature, package: str, read: Collection[tuple[int, str]] = (), values: str = ""
) -> Callable[..., bool]:
    """Return a function that tells whether all that was added to a stable signature still holds the same objects.

    But for variables that each call reads, given by the id of what holds each, and its name: these may hold anything,
    or have to hold the items of a tuple that the function takes, if that is given a name.

    The objects are held, so that their ids stay theirs.
    """
    constants = Constants(MISSING=MISSING, contents_of=contents_of, items_of=_items, cache_token=abc.get_cache_token)
    changes = " or ".join(_changes(own, package, read, values, constants.name)) or "False"
    lines = ["try:", f"    return not ({changes})"]
    lines += ["except (KeyError, ValueError):", "    return False"]  # a variable is gone, or a cell was emptied
    return define("is_current", values, lines, constants)


def reader(variables: Iterable[tuple[Any, str]]) -> Callable[[], tuple[Any, ...]]:
    """Return a function that reads variables, given by what holds each, and its name."""
    constants = Constants()
    read = [variable(constants.name(holder), holder, label) for holder, label in variables]
    return define("read", "", [f"return ({''.join(f'{r}, ' for r in read)})"], constants)


def variable(name: str, holder: Any, label: str) -> str:
    """Return the expression of a variable in a dict of globals or a closure cell, which has a name."""
    return f"{name}[{label!r}]" if isinstance(holder, dict) else f"{name}.cell_contents"


def _changes(
    own: Signature, package: str, read: Collection[tuple[int, str]], values: str, name: Callable[[Any], str]
) -> Iterator[str]:
    """Yield an expression for each change."""
    for holder, label, value in own.probes:
        held = name(holder)
        if (id(holder), label) in read:
            if values:
                yield f"{variable(held, holder, label)} is not {values}[{list(read).index((id(holder), label))}]"
            continue
        if value is not MISSING:
            yield f"{variable(held, holder, label)} is not {name(value)}"
        elif isinstance(holder, dict):
            yield f"{name(label)} in {held}"
        else:
            yield f"contents_of({held}) is not MISSING"
    for function in own.functions:
        called, attributes = name(function), list(function.__dict__)
        yield f"{called}.__code__ is not {name(function.__code__)}"
        yield f"{called}.__defaults__ is not {name(function.__defaults__)}"
        yield f"{called}.__kwdefaults__ is not {name(function.__kwdefaults__)}"
        yield f"list({called}.__dict__) != {name(attributes)}" if attributes else f"{called}.__dict__"
    for wrapper in own.wrappers:  # fused and cached functions
        yield f"list(vars({name(wrapper)})) != {name(list(vars(wrapper)))}"
    classes = [c for c in own.classes if isinstance(c, type)]
    for cls in classes:
        yield f"{name(cls)}.__mro__ is not {name(cls.__mro__)}"
    if any(isinstance(c, abc.ABCMeta) for c in classes):
        # It changes when a virtual subclass is registered.
        yield f"cache_token() != {name(abc.get_cache_token())}"
    for namespace in (vars(base) for c in classes for base in user_bases(c, package)):
        members, held_there = name(namespace), list(namespace.values())
        name(held_there)  # to hold them
        yield f"list(map(id, {members}.values())) != {name(list(map(id, held_there)))}"
        yield f"list({members}) != {name(list(namespace))}"
    for container in own.containers:  # in library functions
        items = _items(container)
        name(items)  # to hold them
        yield f"list(map(id, items_of({name(container)}))) != {name(list(map(id, items)))}"


def _items(container: Any) -> list[Any]:
    """List the items of a container; of a dict its keys and values."""
    return [*container, *container.values()] if hasattr(container, "values") else list(container)
