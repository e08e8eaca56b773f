"""The layers that a call adds to the graph.

Where nothing is merged, they are a `Blockwise`, which Dask fuses with the layers before and behind it: making a chunk,
the call and what follows on that chunk are one task, and neither the chunk nor the result is a value that the scheduler
counts and that workers send each other. So are the blocks before a single merge. Otherwise they are tasks one by one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from dask._task_spec import Alias, Task, TaskRef
from dask.blockwise import BlockwiseDepDict, blockwise

from ..ir.graph import Graph
from ..plan.schedule.cut import WHOLE
from ..plan.shards import Shards
from ..trace import Axes
from .chunks import chunks_of
from .lower import Lowering, finish_of, read_by
from .pieces import Index, Pieces, cut_of
from .tasks import Block, run_block


class Result(NamedTuple):
    """A result as a Dask array.

    Attributes
    ----------
    name : str
    chunks : tuple of tuple of int
    layers : dict
        By name; those of the arguments come beside them.
    dependencies : dict
        Names of layers, by layer.
    """

    name: str
    chunks: tuple[tuple[int, ...], ...]
    layers: dict[str, Any]
    dependencies: dict[str, set[str]]


def layers_of(
    lowering: Lowering, graph: Graph, axes: Sequence[Axes], given: Sequence[Pieces], name: str, token: str
) -> list[Result]:
    """Lower a graph, and return its results.

    Parameters
    ----------
    lowering : Lowering
    graph : Graph
    axes : sequence of Axes
        Of the whole results.
    given : sequence of Pieces
        The arguments.
    name, token : str
        Of the function, and of the call: names of layers are made of these.
    """
    own = [f"{name}-{token}"] if len(axes) == 1 else [f"{name}-{k}-{token}" for k in range(len(axes))]
    # No task of `tasks` is called as a layer is: Dask takes both for one.
    names = _Names(own, f"{name}-blocks-{token}", f"{name}-tasks-{token}")
    if blocks := _local_blocks(lowering, graph, given):
        return _results_of_blocks(lowering, names, axes, given, blocks)
    if reduced := _reduced_blocks(lowering, graph, given):
        shards, blocks = reduced
        indices, states = _Indices.of_dimensions(lowering), shards.rounds[0].names
        layers, dependencies = _run_layers(lowering, names.blocks, indices, [(0, 1)] * len(states), given, blocks)
        found, read = _merged(lowering, shards, names.blocks, indices, axes, given, blocks)
        return _results_of_tasks(lowering, names, axes, found, layers, dependencies, {names.blocks, *read})
    found = lowering.lower(graph, axes, given, range(len(lowering.dimensions)))
    read = {piece.array.name for piece in given if piece.array is not None}
    return _results_of_tasks(lowering, names, axes, found, {}, {}, read)


class _Names(NamedTuple):
    """The names of layers: one for each result, that of the blocks, and that of tasks one by one."""

    results: list[str]
    blocks: str
    tasks: str


def _results_of_blocks(
    lowering: Lowering,
    names: _Names,
    axes: Sequence[Axes],
    given: Sequence[Pieces],
    blocks: Mapping[Index, _Local],
) -> list[Result]:
    """Return the results where each block computes its part of all of them: one is the layer of the blocks itself."""
    dimensions = lowering.dimensions
    placed = [chunks_of(modes, a, dimensions) for modes, a in zip(blocks[lowering.origin].modes, axes, strict=True)]
    if len(axes) == 1:
        ((chunks, places),) = placed
        indices = _Indices(len(chunks), places, [len(d.widths) for d in dimensions])
        return [
            Result(names.results[0], chunks, *_run_layers(lowering, names.results[0], indices, axes, given, blocks))
        ]
    indices = _Indices.of_dimensions(lowering)
    layers, dependencies = _run_layers(lowering, names.blocks, indices, axes, given, blocks)
    results = []
    for number, (name, (chunks, places)) in enumerate(zip(names.results, placed, strict=True)):
        items = {
            (name, *block): Task((name, *block), operator.getitem, TaskRef((names.blocks, *indices.block(at))), number)
            for block, at in _blocks_of(chunks, places, len(dimensions))
        }
        results.append(Result(name, chunks, {**layers, name: items}, {**dependencies, name: {names.blocks}}))
    return results


def _results_of_tasks(
    lowering: Lowering,
    names: _Names,
    axes: Sequence[Axes],
    found: Sequence[Pieces],
    layers: Mapping[str, Any],
    dependencies: Mapping[str, set[str]],
    read: set[str],
) -> list[Result]:
    """Return the results `found`, which the lowering's tasks compute, behind layers that these read.

    `read` are the names of the layers and Dask arrays that the tasks read, and `dependencies` those of the layers.
    """
    dimensions = lowering.dimensions
    layers = {**layers, names.tasks: lowering.tasks}
    dependencies = {**dependencies, names.tasks: read}
    results = []
    for name, piece, a in zip(names.results, found, axes, strict=True):
        chunks, places = chunks_of(piece.axes, a, dimensions)
        items = {
            (name, *block): Alias((name, *block), piece.key(at))
            for block, at in _blocks_of(chunks, places, len(dimensions))
        }
        results.append(Result(name, chunks, {**layers, name: items}, {**dependencies, name: {names.tasks}}))
    return results


def _blocks_of(
    chunks: Sequence[Sequence[int]], places: Mapping[int, int], dimensions: int
) -> Iterator[tuple[Index, Index]]:
    """Yield the blocks of a result, each with its place along every dimension."""
    for block in itertools.product(*(range(len(c)) for c in chunks)):
        yield block, tuple(block[places[d]] if d in places else 0 for d in range(dimensions))


class _Local(NamedTuple):
    """What one block computes by itself.

    Attributes
    ----------
    graph : Graph
    operands : list of Pieces, int or None
        An int is the position of the block along a dimension; None is not read.
    modes : list of dict
        Of each result: the axis of its node along which it is split, for each dimension.
    """

    graph: Graph
    operands: list[Any]
    modes: list[dict[int, int]]

    @property
    def alike(self) -> bool:
        """Whether other blocks of the same lengths do the same, on other chunks."""
        return not any(p.cuts if isinstance(p, Pieces) else p is not None for p in self.operands)


def _local_blocks(lowering: Lowering, graph: Graph, given: Sequence[Pieces]) -> dict[Index, _Local] | None:
    """Return what each block computes from one block of every argument, or None if that is not all.

    Something is left if states merge, or if a result is not split along every dimension, of which there is one at
    least. Blocks that differ in their chunks alone have one entry between them.
    """
    if not lowering.dimensions:
        return None
    found: dict[Index, _Local] = {}
    alike: dict[Index, _Local] = {}
    for at in itertools.product(*(range(len(d.widths)) for d in lowering.dimensions)):
        lengths = tuple(d.widths[block] for d, block in zip(lowering.dimensions, at, strict=True))
        local = alike.get(lengths) or _local_at(lowering, graph, given, at)
        if local is None:
            return None
        if local.alike:
            alike[lengths] = local
        found[at] = local
    return found


def _reduced_blocks(
    lowering: Lowering, graph: Graph, given: Sequence[Pieces]
) -> tuple[Shards, dict[Index, _Local]] | None:
    """Return what each block computes of states that merge once, where all results follow from the merged states.

    None where there is more: several dimensions, several merges, or results of which blocks have a part.
    """
    if len(lowering.dimensions) != 1:
        return None
    shards = lowering.shards_of(graph, given, 0)
    if shards is None or len(shards.rounds) != 1 or set(shards.result_modes) != {WHOLE}:
        return None
    (dimension,) = lowering.dimensions
    found: dict[Index, _Local] = {}
    alike: dict[int, _Local] = {}
    for block, (width, start) in enumerate(zip(dimension.widths, dimension.starts, strict=True)):
        if width not in alike:
            local = lowering.once((id(shards), 0, width), partial(shards.local, 0, width))
            operands = [*lowering.operands_of(shards, given, 0, block), *lowering.known(shards, [], [], start)]
            found[(block,)] = _Local(local, operands, [{} for _ in local.outputs])
            if found[(block,)].alike:
                alike[width] = found[(block,)]
        else:
            found[(block,)] = alike[width]
    return shards, found


def _merged(
    lowering: Lowering,
    shards: Shards,
    run: str,
    indices: _Indices,
    axes: Sequence[Axes],
    given: Sequence[Pieces],
    blocks: Mapping[Index, _Local],
) -> tuple[list[Pieces], set[str]]:
    """Add the tasks behind the states; return the results, and the names of the Dask arrays that these tasks read."""
    states = []
    for at, local in blocks.items():
        shapes, key = [n.shape for n in local.graph.outputs], (run, *indices.block(at))
        states.append(
            [lowering.result_of(partial(_constant, key), k, len(shapes), {}, s) for k, s in enumerate(shapes)]
        )
    merged = lowering.merge(shards.rounds[0].reductions, states)
    (dimension,) = lowering.dimensions
    finish = finish_of(shards, dimension.widths[0], range(len(axes)))
    operands = [*lowering.operands_of(shards, given, 0, 0), *lowering.known(shards, [], merged, 0)]
    pieces = [operands[k] for k in read_by(finish)]
    read = {p.array.name for p in pieces if isinstance(p, Pieces) and p.array is not None}
    return lowering.lower(finish, axes, operands, ()), read


def _constant(key: Any, at: Index) -> Any:
    """Return the key of a piece that is the same one for all blocks."""
    return key


def _local_at(lowering: Lowering, graph: Graph, given: Sequence[Pieces], at: Index) -> _Local | None:
    """Return what one block computes; None if something is left, as for `_local_blocks`."""
    operands: list[Any] = list(given)
    modes: list[dict[int, int]] = [{} for _ in graph.outputs]
    for d, (dimension, block) in enumerate(zip(lowering.dimensions, at, strict=True)):
        shards = lowering.shards_of(graph, operands, d)
        if shards is None or shards.rounds or WHOLE in shards.result_modes:
            return None
        for of_result, mode in zip(modes, shards.result_modes, strict=True):
            of_result[d] = mode
        operands = lowering.operands_of(shards, operands, d, block)
        operands += lowering.known(shards, [], [], dimension.starts[block])
        width = dimension.widths[block]
        graph = lowering.once((id(shards), width), partial(shards.finish, width))
    return _Local(graph, operands, modes)


class _Indices:
    """The indices of a layer's axes: one for each dimension, and one for each axis that has one block.

    Parameters
    ----------
    ndim : int
    places : mapping of int to int
        The layer's axis along each dimension.
    blocks : sequence of int
        The number of blocks along each dimension.
    """

    def __init__(self, ndim: int, places: Mapping[int, int], blocks: Sequence[int]):
        self._along = {axis: d for d, axis in places.items()}
        self.names = tuple(self._name(axis) for axis in range(ndim))
        self.numblocks = tuple(blocks[self._along[axis]] if axis in self._along else 1 for axis in range(ndim))

    @classmethod
    def of_dimensions(cls, lowering: Lowering) -> _Indices:
        """Return the indices of a layer with all dimensions, and behind them an axis of one block."""
        counts = [len(d.widths) for d in lowering.dimensions]
        return cls(len(counts) + 1, {d: d for d in range(len(counts))}, counts)

    def _name(self, axis: int) -> str:
        return f"dimension {self._along[axis]}" if axis in self._along else f"axis {axis}"

    def block(self, at: Index) -> Index:
        """Return the layer's block at a block of each dimension."""
        return tuple(at[self._along[axis]] if axis in self._along else 0 for axis in range(len(self.names)))

    def of_operand(self, array: Any, places: Mapping[int, int]) -> tuple[str, ...]:
        """Return the indices of the axes of a Dask array, which lies at `places` along dimensions.

        Axes of one block take any index, if possible that of an axis of one block: `Blockwise` reads the one block.
        """
        one = next((name for axis, name in enumerate(self.names) if axis not in self._along), self.names[0])
        along = {axis: f"dimension {d}" for d, axis in places.items()}
        return tuple(along.get(axis, one) for axis in range(array.ndim))


