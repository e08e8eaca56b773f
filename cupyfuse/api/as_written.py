"""Functions that run as written: on the CPU, where a plan would gain nothing (see `engines/host_time.py`)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .constants import constant_key
from .structures import structure_of


class AsWritten:
    """A function called as it is; the arrays that it returns are nobody else's."""

    def __init__(self, function: Callable[..., Any], signature: inspect.Signature, positional: bool):
        self._function, self._signature, self._positional = function, signature, positional

    def __call__(self, values: Sequence[Any]) -> Any:
        """Return what the function returns for the values of all parameters.

        Arrays among it are copied where they share memory with arguments, with what the function has kept, or with each
        other; lists, dicts and objects that hold arrays are made anew.
        """
        with np.errstate(all="ignore"):
            if self._positional:
                return _separated(self._function(*values))
            bound = self._signature.bind_partial()
            bound.arguments.update(zip(self._signature.parameters, values, strict=True))
            return _separated(self._function(*bound.args, **bound.kwargs))


def _separated(returned: Any) -> Any:
    found: list[Any] = []
    rebuild = _take_apart(returned, found)
    del returned  # so that `found` alone holds the arrays, but for what holds them elsewhere
    for k in range(len(found)):
        if not _is_free(found, k):
            found[k] = found[k].copy()
    return rebuild(found)


def _take_apart(value: Any, found: list[Any]) -> Callable[[list[Any]], Any]:
    """Collect the arrays of a result; return a function that makes it again of other ones."""
    if type(value) is np.ndarray:
        position = len(found)
        found.append(value)
        return lambda arrays: arrays[position]
    structure = None if isinstance(value, np.generic) or constant_key(value) is not None else structure_of(value)
    if structure is None:
        return lambda arrays: value
    make = structure.rebuild
    parts = [_take_apart(child, found) for child in structure.children]
    return lambda arrays: make([part(arrays) for part in parts])


def _is_free(arrays: list[Any], k: int) -> bool:
    """Whether the list alone holds an array, or a view whose memory nothing else holds, and it can be written to."""
    if sys.getrefcount(arrays[k]) > _ALONE or 0 in arrays[k].strides or not arrays[k].flags.writeable:
        return False
    if arrays[k].base is None:
        return True
    if type(arrays[k].base) is not np.ndarray or sys.getrefcount(arrays[k].base) > _ALONE:
        return False
    owner = arrays[k].base
    return owner.base is None and arrays[k].nbytes <= owner.nbytes


# References to an array that only a list holds, as `_is_free` counts them.
_ALONE = sys.getrefcount([np.empty(1)][0]) + 1
