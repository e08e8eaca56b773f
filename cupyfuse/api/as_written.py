"""Call the user's function itself: on the CPU, where its plan would gain nothing (see `engines/host_time.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
                return _copy_shared_arrays([self._parameters.call(self._function, values)])
        except BaseException:
            for array, value in before:
                array[...] = value
            raise


def _copy_shared_arrays(results: list[Any]) -> Any:
    """Return the one result in a list, with copies of the arrays in it that something else holds or has a view of."""
    cls = type(results[0])
    if cls is np.ndarray:
        return results[0] if _is_unshared(results, 0) else results[0].copy()
    if cls in _PLAIN and sys.getrefcount(results[0]) == _ONE_HOLDER and _holds_new_arrays(results[0]):
        return results[0]
    found: list[Any] = []
    form = _take_arrays(results.pop(), found)
    for k in range(len(found)):
        if not _is_unshared(found, k):
            found[k] = found[k].copy()
    return _put_arrays(form, iter(found))


def _holds_new_arrays(container: Any) -> bool:
    """Whether a tuple, list or dict, which nothing else holds, consists of values that may be returned as they are.

    These are numbers, strings, None, arrays that nothing else holds or has a view of, and such containers of them.
    """
    for item in container.values() if type(container) is dict else container:
        cls = type(item)
        if cls is np.ndarray:
            if sys.getrefcount(item) != _ONE_ITEM or not _is_plain(item):
                return False
            if item.base is not None and not _is_alone_on(item.base, item.nbytes):
                return False
        elif cls in _PLAIN:
            if sys.getrefcount(item) != _ONE_ITEM or not _holds_new_arrays(item):
                return False
        elif cls not in _IMMUTABLE and not isinstance(item, np.generic):
            return False
    return True


class _Rebuilt(NamedTuple):
    """A container other than a tuple, list or dict, without its arrays."""

    rebuild: Callable[[list[Any]], Any]
    children: list[Any]


def _take_arrays(value: Any, found: list[Any]) -> Any:
    """Append the arrays in a result to `found`; return new containers with `_ARRAY` in the place of each."""
    cls = type(value)
    if cls is np.ndarray:
        found.append(value)
        return _ARRAY
    if cls is tuple or cls is list:
        return cls([_take_arrays(item, found) for item in value])
    if cls is dict:
        return {key: _take_arrays(item, found) for key, item in value.items()}
    if cls in _IMMUTABLE or isinstance(value, np.generic) or constant_key(value) is not None:
        return value
    structure = structure_of(value)
    if structure is None:
        return value
    return _Rebuilt(structure.rebuild, [_take_arrays(child, found) for child in structure.children])


def _put_arrays(form: Any, arrays: Iterator[Any]) -> Any:
    """Return what `_take_arrays` returned with arrays in their places."""
    cls = type(form)
    if form is _ARRAY:
        return next(arrays)
    if cls is tuple or cls is list:
        return cls([_put_arrays(item, arrays) for item in form])
    if cls is dict:
        return {key: _put_arrays(item, arrays) for key, item in form.items()}
    if cls is _Rebuilt:
        return form.rebuild([_put_arrays(child, arrays) for child in form.children])
    return form


def _is_unshared(arrays: list[Any], k: int) -> bool:
    """Whether array `k` is writable and held by this list alone, and so is the array that it may be a view of."""
    if sys.getrefcount(arrays[k]) > _ONE_HOLDER:
        return False
    is_alone = arrays[k].base is None or _is_alone_on(arrays[k].base, arrays[k].nbytes)
    return is_alone and _is_plain(arrays[k])


def _is_alone_on(base: Any, nbytes: int) -> bool:
    """Whether a view of so many bytes alone holds its base, an array that owns its memory."""
    if type(base) is not np.ndarray or sys.getrefcount(base) > _ONE_BASE:
        return False
    return base.base is None and nbytes <= base.nbytes


def _is_plain(array: np.ndarray[Any, Any]) -> bool:
    """Whether an array is writable, and none of its elements share an address.

    Results of `np.broadcast_arrays` warn where `flags.writeable` is read; that number tells the same.
    """
    return bool(array.flags.num & _WRITEABLE) and 0 not in array.strides


def _references_of(array: Any) -> int:
    return sys.getrefcount(array)


def _references_of_base(view: np.ndarray[Any, Any]) -> int:
    return _references_of(view.base)


def _references_of_item(container: Any) -> int:
    return next(sys.getrefcount(item) for item in container)


# The containers of most functions, and what they hold beside arrays.
_PLAIN = (tuple, list, dict)
_IMMUTABLE = (float, int, bool, str, type(None))
_ARRAY = object()
_WRITEABLE = 0x400  # of `flags.num`: NPY_ARRAY_WRITEABLE of NumPy's C API
# References to a value that only a list holds, as its item is counted; to one that a container holds, as a loop over it
# counts them; and to the base of a view, as the function that it is passed to counts them.
_ONE_HOLDER = sys.getrefcount([np.empty(1)][0]) + 1
_ONE_ITEM = _references_of_item([np.empty(1)])
_ONE_BASE = _references_of_base(np.empty((1, 2)).T)
