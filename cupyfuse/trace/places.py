"""Places of the elements that a mask selects, as `np.nonzero` and `np.where` give them, and their use as indices.

Their number depends on values, so they are masked elements: of the positions along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import dtypes
from .broadcasting import expand
from .labels import positions
from .masked import Masked
from .masked_reductions import refuse
from .operations import apply
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
    """Return the elements of an array at masked integers, one for each of the first axes."""
    first = next(i for i in items if isinstance(i, Masked))
    for item in items:
        is_vector = isinstance(item, Masked) and item.ndim == 1 and item.has_mask(first.base)
        if not is_vector or not dtypes.is_integer(item.whole._node.dtype):
            refuse("an index of masked elements beside others, or of those of another mask")
    return Masked(x[tuple(i._filled(0) for i in items)], first.base)


def call_on_masked(name: str, args: Sequence[Any], options: dict[str, Any]) -> Masked:
    """Call a function that would be a library step, with masked elements among its arguments: `np.take` at places."""
    if name != "take" or len(args) != 2 or options:
        refuse(f"np.{name} of masked elements")
    found: Masked = args[0].ravel()[args[1]]
    return found
