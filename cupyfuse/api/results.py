"""The nested results of a fused function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..trace import TracedNumber, Tracer
from . import arrays
from .constants import constant_key
from .structures import structure_of


class _Part(NamedTuple):
    """A part of a structure: how it is made of the arrays in it, and how these are found in another one like it."""

    rebuild: Callable[[list[Any]], Any]
    find: Callable[[Any], list[Any] | None]


class Results:
    """The nested structure that a traced function returned, and the traced arrays in it.

    Attributes
    ----------
    leaves : list of Tracer
        The traced arrays, in order.
    key : list
        Everything else that was returned.
    """

    def __init__(self, value: Any):
        self.leaves: list[Tracer] = []
        self.key: list[Any] = []
        self._is_single = type(value) is Tracer and not value._is_python
        self._whole = self._flatten(value)

    def _flatten(self, value: Any) -> _Part:
        """Collect the leaves of `value`."""
        cls = type(value)
        if cls is Tracer:
            self.leaves.append(value)
            position = len(self.leaves) - 1
            if value._is_python:
                return _Part(lambda leaves: _python_number(leaves[position]), lambda value: [value])
            return _Part(lambda leaves: leaves[position], lambda value: [value])
        if cls is TracedNumber:
            value = float(value)
        if (key := constant_key(value)) is not None:
            self.key.append(key)
            return _Part(lambda leaves: value, lambda value: [])
        if cls is np.ndarray or arrays.is_cupy(value):
            # Made by the function; the caller may change what it gets.
            self.key.append((value.shape, str(value.dtype), value.tobytes()))
            kept = value.copy()
            return _Part(lambda leaves: kept.copy(), lambda value: [])
        try:
            structure = structure_of(value)
        except TypeError as error:
            raise TypeError(f"the function returns {error}") from error
        if structure is None:
            raise TypeError(
                f"the function returns a {cls.__name__}: expected arrays, numbers, or tuples, lists, dicts and "
                "dataclasses of these; create other objects outside, or teach their type to cf.register"
            )
        self.key.append(structure.key)
        items = [self._flatten(child) for child in structure.children]

        def find(value: Any) -> list[Any] | None:
            like = structure_of(value)
            if like is None or like.key != structure.key:
                return None
            found = [item.find(child) for item, child in zip(items, like.children, strict=True)]
            return None if None in found else [array for arrays in found if arrays for array in arrays]

        return _Part(lambda leaves: structure.rebuild([item.rebuild(leaves) for item in items]), find)

    def arrays_in(self, value: Any) -> list[Any] | None:
        """Return the arrays of a value of the same structure, in order; None if its structure is another one."""
        if self._is_single:
            return [value]
        return self._whole.find(value)

    def rebuild(self, leaves: list[Any]) -> Any:
        """Return the same structure with these arrays in the place of the traced ones."""
        return leaves[0] if self._is_single else self._whole.rebuild(leaves)


def _python_number(value: Any) -> Any:
    """Return a Python number for NumPy's scalar; CuPy's functions return arrays, which stay on their device."""
    return value.item() if isinstance(value, np.generic) else value
