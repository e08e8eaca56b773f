"""Eager calls of the public functions: on arrays of any rank and library, on lists and on numbers.

Arrays of more than two dimensions become rows x columns before the call. Functions along axes get those axes moved last
and merged into columns; for others, all leading axes are merged into rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import trace
from ..trace import Tracer
from . import arrays, lazy
from .call import run as run_recognized
from .fuse import Fused
from .targets import import_targets

F = TypeVar("F", bound=Callable[..., Any])
Arguments = dict[str, Any]


def traceable(
    function: F, eager: Callable[[Fused, Arguments, Any], Any] | None = None, keeps_integers: bool = False
) -> F:
    """Make a function on traced arrays callable on arrays too, where it runs as a fused function of its own.

    Parameters
    ----------
    function : callable
        Takes its array as the first parameter.
    eager : callable, optional
        Called with the fused function, all arguments by name, and the arrays of `out` or None. By default `along_axes`
        for a function with an `axis`, and `by_elements` for others.
    keeps_integers : bool
        Whether the function takes integers and bools as NumPy's does. For others they are converted to float64 first,
        of which `eager` takes care on arrays.
    """
    fused = Fused(function)
    cache = fused.inline_cache
    convert = (lambda array: array) if keeps_integers else promote_integers
    default = along_axes if "axis" in fused.signature.parameters else by_elements
    run = eager or functools.partial(default, convert=convert)
    first = fused.names[0]

    def inline(current: Any, args: tuple[Any, ...], kwargs: Arguments) -> Any:
        """Call the function within a trace, its arrays as traced ones."""
        current.numpy_only = False
        with current.call(function.__name__, (*args, *kwargs.values())) as record:
            positional = [_in_trace(value, current) for value in args]
            named = {name: _in_trace(value, current) for name, value in kwargs.items()}
            if positional:
                positional[0] = convert(trace.as_tracer(positional[0], current))
            elif first in named:
                named[first] = convert(trace.as_tracer(named[first], current))
            result = function(*positional, **named)
            return result if isinstance(result, tuple) else record(result)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Inline the function into the trace of a traced operand; else run it fused, on arrays."""
        direct = cache.direct
        if direct is not None and (result := direct(args, kwargs)) is not None:
            return result
        known = fused.recognize(args, kwargs)
        if known is not None:  # all are as they are once converted
            return run_recognized(*known, None)
        operands = (*args, *kwargs.values())
        traced = _traced_in(operands)
        if traced is not None:
            return inline(traced._trace, args, kwargs)
        if args and _needs_no_conversion(args[0]) and (eager is None or _are_like(args[0], operands, kwargs)):
            return fused(*args, **kwargs)
        out = kwargs.pop("out", None)
        if out is not None and any(map(lazy.is_lazy, operands)):
            lazy.refuse_out()
        values, _ = fused.parameters.bind(args, kwargs)
        return run(fused, dict(zip(fused.names, values, strict=True)), out)

    return call  # type: ignore[return-value]


def _traced_in(value: Any) -> Tracer | None:
    """Return an argument if it is a traced array; of a list or tuple the first traced array in it."""
    if isinstance(value, (list, tuple)):
        return next((traced for item in value if (traced := _traced_in(item)) is not None), None)
    return value if isinstance(value, Tracer) else None


def _in_trace(value: Any, current: Any) -> Any:
    """Return an array that the function made, or a list of traced ones, as a traced array; all else as it is."""
    is_made = isinstance(value, np.ndarray) or arrays.is_cupy(value)
    if is_made or (isinstance(value, (list, tuple)) and _traced_in(value) is not None):
        return trace.as_tracer(value, current)
    return value


def _needs_no_conversion(value: Any) -> bool:
    """Whether a value is a vector or matrix of floats, of NumPy or CuPy; bfloat16 is of kind "V"."""
    return (type(value) is np.ndarray or arrays.is_cupy(value)) and value.ndim in (1, 2) and value.dtype.kind in "fV"


def _are_like(first: Any, operands: Sequence[Any], kwargs: Arguments) -> bool:
    """Whether no operand needs a conversion beside a first one that needs none: constants, and floats of its library.

    Results are written to arrays of `out` as for operands that are converted.
    """
    if "out" in kwargs:
        return False
    return all(type(o) in _CONSTANTS or (type(o) is type(first) and _needs_no_conversion(o)) for o in operands)


_CONSTANTS = (type(None), bool, int, float, str)


def import_operand(value: Any, name: str) -> arrays.Imported:
    """Import an array, or convert a list or number to a NumPy array; Dask arrays stay lazy."""
    if lazy.is_lazy(value):
        lazy.check_lengths(value, name)
        return arrays.Imported(value)
    if isinstance(value, arrays.Spec):
        raise TypeError(f"argument {name!r}: a spec has no values; pass an array")
    if arrays.is_array(value):
        return arrays.import_array(value, name)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"argument {name!r}: {error}") from None
    if array.dtype.kind not in "biufcV":
        made = f"of which NumPy makes an array of {array.dtype}"
        raise TypeError(f"argument {name!r}: expected an array or numbers, got {type(value).__name__}, {made}")
    return arrays.import_array(array, name)


