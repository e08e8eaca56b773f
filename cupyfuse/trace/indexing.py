"""Indexing of traced arrays: `x[index]` and `x[index] = value`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .labels import gather
from .masked import Masked
from .operations import apply, as_tracer
from .parts import part, put, select, without_leading_ones
from .tracer import Tracer
from .user_code import fail, user_line

# Reading ------------------------------------------------------------------------------------------------------------


def get(x: Tracer, index: Any) -> Any:
    """`x[index]`."""
    mask = _mask_of(x, index)
    if mask is not None:
        return Masked(x.copy(), mask.full, mask.ndim)
    if any(_is_array(i) for i in _as_tuple(index)):
        return gather(x, _as_tuple(index))
    selection = select(index, x.shape)
    if selection.scalar:
        return part(x, selection)
    if selection.whole(x.shape):
        return x._view(selection.order)
    return x._linked(part, put, selection)


def _as_tuple(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_array(item: Any) -> bool:
    return isinstance(item, (Tracer, list)) or (isinstance(item, np.ndarray) and item.ndim > 0)


@dataclass(frozen=True)
class _Mask:
    """A mask of leading axes: with length one along the others, and how many axes it has."""

    full: Tracer
    ndim: int


def _mask_of(x: Tracer, index: Any) -> _Mask | None:
    """Return the mask that an index is; None for another index."""
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
    """`x[index] = value`."""
    mask = _mask_of(x, index)
    if mask is not None:
        x._assign(_masked_value(x, mask, value), assigned=True)
        return
    if any(_is_array(i) for i in _as_tuple(index)):
        fail("assignment at an index array", "slices, integers and masks are fused; choose with np.where")
    selection = select(index, x.shape)
    if isinstance(value, Tracer) and value._is_view(x, selection):
        return  # as in x[1:] *= 2, which changed the array already
    if selection.whole(x.shape) and selection.order == tuple(range(x.ndim)):
        x._assign(value, assigned=True)
    else:
        x._assign(put(x, selection, as_tracer(value, x._trace)), assigned=True)


def _masked_value(x: Tracer, mask: _Mask, value: Any) -> Tracer:
    """Return the array with another value where a mask is true."""
    if isinstance(value, Masked):
        if not value.selects_as(mask.full) or value.whole.shape != x.shape:
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
