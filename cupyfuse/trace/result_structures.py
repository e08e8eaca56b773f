"""The structures in which NumPy's and SciPy's functions return several results: tuples, lists and namedtuples."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from ..errors import TraceAttributeError
from .user_code import user_line


def map_results(function: Callable[[Any], Any], results: Any) -> Any:
    """Return results with a function applied to each, in nested tuples, lists and namedtuples like theirs."""
    if not isinstance(results, (tuple, list)):
        return function(results)
    items = [map_results(function, r) for r in results]
    cls = type(results)
    if not hasattr(cls, "_fields"):
        return cls(items)
    is_plain = cls.__bases__ == (tuple,) and not cls.__dictoffset__
    return (cls if is_plain else _plain_namedtuple(cls))(*items)


@cache
def _plain_namedtuple(cls: Any) -> Any:
    """Return a namedtuple class for the fields of one of SciPy's result classes, whose objects hold more than these."""
    make: Any = namedtuple
    made = make(cls.__name__, cls._fields)
    if cls.__name__ in _CORRELATIONS:
        made.correlation = made.statistic

    def refuse(self: Any, name: str) -> NoReturn:
        """Raise an error for an attribute that SciPy's object may have."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceAttributeError(
            f"cannot fuse .{name} of SciPy's {cls.__name__}: in a fused function it has its fields alone, "
            f"{', '.join(cls._fields)}; call the function outside\n  at {user_line()}"
        )

    made.__getattr__ = refuse
    made.__reduce__ = lambda self: (_unpickled, (cls, tuple(self)))
    return made


_CORRELATIONS = ("PearsonRResult", "SignificanceResult")  # SciPy's classes with a second name for `statistic`


def _unpickled(cls: Any, items: tuple[Any, ...]) -> Any:
    return _plain_namedtuple(cls)(*items)
