"""Fused functions with bound arguments, and the prepacked values computed from those alone."""

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
from .arguments import CONTAINERS, flatten
from .call import Runnable, contains_tracer, device_of, imported_arrays, run
from .planned_function import PlannedFunction

_IMMUTABLE = (bool, int, float, str, type(None))


@dataclass
class _Flat:
    """A flattened bound argument; for a mutable one also the caller's own arrays, to detect their replacement."""

    leaves: list[Any] = field(default_factory=list)
    signature: list[Any] = field(default_factory=list)
    exporters: list[Any] = field(default_factory=list)
    originals: list[Any] = field(default_factory=list)
    version: int = 0  # counts replacements of the arrays


class Bound:
    """A fused function with some of its arguments bound. Created by `Fused.bind`.

    The first call that needs them computes the values that depend on bound arrays alone, such as column sums of weights
    and folded normalisations. Call `refresh` after changing a bound array in place. Attributes and items of bound
    objects and containers are read again by every call.
    """

    def __init__(self, fused: PlannedFunction, fixed: dict[str, Any]):
        unknown = [name for name in fixed if name not in fused.names]
        if unknown:
            raise TypeError(f"bind: {fused!r} has no parameter {unknown[0]!r}; it has {', '.join(fused.names)}")
        self._fused = fused
        self._fixed = dict(fixed)
        self._free = tuple(name for name in fused.names if name not in fixed)
        self._constants: dict[str, _Flat] = {}  # bound arguments that cannot change
        self._mutables: dict[str, _Flat] = {}  # the others, as of the last call
        self._runnables: dict[Hashable, Runnable] = {}
        self._prepacked: dict[Hashable, tuple[Callable[..., Any], list[Any], list[Any]]] = {}
        functools.update_wrapper(self, fused.__wrapped__)
        self.__wrapped__ = functools.partial(fused.__wrapped__, **fixed)

    def __repr__(self) -> str:
        return f"<{self._fused!r} with {', '.join(self._fixed)} bound>"

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the value of every parameter, in the order of the function's own signature."""
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

    def __call__(self, /, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run with the remaining arguments, by position or name; `out` as for `Fused`."""
        leaves: list[Any] = []
        signature: list[Any] = []
        exporters: list[Any] = []
        values: Sequence[Any] = args
        if kwargs or len(args) != len(self._free):
            named = zip(self._fused.names, self._values(args, kwargs), strict=True)
            values = [value for name, value in named if name not in self._fixed]
        if any(map(contains_tracer, values)):
            arguments = dict(zip(self._fused.names, self._values(args, kwargs), strict=True))
            return self._fused.inline((), arguments, out)
        position = 0
        for name in self._fused.names:
            constant = self._constants.get(name)
            if constant is not None:
                leaves += constant.leaves
                exporters += constant.exporters
            elif name in self._fixed:
                self._flatten_bound(name, leaves, signature, exporters)
            else:
                flatten(values[position], name, leaves, signature, exporters)
                position += 1
        key = (self._fused.precision, *signature)
        runnable = self._runnables.get(key)
        if runnable is None:
            all_values = self._values(args, kwargs)
            bound = self._bound_positions(all_values)
            runnable = self._fused.compile(self._runnables, key, all_values, leaves, bound, self._prepack)
        return run(runnable, leaves, exporters, out)

    def _flatten_bound(self, name: str, leaves: list[Any], signature: list[Any], exporters: list[Any]) -> None:
        """Flatten a bound argument: an immutable one once, another in every call."""
        value = self._fixed[name]
        flat = _Flat()
        flatten(value, name, flat.leaves, flat.signature, flat.exporters)
        if _is_constant(value):
            self._constants[name] = flat
        else:
            flat = self._update_mutable(name, flat, _arrays_in(value))
            signature += [*flat.signature, flat.version]
        leaves += flat.leaves
        exporters += flat.exporters

    def _update_mutable(self, name: str, flat: _Flat, originals: list[Any]) -> _Flat:
        """Return the cached state of a mutable bound argument if it is unchanged, else `flat` as its new state."""
        cached = self._mutables.get(name)
        if cached is not None:
            flat.version = cached.version
            same = len(originals) == len(cached.originals) and all(map(operator.is_, originals, cached.originals))
            if same and flat.signature == cached.signature:
                return cached
            if not same:
                # Free the values computed from the replaced arrays.
                flat.version += 1
                self._runnables, self._prepacked = {}, {}
        flat.originals = originals
        self._mutables[name] = flat
        return flat

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that calls have made and that are cached, the newest last."""
        return tuple(runnable.plan for runnable in self._runnables.values())

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these remaining arguments: arrays, or `spec(shape, dtype)` in their place."""
        values = self._values(args, kwargs)
        traced, _ = self._fused.trace(values)
        leaves = imported_arrays(values)
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
        settings = self._fused.settings(device_of(leaves, devices.DEFAULT))
        return build(traced, layouts, settings, self._bound_positions(values))

    def _bound_positions(self, values: Sequence[Any]) -> frozenset[int]:
        """Return the positions of the bound arrays among all array arguments."""
        positions: set[int] = set()
        count = 0
        for name, value in zip(self._fused.names, values, strict=True):
            length = len(imported_arrays([value]))
            if name in self._fixed:
                positions.update(range(count, count + length))
            count += length
        return frozenset(positions)

    def _prepack(self, plan: Plan, leaves: list[Any], engine: Callable[..., Any]) -> list[Any]:
        """Run a plan over bound arrays; calls of other shapes share its results."""
        needed = [leaves[node.argument] for node in plan.graph.inputs]
        key = (*_plan_signature(plan), *map(id, needed))
        if key not in self._prepacked:
            execute = engine(plan, needed)
            results = execute(needed, [None] * len(plan.outputs))
            self._prepacked[key] = (execute, needed, results)
        return self._prepacked[key][2]

    def __reduce__(self) -> Any:
        return Bound, (self._fused, self._fixed)

    def refresh(self) -> None:
        """Recompute, in place, what depends on the bound arrays, after they were changed."""
        for execute, leaves, results in list(self._prepacked.values()):
            execute(leaves, results)


def _is_constant(value: Any) -> bool:
    """Whether a bound argument always consists of the same arrays and constants."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return type(value) in _IMMUTABLE or isinstance(value, np.generic) or arrays.is_array(value)


def _arrays_in(value: Any) -> list[Any]:
    """Return the caller's own arrays in a container."""
    if isinstance(value, CONTAINERS):
        return [a for item in (value.values() if isinstance(value, dict) else value) for a in _arrays_in(item)]
    return [value] if arrays.is_array(value) else []


def _plan_signature(plan: Plan) -> list[Hashable]:
    """Return a key that plans share if they compute the same values from the same arguments."""
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(plan.graph.roots):
        numbers[node] = len(numbers)
        lines.append((g.operation(node), tuple(numbers[i] for i in node.inputs)))
    return [*lines, tuple(numbers[n] for n in plan.graph.outputs)]
