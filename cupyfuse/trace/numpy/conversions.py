"""Replacements of NumPy's functions that dispatch to no protocol, while a function is traced.

`np.asarray` and its like, and functions and ufuncs of a list of arrays (`lists`), cannot return anything but NumPy's
own arrays. While a trace runs, these attributes of the module `numpy` are functions that take traced arrays too. They
hand everything else on to the originals, so other threads, which meet no traced arrays, see no difference. The same
holds for creation functions (`creation`), SciPy's (`scipy`), those of `math` (`mathematics`) and messages of loggers
(`logs`). Compiled code of libraries keeps the originals (`compiled`). `replacement_of` is for functions that the user
imported by name.
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from itertools import islice
from typing import Any, NoReturn

import numpy as np
from numpy.lib import stride_tricks

from ..library import holds_tracers, tracers_in
from ..masked import Masked
from ..masked_reductions import refuse
from ..strides import contiguous_strides, in_upper_case
from ..tracer import TraceProtocol, Tracer
from ..user_code import fail, user_line
from ..value import WAYS_OUT
from . import choices, compiled, creation, lists, logs, mathematics, scipy
from .steps import REFUSED, VANDERS

_lock = threading.Lock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []  # (module or class, name, original)
_originals: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what modules hold, and what they held


@contextmanager
def traced_conversions(trace: TraceProtocol) -> Iterator[None]:
    """Replace functions without a protocol by ones that take the arrays of a trace, within a `with` block."""
    global _depth
    with _lock:
        if not _depth:
            own = compiled.own_numpy()
            for namespace, name in compiled.holders():
                _originals.append((namespace, {name: np}))
                namespace[name] = own
            for space, name, replacement in (*choices.REPLACED, _VECTORIZE, logs.REPLACED, *scipy.replacements()):
                _replaced.append((space, name, getattr(space, name)))
                setattr(space, name, replacement)
            for module, replacements in (*_BY_MODULE.items(), *scipy.ufuncs().items()):  # hundreds of names
                held, known = vars(module), _HELD.get(module)
                if known is None:
                    known = {name: new.__wrapped__ for name, new in replacements.items()}
                # What the user has put in a function's place stays.
                new = {name: r for name, r in replacements.items() if held[name] is known[name]}
                _originals.append((held, {name: held[name] for name in new}))
                held.update(new)
        _depth += 1
    try:
        with creation.for_trace(trace):
            yield
    finally:
        with _lock:
            _depth -= 1
            while not _depth and _originals:
                held, before = _originals.pop()
                held.update(before)
            while not _depth and _replaced:
                setattr(*_replaced.pop())


def replacement_of(value: Any) -> Any:
    """Return the replacement of a function that the user's code holds in a variable; None if there is none."""
    if type(value) not in _FUNCTIONS and not scipy.is_multimethod(value):
        return next((new for _, _, new in choices.REPLACED if new.original is value), None)
    return _BY_FUNCTION.get(value) or scipy.replacement_of(value)


def _converting_tracers(original: Callable[..., Any], convert: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `convert` for traced arrays and lists of them, and `original` for all else."""

    @wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        """Convert if the first argument is traced, else call NumPy's function."""
        if args and (type(args[0]) in (list, tuple) or original.__name__ not in _TESTS):
            args = lists.numbers_as_scalars(args[0]), *args[1:]
        if args and (isinstance(args[0], (Masked, Tracer)) or holds_tracers(args[0])):
            return convert(*args, **options)
        return original(*args, **options)

    return call


def _convert(x: Any, dtype: Any, copy: Any = None) -> Any:
    """Return a traced array, or a list of them, as an array of a dtype; `copy` as for `numpy.asarray`."""
    same_dtype = isinstance(x, Tracer) and (dtype is None or np.dtype(dtype) == x.dtype)
    if copy is False and (not same_dtype or x._is_scalar):
        raise ValueError(f"Unable to avoid copy while creating an array as requested\n  at {user_line()}")
    if dtype is not None and np.dtype(dtype).hasobject:
        fail("an array of objects", "traced arrays hold numbers; use a list or tuple of arrays")
    if isinstance(x, Masked):
        return x.astype(x.dtype if dtype is None else dtype, copy=copy is True)
    if not isinstance(x, Tracer):
        return lists.stack(x, dtype)
    if dtype is not None and np.dtype(dtype) != x.dtype:
        x = x.astype(dtype)
    elif copy is True or x._is_scalar:  # not for None, False or the modes of np.array that copy if needed
        x = x.copy("K")
    else:
        return x
    x._is_array = True
    return x


def _asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, **options: Any) -> Any:
    return _with_order(a, _convert(a, dtype, copy), order, copy)


def _array(
    object: Any, dtype: Any = None, *, copy: Any = True, order: Any = "K", ndmin: int = 0, **options: Any
) -> Any:
    result = _with_order(object, _convert(object, dtype, copy), order, copy)
    return result if result.ndim >= ndmin else result[(None,) * (ndmin - result.ndim)]


def _contiguous(order: str, a: Any, dtype: Any = None, *, like: Any = None) -> Any:
    """Return a contiguous array as `np.ascontiguousarray` or `np.asfortranarray`."""
    result = _with_order(a, _convert(a, dtype), order)
    return result if result.ndim else result[None]


def _refuse_strides(x: Any, *args: Any, **options: Any) -> NoReturn:
    """Refuse `np.lib.stride_tricks.as_strided`, which reads memory."""
    fail("np.lib.stride_tricks.as_strided", WAYS_OUT["strides"])


