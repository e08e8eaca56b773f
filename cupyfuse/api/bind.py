"""Fused functions with bound arguments, and the prepacked values computed from these alone."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

from .. import devices
from ..plan.plan import Plan
from .cache import PlanCache
from .call import run
from .inline_cache import InlineCache
from .parameters import Parameters
from .planned_function import NOT_GIVEN, PlannedFunction
from .registry import register_own
from .signature import Signature
from .tracing import graph_key
from .walk import TracedArgument


class Prepacked:
    """What calls of all shapes share: values that a plan computes from bound arrays alone, such as folded weights."""

    def __init__(self) -> None:
        # By graph and ids of the bound arrays: (execute, the arrays, the results). The arrays are held, so that their
        # ids stay theirs.
        self._plans: dict[Hashable, tuple[Callable[..., Any], list[Any], list[Any]]] = {}

    def __call__(self, plan: Plan, leaves: Sequence[Any], engine: Callable[..., Any]) -> list[Any]:
        """Run a plan over bound arrays, or return its results from an earlier call."""
        needed = [leaves[node.argument] for node in plan.graph.inputs]
        key = (*graph_key(plan.graph), *map(id, needed))
        if key not in self._plans:
            execute = engine(plan, needed)
            results = execute(needed)
            self._plans[key] = (execute, needed, results)
        return self._plans[key][2]

    def refresh(self) -> None:
        """Compute the values again, in place."""
        for execute, leaves, results in list(self._plans.values()):
            execute(leaves, results)


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
        self._parameters = Parameters(fused.__wrapped__, self._fixed)
        self._immutable: dict[str, Signature] = {}  # bound arguments that cannot change
        self._inline_cache = InlineCache(
            fused.environment, fused.names, self._fixed, self._immutable, fused.settings_of_call
        )
        # Of the others, as of the last call: (how often their arrays were replaced, the caller's arrays, their imports,
        # exporters).
        self._mutable: dict[str, tuple[int, list[Any], list[Any], list[Any]]] = {}
        self._runnables = PlanCache()
        self._prepacked = Prepacked()
        functools.update_wrapper(self, fused.__wrapped__)
        self.__wrapped__ = functools.partial(fused.__wrapped__, **fixed)
        self.__signature__ = self._parameters.free_signature()

    def __repr__(self) -> str:
        return f"<{self._fused!r} with {', '.join(self._fixed)} bound>"

    def _free_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], frozenset[str]]:
        """Return the values of the parameters that are not bound, and the names of those that take their defaults."""
        found = self._parameters.find(args, kwargs)
        if found is None:
            raise self._misfit(args, kwargs)
        return found

    def _all_values(self, free_values: Sequence[Any]) -> list[Any]:
        """Return the value of each parameter, given those of the parameters that are not bound."""
        rest = iter(free_values)
        return [self._fixed[name] if name in self._fixed else next(rest) for name in self._fused.names]

    def _misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        """Return the error for arguments that do not fit the parameters that are not bound."""
        free = self._parameters.names
        for name in kwargs:
            if name in self._fixed or name in free[: len(args)] or name not in free:
                what = "is bound" if name in self._fixed else "was given twice" if name in free else "is unknown"
                return TypeError(f"argument {name!r} {what}")
        by_place = self._parameters.by_place
        if len(args) > len(by_place):
            named = [name for name in free if name not in by_place]
            rest = f"; give {', '.join(named)} by name" if named else ""
            return TypeError(
                f"expected at most {len(by_place)} arguments by place ({', '.join(by_place)}), got {len(args)}{rest}"
            )
        given = {*free[: len(args)], *kwargs, *self._parameters.defaults()}
        missing = [name for name in free if name not in given]
        return TypeError(f"missing argument {missing[0]!r}" if missing else f"{self!r}: the arguments do not fit")

    def __call__(self, /, *args: Any, out: Any = NOT_GIVEN, **kwargs: Any) -> Any:
        """Run with the remaining arguments, by position or name; `out` as for `Fused`."""
        cache = self._inline_cache
        direct = cache.direct
        if direct is not None and out is NOT_GIVEN and (result := direct(args, kwargs)) is not None:
            return result
        is_given = out is not NOT_GIVEN
        out = None if out is NOT_GIVEN else self._fused.given_out(out, kwargs)
        free_values, defaulted = self._free_values(args, kwargs)
        settings = self._fused.call_settings
        known = cache.find(free_values, defaulted, settings)
        if known is not None:
            if cache.takes_notes and known[0].quick is not None and not is_given:
                cache.note(known, args, kwargs, self._parameters)
            return run(*known, out, () if known[0].as_written is None else self._all_values(free_values))
        values = self._all_values(free_values)
        constants = defaulted | self._fixed.keys()
        try:
            signature = self._signature_of(free_values, constants)
        except (TracedArgument, TypeError) as error:
            return self._fused.call_refused(error, values, out)
        if not signature.leaves:
            return self._fused.call_without_arrays(values, out)
        key = signature.cache_key(*settings)
        runnable = self._runnables.find(key, signature.numbers)
        if runnable is None:
            bound = self._bound_positions(values)
            again = functools.partial(self._signature_of, free_values, constants)
            runnable = self._fused.compile(self._runnables, key, values, signature, again, bound, self._prepacked)
        else:
            cache.add(runnable, signature, free_values, defaulted, settings)
        return run(runnable, signature.leaves, signature.numbers, signature.exporters[0], out, values)

    def _signature_of(self, free_values: Sequence[Any], constants: Container[str]) -> Signature:
        """Return the signature of a call: of the bound arguments and the others, in the order of the parameters."""
        signature, rest = self._fused.environment.new_signature(), iter(free_values)
        for name in self._fused.names:
            immutable = self._immutable.get(name)
            if immutable is not None:
                signature.add_immutable(immutable)
            elif name in self._fixed:
                self._add_bound(name, signature)
            else:
                self._fused.add_argument(signature, next(rest), name, name in constants)
        self._fused.environment.add_to(signature)
        return signature

    def _add_bound(self, name: str, signature: Signature) -> None:
        """Add a bound argument: an immutable one is read once, a mutable one in every call."""
        value = self._fixed[name]
        own = self._fused.environment.new_signature()
        self._fused.add_argument(own, value, name, by_value=True)
        if own.stable and not own.has_functions and not own.classes:
            self._immutable[name] = own
            signature.add_immutable(own)
            return
        first = len(signature.leaves)
        self._add_whole(value, name, signature)
        originals = [signature.originals.get(i, signature.leaves[i]) for i in range(first, len(signature.leaves))]
        cached = self._mutable.get(name)
        if cached is not None:
            version, before, leaves, exporters = cached
            if len(before) == len(originals) and all(map(operator.is_, originals, before)):
                # Prepacked values are found by the ids of the imports, which therefore stay the same.
                signature.leaves[first:] = leaves
                signature.exporters[first:] = exporters
                signature.key.append(version)
                return
            # Free the values computed from the replaced arrays.
            self._runnables, self._prepacked = PlanCache(), Prepacked()
            self._inline_cache.clear()
        version = 0 if cached is None else cached[0] + 1
        self._mutable[name] = (version, originals, signature.leaves[first:], signature.exporters[first:])
        signature.key.append(version)

    def _add_whole(self, value: Any, name: str, signature: Signature) -> None:
        """Add a bound argument, and at once what can be read of the objects in it, so that their arrays are bound, too.

        Arrays of objects that an argument before it holds are not, nor are any where no snapshot tells what code reads:
        they are read in each call.
        """
        known = len(signature.objects)
        self._fused.add_argument(signature, value, name, by_value=True)
        self._fused.environment.add_attributes(signature, known)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that calls have made and that are cached, the newest last."""
        return tuple(runnable.plan for runnable in self._runnables.values())

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these remaining arguments: arrays, or `spec(shape, dtype)` in their place."""
        free_values, defaulted = self._free_values(args, kwargs)
        values, constants = self._all_values(free_values), defaulted | self._fixed.keys()
        return self._fused.plan_for(values, devices.DEFAULT, constants, self._bound_positions(values))

    def _bound_positions(self, values: Sequence[Any]) -> frozenset[int]:
        """Return the positions of the bound arrays among the leaves, but those that are an argument as well."""
        positions: set[int] = set()
        signature = self._fused.environment.new_signature(specs=True)
        for name, value in zip(self._fused.names, values, strict=True):
            if name not in self._fixed:
                self._fused.add_argument(signature, value, name)
                continue
            first = len(signature.leaves)
            self._add_whole(value, name, signature)
            positions.update(range(first, len(signature.leaves)))
        self._fused.environment.add_to(signature)
        shared = {earlier for i, earlier in signature.duplicates().items() if i not in positions}
        return frozenset(positions - shared)

    def __reduce__(self) -> Any:
        return Bound, (self._fused, self._fixed)

    def refresh(self) -> None:
        """Recompute the prepacked values in place, after bound arrays were changed."""
        self._prepacked.refresh()


register_own(
    Bound,
    lambda bound: ([bound._fused, *bound._fixed.values()], tuple(bound._fixed)),
    lambda names, children: Bound(children[0], dict(zip(names, children[1:], strict=True))),
    mutable=True,
)
