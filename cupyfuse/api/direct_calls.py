"""Calls that the compiled launcher recognises: of CuPy arrays, numbers and strings, for plans that launch alone.

It compares what the functions compare that `inline_cache.py` writes. A call that it does not recognise goes there.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from . import arrays
from .call import Runnable
from .constants import NUMBERS
from .environment import Environment
from .parameters import Parameters
from .signature import Signature

# Takes the arguments by position and by name; returns the result of a call like an earlier one, else None.
Direct = Callable[[tuple[Any, ...], dict[str, Any]], Any]
# The names of all parameters, the values of the bound ones, and the signatures of those that cannot change.
Bindings = tuple[Sequence[str], Mapping[str, Any], Mapping[str, Signature]]
# A plan, how many arguments come by position, and the names of the others.
_Key = tuple[Runnable, int, frozenset[str]]
_SCALARS = (type(None), bool, int, float, str)
# The kinds of values in the order of calls.c of the launcher, which says what describes a call and a value.
_SAME, _EQUAL, _NUMBER, _HELD, _ARRAY = range(5)


class DirectCalls:
    """The calls of one function that the compiled launcher recognises.

    Parameters
    ----------
    module : the compiled launcher
    settings : callable
        Returns what the key of a call consists of beside its signature.
    environment : Environment
        The variables around the function.

    Attributes
    ----------
    recognize : callable or None
        None where there are no such calls.
    """

    def __init__(self, module: Any, settings: Callable[[], Hashable], environment: Environment):
        self._module, self._settings, self._environment = module, settings, environment
        # By plan and by how arguments are passed; None for calls that cannot be described.
        self._calls: dict[_Key, tuple[Any, ...] | None] = {}
        self._lock = threading.RLock()  # held while they are replaced
        self.recognize: Direct | None = None

    def add(
        self,
        runnable: Runnable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Parameters,
        bindings: Bindings,
    ) -> None:
        """Recognise further calls like one that Python has recognised, whose results are exported to no library.

        `args` and `kwargs` are its arguments, `parameters` those that are not bound.
        """
        key = runnable, len(args), frozenset(kwargs)
        if key not in self._calls:
            described = self._describe(runnable, args, kwargs, parameters, bindings)
            with self._lock:
                self._recognize({**self._calls, key: described})

    def keep(self, runnables: Sequence[Runnable]) -> None:
        """Forget the calls of all other plans."""
        with self._lock:
            left = {key: call for key, call in self._calls.items() if key[0] in runnables}
            if len(left) < len(self._calls):
                self._recognize(left)

    def _recognize(self, calls: dict[_Key, tuple[Any, ...] | None]) -> None:
        """Recognise these calls. A dict is replaced, not changed: another thread or a finalizer may be walking it."""
        self._calls = calls
        described = tuple(call for call in calls.values() if call is not None)
        self.recognize = self._module.recognizer(self._settings, described) if described else None

    def _describe(
        self,
        runnable: Runnable,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Parameters,
        bindings: Bindings,
    ) -> tuple[Any, ...] | None:
        """Describe a call for the launcher; None for one that it cannot recognise.

        Other threads may have replaced defaults, and variables around the function, since Python recognised the call.
        """
        known, around = runnable.recognizer, self._environment.current_snapshot()
        function = parameters.plain_function
        defaults = None if function is None else function.__defaults__  # read before the values
        found = parameters.find(args, kwargs)
        if found is None or not parameters.positional or not runnable.is_plain:
            return None
        values, defaulted = found
        if not known or known.is_current is not None or known.classes:
            return None
        if (None if around is None else around.key) != known.around_key or defaulted != known.defaulted:
            return None
        given_around = () if around is None else around.given
        if known.match((*values, *given_around)) is None:
            return None
        if not defaulted:
            function = defaults = None
        elif defaults is None or not all(type(value) in _SCALARS for value in defaults):
            return None  # that they are still the function's defaults is compared instead of the values
        given, names = dict(zip(parameters.names, values, strict=True)), tuple(kwargs)
        described: list[tuple[Any, ...]] = []
        numbers = itertools.count()
        all_names, bound, immutable = bindings

        def describe(value: Any, place: int) -> bool:
            is_number = type(value) in NUMBERS
            is_open = is_number and next(numbers) not in runnable.depends.positions
            found = _describe_value(value, place, is_open)
            described.extend(() if found is None else (found,))
            return found is not None

        for name in all_names:
            if name in immutable:
                described += [(_HELD, -1, leaf, None) for leaf in immutable[name].leaves]
            elif name in bound:
                return None
            elif name not in defaulted:
                place = len(args) + names.index(name) if name in names else parameters.names.index(name)
                if not describe(given[name], place):
                    return None
        if not all(map(describe, given_around, itertools.count(len(args) + len(names)))):
            return None
        surroundings = (None, None) if around is None else (self._environment.current_snapshot, known.around_key)
        unchanged = (known.settings, function, defaults, *surroundings)
        covers = runnable.depends.covers if runnable.depends.conditions else None
        return len(args), names, *unchanged, tuple(described), tuple(runnable.kept), covers, runnable.quick


def _describe_value(value: Any, place: int, is_open: bool) -> tuple[Any, ...] | None:
    """Describe an argument, or what variables give, by its place; `is_open` if it may be any number of its type."""
    cls = type(value)
    if cls is arrays.CUPY_ARRAY:
        return _ARRAY, place, None, cls, value.shape, value.strides, value.dtype, value.data.device_id
    if value is None or cls is bool:
        return _SAME, place, None, value
    if is_open:
        return _NUMBER, place, None, cls
    return (_EQUAL, place, None, value) if cls is int or cls is str else None
