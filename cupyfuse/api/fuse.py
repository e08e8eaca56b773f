"""`fuse`: from a Python function to one that runs as a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from .. import devices
from ..plan.build import build
from ..plan.plan import Plan
from ..settings import DEFAULT_WORKSPACE
from ..trace import Tracer
from . import arrays
from .arguments import collect
from .bind import Bound
from .call import NESTED, arrays_in, device_of, finish, holds_tracer
from .planned_function import PlannedFunction


class Fused(PlannedFunction):
    """A function whose array work is traced once for each combination of shapes and dtypes, and then runs fused.

    Made by `fuse`. `__wrapped__` is the function as it was written.
    """

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
        values = args if self.simple and not kwargs and len(args) == len(self.names) else self.ordered(args, kwargs)
        leaves: list[Any] = []
        tokens: list[Any] = []
        givers: list[Any] = []
        for value, name in zip(values, self.names, strict=True):
            if type(value) is Tracer or (type(value) in NESTED and holds_tracer(value)):
                return self.inline(args, kwargs, out)
            collect(value, name, leaves, tokens, givers)
        key = (self.precision, *tokens)
        runnable = self._runnables.get(key)
        if runnable is None:
            runnable = self.runnable(self._runnables, key, values, leaves)
        return finish(runnable, leaves, givers, out)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments: arrays, or `spec(shape, dtype)` in their places.

        It is for the GPU that CuPy arrays are on, and otherwise for the one that `Plan.best_time` quotes by default;
        NumPy arrays, when they are computed with, take the same steps, with NumPy's own product of matrices.
        """
        values = self.ordered(args, kwargs)
        leaves = arrays_in(values, self.names)
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
        return Bound(self._fused, {self._fused.names[0]: self._instance, **fixed})


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
