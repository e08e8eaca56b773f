"""Arrays that a traced function makes, as of `np.zeros`.

They are NumPy's own arrays, whose values the function may read, as long as nothing traced is written to them. Where
that fails, the function is traced again by a `Trace` with `makes`, in which they are traced arrays themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from ... import dtypes
from ..broadcasting import expand
from ..tracer import TraceProtocol, Tracer
from ..user_code import is_users

CREATION = ("zeros", "ones", "empty", "full", "eye", "identity", "tri", "linspace")
_UNIFORM = ("zeros", "ones", "empty", "full")


class _Traces(threading.local):
    """The traces that run in a thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[TraceProtocol] = []


_traces = _Traces()


@contextmanager
def for_trace(trace: TraceProtocol) -> Iterator[None]:
    """Make arrays for a trace within a `with` block, in this thread."""
    _traces.running.append(trace)
    try:
        yield
    finally:
        _traces.running.pop()


def making(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes arrays of `original`'s for the trace that runs, where the user's code calls it."""
    name = original.__name__

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        if name == "full":
            fill = options.get("fill_value", args[1] if len(args) > 1 else None)
            if isinstance(fill, Tracer):
                return _filled(fill, *args, **options)
        return _made(original(*args, **options), name in _UNIFORM, name == "empty")

    return call


def holding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `np.array` or a function like it, which makes arrays of lists of numbers."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        return _made(result, depth=3) if args and type(args[0]) in (list, tuple) else result

    return call


def _filled(fill: Tracer, shape: Any, fill_value: Any = None, dtype: Any = None, **options: Any) -> Tracer:
    """`np.full` with a traced value."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    result = expand(fill if dtype is None else fill.astype(dtype), shape).copy()
    result._is_array = True
    return result


def _made(array: Any, uniform: bool = False, undefined: bool = False, depth: int = 2) -> Any:
    trace = _traces.running[-1] if _traces.running else None
    if trace is None or type(array) is not np.ndarray or array.dtype.name not in dtypes.ITEMSIZE:
        return array
    if not is_users(sys._getframe(depth)):
        return array
    trace.made = True
    if not trace.makes:
        return array
    if not (uniform and array.size) or dtypes.is_opaque(array.dtype.name):
        made = trace.constant(np.zeros_like(array) if undefined else array)
    else:
        value = trace.tracer_of(array.dtype.type(0) if undefined else array.flat[0])
        made = expand(value, array.shape)
    made._is_array = True
    return made