def _with_order(a: Any, result: Any, order: Any, copy: Any = None) -> Any:
    """Return the result of converting `a`, copied if it is `a` itself and not contiguous in the given order.

    A result that is a new array is noted as contiguous in that order.
    """
    order = in_upper_case(order)
    if isinstance(result, Masked):
        if order not in (None, "K", "A", "C"):
            refuse(f"an array of masked elements with order={order!r}")
        return result
    if result is not a and order in ("C", "F"):
        result._strides = contiguous_strides(result.shape, result.itemsize, order)
    ordered = result._in_order(order) if result is a else result
    if ordered is not result and copy is False:
        raise ValueError(f"Unable to avoid copy while creating an array as requested\n  at {user_line()}")
    return ordered


_ORDERS = {"C": "C", "C_CONTIGUOUS": "C", "CONTIGUOUS": "C", "F": "F", "F_CONTIGUOUS": "F", "FORTRAN": "F"}
_FREE = {"A", "ALIGNED", "W", "WRITEABLE", "E", "ENSUREARRAY"}  # requirements that traced arrays meet


def _require(a: Any, dtype: Any = None, requirements: Any = None, *, like: Any = None) -> Any:
    """Convert as `np.require`."""
    wanted = {name.upper() for name in requirements or ()} - _FREE
    for name in wanted - _ORDERS.keys():
        fail(f"np.require with the requirement {name}", "what owns memory is not known; use x.copy()")
    orders = sorted({_ORDERS[name] for name in wanted})
    if len(orders) > 1:
        raise ValueError(f'Cannot specify both "C" and "F" order\n  at {user_line()}')
    return _asarray(a, dtype, orders[0] if orders else None)


CONVERSIONS: dict[str, Callable[..., Any]] = {
    "array": _array,
    "asarray": _asarray,
    "asanyarray": _asarray,
    "asarray_chkfinite": _asarray,
    "ascontiguousarray": partial(_contiguous, "C"),
    "asfortranarray": partial(_contiguous, "F"),
    "require": _require,
    "isscalar": lambda element: isinstance(element, Tracer) and element._is_scalar,
}
_TESTS = ("isscalar",)  # which make no array of a number
TAKING_TRACED = (*CONVERSIONS, "fromiter")  # NumPy's functions that take traced arrays here alone


def _from_iterable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `np.fromiter`, whose iterable may yield traced scalars."""

    @wraps(original)
    def call(iter: Any, dtype: Any, count: int = -1, **options: Any) -> Any:
        """Make an array of what an iterable yields."""
        items = list(islice(iter, count) if count >= 0 else iter)
        if not holds_tracers(items):
            return original(items, dtype, count, **options)
        dtype = np.dtype(dtype)
        if dtype.shape or any(isinstance(item, (tuple, list, np.ndarray)) for item in items):
            fail("np.fromiter of anything but numbers", "make an array of tuples, lists or arrays by np.array([...])")
        if len(items) < count:
            raise ValueError(
                f"iterator too short: Expected {count} but iterator had only {len(items)} items.\n  at {user_line()}"
            )
        return lists.stack(items, dtype)

    return call


def _refuse_vectorized(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of `np.vectorize` that refuses traced arrays."""

    @wraps(original)
    def call(self: Any, /, *args: Any, **options: Any) -> Any:
        """Call the function on each element, or raise if an argument is traced."""
        if next(tracers_in((args, options)), None) is not None:
            fail("np.vectorize", REFUSED["vectorize"])
        return original(self, *args, **options)

    return call


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions of NumPy and `math` that are replaced: (module, name, replacement)."""
    yield from mathematics.REPLACED
    for name, convert in CONVERSIONS.items():
        yield np, name, _converting_tracers(creation.creating_from_lists(getattr(np, name)), convert)
    yield np, "fromiter", _from_iterable(creation.creating_from_lists(np.fromiter))
    for space in (np, np.linalg, np.fft, stride_tricks):
        for name, replacement in lists.replacements(space):
            if name not in creation.CREATION:
                is_ufunc = isinstance(replacement, np.ufunc)
                yield space, name, replacement if is_ufunc else creation.creating_anew(replacement)
    yield stride_tricks, "as_strided", _converting_tracers(stride_tricks.as_strided, _refuse_strides)
    for module, name in VANDERS.items():
        space = getattr(np.polynomial, module)
        yield space, name, scipy.as_library_step(f"polynomial.{module}.{name}", getattr(space, name))
    for name in creation.CREATION:
        yield np, name, creation.creating(lists.stacking(getattr(np, name)))
    for name in creation.FREQUENCIES:
        yield np.fft, name, creation.creating(getattr(np.fft, name))


_VECTORIZE = (np.vectorize, "__call__", _refuse_vectorized(np.vectorize.__call__))
_REPLACEMENTS = tuple(_functions())
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type(np.sum), np.ufunc)
_SPACES = {space for space, _, _ in _REPLACEMENTS}
_BY_MODULE = {space: {name: new for found, name, new in _REPLACEMENTS if found is space} for space in _SPACES}
_HELD = {space: {name: vars(space)[name] for name in new} for space, new in _BY_MODULE.items()}
_BY_FUNCTION = {getattr(space, name): replacement for space, name, replacement in _REPLACEMENTS}
_BY_FUNCTION |= {getattr(builtins, name): replacement for name, replacement in choices.REPLACED_BUILTINS.items()}
