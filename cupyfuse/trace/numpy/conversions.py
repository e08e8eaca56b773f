"""`np.asarray` and its like while a function is traced.

NumPy has no protocol by which they could return anything but its own arrays. While a trace runs, these names of the
module `numpy` are functions that pass traced arrays through, and hand everything else on; the thread of the trace alone
meets traced arrays, so other threads see no difference.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from ..tracer import Tracer

_lock = threading.Lock()
_depth = 0
_originals: dict[str, Callable[..., Any]] = {}


@contextmanager
def traced_conversions() -> Iterator[None]:
    """Let `np.asarray`, `np.array` and the like take traced arrays within a `with` block."""
    global _depth
    with _lock:
        if not _depth:
            for name, convert in CONVERSIONS.items():
                _originals[name] = getattr(np, name)
                setattr(np, name, _passing(_originals[name], convert))
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                for name, original in _originals.items():
                    setattr(np, name, original)


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
    result = _converted(a, dtype, copy)
    return _perhaps_copied(a, result) if order in ("C", "F") else result


def _array(object: Any, dtype: Any = None, *, copy: Any = True, ndmin: int = 0, **options: Any) -> Any:
    result = _converted(object, dtype, copy)
    return result if result.ndim >= ndmin else result[(None,) * (ndmin - result.ndim)]


def _contiguous(a: Any, dtype: Any = None, *, like: Any = None) -> Any:
    result = _perhaps_copied(a, _converted(a, dtype))
    return result if result.ndim else result[None]


def _perhaps_copied(a: Any, result: Tracer) -> Tracer:
    """Return an array in another order, which is a copy only where the memory of `a` is in another one."""
    if result is not a or not result.ndim:
        return result
    copy = result.copy()
    for array in (a, copy):
        array._share()
    return copy


CONVERSIONS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "asarray": _asarray,
    "asanyarray": _asarray,
    "ascontiguousarray": _contiguous,
    "asfortranarray": _contiguous,
    "isscalar": lambda element: element._is_scalar,
}
