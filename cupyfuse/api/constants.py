"""Keys of constants: values that are compared from call to call, and belong to the key of a plan."""

from __future__ import annotations

import enum
import logging
import types
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..trace import NUMPY_NUMBERS
from ..trace.numpy import is_distribution, is_multimethod


class Identity:
    """A key that compares an object by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self.value is other.value

    def __repr__(self) -> str:
        return f"<identity of {self.value!r}>"


# Types of arguments and variables that may be numbers of a plan, which are no constants of it.
NUMBERS = (int, float, *NUMPY_NUMBERS)
_LOGGERS = (logging.Logger, logging.RootLogger)
_PLAIN = (int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented), type(np._NoValue))


def value_key(number: float) -> Hashable:
    """Return a key that is equal only for numbers of one type that no function can tell apart: integers, or floats."""
    return number if isinstance(number, (int, np.integer)) else float(number).hex()


def constant_key(value: Any) -> Hashable:
    """Return a key that is equal only for constants that no function can tell apart; None if not a constant.

    Of loggers the key has what decides whether they log, but for handlers and filters.
    """
    cls = type(value)
    if cls in _PLAIN:
        return (cls, value)
    if cls is float:
        return (cls, value.hex())
    if cls is complex:
        return (cls, value.real.hex(), value.imag.hex())
    if cls is range:
        return (cls, value.start, value.stop, value.step)
    if cls is slice:
        return _combine_keys(cls, (value.start, value.stop, value.step), constant_key)
    if cls is frozenset:
        return _combine_keys(cls, value, nested_key)  # in the order in which a function would iterate
    if isinstance(value, np.dtype):
        return (cls, value, str(value.metadata))
    if isinstance(value, np.generic) and _is_numpy_scalar(cls) and not value.dtype.hasobject:
        return (cls, value.dtype, value.tobytes())
    if cls is object or isinstance(value, enum.Enum) or is_stateless(value):
        return Identity(value)
    if cls in _LOGGERS:
        levels = value.level, value.getEffectiveLevel(), value.manager.disable
        return (Identity(value), value.name, value.disabled, *levels)
    return None


def may_change(value: Any) -> bool:
    """Whether a constant, or one in it, gets another key while it stays the same object, as a logger by its level."""
    return any(map(may_change, value)) if isinstance(value, (tuple, frozenset)) else type(value) in _LOGGERS


def enums_in(value: Any) -> list[type]:
    """Return the enum classes of the members in a constant, a nested tuple of constants, or the keys of a dict."""
    if isinstance(value, enum.Enum):
        return [type(value)]
    if isinstance(value, (tuple, frozenset, set, dict)):
        return [found for item in value if type(item) is not str for found in enums_in(item)]
    return []


def nested_key(value: Any) -> Hashable:
    """Return the key of a constant or a nested tuple of constants; None for anything else."""
    return _combine_keys(tuple, value, nested_key) if type(value) is tuple else constant_key(value)


def _combine_keys(cls: type, items: Any, key: Callable[[Any], Hashable]) -> Hashable:
    """Return the key of a container from those of its items; None if an item has none."""
    keys = tuple(map(key, items))
    return None if None in keys else (cls, keys)


def _is_numpy_scalar(cls: type) -> bool:
    """Whether a scalar type is NumPy's or ml_dtypes' own, not a subclass that a user has defined."""
    return cls.__module__.partition(".")[0] in ("numpy", "ml_dtypes")


def is_stateless(value: Any) -> bool:
    """Whether an object always behaves the same: a ufunc, a SciPy distribution, a C function of no instance."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    if isinstance(value, np.ufunc):
        return True
    cls = type(value)
    if cls in _C_DESCRIPTORS or cls is _NUMPY_FUNCTION or cls.__name__ == "cython_function_or_method":
        return True
    if cls.__module__ == "typing" or is_distribution(value) or is_multimethod(value):
        return True
    return cls.__module__.partition(".")[0] == "cupy" and cls.__name__ in (
        "ufunc",
        "ElementwiseKernel",
        "ReductionKernel",
    )


_C_DESCRIPTORS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NUMPY_FUNCTION = type(np.sum)  # a function that dispatches by __array_function__
