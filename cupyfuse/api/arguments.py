"""Nested arguments and results: flatten tuples, lists and dicts of arrays, and rebuild them."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from . import arrays

CONTAINERS = (tuple, list, dict)

_IMMUTABLE = (int, bool, str, type(None))


def flatten(value: Any, name: str, leaves: list[Any], signature: list[Any], exporters: list[Any]) -> None:
    """Append the arrays in an argument to `leaves`, and to `signature` everything else that its trace depends on.

    `exporters` gets one entry for each leaf: the function that exports results to the leaf's library, or None.
    """
    cls = type(value)
    if cls is np.ndarray:
        leaves.append(value)
        exporters.append(None)
        signature.append((cls, value.shape, value.dtype, value.strides))
    elif cls is arrays.CUPY_ARRAY or arrays.is_cupy(value):
        leaves.append(value)
        exporters.append(None)
        signature.append((value.data.device_id, value.shape, value.dtype, value.strides))
    elif cls in _IMMUTABLE:
        signature.append((cls, value))
    elif cls is float:
        signature.append((cls, value.hex()))
    elif isinstance(value, dict):
        signature.append((cls, tuple(value)))
        for key, item in value.items():
            flatten(item, f"{name}[{key!r}]", leaves, signature, exporters)
    elif isinstance(value, (tuple, list)):
        signature.append((cls, len(value)))
        for i, item in enumerate(value):
            flatten(item, f"{name}[{i}]", leaves, signature, exporters)
    elif isinstance(value, np.generic):
        signature.append((cls, value.tobytes()))
    elif arrays.is_array(value):
        if isinstance(value, arrays.Spec):
            raise TypeError(f"argument {name!r}: a spec has no values; use .plan() with it, or pass an array")
        imported = arrays.import_array(value, name)
        flatten(imported.array, name, leaves, signature, exporters)
        exporters[-1] = imported.export
    else:
        signature.append(_constant_signature(value, name, ()))


# Constants compared by value, and those compared by identity.
_BY_VALUE = (int, bool, str, float, complex, bytes, range, frozenset, slice, type(None), type(Ellipsis), np.dtype)
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.ufunc, enum.Enum)


def _constant_signature(value: Any, name: str, parents: tuple[int, ...]) -> Any:
    """Return everything a trace can read of an object: its type, its attributes and its class's, recursively."""
    cls = type(value)
    if cls is float:
        return (cls, value.hex())
    if cls in _BY_VALUE:
        return (cls, str(value) if cls is slice else value)
    if isinstance(value, np.generic):
        return (cls, value.tobytes())
    if isinstance(value, (*_BY_IDENTITY, np.dtype)):
        return (cls, value)
    if arrays.is_array(value):
        raise TypeError(
            f"argument {name!r}: an object that holds an array cannot be a constant of a fused call, since changes of "
            "the array would go unnoticed; pass the array as an argument of its own"
        )
    if id(value) in parents or len(parents) > 8:
        raise TypeError(f"argument {name!r}: a {cls.__name__} that contains itself cannot be a constant")
    parents = (*parents, id(value))
    if isinstance(value, dict):
        return (cls, tuple((k, _constant_signature(v, name, parents)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (cls, tuple(_constant_signature(v, name, parents) for v in value))
    attributes = _attributes(value)
    if attributes is None:
        raise TypeError(
            f"argument {name!r}: expected an array, a number, a constant, or a tuple, list or dict of these, got "
            f"{cls.__name__}, whose changes would go unnoticed; pass what the function needs of it instead"
        )
    return (cls, tuple((k, _constant_signature(v, name, parents)) for k, v in sorted(attributes.items())))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes and its classes' constants; None for an object that has no attributes."""
    found = dict(getattr(value, "__dict__", {}))
    readable = hasattr(value, "__dict__")
    for base in type(value).__mro__[:-1]:
        readable = readable or "__slots__" in base.__dict__
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                found[slot] = getattr(value, slot)
        for attribute, item in base.__dict__.items():
            if type(item) in _BY_VALUE and not attribute.startswith("__"):
                found.setdefault(attribute, item)
    return found if readable else None


def map_leaves(
    value: Any, name: str, array: Callable[[Any, str], Any], number: Callable[[float, str], Any] | None = None
) -> Any:
    """Rebuild a nested argument with `array` applied to each array, and `number` to each float."""
    cls = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
        return cls(*(map_leaves(v, f"{name}.{k}", array, number) for k, v in items))
    if isinstance(value, (tuple, list)):
        return cls(map_leaves(v, f"{name}[{i}]", array, number) for i, v in enumerate(value))
    if isinstance(value, dict):
        return {k: map_leaves(v, f"{name}[{k!r}]", array, number) for k, v in value.items()}
    if arrays.is_array(value):
        return array(value, name)
    return number(value, name) if cls is float and number is not None else value


class Results:
    """The nested structure that a traced function returned, and the traced arrays in it.

    Attributes
    ----------
    leaves : list
        The traced arrays, in order.
    """

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool]):
        self.leaves: list[Any] = []
        self._rebuild = self._flatten(value, is_leaf)
        self._is_single = is_leaf(value)

    def _flatten(self, value: Any, is_leaf: Callable[[Any], bool]) -> Callable[[list[Any]], Any]:
        """Collect the leaves of `value`; return a function that rebuilds it from other leaves."""
        if is_leaf(value):
            self.leaves.append(value)
            position = len(self.leaves) - 1
            return lambda leaves: leaves[position]
        if isinstance(value, CONTAINERS):
            cls = type(value)
            items = [self._flatten(v, is_leaf) for v in (value.values() if isinstance(value, dict) else value)]
            if isinstance(value, dict):
                keys = list(value)
                return lambda leaves: dict(zip(keys, (item(leaves) for item in items), strict=True))
            if hasattr(value, "_fields"):
                return lambda leaves: cls(*(item(leaves) for item in items))
            return lambda leaves: cls(item(leaves) for item in items)
        if hasattr(value, "shape") and not isinstance(value, np.generic):
            raise TypeError("the function returns an array that is not computed from its arguments; return it outside")
        if not isinstance(value, (*_BY_VALUE, np.generic, *_BY_IDENTITY)):
            raise TypeError(
                f"the function returns a {type(value).__name__}: expected arrays, numbers, or tuples, lists and dicts "
                "of these; create other objects outside"
            )
        constant = float(value) if isinstance(value, float) else value
        return lambda leaves: constant

    def rebuild(self, leaves: list[Any]) -> Any:
        """Return the same structure with these arrays in the place of the traced ones."""
        return leaves[0] if self._is_single else self._rebuild(leaves)
