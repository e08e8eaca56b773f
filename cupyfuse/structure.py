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
    elif kind in (tuple, list):
        tokens.append((kind, len(value)))
        for i, item in enumerate(value):
            collect(item, f"{name}[{i}]", leaves, tokens, givers)
    elif kind is dict:
        tokens.append((kind, tuple(value)))
        for k, item in value.items():
            collect(item, f"{name}[{k!r}]", leaves, tokens, givers)
    elif isinstance(value, np.generic):
        tokens.append((kind, value.tobytes()))
    elif isinstance(value, np.ndarray):
        collect(arrays.enter(value, name).array, name, leaves, tokens, givers)
    elif arrays.is_array(value):
        if isinstance(value, arrays.Spec):
            raise TypeError(
                f"argument {name!r}: a spec has a shape and no values; use .plan() with it, or pass an array"
            )
        entry = arrays.enter(value, name)
        collect(entry.array, name, leaves, tokens, givers)
        givers[-1] = entry.give_back
    elif hasattr(value, "__dict__") and not isinstance(value, _FIXED):
        # An object whose attributes the function may read: another value of one is another trace.
        tokens.append((kind, id(value)))
        for attribute, item in sorted(vars(value).items()):
            tokens.append((attribute, id(item)) if arrays.is_array(item) else (attribute, *_state(item, name)))
    else:
        tokens.append((kind, _hashable(value, name)))


_FIXED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, enum.Enum)


def _state(value: Any, name: str) -> tuple[Any, ...]:
    """Tokens of an attribute's value: its contents where it is a plain one, else which object it is."""
    tokens: list[Any] = []
    if type(value) in (*_PLAIN, float, tuple, list, dict) or isinstance(value, np.generic):
        try:
            collect(value, name, [], tokens, [])
        except TypeError:
            tokens = [id(value)]
    else:
        tokens = [id(value)]
    return tuple(tokens)


def _hashable(value: Any, name: str) -> Any:
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"argument {name!r}: expected an array, a number, a hashable constant, or a tuple, list or dict of these, "
            f"got {type(value).__name__}"
        ) from None
    return value


def replace(value: Any, name: str, leaf: Callable[[Any, str], Any], number: Callable[[float, str], Any]) -> Any:
    """The same structure with each array and each float exchanged."""
    kind = type(value)
    if kind in (tuple, list):
        return kind(replace(v, f"{name}[{i}]", leaf, number) for i, v in enumerate(value))
    if kind is dict:
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
