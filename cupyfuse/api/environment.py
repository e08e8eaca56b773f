"""The variables around a fused function: checked for changes in each call, and read again where they changed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

from .around import Changes
from .class_members import add_members
from .code import CLASS, is_own
from .current import current_check, reader
from .signature import Signature, Taken

_MOST_CLASSES = 64  # combinations of argument classes whose snapshots are kept


class _HashedKey:
    """A tuple as a key, whose hash is computed once."""

    __slots__ = ("_hash", "_parts")

    def __init__(self, parts: tuple[Any, ...]):
        self._parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (type(other) is _HashedKey and self._parts == other._parts)


class _Read:
    """Reads the variables that are numbers which change from call to call; `own` is the signature that has them."""

    def __init__(self, own: Signature, package: str):
        variables = own.changing_variables
        places = (own.places[a.span.first_number] for a in variables.values())
        self._positions = [place for place in places if place is not None]
        self._read = reader([(a.holder, a.label) for a in variables.values()])
        self._others_are_current = current_check(own, package, variables)
        self._are_current = current_check(own, package, variables, "values")

    def __call__(self, before: Sequence[float]) -> tuple[tuple[float, ...], Callable[[], bool]] | None:
        """Return the numbers now, and what tells whether these are current; None where anything else has changed."""
        if not self._others_are_current():
            return None
        try:
            found = self._read()
        except (KeyError, ValueError):  # a variable is gone, or a cell was emptied
            return None
        numbers = list(before)
        for position, value in zip(self._positions, found, strict=True):
            if type(value) is not type(before[position]):
                return None
            numbers[position] = value
        return tuple(numbers), functools.partial(self._are_current, found)


class Snapshot(NamedTuple):
    """Immutable values read around functions and in classes, with all that shows whether they are current.

    Attributes
    ----------
    key : _HashedKey
    taken : Taken
        Their signature, with the arrays among them and the numbers that change from call to call.
    given : tuple
        These arrays and numbers.
    attributes, strings : set of str
        The names of all attributes that the code reads, and constants that could be such names.
    classes, class_values : dict
        The classes and modules met, with their names, and those of the classes that were met as values.
    is_current : callable
        Tells whether every variable, function, class and container still holds the same objects.
    read : callable or None
        Reads the variables that are such numbers again; where nothing else changes, another snapshot follows from them.
    """

    key: _HashedKey
    taken: Taken
    given: tuple[Any, ...]
    attributes: set[str]
    strings: set[str]
    classes: dict[Any, str]
    class_values: dict[Any, str]
    is_current: Callable[[], bool]
    read: _Read | None

    @property
    def attribute_names(self) -> set[str]:
        """The names by which the code may read attributes of an object."""
        return self.attributes | self.strings

    @classmethod
    def of(cls, own: Signature, package: str, before: Snapshot | None) -> Snapshot:
        """Take the snapshot of a stable signature; `before` is the one that it replaces."""
        check, read = current_check(own, package), _Read(own, package) if own.changing_variables else None
        key = _HashedKey(tuple(own.key))
        if before is not None and before.key == key:
            key = before.key  # found to be equal in less time
        taken, met = Taken(own, key, tuple(own.numbers)), (own.classes, own.class_values)
        return cls(key, taken, taken.given, own.attributes, own.strings, *met, check, read)

    def renewed(self) -> Snapshot | None:
        """Return the snapshot of now, if only variables that are numbers have changed, else None."""
        found = None if self.read is None else self.read(self.taken.numbers)
        if found is None:
            return None
        numbers, is_current = found
        taken = self.taken._replace(numbers=numbers)
        return self._replace(taken=taken, given=taken.given, is_current=is_current)


class Environment:
    """The variables around a function, and around the functions that it calls.

    Parameters
    ----------
    function : callable
    static : frozenset of str
        Names of variables and parameters that are compared by hash and equality.
    package : str
        The top-level package of the function, whose code is not taken as a library's.
    parameters : sequence of str
        The names of the function's own.
    """

    def __init__(self, function: Any, static: frozenset[str], package: str, parameters: Sequence[str]):
        self.function, self.static, self.package, self._parameters = function, static, package, parameters
        self._static_is_read = static.issubset(parameters)
        self.is_own = isinstance(function, types.FunctionType) and is_own(function.__code__.co_filename)
        self._snapshot: Snapshot | None = None
        # By the classes of arguments, and those that are arguments: the key of the variables at that time, and a
        # snapshot that covers the classes.
        self._class_snapshots: dict[tuple[Any, ...], tuple[_HashedKey, Snapshot | None]] = {}
        self._changes = Changes()
        self._mutable = False  # whether variables hold mutable values, so that each call reads all of them

    def new_signature(self, specs: bool = False) -> Signature:
        """Return a signature without arguments."""
        return Signature(self.static, self.package, specs, self._changes)

    def add_to(self, signature: Signature) -> None:
        """Add to a signature, after all arguments, the variables around the function and what it reads of classes."""
        self._add_all(signature)
        if not self._static_is_read:
            self._check_static(signature.static_read)
            self._static_is_read = True

    def _check_static(self, read: Set[str]) -> None:
        """Raise if `static` names what is neither a parameter nor a variable that the function reads in a call."""
        for name in sorted(self.static.difference(self._parameters, read)):
            function = getattr(self.function, "__qualname__", self.function)
            parameters = ", ".join(self._parameters) or "it has none"
            raise TypeError(
                f"static: {name!r} is neither a parameter of {function} ({parameters}) nor a variable that it or a "
                "function that it calls reads"
            )

    def _add_all(self, signature: Signature) -> None:
        if signature.objects:
            self.add_attributes(signature)
        snapshot, of_classes = self.current_snapshot(), None
        if snapshot is not None and signature.classes and not signature.has_functions:
            of_classes = self.snapshot_of_classes(signature.classes, signature.class_values, snapshot)
            if of_classes is None:  # what the classes hold is read in each call, and shows what is read of objects
                signature.attributes |= snapshot.attributes
                signature.strings |= snapshot.strings
                signature.classes = {**snapshot.classes, **signature.classes}
                signature.class_values = {**snapshot.class_values, **signature.class_values}
                _add_members_and_attributes(signature)
        # Functions among the arguments may read the same variables, which a snapshot would add a second time.
        if snapshot is None or signature.has_functions:
            if not self.is_own:
                self._add_variables(signature)
            _add_members_and_attributes(signature)
            return
        signature.add_taken(snapshot.taken)
        if of_classes is not None:
            signature.key.append(of_classes.key)

    def add_attributes(self, signature: Signature, first: int = 0) -> None:
        """Add what the code may read of objects among the arguments, where snapshots tell which code that is.

        `add_to` adds what is left. `first` is the number of the first object.
        """
        while not (self.is_own or signature.has_functions):
            around = self.current_snapshot()
            if around is None:
                return
            of_classes = self.snapshot_of_classes(signature.classes, signature.class_values, around)
            if of_classes is None or not signature.add_attributes(of_classes.attribute_names, first):
                return

    def asks_for_types(self, signature: Signature) -> bool:
        """Whether code may ask for exact types, which traced numbers do not have: by the builtin `type`."""
        return any(
            CLASS in read for read in (signature.attributes, *(s.attributes for s in self._snapshots(signature)))
        )

    def kept_functions(self, signature: Signature) -> list[types.FunctionType]:
        """Return the functions that a trace of a call runs without rebuilding them, such as methods of classes."""
        own = [signature, *(found.taken.own for found in self._snapshots(signature))]
        return [function for found in own for function in found.kept]

    def _snapshots(self, signature: Signature) -> list[Snapshot]:
        """Return the snapshots that a call's signature goes with: of the variables, and of classes."""
        around = self.current_snapshot()
        of_classes = around and self.snapshot_of_classes(signature.classes, signature.class_values, around)
        return [found for found in (around, of_classes) if found is not None]

    def current_snapshot(self) -> Snapshot | None:
        """Return the snapshot of the variables.

        None if each call has to read all of them, and for functions of this package, which read none.
        """
        if self._mutable or self.is_own:
            return None
        snapshot = self._snapshot  # which another thread may replace by an older one
        if snapshot is None or not snapshot.is_current():
            renewed = None if snapshot is None else snapshot.renewed()
            if renewed is None:
                own = self.new_signature()
                self._add_variables(own)
                renewed = self._take_snapshot(own, snapshot) if own.stable else None
                self._mutable = renewed is None
            snapshot = self._snapshot = renewed
        return snapshot

    def _take_snapshot(self, own: Signature, before: Snapshot | None = None) -> Snapshot | None:
        """Return the snapshot of a signature and of the members of its classes; None if some are mutable."""
        return Snapshot.of(own, self.package, before) if add_members(own) and not own.originals else None

    def snapshot_of_classes(
        self, classes: dict[Any, str], class_values: dict[Any, str], around: Snapshot
    ) -> Snapshot | None:
        """Return what the code reads of classes among the arguments, together with those met around the function.

        None if some of it is mutable, or an array of another library. `classes` maps classes and modules to their names
        in error messages, `class_values` those of the classes that are values; `around` is the current snapshot of the
        variables.
        """
        key = (*classes, None, *class_values)
        before, snapshot = self._class_snapshots.get(key, (None, None))
        if before != around.key or (snapshot is not None and not snapshot.is_current()):
            if len(self._class_snapshots) >= _MOST_CLASSES:
                self._class_snapshots = {}
            own = self.new_signature()
            own.attributes, own.strings = set(around.attributes), set(around.strings)
            own.classes = {**around.classes, **classes}
            own.class_values = {**around.class_values, **class_values}
            snapshot = self._take_snapshot(own)
            self._class_snapshots[key] = around.key, snapshot
        return snapshot

    def _add_variables(self, signature: Signature) -> None:
        if isinstance(self.function, types.FunctionType):
            signature.add_function(self.function, "fn", defaults=False)
        else:
            signature.add_function_object(self.function, "fn")


def _add_members_and_attributes(signature: Signature) -> None:
    """Add what the code reads of classes, and of objects: those that classes hold are met here."""
    add_members(signature)
    while signature.add_attributes(signature.attributes | signature.strings):
        add_members(signature)
