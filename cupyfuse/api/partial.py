"""`partial`: run a function on shards of one axis, such as a vocabulary, and merge what they leave."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import dtypes
from ..plan.shards import Shards
from ..plan.traced import Traced
from ..settings import DEFAULT_WORKSPACE
from . import arrays
from .constants import value_key
from .fuse import Fused
from .planned_function import PlannedFunction
from .results import Results
from .shard_graphs import Cache, axes_of_shard, load_graph, merge_states, node_axis
from .signature import Signature


@dataclass(frozen=True)
class State:
    """What some shards leave of the reductions along the split axis.

    States are plain data: they can be pickled, sent, and kept. `Partial.combine` merges them.

    Attributes
    ----------
    round : int
        Which merge of the function they are for; most functions have one.
    length : int
        How many elements of the split axis they are of.
    rules : tuple of str
        How the arrays merge, see `plan/shards/states.py`.
    arrays : dict of str to array
        Matrices in the dtype that reductions accumulate in (float32 for 16-bit floats), one value for each row or
        column that is reduced: for example "max" and "expsum", the sum of exp(x - max).
        Sums of products over the split axis are whole matrices.
    """

    round: int
    length: int
    rules: tuple[str, ...]
    arrays: dict[str, Any]


class Shard:
    """A shard of a call: its arguments, and what it computed so far. Created by `Partial.local`.

    Attributes
    ----------
    state : State
        To be merged with the states of all other shards.
    last : bool
        Whether the results follow this merge; otherwise the shard takes part in another one, by `Partial.proceed`.
    """

    def __init__(self, split: _Split, signature: Signature, start: int, width: int):
        self.state: State
        self._split, self._signature = split, signature
        self._start, self._width = start, width
        self._kept: list[Any] = []
        self._merged: list[Any] = []

    @property
    def last(self) -> bool:
        return self.state.round + 1 >= len(self._split.shards.rounds)


class Partial:
    """A function on shards of one axis. Created by `partial`.

    Examples
    --------
    >>> import numpy as np, cupyfuse as cf
    >>> def head(x, weight):
    ...     return cf.logsumexp(x @ weight.T, axis=1)
    >>> parts = cf.partial(head, {"weight": 0}, length=4)
    >>> x, weight = np.ones((2, 3)), np.zeros((4, 3))
    >>> shards = [parts.local(x, weight[:3]), parts.local(x, weight[3:], start=3)]
    >>> total = parts.combine([shard.state for shard in shards])
    >>> parts.finish(total, shards[0]).round(4)
    array([1.3863, 1.3863])
    """

    def __init__(self, function: PlannedFunction, split: Mapping[str, int], length: int):
        self._function = function
        if not isinstance(split, Mapping):
            raise TypeError(f"split: expected a dict of axes by parameter, such as {{'weight': 0}}, got {split!r}")
        self._axes = {name: _as_index(axis, f"split[{name!r}]") for name, axis in split.items()}
        if not self._axes:
            raise ValueError("split: expected the axis along which a parameter is split, by name, got none")
        for name in self._axes:
            if name not in function.names:
                raise TypeError(f"split: {function!r} has no parameter {name!r}; it has {', '.join(function.names)}")
        self.length = _as_index(length, "length")
        if self.length < 2:
            raise ValueError(f"length: expected at least 2 elements along the split axis, got {length}")
        self._splits = Cache()

    def __repr__(self) -> str:
        return f"<{self._function!r} on shards of {', '.join(self._axes)}>"

    def local(self, /, *args: Any, start: int = 0, **kwargs: Any) -> Shard:
        """Compute the state of one shard.

        Parameters
        ----------
        *args, **kwargs
            The function's arguments. Of those that are split, the elements of this shard; of all others, all.
        start : int
            The position of the shard's first element along the split axis, for labels and for arguments that have all
            elements. Zero by default.

        Raises
        ------
        TypeError
            An operation of the function needs all elements of the axis, and its results do not merge.
        ValueError
            Arguments differ in how many elements of the axis they have, or have more than there are.
        """
        function = self._function
        values, defaulted = function.parameters.bind(args, kwargs)
        signature = function.environment.new_signature()
        for value, name in zip(values, function.names, strict=True):
            function.add_argument(signature, value, name, name in defaulted)
        function.environment.add_to(signature)
        start, width = _as_index(start, "start"), self._width(dict(zip(function.names, values, strict=True)))
        if not 0 <= start <= self.length - width:
            raise ValueError(
                f"start: {width} elements from {start} are not within the {self.length} elements of the split axis"
            )
        key = (*signature.cache_key(*function.product_settings), *map(value_key, signature.numbers))
        split = self._splits.get(key, lambda: self._new_split(values, signature, defaulted))
        shard = Shard(split, signature, start, width)
        _run_round(shard, 0)
        return shard

    def _width(self, values: Mapping[str, Any]) -> int:
        """Return how many elements of the split axis the arguments have."""
        widths: dict[str, int] = {}
        for name, axis in self._axes.items():
            value = values[name]
            if not arrays.is_array(value):
                raise TypeError(f"argument {name!r}: expected an array to split, got {type(value).__name__}")
            if not -len(value.shape) <= axis < len(value.shape):
                raise ValueError(f"split: argument {name!r} has no axis {axis}, its shape is {tuple(value.shape)}")
            widths[name] = value.shape[axis]
        if len(set(widths.values())) > 1:
            found = ", ".join(f"{name} has {width}" for name, width in widths.items())
            raise ValueError(f"arguments differ in their elements of the split axis: {found}")
        return next(iter(widths.values()))

    def _new_split(self, values: Sequence[Any], signature: Signature, defaulted: Collection[str]) -> _Split:
        """Trace the function for all elements of the axis, and split its graph."""
        full = [
            _with_length(value, self._axes[name], self.length) if name in self._axes else value
            for name, value in zip(self._function.names, values, strict=True)
        ]
        spanning = self._function.signature_of(full, specs=True, by_value=defaulted)
        tracing = self._function.trace_floats(full, spanning, for_shards=True)
        split = {}
        for number, name in enumerate(spanning.names):
            if name in self._axes:
                split[number] = node_axis(spanning.leaves[number].shape, self._axes[name], name)
        shards = Shards(tracing.traced.graph, split, self.length)
        return _Split(self._function, shards, tracing.traced, tracing.results, tracing.constants, Cache())

    def combine(self, states: Sequence[State]) -> State:
        """Merge the states of several shards, in the order given.

        Merging in groups gives the same result up to rounding; the same order gives the same bits.

        Raises
        ------
        ValueError
            There are no states, or they belong to different merges.
        """
        if not isinstance(states, Iterable):
            raise TypeError(f"states: expected several states of shards (`shard.state`), got {type(states).__name__}")
        states = list(states)
        if not states:
            raise ValueError("states: expected at least one, got none")
        for state in states:
            if not isinstance(state, State):
                raise TypeError(f"states: expected the states of shards (`shard.state`), got {type(state).__name__}")
        if len({(s.round, s.rules) for s in states}) > 1:
            raise ValueError("states: they belong to different merges, or to different functions")
        for state in states[1:]:
            _check_alike(state, states[0], "states", "the first one")
        first = states[0]
        length = sum(s.length for s in states)
        if length > self.length:
            raise ValueError(f"states: they are of {length} elements, more than the {self.length} of the split axis")
        if len(states) == 1 or not first.arrays:
            return State(first.round, length, first.rules, first.arrays)
        merged = merge_states(first.rules, [list(s.arrays.values()) for s in states])
        return State(first.round, length, first.rules, dict(zip(first.arrays, merged, strict=True)))

    def proceed(self, total: State, shard: Shard) -> Shard:
        """Compute the next state of a shard, from the merged state of all shards.

        For functions whose reductions along the split axis depend on each other, while `shard.last` is false.

        Returns
        -------
        Shard
            The shard, with its next state.
        """
        self._take(total, shard)
        if shard.last:
            raise ValueError("shard: it takes part in no further merge; call `finish`")
        _run_round(shard, shard.state.round + 1)
        return shard

    def finish(self, total: State, shard: Shard) -> Any:
        """Compute the results of a shard, from the merged state of all shards.

        Returns
        -------
        array, or structure of arrays
            As the function returns them. Results that have the split axis have the shard's elements of it, all others
            are whole, and the same for each shard.
        """
        self._take(total, shard)
        if not shard.last:
            raise ValueError("shard: it takes part in another merge; call `proceed`")
        split = shard._split
        results = split.run(len(split.shards.rounds), shard._width, split.operands(shard), shard._signature.numbers)
        export = shard._signature.exporters[0]
        if export is not None:
            results = [export(r) for r in results]
        return split.results.rebuild(results, shard._signature.numbers)

    def _take(self, total: State, shard: Shard) -> None:
        """Check a merged state, and let a shard take it."""
        for value, name, kind in ((total, "total", State), (shard, "shard", Shard)):
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
        if total.round != shard.state.round or tuple(total.arrays) != tuple(shard.state.arrays):
            raise ValueError("total: it is of another merge than the shard's state, or of another function")
        if total.length != self.length:
            raise ValueError(
                f"total: it merges {total.length} of the {self.length} elements of the split axis; combine the states "
                "of all shards"
            )
        _check_alike(total, shard.state, "total", "the shard's own state")
        del shard._merged[shard._split.parts_before(total.round) :]
        shard._merged += total.arrays.values()

    def __reduce__(self) -> Any:
        return Partial, (self._function, self._axes, self.length)


@dataclass(frozen=True)
class _Split:
    """The graph of one signature, split, and the executables of its parts."""

    function: PlannedFunction
    shards: Shards
    traced: Traced
    results: Results
    constants: list[Any]
    loaded: Cache

    def parts_before(self, number: int) -> int:
        return sum(len(r.names) for r in self.shards.rounds[:number])

    def operands(self, shard: Shard) -> list[Any]:
        """Return the operands of the shard's graphs: arguments, constants, and what it has so far."""
        leaves = shard._signature.leaves
        found = [*leaves, *(arrays.on_device_of(leaves[0], c) for c in self.constants)]
        for number, axis in self.shards.sliced.items():
            part = slice(shard._start, shard._start + shard._width)
            value = found[number]
            found[number] = value[..., part] if axis == 1 else value[part]
        inputs = self.shards.inputs_after
        unknown = arrays.on_device_of(leaves[0], np.zeros((1, 1), np.float32))  # of rounds to come, which none reads
        kept = sum(len(r.kept) for r in self.shards.rounds)
        states = len(inputs) - kept - self.shards.positions
        found += [*shard._kept, *[unknown] * (kept - len(shard._kept))]
        found += [*shard._merged, *[unknown] * (states - len(shard._merged))]
        if self.shards.positions:
            found.append(arrays.on_device_of(leaves[0], np.full((1, 1), shard._start, np.int64)))
        return found

    def run(self, number: int, width: int, operands: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """Run a round for a shard of some width; the one behind the last merge computes the results."""

        def load() -> Any:
            if number < len(self.shards.rounds):
                graph = self.shards.local(number, width)
                axes: Sequence[Any] = [(0, 1)] * len(graph.outputs)
            else:
                graph = self.shards.finish(width)
                nodes = zip(graph.outputs, self.traced.axes, strict=True)
                axes = [axes_of_shard(axes, node.shape) for node, axes in nodes]
            name = f"{self.traced.name}: shard of {width}"
            return load_graph(self.function.settings, name, graph, axes, operands)

        execute = self.loaded.get((number, width, tuple(map(arrays.layout, operands))), load)
        return execute(operands, None, numbers)


def _as_index(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None


def _check_alike(state: State, other: State, name: str, whose: str) -> None:
    """Check that two states have arrays of equal shapes and dtypes, in the same memory."""
    for part, array in state.arrays.items():
        expected = other.arrays[part]
        if array.shape != expected.shape or array.dtype != expected.dtype:
            raise ValueError(
                f"{name}: {part!r} is {array.dtype} of shape {array.shape}, and that of {whose} {expected.dtype} of "
                f"shape {expected.shape}; merge states of the same rows in the same dtype"
            )
        if arrays.is_cupy(array) != arrays.is_cupy(expected):
            raise ValueError(f"{name}: {part!r} is in other memory than that of {whose}; copy it there")


def _run_round(shard: Shard, number: int) -> None:
    """Compute a shard's state of a round, and what it keeps."""
    split = shard._split
    if not split.shards.rounds:
        shard.state = State(0, shard._width, (), {})
        return
    this = split.shards.rounds[number]
    found = split.run(number, shard._width, split.operands(shard), shard._signature.numbers)
    parts = dict(zip(this.names, found, strict=False))
    shard.state = State(number, shard._width, this.rules, parts)
    shard._kept += found[len(parts) :]


def _with_length(value: Any, axis: int, length: int) -> arrays.Spec:
    """Describe an array that has all elements of the split axis."""
    shape = list(value.shape)
    shape[axis] = length
    return arrays.Spec(tuple(shape), dtypes.name_of(value.dtype))


def partial(
    fn: Callable[..., Any],
    /,
    split: Mapping[str, int],
    length: int,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
) -> Partial:
    """Run a function on shards of one axis, such as the vocabulary of a head, and merge what they leave.

    Each shard computes its part of the products, and the state of each reduction along the split axis: for logsumexp
    the maximum and the sum of exponentials of each row. Most states are a few numbers for each row, and merge to what
    one pass would give, up to rounding; a product that sums over the split axis leaves a whole matrix. No shard needs
    the others' parts of a product. The states can be merged by any means that exchanges arrays, on several
    GPUs, processes or machines. It has nothing to do with `functools.partial`, nor with the placement `Partial` of
    DTensors.

    Parameters
    ----------
    fn : callable
        As for `fuse`; it is traced for all elements of the axis.
    split : mapping of str to int
        The axis along which arguments are split, by the name of the parameter.
    length : int
        Elements of the split axis, those of all shards together.
    precision, max_workspace
        As for `fuse`.

    Returns
    -------
    Partial
        With the methods `local`, `combine` and `finish`, and `proceed` where reductions depend on each other.

    Raises
    ------
    TypeError
        `fn` has no parameter of such a name.
    ValueError
        No parameter is split, or `length` is below 2.
    """
    if isinstance(fn, Fused):
        function: PlannedFunction = fn
    elif callable(fn):
        function = Fused(fn, precision, max_workspace)
    else:
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    return Partial(function, split, length)
