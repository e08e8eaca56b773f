"""Walk over values: the arrays in them, and a key of everything else."""

from __future__ import annotations

import abc
import builtins
import itertools
import types
import typing
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from ..trace import TracedNumber, Tracer
from ..trace.numpy import replacement_of
from . import arrays
from .around import Changes, Role
from .code import ANY, is_library_module
from .constants import NUMBERS, Identity, constant_key, enums_in, may_change, value_key
from .objects import HeldObject, Span, is_plain, is_singular, names_of
from .refusals import describe_refusal
from .registry import is_own_type, registration
from .structures import DEEPEST, attributes_of, is_dataclass, is_namedtuple, is_record, structure_of
from .variables import CachedFunction, is_known

_IMMUTABLE = (bool, str, type(None))
_TYPES: dict[type, Hashable] = {cls: cls for cls in NUMBERS}
_ARGUMENT, _AROUND = Role.ARGUMENT, Role.AROUND
_NO_PLACES: frozenset[int] = frozenset()


class TracedArgument(Exception):
    """An argument is traced: the call is inlined into the trace of another fused function."""


class Walk(abc.ABC):
    """The arrays in values, and a key of everything else. What functions read is `Signature`'s to add.

    Attributes
    ----------
    leaves, names : list
        The arrays, and what they are called.
    key : list of hashable
        Everything else that a trace can read, but the values of float and integer arguments.
    exporters : list
        For each leaf the function that exports results to its library, or None.
    originals : dict
        The caller's own arrays of other libraries, by position of the leaf that was imported from each.
    numbers : list of float or int
        The numbers of the call: float and integer arguments, and those around functions that change from call to call.
    places : list of int or None
        Of each number that a trace meets its position among these, None if its value belongs to the key.
    changing : frozenset of int
        The positions of those around functions.
    stable : bool
        Whether all that was added is immutable, so that it changes only where a variable is bound to another object.
    opaque : bool
        Whether some of it neither `current_check` nor generated code can compare (`match_writer.py`).
    captured : bool
        Whether variables around functions hold arrays, mutable containers, or functions that traces replace: tracing
        has to rebuild the functions.
    wrappers : list of object
        The fused and cached functions that were added, which may have attributes of their own.
    objects : list of HeldObject
        The objects of the user's classes that were met, in order.
    classes : dict
        The classes and modules met, with their names.
    class_values : dict
        Those of the classes that were met as values, which code may call, not as types of values alone.
    package : str
        The top-level package of the function, whose code is not taken as a library's.
    """

    # fmt: off
    __slots__ = (
        "_active", "_changes", "_compared_only", "_held", "_reads_itself", "_role", "_scope", "_specs", "_subject",
        "captured", "changing", "class_values", "classes", "exporters", "key", "leaves", "names", "numbers", "objects",
        "opaque", "originals", "package", "places", "stable", "wrappers",
    )
    # fmt: on

    def __init__(self, package: str, specs: bool, changes: Changes):
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.key: list[Hashable] = []
        self.exporters: list[Any] = []
        self.originals: dict[int, Any] = {}
        self.numbers: list[float] = []
        self.places: list[int | None] = []
        self.changing = _NO_PLACES
        self.stable = True
        self.opaque = False
        self.captured = False
        self.wrappers: list[Any] = []
        self.objects: list[HeldObject] = []
        self.classes: dict[Any, str] = {}
        self.class_values: dict[Any, str] = {}
        self.package, self._specs = package, specs
        self._role = _ARGUMENT  # of the numbers that are added
        self._changes = changes
        self._scope: Hashable = None  # the function around which numbers are added: its code, and which one of that
        # Whether tracing reads what is added itself, instead of rebuilding it: what classes and wrappers hold, where
        # cached functions are refused, and attributes of modules.
        self._compared_only = self._reads_itself = False
        self._subject = "argument"  # of error messages
        self._active: set[int] = set()  # containers whose children are being added
        self._held: dict[tuple[int, bool], HeldObject] = {}  # `objects`, by id and whether they are rebuilt

    @abc.abstractmethod
    def add_function(self, function: types.FunctionType, name: str, defaults: bool = True) -> None:
        """Add a function, and what its code reads."""

    @abc.abstractmethod
    def add_compared_only(self, parts: Sequence[tuple[Hashable, str, Any]], holder: str, name: str) -> None:
        """Add values that tracing compares but does not rebuild, so that arrays in them are an error."""

    def add(self, value: Any, name: str) -> None:
        """Add a value called `name`, and all that it holds."""
        cls = type(value)
        if cls is np.ndarray or cls is arrays.CUPY_ARRAY:
            self.leaves.append(value)
            self.names.append(name)
            self.exporters.append(None)
            place = np.ndarray if cls is np.ndarray else value.data.device_id
            self.key.append((place, value.shape, value.dtype, value.strides))
        elif cls in _IMMUTABLE:
            self.key.append((cls, value))
        elif cls in NUMBERS:
            if self._role is not _ARGUMENT:
                self._add_other_number(value, name)
            else:
                self.key.append(_TYPES[cls])
                self.places.append(len(self.numbers))
                self.numbers.append(value)
        elif cls is tuple or cls is list:
            self.stable = self.stable and cls is tuple
            self.key.append((cls, len(value)))
            self._add_children(value, name, [f"[{i}]" for i in range(len(value))], value)
        elif is_record(cls):
            self._add_container(value, name)
        elif is_plain(cls, self.package) and registration(cls) is None:
            self._add_object(value, name)
        else:
            self._add_uncommon(value, name)

    def _add_other_number(self, value: float, name: str) -> None:
        """Add a number that is no argument: its value belongs to the key, unless it changes around a function."""
        key = type(value), value_key(value)
        if self._role is _AROUND and self._changes.note((self._scope, name), key):
            self.key.append(_TYPES[type(value)])
            self.captured = True
            self.changing |= {len(self.numbers)}
            self.places.append(len(self.numbers))
            self.numbers.append(value)
            return
        self.key.append(key)
        if not (self._compared_only or self._reads_itself):
            self.places.append(None)

    def _add_container(self, value: Any, name: str) -> None:
        """Add a container of one of the types that `structure_of` knows."""
        cls = type(value)
        try:
            structure = structure_of(value)
        except TypeError as error:
            raise TypeError(f"{self._subject} {name!r}: {error}") from error
        if structure is None:
            raise TypeError(f"{self._subject} {name!r}: {describe_refusal(value, name)}")
        self.stable = self.stable and not structure.mutable
        self.key.append(structure.key)
        if issubclass(cls, (dict, set)):
            for key in value:
                if type(key) is not str:
                    self._add_enums_in(key, name)
        elif is_namedtuple(cls) or is_dataclass(cls) or registration(cls):
            self.classes.setdefault(cls, name)
        if is_own_type(cls):
            self.wrappers.append(value)
        self._add_children(value, name, structure.labels, structure.children)

    def _add_children(self, value: Any, name: str, labels: Iterable[str], children: Iterable[Any]) -> None:
        """Add the children of a container called `name`; labels are their suffixes to it.

        A container must not contain itself. A fused function may: `add_function` adds each function once.
        """
        if (id(value) in self._active and not is_own_type(type(value))) or len(self._active) > DEEPEST:
            found = f"a {type(value).__name__} that contains itself, or is nested more than {DEEPEST} levels deep"
            raise TypeError(f"{self._subject} {name!r}: {found}")
        self._active.add(id(value))
        for label, child in zip(labels, children):  # noqa: B905 (strict takes longer)
            self.add(child, name + label)
        self._active.discard(id(value))

    def _add_object(self, value: Any, name: str) -> None:
        """Add an object of the user's own class: its type, and which attributes it has; see `add_attributes`."""
        rebuilt = not (self._compared_only or self._reads_itself)
        held = self._held.get((id(value), rebuilt))
        if held is not None:
            self.key.append(("object again", held.number))
            return
        other = self._held.get((id(value), not rebuilt))
        if other is not None:
            self.key.append(("same object", other.number))
        self.stable, self.captured = False, True
        held = HeldObject(value, name, self._subject, len(self.objects), self._role, self._scope, rebuilt)
        self._held[id(value), rebuilt] = held
        self.objects.append(held)
        self.classes.setdefault(type(value), name)
        self.key.append((type(value), names_of(value)))

    def add_attributes(self, names: Set[str], first: int = 0) -> bool:
        """Add the attributes of these names of all objects from number `first` on; return whether any were added.

        Those that are compared by identity, too: code may get them by computed names, and compare without using them.
        With `ANY` among the names all attributes of objects that are not rebuilt. Of those that are, what no signature
        can have is left out: a name may be that of another attribute, as `log` of NumPy's and of a logger.
        """
        added = False
        for held in itertools.islice(self.objects, first, None):  # which grow meanwhile
            reads_all = ANY in names and not held.rebuilt
            for label, value in attributes_of(held.value):
                is_read = label in names or reads_all or is_singular(value)
                if not is_read or label in held.spans:
                    continue
                if not held.rebuilt or is_known(value, self.package):
                    held.spans[label] = self._add_attribute_of(held, value, label)
                    added = True
        return added

    def _add_attribute_of(self, held: HeldObject, value: Any, label: str) -> Span:
        """Add an attribute of an object, and return where its arrays and numbers are."""
        before = self._role, self._subject, self._scope
        self._role, self._subject, self._scope = held.role, held.subject, held.scope
        leaves, numbers = len(self.leaves), len(self.places)
        key, name = (held.number, label), f"{held.name}.{label}"
        if held.rebuilt:
            self.key.append(key)
            self.add(value, name)
        else:
            self.add_compared_only([(key, name, value)], type(held.value).__name__, held.name)
        self._role, self._subject, self._scope = before
        return Span(leaves, len(self.leaves), numbers, len(self.places))

    def _add_uncommon(self, value: Any, name: str) -> None:
        """Add a value of none of the types that `add` tests first."""
        cls = type(value)
        if cls is Tracer or issubclass(cls, TracedNumber):
            raise TracedArgument
        if replacement_of(value) is not None:
            self.captured = True
        if not isinstance(value, type) and (key := constant_key(value)) is not None:
            self.key.append(key)
            if may_change(value):
                self.stable, self.opaque = False, True
            self._add_enums_in(value, name)
            if isinstance(origin := typing.get_origin(value), type):  # of a class with type arguments, called as it is
                self.add_class(origin, name)
        elif cls is types.FunctionType:
            self.add_function(value, name)
        elif cls is CachedFunction and not self._compared_only:
            self.captured = True  # tracing calls the function itself: a cache would keep traced arrays
            self.key.append((cls, *value.cache_parameters().items()))
            self.wrappers.append(value)
            self.add(value.__wrapped__, name)
        elif isinstance(value, type):
            self.key.append(Identity(value))
            self.add_class(value, name)
        elif cls is types.ModuleType:
            self.key.append(Identity(value))
            if not is_library_module(value, self.package):
                self.classes.setdefault(value, name)
            elif value is builtins:
                self.add_class(type, name)
        elif isinstance(value, arrays.Spec):
            self._add_spec(value, name)
        elif arrays.is_cupy(value) and cls is arrays.CUPY_ARRAY:
            self.add(value, name)  # the first one in this process: `CUPY_ARRAY` is known now
        elif arrays.is_array(value):
            self._add_imported(value, name)
        else:
            self._add_container(value, name)

    def add_class(self, cls: type, name: str) -> None:
        """Note a class that was met as a value."""
        self.classes.setdefault(cls, name)
        self.class_values.setdefault(cls, name)

    def _add_enums_in(self, value: Any, name: str) -> None:
        """Add the classes of enums in a constant to those met."""
        for enum in enums_in(value):
            self.classes.setdefault(enum, name)

    def _add_spec(self, value: arrays.Spec, name: str) -> None:
        if not self._specs:
            raise TypeError(f"{self._subject} {name!r}: a spec has no values; use .plan() with it, or pass an array")
        self.leaves.append(value)
        self.names.append(name)
        self.exporters.append(None)
        self.key.append(value)

    def _add_imported(self, value: Any, name: str) -> None:
        """Add an array of another library, or of a subclass of NumPy's."""
        imported = arrays.import_array(value, name)
        self.originals[len(self.leaves)] = value
        self.key.append(arrays.Imported)  # a function that runs as written would get the array itself
        self.add(imported.array, name)
        self.exporters[-1] = imported.export

    def add_static(self, value: Any, name: str) -> None:
        """Add the value of a static argument or variable, which is compared by its hash and equality."""
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"static argument {name!r}: expected a hashable value, got {type(value).__name__}"
            ) from error
        self.key.append(("static", type(value), value))

    def add_by_value(self, value: Any, name: str) -> None:
        """Add a value whose numbers belong to the key."""
        role, self._role = self._role, Role.CONSTANT
        self.add(value, name)
        self._role = role

    def add_immutable(self, other: Walk) -> None:
        """Add the arrays of another signature, whose numbers are constants, not its key."""
        count = len(self.leaves)
        self.places += other.places
        self.originals.update((count + i, original) for i, original in other.originals.items())
        self.leaves += other.leaves
        self.names += other.names
        self.exporters += other.exporters

    def duplicates(self) -> dict[int, int]:
        """Map the positions of leaves that are the same object as an earlier leaf to that one's (``x is y``)."""
        if self.originals:
            return arrays.duplicates([self.originals.get(i, leaf) for i, leaf in enumerate(self.leaves)])
        return arrays.duplicates(self.leaves)

    def cache_key(self, *settings: Hashable) -> tuple[Hashable, ...]:
        """Return the key of the call, once all is added, with settings that its plan depends on."""
        leaves = self.leaves
        if len(leaves) > 1 and (self.originals or len(set(map(id, leaves))) < len(leaves)):
            return (*settings, *self.key, *self.duplicates().items())
        return (*settings, *self.key)
