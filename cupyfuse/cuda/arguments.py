"""Arguments of calls as CuPy's functions take them: arrays for lists, and CuPy's names and order of parameters."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ..errors import EngineError
from ..ir.library import LibraryCall, has_operands


def rename(
    call: LibraryCall, xp: Any, positional: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments in the order and by the names of CuPy's function, without those that change nothing.

    Raises
    ------
    EngineError
        CuPy's function has no parameter for an argument.
    """
    ours, theirs = _parameters(call, np), _parameters(call, xp)
    if ours is None or theirs is None or list(ours) == list(theirs):
        return positional, options
    given = dict(zip(ours, positional, strict=False)) | options
    named = {}
    for place, (name, parameter) in enumerate(ours.items()):
        if name not in given:
            continue
        alike = list(theirs)[place] if place < len(theirs) else name
        if name in theirs:
            named[name] = given[name]
        elif alike not in ours:
            named[alike] = given[name]
        elif name not in _WITHOUT_EFFECT and not _is_same(given[name], parameter.default):
            raise EngineError(
                f"{call!r} has no option {name}= in CuPy {xp.__version__}; leave it out, call the function outside of "
                "the fused one, or fuse for NumPy arrays"
            )
    leading = []
    for name, parameter in theirs.items():
        if name not in named or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            break
        leading.append(named.pop(name))
    return tuple(leading), named


def _parameters(call: LibraryCall, namespace: Any) -> dict[str, inspect.Parameter] | None:
    """Return the parameters of a library's function; None if it has none of its own, or takes any number."""
    if call.writes or call.function.startswith("scipy.") or call.function == "getitem":
        return None
    try:
        found = inspect.signature(call.resolve_in(namespace)).parameters
    except (AttributeError, TypeError, ValueError):
        return None
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return None if any(p.kind in any_number for p in found.values()) else dict(found)


def _is_same(value: Any, default: Any) -> bool:
    """Whether an argument is the default value of its parameter."""
    return value is default or (type(value) is type(default) and bool(value == default))


# Parameters that choose an algorithm, or the class of a result.
_WITHOUT_EFFECT = ("kind", "optimize", "subok")


def convert_lists(call: LibraryCall, xp: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, positional and by keyword, with arrays for the lists that CuPy's function refuses."""
    names = _ARRAYS.get(call.function, "").split()

    def convert(name: str, value: Any) -> Any:
        if call.function in _OF_LISTS and isinstance(value, (list, tuple)) and has_operands(value):
            return [xp.asarray(v) if isinstance(v, (np.generic, np.ndarray, float, int)) else v for v in value]
        is_list = isinstance(value, (list, tuple)) and not has_operands(value)
        return xp.asarray(value) if is_list and name in names else value

    padded = [*names, *[""] * len(call.arguments)]
    positional = tuple(map(convert, padded, call.arguments))
    return positional, {name: convert(name, value) for name, value in call.options.items()}


# Functions of lists of arrays, which in CuPy hold no numbers.
_OF_LISTS = ("concatenate", "stack")
# The leading parameters of functions, which are arrays.
_ARRAYS = {
    "convolve": "a v",
    "correlate": "a v",
    "cross": "a b",
    "digitize": "x bins",
    "inner": "a b",
    "interp": "x xp fp",
    "isin": "element test_elements",
    "kron": "a b",
    "outer": "a b",
    "polyval": "p x",
    "searchsorted": "a v",
    "tensordot": "a b",
    "trapezoid": "y x",
    "vdot": "a b",
    "scipy.linalg.toeplitz": "c r",
    "scipy.ndimage.convolve": "input weights",
    "scipy.ndimage.convolve1d": "input weights",
    "scipy.ndimage.correlate": "input weights",
    "scipy.ndimage.correlate1d": "input weights",
    "scipy.signal.convolve": "in1 in2",
    "scipy.signal.convolve2d": "in1 in2",
    "scipy.signal.correlate": "in1 in2",
    "scipy.signal.correlate2d": "in1 in2",
    "scipy.signal.fftconvolve": "in1 in2",
    "scipy.signal.filtfilt": "b a x",
    "scipy.signal.lfilter": "b a x",
    "scipy.signal.oaconvolve": "in1 in2",
    "scipy.signal.sosfilt": "sos x",
    "scipy.signal.sosfiltfilt": "sos x",
    "scipy.signal.upfirdn": "h x",
}
