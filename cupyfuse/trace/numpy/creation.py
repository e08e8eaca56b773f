"""Arrays that a traced function creates, for example by `np.zeros`.

They are NumPy arrays, whose values the function may read. If the function assigns traced values to one, or indexes it
by one, it fails and is traced again by a `Trace` with `traced_sites`, which `watched.py` finds: arrays created there
are traced ones.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import numpy as np

from ... import dtypes
from ..arithmetic import takes_over
from ..axes import as_shape
from ..broadcasting import expand
from ..library import call_library
from ..number import TracedNumber
from ..strides import contiguous_strides, in_upper_case
from ..tracer import TraceProtocol, Tracer
from ..watched import Watched, created, site_of, unwatched, watched
from .lists import stacked

_UNIFORM = (
    *("zeros", "ones", "empty", "full"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
)
CREATION = (
    *(*_UNIFORM, "copy", "eye", "identity", "tri", "linspace", "arange", "indices"),
    *("bartlett", "blackman", "hamming", "hanning", "kaiser"),
)
FREQUENCIES = ("fftfreq", "rfftfreq")  # of `numpy.fft`


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
        """Create an array; one that is filled with a traced value is traced in any case."""
        if name in _FILLED:
            fill = stacked(options.get("fill_value", args[1] if len(args) > 1 else None))
            if isinstance(fill, TracedNumber) and not (args and isinstance(args[0], Tracer)):
                fill = fill.in_array()
            if isinstance(fill, Tracer) and not (args and takes_over(type(args[0]))):  # of masked elements
                return _FILLED[name](fill, *args, **options)
        if name == "linspace" and any(isinstance(end, TracedNumber) for end in args[:2]):
            dtype = _type_between(*args[:2])
            args = tuple(end.in_array() if isinstance(end, TracedNumber) else end for end in args)
            if any(isinstance(end, Tracer) for end in args[:2]):
                return _linspace(dtype, *args, **options)
        made = original(*args, **options)
        return _trace_created(made, name in _UNIFORM, name.startswith("empty"))

    return call


@cache
def creating_anew(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of a function of NumPy's whose new arrays, as of `np.tile`, are traced likewise."""

    @wraps(replacement.__wrapped__)  # type: ignore[attr-defined]
    def call(*args: Any, **options: Any) -> Any:
        """Call the replacement, which gives one of NumPy's own arrays where no argument is traced."""
        result = replacement(*args, **options)
        is_new = (
            type(result) is np.ndarray and "out" not in options and not _is_part(result, (*args, *options.values()))
        )
        return _trace_created(result) if is_new else result

    return call


def _is_part(array: Any, given: Iterable[Any]) -> bool:
    """Whether an array is among the arguments of a function, or in lists of these, or may be a view of one."""
    return any(
        _is_part(array, value) if isinstance(value, (list, tuple)) else np.may_share_memory(array, value)
        for value in given
        if isinstance(value, (list, tuple, np.ndarray))
    )


def creating_from_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `np.array` or a function like it, whose results are traced likewise if it is given a list or tuple."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Create an array of a list or tuple, or convert another value."""
        result = original(*args, **options)
        source = args[0] if args else None
        if isinstance(source, np.ndarray) and np.may_share_memory(source, result):
            return watched(result, source.site, source.trace) if isinstance(source, Watched) else result
        if not isinstance(source, (list, tuple, np.ndarray)):
            return result
        return _trace_created(result, depth=3)  # `call` has a caller in `conversions`, whose caller is the user's code

    return call


def _full(fill: Tracer, shape: Any, fill_value: Any = None, dtype: Any = None, order: str = "C", **_: Any) -> Tracer:
    """Create an array with a traced fill value, as `numpy.full`."""
    shape = as_shape(shape)
    result = expand(fill if dtype is None else fill.astype(dtype), shape).copy()
    result._is_array = True
    result._strides = contiguous_strides(shape, result.itemsize, order)
    return result


def full_like(
    fill: Tracer,
    a: Any,
    fill_value: Any = None,
    dtype: Any = None,
    order: str = "K",
    subok: bool = True,
    shape: Any = None,
    **_: Any,
) -> Tracer:
    """Create an array with a traced fill value, as `numpy.full_like`, like one that may be traced."""
    a = a if isinstance(a, Tracer) else np.asanyarray(a)
    result = _full(fill, a.shape if shape is None else shape, None, a.dtype if dtype is None else dtype)
    result._strides = _strides_like(a, result.shape, result.itemsize, order)
    return result


def _strides_like(array: Any, shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...] | None:
    """Return the strides of what `numpy.empty_like` creates of a shape in an order; None if unknown."""
    order = in_upper_case(order)
    if order in ("C", "F"):
        return contiguous_strides(shape, itemsize, order)
    in_rows = array._is_contiguous("C") if isinstance(array, Tracer) else array.flags.c_contiguous
    known = in_rows or (order == "K" and len(shape) != array.ndim)
    return contiguous_strides(shape, itemsize) if known else None


def _type_between(*ends: Any) -> np.dtype[Any]:
    """Return the dtype of evenly spaced numbers between these: of an array beside a number of Python's, its own."""
    types = [end.__class__(0) if isinstance(end, TracedNumber) else getattr(end, "dtype", end) for end in ends]
    plain = [np.asarray(t).dtype if isinstance(t, (list, tuple)) else t for t in types]
    return np.result_type(*plain, 0.0)


def _linspace(
    natural: np.dtype[Any], start: Any, stop: Any, num: int = 50, endpoint: bool = True, **options: Any
) -> Any:
    """Create evenly spaced numbers between traced ones or arrays as `numpy.linspace` does, of a `natural` dtype."""
    if options or np.ndim(start) or np.ndim(stop):
        return call_library("linspace", [start, stop, num, endpoint], {"dtype": natural, **options})
    intervals = num - 1 if endpoint else num
    step = (stop - start) / intervals if intervals > 0 else stop - start
    spaced = np.arange(num) * step + start
    spaced = np.where(np.arange(num) == num - 1, stop, spaced) if endpoint and num > 1 else spaced
    return spaced.astype(natural, copy=False)


_FILLED: dict[str, Callable[..., Any]] = {"full": _full, "full_like": full_like}


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
    array = unwatched(array)
    trace = _traces.running[-1] if _traces.running else None
    if trace is None or type(array) is not np.ndarray or array.dtype.name not in dtypes.ITEMSIZE:
        return array
    site = site_of(sys._getframe(depth))
    if site is None:
        return array
    trace.has_created = True
    if undefined and site in trace.traced_sites:
        array[...] = 0
    is_expanded = site in trace.traced_sites and uniform and array.size and not dtypes.is_opaque(array.dtype.name)
    if not is_expanded:
        return created(array, site, trace)
    traced = expand(trace.tracer_of(array.flat[0]), array.shape)
    traced._is_array, traced._strides = True, array.strides
    return traced
