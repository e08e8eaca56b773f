"""A graph run by the processes of a mesh: split along one axis for each dimension of the mesh that shards something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...ir.graph import Graph
from ...plan.plan import Plan
from ...plan.schedule.cut import WHOLE
from ...plan.shards import Shards, SplitError
from .exchange import Group, MakeLeaf


@dataclass(frozen=True)
class Level:
    """One dimension of a mesh, along which an axis is split.

    Attributes
    ----------
    group : Group
    widths : tuple of int
        Elements of the axis that each process of the group has.
    split : mapping of int to int
        The axis (0: rows, 1: columns) along which the matrices of arguments are split, by argument number.
    """

    group: Group
    widths: tuple[int, ...]
    split: Mapping[int, int]

    @property
    def length(self) -> int:
        return sum(self.widths)

    @property
    def width(self) -> int:
        """Elements that this process has."""
        return self.widths[self.group.rank]

    @property
    def start(self) -> int:
        """Position of the first of them."""
        return sum(self.widths[: self.group.rank])


class Local(NamedTuple):
    """How a process runs its own part of a graph.

    Attributes
    ----------
    make : callable
        Makes what runs a graph, such as a `Leaf`, from a name and the graph.
    max_workspace : int
        Bytes of a product, up to which a process keeps its part for later rounds.
    keeps : bool
        Whether tensors may be kept from call to call.
    """

    make: MakeLeaf
    max_workspace: int
    keeps: bool


Modes = tuple[tuple[int, ...], ...]  # for each result, for each level: the axis along which it is split, or WHOLE


def program(name: str, graph: Graph, levels: Sequence[Level], local: Local, results: Modes = ()) -> Any:
    """Return what runs a graph on the parts of its arguments that a process has: a leaf or a `Split`.

    Parameters
    ----------
    name : str
        Of its plans.
    graph : Graph
        With all elements of all axes.
    levels : sequence of Level
        From the outermost to the innermost. All processes of a group have to give the same ones.
    local : Local
    results : tuple, optional
        How results are to be split that could be whole.

    Raises
    ------
    SplitError
        It cannot be split so. This depends on what is the same in all processes alone.
    """
    return Split(name, graph, levels, local, results) if levels else local.make(name, graph)


class Split:
    """A graph split along one axis; its rounds are programs for the other levels."""

    def __init__(self, name: str, graph: Graph, levels: Sequence[Level], local: Local, results: Modes = ()):
        level, *inner = self._level, *_ = levels
        for number, axis in level.split.items():
            if graph.inputs[number].shape[axis] != level.length:
                raise SplitError(
                    f"argument {graph.inputs[number].name!r} has {graph.inputs[number].shape[axis]} of the "
                    f"{level.length} elements that are split: two dimensions of the mesh split one axis"
                )
        self._local = local
        asked = {k: modes[0] for k, modes in enumerate(results) if modes[0] != WHOLE}
        most = local.max_workspace * level.group.count
        self.shards = shards = Shards(graph, level.split, level.length, results=asked, most_kept=most, early=True)
        self._positions: dict[Any, Any] = {}  # by device
        base = len(graph.inputs)
        kept, state = base, base + sum(len(r.kept) for r in shards.rounds)
        self._inputs = base + len(shards.inputs_after)
        self._rounds: list[tuple[Any, Any, list[int]]] = []  # a program, its round, the places of its results
        splits = [dict(each.split) for each in inner]

        def part(number: int, places: Sequence[int]) -> Any:
            """Make the program of a round; note how its results are split for those to come."""
            levels = [replace(each, split=split) for each, split in zip(inner, splits, strict=True)]
            # All processes split what a shard of many elements splits, also where a shard has none.
            make = shards.finish if number == len(shards.rounds) else lambda width: shards.local(number, width)
            what = f"{name}: round {number + 1}" if shards.rounds else name
            wanted: Modes = results and tuple(modes[1:] for modes in results) if number == len(shards.rounds) else ()
            if inner:
                wanted = program(what, make(max(level.widths)), levels, local, wanted).result_modes
            made = program(what, make(level.width), levels, local, wanted)
            for place, modes in zip(places, made.result_modes, strict=False):
                for split, mode in zip(splits, modes, strict=True):
                    if mode != WHOLE:
                        split[place] = mode
            return made

        for number, r in enumerate(shards.rounds):
            places = [*range(state, state + len(r.names)), *range(kept, kept + len(r.kept))]
            state, kept = state + len(r.names), kept + len(r.kept)
            self._rounds.append((part(number, places), r, places))
        self._finish = part(len(shards.rounds), ())
        self.result_modes: Modes = tuple(
            (mode, *modes) for mode, modes in zip(shards.result_modes, self._finish.result_modes, strict=True)
        )

    @property
    def plans(self) -> list[Plan]:
        """The plans of all rounds."""
        return [plan for each in (*(r[0] for r in self._rounds), self._finish) for plan in each.plans]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Return this process's parts of the results, from its parts of the arguments."""
        level = self._level
        values = [*operands, *[None] * (self._inputs - len(operands))]
        for number, mode in self.shards.sliced.items():
            own = slice(level.start, level.start + level.width)
            values[number] = values[number][..., own] if mode == 1 else values[number][own]
        if self.shards.positions:
            values[-1] = self._first(operands[0].device)
        for run, r, places in self._rounds:
            found = run(values)
            # Compilers know the collective operators that return new tensors.
            shared = [*values, *found[len(r.names) :]] if self._local.keeps else None
            states = level.group.merge(r, found[: len(r.names)], self._local.make, shared)
            for place, value in zip(places, [*states, *found[len(r.names) :]], strict=True):
                values[place] = value
        results: list[Any] = self._finish(values)
        return results

    def _first(self, device: Any) -> Any:
        """Return the position of this process's first element."""
        found = self._positions.get(device)
        if found is None:
            found = torch.full((1, 1), self._level.start, dtype=torch.int64, device=device)
            if self._local.keeps:
                self._positions[device] = found
        return found
