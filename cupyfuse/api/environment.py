"""What a fused function reads around it: recognised by identity in each call, and read anew where it can change."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

from .code import is_own, written_bases
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
    """What the last call found, where it changes only if a variable gets another value."""

    key: _Hashed
    leaves: list[Any]
    names: list[str]
    spaces: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[Any, Any]]
    attributes: set[str]
    captured: bool

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
        return True


def _found(own: Signature) -> _Found:
    spaces = [probe for probe in own.probes if isinstance(probe[0], dict)]
    cells = [(cell, value) for cell, _, value in own.probes if not isinstance(cell, dict)]
    return _Found(_Hashed(tuple(own.key)), own.leaves, own.names, spaces, cells, own.attributes, own.captured)


class _Classes(NamedTuple):
    """What code that names certain attributes finds in classes, where it changes only if they get other ones."""

    key: _Hashed
    attributes: set[str]
    variables: _Found
    orders: list[tuple[type, tuple[type, ...]]]
    spaces: list[tuple[Any, list[int], list[Any]]]

    def is_current(self, attributes: set[str]) -> bool:
        if attributes is not self.attributes or not self.variables.is_current():
            return False
        for cls, order in self.orders:
            if cls.__mro__ is not order:
                return False
        return all(list(map(id, space.values())) == numbers for space, numbers, _ in self.spaces)


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
        self._classes: dict[tuple[type, ...], _Classes | None] = {}
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
                self._add_classes(signature, found.attributes)
                return
        signature.finish()

    def _add_classes(self, signature: Signature, attributes: set[str]) -> None:
        """Add what code that names these attributes finds in the classes met."""
        classes = tuple(signature.classes)
        known = self._classes.get(classes)
        if known is None or not known.is_current(attributes):
            if known is None and classes in self._classes:
                signature.attributes |= attributes
                signature.finish()
                return
            known = self._classes[classes] = self._look_at(signature.classes, attributes)
            if len(self._classes) > _CLASSES:
                self._classes = {}
            if known is None:
                self._add_classes(signature, attributes)
                return
        signature.key.append(known.key)
        signature.stable = False

    def _look_at(self, classes: dict[type, str], attributes: set[str]) -> _Classes | None:
        """Look at all that code finds in classes; None if some of it can change."""
        own = self.signature()
        own.attributes, own.classes = set(attributes), dict(classes)
        if not own.finish() or own.originals:
            return None
        bases = [b for cls in own.classes for b in written_bases(cls, self.package)]
        spaces = [(vars(b), list(map(id, vars(b).values())), list(vars(b).values())) for b in bases]
        key = _Hashed(tuple(own.key))
        return _Classes(key, attributes, _found(own), [(cls, cls.__mro__) for cls in own.classes], spaces)

    def _look(self) -> _Found | None:
        """Look at all variables; None if some hold what can change."""
        own = self.signature()
        self._add(own)
        own.finish()
        if not own.stable or own.originals:
            return None
        return _found(own)

    def _add(self, signature: Signature) -> None:
        if isinstance(self.function, types.FunctionType):
            signature.add_function(self.function, "fn", defaults=False)
        else:
            signature.add_by_value(self.function, "fn")
