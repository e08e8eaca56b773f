"""Functions that offer no protocol to traced arrays, while a function is traced.

NumPy has no protocol by which `np.asarray` and its like, or a sum over a list of arrays, could return anything but its
own arrays. While a trace runs, these names of the module `numpy` are functions that pass traced arrays through, and
hand everything else on; the thread of the trace alone meets traced arrays, so other threads see no difference. The same
holds for `creation` and for SciPy's functions (`scipy`). `replacement_of` is for functions that were imported by name.
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from ..tracer import TraceProtocol, Tracer
from ..user_code import user_line
from . import choices, creation, scipy

_lock = threading.Lock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []  # what holds an attribute, its name, and its value outside of traces


@contextmanager
def traced_conversions(trace: TraceProtocol) -> Iterator[None]:
    """Let functions without a protocol take the arrays of a trace within a `with` block."""
    global _depth
    with _lock:
        if not _depth:
            for space, name, replacing in (*_IN_NUMPY, *choices.REPLACED, *scipy.replacements()):
                _replaced.append((space, name, getattr(space, name)))
                setattr(space, name, replacing)
        _depth += 1
    try:
        with creation.for_trace(trace):
            yield
    finally:
        with _lock:
            _depth -= 1
            while not _depth and _replaced:
                setattr(*_replaced.pop())


def replacement_of(value: Any) -> Any:
    """Return what stands for a function that a traced function holds by itself; None if nothing does."""
    if type(value) not in _FUNCTIONS:
        return next((new for _, _, new in choices.REPLACED if new.original is value), None)
    return _BY_FUNCTION.get(value) or scipy.replacement_of(value)


def _passing(original: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if args and (isinstance(args[0], Tracer) or _holds_tracers(args[0])):
            return convert(*args, **options)
        return original(*args, **options)

    return call


def _holds_tracers(value: Any) -> bool:
    return type(value) in (list, tuple) and any(isinstance(v, Tracer) or _holds_tracers(v) for v in value)


def _converted(x: Any, dtype: Any = None, copy: Any = None) -> Tracer:
    if copy is False and not (isinstance(x, Tracer) and not x._is_scalar and dtype in (None, x.dtype)):
        raise ValueError(f"Unable to avoid copy while creating an array as requested\n  at {user_line()}")
    if not isinstance(x, Tracer):
        return _stacked(x, dtype)
    if dtype is not None and np.dtype(dtype) != x.dtype:
        x = x.astype(dtype)
    elif copy is True or x._is_scalar:  # not for None, False or the modes of np.array that copy if needed
        x = x.copy()
    else:
        return x
    x._is_array = True
    return x


def _stacked(values: Any, dtype: Any) -> Tracer:
    """Make an array of a nested list that holds traced arrays."""
    items = [_stacked(v, None) if _holds_tracers(v) else v for v in values]
    result = np.stack([v if isinstance(v, Tracer) else np.asarray(v) for v in items])
    return result if dtype is None else result.astype(dtype)  # type: ignore[return-value]


def _asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, **options: Any) -> Any:
    return _in_order(a, _converted(a, dtype, copy), order, copy)


def _array(
    object: Any, dtype: Any = None, *, copy: Any = True, order: Any = "K", ndmin: int = 0, **options: Any
) -> Any:
    result = _in_order(object, _converted(object, dtype, copy), order, copy)
    return result if result.ndim >= ndmin else result[(None,) * (ndmin - result.ndim)]


def _contiguous(order: str) -> Callable[..., Any]:
    def call(a: Any, dtype: Any = None, *, like: Any = None) -> Any:
        result = _in_order(a, _converted(a, dtype), order)
        return result if result.ndim else result[None]

    return call


def _of_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of an array that stacks a list of arrays."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if args and _holds_tracers(args[0]):
            args = (_stacked(args[0], None), *args[1:])
        return original(*args, **options)

    return call


def _in_order(a: Any, result: Tracer, order: Any, copy: Any = None) -> Tracer:
    """Return an array in an order of memory: itself, if it is `a` and lies in that order, else a copy."""
    contiguous = result is not a or order not in ("C", "F") or result._is_contiguous(order)
    if contiguous:
        return result
    if copy is False:
        raise ValueError(f"Unable to avoid copy while creating an array as requested\n  at {user_line()}")
    copied = result.copy()
    if contiguous is None:
        for array in (a, copied):
            array._share()
    return copied


CONVERSIONS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "asarray": _asarray,
    "asanyarray": _asarray,
    "asarray_chkfinite": _asarray,
    "ascontiguousarray": _contiguous("C"),
    "asfortranarray": _contiguous("F"),
    "isscalar": lambda element: element._is_scalar,
}
# Functions of one array that users call with a list of them.
_OF_LISTS = """
    sum prod mean average median std var max min amax amin any all argmax argmin ptp cumsum cumprod sort argsort diff
    nansum nanmean nanmax nanmin transpose diag ravel linalg.norm linalg.det linalg.inv
"""


def _in_numpy() -> Iterator[tuple[Any, str, Any]]:
    for name, convert in CONVERSIONS.items():
        yield np, name, _passing(creation.holding(getattr(np, name)), convert)
    for path in _OF_LISTS.split():
        module, _, name = path.rpartition(".")
        space = np.linalg if module else np
        yield space, name, _of_list(getattr(space, name))
    for name in creation.CREATION:
        yield np, name, creation.making(getattr(np, name))


_IN_NUMPY = tuple(_in_numpy())
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type(np.sum))
_BY_FUNCTION = {getattr(space, name): replacing for space, name, replacing in _IN_NUMPY}
_BY_FUNCTION |= {getattr(builtins, name): replacing for name, replacing in choices.BUILTINS.items()}
