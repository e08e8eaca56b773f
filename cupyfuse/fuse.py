"""`fuse`: from a Python function to one that runs as a plan."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from . import arrays, dtypes, options
from . import graph as g
from .errors import TraceError
from .plan import Plan, Traced, build
from .structure import Results, collect, replace
from .trace import ScalarArgument, Trace, Tracer, fail

_CACHE_LIMIT = 1024  # combinations of shapes and dtypes that one function keeps ready


@dataclass(frozen=True)
class Runnable:
    """A plan made ready to run: its executable for one engine, its prepared values, the form of its results."""

    plan: Plan
    results: Results
    execute: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    prepared: list[Any]


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

    def __init__(self, function: Callable[..., Any], precision: str | None = None):
        functools.update_wrapper(self, function)
        self.__wrapped__ = function
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        self._simple = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        self._names = tuple(self.signature.parameters)
        if "out" in self._names:
            raise TypeError("fn: a fused function cannot have a parameter named 'out', which fuse adds; rename it")
        self._precision = None if precision is None else options.check_precision(precision)
        self._runnables: dict[Hashable, Runnable] = {}
        self._lock = threading.RLock()
        _every.add(self)

    def __repr__(self) -> str:
        return f"<fused {getattr(self.__wrapped__, '__qualname__', self.__wrapped__)}>"

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
            if type(value) is Tracer or (type(value) in _NESTED and _holds_tracer(value)):
                return self._within_a_trace(args, kwargs, out)
            collect(value, name, leaves, tokens, givers)
        key = (self._precision or options.current_precision(), *tokens)
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
        """The plan for these arguments: arrays, or `spec(shape, dtype)` in their places."""
        values = self._ordered(args, kwargs)
        leaves = arrays_in(values, self._names)
        traced, _ = self.trace(values)
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in leaves))
        return build(traced, layouts, self._precision or options.current_precision())

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
            plan = build(traced, layouts, self._precision or options.current_precision(), bound)
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
        if any(map(_holds_tracer, values)):
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
        key = (self._fused._precision or options.current_precision(), *tokens)
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
        layouts = dict(enumerate(arrays.layout(leaf) for leaf in arrays_in(values)))
        precision = self._fused._precision or options.current_precision()
        return build(traced, layouts, precision, self.fixed_numbers(values))

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
        return Fused.bind_arguments, (self._fused, self._fixed)

    def refresh(self) -> None:
        """Prepare again what depends on the bound arrays, in place, after they were changed."""
        for execute, leaves, results in self._preparations.values():
            execute(leaves, results)


_NESTED = (tuple, list, dict)


def _holds_tracer(value: Any) -> bool:
    if isinstance(value, _NESTED):
        return any(map(_holds_tracer, value.values() if isinstance(value, dict) else value))
    return type(value) is Tracer


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def signature_of(plan: Plan) -> list[Hashable]:
    """What a preparing plan computes: equal for plans that compute the same from the same arguments."""
    numbers: dict[g.Node, int] = {}
    lines: list[Hashable] = []
    for node in g.topological(plan.graph.roots):
        numbers[node] = len(numbers)
        attributes = tuple(sorted((k, repr(v)) for k, v in node.attrs.items()))
        lines.append((node.op, tuple(numbers[i] for i in node.inputs), node.shape, node.dtype, attributes))
    return [*lines, tuple(numbers[n] for n in plan.graph.outputs)]


def arrays_in(values: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """The arrays among some arguments, as the engine gets them."""
    found: list[Any] = []

    def leaf(value: Any, name: str) -> None:
        found.append(value if isinstance(value, arrays.Spec) else arrays.enter(value, name).array)

    for position, value in enumerate(values):
        replace(value, names[position] if names else "", leaf, lambda number, name: number)
    return found


def engine_for(leaves: list[Any], values: Sequence[Any], names: Sequence[str]) -> Callable[..., Any]:
    """The engine that runs where the arrays are.

    Raises
    ------
    TypeError
        Arrays are on the CPU and on a GPU, or on several GPUs.
    """
    places = {f"GPU {a.data.device_id}" if arrays.is_cupy(a) else "the CPU" for a in leaves}
    if len(places) > 1:
        where = []
        for name, value in zip(names, values, strict=True):
            for a in arrays_in([value]):
                where.append(f"{name} on {f'GPU {a.data.device_id}' if arrays.is_cupy(a) else 'the CPU'}")
        raise TypeError(
            f"arguments are in different memories: {', '.join(where)}; move them to one, for example with cupy.asarray"
        )
    if not leaves:
        raise TypeError("no argument is an array; pass at least one NumPy, CuPy or DLPack array")
    if arrays.is_cupy(leaves[0]):
        from .cuda.runtime import on_device
        from .cuda_engine import CudaExecutable

        return functools.partial(CudaExecutable, runtime=on_device(leaves[0].data.device_id))
    from .numpy_engine import NumpyExecutable

    return NumpyExecutable


def finish(runnable: Runnable, leaves: list[Any], givers: list[Any], out: Any) -> Any:
    """Run, and give the results the caller's form and kind."""
    if runnable.plan.graph.effects:
        _check_effects(runnable.plan, leaves, out)
    if out is None:
        results = runnable.execute([*leaves, *runnable.prepared], [None] * len(runnable.plan.outputs))
    else:
        results = _into(runnable, leaves, out)
    giver = givers[0]
    if giver is not None:
        results = [giver(r) for r in results]
    elif type(leaves[0]) is np.ndarray:
        results = [r[()] if r.ndim == 0 else r for r in results]
    return out if out is not None else runnable.results.rebuild(results)


