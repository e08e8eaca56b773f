"""Public functions outside a trace: on arrays of any rank and library, and on lists and numbers.

Fused functions take arrays of at most two dimensions. What works along axes gets those moved last and made one; what
works on the last axis, or on each element, gets all others made rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import trace
from ..trace import Tracer
from . import arrays
from .fuse import Fused

F = TypeVar("F", bound=Callable[..., Any])
Options = dict[str, Any]


def traceable(function: F, alone: Callable[[Fused, Options], Any] | None = None) -> F:
    """Let a function written on traced arrays serve arrays too, by fusing it alone.

    Parameters
    ----------
    function : callable
        Its first parameter is the array that it is about.
    alone : callable, optional
        What runs it on arrays, given the fused function and all arguments by name; otherwise `along_axes` does for a
        function with an `axis`, and `by_rows` for others.
    """
    fused = Fused(function)
    run = alone or (along_axes if "axis" in fused.signature.parameters else by_rows)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        for operand in operands:
            if isinstance(operand, Tracer):
                with operand._trace.call(function.__name__, operands) as done:
                    result = function(*args, **kwargs)
                    return result if isinstance(result, tuple) else done(result)
        if alone is None and args and _fits(args[0]):
            return fused(*args, **kwargs)
        out = kwargs.pop("out", None)
        bound = fused.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _into(run(fused, dict(bound.arguments)), out)

    return call  # type: ignore[return-value]


def _fits(value: Any) -> bool:
    """Whether an argument can go to the fused function as it is."""
    return (type(value) is np.ndarray or arrays.is_cupy(value)) and value.ndim in (1, 2) and value.dtype.kind in "fV"


def take(value: Any, name: str) -> arrays.Entry:
    """An argument as an array of NumPy's or CuPy's; lists and numbers become NumPy's."""
    if isinstance(value, arrays.Spec):
        raise TypeError(f"argument {name!r}: a spec has no values; pass an array")
    return arrays.enter(value if arrays.is_array(value) else np.asarray(value), name)


def with_floats(array: Any, beside: Any = None) -> Any:
    """The array, with integers made floats: of float64, or of what NumPy takes beside another array's floats."""
    if array.dtype.kind not in "iub":
        return array
    narrow = beside is not None and beside.dtype.kind in "fV"
    return array.astype(np.result_type(array.dtype, np.float16) if narrow else np.float64)


def give_back(result: Any, entry: arrays.Entry) -> Any:
    """A result, or a tuple of them, as the kind of array that came in."""
    if entry.give_back is None:
        return result
    if isinstance(result, tuple):
        return tuple(give_back(r, entry) for r in result)
    return entry.give_back(np.asarray(result) if isinstance(result, np.generic) else result)


def _into(result: Any, out: Any) -> Any:
    """The result, or the arrays that were given for it with the result written to them."""
    if out is None:
        return result
    results = result if isinstance(result, tuple) else (result,)
    targets = out if isinstance(out, (tuple, list)) else (out,)
    if len(targets) != len(results):
        raise ValueError(f"out: expected {len(results)} array(s), one for each result, got {len(targets)}")
    for target, value in zip(targets, results, strict=True):
        if not arrays.is_array(target) or isinstance(target, arrays.Spec):
            raise TypeError(f"out: expected an array, got {type(target).__name__}")
        array, source = arrays.enter(target, "out").array, take(value, "out").array
        if arrays.is_cupy(array) != arrays.is_cupy(source):
            raise TypeError("out: expected an array in the same memory as the arguments; allocate it beside them")
        if (array.shape, array.dtype) != (source.shape, source.dtype):
            raise ValueError(
                f"out: expected shape {source.shape} and dtype {source.dtype}, got shape {array.shape} and dtype "
                f"{array.dtype}"
            )
        array[...] = source
    return out


def along_axes(fused: Fused, options: Options) -> Any:
    """Run a function along some axes: those of an array with more than two are moved last and become one."""
    name = next(iter(options))
    entry = take(options[name], name)
    x = options[name] = with_floats(entry.array)
    return give_back(fused(**options) if x.ndim <= 2 else on_last(fused, options, [name], x.shape), entry)


def on_last(fused: Fused, options: Options, names: Sequence[str], shape: tuple[int, ...]) -> Any:
    """Run a function on rows x columns made of arguments that share one shape of any rank."""
    axes = trace.normalize_axes(options["axis"], len(shape), fused.__wrapped__.__name__)
    kept = tuple(i for i in range(len(shape)) if i not in axes)
    order = (*kept, *axes)
    rows, cols = (math.prod(shape[i] for i in some) for some in (kept, axes))
    options = options | {name: options[name].transpose(*order).reshape(rows, cols) for name in names} | {"axis": 1}
    reducing = "keepdims" in options
    keepdims = options.pop("keepdims", False)
    results = fused(**options)
    if not reducing:
        return results.reshape(*(shape[i] for i in order)).transpose(*np.argsort(order).tolist())
    final = tuple(1 if i in axes else n for i, n in enumerate(shape)) if keepdims else tuple(shape[i] for i in kept)
    if isinstance(results, tuple):
        return tuple(r.reshape(final)[()] for r in results)
    return results.reshape(final)[()]


def by_rows(fused: Fused, options: Options) -> Any:
    """Run a function that makes a row of each row: leading dimensions are rows."""
    name = next(iter(options))
    entry = take(options[name], name)
    x = options[name] = with_floats(entry.array)
    if x.ndim > 2:
        options[name] = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    result = fused(**options)
    return give_back(result.reshape(*x.shape[:-1], result.shape[-1]) if x.ndim > 2 else result, entry)


def as_matrix(fused: Fused, options: Options) -> Any:
    """Run a function that takes a matrix and nothing else, and says so itself."""
    name = next(iter(options))
    entry = take(options[name], name)
    return give_back(fused(**options | {name: with_floats(entry.array)}), entry)
