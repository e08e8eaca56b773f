"""Replacements of builtins, such as `min` and `int`, and of `np.r_` and `np.c_`, while a function is traced."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterable
from functools import reduce, wraps
from typing import Any

import numpy as np

from ..library import tracers_in
from ..masked import Masked
from ..number import TracedNumber
from ..operations import apply
from ..python_numbers import as_integer, as_python, is_python, is_weak
from ..tracer import Tracer
from ..user_code import fail
from ..watched import Watched
from .lists import numbers_as_scalars, stacked
from .scalar_types import SCALAR_CONVERTERS

_OWN = __name__.partition(".")[0] + "."  # where the classes are that stand for others: arrays, numbers, functions


def _extreme(original: Callable[..., Any], comparison: str) -> Callable[..., Any]:
    """Return `min` or `max`, which chooses by `np.where` where traced scalars decide; of equal ones the first."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Choose among two or more scalars, perhaps by a key; call Python's function for all else."""
        if len(args) == 1 and isinstance(args[0], Iterable) and not isinstance(args[0], str):
            args = (list(args[0]),)  # an iterator can be read once
        items = args[0] if len(args) == 1 and isinstance(args[0], list) else list(args)
        is_error = "default" in options and len(args) > 1
        if is_error or len(items) < 2 or not all(map(_is_scalar, items)):
            return original(*args, **options)
        key = options.get("key")
        keys = items if key is None else [key(item) for item in items]
        if not any(isinstance(k, Tracer) for k in keys) or not all(map(_is_scalar, keys)):
            return original(*args, **options)
        found, best = items[0], keys[0]
        for item, k in zip(items[1:], keys[1:], strict=True):
            if isinstance(best, Tracer) or isinstance(k, Tracer):
                is_better = apply(comparison, k, best)
                found = _chosen(is_better, item, found)
                best = found if key is None else _chosen(is_better, k, best)
            elif original((0, 1), key=(best, k).__getitem__):
                found, best = item, k
        return found

    return call


def _is_scalar(value: Any) -> bool:
    """Whether a value is a number or an array without dimensions, traced or not."""
    return isinstance(value, (bool, int, float)) or getattr(value, "ndim", None) == 0


def _chosen(condition: Any, a: Any, b: Any) -> Any:
    """Return one of two scalars, as a number of Python's if both are."""
    chosen = apply("where", condition, a, b)
    return as_python(chosen) if is_python(a) and is_python(b) else chosen._as_result()


def _quantifier(original: Callable[..., Any], decisive: bool) -> Callable[..., Any]:
    """Return `any` or `all`, which takes traced scalars among its items, too; one truth value decides the outcome."""
    of_array, combine = (np.any, operator.or_) if decisive else (np.all, operator.and_)

    @wraps(original)
    def call(*args: Any) -> Any:
        if len(args) != 1 or not isinstance(args[0], Iterable):
            return original(*args)
        if isinstance(args[0], (Masked, Tracer)) and args[0].ndim == 1:
            return _in_dtype("bool")(of_array(args[0]))
        traced: list[Any] = []
        for item in args[0]:
            if isinstance(item, Tracer) and not item.ndim:
                traced.append(_in_dtype("bool")(item))
            elif bool(item) is decisive:
                return decisive
        return reduce(combine, traced) if traced else not decisive

    return call


