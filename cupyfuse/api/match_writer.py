"""Write the function that compares the arguments of a call with those of an example, and collects their arrays."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from ..generated import Constants, define
from . import arrays
from .constants import NUMBERS, constant_key
from .current import variable
from .dependence import Dependence
from .objects import HeldObject, is_singular
from .places import Places
from .registry import is_own_type, registration
from .signature import Around, Signature
from .structures import NAMESPACES, attributes_of, is_namedtuple, is_record, slots_of

_MOST_VALUES = 500  # compared by one generated function
_MOST_PAIRED = 4  # arrays or objects that are compared with each other in pairs


class Unrecognizable(Exception):
    """A value is of a type whose comparison is not generated."""


class MatchWriter:
    """Writes a function that compares values with those of an example, and collects the arrays and numbers in them.

    It compares at least what `Signature.add` adds to the key; of bound values that arrays are the same objects, too.
    `signature` is that of the example, `depends` says which numbers are served as its own are.
    """

    def __init__(self, signature: Signature, depends: Dependence):
        self._lines: list[str] = []
        self._constants = Constants(ndarray=np.ndarray)
        self.constant = self._constants.name
        self._parameters: list[str] = []
        self._count = 0
        self._signature, self._places = signature, Places(signature)
        self._leaves: dict[int, str] = {}  # by position
        self._numbers: dict[int, str] = {}
        self._depends = depends
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
            raise Unrecognizable
        return f"v{self._count}"

    def _refuse_if(self, *conditions: str) -> None:
        self._lines.append(f"if {' or '.join(conditions)}: return None")

    def add_bound(self, value: Any) -> None:
        """Compare what a bound value holds with what it holds now."""
        self._same_arrays = True
        self.add(value, self.constant(value))
        self._same_arrays = False

    def add_immutable(self, signature: Signature) -> None:
        """Add the arrays of a bound argument that cannot change."""
        for leaf in signature.leaves:
            self.add_leaf(self.constant(leaf))
        for _ in signature.places:
            self._places.next_number()

    def add_taken(self) -> None:
        """Add the arrays and numbers around the function, which are given after the arguments."""
        assert self._signature.taken is not None
        with self._places.within_taken():
            for value in self._signature.taken.given:
                self.add(value, self.parameter())

    def add_variable(self, around: Around, is_read: bool) -> None:
        """Compare what a variable or a default holds: an object that it is known to hold, or, if `is_read`, any."""
        with self._places.within_variable(around.holder, around.label):
            if not is_read:
                self._add_same_object(around.value)
                return
            name = self._variable()
            self._lines.append(f"{name} = {variable(self.constant(around.holder), around.holder, around.label)}")
            self.add(around.value, name)

    def _add_same_object(self, value: Any) -> None:
        """Compare what an object holds; functions and classes, and what else cannot change, hold nothing to compare."""
        cls = type(value)
        if cls in NUMBERS and (place := self._places.next_number()) is not None:
            self._numbers[place] = self.constant(value)
        if isinstance(value, (type, types.FunctionType, types.ModuleType)) or constant_key(value) is not None:
            return
        if cls is types.MethodType:
            self._add_same_object(value.__func__)
            self._add_same_object(value.__self__)
        elif cls is functools.partial:
            for held in (value.func, *value.args):
                self._add_same_object(held)
            self.add(value.keywords, f"{self.constant(value)}.keywords")
        elif not (is_own_type(cls) and not registration(cls).mutable):  # type: ignore[union-attr]
            self.add(value, self.constant(value))

    def add_leaf(self, name: str) -> None:
        """Add an array."""
        self._leaves[self._places.next_leaf()] = name

    def add(self, value: Any, name: str) -> None:
        """Write the comparison of a variable with an example value."""
        cls = type(value)
        if cls is np.ndarray:
            self._add_array(value, name, "ndarray")
        elif cls is arrays.CUPY_ARRAY:
            device = self.constant(value.data.device_id)
            self._add_array(value, name, self.constant(cls), f"{name}.data.device_id != {device}")
        elif value is None or value is True or value is False:
            self._refuse_if(f"{name} is not {value}")
        elif cls is object:  # a sentinel
            self._refuse_if(f"{name} is not {self.constant(value)}")
        elif cls is str:
            self._refuse_if(self._differs(value, name))
        elif cls in NUMBERS:
            place = self._places.next_number()
            if place is not None:
                self._numbers[place], value = name, self._signature.numbers[place]
            is_open = place is not None and place not in self._depends.positions
            self._refuse_if(f"type({name}) is not {self.constant(cls)}" if is_open else self._differs(value, name))
        elif cls is list or cls is tuple:
            self._refuse_if(f"type({name}) is not {cls.__name__}", f"len({name}) != {len(value)}")
            self._unpack(value, name)
        elif id(value) in self._held:
            self._add_object(self._held[id(value)], name)
        elif cls in NAMESPACES:
            self._refuse_if(f"type({name}) is not {self.constant(cls)}")
            self._lines.append(f"{(variable := self._variable())} = {name}.__dict__")
            self._add_dict(vars(value), variable)
        elif is_record(cls) and registration(cls) is None:
            self._refuse_if(f"type({name}) is not {self.constant(cls)}")
            self._add_record(value, name)
        else:
            raise Unrecognizable

    def _differs(self, value: float | str, name: str) -> str:
        """Return the condition that a variable holds another number or string."""
        constant = self.constant(value)
        if isinstance(value, (float, np.floating)):
            cls, text = self.constant(type(value)), self.constant(float(value).hex())
            return f"({name} is not {constant} and (type({name}) is not {cls} or float({name}).hex() != {text}))"
        if isinstance(value, np.integer):
            cls = self.constant(type(value))
            return f"({name} is not {constant} and (type({name}) is not {cls} or {name} != {constant}))"
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

    def _unpack(self, values: Collection[Any], source: str) -> None:
        """Unpack and compare the items of an iterable; another number of them raises ValueError."""
        names = [self._variable() for _ in values]
        if names:
            self._lines.append(f"({', '.join(names)},) = {source}")
        for value, name in zip(values, names, strict=True):
            self.add(value, name)

    def _add_record(self, value: Any, name: str) -> None:
        """Compare a dict, a namedtuple or a dataclass, whose type was compared."""
        cls = type(value)
        if cls is dict:
            self._add_dict(value, name)
        elif is_namedtuple(cls):
            fields = list(tuple.__iter__(value))  # the class may iterate otherwise
            self._unpack(fields, f"{self.constant(tuple.__iter__)}({name})")
        else:
            attributes = getattr(value, "__dict__", {})
            slots = slots_of(cls)
            names = {label for label, _ in attributes_of(value)}
            if attributes.keys() & dict(slots) or not names.issuperset(label for label, _ in slots):
                raise Unrecognizable  # the key has other children
            if hasattr(value, "__dict__"):
                self._lines.append(f"{(variable := self._variable())} = {name}.__dict__")
                self._add_dict(attributes, variable)
            for _, slot in slots:
                self._lines.append(f"{(variable := self._variable())} = {self.constant(slot.__get__)}({name})")
                self.add(slot.__get__(value), variable)

    def _add_object(self, held: HeldObject, name: str) -> None:
        """Compare an object: its type, the names of its attributes, and those of them that the signature has."""
        if held.number in self._objects:
            if self._same_arrays:
                raise Unrecognizable  # where it was met first, other arrays would be taken
            self._refuse_if(f"{name} is not {self._objects[held.number]}")
            return
        self._objects[held.number] = name
        self._refuse_if(f"type({name}) is not {self.constant(type(held.value))}")
        attributes = list(attributes_of(held.value))
        slots = dict(slots_of(type(held.value)))
        names = {label for label, _ in attributes}
        if not slots.keys() <= names or len(names) < len(attributes):
            raise Unrecognizable  # the key has other names
        if hasattr(held.value, "__dict__"):
            self._lines.append(f"{(variable := self._variable())} = {name}.__dict__")
            self._compare_keys(held.value.__dict__, variable)
        for label, value in attributes:
            slot = slots.get(label)
            source = f"{variable}[{label!r}]" if slot is None else f"{self.constant(slot.__get__)}({name})"
            if label not in held.spans:
                self._refuse_if(f"{self.constant(is_singular)}({source})")
            else:
                self._lines.append(f"{(part := self._variable())} = {source}")
                with self._places.within(held.spans[label]):
                    self.add(value, part)

    def _add_dict(self, value: dict[Any, Any], name: str) -> None:
        self._compare_keys(value, name)
        self._unpack(value.values(), f"{name}.values()")

    def _compare_keys(self, value: dict[Any, Any], name: str) -> None:
        if not all(type(key) is str for key in value):
            raise Unrecognizable
        self._refuse_if(f"len({name}) != {len(value)}")
        keys = [self._variable() for _ in value]
        if keys:
            self._lines.append(f"({', '.join(keys)},) = {name}")
            self._refuse_if(*(self._differs(key, variable) for key, variable in zip(value, keys, strict=True)))

    def function(self) -> Callable[[Sequence[Any]], tuple[list[Any], list[float]] | None]:
        """Compile the lines to `match(values)`: the arrays and numbers of a call like the example, or None."""
        body = [f"({', '.join(self._parameters)},) = values"] if self._parameters else []
        self._places.check_complete()
        if (len(self._leaves), len(self._numbers)) != (len(self._signature.leaves), len(self._signature.numbers)):
            raise Unrecognizable
        leaves, numbers = ([found[i] for i in sorted(found)] for found in (self._leaves, self._numbers))
        body += [*self._lines, f"leaves = [{', '.join(leaves)}]"]
        # Arrays and objects that are given twice have another key.
        body += _differ(leaves, "leaves")
        if self._objects:
            objects = list(self._objects.values())
            body += _differ(objects, f"({', '.join(objects)},)")
        body.append(f"numbers = [{', '.join(numbers)}]")
        if self._depends.conditions:
            body.append(f"if not {self.constant(self._depends.covers)}(numbers): return None")
        body.append("return leaves, numbers")
        lines = ["try:", *(f"    {line}" for line in body)]
        # A slot without a value, a namedtuple of another length, a container that another thread changes.
        lines += ["except (AttributeError, KeyError, ValueError, RuntimeError):", "    return None"]
        return define("match", "values", lines, self._constants)


def _differ(names: Sequence[str], together: str) -> list[str]:
    """Return the lines that refuse variables of which two hold the same object; `together` is all of them."""
    if len(names) <= _MOST_PAIRED:
        return [f"if {a} is {b}: return None" for a, b in itertools.combinations(names, 2)]
    return [f"if len(set(map(id, {together}))) != {len(names)}: return None"]
