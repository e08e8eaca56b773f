"""Call the user's function itself: on the CPU, where its plan would gain nothing (see `engines/host_time.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .constants import constant_key
from .parameters import Parameters
from .structures import structure_of


class AsWritten:
    """A function called as written, whose results share memory with no other array."""

    def __init__(self, function: Callable[..., Any], parameters: Parameters, restored: Sequence[int] = ()):
        """Parameters: the function, its own ones, and the numbers of the arrays to put back where it raises."""
        self._function, self._parameters, self._restored = function, parameters, restored

    def __call__(self, values: Sequence[Any], leaves: Sequence[Any] = ()) -> Any:
        """Return what the function returns for the values of all parameters, among which the arrays are `leaves`.

        Result arrays are copied where they share memory with arguments, with what the function has kept, or with each
        other; containers are rebuilt where something in them may.
        """
        before = [(leaves[k], leaves[k].copy("K")) for k in self._restored] if self._restored else ()
        try:
            with np.errstate(all="ignore"):
                return _copy_shared_arrays(self._parameters.call(self._function, values))
        except BaseException:
            for array, value in before:
                array[...] = value
            raise


def _copy_shared_arrays(returned: Any) -> Any:
    """Return a result with copies of the arrays in it that something else holds or has a view of."""
    if type(returned) is np.ndarray:
        alone = [returned]
        del returned  # it would count as another holder of the array
        return alone[0] if _is_unshared(alone, 0) else alone[0].copy()
    if type(returned) in _PLAIN and sys.getrefcount(returned) == _ONE_ARGUMENT and _holds_new_arrays(returned):
        return returned
    found: list[Any] = []
    rebuild = _flatten(returned, found)
    del returned  # it would count as another holder of the arrays
    for k in range(len(found)):
        if not _is_unshared(found, k):
            found[k] = found[k].copy()
    return rebuild(found)


def _holds_new_arrays(container: Any) -> bool:
    """Whether all items of a tuple, list or dict are numbers, strings, None, or arrays that nothing else holds."""
    for item in container.values() if type(container) is dict else container:
        if type(item) is np.ndarray:
            if sys.getrefcount(item) != _ONE_ITEM or item.base is not None or not _is_plain(item):
                return False
        elif not isinstance(item, _IMMUTABLE):
            return False
    return True


def _flatten(value: Any, found: list[Any]) -> Callable[[list[Any]], Any]:
    """Append the arrays in a result to `found`; return a function that rebuilds the result from other arrays."""
    if type(value) is np.ndarray:
        position = len(found)
        found.append(value)
        return lambda arrays: arrays[position]
    structure = None if isinstance(value, np.generic) or constant_key(value) is not None else structure_of(value)
    if structure is None:
        return lambda arrays: value
    rebuild = structure.rebuild
    rebuild_children = [_flatten(child, found) for child in structure.children]
    return lambda arrays: rebuild([rebuild_child(arrays) for rebuild_child in rebuild_children])


def _is_unshared(arrays: list[Any], k: int) -> bool:
    """Whether array `k` is writable and held by this list alone, and so is the array that it may be a view of."""
    if sys.getrefcount(arrays[k]) > _ONE_HOLDER or not _is_plain(arrays[k]):
        return False
    if arrays[k].base is None:
        return True
    if type(arrays[k].base) is not np.ndarray or sys.getrefcount(arrays[k].base) > _ONE_HOLDER:
        return False
    owner = arrays[k].base
    return owner.base is None and arrays[k].nbytes <= owner.nbytes


def _is_plain(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is writable, and none of its elements share an address."""
    return array.flags.writeable and 0 not in array.strides


def _references_of(array: Any) -> int:
    return sys.getrefcount(array)


def _references_of_item(container: Any) -> int:
    return next(sys.getrefcount(item) for item in container)


# The containers of most functions, and what they hold beside arrays.
_PLAIN = (tuple, list, dict)
_IMMUTABLE = (np.generic, float, int, str, type(None))
# References to an array that only a list holds, as `_is_unshared` counts them; to a value that nothing holds, as the
# function that it is passed to counts them; and to an array that one container holds, as a loop over it counts them.
_ONE_HOLDER = sys.getrefcount([np.empty(1)][0]) + 1
_ONE_ARGUMENT = _references_of(np.empty(1))
_ONE_ITEM = _references_of_item([np.empty(1)])