def _converter(original: Callable[..., Any], convert: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a type of numbers that converts traced scalars, and numbers that each call brings, to traced numbers.

    A truth value of a number of the call is an outcome that plans are compared by, and complex ones are constants: both
    are left to the type, as is a complex scalar, which only `complex` takes.
    """

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        (value,) = args if len(args) == 1 and not options else (None,)
        if isinstance(value, Tracer) and not value.ndim and (value.dtype.kind != "c" or original is complex):
            return convert(value)
        if isinstance(value, TracedNumber) and original in (int, float):
            return value.computed(original.__name__, original, [value])
        return original(*args, **options)

    return call


def _map(function: Any, *iterables: Any, **options: Any) -> Any:
    """Call `map`, with what converts traced values for a type of numbers."""
    convert = _CONVERTERS.get(function) if isinstance(function, type) else None
    return map(function if convert is None else convert, *iterables, **options)


def _class_it_stands_for(*args: Any, **options: Any) -> Any:
    """Return the class of what a traced value or a replacement stands for; else call `type`."""
    if len(args) == 1 and isinstance(args[0], Watched):
        return np.ndarray
    is_own = len(args) == 1 and type(args[0]).__module__.startswith(_OWN)
    return args[0].__class__ if is_own else type(*args, **options)


def _is_traced(value: Any) -> bool:
    return type(value) is Tracer or isinstance(value, (Masked, TracedNumber))


@wraps(hasattr)
def _has_attribute(value: Any, name: str, /) -> bool:
    """Whether a value has an attribute; for a traced value, whether that of NumPy's or Python's has it.

    Traced values themselves have other attributes.
    """
    return hasattr(_like(value) if _is_traced(value) else value, name)


@wraps(getattr)
def _attribute(value: Any, name: str, /, *default: Any) -> Any:
    """Return an attribute. One that NumPy's value has, but a trace does not know, is an error, not the default."""
    if default and _is_traced(value) and _has_attribute(value, name):
        default = ()
    return getattr(value, name, *default)


@wraps(isinstance)
def _is_instance(value: Any, classes: Any, /) -> bool:
    """Whether a value is an instance; a traced value, whether NumPy's or Python's is, too.

    Arrays have no hash, and numbers no length. A class that decides by the value itself, in its metaclass, reads the
    traced one, which is an error.
    """
    return isinstance(value, classes) and (not _is_traced(value) or isinstance(_like(value), classes))


def _like(value: Any) -> Any:
    """Return a number of a traced number's class, or an array of a traced array's dtype and shape, if it is known."""
    if value.__class__ is not np.ndarray:
        return value.__class__()
    shape = value.shape if type(value) is Tracer else (0,) * value.ndim
    return np.ndarray(shape, value.dtype, bytes(value.dtype.itemsize), strides=(0,) * value.ndim)


def _in_dtype(dtype: str) -> Callable[[Any], Any]:
    """Return what converts a traced scalar to a dtype, as a number of Python's."""
    return lambda value: as_python(value.astype(dtype)._as_result())


class _Concatenator:
    """`np.r_` or `np.c_`, which concatenate the arrays that they are indexed with."""

    def __init__(self, original: Any, name: str, join: Callable[[list[Any]], Any]):
        self.original, self._name, self._join = original, name, join

    def __getitem__(self, key: Any) -> Any:
        items = list(key) if isinstance(key, tuple) else [key]
        if next(tracers_in(items), None) is None and not any(map(_holds_numbers, items)):
            return self.original[key]
        if any(isinstance(i, str) for i in items):
            fail(f"np.{self._name} with a directive", "arrays, numbers and slices are expected; use np.concatenate")
        arrays = [self.original[i] if isinstance(i, slice) else _from_list(i) for i in items]
        dtype = np.result_type(*map(_type_in_arrays, arrays))  # which numbers take
        return self._join([_with_numbers_of(numbers_as_scalars(a), dtype) for a in arrays])

    def __len__(self) -> int:
        return 0


def _holds_numbers(item: Any) -> bool:
    """Whether an item is a list or tuple with traced numbers among its own items."""
    return type(item) in (list, tuple) and any(isinstance(i, TracedNumber) for i in item)


def _from_list(item: Any) -> Any:
    """Return a list or tuple as an array, all else as it is."""
    if type(item) not in (list, tuple):
        return item
    given = stacked(numbers_as_scalars(item))
    return given if isinstance(given, Tracer) else np.asarray(given)


def _type_in_arrays(item: Any) -> Any:
    """Return what decides the common dtype of arrays and numbers: a dtype, or a number of Python's, which is weak."""
    if isinstance(item, TracedNumber) or is_weak(item):
        return item.__class__(0)
    return item.dtype if isinstance(item, Tracer) else item


def _with_numbers_of(item: Any, dtype: Any) -> Any:
    """Return a number as an array of a dtype, which is a traced scalar or a vector; arrays as they are."""
    if isinstance(item, Tracer):
        return item if item.ndim else item.astype(dtype)
    return item if np.ndim(item) else np.asarray([item], dtype)


def _rows(arrays: list[Any]) -> Any:
    return np.concatenate([np.atleast_1d(a) for a in arrays])


def _columns(arrays: list[Any]) -> Any:
    return np.concatenate([np.atleast_1d(a)[:, None] if np.ndim(a) < 2 else a for a in arrays], axis=-1)


# (module, name, replacement)
REPLACED = [
    (np, "r_", _Concatenator(np.r_, "r_", _rows)),
    (np, "c_", _Concatenator(np.c_, "c_", _columns)),
]
REPLACED_BUILTINS = {
    "min": _extreme(builtins.min, "less"),
    "max": _extreme(builtins.max, "greater"),
    "any": _quantifier(builtins.any, True),
    "all": _quantifier(builtins.all, False),
    "hasattr": _has_attribute,
    "getattr": _attribute,
    "isinstance": _is_instance,
}
# The replacements are no types, so they take the place of these only where code calls them.
REPLACED_TYPES = {
    "bool": _converter(bool, _in_dtype("bool")),
    "int": _converter(int, as_integer),
    "float": _converter(float, _in_dtype("float64")),
    "complex": _converter(complex, _in_dtype("complex128")),
    "type": _class_it_stands_for,
    "map": _map,
}
_CONVERTERS: dict[type, Callable[..., Any]] = {
    **{cls: REPLACED_TYPES[cls.__name__] for cls in (bool, int, float, complex)},
    **SCALAR_CONVERTERS,
}
