"""Dask arrays: found among arguments, without importing Dask, and handed to the frontend for them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .structures import structure_of

_frontend: list[Callable[..., Any]] = []


def set_frontend(call: Callable[..., Any]) -> None:
    """Set what calls a planned function on Dask arrays, given the value of each parameter."""
    _frontend[:] = [call]


def is_lazy(value: Any) -> bool:
    """Whether a value is a Dask array; does not import Dask."""
    dask = sys.modules.get("dask.array")
    return dask is not None and isinstance(value, dask.Array)


def check_lengths(array: Any, name: str) -> None:
    """Check that the lengths of all chunks of a Dask array are known."""
    for axis, length in enumerate(array.shape):
        if math.isnan(length):
            raise ValueError(
                f"argument {name!r}: expected a Dask array with chunks of known lengths, got unknown ones (nan) along "
                f"axis {axis}; call its method compute_chunk_sizes() first"
            )


def contains_lazy(value: Any, parents: tuple[int, ...] = ()) -> bool:
    """Whether an argument is a Dask array, or contains one; `parents` are the ids of its containers."""
    if is_lazy(value):
        return True
    if "dask.array" not in sys.modules or id(value) in parents:
        return False
    try:
        structure = structure_of(value)
    except TypeError:
        return False
    return structure is not None and any(contains_lazy(c, (*parents, id(value))) for c in structure.children)


def refuse_out() -> NoReturn:
    raise TypeError(
        "out: expected none beside Dask arrays, whose results are computed later; use the result, and write it with "
        "dask.array.store"
    )


def call(function: Any, values: Sequence[Any], out: Any) -> Any:
    """Call a planned function on values of which some are or contain Dask arrays.

    Parameters
    ----------
    function : PlannedFunction
    values : sequence
        The value of each parameter.
    out : None
        Lazy results cannot be written to an array.
    """
    if out is not None:
        refuse_out()
    return _frontend[0](function, values)
