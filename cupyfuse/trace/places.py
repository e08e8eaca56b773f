"""Places of the elements that a mask selects, as `np.nonzero` and `np.where` give them, and their use as indices.

Their number depends on values, so they are masked elements: of the positions along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import dtypes
from .broadcasting import expand
from .labels import positions
from .library import call_library
from .masked import Masked
from .masked_reductions import refuse
from .operations import apply
from .parts import is_position
from .tracer import Tracer
from .user_code import user_line


def nonzero(a: Tracer) -> tuple[Masked, ...]:
    """Return the places of the elements that are not zero, along each axis."""
    if not a.ndim:
        raise ValueError(f"Calling nonzero on 0d arrays is not allowed\n  at {user_line()}")
    mask = (a if a._node.dtype == "bool" else apply("not_equal", a, 0))._as_result()
    found = [expand(positions(a._trace, a.ndim, p, n), a.shape) for p, n in enumerate(a.shape)]
    return tuple(Masked(whole, mask, places_along=p) for p, whole in enumerate(found))


def with_masks(index: Any, shape: tuple[int, ...]) -> Any:
    """Return an index with a mask where the places of its elements along all axes are."""
    if not isinstance(index, tuple):
        index = (index,)
    index = tuple(list(i) if isinstance(i, tuple) else i for i in index)  # alone it is the items
    for k, item in enumerate(index):
        if not isinstance(item, Masked) or item.places_along != 0:
            continue
        along = index[k : k + item.base.ndim]
        before = [i for i in index[:k] if i is not None]
        is_known = (
            not any(i is Ellipsis for i in before) and shape[len(before) : len(before) + len(along)] == item.base.shape
        )
        if is_known and all(_are_places(i, item, p) for p, i in enumerate(along)) and len(along) == item.base.ndim:
            return with_masks((*index[:k], item.base, *index[k + len(along) :]), shape)
    return index if len(index) != 1 else index[0]


def _are_places(item: Any, first: Masked, axis: int) -> bool:
    """Whether an item of an index holds the places along an axis of what another one holds those along the first of."""
    return isinstance(item, Masked) and item.places_along == axis and item.base is first.base


def at_places(x: Tracer, items: Sequence[Any]) -> Masked:
    """Return the elements of an array at masked integers, and at integers, along its first axes; slices may follow."""
    first = next(i for i in items if isinstance(i, Masked))
    number = next((k for k, i in enumerate(items) if isinstance(i, slice)), len(items))
    for item in items[:number]:
        is_vector = isinstance(item, Masked) and item.ndim == 1 and item.has_mask(first.base)
        if not is_position(item) and not (is_vector and dtypes.is_integer(item.whole._node.dtype)):
            refuse("an index of masked elements beside others, or of those of another mask")
    if not all(isinstance(i, slice) for i in items[number:]):
        refuse("an index of masked elements beside others, or of those of another mask")
    return Masked(x[tuple(i._filled(0) if isinstance(i, Masked) else i for i in items)], first.base)


def argwhere(a: Tracer) -> Masked:
    """Return the places of the elements that are not zero, along all axes: a row for each element."""
    places = nonzero(a)
    number = positions(a._trace, a.ndim + 1, a.ndim, a.ndim)
    whole = places[0].whole[..., None]
    for p, along in enumerate(places[1:], 1):
        whole = apply("where", number == p, along.whole[..., None], whole)
    return Masked(whole, places[0].base)


def call_on_masked(name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Call a function, with masked elements among its arguments: `np.take` at places, others by a library step."""
    if name == "take" and len(args) == 2 and not options and not isinstance(args[0], Masked):
        return args[0].ravel()[args[1]]
    return call_library(name, _elements_in(args), _elements_in(options))


def _elements_in(value: Any) -> Any:
    """Return nested arguments with the operands of a library step in the place of masked elements."""
    if isinstance(value, Masked):
        return value.elements
    if isinstance(value, dict):
        return {k: _elements_in(v) for k, v in value.items()}
    return type(value)(map(_elements_in, value)) if type(value) in (tuple, list) else value


def holds_masked(value: Any) -> bool:
    """Whether there are masked elements in nested arguments."""
    if isinstance(value, (tuple, list, dict)):
        return any(map(holds_masked, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Masked)
