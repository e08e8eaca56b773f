"""The signature of a call: its arrays, and a key of everything else that its trace can read.

Arguments, closures, globals and class attributes are walked in one order. `Substitution` walks in the same order to
replace the arrays by traced ones.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from ..trace import TracedNumber, Tracer
from ..trace.numpy import BUILTINS, replacement_of
from . import arrays
from .code import ANY, AttributePath, Reads, is_library_module, reads_of
from .constants import Identity, constant_key, enums_in
from .members import MISSING
from .objects import HeldObject, Span, is_plain, names_of
from .refusals import check_no_side_effects, describe_refusal
from .registry import is_own_type, registration
from .structures import DEEPEST, attributes_of, is_dataclass, is_namedtuple, is_record, structure_of
from .variables import CachedFunction, defaults_of, has_attributes, is_library_function, read_by_attribute, variables_of
from .wrappers import held_by

_IMMUTABLE = (int, bool, str, type(None))
_NOT_ANEW = (
    "an array among the attributes of a module, or of an object that cannot be rebuilt, cannot be read anew in each "
    "call; make it an argument, or a variable of its own"
)


class TracedArgument(Exception):
    """An argument is a traced array: the call is inlined into the trace of another fused function."""


class Signature:
    """The arrays of a call, and a key of everything else that its trace can read.

    Attributes
    ----------
    leaves, names : list
        The arrays, and what they are called.
    key : list of hashable
        Everything else that a trace can read, but the float arguments.
    exporters : list
        For each leaf the function that exports results to its library, or None.
    originals : dict
        The caller's own arrays of other libraries, by position of the leaf that was imported from each.
    numbers : list of float
        The float arguments.
    stable : bool
        Whether all that was added is immutable, so that it changes only where a variable is bound to another object.
    captured : bool
        Whether variables around functions hold arrays, mutable containers, or functions that traces replace: tracing
        has to rebuild the functions.
    probes : list of (dict or cell, name, object)
        Variables around functions that were read, and what they held.
    containers : list of (list, dict, set or tuple)
        Containers in library functions that may hold the user's objects.
    functions : list of function
        The user's functions that were added, with their code and default values.
    wrappers : list of object
        The fused and cached functions that were added, which may have attributes of their own.
    attributes : set of str
        The names of all attributes that functions read of anything.
    strings : set of str
        The constants in their code that could be such names, too.
    objects : list of HeldObject
        The objects of the user's classes that were met, in order.
    package : str
        The top-level package of the function, whose code is not taken as a library's.
    classes : dict
        The classes and modules met, with their names; `class_members.add_members` adds what functions read of them.
    members, visited : set of (int, str), dict
        What it has added, by the ids of what holds it, and the number of attribute names for which it has searched.
    """

    # fmt: off
    __slots__ = (
        "_active", "_by_value", "_compared_only", "_held", "_reads_itself", "_seen", "_specs", "_static", "_subject",
        "attributes",
        "captured", "classes", "containers", "exporters", "functions", "key", "leaves", "members", "names", "numbers",
        "objects", "originals", "package", "probes", "stable", "strings", "visited", "wrappers",
    )
    # fmt: on

    def __init__(self, static: frozenset[str] = frozenset(), package: str = "", specs: bool = False):
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self.key: list[Hashable] = []
        self.exporters: list[Any] = []
        self.originals: dict[int, Any] = {}
        self.numbers: list[float] = []
        self.stable = True
        self.captured = False
        self.probes: list[tuple[Any, str, Any]] = []
        self.containers: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.wrappers: list[Any] = []
        self.attributes: set[str] = set()
        self.strings: set[str] = set()
        self.objects: list[HeldObject] = []
        self.members: set[tuple[int, str]] = set()
        self.visited: dict[int, int] = {}
        self.classes: dict[Any, str] = {}
        self._static, self.package, self._specs = static, package, specs
        self._by_value = False  # whether floats that are added belong to the key
        self._compared_only = False  # whether tracing does not rebuild what is added
        self._subject = "argument"  # of error messages
        self._active: set[int] = set()  # containers whose children are being added
        self._seen: dict[Any, int] = {}  # functions and variables that were added
        self._held: dict[tuple[int, bool], HeldObject] = {}  # `objects`, by id and whether they are rebuilt
        self._reads_itself = False  # whether tracing reads what is added itself

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
        elif cls is float:
            if self._by_value:
                self.key.append((cls, value.hex()))
            else:
                self.key.append(float)
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

    def _add_container(self, value: Any, name: str) -> None:
        """Add a container of one of the types that `structure_of` knows."""
        cls = type(value)
        try:
            structure = structure_of(value)
        except TypeError as error:
            raise TypeError(f"{self._subject} {name!r}: {error}") from error
        if structure is None:
            raise TypeError(f"{self._subject} {name!r}: {describe_refusal(value)}")
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
        held = HeldObject(value, name, self._subject, len(self.objects), self._by_value, rebuilt)
        self._held[id(value), rebuilt] = held
        self.objects.append(held)
        self.classes.setdefault(type(value), name)
        self.key.append((type(value), names_of(value)))

    def add_attributes(self, names: Set[str], first: int = 0) -> bool:
        """Add the attributes of these names of all objects from number `first` on; return whether any were added.

        With `ANY` among the names those that are None, too: code compares them without using them.
        """
        added, by_any_name = False, ANY in names
        for held in itertools.islice(self.objects, first, None):  # which grow meanwhile
            held.by_any_name = held.by_any_name or by_any_name
            for label, value in attributes_of(held.value):
                if (label in names or (by_any_name and value is None)) and label not in held.spans:
                    held.spans[label] = self._add_attribute_of(held, value, label)
                    added = True
        return added

    def _add_attribute_of(self, held: HeldObject, value: Any, label: str) -> Span:
        """Add an attribute of an object, and return where its arrays and float arguments are."""
        before = self._by_value, self._compared_only, self._subject
        self._by_value, self._compared_only, self._subject = held.by_value, not held.rebuilt, held.subject
        leaves, numbers = len(self.leaves), len(self.numbers)
        self.key.append((held.number, label))
        self.add(value, f"{held.name}.{label}")
        if not held.rebuilt and len(self.leaves) > leaves:
            raise TypeError(f"{self._subject} {self.names[leaves]!r}: {_NOT_ANEW}")
        self._by_value, self._compared_only, self._subject = before
        return Span(leaves, len(self.leaves), numbers, len(self.numbers))

    def _add_uncommon(self, value: Any, name: str) -> None:
        """Add a value of none of the types that `add` tests first."""
        cls = type(value)
        if cls is Tracer:
            raise TracedArgument
        if cls is TracedNumber:
            value = float(value)
        if replacement_of(value) is not None:
            self.captured = True
        if not isinstance(value, type) and (key := constant_key(value)) is not None:
            self.key.append(key)
            self._add_enums_in(value, name)
        elif cls is types.FunctionType:
            self.add_function(value, name)
        elif cls is CachedFunction and not self._compared_only:
            self.captured = True  # tracing calls the function itself: a cache would keep traced arrays
            self.key.append((cls, *value.cache_parameters().items()))
            self.wrappers.append(value)
            self.add(value.__wrapped__, name)
        elif isinstance(value, type):
            self.key.append(Identity(value))
            self.classes.setdefault(value, name)
        elif cls is types.ModuleType:
            self.key.append(Identity(value))
            if not is_library_module(value, self.package):
                self.classes.setdefault(value, name)
        elif isinstance(value, arrays.Spec):
            self._add_spec(value, name)
        elif arrays.is_cupy(value) and cls is arrays.CUPY_ARRAY:
            self.add(value, name)  # the first one in this process: `CUPY_ARRAY` is known now
        elif arrays.is_array(value):
            self._add_imported(value, name)
        else:
            self._add_container(value, name)

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

    # Variables around functions ------------------------------------------------------------------------------------

    def add_function(self, function: types.FunctionType, name: str, defaults: bool = True) -> None:
        """Add a function: its code, its default values, and the closure cells and globals that the code reads."""
        number = self._seen.get(function)
        if number is not None:
            self.key.append(("again", number))
            return
        self._seen[function] = len(self._seen)
        if is_library_function(function, self.package):
            self.key.append(Identity(function))
            self._add_wrapped(function, name)
            return
        reads = reads_of(function.__code__)
        check_no_side_effects(function, reads, self.package)
        self.attributes |= reads.attributes
        self.strings |= reads.strings
        self.key.append(Identity(function.__code__))
        self.functions.append(function)
        by_value, self._by_value = self._by_value, True
        subject, self._subject = self._subject, f"in the function {function.__qualname__}, the variable"
        known = len(self.leaves)
        if defaults:
            self.stable = self.stable and not function.__kwdefaults__  # a dict, which can change in place
            for label, value in defaults_of(function):
                self.add(value, label)
        self._probe_builtins(function, reads)
        for holder, label, value in variables_of(function):
            if label in self._static:
                self.stable = False
                self.add_static(value, label)
            elif value is MISSING:
                self.probes.append((holder, label, value))
            else:
                self._add_variable(holder, label, value, reads)
        self.captured = self.captured or not self.stable or len(self.leaves) > known
        self._subject, self._by_value = subject, by_value

    def _probe_builtins(self, function: types.FunctionType, reads: Reads) -> None:
        """Note the builtins that a function reads: a global of the same name, defined later, would hide them."""
        builtins = [label for label in reads.globals if label not in function.__globals__]
        self.probes += [(function.__globals__, label, MISSING) for label in builtins]
        self.captured = self.captured or not BUILTINS.keys().isdisjoint(builtins)

    def _add_variable(self, holder: Any, label: str, value: Any, reads: Reads) -> None:
        """Add a variable in a closure cell or in a dict of globals: its value, or the attributes read of it.

        Functions that share a variable may read other attributes of it.
        """
        by_attribute = read_by_attribute(value, self.package)
        if (id(holder), label) not in self._seen:
            self._seen[id(holder), label] = len(self._seen)
            self.probes.append((holder, label, value))
            self.key.append(label)
            if not by_attribute:
                self.add(value, label)
        if not by_attribute and not isinstance(value, types.FunctionType):
            return
        for path in sorted(reads.variables.get(label, ())):
            if not path and not by_attribute:
                continue  # a function, which was added as a whole
            if (id(holder), label, path) not in self._seen:
                self._seen[id(holder), label, path] = len(self._seen)
                self._add_attributes(value, label, path)

    def add_static(self, value: Any, name: str) -> None:
        """Add the value of a static argument or variable, which is compared by its hash and equality."""
        try:
            hash(value)
        except TypeError as error:
            raise TypeError(
                f"static argument {name!r}: expected a hashable value, got {type(value).__name__}"
            ) from error
        self.key.append(("static", type(value), value))

    def _add_attributes(self, value: Any, name: str, path: AttributePath) -> None:
        """Add the attribute at a path from a module, a function, or an object that cannot be compared as a whole."""
        known = len(self.leaves)
        for attribute in path:
            if not isinstance(value, types.FunctionType) and not has_attributes(value, self.package):
                break
            value = self._read_attribute(value, attribute)
            name = f"{name}.{attribute}"
        if value is MISSING:
            self.key.append(())
            return
        before, self._reads_itself = self._reads_itself, True
        self.add(value, name)
        self._reads_itself = before
        if len(self.leaves) > known:
            raise TypeError(f"{self._subject} {name!r}: {_NOT_ANEW}")

    def _read_attribute(self, value: Any, attribute: str) -> Any:
        """Return an attribute of an object or MISSING, and note what shows that it is current."""
        if not isinstance(value, (types.ModuleType, types.FunctionType)):
            self.stable = False
            self.key.append((type(value), attribute))
            return getattr(value, attribute, MISSING)
        if isinstance(value, types.ModuleType):
            self.key.append(Identity(value))
        namespace = vars(value)
        found = namespace.get(attribute, MISSING)
        self.probes.append((namespace, attribute, found))
        if found is MISSING and isinstance(value, types.FunctionType):
            found = getattr(value, attribute, MISSING)
            if constant_key(found) is not None:
                self.stable = False  # an attribute such as `__name__`, which may be assigned
        return found

    def add_by_value(self, value: Any, name: str) -> None:
        """Add a value whose floats belong to the key."""
        by_value, self._by_value = self._by_value, True
        self.add(value, name)
        self._by_value = by_value

    def add_leaves_of(self, other: Signature) -> None:
        """Add the arrays of another signature, not its key."""
        count = len(self.leaves)
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

    @property
    def has_functions(self) -> bool:
        """Whether functions were added, which may read variables."""
        return bool(self._seen)

    def _add_wrapped(self, function: types.FunctionType, name: str) -> None:
        """Add the user's objects that a library function holds, such as a function that it wraps."""
        values, probes, containers = held_by(function, self.package, lambda f: is_library_function(f, self.package))
        if values:
            self.probes += probes
            self.containers += containers
            parts = [(len(values), *value) for value in values]
            self.add_compared_only(parts, f"wrapper {function.__qualname__}", name)

    def add_compared_only(self, parts: Sequence[tuple[Hashable, str, Any]], holder: str, name: str) -> None:
        """Add values that tracing compares but does not rebuild, so that arrays in them are an error.

        Each part is (key, name, value).
        """
        known = len(self.leaves)
        before = self._seen, self._compared_only, self._by_value
        # A function that is met elsewhere too has to be added there again, since it is rebuilt there.
        self._seen, self._compared_only, self._by_value = self._seen if self._compared_only else {}, True, True
        for key, label, value in parts:
            self.key.append(key)
            self.add(value, label)
        self._seen, self._compared_only, self._by_value = before
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._subject} {name!r}: the array {self.names[known]}, which the {holder} holds or its functions "
                "read from outside, cannot be read anew in each call; make it an argument, an attribute of one, or a "
                "variable of the fused function"
            )
