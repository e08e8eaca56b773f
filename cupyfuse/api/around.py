"""Numbers around functions: constants, until they change from call to call."""

from __future__ import annotations

import enum
from collections.abc import Hashable

_MOST = 4096  # numbers whose values are remembered
_CHANGES = object()


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
        self._values: dict[Hashable, Hashable] = {}  # of each number the key of its value, or that it has changed

    def note(self, name: Hashable, value: Hashable) -> bool:
        """Note the key of the value that a number has in a call; return whether it has had another one."""
        before = self._values.get(name)
        if before == value:
            return False
        if before is None:
            if len(self._values) >= _MOST:  # as where keys of dicts vary
                self._values = {}
            self._values[name] = value
            return False
        self._values[name] = _CHANGES
        return True
