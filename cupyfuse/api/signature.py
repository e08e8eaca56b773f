"""The signature of a call: its arrays, and a key of everything else that its trace can read.

What a function reads of its arguments and around it (closures, globals, class attributes) is walked in one order. The
same walk, by `Substitution`, puts traced arrays in the places of arrays.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from ..trace import TracedNumber, Tracer
from ..trace.numpy import BUILTINS, replacement_of
from . import arrays
from .code import Chain, Reads, is_library, is_library_module, reads_of, written_bases
from .constants import Identity, constant_key
from .registry import registration
from .structures import Structure, is_dataclass, is_namedtuple, structure_of

_IMMUTABLE = (int, bool, str, type(None))
MISSING = object()

WAYS_OUT = (
    "pass what the function needs of it, name it in cf.fuse(static=(...)) if its hash and equality tell all that the "
    "function reads, or teach its type to cf.register(type, flatten, unflatten)"
)


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
    functions : list of function
        Those that were added, whose code and default values were read.
    captured : bool
        Whether such variables hold arrays, or what may come to hold some, or functions that traces replace.
    attributes : set of str
        The attributes that functions read of anything.
    classes : dict
        The classes met, by name; `finish` adds those of their attributes that functions read.
    """

    __slots__ = (
        *("_active", "_by_value", "_kind", "_package", "_seen", "_specs", "_static", "attributes", "classes"),
        *("captured", "exporters", "functions", "key", "leaves", "names", "numbers", "originals", "probes", "stable"),
    )

    def __init__(self, static: frozenset[str] = frozenset(), package: str = "", specs: bool = False):
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.key: list[Hashable] = []
        self.exporters: list[Any] = []
        self.originals: dict[int, Any] = {}
        self.stable = True
        self.probes: list[tuple[Any, str, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.captured = False
        self.numbers: list[float] = []
        self._by_value = False
        self._static, self._package, self._specs = static, package, specs
        self._seen: dict[Any, int] = {}
        self.attributes: set[str] = set()
        self.classes: dict[type, str] = {}
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
        elif cls is types.FunctionType:
            self.add_function(value, name)
        elif isinstance(value, type):
            self.key.append(Identity(value))
            self.classes.setdefault(value, name)
        elif cls is types.ModuleType:
            self.key.append(Identity(value))
        elif arrays.is_array(value):
            self._add_foreign(value, name)
        elif (structure := self._structure(value, name)) is not None:
            self.stable = self.stable and not structure.mutable
            self.key.append(structure.key)
            if is_namedtuple(cls) or is_dataclass(cls) or registration(cls):
                self.classes.setdefault(cls, name)
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
            return
        reads = reads_of(function.__code__)
        _check_changes_nothing(function, reads, self._package)
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
                if attribute not in vars(value):
                    return
                self.stable = False
                value = vars(value)[attribute]
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

    @property
    def read_functions(self) -> bool:
        """Whether functions were added, which may read variables."""
        return bool(self._seen)

    def finish(self) -> bool:
        """Add the attributes of all classes met that the code names, and what the methods among them read.

        Returns whether nothing that was added can change but by putting another object in its place.
        """
        if not self.classes:
            return True
        self.stable = True
        done: set[tuple[type, str]] = set()
        count = -1
        while count != (count := len(self.attributes) + len(self.classes)):
            for cls, name in list(self.classes.items()):
                self._add_class(cls, name, done)
        stable, self.stable = self.stable, False
        return stable

    def _add_class(self, cls: type, name: str, done: set[tuple[type, str]]) -> None:
        """Add class attributes. No traced arrays can stand for arrays among them, or for those that methods read."""
        known = len(self.leaves)
        seen, self._seen = self._seen, {}
        by_value, self._by_value = self._by_value, True
        for base in written_bases(cls, self._package):
            space, named = vars(base), self.attributes
            for attribute in [n for n in space if n in named or n[:2] == "__"]:
                value = function_in(space[attribute])
                special = attribute[:2] == "__" and type(value) is types.FunctionType
                generated = special and value.__code__.co_filename == "<string>"  # by a dataclass
                if generated or not (special or attribute in named):
                    continue
                if (base, attribute) in done or _is_member(value):
                    continue
                done.add((base, attribute))
                self.key.append(attribute)
                self.add(value, f"{name}.{attribute}")
        self._seen, self._by_value = seen, by_value
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._kind} {name!r}: the array {self.names[known]}, which the class {cls.__name__} holds or its "
                "methods read from outside, cannot be read anew in each call; make it an argument, or an "
                "attribute of the object"
            )


def is_library_function(function: types.FunctionType, package: str) -> bool:
    return is_library(function.__code__.co_filename, function.__globals__.get("__name__") or "", package)


def function_in(attribute: Any) -> Any:
    """Return the function in a property or a static or class method; other attributes as they are."""
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.func if isinstance(attribute, functools.cached_property) else attribute


def _is_member(attribute: Any) -> bool:
    """Whether a class attribute is what Python puts there for a slot or a field."""
    return (
        hasattr(type(attribute), "__get__")
        and type(attribute).__module__ in ("builtins", "collections", "_collections")
        and not isinstance(attribute, types.FunctionType)
    )


def read_by_attribute(value: Any, package: str) -> bool:
    """Whether nothing is known of an object as a whole, but of single attributes that code names."""
    if isinstance(value, types.ModuleType):
        return not is_library_module(value, package)
    if isinstance(value, (type, types.FunctionType, tuple, list, dict)) or constant_key(value) is not None:
        return False
    cls = type(value)
    if arrays.is_array(value) or cls in (types.MethodType, functools.partial):
        return False
    return registration(cls) is None and not is_dataclass(cls)


def refusal(value: Any) -> str:
    """Say why an object cannot be part of a fused call."""
    cls = type(value)
    return (
        f"expected an array, a number, a constant, or a tuple, list, dict or dataclass of these, got "
        f"{cls.__module__}.{cls.__qualname__}, of which a fused function cannot tell what it reads; {WAYS_OUT}"
    )


def _check_changes_nothing(function: types.FunctionType, reads: Reads, package: str) -> None:
    if reads.assigned:
        raise TypeError(
            f"{function.__qualname__} assigns the global or nonlocal variable {reads.assigned[0]!r}, which later calls "
            "of a fused function would not; return the value, and assign it outside"
        )
    for name in reads.imported:
        module = sys.modules.get(name)
        if module is not None and not is_library_module(module, package):
            raise TypeError(
                f"{function.__qualname__} imports {name} when it is called, whose changes a fused function would not "
                "notice; import it outside of the function"
            )


def defaults_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the default values of parameters."""
    for i, value in enumerate(function.__defaults__ or ()):
        yield f"__defaults__[{i}]", value
    yield from (function.__kwdefaults__ or {}).items()


def variables_of(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the variables around a function that its code reads: (cell or dict of globals, name, value)."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
        try:
            yield cell, name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    space = function.__globals__
    for name in reads_of(function.__code__).globals:
        if name in space:
            yield space, name, space[name]
