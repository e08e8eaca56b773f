"""A user's function with its fusing options: traces, plans and compiles it for a signature of arguments."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from .. import dtypes
from ..devices import Device
from ..errors import TraceError
from ..ir import graph as g
from ..plan.build import build
from ..plan.plan import Plan, Traced
from ..settings import DEFAULT_WORKSPACE, Settings, check_precision, check_workspace, current_precision
from ..trace import ScalarArgument, Trace, Tracer, fail
from ..trace.numpy import traced_conversions
from . import arrays
from .arguments import Results, map_leaves
from .call import Runnable, device_of, engine_for

_CACHE_LIMIT = 1024  # signatures cached for one function

# A child process may inherit a lock that another thread of its parent held: it gets new ones.
_instances: weakref.WeakSet[PlannedFunction] = weakref.WeakSet()


def _after_fork() -> None:
    for fused in list(_instances):
        fused._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


Prepack = Callable[[Plan, "list[Any]", Callable[..., Any]], "list[Any]"]


class PlannedFunction:
    """A function, its signature, and the options that its plans are made with.

    Attributes
    ----------
    names : tuple of str
        The function's parameters.
    positional : bool
        Whether all of them can be passed by position.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        precision: str | None = None,
        max_workspace: int = DEFAULT_WORKSPACE,
        keep_halves: bool = True,
        strict: bool = False,
    ):
        functools.update_wrapper(cast(Any, self), function)
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.positional = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self.names = tuple(self.signature.parameters)
        if "out" in self.names:
            raise TypeError("fn: a fused function cannot have a parameter named 'out', which fuse adds; rename it")
        self._precision = None if precision is None else check_precision(precision)
        self._max_workspace = check_workspace(max_workspace)
        self._keep_halves = bool(keep_halves)
        self._strict = bool(strict)
        self._runnables: dict[Hashable, Runnable] = {}
        self._lock = threading.RLock()
        _instances.add(self)

    @property
    def precision(self) -> str:
        """Precision of float32 products: the function's own, else that of the surrounding `with` block."""
        return self._precision or current_precision()

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that calls have made and that are cached, the newest last."""
        return tuple(runnable.plan for runnable in self._runnables.values())

    def settings(self, device: Device | None) -> Settings:
        """Return the settings of a plan for a GPU."""
        return Settings(self.precision, device, self._max_workspace, self._keep_halves)

    def __repr__(self) -> str:
        return f"<fused {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

    def bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the value of every parameter, in the order of the function's own signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.names)

    def inline(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Call the plain function within the trace of another fused function."""
        if out is not None:
            fail(f"the call of {self!r} with out=", "inside another fused function its results are values, not arrays")
        return self.__wrapped__(*args, **kwargs)

    def trace(self, values: Sequence[Any]) -> tuple[Traced, Results]:
        """Trace the function: run it once on tracers in the place of arrays."""
        trace = Trace(self._strict)

        def tracer(value: Any, name: str) -> Tracer:
            value = value if isinstance(value, arrays.Spec) else arrays.import_array(value, name).array
            try:
                dtype = dtypes.name_of(value.dtype)
            except TypeError as error:
                raise TypeError(f"argument {name!r}: {error}") from None
            return trace.argument(name, value.shape, dtype)

        bound = self.signature.bind_partial()
        for parameter, value in zip(self.names, values, strict=True):
            bound.arguments[parameter] = map_leaves(value, parameter, tracer, ScalarArgument)
        name = str(getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__))
        with traced_conversions():
            returned = self.__wrapped__(*bound.args, **bound.kwargs)
        results = Results(returned, lambda value: isinstance(value, Tracer))
        if not results.leaves and not trace.effects:
            raise TraceError(f"cannot fuse {name}: it returns no array computed from its arguments")
        graph = g.Graph(trace.inputs, [t._node for t in results.leaves], list(trace.effects.items()))
        axes = tuple(t._axes for t in results.leaves)
        return Traced(name, graph, axes, tuple(trace.calls)), results

    def compile(
        self,
        cache: dict[Hashable, Runnable],
        key: Hashable,
        values: Sequence[Any],
        leaves: list[Any],
        fixed: frozenset[int] = frozenset(),
        prepack: Prepack | None = None,
    ) -> Runnable:
        """Trace, plan and compile the function for a new signature of arguments, and cache the result.

        Parameters
        ----------
        cache : dict
            Runnables by signature; gets the new one under `key`.
        values, leaves : sequence
            The values of all parameters, and the arrays among them.
        fixed : frozenset of int
            Positions in `leaves` of the arrays that are bound.
        prepack : callable, optional
            Computes what depends on bound arrays alone, from its plan, `leaves` and the engine.
        """
        with self._lock:
            if key in cache:
                return cache[key]
            engine = engine_for(leaves, values, self.names)
            traced, results = self.trace(values)
            layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
            plan = build(traced, layouts, self.settings(device_of(leaves)), fixed)
            prepacked = prepack(plan.prepare, leaves, engine) if prepack and plan.prepare else []
            runnable = Runnable(plan, results, engine(plan, [*leaves, *prepacked]), prepacked)
            if len(cache) >= _CACHE_LIMIT:
                cache.pop(next(iter(cache)))
            cache[key] = runnable
            return runnable
