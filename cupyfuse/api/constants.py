"""Constants among the arguments: values that are part of the key of a plan, and how they are compared."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ..trace.numpy import is_distribution


class Identity:
    """A key that equals only that of the same object, and keeps the object alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Identity and self.value is other.value

    def __repr__(self) -> str:
        return f"<identity of {self.value!r}>"


_PLAIN = (int, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented))


def constant_key(value: Any) -> Hashable:
    """Return a key that is equal for constants which no function can tell apart; None for what is no constant."""
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
        return _all(cls, (value.start, value.stop, value.step))
    if cls is frozenset:
        return _all(cls, value, nested_key)  # in the order in which a function meets them
    if isinstance(value, np.dtype):
        return (cls, value, str(value.metadata))
    if isinstance(value, np.generic) and _is_numpys(cls) and not value.dtype.hasobject:
        return (cls, value.dtype, value.tobytes())
    if isinstance(value, enum.Enum) or is_lasting(value):
        return Identity(value)
    return None


def enums_in(value: Any) -> list[type]:
    """Return the classes of the enums whose members a constant is or contains, or the keys of a dict."""
    if isinstance(value, enum.Enum):
        return [type(value)]
    if isinstance(value, (tuple, frozenset, dict)):
        return [found for item in value if type(item) is not str for found in enums_in(item)]
    return []


def nested_key(value: Any) -> Hashable:
    """Return such a key of constants, or tuples of them; None for what is none."""
    return _all(tuple, value, nested_key) if type(value) is tuple else constant_key(value)


def _all(cls: type, items: Any, key: Callable[[Any], Hashable] = constant_key) -> Hashable:
    keys = tuple(map(key, items))
    return None if None in keys else (cls, keys)


def _is_numpys(cls: type) -> bool:
    """Whether a scalar type is one of NumPy's or of ml_dtypes', not derived from one."""
    return cls.__module__.partition(".")[0] in ("numpy", "ml_dtypes")


def is_lasting(value: Any) -> bool:
    """Whether the meaning of a value does not change: a ufunc, a distribution, a function in C bound to no object."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    if isinstance(value, np.ufunc):
        return True
    cls = type(value)
    if cls in _SLOTS or cls is _NUMPY_FUNCTION or cls.__name__ == "cython_function_or_method":
        return True
    if cls.__module__ == "typing" or is_distribution(value):
        return True
    return cls.__module__.partition(".")[0] == "cupy" and cls.__name__ in (
        "ufunc",
        "ElementwiseKernel",
        "ReductionKernel",
    )


# Methods and members of classes that are written in C, and NumPy's functions, which dispatch.
_SLOTS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_NUMPY_FUNCTION = type(np.sum)
