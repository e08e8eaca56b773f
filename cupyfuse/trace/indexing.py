"""Indexing of traced arrays: `x[index]` and `x[index] = value`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from .labels import gather
from .library import call_library
from .masked import Masked
from .operations import apply, as_tracer
from .parts import part, put, select, without_leading_ones
from .promotion import checked_number
from .tracer import Tracer
from .user_code import fail, user_line

# Reading ------------------------------------------------------------------------------------------------------------


def get(x: Tracer, index: Any) -> Any:
    """Return `x[index]`: a view, masked elements, or gathered ones."""
    mask = _mask_of(x, index)
    if mask is not None:
        return Masked(x.copy(), mask.full, mask.ndim)
    if _is_flag(index):
        return x[None].copy() if index else x[None][:0].copy()
    if any(_is_array_index(i) for i in _as_tuple(index)):
        return _gather(x, _as_tuple(index))
    selection = select(index, x.shape)
    if selection.scalar:
        return part(x, selection)
    found = x._view(selection.order) if selection.whole(x.shape) else x._make_view(part, put, selection)
    found._is_array = True
    return found


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_flag(index: Any) -> bool:
    """Whether an index is True or False: a mask without dimensions, which selects the whole array or nothing."""
    return isinstance(index, (bool, np.bool_)) and not isinstance(index, Tracer)


def _is_array_index(item: Any) -> bool:
    return isinstance(item, (Tracer, list, range)) or (isinstance(item, np.ndarray) and item.ndim > 0)


def _gather(x: Tracer, items: tuple[Any, ...]) -> Tracer:
    """Return `x[items]` with arrays among the items: one element of each row natively, else by a library step."""
    picked = gather(x, items)
    if picked is not None:
        return picked
    if any(isinstance(i, Tracer) and i._node.dtype == "bool" for i in items):
        fail(
            "indexing with a mask beside other indices",
            "the number of elements that it selects depends on values; choose with np.where",
        )
    selected: Tracer = call_library("getitem", [x, _resolve(x, items)])
    return selected


def _resolve(x: Tracer, items: tuple[Any, ...]) -> Any:
    """Return an index with integer arrays for the masks, lists and ranges in it whose values are known.

    Raises
    ------
    IndexError
        The index is out of bounds, as far as its values are known.
    """
    found: list[Any] = []
    for item in items:
        if isinstance(item, Tracer) or not _is_array_index(item) or _holds_tracers(item):
            found.append(np.asarray(item) if _holds_tracers(item) else item)
            continue
        array = np.asarray(item)
        found += array.nonzero() if array.dtype == bool else [array if array.size else array.astype(np.int64)]
    if not any(isinstance(i, Tracer) for i in found):
        try:
            np.broadcast_to(False, x.shape)[items]
        except IndexError as error:
            raise IndexError(f"{error}\n  at {user_line()}") from error
    return tuple(found) if len(found) != 1 else found[0]


def _holds_tracers(item: Any) -> bool:
    return isinstance(item, list) and any(isinstance(i, Tracer) for i in item)


@dataclass(frozen=True)
class _Mask:
    """A mask of the leading axes of an array.

    Attributes
    ----------
    full : Tracer
        The mask with axes of length one for the array's other axes.
    ndim : int
        Axes of the mask itself.
    """

    full: Tracer
    ndim: int


def _mask_of(x: Tracer, index: Any) -> _Mask | None:
    """Return the mask that an index consists of; None for any other index."""
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, Tracer) or index._node.dtype != "bool":
        return None
    if index.shape != x.shape[: index.ndim]:
        raise IndexError(
            f"a mask of shape {index.shape} does not match an array of shape {x.shape}\n  at {user_line()}"
        )
    order = (*range(index.ndim), *[None] * (x.ndim - index.ndim))
    return _Mask(index._trace.array(index._node, index._axes.picked(order)), index.ndim)


# Writing ------------------------------------------------------------------------------------------------------------


def assign(x: Tracer, index: Any, value: Any) -> None:
    """Assign `x[index] = value`."""
    value = checked_number(x._node.dtype, value)
    mask = _mask_of(x, index)
    if mask is not None:
        x._assign(_masked_value(x, mask, value))
        return
    if _is_flag(index):
        if index:
            x._assign(value)
        return
    if any(_is_array_index(i) for i in _as_tuple(index)):
        if isinstance(value, Masked):
            fail("assignment of masked elements at an index array", "choose with np.where")
        x._assign(call_library("setitem", [x, _resolve(x, _as_tuple(index)), value]))
        return
    selection = select(index, x.shape)
    if isinstance(value, Tracer) and value._is_view(x, selection):
        return  # as in x[1:] *= 2, which changed the array already
    given = as_tracer(value, x._trace)
    with x._trace.assignment(given, math.prod(selection.counts) * dtypes.ITEMSIZE[x._node.dtype]):
        is_whole = selection.whole(x.shape) and selection.order == tuple(range(x.ndim))
        x._assign(given if is_whole else put(x, selection, given))


def _masked_value(x: Tracer, mask: _Mask, value: Any) -> Tracer:
    """Return the array with a value where a mask is true."""
    if isinstance(value, Masked):
        if not value.has_mask(mask.full) or value.whole.shape != x.shape:
            fail("assignment of elements of another mask", "use one mask for both, or choose with np.where")
        new = value.whole
    else:
        new = as_tracer(value, x._trace)
        if any(n != 1 for n in new.shape[: max(0, new.ndim - (x.ndim - mask.ndim))]):
            fail(
                f"assignment of an array of shape {new.shape} to masked elements",
                "their number depends on values; assign a number or y[mask], or choose with np.where",
            )
        new = without_leading_ones(new, x.ndim - mask.ndim)
    return apply("where", mask.full, new.astype(x._node.dtype, copy=False), x)