def _check_effects(plan: Plan, leaves: list[Any], out: Any) -> None:
    """Arguments that the function changes in place have to be writable, and share memory with no other argument."""
    spans = [arrays.span(leaf) for leaf in leaves]
    for arg, _ in plan.graph.effects:
        name = plan.graph.inputs[arg].attrs["name"]
        if isinstance(leaves[arg], np.ndarray) and not leaves[arg].flags.writeable:
            raise ValueError(f"argument {name!r}: the function changes it in place, but the array is read-only")
        low, high = spans[arg]
        for other, (start, stop) in enumerate(spans):
            if other != arg and low < stop and start < high:
                raise ValueError(
                    f"argument {name!r}: the function changes it in place, but it shares memory with argument "
                    f"{plan.graph.inputs[other].attrs['name']!r}; pass a copy of one of them"
                )


def _into(runnable: Runnable, leaves: list[Any], out: Any) -> list[Any]:
    """Run with the results written to the caller's arrays."""
    wanted = runnable.plan.outputs
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(wanted):
        raise ValueError(f"out: expected {len(wanted)} array(s), one for each result, got {len(given)}")
    targets = []
    for position, (array, output) in enumerate(zip(given, wanted, strict=True)):
        name = "out" if len(given) == 1 else f"out[{position}]"
        if not arrays.is_array(array) or isinstance(array, arrays.Spec):
            raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
        target = arrays.enter(array, name).array
        if arrays.is_cupy(target) != arrays.is_cupy(leaves[0]):
            raise TypeError(f"{name}: expected an array in the same memory as the arguments; allocate it beside them")
        try:
            dtype = dtypes.name_of(target.dtype)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        if tuple(target.shape) != output.shape or dtype != output.dtype:
            raise ValueError(
                f"{name}: expected shape {output.shape} and dtype {output.dtype}, got shape {tuple(target.shape)} and "
                f"dtype {dtype}"
            )
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise ValueError(f"{name}: the array is read-only")
        if any(n > 1 and s == 0 for n, s in zip(target.shape, target.strides, strict=True)):
            raise ValueError(f"{name}: several elements of the array share one place in memory; pass a plain array")
        targets.append(target)
    safe = [
        not any(arrays.overlap(t, other) for other in (*leaves, *runnable.prepared, *targets[:i]))
        for i, t in enumerate(targets)
    ]
    direct = [t if ok else None for t, ok in zip(targets, safe, strict=True)]
    results = runnable.execute([*leaves, *runnable.prepared], direct)
    for target, result, ok in zip(targets, results, safe, strict=True):
        if not ok:
            target[...] = result
    return []


@overload
def fuse(fn: Callable[..., Any], /, *, precision: str | None = None) -> Fused: ...


@overload
def fuse(fn: None = None, /, *, precision: str | None = None) -> Callable[[Callable[..., Any]], Fused]: ...


def fuse(fn: Callable[..., Any] | None = None, /, *, precision: str | None = None) -> Any:
    """Fuse a function written with NumPy, array operators and cupyfuse functions.

    The function is traced when it first meets a combination of shapes and dtypes; from then on a call runs the plan
    made from the trace. Python numbers, strings and other constants among the arguments are part of what a plan is for.

    Parameters
    ----------
    fn : callable
        Takes arrays of at most two dimensions, and returns one array or a tuple, list or dict of arrays.
    precision : {"highest", "high", "medium", "ieee"}, optional
        Precision of float32 matrix products (see `precision`); by default that of the surrounding `with` block.

    Returns
    -------
    Fused
        Called like `fn`, with one more keyword, `out`. Without `fn`, a decorator.

    Raises
    ------
    TypeError
        `fn` is not callable, or has a parameter named `out`.
    ValueError
        `precision` is not one of the names.

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
        return functools.partial(fuse, precision=precision)
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    return Fused(fn.__wrapped__ if isinstance(fn, Fused) else fn, precision)
