"""Fused functions with some of their arguments fixed, and what is prepared from those once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from . import arrays, devices
from . import graph as g
from .calls import Runnable, arrays_in, device_of, finish, holds_tracer
from .plan import Plan
from .planning import build
from .structure import collect

if TYPE_CHECKING:
    from .fuse import Fused


class Bound:
    """A fused function with some of its arguments fixed. Made by `Fused.bind`.

    What depends on the fixed arrays alone (column sums of weights, folded normalisations) is computed once, on the
    first call that needs it. It does not follow later changes of those arrays: call `refresh` after one.
    """

    def __init__(self, fused: Fused, fixed: dict[str, Any]):
        unknown = [name for name in fixed if name not in fused._names]
        if unknown:
            raise TypeError(f"bind: {fused!r} has no parameter {unknown[0]!r}; it has {', '.join(fused._names)}")
        self._fused = fused
        self._fixed = dict(fixed)
        self._free = tuple(name for name in fused._names if name not in fixed)
        self._taken: dict[str, tuple[list[Any], list[Any]]] = {}
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
        for name in self._fused._names:
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
            every = zip(self._fused._names, self._values(args, kwargs), strict=True)
            values = [value for name, value in every if name not in self._fixed]
        if any(map(holds_tracer, values)):
            named = dict(zip(self._fused._names, self._values(args, kwargs), strict=True))
            return self._fused._within_a_trace((), named, out)
        position = 0
        for name in self._fused._names:
            taken = self._taken.get(name)
            if taken is None and name in self._fixed:
                taken = self._take(name)
            if taken is not None:
                leaves += taken[0]
                givers += taken[1]
            else:
                collect(values[position], name, leaves, tokens, givers)
                position += 1
        key = (self._fused.precision, *tokens)
        runnable = self._runnables.get(key)
        if runnable is None:
            runnable = self._fused._make_ready(self._runnables, key, self._values(args, kwargs), leaves, self)
        return finish(runnable, leaves, givers, out)

    def _take(self, name: str) -> tuple[list[Any], list[Any]]:
        leaves: list[Any] = []
        givers: list[Any] = []
        collect(self._fixed[name], name, leaves, [], givers)
        self._taken[name] = (leaves, givers)
        return self._taken[name]

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
        for name, value in zip(self._fused._names, values, strict=True):
            found = len(arrays_in([value]))
            if name in self._fixed:
                numbers.update(range(count, count + found))
            count += found
        return frozenset(numbers)

    def prepared(self, plan: Plan, leaves: list[Any], engine: Callable[..., Any]) -> list[Any]:
        """The values of a preparing plan; computed once, whichever shapes of the other arguments asked for it."""
        key = tuple(signature_of(plan))
        if key not in self._preparations:
            needed = [leaves[node.attrs["arg"]] for node in plan.graph.inputs]
            execute = engine(plan, needed)
            results = execute(needed, [None] * len(plan.outputs))
            self._preparations[key] = (execute, needed, results)
        return self._preparations[key][2]

    def __reduce__(self) -> Any:
        return type(self._fused).bind_arguments, (self._fused, self._fixed)

    def refresh(self) -> None:
        """Prepare again what depends on the bound arrays, in place, after they were changed."""
        for execute, leaves, results in list(self._preparations.values()):
            execute(leaves, results)


def signature_of(plan: Plan) -> list[Hashable]:
    """What a preparing plan computes: equal for plans that compute the same from the same arguments."""
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(plan.graph.roots):
        numbers[node] = len(numbers)
        attributes = tuple(sorted((k, repr(v)) for k, v in node.attrs.items()))
        lines.append((node.op, tuple(numbers[i] for i in node.inputs), node.shape, node.dtype, attributes))
    return [*lines, tuple(numbers[n] for n in plan.graph.outputs)]
