"""The chunks of a call: which arguments are chunked together, and how results are chunked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..api.shard_graphs import slowest_axis
from ..ir.graph import Graph
from ..plan.shards import Shards, SplitError
from ..plan.shards.aligned import aligned_axes
from ..trace import Axes
from .pieces import Dimension, Index, Pieces

Arrays = dict[int, Any]  # Dask arrays, by argument number


def _chunked(array: Any) -> list[int]:
    """Return the axes along which an array has several chunks."""
    return [axis for axis, n in enumerate(array.numblocks) if n > 1]


def _node_axis(array: Any, axis: int, name: str) -> tuple[int, int]:
    """Return the axis of the node that an axis of the array lies on, and how many of its elements each of these has."""
    if axis == array.ndim - 1:
        return 1, 1
    along, rest = slowest_axis(array.shape, range(array.ndim - 1))
    if along != axis:
        raise ValueError(
            f"argument {name!r}: an array of shape {array.shape} can be chunked along its last axis and along axis "
            f"{along}, got several chunks along axis {axis}; rechunk it to one chunk there: .rechunk({{{axis}: -1}})"
        )
    return 0, rest


def align(graph: Graph, given: Arrays, what: str) -> tuple[Arrays, list[Dimension], list[dict[int, int]]]:
    """Group the chunked axes that have to be split together, a `Dimension` each, and rechunk each group alike.

    Parameters
    ----------
    graph : Graph
        As traced, with all elements.
    given : dict of int to dask.array.Array
        By argument number.
    what : str
        The name of the function.

    Returns
    -------
    given : dict
        With new chunks where they differed.
    dimensions : list of Dimension
        Those with the fewest merges first.
    split : list of dict
        For each dimension: the axis of the node of each argument that is chunked along it.

    Raises
    ------
    TypeError
        An operation needs all elements of an axis that is chunked.
    ValueError
        An argument is chunked along an axis that its node folds with others.
    """
    names = [node.name for node in graph.inputs]
    places = aligned_axes(graph)
    given = {k: _without_empty(a) for k, a in given.items()}
    groups: dict[int, list[_Member]] = {}
    for k, array in given.items():
        for axis in _chunked(array):
            on_node, rest = _node_axis(array, axis, names[k])
            groups.setdefault(places[k, on_node], []).append(_Member(k, axis, on_node, rest))
    found: list[tuple[int, Dimension, dict[int, int]]] = []
    for group, members in groups.items():
        try:
            if len({m.argument for m in members}) < len(members):
                raise SplitError("both axes of an argument go together")
            widths = _common([[n * m.inner for n in given[m.argument].chunks[m.axis]] for m in members])
            for m in members:
                given[m.argument] = _with_chunks(given[m.argument], m.axis, widths, m.inner)
            rounds, split = _split(graph, members, [p for p, n in places.items() if n == group], sum(widths))
        except SplitError as error:
            described = " and of ".join(f"argument {names[m.argument]!r} along axis {m.axis}" for m in members)
            advice = " and ".join(f"{names[m.argument]}.rechunk({{{m.axis}: -1}})" for m in members)
            raise TypeError(
                f"{what}: cannot compute it on chunks of {described}: {error}; or give one chunk: {advice}"
            ) from error
        found.append((rounds, Dimension(widths), split))
    found.sort(key=lambda one: one[0])
    return given, [dimension for _, dimension, _ in found], [split for _, _, split in found]


class _Member(NamedTuple):
    """A chunked axis of a Dask array.

    Attributes
    ----------
    argument : int
    axis : int
        Of the array.
    on_node : int
        The axis of the argument's node that it lies on (0: rows, 1: columns).
    inner : int
        Elements of the node's axis for each element of the array's.
    """

    argument: int
    axis: int
    on_node: int
    inner: int


def _split(
    graph: Graph, members: Sequence[_Member], aligned: Sequence[tuple[int, int]], length: int
) -> tuple[int, dict[int, int]]:
    """Return the number of merges, and along which axes of their nodes arguments are split.

    Arguments that go together with those that are chunked are split too, if that can be.
    """
    chunked = {m.argument: m.on_node for m in members}
    others = {k: axis for k, axis in aligned if k not in chunked and (k, 1 - axis) not in aligned}
    try:
        return len(Shards(graph, {**chunked, **others}, length).rounds), {**chunked, **others}
    except SplitError:
        if not others:
            raise
        return len(Shards(graph, chunked, length).rounds), chunked


def _without_empty(array: Any) -> Any:
    """Return an array with other chunks where some are empty, or where an axis of one element has several."""
    chunks = {axis: tuple(n for n in array.chunks[axis] if n) or (0,) for axis in _chunked(array)}
    changed = {axis: kept for axis, kept in chunks.items() if kept != array.chunks[axis]}
    return array.rechunk(changed) if changed else array


def _common(widths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the widths of the blocks that begin wherever one of several partitions has a boundary."""
    if all(list(w) == list(widths[0]) for w in widths):
        return tuple(widths[0])
    ends = sorted({0, *(end for w in widths for end in itertools.accumulate(w))})
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _with_chunks(array: Any, axis: int, widths: Sequence[int], rest: int) -> Any:
    if any(n % rest for n in widths):
        raise SplitError("the chunks of other arguments end within an element of this axis")
    chunks = tuple(n // rest for n in widths)
    return array if array.chunks[axis] == chunks else array.rechunk({axis: chunks})


def axes_in(argument: int, split: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """Return along which axis of its node an argument is split, for each dimension."""
    return {d: on_node[argument] for d, on_node in enumerate(split) if argument in on_node}


def pieces_of(array: Any, axes: Mapping[int, int], origin: Index) -> Pieces:
    """Return a Dask array in pieces: its chunks, or slices of them along dimensions where it has one chunk."""
    places = {d: array.ndim - 1 if a else slowest_axis(array.shape, range(array.ndim - 1))[0] for d, a in axes.items()}
    whole = frozenset(d for d, axis in places.items() if array.numblocks[axis] == 1)

    def key(at: Index) -> Any:
        blocks = [0] * array.ndim
        for d, axis in places.items():
            blocks[axis] = 0 if d in whole else at[d]
        return (array.name, *blocks)

    return Pieces(key, axes, array.shape, origin, whole=whole, array=array, places=places)


def chunks_of(
    split: Mapping[int, int], axes: Axes, dimensions: Sequence[Dimension]
) -> tuple[tuple[tuple[int, ...], ...], dict[int, int]]:
    """Return the chunks of a result, and its axis along each dimension along which it is split.

    `split` has the axis of its node for each of these dimensions.
    """
    chunks: list[tuple[int, ...]] = [(n,) for n in axes.shape]
    places: dict[int, int] = {}
    for d, on_node in split.items():
        axis, rest = slowest_axis(axes.shape, axes.cols if on_node else axes.rows)
        if any(n % rest for n in dimensions[d].widths):
            raise TypeError("a result folds a chunked axis with others; return it as a matrix, or give one chunk")
        chunks[axis] = tuple(n // rest for n in dimensions[d].widths)
        places[d] = axis
    return tuple(chunks), places
