"""Fused functions with some of their arguments fixed, and what is prepared from those once."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import devices
from ..ir import graph as g
from ..plan.build import build
from ..plan.plan import Plan
from . import arrays
from .arguments import collect
from .call import NESTED, Runnable, arrays_in, device_of, finish, holds_tracer
from .planned_function import PlannedFunction

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Taken:
    """A fixed argument taken apart, as by `collect`; of one that can change also its arrays themselves."""

    leaves: list[Any] = field(default_factory=list)
    tokens: list[Any] = field(default_factory=list)
    givers: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    exchanged: int = 0  # how often these arrays became others


class Bound:
    """A fused function with some of its arguments fixed. Made by `Fused.bind`.

    What depends on the fixed arrays alone (column sums of weights, folded normalisations) is computed once, on the
    first call that needs it. It does not follow later changes of those arrays: call `refresh` after one. Fixed objects
    and containers are looked at in every call: at what they hold, not at what is in their arrays.
    """

    def __init__(self, fused: PlannedFunction, fixed: dict[str, Any]):
        unknown = [name for name in fixed if name not in fused.names]
        if unknown:
            raise TypeError(f"bind: {fused!r} has no parameter {unknown[0]!r}; it has {', '.join(fused.names)}")
        self._fused = fused
        self._fixed = dict(fixed)
        self._free = tuple(name for name in fused.names if name not in fixed)
        self._taken: dict[str, _Taken] = {}  # fixed arguments that stay what they are
        self._held: dict[str, _Taken] = {}  # others, as the last call found them
        self._runnables: dict[Hashable, Runnable] = {}
        self._preparations: dict[Hashable, tuple[Callable[..., Any], list[Any], list[Any]]] = {}
        functools.update_wrapper(self, fused.__wrapped__)
        self.__wrapped__ = functools.partial(fused.__wrapped__, **fixed)

    def __repr__(self) -> str:
        return f"<{self._fused!r} with {', '.join(self._fixed)} bound>"

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The value of every parameter, in the order of the signature."""
        given = dict(zip(self._free, args, strict=False))
        if len(args) > len(self._free):
            raise TypeError(f"expected at most {len(self._free)} arguments ({', '.join(self._free)}), got {len(args)}")
        for name, value in kwargs.items():
            if name in self._fixed or name in given or name not in self._free:
                what = "is bound" if name in self._fixed else "was given twice" if name in given else "is unknown"
                raise TypeError(f"argument {name!r} {what}")
            given[name] = value
        parameters = self._fused.signature.parameters
        values = []
        for name in self._fused.names:
            if name in self._fixed:
                values.append(self._fixed[name])
            elif name in given:
                values.append(given[name])
            elif parameters[name].default is not inspect.Parameter.empty:
                values.append(parameters[name].default)
            else:
                raise TypeError(f"missing argument {name!r}")
        return values

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run with the remaining arguments; `out` as for the fused function."""
        leaves: list[Any] = []
        tokens: list[Any] = []
        givers: list[Any] = []
        values: Sequence[Any] = args
        if kwargs or len(args) != len(self._free):
            every = zip(self._fused.names, self._values(args, kwargs), strict=True)
            values = [value for name, value in every if name not in self._fixed]
        if any(map(holds_tracer, values)):
            named = dict(zip(self._fused.names, self._values(args, kwargs), strict=True))
            return self._fused.inline((), named, out)
        position = 0
        for name in self._fused.names:
            taken = self._taken.get(name)
            if taken is not None:
                leaves += taken.leaves
                givers += taken.givers
            elif name in self._fixed:
                self._take(name, leaves, tokens, givers)
            else:
                collect(values[position], name, leaves, tokens, givers)
                position += 1
        key = (self._fused.precision, *tokens)
        runnable = self._runnables.get(key)
        if runnable is None:
            runnable = self._made_ready(key, self._values(args, kwargs), leaves)
        return finish(runnable, leaves, givers, out)

    def _made_ready(self, key: Hashable, values: Sequence[Any], leaves: list[Any]) -> Runnable:
        fixed = self.fixed_numbers(values)
        return self._fused.runnable(self._runnables, key, values, leaves, fixed, self.prepared)

    def _take(self, name: str, leaves: list[Any], tokens: list[Any], givers: list[Any]) -> None:
        """Take a fixed argument apart: once, or in every call where it may hold something else by then."""
        value = self._fixed[name]
        now = _Taken()
        collect(value, name, now.leaves, now.tokens, now.givers)
        if _stays(value):
            self._taken[name] = now
        else:
            now = self._looked_at(name, now, _arrays_held(value))
            tokens += [*now.tokens, now.exchanged]
        leaves += now.leaves
        givers += now.givers

    def _looked_at(self, name: str, now: _Taken, held: list[Any]) -> _Taken:
        """What a fixed argument holds now: as it was found before where that is the same."""
        before = self._held.get(name)
        if before is not None:
            now.exchanged = before.exchanged
            same = len(held) == len(before.held) and all(map(operator.is_, held, before.held))
            if same and now.tokens == before.tokens:
                return before
            if not same:
                # Other arrays, of which nothing is prepared; what was for those before goes with them.
                now.exchanged += 1
                self._runnables, self._preparations = {}, {}
        now.held = held
        self._held[name] = now
        return now

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these remaining arguments: arrays, or `spec(shape, dtype)` in their places."""
        values = self._values(args, kwargs)
        traced, _ = self._fused.trace(values)
        leaves = arrays_in(values)
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
        return build(
            traced, layouts, self._fused.settings(device_of(leaves, devices.DEFAULT)), self.fixed_numbers(values)
        )

    def fixed_numbers(self, values: Sequence[Any]) -> frozenset[int]:
        """The numbers of the array arguments that are bound."""
        numbers: set[int] = set()
        count = 0
        for name, value in zip(self._fused.names, values, strict=True):
            found = len(arrays_in([value]))
            if name in self._fixed:
                numbers.update(range(count, count + found))
            count += found
        return frozenset(numbers)

    def prepared(self, plan: Plan, leaves: list[Any], engine: Callable[..., Any]) -> list[Any]:
        """The values of a preparing plan; computed once, whichever shapes of the other arguments asked for it."""
        needed = [leaves[node.argument] for node in plan.graph.inputs]
        key = (*signature_of(plan), *map(id, needed))
        if key not in self._preparations:
            execute = engine(plan, needed)
            results = execute(needed, [None] * len(plan.outputs))
            self._preparations[key] = (execute, needed, results)
        return self._preparations[key][2]

    def __reduce__(self) -> Any:
        return Bound, (self._fused, self._fixed)

    def refresh(self) -> None:
        """Prepare again what depends on the bound arrays, in place, after they were changed."""
        for execute, leaves, results in list(self._preparations.values()):
            execute(leaves, results)


def _stays(value: Any) -> bool:
    """Whether a fixed argument is the same in every call, but for what is in its arrays."""
    if isinstance(value, tuple):
        return all(map(_stays, value))
    return type(value) in _PLAIN or isinstance(value, np.generic) or arrays.is_array(value)


def _arrays_held(value: Any) -> list[Any]:
    """The arrays in a container, as they are in it."""
    if isinstance(value, NESTED):
        return [a for item in (value.values() if isinstance(value, dict) else value) for a in _arrays_held(item)]
    return [value] if arrays.is_array(value) else []


def signature_of(plan: Plan) -> list[Hashable]:
    """What a preparing plan computes: equal for plans that compute the same from the same arguments."""
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(plan.graph.roots):
        numbers[node] = len(numbers)
        lines.append((g.operation(node), tuple(numbers[i] for i in node.inputs)))
    return [*lines, tuple(numbers[n] for n in plan.graph.outputs)]
