"""LRU cache of compiled plans, by the signatures of calls."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field

from .call import Runnable
from .dependence import Dependence

LIMIT = 1024  # plans kept for one function
_MOST_FORMS = 16  # in which plans of one key depend on numbers; further plans are for one value of each that matters


@dataclass
class _Forms:
    """What the plans of one key depend on of the numbers of calls.

    Attributes
    ----------
    forms : list of Dependence
        The newest first.
    newest : sequence of float or int
        The numbers of the last call that was added.
    needed, open : set of int
        Positions of constants whose values the function was found to read, and of those that it did not.
    traces_arrays : bool
        Whether arrays that the function makes of numbers may be traced; not where it was found to read their values.
    """

    forms: list[Dependence] = field(default_factory=list)
    newest: Sequence[float] = ()
    needed: set[int] = field(default_factory=set)
    open: set[int] = field(default_factory=set)
    traces_arrays: bool = True


class PlanCache:
    """LRU cache of runnables by key.

    Where calls bring numbers, the key maps to what plans depend on of them, and the key with one of these forms, and
    the values that it names, maps to a runnable.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Runnable | _Forms] = OrderedDict()

    def __len__(self) -> int:
        return len(self.values())

    def values(self) -> list[Runnable]:
        """List the runnables, the newest last."""
        return [found for found in list(self._found.values()) if not isinstance(found, _Forms)]

    def find(self, key: Hashable, numbers: Sequence[float]) -> Runnable | None:
        """Return the runnable for a key and the numbers of a call, or None."""
        found = self._found.get(key)
        if type(found) is not _Forms:
            if found is not None:
                self._mark_used(key)
            return found  # type: ignore[return-value]
        self._mark_used(key)
        for form in found.forms:  # a list that is replaced, not changed
            if form.covers(numbers):
                full = key, form, form.values(numbers)
                runnable = self._found.get(full)
                if runnable is not None:
                    self._mark_used(full)
                    return runnable  # type: ignore[return-value]
        return None

    def is_full(self, key: Hashable) -> bool:
        """Whether further plans of a key have to be for values of numbers alone."""
        forms = self._found.get(key)
        return isinstance(forms, _Forms) and len(forms.forms) >= _MOST_FORMS

    def traces_arrays(self, key: Hashable) -> bool:
        """Whether arrays that are made of numbers may be traced in a new plan, since there is one for other numbers."""
        forms = self._found.get(key)
        return isinstance(forms, _Forms) and bool(forms.forms) and forms.traces_arrays

    def note_arrays(self, key: Hashable) -> None:
        """Note that a function needs the values of the arrays that it makes of numbers."""
        forms = self._found.get(key)
        if isinstance(forms, _Forms):
            forms.traces_arrays = False

    def candidates(self, key: Hashable, numbers: Sequence[float], changing: Set[int]) -> frozenset[int]:
        """Return the positions of constants that may be left open in a new plan, since they change from call to call.

        `changing` are those that are known to; among the others are integers.
        """
        forms = self._found.get(key)
        if not isinstance(forms, _Forms):
            return frozenset(changing)
        changed = changing | {
            i for i, (a, b) in enumerate(zip(numbers, forms.newest, strict=True)) if type(a) is not float and a != b
        }
        return frozenset((changed | forms.open) - forms.needed)

    def note(self, key: Hashable, opened: frozenset[int], read: Set[int]) -> None:
        """Note which of the constants that were left open a function reads after all."""
        forms = self._found.setdefault(key, _Forms())
        assert isinstance(forms, _Forms), "calls of the key have numbers"
        forms.needed |= opened & read
        forms.open = (forms.open | opened) - forms.needed

    def _mark_used(self, key: Hashable) -> None:
        if len(self._found) > LIMIT // 2:  # until then the order does not matter
            with contextlib.suppress(KeyError):  # another thread has just evicted it
                self._found.move_to_end(key)

    def add(self, key: Hashable, numbers: Sequence[float], runnable: Runnable) -> None:
        """Add a runnable for calls of a key whose numbers are as `Runnable.depends` says."""
        form, before = runnable.depends, self._found.get(key)
        if not numbers:
            self._found[key] = runnable
        else:
            forms = before if isinstance(before, _Forms) else _Forms()
            forms.newest = tuple(numbers)
            if form not in forms.forms:
                forms.forms = [form, *forms.forms]
            self._found[key] = forms
            self._found.move_to_end(key)
            self._found[key, form, form.values(numbers)] = runnable
        while len(self._found) > LIMIT:
            self._found.popitem(last=False)
