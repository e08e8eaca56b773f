"""Lists and tuples that hold traced arrays, as arguments of NumPy's functions and ufuncs.

NumPy dispatches on the arguments of a function, not on what a list holds: it would ask each traced array for its
values. The functions here stack such lists first, as `np.array` would, and call NumPy's function with the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import reduce, wraps
from typing import Any

import numpy as np

from ... import dtypes
from ..library import holds_tracers
from ..number import TracedNumber
from ..tracer import Tracer
from ..user_code import fail
from .replacement import Replacement

_ALL = 1 << 30
# How many of the first arguments are arrays; others are lists of arrays, or of bounds.
_ARRAYS = {"histogram": 1, "histogram2d": 2, "pad": 1, "array_split": 1, "choose": 1}
# Functions that call the user's, whose further arguments are the user's own: where they take their array.
_CALLING = {"apply_along_axis": (2, "arr"), "piecewise": (0, "x")}
# They read nested lists themselves, or take arrays alone; np.split takes lists only with positions.
_NOT_REPLACED = ("block", "histogramdd", "split", "unstack", "take_along_axis", "put_along_axis")


def stack(values: Sequence[Any], dtype: Any = None) -> Tracer:
    """Make an array of a nested list that holds traced arrays, as `np.array` does."""
    items = [stack(v, dtype) if holds_tracers(v) else v for v in values]
    arrays = [v if isinstance(v, Tracer) else np.asarray(v) for v in items]
    for value, array in zip(items, arrays, strict=True):
        if array.dtype.kind in "OUS":
            fail(
                f"an array of a list with {value!r} in it",
                "traced arrays hold numbers; use a list or tuple of arrays",
            )
    if dtype is None:
        _check_promotion([a.dtype for a in arrays])
    else:  # each item is converted by itself: through a common dtype, integers would lose digits
        arrays = [v.astype(dtype) if isinstance(v, Tracer) else np.asarray(v, dtype) for v in items]
    return np.stack(arrays)  # type: ignore[return-value]


def numbers_as_scalars(value: Any) -> Any:
    """Return a nested list or tuple with what stands for the traced numbers in it, in an array that is made of it."""
    if type(value) not in (list, tuple):
        return value.in_array() if isinstance(value, TracedNumber) else value
    return type(value)(map(numbers_as_scalars, value))


def _check_promotion(kinds: Sequence[Any]) -> None:
    """Raise if dtypes have no common one, as bfloat16 and int64: NumPy then makes an array of objects."""
    try:
        np.result_type(*kinds)
        return
    except TypeError:
        names = " and ".join(sorted({np.dtype(k).name for k in kinds}))
    fail(
        f"an array of a list of {names}",
        "NumPy has no common dtype for them, and makes an array of objects; give np.array(..., dtype=), or convert "
        "them with .astype first",
    )


def stacked(value: Any) -> Any:
    """Return a list or tuple that holds traced arrays as an array, and everything else as it is."""
    return stack(value) if holds_tracers(value) else value


def _with_stacked_items(value: Any) -> Any:
    """Return a list or tuple of arrays whose items are stacked."""
    return type(value)(map(stacked, value)) if holds_tracers(value) else value


def _with_keys_stacked(value: Any) -> Any:
    """Return the keys of `np.lexsort`, which dispatches on those of a tuple."""
    return tuple(map(stacked, value)) if holds_tracers(value) else value


# Functions of lists of arrays: their items may be lists.
_SEQUENCES = "concatenate stack hstack vstack dstack column_stack select multi_dot ravel_multi_index"
_CHANGES = {**dict.fromkeys(_SEQUENCES.split(), _with_stacked_items), "lexsort": _with_keys_stacked}

_AS_GIVEN = ("out", "range", "bins", "condlist", "funclist", "choices")  # options that are no arrays by themselves


_OF_TYPES = ("result_type",)  # functions for which a number's type counts, not its value


def stacking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of NumPy's that takes lists and tuples of traced arrays for arrays."""
    name = original.__name__
    if name in _CALLING:
        return _stacking_one(original, *_CALLING[name])
    change = _CHANGES.get(name, stacked)
    count = _ARRAYS.get(name, _ALL)

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Call NumPy's function with lists of traced arrays stacked."""
        if any(type(a) in (list, tuple) for a in args):
            args = (*map(change, args[:count]), *args[count:])
        if name in _OF_TYPES:
            args = tuple(a.__class__(0) if isinstance(a, TracedNumber) else a for a in args)
        for label, value in options.items():
            if type(value) in (list, tuple) and label not in _AS_GIVEN:
                options[label] = change(value)
        result = None if options else _of_numbers(original, args)
        return original(*args, **options) if result is None else result

    return call


