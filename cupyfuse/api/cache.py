"""Plans that are ready to run, by the signatures of calls."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

from .call import Runnable

LIMIT = 1024  # plans kept for one function


class PlanCache:
    """Plans by key; the one that was used least recently makes room for a new one.

    Where a function reads the values of some float arguments, a key leads to their positions, and the key together with
    the values leads to a plan.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Runnable | tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return sum(type(found) is not tuple for found in list(self._found.values()))

    def values(self) -> list[Runnable]:
        """List the plans, the newest last."""
        return [found for found in list(self._found.values()) if not isinstance(found, tuple)]

    def find(self, key: Hashable, numbers: Sequence[float]) -> Runnable | None:
        """Return the plan for a key and float arguments."""
        found = self._found.get(key)
        if type(found) is tuple:
            self._use(key)
            key = _with_values(key, numbers, found)
            found = self._found.get(key)
        if found is not None:
            self._use(key)
        return found  # type: ignore[return-value]

    def _use(self, key: Hashable) -> None:
        if len(self._found) > LIMIT // 2:  # until then the order does not matter
            with contextlib.suppress(KeyError):  # another thread has just made room
                self._found.move_to_end(key)

    def add(self, key: Hashable, numbers: Sequence[float], read: Iterable[int], runnable: Runnable) -> None:
        """Add a plan that holds for the values of the float arguments at the positions `read`, and any others."""
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
    return key, tuple([numbers[i].hex() for i in positions])
