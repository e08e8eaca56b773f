"""A user's function with the options it is fused with: the way from its arguments to what runs for them."""

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
from . import arrays
from .arguments import Results, replace
from .call import Runnable, device_of, engine_for

_CACHE_LIMIT = 1024  # combinations of shapes and dtypes that one function keeps ready


# All fused functions: each has a lock, which a thread may hold while another one forks.
_every: weakref.WeakSet[PlannedFunction] = weakref.WeakSet()


def _after_fork() -> None:
    for fused in list(_every):
        fused._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


Prepare = Callable[[Plan, "list[Any]", Callable[..., Any]], "list[Any]"]


class PlannedFunction:
    """A function, its signature, and the options that its plans are made with.

    Attributes
    ----------
    names : tuple of str
        Its parameters.
    simple : bool
        Whether all of them can be given by position.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        precision: str | None = None,
        max_workspace: int = DEFAULT_WORKSPACE,
        keep_halves: bool = True,
    ):
        functools.update_wrapper(cast(Any, self), function)
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self.simple = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self.names = tuple(self.signature.parameters)
        if "out" in self.names:
            raise TypeError("fn: a fused function cannot have a parameter named 'out', which fuse adds; rename it")
        self._precision = None if precision is None else check_precision(precision)
        self._max_workspace = check_workspace(max_workspace)
        self._keep_halves = bool(keep_halves)
        self._runnables: dict[Hashable, Runnable] = {}
        self._lock = threading.RLock()
        _every.add(self)

    @property
    def precision(self) -> str:
        """The precision of float32 products: the function's own, or else that of the surrounding `with` block."""
        return self._precision or current_precision()

    def settings(self, device: Device | None) -> Settings:
        """What a plan for a GPU is made for."""
        return Settings(self.precision, device, self._max_workspace, self._keep_halves)

    def __repr__(self) -> str:
        return f"<fused {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

    def ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The value of every parameter, in the order of the signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.names)

    def inline(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A fused function called by another one becomes part of it."""
        if out is not None:
            fail(f"the call of {self!r} with out=", "inside another fused function its results are values, not arrays")
        return self.__wrapped__(*args, **kwargs)

    def trace(self, values: Sequence[Any]) -> tuple[Traced, Results]:
        """Run the function once on stand-ins for the arrays among its arguments."""
        trace = Trace()

        def leaf(value: Any, name: str) -> Tracer:
            value = value if isinstance(value, arrays.Spec) else arrays.enter(value, name).array
            try:
                dtype = dtypes.name_of(value.dtype)
            except TypeError as error:
                raise TypeError(f"argument {name!r}: {error}") from None
            return trace.argument(name, value.shape, dtype)

        bound = self.signature.bind_partial()
        for name, value in zip(self.names, values, strict=True):
            bound.arguments[name] = replace(value, name, leaf, ScalarArgument)
        returned = self.__wrapped__(*bound.args, **bound.kwargs)
        results = Results(returned, lambda value: isinstance(value, Tracer))
        if not results.leaves and not trace.effects:
            raise TraceError(f"cannot fuse {_name(self.__wrapped__)}: it returns no array computed from its arguments")
        graph = g.Graph(trace.inputs, [t._node for t in results.leaves], list(trace.effects.items()))
        axes = tuple(t._axes for t in results.leaves)
        return Traced(_name(self.__wrapped__), graph, axes, tuple(trace.calls)), results

    def runnable(
        self,
        cache: dict[Hashable, Runnable],
        key: Hashable,
        values: Sequence[Any],
        leaves: list[Any],
        fixed: frozenset[int] = frozenset(),
        prepare: Prepare | None = None,
    ) -> Runnable:
        """Trace, plan and compile for a new signature of arguments, and cache the result.

        Parameters
        ----------
        cache : dict
            Runnables by signature; the new one is added under `key`.
        values, leaves : sequence
            The value of every parameter, and the arrays among them.
        fixed : frozenset of int
            Numbers of the arrays in `leaves` that are the same in every call.
        prepare : callable, optional
            Returns the values that depend on those alone, from their plan, `leaves` and the engine.
        """
        with self._lock:
            if key in cache:
                return cache[key]
            engine = engine_for(leaves, values, self.names)
            traced, results = self.trace(values)
            layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
            plan = build(traced, layouts, self.settings(device_of(leaves)), fixed)
            prepared = prepare(plan.prepare, leaves, engine) if prepare is not None and plan.prepare else []
            runnable = Runnable(plan, results, engine(plan, [*leaves, *prepared]), prepared)
            if len(cache) >= _CACHE_LIMIT:
                cache.pop(next(iter(cache)))
            cache[key] = runnable
            return runnable


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
