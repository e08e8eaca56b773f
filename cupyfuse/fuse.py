"""`fuse`: from a Python function to one that runs as a plan."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, overload

from . import arrays, devices, dtypes, options
from . import graph as g
from .bound import Bound
from .calls import NESTED, Runnable, arrays_in, device_of, engine_for, finish, holds_tracer
from .devices import Device
from .errors import TraceError
from .plan import Plan, Traced
from .planning import build
from .settings import DEFAULT_WORKSPACE, Settings, check_precision, check_workspace
from .structure import Results, collect, replace
from .trace import ScalarArgument, Trace, Tracer, fail

_CACHE_LIMIT = 1024  # combinations of shapes and dtypes that one function keeps ready


# All fused functions: each has a lock, which a thread may hold while another one forks.
_every: weakref.WeakSet[Fused] = weakref.WeakSet()


def _after_fork() -> None:
    for fused in list(_every):
        fused._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Fused:
    """A function whose array work is traced once for each combination of shapes and dtypes, and then runs fused.

    Made by `fuse`. `__wrapped__` is the function as it was written.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        precision: str | None = None,
        max_workspace: int = DEFAULT_WORKSPACE,
        keep_halves: bool = True,
    ):
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self._simple = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self._names = tuple(self.signature.parameters)
        if "out" in self._names:
            raise TypeError("fn: a fused function cannot have a parameter named 'out', which fuse adds; rename it")
        self._precision = None if precision is None else check_precision(precision)
        self._max_workspace = check_workspace(max_workspace)
        self._keep_halves = bool(keep_halves)
        self._runnables: dict[Hashable, Runnable] = {}
        self._lock = threading.RLock()
        _every.add(self)

    def __repr__(self) -> str:
        return f"<fused {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

    @property
    def precision(self) -> str:
        """The precision of float32 products: the function's own, or else that of the surrounding `with` block."""
        return self._precision or options.current_precision()

    def settings(self, device: Device | None) -> Settings:
        """What a plan for a GPU is made for."""
        return Settings(self.precision, device, self._max_workspace, self._keep_halves)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __reduce__(self) -> str:
        # Like a function: by its name.
        return str(getattr(self, "__qualname__", None) or self.__wrapped__.__qualname__)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function fused.

        Parameters
        ----------
        *args, **kwargs
            The function's own arguments. Arrays are NumPy arrays, CuPy arrays, or any others that speak DLPack.
        out : array or sequence of arrays, optional
            Where to write the result (one array for each, where the function returns several).

        Raises
        ------
        TraceError
            The function does something that cannot be fused; the message names the operation and the line.
        TypeError, ValueError
            An argument is of the wrong kind, dtype or shape, or lives on another device than the rest.
        """
        values = args if self._simple and not kwargs and len(args) == len(self._names) else self._ordered(args, kwargs)
        leaves: list[Any] = []
        tokens: list[Any] = []
        givers: list[Any] = []
        for value, name in zip(values, self._names, strict=True):
            if type(value) is Tracer or (type(value) in NESTED and holds_tracer(value)):
                return self._within_a_trace(args, kwargs, out)
            collect(value, name, leaves, tokens, givers)
        key = (self.precision, *tokens)
        runnable = self._runnables.get(key)
        if runnable is None:
            runnable = self._make_ready(self._runnables, key, values, leaves, None)
        return finish(runnable, leaves, givers, out)

    def _within_a_trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """A fused function called by another one becomes part of it."""
        if out is not None:
            fail(f"the call of {self!r} with out=", "inside another fused function its results are values, not arrays")
        return self.__wrapped__(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or `spec(shape, dtype)` in their places.

        It is for the GPU that CuPy arrays are on, and otherwise for the one that `Plan.best_time` quotes by default;
        NumPy arrays, when they are computed with, take the same steps, with NumPy's own product of matrices.
        """
        values = self._ordered(args, kwargs)
        leaves = arrays_in(values, self._names)
        traced, _ = self.trace(values)
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
        return build(traced, layouts, self.settings(device_of(leaves, devices.DEFAULT)))

    def bind(self, **fixed: Any) -> Bound:
        """Fix some arguments, and prepare once what depends on them alone.

        Parameters
        ----------
        **fixed
            Arguments by name. Arrays are kept by reference; call `refresh` after changing one in place. With
            `spec(shape, dtype)` in place of arrays the result can plan and not run.

        Returns
        -------
        Bound
            Takes the remaining arguments.

        Raises
        ------
        TypeError
            The function has no parameter of such a name.
        """
        return Bound(self, fixed)

    def bind_arguments(self, fixed: dict[str, Any]) -> Bound:
        """`bind` with the arguments in a dict."""
        return Bound(self, fixed)

    def _ordered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The value of every parameter, in the order of the signature."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self._names)

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
        for name, value in zip(self._names, values, strict=True):
            bound.arguments[name] = replace(value, name, leaf, ScalarArgument)
        returned = self.__wrapped__(*bound.args, **bound.kwargs)
        results = Results(returned, lambda value: isinstance(value, Tracer))
        if not results.leaves and not trace.effects:
            raise TraceError(f"cannot fuse {_name(self.__wrapped__)}: it returns no array computed from its arguments")
        graph = g.Graph(trace.inputs, [t._node for t in results.leaves], list(trace.effects.items()))
        axes = tuple(t._axes for t in results.leaves)
        return Traced(_name(self.__wrapped__), graph, axes, tuple(trace.calls)), results

    def _make_ready(
        self,
        cache: dict[Hashable, Runnable],
        key: Hashable,
        values: Sequence[Any],
        leaves: list[Any],
        binding: Bound | None,
    ) -> Runnable:
        """Trace, plan and load what a new combination of arguments needs, and keep it."""
        with self._lock:
            if key in cache:
                return cache[key]
            engine = engine_for(leaves, values, self._names)
            traced, results = self.trace(values)
            layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
            bound = binding.fixed_numbers(values) if binding is not None else frozenset[int]()
            plan = build(traced, layouts, self.settings(device_of(leaves)), bound)
            prepared = binding.prepared(plan.prepare, leaves, engine) if binding and plan.prepare else []
            runnable = Runnable(plan, results, engine(plan, [*leaves, *prepared]), prepared)
            if len(cache) >= _CACHE_LIMIT:
                cache.pop(next(iter(cache)))
            cache[key] = runnable
            return runnable