def _is_number(value: Any) -> bool:
    """Whether a value is None or a number, perhaps as a constant of a trace."""
    return not hasattr(value, "ndim") or (isinstance(value, Tracer) and value._node.op == "const")


def promote_integers(array: Any, beside: Any = None) -> Any:
    """Convert bools and integers to float64; beside a float array, to the smallest float dtype that holds them.

    Arrays, also traced ones, are converted; numbers are weak, and are not.
    """
    if _is_number(array) or array.dtype.kind not in "iub":
        return array
    narrow = not _is_number(beside) and beside.dtype.kind in "fV"
    return array.astype(np.result_type(array.dtype, np.float16) if narrow else np.float64)


def export(result: Any, imported: arrays.Imported) -> Any:
    """Export a result, or a tuple of them, to the library that an operand was imported from."""
    if imported.export is None:
        return result
    if isinstance(result, tuple):
        return tuple(export(r, imported) for r in result)
    return imported.export(np.asarray(result) if isinstance(result, np.generic) else result)


def copy_to(result: Any, out: Any) -> Any:
    """Copy a result, or a tuple of them, to the arrays of `out`, and return `out`; the result itself if it is None."""
    if out is None:
        return result
    results = result if isinstance(result, tuple) else (result,)
    sources = [import_operand(value, "out").array for value in results]
    for target, source in zip(import_targets(sources, sources[0], out), sources, strict=True):
        target[...] = source
    return out


def along_axes(fused: Fused, arguments: Arguments, out: Any, convert: Callable[[Any], Any]) -> Any:
    """Run a function that has an `axis` on an array of any rank, which `convert` converts first."""
    name = next(iter(arguments))
    imported = import_operand(arguments[name], name)
    x = arguments[name] = convert(imported.array)
    result = fused(**arguments) if x.ndim <= 2 else with_axes_last(fused, arguments, [name], x.shape)
    return copy_to(export(result, imported), out)


def with_axes_last(fused: Fused, arguments: Arguments, names: Sequence[str], shape: tuple[int, ...]) -> Any:
    """Run a function with `axis` moved last and merged into columns, the other axes merged into rows.

    `names` are the arguments of this shape that are rearranged.
    """
    axes = trace.normalize_axes(arguments["axis"], len(shape), fused.__wrapped__.__name__)
    kept = tuple(i for i in range(len(shape)) if i not in axes)
    order = (*kept, *axes)
    rows, cols = (math.prod(shape[i] for i in group) for group in (kept, axes))
    matrices = {name: arguments[name].transpose(*order).reshape(rows, cols) for name in names}
    arguments = {**arguments, **matrices, "axis": 1}
    reducing = "keepdims" in arguments
    keepdims = arguments.pop("keepdims", False)
    results = fused(**arguments)
    if not reducing:
        return results.reshape(*(shape[i] for i in order)).transpose(*np.argsort(order).tolist())
    final = tuple(1 if i in axes else n for i, n in enumerate(shape)) if keepdims else tuple(shape[i] for i in kept)
    if isinstance(results, tuple):
        return tuple(r.reshape(final)[()] for r in results)
    return results.reshape(final)[()]


def by_rows(
    fused: Fused,
    arguments: Arguments,
    out: Any,
    convert: Callable[[Any], Any] = promote_integers,
    joined: bool = True,
) -> Any:
    """Run a function of rows on an array of any rank, which `convert` converts first.

    If `joined`, its leading axes are its rows.
    """
    name = next(iter(arguments))
    imported = import_operand(arguments[name], name)
    x = arguments[name] = convert(imported.array)
    joined = joined and x.ndim > 2
    if joined:
        arguments[name] = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    result = fused(**arguments)
    result = result.reshape(*x.shape[:-1], result.shape[-1]) if joined else result
    return copy_to(export(result, imported), out)


def by_elements(fused: Fused, arguments: Arguments, out: Any, convert: Callable[[Any], Any] = promote_integers) -> Any:
    """Run a function of elements as `by_rows`; axes stay apart where another argument is broadcast along them."""
    _, *others = arguments.values()
    return by_rows(fused, arguments, out, convert, joined=not any(_rank(other) > 1 for other in others))


def _rank(value: Any) -> int:
    """Return how many dimensions an argument has; 0 for what is no array."""
    rank = getattr(value, "ndim", None)
    return rank if isinstance(rank, int) else np.ndim(value) if isinstance(value, (list, tuple)) else 0


def as_matrix(fused: Fused, arguments: Arguments, out: Any) -> Any:
    """Run a function of one matrix, which checks the rank itself; arguments change only if `out` fits."""
    name = next(iter(arguments))
    imported = import_operand(arguments[name], name)
    arguments[name] = promote_integers(imported.array)
    return export(fused(**arguments), imported) if out is None else fused(**arguments, out=out)
