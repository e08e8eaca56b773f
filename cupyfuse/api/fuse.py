"""`fuse`: turn a Python function on arrays into one that runs as a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from .. import devices
from ..plan.plan import Plan
from ..settings import DEFAULT_WORKSPACE, settings_of_call
from .bind import Bound
from .call import run
from .inline_cache import RecognizedCall
from .planned_function import NOT_GIVEN, PlannedFunction
from .registry import register_own
from .walk import TracedArgument


class Fused(PlannedFunction):
    """A function that is traced once for each combination of shapes and dtypes, and then runs as a plan.

    Created by `fuse`. `__wrapped__` is the plain function.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __reduce__(self) -> str:
        # Pickled by qualified name, as functions are.
        return str(getattr(self, "__qualname__", None) or self.__wrapped__.__qualname__)

    def __call__(self, /, *args: Any, out: Any = NOT_GIVEN, **kwargs: Any) -> Any:
        """Run the function fused.

        Parameters
        ----------
        *args, **kwargs
            The function's own arguments. Arrays are NumPy arrays, CuPy arrays, or arrays of any library with DLPack.
            With Dask arrays among them the results are Dask arrays: the call extends their graph, and computes nothing.
        out : array or sequence of arrays, optional
            Receives the result; one array for each result where the function returns several. Of a function that has
            a parameter `out` of its own it is the argument for that one.

        Raises
        ------
        TraceError
            The function cannot be fused; the message names the operation and the line.
        TypeError, ValueError
            An argument has the wrong type, dtype or shape, or is on another device than the rest.
        """
        cache = self.inline_cache
        direct = cache.direct
        if direct is not None and out is NOT_GIVEN and (result := direct(args, kwargs)) is not None:
            return result
        is_given = out is not NOT_GIVEN
        out = None if out is NOT_GIVEN else self.given_out(out, kwargs)
        values, defaulted = self.parameters.bind(args, kwargs)
        settings = self.call_settings
        known = cache.find(values, defaulted, settings)
        if known is not None:
            if cache.takes_notes and known[0].quick is not None and not is_given:
                cache.note(known, args, kwargs, self.parameters)
            return run(*known, out, values)
        signature = self.environment.new_signature()
        try:
            if defaulted or self.environment.static:
                for value, name in zip(values, self.names, strict=True):
                    self.add_argument(signature, value, name, name in defaulted)
            else:
                for value, name in zip(values, self.names, strict=True):
                    signature.add(value, name)
            self.environment.add_to(signature)
        except (TracedArgument, TypeError) as error:
            return self.call_refused(error, values, out)
        if not signature.leaves:
            return self.call_without_arrays(values, out)
        key = signature.cache_key(*settings)
        runnable = self._runnables.find(key, signature.numbers)
        if runnable is None:
            read_again = functools.partial(self.signature_of, values, by_value=defaulted)
            runnable = self.compile(self._runnables, key, values, signature, read_again)
        else:
            cache.add(runnable, signature, values, defaulted, settings)
        return run(runnable, signature.leaves, signature.numbers, signature.exporters[0], out, values)

    def recognize(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecognizedCall | None:
        """Return a call without `out` if it is like earlier ones of arrays, numbers and strings, else None."""
        found = self.parameters.find(args, kwargs)
        known = None if found is None else self.inline_cache.find(*found, settings_of_call(self._precision))
        if known is not None and self.inline_cache.takes_notes and known[0].quick is not None:
            self.inline_cache.note(known, args, kwargs, self.parameters)
        return known

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these arguments: arrays, or `spec(shape, dtype)` in their place.

        The plan is for the GPU that CuPy arrays are on, otherwise for the default GPU of `Plan.best_time`. NumPy arrays
        run through the same steps, with NumPy's matrix product.
        """
        values, defaulted = self.parameters.bind(args, kwargs)
        return self.plan_for(values, devices.DEFAULT, defaulted)

    def bind(self, /, **fixed: Any) -> Bound:
        """Fix some arguments, and compute once what depends on them alone.

        Parameters
        ----------
        **fixed
            Arguments by name. Arrays are kept by reference: call `refresh` after changing one in place. With
            `spec(shape, dtype)` in the place of arrays the result can plan, but not run.

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


class _Method:
    """A fused function bound to an instance as a method."""

    def __init__(self, fused: Fused, instance: Any):
        self.__dict__.update(fused.__dict__)  # name, docstring and what users gave the function, as of Python's methods
        self.__dict__.pop("__signature__", None)  # `inspect` takes it of what is wrapped, without `self`
        self.__func__, self.__self__ = fused, instance
        self.__wrapped__ = functools.partial(fused.__wrapped__, instance)

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {self.__self__!r}>"

    def __eq__(self, other: object) -> bool:
        return type(other) is _Method and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, str(self.__func__.__name__))  # type: ignore[attr-defined]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, /, *args: Any, **kwargs: Any) -> Plan:
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def bind(self, /, **fixed: Any) -> Bound:
        return Bound(self.__func__, {self.__func__.names[0]: self.__self__, **fixed})


