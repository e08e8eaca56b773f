"""Nested results of a fused function: flatten them when traced, rebuild them in each call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import TraceError
from ..ir.numbers import Number
from ..trace import DESCRIPTION, TracedNumber, Tracer
from ..trace.masked import Masked
from ..trace.user_code import definition_of
from ..trace.watched import unwatched
from . import arrays
from .constants import constant_key
from .structures import CONTAINERS_OF_KEYS, is_dataclass, is_namedtuple, structure_of


class Results:
    """The flattened result of a traced function.

    Parameters
    ----------
    value : object
    function : callable
        For messages.

    Attributes
    ----------
    leaves : list of Tracer
        The traced arrays in it, in order.
    scalars : tuple of int
        The positions of those that are NumPy scalars, not arrays without dimensions.
    key : list
        Everything else in it, to compare two traces. Numbers of the call are in it as such.
    is_none : bool
        Whether the function returned nothing.
    is_single : bool
        Whether it returned one traced array, and nothing around it.
    """

    def __init__(self, value: Any, function: Any):
        self._function = function
        self.leaves: list[Tracer] = []
        self.key: list[Any] = []
        self.is_none = value is None
        self.is_single = type(value) is Tracer and not value._is_python
        self._rebuild = self._flatten(value)
        del self._function
        self.scalars = tuple(i for i, leaf in enumerate(self.leaves) if leaf._is_scalar)

    def _flatten(self, value: Any) -> Callable[[list[Any], Sequence[float]], Any]:
        """Collect the leaves of `value`; return a function that rebuilds it from other leaves and numbers."""
        value = unwatched(value)
        cls = type(value)
        if cls is Masked:
            raise TraceError(
                f"cannot fuse a result of masked elements: their number depends on values; return the array and the "
                f"mask, and select outside of the fused function\n  at {value.line}"
            )
        if cls is Tracer:
            self.leaves.append(value)
            position = len(self.leaves) - 1
            if value._is_python:
                return lambda leaves, numbers: _python_number(leaves[position])
            return lambda leaves, numbers: leaves[position]
        if isinstance(value, TracedNumber):
            number = value.number
            self.key.append(number)
            return lambda leaves, numbers: number.evaluate(numbers)
        if (key := constant_key(value)) is not None:
            self._add_key(key)
            return lambda leaves, numbers: value
        if cls is np.ndarray or arrays.is_cupy(value):
            # An array that the function created: each call returns a copy, which the caller may change.
            self.key.append((value.shape, str(value.dtype), value.tobytes()))
            kept = value.copy()
            return lambda leaves, numbers: kept.copy()
        try:
            structure = structure_of(_with_known_keys(value))
        except TypeError as error:
            raise TypeError(f"the function returns {error}") from error
        if structure is None:
            raise TypeError(
                f"the function returns a {cls.__name__}: expected arrays, numbers, or tuples, lists, dicts and "
                "dataclasses of these; create other objects outside, or teach their type to cf.register"
            )
        self._add_key(_key_of(structure.key))
        items = [self._flatten(child) for child in structure.children]
        return lambda leaves, numbers: structure.rebuild([item(leaves, numbers) for item in items])

    def _add_key(self, key: Any) -> None:
        """Add a part of the key; raise TraceError if it is, or has, text that was made of a traced array."""
        if DESCRIPTION in str(key):
            raise TraceError(
                "cannot fuse a text of an array's values, which are not known while the function is traced; return the "
                f"array, and format it outside of the fused function\n  at {definition_of(self._function)}"
            )
        self.key.append(key)

    def rebuild(self, leaves: list[Any], numbers: Sequence[float] = ()) -> Any:
        """Return the same structure with these arrays in the place of the traced ones, and numbers of those of a call.

        A plan for which all numbers are constants needs none.
        """
        return leaves[0] if self.is_single else self._rebuild(leaves, numbers)

    def key_for(self, numbers: Sequence[float]) -> list[Any]:
        """Return the key of the results of a call with these numbers."""
        return [constant_key(part.evaluate(numbers)) if type(part) is Number else part for part in self.key]


def _with_known_keys(value: Any) -> Any:
    """Return a dict or set with the values of numbers of the call among its keys, which were read to hash them."""
    if type(value) not in CONTAINERS_OF_KEYS:
        return value
    keys = [_known_key(k) for k in value]
    if all(known is k for known, k in zip(keys, value, strict=True)):
        return value
    known = copy.copy(value)
    known.clear()
    known.update(keys if isinstance(value, set) else dict(zip(keys, value.values(), strict=True)))
    return known


def _known_key(key: Any) -> Any:
    """Return the value of a number of the call, also within tuples and frozensets; any other key itself."""
    if isinstance(key, TracedNumber):
        return key.read()
    if type(key) not in (tuple, frozenset):
        return key
    items = [_known_key(item) for item in key]
    return key if all(known is item for known, item in zip(items, key, strict=True)) else type(key)(items)


def _key_of(key: Any) -> Any:
    """Return the key of a structure, with the names of a class of records, which each trace may make anew."""
    cls = key[0]
    if not isinstance(cls, type) or not (is_namedtuple(cls) or is_dataclass(cls)):
        return key
    return cls.__module__, cls.__qualname__, getattr(cls, "_fields", ()), *key[1:]


def _python_number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number; CuPy's 0-d arrays stay on their device."""
    return value.item() if isinstance(value, np.generic) else value
