"""LRU cache of compiled plans, by the signatures of calls."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from .call import Runnable

LIMIT = 1024  # plans kept for one function


class PlanCache:
    """LRU cache of runnables by key.

    Where a function reads the values of some float arguments, the key maps to their positions, and the key with those
    values maps to a runnable.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Runnable | tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return sum(type(found) is not tuple for found in list(self._found.values()))

    def values(self) -> list[Runnable]:
        """List the runnables, the newest last."""
        return [found for found in list(self._found.values()) if not isinstance(found, tuple)]

    def find(self, key: Hashable, numbers: Sequence[float]) -> Runnable | None:
        """Return the runnable for a key and the values of the float arguments, or None."""
        found = self._found.get(key)
        if type(found) is tuple:
            self._mark_used(key)
            key = _with_values(key, numbers, found)
            found = self._found.get(key)
        if found is not None:
            self._mark_used(key)
        return found  # type: ignore[return-value]

    def reads_numbers(self, key: Hashable) -> bool:
        """Whether the function reads the values of some float arguments in calls with a key."""
        return type(self._found.get(key)) is tuple

    def _mark_used(self, key: Hashable) -> None:
        if len(self._found) > LIMIT // 2:  # until then the order does not matter
            with contextlib.suppress(KeyError):  # another thread has just evicted it
                self._found.move_to_end(key)

    def add(self, key: Hashable, numbers: Sequence[float], read: Iterable[int], runnable: Runnable) -> None:
        """Add a runnable; the values of the float arguments at the positions `read` become part of its key."""
        before = self._found.get(key)
        positions = tuple(sorted({*read, *(before if isinstance(before, tuple) else ())}))
        if positions:
            self._found[key] = positions
            self._found.move_to_end(key)
            key = _with_values(key, numbers, positions)
        self._found[key] = runnable
        while len(self._found) > LIMIT:
            self._found.popitem(last=False)


def _with_values(key: Hashable, numbers: Sequence[float], positions: tuple[int, ...]) -> Hashable:
    """Extend a key by the values of the float arguments at some positions."""
    return key, tuple([numbers[i].hex() for i in positions])
