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
from . import arrays
from .fuse import Fused

F = TypeVar("F", bound=Callable[..., Any])
Options = dict[str, Any]


def traceable(function: F, eager: Callable[[Fused, Options], Any] | None = None) -> F:
    """Make a function on traced arrays callable on arrays too, as a fused function of its own.

    Parameters
    ----------
    function : callable
        Takes its array as the first parameter.
    eager : callable, optional
        Runs the fused function on arrays, given all arguments by name. By default `along_axes` for a function with an
        `axis`, and `by_rows` for others.
    """
    fused = Fused(function)
    run = eager or (along_axes if "axis" in fused.signature.parameters else by_rows)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        for operand in operands:
            if isinstance(operand, Tracer):
                operand._trace.plain = False
                with operand._trace.call(function.__name__, operands) as done:
                    result = function(*args, **kwargs)
                    return result if isinstance(result, tuple) else done(result)
        if eager is None and args and _is_direct(args[0]):
            return fused(*args, **kwargs)
        out = kwargs.pop("out", None)
        bound = fused.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _copy_to(run(fused, dict(bound.arguments)), out)

    return call  # type: ignore[return-value]


def _is_direct(value: Any) -> bool:
    """Whether the fused function takes an argument without conversion."""
    return (type(value) is np.ndarray or arrays.is_cupy(value)) and value.ndim in (1, 2) and value.dtype.kind in "fV"


def import_operand(value: Any, name: str) -> arrays.Imported:
    """Import an array, list or number; lists and numbers become NumPy arrays."""
    if isinstance(value, arrays.Spec):
        raise TypeError(f"argument {name!r}: a spec has no values; pass an array")
    return arrays.import_array(value if arrays.is_array(value) else np.asarray(value), name)


def promote_integers(array: Any, beside: Any = None) -> Any:
    """Convert integers to float64, or to the float dtype that NumPy promotes them to beside a float array."""
    if array.dtype.kind not in "iub":
        return array
    narrow = beside is not None and beside.dtype.kind in "fV"
    return array.astype(np.result_type(array.dtype, np.float16) if narrow else np.float64)


def export(result: Any, imported: arrays.Imported) -> Any:
    """Export a result, or a tuple of them, to the library that an operand was imported from."""
    if imported.export is None:
        return result
    if isinstance(result, tuple):
        return tuple(export(r, imported) for r in result)
    return imported.export(np.asarray(result) if isinstance(result, np.generic) else result)


def _copy_to(result: Any, out: Any) -> Any:
    """Copy a result to the caller's arrays, if there are any."""
    if out is None:
        return result
    results = result if isinstance(result, tuple) else (result,)
    targets = out if isinstance(out, (tuple, list)) else (out,)
    if len(targets) != len(results):
        raise ValueError(f"out: expected {len(results)} array(s), one for each result, got {len(targets)}")
    for target, value in zip(targets, results, strict=True):
        if not arrays.is_array(target) or isinstance(target, arrays.Spec):
            raise TypeError(f"out: expected an array, got {type(target).__name__}")
        array, source = arrays.import_array(target, "out").array, import_operand(value, "out").array
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
    """Run a function along axes; an array of more than two dimensions becomes rows x columns."""
    name = next(iter(options))
    imported = import_operand(options[name], name)
    x = options[name] = promote_integers(imported.array)
    return export(fused(**options) if x.ndim <= 2 else on_last(fused, options, [name], x.shape), imported)


def on_last(fused: Fused, options: Options, names: Sequence[str], shape: tuple[int, ...]) -> Any:
    """Run a function on arguments of one shape, of any rank: `axis` moved last and merged into columns."""
    axes = trace.normalize_axes(options["axis"], len(shape), fused.__wrapped__.__name__)
    kept = tuple(i for i in range(len(shape)) if i not in axes)
    order = (*kept, *axes)
    rows, cols = (math.prod(shape[i] for i in group) for group in (kept, axes))
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
    """Run a function that maps rows to rows, with all leading dimensions merged into rows."""
    name = next(iter(options))
    imported = import_operand(options[name], name)
    x = options[name] = promote_integers(imported.array)
    if x.ndim > 2:
        options[name] = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    result = fused(**options)
    return export(result.reshape(*x.shape[:-1], result.shape[-1]) if x.ndim > 2 else result, imported)


def as_matrix(fused: Fused, options: Options) -> Any:
    """Run a function of a matrix; it checks the rank itself."""
    name = next(iter(options))
    imported = import_operand(options[name], name)
    return export(fused(**options | {name: promote_integers(imported.array)}), imported)
