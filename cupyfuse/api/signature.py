"""The signature of a call: its arrays, and a key of everything else that its trace can read.

What a function reads of its arguments and around it (closures, globals, class attributes) is walked in one order. The
same walk, by `Substitution`, puts traced arrays in the places of arrays.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..trace import TracedNumber, Tracer
from ..trace.numpy import BUILTINS, replacement_of
from . import arrays
from .code import Chain, is_library_module, reads_of
from .constants import Identity, constant_key, enums_in
from .members import named_members, written_bases
from .refusals import check_changes_nothing, refusal
from .registry import registration
from .structures import Structure, is_dataclass, is_namedtuple, structure_of
from .variables import defaults_of, is_library_function, read_by_attribute, variables_of
from .wrappers import held_by

_IMMUTABLE = (int, bool, str, type(None))
MISSING = object()


class TracedArgument(Exception):
    """An argument is a traced array: the call belongs to the trace of another fused function."""


class Signature:
    """Arrays and key of a call.

    Attributes
    ----------
    leaves, names : list
        The arrays, and what they are called.
    key : list of hashable
        Everything else that a trace can read.
    exporters : list
        For each leaf the function that exports results to its library, or None.
    originals : dict
        The caller's own arrays, by number of the leaf, where the leaf is an import of them.
    stable : bool
        Whether nothing that was added can change but by putting another object in its place.
    numbers : list of float
        The float arguments, which are no part of the key.
    probes : list of (dict or cell, name, object)
        Variables around functions that were read, and what they held.
    containers : list of (list, dict, set or tuple)
        Those in functions of libraries, where they may hold the user's.
    functions : list of function
        Those that were added, whose code and default values were read.
    captured : bool
        Whether such variables hold arrays, or what may come to hold some, or functions that traces replace.
    attributes : set of str
        The attributes that functions read of anything.
    classes : dict
        The classes and modules met, by name; `finish` adds those of their attributes that functions read.
    """

    __slots__ = (
        *(
            "_active",
            "_as_it_is",
            "_by_value",
            "_kind",
            "_package",
            "_seen",
            "_specs",
            "_static",
            "attributes",
            "classes",
        ),
        *(
            "captured",
            "containers",
            "exporters",
            "functions",
            "key",
            "leaves",
            "names",
            "numbers",
            "originals",
            "probes",
            "stable",
        ),
    )

    def __init__(self, static: frozenset[str] = frozenset(), package: str = "", specs: bool = False):
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.key: list[Hashable] = []
        self.exporters: list[Any] = []
        self.originals: dict[int, Any] = {}
        self.stable = True
        self.probes: list[tuple[Any, str, Any]] = []
        self.containers: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.captured = False
        self.numbers: list[float] = []
        self._by_value = False
        self._as_it_is = False  # whether what is added is no part of what traces make again
        self._static, self._package, self._specs = static, package, specs
        self._seen: dict[Any, int] = {}
        self.attributes: set[str] = set()
        self.classes: dict[Any, str] = {}
        self._active: set[int] = set()
        self._kind = "argument"

    def add(self, value: Any, name: str) -> None:
        """Add a value and all that it holds."""
        cls = type(value)
        if cls is np.ndarray or cls is arrays.CUPY_ARRAY:
            self.leaves.append(value)
            self.names.append(name)
            self.exporters.append(None)
            place = np.ndarray if cls is np.ndarray else value.data.device_id
            self.key.append((place, value.shape, value.dtype, value.strides))
        elif cls in _IMMUTABLE:
            self.key.append((cls, value))
        elif cls is float:
            if self._by_value:
                self.key.append((cls, value.hex()))
            else:
                self.key.append(float)
                self.numbers.append(value)
        elif cls is tuple or cls is list:
            self.stable = self.stable and cls is tuple
            self.key.append((cls, len(value)))
            self._check_depth(value, name)
            for i, item in enumerate(value):
                self.add(item, f"{name}[{i}]")
            self._active.discard(id(value))
        else:
            self._add_other(value, name)

    def _check_depth(self, value: Any, name: str) -> None:
        if id(value) in self._active or len(self._active) > 100:
            raise TypeError(f"{self._kind} {name!r}: a {type(value).__name__} that contains itself")
        self._active.add(id(value))

    def _add_other(self, value: Any, name: str) -> None:
        cls = type(value)
        if cls is Tracer:
            raise TracedArgument
        if cls is TracedNumber:
            value = float(value)
        if replacement_of(value) is not None:
            self.captured = True  # the functions that hold it are made again, with another for it
        if (key := constant_key(value)) is not None:
            self.key.append(key)
            for enum in enums_in(value):
                self.classes.setdefault(enum, name)
        elif cls is types.FunctionType:
            self.add_function(value, name)
        elif isinstance(value, type):
            self.key.append(Identity(value))
            self.classes.setdefault(value, name)
        elif cls is types.ModuleType:
            self.key.append(Identity(value))
            if not is_library_module(value, self._package):
                self.classes.setdefault(value, name)
        elif arrays.is_array(value):
            self._add_foreign(value, name)
        elif (structure := self._structure(value, name)) is not None:
            self.stable = self.stable and not structure.mutable
            self.key.append(structure.key)
            if is_namedtuple(cls) or is_dataclass(cls) or registration(cls):
                self.classes.setdefault(cls, name)
            elif cls is dict:
                for enum in enums_in(value):
                    self.classes.setdefault(enum, name)
            self._check_depth(value, name)
            for label, child in zip(structure.labels, structure.children, strict=True):
                self.add(child, name + label)
            self._active.discard(id(value))
        else:
            raise TypeError(f"{self._kind} {name!r}: {refusal(value)}")

    def _structure(self, value: Any, name: str) -> Structure | None:
        try:
            return structure_of(value)
        except TypeError as error:
            raise TypeError(f"{self._kind} {name!r}: {error}") from error

    def _add_foreign(self, value: Any, name: str) -> None:
        if isinstance(value, arrays.Spec):
            if not self._specs:
                raise TypeError(f"{self._kind} {name!r}: a spec has no values; use .plan() with it, or pass an array")
            self.leaves.append(value)
            self.names.append(name)
            self.exporters.append(None)
            self.key.append(value)
            return
        imported = arrays.import_array(value, name)
        self.originals[len(self.leaves)] = value
        self.add(imported.array, name)
        self.exporters[-1] = imported.export

    # What surrounds a function -------------------------------------------------------------------------------------

    def add_function(self, function: types.FunctionType, name: str, defaults: bool = True) -> None:
        """Add a function: its code, and what that reads of default values, closure cells and globals."""
        number = self._seen.get(function)
        if number is not None:
            self.key.append(("again", number))
            return
        self._seen[function] = len(self._seen)
        if is_library_function(function, self._package):
            self.key.append(Identity(function))
            self._add_held(function, name)
            return
        reads = reads_of(function.__code__)
        check_changes_nothing(function, reads, self._package)
        self.attributes |= reads.attributes
        self.key.append(Identity(function.__code__))
        self.functions.append(function)
        by_value, self._by_value = self._by_value, True
        kind, self._kind = self._kind, f"in the function {function.__qualname__}, the variable"
        known = len(self.leaves)
        if defaults and (function.__defaults__ or function.__kwdefaults__):
            self.stable = self.stable and not function.__kwdefaults__
            for label, value in defaults_of(function):
                self.add(value, label)
        space = function.__globals__
        builtins = [label for label in reads.globals if label not in space]
        self.probes += [(space, label, MISSING) for label in builtins]
        self.captured = self.captured or not BUILTINS.keys().isdisjoint(builtins)
        for space, label, value in variables_of(function):
            if label in self._static:
                self.stable = False
                self.add_static(value, label)
            elif (id(space), label) not in self._seen:
                self._seen[id(space), label] = len(self._seen)
                self.probes.append((space, label, value))
                self.key.append(label)
                if not read_by_attribute(value, self._package):
                    self.add(value, label)
                for chain in sorted(reads.variables.get(label, ())):
                    self._add_attributes(value, label, chain)
        self.captured = self.captured or not self.stable or len(self.leaves) > known
        self._kind, self._by_value = kind, by_value

    def add_static(self, value: Any, name: str) -> None:
        """Add a value that is compared by its hash and equality."""
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"static argument {name!r}: expected a hashable value, got {type(value).__name__}"
            ) from error
        self.key.append(("static", type(value), value))

    def _add_attributes(self, value: Any, name: str, chain: Chain) -> None:
        """Add an attribute that is read of a module, of a function, or of an object of which nothing else is known."""
        known = len(self.leaves)
        if not chain or not (read_by_attribute(value, self._package) or isinstance(value, types.FunctionType)):
            if read_by_attribute(value, self._package):
                self.add(value, name)
            return
        for attribute in chain:
            if isinstance(value, types.ModuleType):
                if is_library_module(value, self._package):
                    break
                self.key.append(Identity(value))
                space = vars(value)
                value = space.get(attribute, MISSING)
                self.probes.append((space, attribute, value))
            elif isinstance(value, types.FunctionType):
                space, function = vars(value), value
                value = space.get(attribute, MISSING)
                self.probes.append((space, attribute, value))
                if value is MISSING and constant_key(value := getattr(function, attribute, MISSING)) is not None:
                    self.stable = False  # such as `__name__`
            elif read_by_attribute(value, self._package):
                self.stable = False
                self.key.append((type(value), attribute))
                value = getattr(value, attribute, MISSING)
            else:
                break
            name = f"{name}.{attribute}"
        if value is MISSING:
            self.key.append(())
            return
        self.add(value, name)
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._kind} {name!r}: an array among the attributes of a module or of another object cannot be read "
                "anew in each call; make it an argument, or a variable of its own"
            )

    def add_by_value(self, value: Any, name: str) -> None:
        """Add a value with its floats as a part of the key."""
        by_value, self._by_value = self._by_value, True
        self.add(value, name)
        self._by_value = by_value

    def add_leaves_of(self, other: Signature) -> None:
        """Add the arrays of another signature, which keeps its key."""
        count = len(self.leaves)
        self.originals.update((count + i, original) for i, original in other.originals.items())
        self.leaves += other.leaves
        self.names += other.names
        self.exporters += other.exporters

    def repeated(self) -> dict[int, int]:
        """Return the leaves that are the same object as an earlier one, which a function may ask (``x is y``)."""
        if self.originals:
            return arrays.repeated([self.originals.get(i, leaf) for i, leaf in enumerate(self.leaves)])
        return arrays.repeated(self.leaves)

    def whole_key(self, *settings: Hashable) -> tuple[Hashable, ...]:
        """Return the key of a call, once all is added."""
        repeated = self.repeated()
        return (*settings, *self.key, *repeated.items()) if repeated else (*settings, *self.key)

    @property
    def read_functions(self) -> bool:
        """Whether functions were added, which may read variables."""
        return bool(self._seen)

    def finish(self) -> bool:
        """Add the attributes of all classes and modules met that the code names, and what the methods among them read.

        Returns whether nothing that was added can change but by putting another object in its place.
        """
        if not self.classes and not any(map(vars, self.functions)):
            return True
        self.stable = True
        done: set[tuple[int, str]] = set()
        count = -1
        while count != (count := len(self.attributes) + len(self.classes) + len(self.functions)):
            for owner, name in list(self.classes.items()):
                self._add_members(owner, name, done)
            for function in self.functions[:]:
                self._add_members(function, function.__qualname__, done)
        stable, self.stable = self.stable, False
        return stable

    def _add_members(self, owner: Any, name: str, done: set[tuple[int, str]]) -> None:
        """Add the attributes of a class, a module or a function that the code names."""
        found: list[tuple[Any, str, Any]] = []
        if isinstance(owner, type):
            if isinstance(owner, abc.ABCMeta):
                self.key.append(abc.get_cache_token())  # of what is registered as subclasses
            for holder in written_bases(owner, self._package):
                found += [(holder, label, value) for label, value in named_members(holder, self.attributes)]
            if type(owner) is not type and written_bases(type(owner), self._package):
                self.classes.setdefault(type(owner), f"type({name})")
        else:
            space, is_module = vars(owner), isinstance(owner, types.ModuleType)
            for label in sorted({*self.attributes, "__getattr__"} if is_module else self.attributes & space.keys()):
                value = space.get(label, MISSING)
                self.probes.append((space, label, value))
                found += [(owner, label, value)] if value is not MISSING else []
        new = [member for member in found if (id(member[0]), member[1]) not in done]
        done.update((id(holder), label) for holder, label, _ in new)
        for _, label, value in new:
            if label == "__match_args__" and type(value) is tuple:
                self.attributes.update(value)
        parts = [((Identity(holder), label), f"{name}.{label}", value) for holder, label, value in new]
        self._add_as_it_is(parts, f"{type(owner).__name__} {owner.__name__}", name)

    def _add_held(self, function: types.FunctionType, name: str) -> None:
        """Add what a function of a library holds that is none of the library's, such as a function that it wraps."""
        values, probes, containers = held_by(function, self._package, lambda f: is_library_function(f, self._package))
        if values:
            self.probes += probes
            self.containers += containers
            self._add_as_it_is([(len(values), *value) for value in values], f"wrapper {function.__qualname__}", name)

    def _add_as_it_is(self, parts: Sequence[tuple[Hashable, str, Any]], holder: str, name: str) -> None:
        """Add what traces do not make again: no traced arrays can stand for arrays in it, or for those that it reads.

        Each part is a key, a name and a value.
        """
        known = len(self.leaves)
        before = self._seen, self._as_it_is, self._by_value
        # A function that is met elsewhere too is made again there.
        self._seen, self._as_it_is, self._by_value = self._seen if self._as_it_is else {}, True, True
        for key, label, value in parts:
            self.key.append(key)
            self.add(value, label)
        self._seen, self._as_it_is, self._by_value = before
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._kind} {name!r}: the array {self.names[known]}, which the {holder} holds or its functions read "
                "from outside, cannot be read anew in each call; make it an argument, an attribute of one, or a "
                "variable of the fused function"
            )