def _of_numbers(original: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return what a function gives for numbers that each call brings, computed in each call; None for all else."""
    number = next((a for a in args if isinstance(a, TracedNumber)), None)
    return None if number is None else number.of_function(original, args)


def _stacking_one(original: Callable[..., Any], position: int, label: str) -> Callable[..., Any]:
    """Return a function of NumPy's that takes a list of traced arrays for one of its arguments."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Call NumPy's function with that argument stacked."""
        if label in options:
            options[label] = stacked(options[label])
        return original(*(stacked(a) if k == position else a for k, a in enumerate(args)), **options)

    return call


# Ufuncs -------------------------------------------------------------------------------------------------------------

# Ufuncs whose results for several arrays of one dtype are the same one pair after the other.
_NAMES = "logical_and logical_or maximum minimum fmax fmin bitwise_and bitwise_or bitwise_xor add multiply"
_FOLDED = frozenset(_NAMES.split())
_OF_FLOATS = ("add", "multiply")  # of masks and small integers, `reduce` is wider than the sum of two


class Ufunc(Replacement):
    """A ufunc that also takes lists and tuples of traced arrays."""

    def __init__(self, original: Any):
        super().__init__(original, "numpy" if hasattr(np, original.__name__) else "scipy.special")

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of an object that is not made yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*map(stacked, args), **_where_stacked(options))

    def reduce(self, array: Any, *args: Any, **options: Any) -> Any:
        """Reduce as the ufunc does, arrays of a list one after the other where that gives the same."""
        if not holds_tracers(array):
            return self.__wrapped__.reduce(array, *args, **_where_stacked(options))
        if not args and (not options or options == {"axis": 0}) and self._folds(array):
            name = f"{self.__wrapped__.__name__}.reduce"
            with array[0]._trace.call(name, array) as record:
                return record(reduce(self.__wrapped__, array))
        return self.__wrapped__.reduce(stack(array), *args, **_where_stacked(options))

    def _folds(self, arrays: Sequence[Any]) -> bool:
        """Whether the reduction of a list along its first axis is that of pairs of its items."""
        name = self.__wrapped__.__name__
        if name not in _FOLDED or len(arrays) < 2 or not all(isinstance(a, Tracer) for a in arrays):
            return False
        kinds = {(a.shape, a._node.dtype) for a in arrays}
        return len(kinds) == 1 and (name not in _OF_FLOATS or dtypes.is_float(arrays[0]._node.dtype))

    def accumulate(self, array: Any, *args: Any, **options: Any) -> Any:
        """Accumulate as the ufunc does."""
        return self.__wrapped__.accumulate(stacked(array), *args, **options)

    def reduceat(self, array: Any, indices: Any, *args: Any, **options: Any) -> Any:
        """Reduce slices as the ufunc does."""
        return self.__wrapped__.reduceat(stacked(array), stacked(indices), *args, **options)

    def outer(self, a: Any, b: Any, /, **options: Any) -> Any:
        """Apply the ufunc to all pairs of elements."""
        return self.__wrapped__.outer(stacked(a), stacked(b), **options)

    def at(self, a: Any, indices: Any, *values: Any) -> None:
        """Change an array in place as the ufunc does; a tuple of indices has one for each axis."""
        indices = indices if type(indices) is tuple else stacked(indices)
        self.__wrapped__.at(a, indices, *map(stacked, values))


def _where_stacked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a ufunc, of which `where` is an array."""
    return options | {"where": stacked(options["where"])} if "where" in options else options


_DISPATCHER = type(np.sum)  # of functions that dispatch by __array_function__
_make = {_DISPATCHER: functools.cache(stacking), np.ufunc: functools.cache(Ufunc)}  # of several names, one object


def replacements(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions and ufuncs of a module that take lists of traced arrays: (name, replacement)."""
    for name, value in vars(module).items():
        if type(value) in _make and not name.startswith("_") and name not in _NOT_REPLACED:
            yield name, _make[type(value)](value)
