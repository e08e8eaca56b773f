"""Registered types: how to flatten objects of a class into arrays and constants, and to rebuild them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Registration(NamedTuple):
    """How to flatten and rebuild objects of a type; `mutable` if they may change their children, `own` if this package
    defines the type, which is then a kind of function.
    """

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: Callable[[Any, list[Any]], Any]
    mutable: bool = True
    own: bool = False


_registered: dict[type, Registration] = {}


def register(
    cls: type, flatten: Callable[[Any], tuple[Iterable[Any], Any]], unflatten: Callable[[Any, list[Any]], Any]
) -> type:
    """Let fused functions take and return objects of a type, and call its methods.

    Objects of plain classes of the user's own are taken without: this is for those that also have a value, that inherit
    from a library's, or that functions return.

    Parameters
    ----------
    cls : type
        Objects of exactly this type; subclasses are registered on their own.
    flatten : callable
        ``flatten(obj)`` returns ``(children, constants)``: all that a fused function may read of the object. Children
        are arrays, numbers and any other argument of fused functions. Constants are hashable; calls share a trace if
        they are equal.
    unflatten : callable
        ``unflatten(constants, children)`` makes an object again, of the children as a list. While a function is traced,
        these are traced arrays.

    Returns
    -------
    type
        `cls`.

    Raises
    ------
    TypeError
        `cls` is not a type, or is one that fused functions know already; `flatten` or `unflatten` cannot be called.

    Examples
    --------
    >>> import numpy as np, cupyfuse as cf
    >>> class Line:
    ...     def __init__(self, slope, offset):
    ...         self.slope, self.offset = slope, offset
    >>> cf.register(Line, lambda line: ([line.slope, line.offset], None), lambda _, children: Line(*children))
    <class '...Line'>
    >>> steeper = cf.fuse(lambda line, factor: Line(line.slope * factor, line.offset))
    >>> steeper(Line(np.array([1.0, 2.0]), np.zeros(2)), 3.0).slope
    array([3., 6.])
    """
    if not isinstance(cls, type):
        raise TypeError(f"register: cls: expected a type, got {type(cls).__name__}")
    if cls.__flags__ & (1 << 8) or not cls.__flags__ & (1 << 9):
        # An immutable type, or one not made by a class statement: NumPy's, CuPy's and Python's own.
        raise TypeError(f"register: cls: expected a class of your own, got {cls.__module__}.{cls.__qualname__}")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"register: {name}: expected a function, got {type(function).__name__}")
    _registered[cls] = Registration(flatten, unflatten)
    return cls


def register_own(cls: type, flatten: Any, unflatten: Any, mutable: bool) -> None:
    """Register a kind of function of this package; `mutable` is False if they always hold the same children."""
    _registered[cls] = Registration(flatten, unflatten, mutable, own=True)


def registration(cls: type) -> Registration | None:
    """Return how objects of a type are flattened and rebuilt; None if it is not registered."""
    return _registered.get(cls)


def is_own_type(cls: type) -> bool:
    """Whether a type is a kind of function of this package."""
    return cls in _registered and _registered[cls].own
