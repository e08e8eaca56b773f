"""Numbers around functions: constants, until they change from call to call."""

from __future__ import annotations

import enum
from collections.abc import Hashable

_MOST = 4096  # numbers whose values are remembered


class Role(enum.Enum):
    """What the numbers in a value are: numbers of the call, constants until they change, or constants."""

    ARGUMENT = enum.auto()
    AROUND = enum.auto()
    CONSTANT = enum.auto()


class Changes:
    """Which of the numbers around a function have changed from call to call.

    It only decides which numbers are constants: keys of calls say of each what it is.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Hashable] = {}
        self._changing: set[Hashable] = set()

    def note(self, name: Hashable, value: Hashable) -> bool:
        """Note the key of the value that a number has in a call; return whether it has had another one."""
        before = self._values.get(name, value)
        if len(self._values) >= _MOST:  # as where keys of dicts vary
            self._values, self._changing = {}, set()
        self._values[name] = value
        if before != value:
            self._changing.add(name)
        return name in self._changing
