"""Inline cache of a function: recognise calls like earlier ones by code generated for their arguments.

`Signature` walks arguments of any structure, and the key of all that it finds names a plan. For arrays, numbers,
strings and the containers that calls are given most, the same comparisons are generated here as one straight function.
A call that no such function recognises is walked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ..generated import Constants, define
from . import arrays
from .call import Runnable
from .direct_calls import Direct, DirectCalls
from .environment import Environment, Snapshot
from .objects import HeldObject, Places
from .parameters import Parameters
from .registry import registration
from .signature import Signature
from .structures import attributes_of, is_namedtuple, is_record, slots_of

_MOST = 4  # plans whose calls one function recognises
# Calls that are walked before code is generated, which takes as long as walking a hundred: most signatures of a program
# that has many are met a few times only.
_WALKED = 8
# Calls of a plan that the generated code recognises, in which it is not walked again, before they are described to the
# compiled launcher, which takes as long as that saves in several: functions with more plans than are recognised would
# describe and forget calls again and again.
_FOUND = 24
_MOST_VALUES = 500  # compared by one generated function
_MOST_PAIRED = 4  # arrays that are compared with each other in pairs


@dataclass(frozen=True, slots=True)
class Recognizer:
    """Recognises the calls of one plan. It holds bound arrays, but none that a call brings.

    Attributes
    ----------
    match : callable
        Takes the values of the parameters that are not bound, and the arrays around the function. Returns all arrays
        and the float arguments of such a call, else None.
    export : callable or None
        Exports results to the library of the first array.
    defaulted : collection of str
        The parameters that take their default values.
    settings : hashable
        What the key consists of beside its signature.
    around_key, of_classes : hashable or None
        Keys of the variables around the function, and of what it reads of the arguments' classes.
    classes : dict
        These classes, with their names.
    """

    match: Callable[[Sequence[Any]], tuple[list[Any], list[float]] | None]
    export: Callable[[Any], Any] | None
    defaulted: Collection[str]
    settings: Hashable
    around_key: Hashable
    of_classes: Hashable
    classes: dict[Any, str]


# A call whose plan is known: its runnable, arrays and float arguments, and the exporter of its results. A plain tuple:
# making a named one takes 0.2 us of each call.
RecognizedCall = tuple[Runnable, list[Any], list[float], Callable[[Any], Any] | None]


class InlineCache:
    """The plans whose calls a function recognises.

    Parameters
    ----------
    environment : Environment
        The variables around the function.
    names : sequence of str
        Of the function's parameters.
    bound : mapping, optional
        The values of bound parameters, by name.
    immutable : mapping, optional
        The signatures of those among them that are the same in every call. Of others the items and attributes are
        compared in each call; arrays have to be the same objects.
    settings : callable, optional
        Returns what the key of a call consists of beside its signature. Without it no call is direct.

    Attributes
    ----------
    direct : callable or None
        The compiled launcher's function that recognises and runs calls; see `DirectCalls`.
    takes_notes : bool
        Whether `note` may gain anything.
    """

    def __init__(
        self,
        environment: Environment,
        names: Sequence[str],
        bound: Mapping[str, Any] = MappingProxyType({}),
        immutable: Mapping[str, Signature] = MappingProxyType({}),
        settings: Callable[[], Hashable] | None = None,
    ):
        self._environment, self._names, self._bound, self._immutable = environment, names, bound, immutable
        self._runnables: list[Runnable] = []  # whose calls are recognised, the last walked first
        self._settings = settings
        self._calls: DirectCalls | None = None  # those among them that the compiled launcher recognises
        self.direct: Direct | None = None
        self.takes_notes = settings is not None

    def find(self, values: Sequence[Any], defaulted: Collection[str], settings: Hashable) -> RecognizedCall | None:
        """Return the call with these values of the parameters that are not bound, or None. Parameters as for `add`."""
        runnables = self._runnables
        if not runnables:
            return None
        around = self._environment.current_snapshot()
        key = None
        if around is not None:
            key = around.key
            if around.leaves:
                values = (*values, *around.leaves)
        for runnable in runnables:
            known: Recognizer = runnable.recognizer
            if known.settings != settings or (known.defaulted is not defaulted and known.defaulted != defaulted):
                continue
            if known.around_key is not key and known.around_key != key:
                continue
            found = known.match(values)
            if found is not None and (not known.classes or self._key_of(known.classes, around) == known.of_classes):
                return runnable, found[0], found[1], known.export
        return None

    def _key_of(self, classes: dict[Any, str], around: Snapshot | None) -> Hashable:
        """Return the key of what the function now reads of classes among the arguments; None if it is mutable."""
        found = None if around is None else self._environment.snapshot_of_classes(classes, around)
        return None if found is None else found.key

    def clear(self) -> None:
        """Forget all calls."""
        self._runnables = []
        self._calls = self.direct = None

    def note(
        self, known: RecognizedCall, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters
    ) -> None:
        """Have the compiled launcher recognise further calls like those that `find` has found, if it can.

        The plan has to be `quick`, and nothing given for results.

        Parameters
        ----------
        known : RecognizedCall
        args, kwargs : the arguments of the call
        parameters : those that are not bound
        """
        assert self._settings is not None
        runnable, _, _, export = known
        runnable.found += 1
        if runnable.found < _FOUND or export is not None:
            return
        calls = self._calls  # which another thread may clear
        if calls is None:
            from ..cuda import launcher  # of no use without a GPU

            module = launcher.find().module
            if module is None:
                self.takes_notes = False
                return
            calls = self._calls = DirectCalls(module, self._settings, self._environment)
        calls.add(runnable, args, kwargs, parameters, (self._names, self._bound, self._immutable))
        if self._calls is calls:
            self.direct = calls.recognize

    def add(
        self,
        runnable: Runnable,
        signature: Signature,
        values: Sequence[Any],
        defaulted: Collection[str],
        settings: Hashable,
    ) -> None:
        """Note a call that was walked; once there were enough of them, recognise further ones like it.

        Parameters
        ----------
        runnable : Runnable
            Of the call.
        signature : Signature
            Of the call.
        values : sequence
            The values of the parameters that are not bound.
        defaulted : collection of str
            The parameters that take their default values.
        settings : hashable
            What the key of the call consists of beside its signature.
        """
        runnable.calls += 1
        runnable.found = 0
        if runnable.recognizer is None and runnable.calls >= _WALKED:
            runnable.recognizer = self._make(signature, values, defaulted, settings) or False
        if runnable.recognizer:
            self._runnables = [runnable, *(r for r in self._runnables if r is not runnable)][:_MOST]
            calls = self._calls
            if calls is not None:
                calls.keep(self._runnables)
                self.direct = calls.recognize

    def _make(
        self, signature: Signature, values: Sequence[Any], defaulted: Collection[str], settings: Hashable
    ) -> Recognizer | None:
        """Return what recognises calls like one that was walked, or None. Parameters as for `add`.

        Functions, arrays that are given twice, static variables and what can change around a function have keys that
        the generated code does not compare.
        """
        environment, classes = self._environment, dict(signature.classes)
        around = environment.current_snapshot()
        of_classes = self._key_of(classes, around) if classes else None
        if (
            signature.has_functions
            or signature.duplicates()
            or environment.static
            or (around is None and not environment.is_own)
            or (of_classes is None and classes)
        ):
            return None
        writer = _Writer(signature)
        given = iter(values)
        try:
            for name in self._names:
                if name in self._immutable:
                    for leaf in self._immutable[name].leaves:
                        writer.add_leaf(writer.constant(leaf))
                elif name in self._bound:
                    writer.add_bound(self._bound[name])
                else:
                    writer.add(next(given), writer.parameter(), name in defaulted)
            for leaf in () if around is None else around.leaves:
                writer.add(leaf, writer.parameter(), False)
        except _Unrecognizable:
            return None
        key = None if around is None else around.key
        return Recognizer(writer.function(), signature.exporters[0], defaulted, settings, key, of_classes, classes)


class _Unrecognizable(Exception):
    """A value is of a type whose comparison is not generated."""


class _Writer:
    """Writes a function that compares values with those of an example call, and collects the arrays and floats in them.

    It compares at least what `Signature.add` adds to the key; of bound values that arrays are the same objects, too.
    `signature` is that of the example.
    """

    def __init__(self, signature: Signature):
        self._lines: list[str] = []
        self._constants = Constants(ndarray=np.ndarray)
        self.constant = self._constants.name
        self._parameters: list[str] = []
        self._count = 0
        self._places = Places(signature.objects, len(signature.leaves), len(signature.numbers))
        self._leaves: dict[int, str] = {}  # by position
        self._numbers: dict[int, str] = {}
        self._held = {id(held.value): held for held in signature.objects}
        self._objects: dict[int, str] = {}  # the variables that hold objects, by their number
        self._same_arrays = False  # whether arrays have to be the same objects

    def parameter(self) -> str:
        """Return the name of the next value that the function takes."""
        self._parameters.append(self._variable())
        return self._parameters[-1]

    def _variable(self) -> str:
        self._count += 1
        if self._count > _MOST_VALUES:
            raise _Unrecognizable
        return f"v{self._count}"

    def _refuse_if(self, *conditions: str) -> None:
        self._lines.append(f"if {' or '.join(conditions)}: return None")

    def add_bound(self, value: Any) -> None:
        """Compare what a bound value holds with what it holds now."""
        self._same_arrays = True
        self.add(value, self.constant(value), True)
        self._same_arrays = False

    def add_leaf(self, name: str) -> None:
        """Add an array."""
        place = self._places.next_leaf()
        if place is None:
            raise _Unrecognizable
        self._leaves[place] = name

    def add(self, value: Any, name: str, by_value: bool) -> None:
        """Write the comparison of a variable with an example value; `by_value` if floats belong to the key."""
        cls = type(value)
        if cls is np.ndarray:
            self._add_array(value, name, "ndarray")
        elif cls is arrays.CUPY_ARRAY:
            device = self.constant(value.data.device_id)
            self._add_array(value, name, self.constant(cls), f"{name}.data.device_id != {device}")
        elif value is None or value is True or value is False:
            self._refuse_if(f"{name} is not {value}")
        elif cls is int or cls is str:
            self._refuse_if(self._differs(value, name))
        elif cls is float and by_value:
            same, text = self.constant(value), self.constant(value.hex())
            self._refuse_if(f"({name} is not {same} and (type({name}) is not float or {name}.hex() != {text}))")
        elif cls is float:
            self._refuse_if(f"type({name}) is not float")
            self._numbers[self._places.next_number()] = name
        elif cls is list or cls is tuple:
            self._refuse_if(f"type({name}) is not {cls.__name__}", f"len({name}) != {len(value)}")
            self._unpack(value, name, by_value)
        elif id(value) in self._held:
            self._add_object(self._held[id(value)], name)
        elif is_record(cls) and registration(cls) is None:
            self._refuse_if(f"type({name}) is not {self.constant(cls)}")
            self._add_record(value, name, by_value)
        else:
            raise _Unrecognizable

    def _differs(self, value: int | str, name: str) -> str:
        """Return the condition that a variable holds another number or string."""
        constant = self.constant(value)
        return f"({name} is not {constant} and (type({name}) is not {type(value).__name__} or {name} != {constant}))"

    def _add_array(self, value: Any, name: str, cls: str, *further: str) -> None:
        shape, strides, dtype = map(self.constant, (value.shape, value.strides, value.dtype))
        if self._same_arrays:
            self._refuse_if(f"{name} is not {self.constant(value)}")
        self._refuse_if(
            *(f"type({name}) is not {cls}", *further, f"{name}.shape != {shape}"),
            *(f"({name}.dtype is not {dtype} and {name}.dtype != {dtype})", f"{name}.strides != {strides}"),
        )
        self.add_leaf(name)

    def _unpack(self, values: Collection[Any], source: str, by_value: bool) -> None:
        """Unpack and compare the items of an iterable; another number of them raises ValueError."""
        names = [self._variable() for _ in values]
        if names:
            self._lines.append(f"({', '.join(names)},) = {source}")
        for value, name in zip(values, names, strict=True):
            self.add(value, name, by_value)

    def _add_record(self, value: Any, name: str, by_value: bool) -> None:
        """Compare a dict, a namedtuple or a dataclass, whose type was compared."""
        cls = type(value)
        if cls is dict:
            self._add_dict(value, name, by_value)
        elif is_namedtuple(cls):
            fields = list(tuple.__iter__(value))  # the class may iterate otherwise
            self._unpack(fields, f"{self.constant(tuple.__iter__)}({name})", by_value)
        else:
            attributes = getattr(value, "__dict__", {})
            slots = slots_of(cls)
            names = {label for label, _ in attributes_of(value)}
            if attributes.keys() & dict(slots) or not names.issuperset(label for label, _ in slots):
                raise _Unrecognizable  # the key has other children
            if hasattr(value, "__dict__"):
                self._lines.append(f"{(variable := self._variable())} = {name}.__dict__")
                self._add_dict(attributes, variable, by_value)
            for _, slot in slots:
                self._lines.append(f"{(variable := self._variable())} = {self.constant(slot.__get__)}({name})")
                self.add(slot.__get__(value), variable, by_value)

    def _add_object(self, held: HeldObject, name: str) -> None:
        """Compare an object: its type, the names of its attributes, and those of them that the signature has."""
        if held.number in self._objects:
            self._refuse_if(f"{name} is not {self._objects[held.number]}")
            return
        self._objects[held.number] = name
        self._refuse_if(f"type({name}) is not {self.constant(type(held.value))}")
        attributes = list(attributes_of(held.value))
        slots = dict(slots_of(type(held.value)))
        names = {label for label, _ in attributes}
        if not slots.keys() <= names or len(names) < len(attributes):
            raise _Unrecognizable  # the key has other names
        if hasattr(held.value, "__dict__"):
            self._lines.append(f"{(variable := self._variable())} = {name}.__dict__")
            self._compare_keys(held.value.__dict__, variable)
        for label, value in attributes:
            slot = slots.get(label)
            source = f"{variable}[{label!r}]" if slot is None else f"{self.constant(slot.__get__)}({name})"
            if label not in held.spans:
                if held.by_any_name:
                    self._refuse_if(f"{source} is None")
            else:
                self._lines.append(f"{(part := self._variable())} = {source}")
                with self._places.within(held.spans[label]):
                    self.add(value, part, held.by_value)

    def _add_dict(self, value: dict[Any, Any], name: str, by_value: bool) -> None:
        self._compare_keys(value, name)
        self._unpack(value.values(), f"{name}.values()", by_value)

    def _compare_keys(self, value: dict[Any, Any], name: str) -> None:
        if not all(type(key) is str for key in value):
            raise _Unrecognizable
        self._refuse_if(f"len({name}) != {len(value)}")
        keys = [self._variable() for _ in value]
        if keys:
            self._lines.append(f"({', '.join(keys)},) = {name}")
            self._refuse_if(*(self._differs(key, variable) for key, variable in zip(value, keys, strict=True)))

    def function(self) -> Callable[[Sequence[Any]], tuple[list[Any], list[float]] | None]:
        """Compile the lines to `match(values)`: the arrays and floats of a call like the example, or None."""
        body = [f"({', '.join(self._parameters)},) = values"] if self._parameters else []
        leaves, numbers = ([found[i] for i in sorted(found)] for found in (self._leaves, self._numbers))
        body += [*self._lines, f"leaves = [{', '.join(leaves)}]"]
        # Arrays and objects that are given twice have another key.
        body += _differ(leaves, "leaves")
        if self._objects:
            objects = list(self._objects.values())
            body += _differ(objects, f"({', '.join(objects)},)")
        body.append(f"return leaves, [{', '.join(numbers)}]")
        lines = ["try:", *(f"    {line}" for line in body)]
        # A slot without a value, a namedtuple of another length, a container that another thread changes.
        lines += ["except (AttributeError, KeyError, ValueError, RuntimeError):", "    return None"]
        return define("match", "values", lines, self._constants)


def _differ(names: Sequence[str], together: str) -> list[str]:
    """Return the lines that refuse variables of which two hold the same object; `together` is all of them."""
    if len(names) <= _MOST_PAIRED:
        return [f"if {a} is {b}: return None" for a, b in itertools.combinations(names, 2)]
    return [f"if len(set(map(id, {together}))) != {len(names)}: return None"]
