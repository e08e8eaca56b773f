"""Arrays that a traced function creates, for example by `np.zeros`.

They are NumPy arrays, whose values the function may read. If the function assigns traced values to one, or indexes it
by one, it fails and is traced again by a `Trace` with `traced_sites`, which `watched.py` finds: arrays created there
are traced ones.
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
from ..user_code import is_user_frame
from ..watched import watched
from .lists import stacked

CREATION = ("zeros", "ones", "empty", "full", "eye", "identity", "tri", "linspace", "arange")
_UNIFORM = ("zeros", "ones", "empty", "full")


class _Traces(threading.local):
    """The traces that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.running: list[TraceProtocol] = []


_traces = _Traces()


@contextmanager
def for_trace(trace: TraceProtocol) -> Iterator[None]:
    """Let creation functions create arrays for a trace within a `with` block, in this thread."""
    _traces.running.append(trace)
    try:
        yield
    finally:
        _traces.running.pop()


def creating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a creation function whose results are traced, where a trace asks for it and the user's code calls."""
    name = original.__name__

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Create an array; `np.full` with a traced value is traced in any case."""
        if name == "full":
            fill = stacked(options.get("fill_value", args[1] if len(args) > 1 else None))
            if isinstance(fill, Tracer):
                return _full(fill, *args, **options)
        return _trace_created(original(*args, **options), name in _UNIFORM, name == "empty")

    return call


def creating_from_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `np.array` or a function like it, whose results are traced likewise if it is given a list or tuple."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Create an array of a list or tuple, or convert another value."""
        result = original(*args, **options)
        if not args or type(args[0]) not in (list, tuple):
            return result
        return _trace_created(result, depth=3)  # `call` has a caller in `conversions`, whose caller is the user's code

    return call


def _full(fill: Tracer, shape: Any, fill_value: Any = None, dtype: Any = None, **options: Any) -> Tracer:
    """Create an array with a traced fill value, as `numpy.full`."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    result = expand(fill if dtype is None else fill.astype(dtype), shape).copy()
    result._is_array = True
    return result


def _trace_created(array: Any, uniform: bool = False, undefined: bool = False, depth: int = 2) -> Any:
    """Return a created array, traced or watched if the running trace asks for it.

    Parameters
    ----------
    array : array
    uniform : bool
        Whether all elements are equal.
    undefined : bool
        Whether the elements are undefined; traced ones are 0.
    depth : int
        How many frames up the caller is that has to be the user's code.
    """
    trace = _traces.running[-1] if _traces.running else None
    if trace is None or type(array) is not np.ndarray or array.dtype.name not in dtypes.ITEMSIZE:
        return array
    frame = sys._getframe(depth)
    if not is_user_frame(frame):
        return array
    trace.has_created = True
    site = frame.f_code, frame.f_lasti
    if site not in trace.traced_sites:
        return watched(array, site, trace.assigned_sites) if trace.watches else array
    if uniform and array.size and not dtypes.is_opaque(array.dtype.name):
        value = trace.tracer_of(array.dtype.type(0) if undefined else array.flat[0])
        traced = expand(value, array.shape)
    else:
        traced = trace.constant(np.zeros_like(array) if undefined else array)
    traced._is_array = True
    return traced
