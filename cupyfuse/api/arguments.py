"""Nested arguments and results: tuples, lists and dicts of arrays, taken apart and put together again."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import arrays

_PLAIN = (int, bool, str, type(None))


def collect(value: Any, name: str, leaves: list[Any], tokens: list[Any], givers: list[Any]) -> None:
    """Take one argument apart: its arrays to `leaves`, and to `tokens` all that a trace of it depends on."""
    kind = type(value)
    if kind is np.ndarray:
        leaves.append(value)
        givers.append(None)
        tokens.append((kind, value.shape, value.dtype, value.strides))
    elif kind is arrays.CUPY_ARRAY or arrays.is_cupy(value):
        leaves.append(value)
        givers.append(None)
        tokens.append((value.data.device_id, value.shape, value.dtype, value.strides))
    elif kind in _PLAIN:
        tokens.append((kind, value))
    elif kind is float:
        tokens.append((kind, value.hex()))
    elif isinstance(value, (tuple, list, dict)):
        _collect_items(value, name, leaves, tokens, givers)
    elif isinstance(value, np.generic):
        tokens.append((kind, value.tobytes()))
    elif isinstance(value, np.ndarray):
        collect(arrays.enter(value, name).array, name, leaves, tokens, givers)
    elif arrays.is_array(value):
        if isinstance(value, arrays.Spec):
            raise TypeError(f"argument {name!r}: a spec has no values; use .plan() with it, or pass an array")
        entry = arrays.enter(value, name)
        collect(entry.array, name, leaves, tokens, givers)
        givers[-1] = entry.give_back
    else:
        tokens.append(_state(value, name, ()))


def _collect_items(value: Any, name: str, leaves: list[Any], tokens: list[Any], givers: list[Any]) -> None:
    if isinstance(value, dict):
        tokens.append((type(value), tuple(value)))
        for k, item in value.items():
            collect(item, f"{name}[{k!r}]", leaves, tokens, givers)
    else:
        tokens.append((type(value), len(value)))
        for i, item in enumerate(value):
            collect(item, f"{name}[{i}]", leaves, tokens, givers)


# What is compared by value, or is the same for as long as it exists.
_CONSTANTS = (int, bool, str, float, complex, bytes, range, frozenset, slice, type(None), type(Ellipsis), np.dtype)
_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.ufunc, enum.Enum)


def _state(value: Any, name: str, above: tuple[int, ...]) -> Any:
    """All that a trace can have read of an object: its type and, recursively, its attributes and its class's."""
    kind = type(value)
    if kind is float:
        return (kind, value.hex())
    if kind in _CONSTANTS:
        return (kind, str(value) if kind is slice else value)
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if isinstance(value, _FIXED):
        return (kind, value)
    if isinstance(value, np.dtype):
        return (kind, value)
    if arrays.is_array(value):
        raise TypeError(
            f"argument {name!r}: an object that holds an array cannot be a constant of a fused call, since changes of "
            "the array could not be seen; pass the array as an argument of its own"
        )
    if id(value) in above or len(above) > 8:
        raise TypeError(f"argument {name!r}: a {kind.__name__} that contains itself cannot be a constant")
    above = (*above, id(value))
    if isinstance(value, dict):
        return (kind, tuple((k, _state(v, name, above)) for k, v in value.items()))
    if isinstance(value, (tuple, list)):
        return (kind, tuple(_state(v, name, above) for v in value))
    attributes = dict(getattr(value, "__dict__", {}))
    for base in kind.__mro__[:-1]:
        slots = base.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                attributes[slot] = getattr(value, slot)
        for attribute, item in base.__dict__.items():
            if type(item) in _CONSTANTS and not attribute.startswith("__"):
                attributes.setdefault(attribute, item)
    if not hasattr(value, "__dict__") and not any("__slots__" in b.__dict__ for b in kind.__mro__[:-1]):
        raise TypeError(
            f"argument {name!r}: expected an array, a number, a constant, or a tuple, list or dict of these, got "
            f"{kind.__name__}, whose changes could not be seen; pass what the function needs of it instead"
        )
    return (kind, tuple((k, _state(v, name, above)) for k, v in sorted(attributes.items())))


def replace(value: Any, name: str, leaf: Callable[[Any, str], Any], number: Callable[[float, str], Any]) -> Any:
    """The same structure with each array and each float exchanged."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(replace(v, f"{name}.{k}", leaf, number) for k, v in zip(value._fields, value, strict=True)))
    if isinstance(value, (tuple, list)):
        return kind(replace(v, f"{name}[{i}]", leaf, number) for i, v in enumerate(value))
    if isinstance(value, dict):
        return {k: replace(v, f"{name}[{k!r}]", leaf, number) for k, v in value.items()}
    if arrays.is_array(value):
        return leaf(value, name)
    return number(value, name) if kind is float else value


class Results:
    """The form of what a traced function returned, with places for the arrays."""

    def __init__(self, value: Any, is_leaf: Callable[[Any], bool]):
        self.leaves: list[Any] = []
        self._form = self._take(value, is_leaf)
        self.single = self._form == ("leaf", 0)

    def _take(self, value: Any, is_leaf: Callable[[Any], bool]) -> Any:
        if is_leaf(value):
            self.leaves.append(value)
            return ("leaf", len(self.leaves) - 1)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("named", type(value), [self._take(v, is_leaf) for v in value])
        if isinstance(value, (tuple, list)):
            return ("sequence", type(value), [self._take(v, is_leaf) for v in value])
        if isinstance(value, dict):
            return ("dict", list(value), [self._take(v, is_leaf) for v in value.values()])
        if hasattr(value, "shape") and not isinstance(value, np.generic):
            raise TypeError("the function returns an array that is not computed from its arguments; return it outside")
        if not isinstance(value, (*_CONSTANTS, np.generic, *_FIXED)):
            raise TypeError(
                f"the function returns a {type(value).__name__}: expected arrays, numbers, or tuples, lists and dicts "
                "of these; make other objects outside"
            )
        return ("constant", float(value) if isinstance(value, float) else value)

    def rebuild(self, arrays_: list[Any]) -> Any:
        return arrays_[0] if self.single else self._put(self._form, arrays_)

    def _put(self, form: Any, values: list[Any]) -> Any:
        kind = form[0]
        if kind == "leaf":
            return values[form[1]]
        if kind == "constant":
            return form[1]
        items: Iterable[Any] = [self._put(f, values) for f in form[2]]
        if kind == "named":
            return form[1](*items)
        return dict(zip(form[1], items, strict=True)) if kind == "dict" else form[1](items)
