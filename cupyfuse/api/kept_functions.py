"""Functions that a trace runs without rebuilding them, as methods of classes: they call replacements of some builtins.

Where they call `float`, their code loads `float()` while a trace runs (see `call_sites`), a name among Python's own
builtins, and for `np.float32` an attribute of NumPy. The replacements hand everything but traced values on to the
originals, so other threads, which run the same functions, see no difference.
"""

from __future__ import annotations

import builtins
import threading
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..trace.numpy import REPLACED_BUILTINS, REPLACED_SCALAR_TYPES, REPLACED_TYPES
from .call_sites import name_where_called, scalar_types_called, with_calls_apart
from .code import reads_of

_BY_NAME = {**REPLACED_BUILTINS, **REPLACED_TYPES}
_lock = threading.Lock()
_changed: dict[types.FunctionType, _Changed] = {}


class _Changed:
    """The code of a function and the one that stands for it, in so many traces that run."""

    def __init__(self, own: types.CodeType, other: types.CodeType):
        self.own, self.other, self.traces = own, other, 0


@contextmanager
def calling_replacements(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Let functions call the replacements of builtins where they call these, within a `with` block."""
    # They stay: code that the functions make, such as a lambda, may run later.
    vars(builtins).update({name_where_called(name): new for name, new in _BY_NAME.items()})
    vars(np).update({name_where_called(name): new for name, new in REPLACED_SCALAR_TYPES.items()})
    taken: list[types.FunctionType] = []
    try:
        with _lock:
            taken.extend(function for function in dict.fromkeys(functions) if _take(function))
        yield
    finally:
        with _lock:
            for function in taken:
                _give_back(function)


def _take(function: types.FunctionType) -> bool:
    """Give a function the code that calls replacements, if another trace has not; whether it has such code."""
    found = _changed.get(function)
    if found is None:
        own = function.__code__
        hidden, reads = function.__globals__.keys(), reads_of(own)
        names = frozenset(name for name in reads.called & _BY_NAME.keys() if name not in hidden)
        _, of_numpy = scalar_types_called(function.__globals__, reads)
        given: Any = function  # whose `__builtins__` not all stubs know
        if not (names or of_numpy) or given.__builtins__ is not vars(builtins):
            return False
        found = _changed[function] = _Changed(own, with_calls_apart(own, names, of_numpy))
        function.__code__ = found.other
    found.traces += 1
    return True


def _give_back(function: types.FunctionType) -> None:
    """Give a function its own code again after the last trace, unless the user has given it another since."""
    found = _changed[function]
    found.traces -= 1
    if not found.traces:
        del _changed[function]
        if function.__code__ is found.other:
            function.__code__ = found.own
