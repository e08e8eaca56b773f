"""Replacements of the builtins `min`, `max` and `float`, and of `np.r_` and `np.c_`, while a function is traced."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Container, Iterable
from functools import wraps
from typing import Any

import numpy as np

from ..number import TracedNumber
from ..operations import apply
from ..python_numbers import as_python, is_python
from ..tracer import Tracer
from ..user_code import fail


def _extreme(original: Callable[..., Any], comparison: str) -> Callable[..., Any]:
    """Return `min` or `max`, which chooses among traced scalars by `np.where`; of equal ones the first."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Choose among two or more scalars, some traced; call Python's function for all else."""
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], str):
            args = (list(args[0]),)  # an iterator can be read once
        items = args[0] if len(args) == 1 and isinstance(args[0], list) else list(args)
        if "key" in options or len(items) < 2 or not any(isinstance(i, Tracer) for i in items):
            return original(*args, **options)
        if any(i.ndim if isinstance(i, Tracer) else np.ndim(i) for i in items):
            return original(*args, **options)
        found, *rest = items
        for item in rest:
            if isinstance(found, Tracer) or isinstance(item, Tracer):
                chosen = apply("where", apply(comparison, item, found), item, found)
                found = as_python(chosen) if is_python(item) and is_python(found) else chosen._as_result()
            else:
                found = original(found, item)
        return found

    return call


@wraps(float)
def _as_float(*args: Any) -> Any:
    """Convert to a float: traced scalars, and numbers that each call brings, to traced numbers."""
    (value,) = args if len(args) == 1 else (None,)
    if isinstance(value, Tracer) and not value.ndim and value.dtype.kind != "c":
        return as_python(value.astype("float64")._as_result())
    if isinstance(value, TracedNumber):
        return value.computed("float", float, [value])
    return float(*args)


class _Concatenator:
    """`np.r_` or `np.c_`, which concatenate the arrays that they are indexed with."""

    def __init__(self, original: Any, name: str, join: Callable[[list[Any]], Any]):
        self.original, self._name, self._join = original, name, join

    def __getitem__(self, key: Any) -> Any:
        items = list(key) if isinstance(key, tuple) else [key]
        if not any(isinstance(i, Tracer) for i in items):
            return self.original[key]
        if any(isinstance(i, str) for i in items):
            fail(f"np.{self._name} with a directive", "arrays, numbers and slices are expected; use np.concatenate")
        arrays = [self.original[i] if isinstance(i, slice) else i for i in items]
        kinds = [a.dtype if isinstance(a, Tracer) else a for a in arrays]
        dtype = np.result_type(*kinds)  # which numbers take
        return self._join([a if isinstance(a, Tracer) or np.ndim(a) else np.asarray([a], dtype) for a in arrays])

    def __len__(self) -> int:
        return 0


def _rows(arrays: list[Any]) -> Any:
    return np.concatenate([np.atleast_1d(a) for a in arrays])


def _columns(arrays: list[Any]) -> Any:
    return np.concatenate([np.atleast_1d(a)[:, None] if np.ndim(a) < 2 else a for a in arrays], axis=-1)


# (module, name, replacement)
REPLACED = [
    (np, "r_", _Concatenator(np.r_, "r_", _rows)),
    (np, "c_", _Concatenator(np.c_, "c_", _columns)),
]
BUILTINS = {"min": _extreme(builtins.min, "less"), "max": _extreme(builtins.max, "greater")}
# Of types: the replacements are none, so they take the place of these where code does nothing but call them.
_TYPES = {"float": _as_float}


def replaced_builtins(read: Iterable[str], called: Container[str]) -> dict[str, Any]:
    """Return what takes the place of the builtins that code reads, some of which it does nothing with but call them."""
    found = {name: BUILTINS.get(name) or (_TYPES.get(name) if name in called else None) for name in read}
    return {name: replacement for name, replacement in found.items() if replacement is not None}