class _Method:
    """A fused function found as a method: its first argument is the instance."""

    def __init__(self, fused: Fused, instance: Any):
        self._fused, self._instance = fused, instance
        self.__wrapped__ = functools.partial(fused.__wrapped__, instance)
        self.__doc__ = fused.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fused(self._instance, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self._fused.plan(self._instance, *args, **kwargs)

    def bind(self, **fixed: Any) -> Bound:
        return Bound(self._fused, {self._fused._names[0]: self._instance, **fixed})


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


@overload
def fuse(
    fn: Callable[..., Any],
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
) -> Fused: ...


@overload
def fuse(
    fn: None = None,
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
) -> Callable[[Callable[..., Any]], Fused]: ...


def fuse(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
) -> Any:
    """Fuse a function written with NumPy, array operators and cupyfuse functions.

    The function is traced when it first meets a combination of shapes and dtypes; from then on a call runs the plan
    made from the trace. Python numbers, strings and other constants among the arguments are part of what a plan is for.

    Parameters
    ----------
    fn : callable
        Takes arrays of at most two dimensions, and returns one array or a tuple, list or dict of arrays.
    precision : {"highest", "high", "medium", "ieee", "tf32"}, optional
        Precision of float32 matrix products (see `precision`); by default that of the surrounding `with` block.
    max_workspace : int, optional
        Bytes that a call may take, beside its arguments and results, for what has a row for each row of the results
        (256 MiB unless given). Where a matrix product would take more, and every row of the results needs only its own
        row of it, a call works through blocks of rows; the plan says so, or what keeps it from doing so. What all rows
        need, such as the halves of weights that are not bound, is not counted.
    keep_halves : bool, optional
        Whether `bind` keeps the fp16 halves of bound weights, where products are computed from halves: as much memory
        again as the float32 weights. Without them each call splits the weights anew. True unless given. A fused
        function that is called by another one takes all of these from the outer one.

    Returns
    -------
    Fused
        Called like `fn`, with one more keyword, `out`. Without `fn`, a decorator.

    Raises
    ------
    TypeError
        `fn` is not callable, or has a parameter named `out`; `max_workspace` is not an int.
    ValueError
        `precision` is not one of the names, or `max_workspace` is not positive.

    Examples
    --------
    >>> import numpy as np, cupyfuse as cf
    >>> @cf.fuse
    ... def head(x, weight, bias):
    ...     return cf.logsumexp(x @ weight.T + bias, axis=1)
    >>> head(np.ones((2, 3)), np.zeros((4, 3)), np.zeros(4)).round(4)
    array([1.3863, 1.3863])
    """
    if fn is None:
        return functools.partial(fuse, precision=precision, max_workspace=max_workspace, keep_halves=keep_halves)
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    return Fused(fn.__wrapped__ if isinstance(fn, Fused) else fn, precision, max_workspace, keep_halves)
