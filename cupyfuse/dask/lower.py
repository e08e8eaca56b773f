"""From a traced graph, and the chunks of its arguments, to tasks.

A graph is split along one dimension after the other (`plan/shards`); what is left runs on single chunks.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dask import config
from dask._task_spec import DataNode, GraphNode, Task, TaskRef
from dask.base import tokenize

from ..api.shard_graphs import axes_of_shard
from ..ir import graph as g
from ..ir.graph import Graph
from ..plan.shards import Shards
from .pieces import Dimension, Index, Key, Pieces, at_block, cut_of
from .tasks import Options, Program, Shared, merge, run, state_of


class Lowering:
    """Builds the tasks of one call.

    Parameters
    ----------
    name, token : str
        Of the function, and of the call: names of tasks are made of these.
    options : Options
    dimensions : sequence of Dimension

    Attributes
    ----------
    tasks : dict
        By key.
    dimensions : sequence of Dimension
    origin : tuple of int
        The first block of each dimension.
    """

    def __init__(self, name: str, token: str, options: Options, dimensions: Sequence[Dimension]):
        self.tasks: dict[Key, GraphNode] = {}
        self._name, self._token, self._options = name, token, options
        self.dimensions = dimensions
        self.origin: Index = (0,) * len(dimensions)
        self._numbers: dict[str, int] = {}
        self._made: dict[Hashable, Any] = {}  # shards, graphs and programs
        self._graphs: list[Any] = []  # keeps what `_made` knows by id

    def lower(
        self, graph: Graph, axes: Sequence[Any], given: Sequence[Pieces | int | None], dimensions: Sequence[int]
    ) -> list[Pieces]:
        """Add the tasks that compute a graph, and return its results.

        Parameters
        ----------
        graph : Graph
        axes : sequence
            Of each result.
        given : sequence of Pieces, int or None
            The operands: a value, a position, or None for one that is not read.
        dimensions : sequence of int
            Along which the operands are split.
        """
        if not graph.outputs:
            return []
        if not dimensions:
            return self._run(graph, axes, given)
        this, rest = dimensions[0], dimensions[1:]
        dimension = self.dimensions[this]
        shards = self.shards_of(graph, given, this)
        if shards is None:
            return self.lower(graph, axes, given, rest)
        blocks = range(len(dimension.widths))
        arguments = [self.operands_of(shards, given, this, block) for block in blocks]
        kept: list[list[Any]] = [[] for _ in blocks]
        merged: list[Any] = []
        for number, ends in enumerate(shards.rounds):
            states = []
            for block, width in enumerate(dimension.widths):
                local = self.once((id(shards), number, width), partial(shards.local, number, width))
                operands = [*arguments[block], *self.known(shards, kept[block], merged, dimension.starts[block])]
                found = self.lower(local, [(0, 1)] * len(local.outputs), operands, rest)
                states.append(found[: len(ends.names)])
                kept[block] += found[len(ends.names) :]
            merged += self.merge(ends.reductions, states)
        parts: list[list[Pieces]] = []
        whole = [shards.modes.get(n, -1) < 0 for n in shards.graph.outputs]
        for block, width in enumerate(dimension.widths):
            wanted = tuple(k for k in range(len(whole)) if block == 0 or not whole[k])
            finish = self.once((id(shards), width, wanted), partial(finish_of, shards, width, wanted))
            operands = [*arguments[block], *self.known(shards, kept[block], merged, dimension.starts[block])]
            found = self.lower(finish, [axes[k] for k in wanted], operands, rest)
            parts.append(found if block == 0 else _in_places(found, wanted, len(whole)))
        return [
            parts[0][k] if whole[k] else self._joined([p[k] for p in parts], this, shards.modes[node])
            for k, node in enumerate(shards.graph.outputs)
        ]

    def shards_of(self, graph: Graph, given: Sequence[Any], dimension: int) -> Shards | None:
        """Split a graph along a dimension; None if no operand is split along it."""
        split = {k: p.axes[dimension] for k, p in enumerate(given) if isinstance(p, Pieces) and dimension in p.axes}
        if not split:
            return None
        length = self.dimensions[dimension].length
        shards: Shards = self.once(("shards", id(graph), *split.items()), lambda: Shards(graph, split, length))
        return shards

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what was made for a key, which may have ids of values made before; make it the first time."""
        if key not in self._made:
            self._made[key] = make()
            self._graphs.append(self._made[key])
        return self._made[key]

    def operands_of(self, shards: Shards, given: Sequence[Any], dimension: int, block: int) -> list[Any]:
        """Return the operands of a graph for a block."""
        here = self.dimensions[dimension]
        found = [p.chosen(dimension, block, here) if isinstance(p, Pieces) else p for p in given]
        for number, axis in shards.sliced.items():
            piece = found[number]
            assert isinstance(piece, Pieces)
            found[number] = piece.sliced(axis, here.starts[block], here.widths[block])
        return found

    def known(self, shards: Shards, kept: Sequence[Any], merged: Sequence[Any], start: int) -> list[Any]:
        """Return the operands behind the arguments: kept products, merged states and the position of the block."""
        number = sum(len(r.kept) for r in shards.rounds)
        states = len(shards.inputs_after) - number - shards.positions
        found = [*kept, *[None] * (number - len(kept)), *merged, *[None] * (states - len(merged))]
        return [*found, start] if shards.positions else found

    def _joined(self, blocks: Sequence[Pieces], dimension: int, axis: int) -> Pieces:
        """Return a value of which each block has a piece."""
        return replace(
            blocks[0],
            key=lambda at: blocks[at[dimension]].key(at),
            source=lambda at: blocks[at[dimension]].source(at),  # type: ignore[misc]
            axes={**blocks[0].axes, dimension: axis},
        )

    # Tasks
    def given_whole(self, name: str, array: Any, axes: Mapping[int, int]) -> Pieces:
        """Return an array that is no Dask array.

        `axes` are those of its node of which blocks read slices, for each dimension.
        """
        key = f"{self._name}-{name}-{tokenize(array)}"
        return Pieces(lambda _: key, axes, array.shape, self.origin, whole=frozenset(axes), value=array)

    def _key(self, kind: str) -> Key:
        name = f"{self._name}-{kind}-{self._token}"
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        return name, number

    def add(self, kind: str, function: Callable[..., Any], *arguments: Any) -> Key:
        """Add a task, and return its key."""
        key = self._key(kind)
        self.tasks[key] = Task(key, function, *arguments)
        return key

    def _run(self, graph: Graph, axes: Sequence[Any], given: Sequence[Any]) -> list[Pieces]:
        """Add the task that runs a graph on single chunks."""
        program, read = self.once(("program", id(graph), tuple(axes)), lambda: self._add_program(graph, axes))
        assert all(given[k] is not None for k in read), "an operand of a later round is read"
        pieces = [given[k] for k in read]
        for piece in pieces:
            if isinstance(piece, Pieces) and piece.value is not None:
                self.add_data(piece.key(piece.at), piece.value)
        operands = [TaskRef(p.key(p.at)) if isinstance(p, Pieces) else p for p in pieces]
        task = self.add("run", run, TaskRef(program), tuple(map(cut_of, pieces)), *operands)
        return [self.result_of(lambda _: task, k, len(axes), {}, n.shape) for k, n in enumerate(graph.outputs)]

    def _add_program(self, graph: Graph, axes: Sequence[Any]) -> tuple[Key, list[int]]:
        """Add a program, and return its key and the numbers of the operands that it reads."""
        read = read_by(graph)
        program = self.program(graph, axes, read)
        return self.add_data(f"{self._name}-program-{program.token}", program), read

    def add_data(self, key: Key, value: Any) -> Key:
        """Add a value under one key, which each worker fetches once."""
        self.tasks[key] = DataNode(key, value)
        return key

    def shared(self, programs: Sequence[Program], arrays: Sequence[Any]) -> DataNode:
        """Return what the blocks of a layer share, under its key."""
        return DataNode(f"{self._name}-shared-{self._token}", Shared(tuple(programs), tuple(arrays)))

    def program(self, graph: Graph, axes: Sequence[Any], read: Sequence[int]) -> Program:
        """Return the program of a graph, which takes the operands of these numbers."""
        renumbered = {graph.inputs[k]: replace(graph.inputs[k], argument=n) for n, k in enumerate(read)}
        done: dict[g.Node, g.Node] = dict(renumbered)
        for node in g.topological(graph.outputs):
            if node not in done:
                done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        own = Graph(list(renumbered.values()), [done[n] for n in graph.outputs])
        shaped = [axes_of_shard(a, n.shape) for a, n in zip(axes, graph.outputs, strict=True)]
        return Program(self._name, own, shaped, self._options)

    def result_of(
        self, task: Callable[[Index], Key], number: int, count: int, axes: Mapping[int, int], shape: tuple[int, ...]
    ) -> Pieces:
        """Return one of the results of tasks, each of which returns a list, or one array."""

        def key(at: Index) -> Key:
            return self._item(task(at), number, count)

        return Pieces(key, axes, shape, self.origin, source=lambda at: (task(at), number, count))

    def _item(self, task: Key, number: int, count: int) -> Key:
        """Return the key of one of the results of a task."""
        if count == 1:
            return task
        key: Key = self.once(("item", task, number), lambda: self.add("item", operator.getitem, TaskRef(task), number))
        return key

    def merge(self, reductions: Sequence[Any], states: Sequence[Sequence[Pieces]]) -> list[Pieces]:
        """Merge the states of all blocks, and return the merged parts.

        `states` has, for each block, the parts of all reductions one after the other. Those that are split along the
        same dimensions merge together.
        """
        if len(states) == 1:
            return list(states[0])
        groups: dict[tuple[int, ...], tuple[list[str], list[int]]] = {}
        first = 0
        for _, rule in reductions:
            numbers = range(first, first + len(rule.names))
            rules, parts = groups.setdefault(tuple(sorted({d for k in numbers for d in states[0][k].axes})), ([], []))
            rules.append(rule.name)
            parts += numbers
            first += len(rule.names)
        merged: dict[int, Pieces] = {}
        for split, (rules, parts) in groups.items():
            of_group = self._merge_group(rules, split, [[state[k] for k in parts] for state in states])
            merged.update(zip(parts, of_group, strict=True))
        return [merged[k] for k in range(first)]

    def _merge_group(
        self, rules: Sequence[str], split: Sequence[int], states: Sequence[Sequence[Pieces]]
    ) -> list[Pieces]:
        """Add a tree of tasks, of Dask's `split_every` states each, that merges states of some reductions."""
        every = max(2, int(config.get("split_every", None) or 4))
        merges: dict[Index, Key] = {}
        for blocks in itertools.product(*(range(len(self.dimensions[d].widths)) for d in split)):
            at = self.origin
            for d, block in zip(split, blocks, strict=True):
                at = at_block(at, d, block)
            level = [self._state(state, at) for state in states]
            while len(level) > 1:
                groups = [level[k : k + every] for k in range(0, len(level), every)]
                level = [
                    self.add("merge", merge, tuple(rules), *map(TaskRef, group)) if len(group) > 1 else group[0]
                    for group in groups
                ]
            merges[at] = level[0]
        return [self._merged_part(part, merges, k, len(states[0])) for k, part in enumerate(states[0])]

    def _state(self, parts: Sequence[Pieces], at: Index) -> Key:
        """Return the key of a block's state: of the task that computes it, if that has no other results."""
        sources = [p.source(at) for p in parts if p.source is not None]
        task, _, count = sources[0]
        if sources != [(task, k, count) for k in range(len(parts))]:
            return self.add("state", state_of, *(TaskRef(p.key(at)) for p in parts))
        return task if len(parts) == count else self.add("state", operator.getitem, TaskRef(task), slice(len(parts)))

    def _merged_part(self, part: Pieces, merges: Mapping[Index, Key], number: int, count: int) -> Pieces:
        def merge_at(at: Index) -> Key:
            # The merge has blocks along all dimensions of the state, a part perhaps along some of them alone.
            return merges[tuple(at[d] if d in part.axes else 0 for d in range(len(at)))]

        return self.result_of(merge_at, number, count, part.axes, part.shape)


def read_by(graph: Graph) -> list[int]:
    """Return the numbers of the operands that a graph reads."""
    below = set(g.topological(graph.outputs))
    return [k for k, node in enumerate(graph.inputs) if node in below]


def finish_of(shards: Shards, width: int, outputs: Sequence[int]) -> Graph:
    """Return what a shard computes of some results."""
    graph = shards.finish(width)
    return Graph(graph.inputs, [graph.outputs[k] for k in outputs])


def _in_places(found: Sequence[Any], places: Sequence[int], count: int) -> list[Any]:
    result: list[Any] = [None] * count
    for place, value in zip(places, found, strict=True):
        result[place] = value
    return result
