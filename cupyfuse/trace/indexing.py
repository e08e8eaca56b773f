"""Indexing of traced arrays: `x[index]` and `x[index] = value`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from .labels import gather
from .library import call_library, holds_tracers
from .masked import Masked
from .masked_reductions import refuse
from .operations import apply, as_tracer
from .parts import full_index, part, put, select, without_leading_ones
from .places import at_places, with_masks
from .promotion import checked_number
from .tracer import Tracer
from .user_code import fail, user_line

# Reading ------------------------------------------------------------------------------------------------------------


def get(x: Tracer, index: Any) -> Any:
    """Return `x[index]`: a view, masked elements, or gathered ones."""
    index = with_masks(index, x.shape)
    selected = _selected(x, index)
    if selected is not None:
        view, mask, axis = selected
        return Masked(view.copy(), mask, axis)
    items = _as_tuple(index)
    if any(isinstance(i, Masked) for i in items):
        return at_places(x, items)
    if any(map(_is_array_index, items)):
        return _gather(x, items)
    if any(map(_is_flag, items)):
        return _flagged(x, items).copy("K")
    if any(isinstance(i, np.ndarray) and i.dtype.kind in "iu" for i in items):  # without dimensions: NumPy copies
        found = get(x, tuple(int(i) if isinstance(i, np.ndarray) else i for i in items))
        return found if found._is_scalar else found.copy("K")
    selection = select(index, x.shape)
    if selection.scalar:
        return part(x, selection)
    if selection.whole(x.shape):
        if not x._is_scalar or all(i is not Ellipsis for i in items):
            return x._view(selection.order)
        array = x._view(selection.order).copy()  # a scalar is never changed
        array._is_array = True
        return array
    view = x._make_view(part, put, selection)
    if x._strides is not None:
        steps = [stride * step for stride, (_, step, _) in zip(x._strides, selection.slices, strict=True)]
        view._strides = tuple(0 if p is None else steps[p] for p in selection.order)
    return view


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_flag(index: Any) -> bool:
    """Whether an index is True or False: a mask without dimensions, which selects the whole array or nothing."""
    is_array = isinstance(index, np.ndarray) and not index.ndim and index.dtype == bool
    return (is_array or isinstance(index, (bool, np.bool_))) and not isinstance(index, Tracer)


def _flagged(x: Tracer, items: tuple[Any, ...]) -> Tracer:
    """Return the view that an index with True or False among its items selects: along a new axis, all or nothing."""
    first = next(k for k, i in enumerate(items) if not _is_basic(i))
    flags = [bool(i) for i in items if _is_flag(i)]
    before, behind = items[:first], tuple(i for i in items[first:] if not _is_flag(i))
    axis = sum(i is not Ellipsis for i in before)
    if Ellipsis in before:
        axis += x.ndim - sum(i is not None and i is not Ellipsis for i in before + behind)
    is_first = _is_separated(list(items))
    view: Tracer = x[(None, *before, *behind) if is_first else (*before, None, *behind)]
    return view if all(flags) else view[(*[slice(None)] * (0 if is_first else axis), slice(0))]


def _is_basic(item: Any) -> bool:
    """Whether an item of an index is none of integers, arrays and flags."""
    return item is None or item is Ellipsis or isinstance(item, slice)


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
    index = _resolve(x, items)
    if all(map(_is_number_or_basic, items)) and not _is_of_element(x, items):
        return x._make_view(_get_at, _set_at, index)
    return _get_at(x, index)


def _is_of_element(x: Tracer, items: tuple[Any, ...]) -> bool:
    """Whether an index is one number for each axis, at which NumPy returns a scalar."""
    return len(items) == x.ndim and not any(map(_is_basic, items))


def _is_number_or_basic(item: Any) -> bool:
    """Whether an item of an index is neither an array nor a flag: with such items alone NumPy makes a view."""
    if isinstance(item, Tracer):
        return item._is_scalar and item._node.dtype != "bool"
    return _is_basic(item) or (isinstance(item, (int, np.integer)) and not isinstance(item, bool))


def _get_at(x: Tracer, index: Any) -> Tracer:
    found: Tracer = call_library("getitem", [x, index])
    return found


def _set_at(x: Tracer, index: Any, value: Any) -> Tracer:
    changed: Tracer = call_library("setitem", [x, index, value])
    return changed


def _resolve(x: Tracer, items: tuple[Any, ...]) -> Any:
    """Return an index with integer arrays for the masks, lists and ranges in it whose values are known.

    Raises
    ------
    IndexError
        The index is out of bounds, as far as its values are known.
    """
    found: list[Any] = []
    for item in items:
        if isinstance(item, Tracer) or not _is_array_index(item) or holds_tracers(item):
            found.append(np.asarray(item) if holds_tracers(item) else item)
            continue
        array = np.asarray(item)
        found += array.nonzero() if array.dtype == bool else [array if array.size else array.astype(np.int64)]
    if not any(isinstance(i, Tracer) for i in found):
        try:
            np.broadcast_to(False, x.shape)[items]
        except IndexError as error:
            raise IndexError(f"{error}\n  at {user_line()}") from error
    return tuple(found) if len(found) != 1 else found[0]


def _selected(x: Tracer, index: Any) -> tuple[Tracer, Tracer, int] | None:
    """Return the view that an index with one mask selects from, the mask, and the axis of the selected elements.

    The axes along the mask begin at that axis of the view. None for any other index.
    """
    items = list(_as_tuple(index))
    places = [k for k, i in enumerate(items) if isinstance(i, Tracer) and i._node.dtype == "bool"]
    if len(places) != 1 or any(_is_array_index(i) or _is_flag(i) for k, i in enumerate(items) if k != places[0]):
        return None
    mask, separated = items[places[0]], _is_separated(items)
    items = full_index(index, x.ndim, mask.ndim)
    place = next(k for k, i in enumerate(items) if i is mask)
    before = items[:place]
    first = sum(i is not None for i in before)
    shape = x.shape[first : first + mask.ndim]
    if mask.shape != shape:
        raise IndexError(f"a mask of shape {mask.shape} does not match an array of shape {x.shape}\n  at {user_line()}")
    rest = items[place + 1 :]
    is_whole = all(isinstance(i, slice) and i == slice(None) for i in before + rest)
    view = x if is_whole else get(x, (*before, *[slice(None)] * mask.ndim, *rest, Ellipsis))
    axis = sum(i is None or isinstance(i, slice) for i in before)
    if separated:
        along = range(axis, axis + mask.ndim)
        view, axis = view.transpose((*along, *(p for p in range(view.ndim) if p not in along))), 0
    return view, mask, axis


def _is_separated(items: list[Any]) -> bool:
    """Whether integers and arrays in an index are not beside each other: their axes then come first in the result."""
    arrays = [k for k, i in enumerate(items) if not _is_basic(i)]
    return arrays[-1] - arrays[0] >= len(arrays)


# Writing ------------------------------------------------------------------------------------------------------------


def assign(x: Tracer, index: Any, value: Any) -> None:
    """Assign `x[index] = value`."""
    value, index = checked_number(x._node.dtype, value), with_masks(index, x.shape)
    selected = _selected(x, index)
    if selected is not None:
        new = _masked_value(*selected, value)
        if new is not None:
            selected[0]._assign(new)
            return
        if not isinstance(index, tuple) or len(index) == 1:
            fail(
                f"assignment of an array of shape {value.shape} to masked elements",
                "their number depends on values; assign a number or y[mask], or choose with np.where",
            )
    items = _as_tuple(index)
    if any(isinstance(i, Masked) for i in items):
        refuse("an assignment at masked elements that are no places of its own elements")
    if any(map(_is_array_index, items)):
        if isinstance(value, Masked):
            fail("assignment of masked elements at an index array", "choose with np.where")
        index = _resolve(x, items)
        if not (isinstance(value, Tracer) and value._is_view(x, index)):  # as in x[k] += 1, which changed it already
            x._assign(_set_at(x, index, value))
        return
    if any(map(_is_flag, items)):
        _flagged(x, items)[...] = value
        return
    selection = select(index, x.shape)
    if isinstance(value, Tracer) and value._is_view(x, selection):
        return  # as in x[1:] *= 2, which changed the array already
    given = as_tracer(value, x._trace)
    with x._trace.assignment(given, math.prod(selection.counts) * dtypes.ITEMSIZE[x._node.dtype]):
        is_whole = selection.whole(x.shape) and selection.order == tuple(range(x.ndim))
        x._assign(given if is_whole else put(x, selection, given))


def _masked_value(x: Tracer, mask: Tracer, axis: int, value: Any) -> Tracer | None:
    """Return an array with a value where a mask is true, along the axes from `axis` on.

    None for an array with a value for each selected element.
    """
    selected = Masked(x, mask, axis)
    if isinstance(value, Masked):
        if not value.has_mask(mask) or value.whole.shape != x.shape or value.axis != axis:
            fail("assignment of elements of another mask", "use one mask for both, or choose with np.where")
        new = value.whole
    else:
        given = as_tracer(value, x._trace)
        if given.ndim > selected.ndim and all(n == 1 for n in given.shape[: given.ndim - selected.ndim]):
            given = without_leading_ones(given, selected.ndim)
        aligned = selected.aligned(given)
        if aligned is None:
            return None
        new = aligned
    return apply("where", selected.mask, new.astype(x._node.dtype, copy=False), x)
