"""Graphs of shards: loaded for given operands, merged, and how their arguments and results fold axes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from .. import dtypes
from ..ir.graph import Graph
from ..plan.build import build
from ..plan.shards import SplitError, merge
from ..plan.traced import Traced
from ..settings import Settings
from ..trace import Axes
from . import arrays
from .call import device_of, engine_for

MOST_LOADED = 128  # graphs, or functions, of which one cache keeps what was made for them


class Cache:
    """The values last made, by key; safe to use from several threads."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the value of a key; made once, while other threads wait."""
        value = self._values.get(key)
        if value is None:
            with self._lock:
                value = self._values.get(key)
                if value is None:
                    while len(self._values) >= MOST_LOADED:
                        self._values.pop(next(iter(self._values)))
                    value = self._values[key] = make()
        return value


def load_graph(
    settings: Callable[[Any], Settings], name: str, graph: Graph, axes: Sequence[Any], operands: Sequence[Any]
) -> Any:
    """Plan a graph for operands like those given, and load it on their engine.

    `settings` returns those for a GPU, or for none; `axes` are those of each result.
    """
    traced = Traced(name, graph, tuple(axes), ())
    plan = build(traced, dict(enumerate(map(arrays.layout, operands))), settings(device_of(operands)))
    return engine_for(operands, [n.name for n in graph.inputs])(plan, operands)


_merges = Cache()


def merge_states(rules: Sequence[str], states: Sequence[Sequence[Any]]) -> list[Any]:
    """Merge the states of several shards, each a list of arrays, in the order given.

    `rules` names the rule of each reduction in a state, whose arrays follow each other.
    """
    given = [array for parts in states for array in parts]
    parts = tuple((array.shape, dtypes.name_of(array.dtype)) for array in states[0])
    devices = {a.data.device_id if arrays.is_cupy(a) else "CPU" for a in given}
    key = tuple(rules), parts, len(states), *devices, *map(arrays.layout, given)

    def load() -> Any:
        graph = merge(rules, parts, len(states))
        axes = [(0, 1)] * len(parts)
        return load_graph(lambda device: Settings(device=device), f"merge of {len(states)}", graph, axes, given)

    return list(_merges.get(key, load)(given))


def node_axis(shape: Sequence[int], axis: int, name: str) -> int:
    """Return along which axis of its node an argument is split."""
    axis %= len(shape)
    if axis == len(shape) - 1:
        return 1
    if any(n != 1 for p, n in enumerate(shape[:-1]) if p != axis):
        raise TypeError(
            f"split: argument {name!r} has {len(shape)} dimensions, and can be split along the last one alone; "
            "move the axis there"
        )
    return 0


def axes_of_shard(axes: Any, shape: tuple[int, int]) -> Any:
    """Return the user's axes of a result for a node with a shard's elements.

    Of axes that are folded together, a shard has a part of the slowest one.
    """
    if not isinstance(axes, Axes) or axes.node_shape == shape:
        return axes
    lengths = list(axes.shape)
    for along, length in zip((axes.rows, axes.cols), shape, strict=True):
        if axes.length(along) != length:
            first, rest = slowest_axis(axes.shape, along)
            if length % rest:
                raise SplitError("a result folds the split axis with others; return it as a matrix")
            lengths[first] = length // rest
    return Axes(tuple(lengths), axes.rows, axes.cols)


def slowest_axis(shape: Sequence[int], along: Sequence[int]) -> tuple[int, int]:
    """Return the slowest of axes that are folded together, those of length one left out, and how long the others are.

    One of them at least is not of length one.
    """
    position = next(k for k, p in enumerate(along) if shape[p] != 1)
    rest = 1
    for p in along[position + 1 :]:
        rest *= shape[p]
    return along[position], rest
