"""Arrays that a traced function created, watched for what NumPy cannot do with them and traced values.

NumPy cannot assign a traced value to an element of an array, nor index it by one. A trace that ended so is repeated
with watched arrays, which note where those were created that it failed for; there the next trace creates traced arrays.
Others keep their values, which the function may read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np

from .user_code import is_user_frame

# NumPy's functions that change their first argument, and its names.
_CHANGING = ("copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask")
_CHANGED = ("dst", "a", "arr")
# Methods that change the array, or read it by an index or by other arrays.
_METHODS = (
    *("__getitem__", "__setitem__", "put", "fill", "take", "repeat", "choose", "compress", "searchsorted"),
    *("dot", "clip"),
)
Site = tuple[CodeType, int]  # where a function creates an array: its code, and the instruction


class Watched(np.ndarray[Any, Any]):
    """An array that notes its `site` in its `trace` when an index of it or an assignment to it fails.

    Its views, and what ufuncs with one result compute from it, have the same site: the next trace makes them from a
    traced array. Copies have sites of their own.
    """

    site: Site | None
    trace: Any

    def __array_finalize__(self, source: Any) -> None:
        self.site, self.trace = getattr(source, "site", None), getattr(source, "trace", None)

    def copy(self, order: Any = "C") -> Any:
        copied = unwatched(self).copy(order)
        site = site_of(sys._getframe(1))
        if site is None or self.trace is None:
            return watched(copied, self.site, self.trace)
        return created(copied, site, self.trace)

    @property
    def flat(self) -> Any:
        return WatchedFlat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        WatchedFlat(self)[...] = value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.get("out", ())
        if out:
            options["out"] = tuple(map(unwatched, out))
        if "where" in options:
            options["where"] = unwatched(options["where"])
        try:
            result = getattr(ufunc, method)(*map(unwatched, inputs), **options)
        except Exception:
            note(inputs[:1] if method == "at" else out)
            raise
        if len(out) == 1:
            return out[0]
        source = next((i for i in inputs if isinstance(i, Watched)), None)
        if source is None or type(result) is not np.ndarray:
            return result
        return watched(result, source.site, source.trace)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().__array_function__(func, types, args, kwargs)
        except Exception:
            changed = (args[:1], *(kwargs.get(name) for name in _CHANGED)) if func.__name__ in _CHANGING else ()
            note((*changed, kwargs.get("out")))
            raise


class WatchedFlat:
    """The iterator `flat` over the elements of a watched array."""

    def __init__(self, array: Watched):
        self._array, self._elements = array, unwatched(array).flat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._elements, name)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self._elements, dtype)

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._elements)

    def __next__(self) -> Any:
        return next(self._elements)

    def __getitem__(self, index: Any) -> Any:
        return self._call("__getitem__", index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._call("__setitem__", index, value)

    def _call(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._elements, name)(*args)
        except Exception:
            note([self._array])
            raise


def _noting(name: str) -> Callable[..., Any]:
    """Return the method of a name, which notes the array where it fails."""
    method = getattr(np.ndarray, name)

    def call(self: Watched, *args: Any, **options: Any) -> Any:
        try:
            return method(self, *args, **options)
        except Exception:
            note([self])
            raise

    return call


for _name in _METHODS:
    setattr(Watched, _name, _noting(_name))


def note(values: Iterable[Any]) -> None:
    """Note where the watched arrays among values, and in tuples of these, were created."""
    for value in values:
        if isinstance(value, tuple):
            note(value)
        elif isinstance(value, Watched) and value.site is not None and value.trace is not None:
            value.trace.assigned_sites.add(value.site)


def site_of(frame: Any) -> Site | None:
    """Return the place that a frame is at, if it runs the user's code."""
    return (frame.f_code, frame.f_lasti) if is_user_frame(frame) else None


def created(array: Any, site: Site, trace: Any) -> Any:
    """Return an array that was created at a place: traced, watched, or itself, as the trace asks for."""
    if site in trace.traced_sites:
        traced = trace.constant(array)
        traced._is_array, traced._strides = True, array.strides
        return traced
    return watched(array, site, trace) if trace.watches else array


def watched(array: Any, site: Site | None, trace: Any) -> Watched:
    """Return a watched view of an array."""
    found: Watched = array.view(Watched)
    found.site, found.trace = site, trace
    return found


def unwatched(value: Any) -> Any:
    """Return an array as NumPy's own if it is watched; any other value unchanged."""
    return value.view(np.ndarray) if isinstance(value, Watched) else value
