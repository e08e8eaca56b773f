"""What a fused function reads around it: recognised by identity in each call, and read anew where it can change."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

from .code import is_own
from .signature import MISSING, Signature


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
        self._is_empty = isinstance(function, types.FunctionType) and is_own(function.__code__.co_filename)
        self._found: _Found | None = None
        self._changes = False  # whether variables hold what can change, so that each call looks at all of them

    def signature(self, specs: bool = False) -> Signature:
        """Return a signature without arguments."""
        return Signature(self.static, self.package, specs)

    def add_to(self, signature: Signature) -> None:
        """Add the variables to the signature of a call."""
        if self._is_empty:
            return signature.finish()
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
            if signature.classes:
                signature.attributes |= found.attributes
            for leaf, name in zip(found.leaves, found.names, strict=True):
                signature.add(leaf, name)
        signature.finish()

    def _look(self) -> _Found | None:
        """Look at all variables; None if some hold what can change."""
        own = self.signature()
        self._add(own)
        own.finish()
        if not own.stable or own.originals:
            return None
        spaces = [probe for probe in own.probes if isinstance(probe[0], dict)]
        cells = [(cell, value) for cell, _, value in own.probes if not isinstance(cell, dict)]
        return _Found(_Hashed(tuple(own.key)), own.leaves, own.names, spaces, cells, own.attributes, own.captured)

    def _add(self, signature: Signature) -> None:
        if isinstance(self.function, types.FunctionType):
            signature.add_function(self.function, "fn", defaults=False)
        else:
            signature.add_by_value(self.function, "fn")
