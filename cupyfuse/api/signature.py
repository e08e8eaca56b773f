"""The signature of a call: its arrays, and a key of everything else that its trace can read.

Arguments, closures, globals and class attributes are walked in one order. `Substitution` walks in the same order to
replace the arrays by traced ones.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ..trace.numpy import REPLACED_BUILTINS, REPLACED_TYPES
from .around import Changes, Role
from .call_sites import scalar_types_called
from .code import CLASS, AttributePath, Reads, reads_of
from .constants import NUMBERS, Identity, constant_key
from .members import MISSING
from .objects import Span
from .refusals import check_no_side_effects
from .variables import defaults_of, has_attributes, is_library_function, read_by_attribute, variables_of
from .walk import Walk
from .wrappers import held_by


class Around(NamedTuple):
    """A variable or a default value around a function: what holds it, its name, its value, where its arrays and numbers
    are.
    """

    holder: Any
    label: str
    value: Any
    span: Span


class Signature(Walk):
    """The arrays of a call, and a key of everything else that its trace can read.

    Attributes
    ----------
    probes : list of (dict or cell, name, object)
        Variables around functions that were read, and what they held.
    containers : list of (list, dict, set or tuple)
        Containers in library functions that may hold the user's objects.
    around : dict
        The variables and defaults that were added, by the id of what holds each, and its name. What functions read that
        a variable holds comes before it.
    taken : Taken or None
        The signature of the variables, where it was taken before.
    first_taken : (int, int)
        How many arrays and places of numbers come before its own.
    functions : list of function
        The user's functions that were added, with their code and default values.
    kept : list of function
        Those that tracing does not rebuild, such as methods of classes and functions of modules.
    static_read : set of str
        The names in `static` of variables that functions read.
    attributes : set of str
        The names of all attributes that functions read of anything.
    strings : set of str
        The constants in their code that could be such names, too.
    members, visited : set of (int, str), dict
        What `class_members.add_members` has added of classes, by the ids of what holds it, and how much had been read
        when it searched each.
    """

    # fmt: off
    __slots__ = (
        "_seen", "_static", "around", "attributes", "containers", "first_taken", "functions", "kept",
        "members", "probes", "static_read", "strings", "taken", "visited",
    )
    # fmt: on

    def __init__(
        self,
        static: frozenset[str] = frozenset(),
        package: str = "",
        specs: bool = False,
        changes: Changes | None = None,
    ):
        super().__init__(package, specs, Changes() if changes is None else changes)
        self._static = static
        self.probes: list[tuple[Any, str, Any]] = []
        self.containers: list[Any] = []
        self.around: dict[tuple[int, str], Around] = {}
        self.taken: Taken | None = None
        self.first_taken = 0, 0
        self.functions: list[types.FunctionType] = []
        self.kept: list[types.FunctionType] = []
        self.static_read: set[str] = set()
        self.attributes: set[str] = set()
        self.strings: set[str] = set()
        self.members: set[tuple[int, str]] = set()
        self.visited: dict[int, tuple[int, ...]] = {}
        # Functions and variables that were added, in order; how many functions of each code, by its id.
        self._seen: dict[Any, int] = {}

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
        is_kept = self._compared_only or self._reads_itself
        if is_kept:
            self.kept.append(function)
        role, scope = self._role, self._scope
        self._role = role if is_kept else Role.AROUND
        code = id(function.__code__)
        self._seen[code] = count = self._seen.get(code, 0) + 1
        self._scope = code, count
        subject, self._subject = self._subject, f"in the function {function.__qualname__}, the variable"
        known = len(self.leaves)
        if defaults:
            if function.__kwdefaults__:  # a dict, which can change in place
                self.stable, self.opaque = False, True
            for label, value in defaults_of(function):
                self.add_around(function, label, value)
        self._probe_builtins(function, reads)
        for holder, label, value in variables_of(function):
            if label in self._static:
                self.static_read.add(label)
                self.stable, self.opaque = False, True
                self.add_static(value, label)
            elif value is MISSING:
                self.probes.append((holder, label, value))
            else:
                self._add_variable(holder, label, value, reads)
        self.captured = self.captured or not self.stable or len(self.leaves) > known
        self._subject, self._role, self._scope = subject, role, scope

    def add_around(self, holder: Any, label: str, value: Any) -> None:
        """Add the value of a variable or a default; see `around`."""
        leaves, numbers = len(self.leaves), len(self.places)
        self.add(value, label)
        if self._compared_only or self._reads_itself:
            return
        span = Span(leaves, len(self.leaves), numbers, len(self.places))
        self.around[id(holder), label] = Around(holder, label, value, span)

    def add_taken(self, taken: Taken) -> None:
        """Add a signature of the variables that was taken before."""
        own, numbers = taken.own, taken.numbers
        self.key.append(taken.key)
        self.captured = self.captured or own.captured
        self.taken, self.first_taken = taken, (len(self.leaves), len(self.places))
        for leaf, name in zip(own.leaves, own.names, strict=True):
            self.add(leaf, name)
        if numbers:
            first = len(self.numbers)
            self.places += [None if place is None else place + first for place in own.places]
            self.numbers += numbers
            self.changing = self.changing.union(range(first, len(self.numbers)))
        else:
            self.places += own.places

    @property
    def changing_variables(self) -> dict[tuple[int, str], Around]:
        """The variables that are numbers which change from call to call, by the id of what holds each, and its name.

        Those whose values belong to the key as well are left out, such as what a method of a class reads.
        """
        probed = collections.Counter((id(holder), label) for holder, label, _ in self.probes)
        numbers = {found: a for found, a in self.around.items() if type(a.value) in NUMBERS}
        return {
            found: a
            for found, a in numbers.items()
            if self.places[a.span.first_number] is not None and probed[found] == 1
        }

    def add_function_object(self, function: Any, name: str) -> None:
        """Add a fused function that is no Python function, such as a bound method."""
        self._role = Role.AROUND
        self.add_around(function, name, function)
        self._role = Role.ARGUMENT

    def _probe_builtins(self, function: types.FunctionType, reads: Reads) -> None:
        """Note the builtins that a function reads: a global of the same name, defined later, would hide them."""
        builtins = [label for label in reads.globals if label not in function.__globals__]
        self.probes += [(function.__globals__, label, MISSING) for label in builtins]
        replaced = [b for b in builtins if b in REPLACED_BUILTINS or (b in REPLACED_TYPES and b in reads.called)]
        self.captured = self.captured or bool(replaced) or any(scalar_types_called(function.__globals__, reads))

    def _add_variable(self, holder: Any, label: str, value: Any, reads: Reads) -> None:
        """Add a variable in a closure cell or in a dict of globals: its value, or the attributes read of it.

        Functions that share a variable may read other attributes of it.
        """
        by_attribute = read_by_attribute(value, self.package)
        if (id(holder), label) not in self._seen:
            self._seen[id(holder), label] = len(self._seen)
            self.probes.append((holder, label, value))
            self.key.append(label)
            if label == CLASS and isinstance(value, type):  # for `super()`; `reads_of` tells where it is called
                self.key.append(Identity(value))
                self.classes.setdefault(value, label)
            elif not by_attribute:
                self.add_around(holder, label, value)
        if not by_attribute and not isinstance(value, types.FunctionType):
            return
        for path in sorted(reads.variables.get(label, ())):
            if not path and not by_attribute:
                continue  # a function, which was added as a whole
            if (id(holder), label, path) not in self._seen:
                self._seen[id(holder), label, path] = len(self._seen)
                self._add_attributes(value, label, path)

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
        # A function that is met elsewhere too has to be added there again, since it is rebuilt there.
        before, seen, stable, role = self._reads_itself, self._seen, self.stable, self._role
        self._reads_itself, self._seen, self.stable = True, {} if not before else seen, True
        self._role = Role.CONSTANT
        self.add(value, name)
        self.opaque = self.opaque or not self.stable
        self._reads_itself, self._seen, self.stable, self._role = before, seen, stable and self.stable, role
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._subject} {name!r}: an array among the attributes of a module, or of an object that cannot be "
                "rebuilt, cannot be read anew in each call; make it an argument, or a variable of its own"
            )

    def _read_attribute(self, value: Any, attribute: str) -> Any:
        """Return an attribute of an object or MISSING, and note what shows that it is current."""
        if not isinstance(value, (types.ModuleType, types.FunctionType)):
            self.stable, self.opaque = False, True
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
                self.stable, self.opaque = False, True  # an attribute such as `__name__`, which may be assigned
        return found

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
        before, stable, self.stable = (self._seen, self._compared_only, self._role), self.stable, True
        # A function that is met elsewhere too has to be added there again, since it is rebuilt there.
        self._seen, self._compared_only = self._seen if self._compared_only else {}, True
        self._role = Role.CONSTANT
        for key, label, value in parts:
            self.key.append(key)
            self.add(value, label)
        self._seen, self._compared_only, self._role = before
        self.opaque = self.opaque or not self.stable
        self.stable = self.stable and stable
        if len(self.leaves) > known:
            raise TypeError(
                f"{self._subject} {name!r}: the array {self.names[known]}, which the {holder} holds or its functions "
                "read from outside, cannot be read anew in each call; make it an argument, an attribute of one, or a "
                "variable of the fused function"
            )


class Taken(NamedTuple):
    """A signature of variables that was taken before a call: its key, and its numbers as they are in the call."""

    own: Signature
    key: Hashable
    numbers: Sequence[float]

    @property
    def given(self) -> tuple[Any, ...]:
        """The arrays and numbers."""
        return (*self.own.leaves, *self.numbers)
