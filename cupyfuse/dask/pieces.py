"""Values in pieces.

Chunks lie along *dimensions*: axes of arguments that go together, such as the rows of logits and of labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..api.shard_graphs import slowest_axis
from ..plan.shards import SplitError
from .tasks import Cut

Key = Any
Index = tuple[int, ...]  # the block along each dimension, 0 where there is none


@dataclass(frozen=True)
class Dimension:
    """Axes of arguments that are chunked together.

    Attributes
    ----------
    widths : tuple of int
        Of the blocks, in elements of the axes of nodes. None is empty.
    starts : list of int
        Where they begin.
    """

    widths: tuple[int, ...]

    @cached_property
    def length(self) -> int:
        return sum(self.widths)

    @cached_property
    def starts(self) -> list[int]:
        return [0, *itertools.accumulate(self.widths)][:-1]


@dataclass(frozen=True)
class Pieces:
    """A value in pieces.

    Attributes
    ----------
    key : callable
        Returns the key of a piece.
    axes : dict
        The axis of the value's node along which it is split, for each dimension along which it is.
    shape : tuple of int
        Of the whole array, as the caller has it.
    at : tuple of int
        The blocks that were chosen so far.
    cuts : dict
        For axes of the array: the slice that is read.
    whole : frozenset of int
        The dimensions among `axes` along which all pieces have one key, and are slices of one array.
    source : callable, optional
        Of the results of tasks: returns the task of a piece, the number of the piece among the task's results, and
        how many these are. The key of a piece is that of a task that takes it out of them.
    value : array, optional
        If it is no Dask array, but whole.
    array : dask.array.Array, optional
        If the pieces are its chunks.
    places : dict
        The array's axis along each dimension along which it is split.
    """

    key: Callable[[Index], Key]
    axes: Mapping[int, int]
    shape: tuple[int, ...]
    at: Index
    cuts: Mapping[int, slice] = field(default_factory=dict)
    whole: frozenset[int] = frozenset()
    source: Callable[[Index], tuple[Key, int, int]] | None = None
    value: Any = None
    array: Any = None
    places: Mapping[int, int] = field(default_factory=dict)

    def chosen(self, dimension: int, block: int, along: Dimension) -> Pieces:
        """Return the pieces at a block of a dimension."""
        if dimension not in self.axes:
            return self
        axes = {d: axis for d, axis in self.axes.items() if d != dimension}
        piece = replace(self, axes=axes, at=at_block(self.at, dimension, block))
        if dimension not in self.whole:
            return piece
        return piece.sliced(self.axes[dimension], along.starts[block], along.widths[block])

    def sliced(self, axis: int, start: int, width: int) -> Pieces:
        """Return the elements of a shard, along an axis of the node, of a value that is whole along it."""
        if axis in self.axes.values():
            raise SplitError("an argument is chunked along an axis, and others along the same one in another way")
        last = len(self.shape) - 1
        along, rest = slowest_axis(self.shape, (last,) if axis else range(last))
        if start % rest or width % rest:
            raise SplitError("an argument folds the split axis with others")
        return replace(self, cuts={**self.cuts, along: slice(start // rest, (start + width) // rest)})


def at_block(index: Index, dimension: int, block: int) -> Index:
    return (*index[:dimension], block, *index[dimension + 1 :])


def cut_of(operand: Any) -> Cut | None:
    """Return the part of an operand that a task reads, None for all of it."""
    if not isinstance(operand, Pieces) or not operand.cuts:
        return None
    return Cut(tuple(operand.cuts.get(p) for p in range(len(operand.shape))))
