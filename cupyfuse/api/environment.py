"""What a fused function reads around it: recognised by identity in each call, and read anew where it can change."""

from __future__ import annotations

import abc
import types
from typing import Any, NamedTuple

from .code import is_own
from .members import written_bases
from .signature import MISSING, Signature

_CLASSES = 64  # combinations of classes that are remembered


class _Hashed:
    """A key that is hashed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is _Hashed and self._parts == other._parts)


class _Found(NamedTuple):
    """What was found around functions and in classes, where it changes only if another object is put in its place.

    Attributes
    ----------
    key : _Hashed
    leaves, names : list
        The arrays.
    spaces, cells : list of tuple
        Variables, and what they held.
    functions : list of tuple
        Functions with their code and default values.
    orders, members : list of tuple
        Classes with their bases, and with the numbers of their attributes, whose values are kept too.
    containers : list of tuple
        Lists, dicts and sets in functions of libraries, with the numbers of what they hold, which is kept too.
    attributes : set of str
        The attributes that the code names.
    classes : dict
        The classes and modules met, by name.
    token : object
        What stands for all that is registered as subclasses of abstract classes; None if none of those was met.
    captured : bool
    """

    key: _Hashed
    leaves: list[Any]
    names: list[str]
    spaces: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[Any, Any]]
    functions: list[tuple[types.FunctionType, types.CodeType, Any, Any]]
    orders: list[tuple[type, tuple[type, ...]]]
    members: list[tuple[Any, list[str], list[int], list[Any]]]
    containers: list[tuple[Any, list[int], list[Any]]]
    attributes: set[str]
    classes: dict[Any, str]
    token: object
    captured: bool

    @classmethod
    def of(cls, own: Signature, package: str) -> _Found:
        """Return what a signature holds, all of it stable."""
        spaces = [probe for probe in own.probes if isinstance(probe[0], dict)]
        cells = [(cell, value) for cell, _, value in own.probes if not isinstance(cell, dict)]
        functions = [(f, f.__code__, f.__defaults__, f.__kwdefaults__) for f in own.functions]
        classes = [c for c in own.classes if isinstance(c, type)]
        orders = [(c, c.__mro__) for c in classes]
        held = [vars(base) for c in classes for base in written_bases(c, package)]
        members = [(space, list(space), list(map(id, space.values())), list(space.values())) for space in held]
        containers = [(c, list(map(id, held)), held) for c in own.containers for held in [_contents(c)]]
        token = abc.get_cache_token() if any(isinstance(c, abc.ABCMeta) for c in classes) else None
        key = _Hashed(tuple(own.key))
        return cls(
            *(key, own.leaves, own.names, spaces, cells, functions, orders, members, containers),
            *(own.attributes, own.classes, token, own.captured),
        )

    def is_current(self) -> bool:
        for space, name, value in self.spaces:
            if space.get(name, MISSING) is not value:
                return False
        try:
            for cell, value in self.cells:
                if cell.cell_contents is not value:
                    return False
        except ValueError:
            return False
        for function, code, defaults, by_name in self.functions:
            if (
                function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not by_name
            ):
                return False
        for cls, order in self.orders:
            if cls.__mro__ is not order:
                return False
        if self.token is not None and self.token != abc.get_cache_token():
            return False
        for space, names, numbers, _ in self.members:
            if list(map(id, space.values())) != numbers or list(space) != names:
                return False
        return all(list(map(id, _contents(container))) == numbers for container, numbers, _ in self.containers)


def _contents(container: Any) -> list[Any]:
    return [*container, *container.values()] if hasattr(container, "values") else list(container)


class Environment:
    """The variables around a function, and around the functions that it calls.

    Parameters
    ----------
    function : callable
    static : frozenset of str
        Names of variables that are compared by hash and equality.
    package : str
        The top-level package of the function, which is not taken as a library.
    """

    def __init__(self, function: Any, static: frozenset[str], package: str):
        self.function, self.static, self.package = function, static, package
        self.is_own = isinstance(function, types.FunctionType) and is_own(function.__code__.co_filename)
        self._found: _Found | None = None
        # By the classes of arguments: what was found around the function then, and in them.
        self._classes: dict[tuple[type, ...], tuple[_Found, _Found | None]] = {}
        self._changes = False  # whether variables hold what can change, so that each call looks at all of them

    def signature(self, specs: bool = False) -> Signature:
        """Return a signature without arguments."""
        return Signature(self.static, self.package, specs)

    def add_to(self, signature: Signature) -> None:
        """Add the variables to the signature of a call."""
        if self.is_own:
            signature.finish()
            return
        found = self._found
        if self._changes or signature.read_functions:  # functions among the arguments may read the same variables
            found = None
        elif found is None or not found.is_current():
            found = self._found = self._look()
            self._changes = found is None
        if found is None:
            self._add(signature)
        else:
            signature.key.append(found.key)
            signature.captured = signature.captured or found.captured
            for leaf, name in zip(found.leaves, found.names, strict=True):
                signature.add(leaf, name)
            if signature.classes:
                self._add_classes(signature, found)
                return
            signature.stable = signature.stable and not found.classes
            return
        signature.finish()

    def _add_classes(self, signature: Signature, around: _Found) -> None:
        """Add what the code finds in the classes of arguments, together with those around the function."""
        classes = tuple(signature.classes)
        before, found = self._classes.get(classes, (None, None))
        if before is not around or (found is not None and not found.is_current()):
            if len(self._classes) >= _CLASSES:
                self._classes = {}
            found = self._look_at(signature.classes, around)
            self._classes[classes] = around, found
        if found is None:
            signature.attributes |= around.attributes
            signature.classes = {**around.classes, **signature.classes}
            signature.finish()
        else:
            signature.key.append(found.key)
            signature.stable = False

    def _look_at(self, classes: dict[type, str], around: _Found) -> _Found | None:
        """Look at all that code finds in classes; None if some of it can change."""
        own = self.signature()
        own.attributes, own.classes = set(around.attributes), {**around.classes, **classes}
        return _Found.of(own, self.package) if own.finish() and not own.originals else None

    def _look(self) -> _Found | None:
        """Look at all variables; None if some hold what can change."""
        own = self.signature()
        self._add(own)
        stable = own.stable
        return _Found.of(own, self.package) if own.finish() and stable and not own.originals else None

    def _add(self, signature: Signature) -> None:
        if isinstance(self.function, types.FunctionType):
            signature.add_function(self.function, "fn", defaults=False)
        else:
            signature.add_by_value(self.function, "fn")