def _run_layers(
    lowering: Lowering,
    name: str,
    indices: _Indices,
    axes: Sequence[Any],
    given: Sequence[Pieces],
    blocks: Mapping[Index, _Local],
) -> tuple[dict[str, Any], dict[str, set[str]]]:
    """Return layers, by name, and their dependencies: one whose tasks run the blocks, and one of what they share.

    Parameters
    ----------
    lowering : Lowering
    name : str
        Of the layer that runs the blocks.
    indices : _Indices
        Of its axes.
    axes : sequence of Axes
        Of each result of a block.
    given : sequence of Pieces
        The arguments.
    blocks : mapping
        What each block computes, by its place along each dimension.
    """
    graphs = {id(local.graph): local.graph for local in blocks.values()}
    numbers = {which: number for number, which in enumerate(graphs)}
    read = sorted(set().union(*map(read_by, graphs.values())))
    arguments = [given[k] if k < len(given) else None for k in read]  # behind them are positions
    programs = [lowering.program(graph, axes, read) for graph in graphs.values()]
    values = [None if piece is None else piece.value for piece in arguments]
    shared = lowering.shared(programs, values)

    def describe(local: _Local) -> Block:
        operands = [local.operands[k] for k in read]
        positions = tuple(None if isinstance(p, Pieces) else p for p in operands)
        return Block(numbers[id(local.graph)], tuple(map(cut_of, operands)), positions)

    described = {id(local): describe(local) for local in blocks.values()}
    each = BlockwiseDepDict(
        {indices.block(at): described[id(local)] for at, local in blocks.items()}, indices.numblocks
    )
    pairs: list[Any] = [TaskRef(shared.key), None, each, indices.names]
    numblocks: dict[str, tuple[int, ...]] = {}
    apart: set[str] = set()
    for piece in arguments:
        if piece is None or piece.array is None:
            continue
        names = indices.of_operand(piece.array, piece.places)
        pairs += [piece.array.name, names]
        numblocks[piece.array.name] = piece.array.numblocks
        if piece.whole or len(piece.axes) < len(lowering.dimensions) or _may_widen(piece.array, names):
            # Chunks that several blocks read would be made anew for each if Dask fused them.
            apart.add(piece.array.name)
    layer = blockwise(run_block, name, indices.names, *pairs, numblocks=numblocks)
    key = str(shared.key)
    # Dask fuses no layer that two others need: so it is told that what the blocks share needs these too.
    return {name: layer, key: {key: shared}}, {name: {key, *numblocks}, key: apart}


def _may_widen(array: Any, names: Sequence[str]) -> bool:
    """Whether fusing could go wrong: layers that make an axis say that all that has its index has one block."""
    return len(set(names)) < len(names) and any(getattr(o, "new_axes", None) for o in array.dask.layers.values())
