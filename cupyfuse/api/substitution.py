"""Traced arrays in the places of arrays: in arguments, and around functions.

The walk is that of `Signature`, which numbers the arrays.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..trace import Trace, TracedNumber, argument
from ..trace.numpy import BUILTINS, replacement_of
from . import arrays
from .code import reads_of
from .constants import constant_key
from .structures import Structure, structure_of
from .variables import defaults_of, is_library_function, read_by_attribute, variables_of


class Substitution:
    """Rebuild what a function reads, with traced arrays for arrays.

    Containers that could be changed are always made again: a trace changes nothing of the user's.

    Parameters
    ----------
    trace : Trace
    traced : iterator
        The traced arrays, in the order of the leaves of a `Signature`.
    captured : bool
        Whether variables around functions hold arrays; otherwise functions stay as they are.
    read : set of int
        Gets the positions of the float arguments whose values the function reads.
    """

    def __init__(
        self, trace: Trace, traced: Iterator[Any], captured: bool, static: frozenset[str], package: str, read: set[int]
    ):
        self._trace = trace
        self._traced, self._captured, self._static, self._package = traced, captured, static, package
        self._functions: dict[types.FunctionType, types.FunctionType] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._cells: dict[int, Any] = {}
        self._seen: set[tuple[int, str]] = set()
        self._made: list[tuple[str, Any, Structure, list[Any]]] = []
        self._numbers, self._count = True, 0
        self._read = read

    def _number(self, value: float, name: str) -> TracedNumber:
        self._count += 1
        return argument(self._count - 1, name, value, self._read, self._trace)

    def by_value(self, value: Any, name: str) -> Any:
        """Return such a value with its floats as constants."""
        numbers, self._numbers = self._numbers, False
        made = self.of(value, name)
        self._numbers = numbers
        return made

    def of(self, value: Any, name: str) -> Any:
        """Return the value with traced arrays for the arrays in it."""
        cls = type(value)
        if cls is np.ndarray:
            return next(self._traced)
        if cls is float:
            return self._number(value, name) if self._numbers else value
        if cls is TracedNumber:  # of another trace, for which it is read
            return float(value)
        if (replacing := replacement_of(value)) is not None:
            return replacing
        if constant_key(value) is not None or isinstance(value, (type, types.ModuleType)):
            return value
        if cls is types.FunctionType:
            return self.function(value)
        if arrays.is_array(value):
            return next(self._traced)
        structure = structure_of(value)
        assert structure is not None
        children = [self.of(c, name + label) for label, c in zip(structure.labels, structure.children, strict=True)]
        if not structure.mutable and all(a is b for a, b in zip(children, structure.children, strict=True)):
            return value
        made = structure.rebuild(children)
        if structure.mutable:
            self._made.append((name, made, structure, children))
        return made

    def root(self, function: Any) -> Any:
        """Return the fused function itself, reading traced arrays around it."""
        if isinstance(function, types.FunctionType):
            return self.function(function, defaults=False)
        return self.by_value(function, "fn")

    def function(self, function: types.FunctionType, defaults: bool = True) -> types.FunctionType:
        """Return a function that reads traced arrays around it."""
        if function in self._functions:
            return self._functions[function]
        if not self._captured or is_library_function(function, self._package):
            return function
        cells = tuple(self._cells.setdefault(id(c), types.CellType()) for c in function.__closure__ or ())
        space = self._globals.get(id(function.__globals__))
        if space is None:
            space = self._globals[id(function.__globals__)] = dict(function.__globals__)
        for label in reads_of(function.__code__).globals:
            if label in BUILTINS:
                space.setdefault(label, BUILTINS[label])
        made = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
        functools.update_wrapper(made, function)
        self._functions[function] = made
        made.__kwdefaults__ = function.__kwdefaults__
        numbers, self._numbers = self._numbers, False
        if defaults and (function.__defaults__ or function.__kwdefaults__):
            values = [self.of(value, label) for label, value in defaults_of(function)]
            count = len(function.__defaults__ or ())
            made.__defaults__ = tuple(values[:count])
            made.__kwdefaults__ = dict(zip(function.__kwdefaults__ or (), values[count:], strict=True))
        for place, label, value in variables_of(function):
            if (id(place), label) in self._seen:
                continue
            self._seen.add((id(place), label))
            if label not in self._static and not read_by_attribute(value, self._package):
                value = self.of(value, label)
            if isinstance(place, dict):
                space[label] = value
            else:
                self._cells[id(place)].cell_contents = value
        self._numbers = numbers
        return made

    def changed(self) -> str | None:
        """Return the name of a container that the function put something else into."""
        for name, made, before, children in self._made:
            after = structure_of(made)
            assert after is not None
            was, now = _lasting(made, before.labels, children), _lasting(made, after.labels, after.children)
            if was.keys() != now.keys() or not all(map(_same, now.values(), was.values())):
                return name
            if len(was) == len(children) and len(now) == len(after.children) and after.key != before.key:
                return name
        return None


def _lasting(value: Any, labels: list[str], children: list[Any]) -> dict[str, Any]:
    """Return the children of an object, by label, without those that a cached property has computed."""
    cls = type(value)
    return {
        label: child
        for label, child in zip(labels, children, strict=True)
        if not isinstance(getattr(cls, label[1:], None), functools.cached_property)
    }


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    key = constant_key(a)
    if key is not None:
        return key == constant_key(b)
    # Containers may be made anew by a registered type's `flatten`.
    return type(a) is type(b) and structure_of(a) is not None
