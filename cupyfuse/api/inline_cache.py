"""Inline cache of a function: recognise calls like earlier ones by code generated for their arguments.

`Signature` walks arguments of any structure, and the key of all that it finds names a plan. For arrays, numbers,
strings and the containers that calls are given most, the same comparisons are generated here as one straight function.
A call that no such function recognises is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .call import Runnable
from .current import current_check
from .direct_calls import Direct, DirectCalls
from .environment import Environment, Snapshot
from .match_writer import MatchWriter, Unrecognizable
from .parameters import Parameters
from .places import MixedUp
from .signature import Signature

_MOST = 4  # plans whose calls one function recognises
# Calls that are walked before code is generated, which takes as long as walking a hundred: most signatures of a program
# that has many are met a few times only.
_WALKED = 8
_LONGER = 10  # times as many are walked where another object was bound to a variable, each time that it was
# Calls of a plan that the generated code recognises, in which it is not walked again, before they are described to the
# compiled launcher, which takes as long as that saves in several: functions with more plans than are recognised would
# describe and forget calls again and again.
_FOUND = 24


@dataclass(frozen=True, slots=True)
class Recognizer:
    """Recognises the calls of one plan. It holds bound arrays, but none that a call brings.

    Attributes
    ----------
    match : callable
        Takes the values of the parameters that are not bound, and the arrays around the function. Returns all arrays
        and numbers of such a call, else None.
    export : callable or None
        Exports results to the library of the first array.
    defaulted : collection of str
        The parameters that take their default values.
    settings : hashable
        What the key consists of beside its signature.
    around_key, of_classes : hashable or None
        Keys of the variables around the function, and of what it reads of the arguments' classes.
    classes, class_values : dict
        These classes, with their names, and those of them that were arguments.
    is_current : callable or None
        Where each call reads the variables around the function: tells whether they, and classes, hold the same objects.
        What these objects hold is compared by `match`.
    """

    match: Callable[[Sequence[Any]], tuple[list[Any], list[float]] | None]
    export: Callable[[Any], Any] | None
    defaulted: Collection[str]
    settings: Hashable
    around_key: Hashable
    of_classes: Hashable
    classes: dict[Any, str]
    class_values: dict[Any, str]
    is_current: Callable[[], bool] | None


# A call whose plan is known: its runnable, arrays and numbers, and the exporter of its results. A plain tuple: making a
# named one takes 0.2 us of each call.
RecognizedCall = tuple[Runnable, list[Any], list[float], Callable[[Any], Any] | None]


class InlineCache:
    """The plans whose calls a function recognises.

    Parameters
    ----------
    environment : Environment
        The variables around the function.
    names : sequence of str
        Of the function's parameters.
    bound : mapping, optional
        The values of bound parameters, by name.
    immutable : mapping, optional
        The signatures of those among them that are the same in every call. Of others the items and attributes are
        compared in each call; arrays have to be the same objects.
    settings : callable, optional
        Returns what the key of a call consists of beside its signature. Without it no call is direct.

    Attributes
    ----------
    direct : callable or None
        The compiled launcher's function that recognises and runs calls; see `DirectCalls`.
    takes_notes : bool
        Whether `note` may gain anything.
    """

    def __init__(
        self,
        environment: Environment,
        names: Sequence[str],
        bound: Mapping[str, Any] = MappingProxyType({}),
        immutable: Mapping[str, Signature] = MappingProxyType({}),
        settings: Callable[[], Hashable] | None = None,
    ):
        self._environment, self._names, self._bound, self._immutable = environment, names, bound, immutable
        self._runnables: list[Runnable] = []  # whose calls are recognised, the last walked first
        self._settings = settings
        self._calls: DirectCalls | None = None  # those among them that the compiled launcher recognises
        self.direct: Direct | None = None
        self.takes_notes = settings is not None

    def find(self, values: Sequence[Any], defaulted: Collection[str], settings: Hashable) -> RecognizedCall | None:
        """Return the call with these values of the parameters that are not bound, or None. Parameters as for `add`."""
        runnables = self._runnables
        if not runnables:
            return None
        around = self._environment.current_snapshot()
        key = None
        if around is not None:
            key = around.key
            if around.given:
                values = (*values, *around.given)
        for runnable in runnables:
            known: Recognizer | None = runnable.recognizer
            if known is None:
                continue  # another thread has just forgotten it
            if known.settings != settings or (known.defaulted is not defaulted and known.defaulted != defaulted):
                continue
            if known.around_key is not key and known.around_key != key:
                continue
            if known.is_current is not None and not known.is_current():
                continue
            found = known.match(values)
            if found is None:
                continue
            if not known.classes or self._key_of(known.classes, known.class_values, around) == known.of_classes:
                return runnable, found[0], found[1], known.export
        return None

    def _key_of(self, classes: dict[Any, str], class_values: dict[Any, str], around: Snapshot | None) -> Hashable:
        """Return the key of what the function now reads of classes among the arguments; None if it is mutable."""
        found = None if around is None else self._environment.snapshot_of_classes(classes, class_values, around)
        return None if found is None else found.key

    def clear(self) -> None:
        """Forget all calls."""
        self._runnables = []
        self._calls = self.direct = None

    def note(
        self, known: RecognizedCall, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters
    ) -> None:
        """Have the compiled launcher recognise further calls like those that `find` has found, if it can.

        The plan has to be `quick`, and nothing given for results.

        Parameters
        ----------
        known : RecognizedCall
        args, kwargs : the arguments of the call
        parameters : those that are not bound
        """
        assert self._settings is not None
        runnable, _, _, export = known
        runnable.found += 1
        if runnable.found < _FOUND or export is not None:
            return
        calls = self._calls  # which another thread may clear
        if calls is None:
            from ..cuda import launcher  # of no use without a GPU

            module = launcher.find().module
            if module is None:
                self.takes_notes = False
                return
            calls = self._calls = DirectCalls(module, self._settings, self._environment)
        calls.add(runnable, args, kwargs, parameters, (self._names, self._bound, self._immutable))
        if self._calls is calls:
            self.direct = calls.recognize

    def add(
        self,
        runnable: Runnable,
        signature: Signature,
        values: Sequence[Any],
        defaulted: Collection[str],
        settings: Hashable,
    ) -> None:
        """Note a call that was walked; once there were enough of them, recognise further ones like it.

        Parameters
        ----------
        runnable : Runnable
            Of the call.
        signature : Signature
            Of the call.
        values : sequence
            The values of the parameters that are not bound.
        defaulted : collection of str
            The parameters that take their default values.
        settings : hashable
            What the key of the call consists of beside its signature.
        """
        runnable.calls += 1
        runnable.found = 0
        known = runnable.recognizer
        if known and known.is_current is not None and not known.is_current():
            self._runnables = [r for r in self._runnables if r is not runnable]
            runnable.recognizer, runnable.calls, runnable.forgotten = None, 0, runnable.forgotten + 1
        if runnable.recognizer is None and runnable.calls >= _WALKED * _LONGER**runnable.forgotten:
            runnable.recognizer = self._make(runnable, signature, values, defaulted, settings) or False
        if runnable.recognizer:
            self._runnables = [runnable, *(r for r in self._runnables if r is not runnable)][:_MOST]
            calls = self._calls
            if calls is not None:
                calls.keep(self._runnables)
                self.direct = calls.recognize

    def _make(
        self,
        runnable: Runnable,
        signature: Signature,
        values: Sequence[Any],
        defaulted: Collection[str],
        settings: Hashable,
    ) -> Recognizer | None:
        """Return what recognises calls like one that was walked, or None. Parameters as for `add`.

        Functions among the arguments, arrays that are given twice, static variables and what is `Signature.opaque` have
        keys that the generated code does not compare.
        """
        environment = self._environment
        around = environment.current_snapshot()  # which another thread may have changed: `key` is that of the call
        reads_all = around is None and not environment.is_own
        classes = {} if reads_all else dict(signature.classes)
        class_values = dict(signature.class_values)
        of_classes = self._key_of(classes, class_values, around) if classes else None
        unknown = signature.opaque if reads_all else signature.has_functions
        if unknown or signature.duplicates() or environment.static or (of_classes is None and classes):
            return None
        read = signature.changing_variables
        writer = MatchWriter(signature, runnable.depends)
        given = iter(values)
        try:
            for name in self._names:
                if name in self._immutable:
                    writer.add_immutable(self._immutable[name])
                elif name in self._bound:
                    writer.add_bound(self._bound[name])
                else:
                    writer.add(next(given), writer.parameter())
            if signature.taken is not None:
                writer.add_taken()
            for found, variable in signature.around.items() if reads_all else ():
                writer.add_variable(variable, found in read)
            match = writer.function()
        except (Unrecognizable, MixedUp):
            return None
        key, export = None if signature.taken is None else signature.taken.key, signature.exporters[0]
        is_current = current_check(signature, environment.package, read) if reads_all else None
        return Recognizer(match, export, defaulted, settings, key, of_classes, classes, class_values, is_current)