register_own(Fused, lambda f: ([f.__wrapped__], ()), lambda _, children: Fused(children[0]), mutable=False)
register_own(_Method, lambda m: ([m.__func__, m.__self__], ()), lambda _, children: _Method(*children), mutable=False)


@overload
def fuse(
    fn: Callable[..., Any],
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
    strict: bool = False,
    static: tuple[str, ...] = (),
) -> Fused: ...


@overload
def fuse(
    fn: None = None,
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
    strict: bool = False,
    static: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Fused]: ...


def fuse(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    precision: str | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
    keep_halves: bool = True,
    strict: bool = False,
    static: tuple[str, ...] = (),
) -> Any:
    """Fuse a function written with NumPy, array operators and cupyfuse functions.

    The first call with a combination of shapes and dtypes traces the function; later calls run its plan. Constants that
    the function can read, among the arguments and around it, belong to that combination; floats among the arguments do
    not, nor do integers and numbers around the function once they change, but for values that the function needs. What
    is read when is described in docs/reading.md.

    Parameters
    ----------
    fn : callable
        Takes arrays of any number of dimensions, and returns one array or a tuple, list, dict or dataclass of arrays.
    precision : {"highest", "high", "medium", "ieee", "tf32"}, optional
        Precision of float32 matrix products (see `precision`); by default that of the surrounding `with` block.
    max_workspace : int, optional
        Bytes of intermediate rows that a call may allocate beside its arguments and results; 256 MiB by default. Where
        a matrix product would take more, the call works through blocks of rows or of columns, or its plan says why
        it cannot. Memory that all blocks share, such as the hi/lo split of unbound weights, comes on top where it
        leaves no room for a row, or so little that blocks would take twice as long.
    keep_halves : bool, optional
        Whether `bind` keeps the fp16 hi/lo split of bound float32 weights, which takes as much memory as the weights;
        otherwise each call splits them. True by default.
    strict : bool, optional
        Whether to refuse functions that run as library steps: NumPy's or CuPy's own, such as `np.sort` or
        `np.linalg.svd`, on whole arrays. False by default; plans show them as "Library" steps.
    static : tuple of str, optional
        Parameters, or variables that the function and those that it calls read around them, whose values may be of any
        type that can be hashed. Calls share a trace if the values are equal: that equality covers all that the function
        reads of them is the caller's promise. The first call checks that the names are read.

    Returns
    -------
    Fused
        Called like `fn`, with an additional keyword `out`, unless `fn` has a parameter of that name. Without `fn`, a
        decorator. Called by another fused function, it becomes part of that one, and takes its options.

    Raises
    ------
    TypeError
        `fn` is not callable; `max_workspace` is not an int, `keep_halves` or `strict` not a bool.
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
    if fn is None or isinstance(fn, (staticmethod, classmethod)):
        options: dict[str, Any] = {"max_workspace": max_workspace, "keep_halves": keep_halves}
        decorator = functools.partial(fuse, precision=precision, strict=strict, static=static, **options)
        return decorator if fn is None else type(fn)(decorator(fn.__func__))
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    function = fn.__wrapped__ if isinstance(fn, Fused) else fn
    return Fused(function, precision, max_workspace, keep_halves, strict, static)
