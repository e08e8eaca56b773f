"""The flags of traced arrays, as far as it is known how these lie in memory: arguments, copies and views of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .user_code import fail, user_line

UNKNOWN = "how an array lies in memory is not known while the function is traced"
_ORDER = f"{UNKNOWN}, but of arguments and copies; np.ascontiguousarray(x) and np.asfortranarray(x) copy where needed"


class Flags:
    """The flags of a traced array; those that are not known are errors."""

    __slots__ = ("_x",)
    _x: Any

    def __init__(self, x: Any):
        object.__setattr__(self, "_x", x)

    def __getattr__(self, name: str) -> bool:
        if name not in _NAMES:
            raise AttributeError(
                f"'numpy._core.multiarray.flagsobj' object has no attribute {name!r}\n  at {user_line()}"
            )
        return self[name.upper()]

    def __getitem__(self, name: str) -> bool:
        if name not in _KNOWN and name.lower() not in _NAMES and name not in _SHORT:
            raise KeyError("Unknown flag")
        read = _KNOWN.get(name)
        found = None if read is None else read(self._x)
        if found is None:
            fail(f"the flag {name} of an array", UNKNOWN if read is None else _ORDER)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        fail("a change of an array's flags", "they are those of the arrays of a call; change them outside")

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)


def _is_in_rows(x: Any) -> bool | None:
    found: bool | None = x._is_contiguous("C")
    return found


def _is_in_columns(x: Any) -> bool | None:
    found: bool | None = x._is_contiguous("F")
    return found


def _is_in_either(x: Any) -> bool | None:
    found = (_is_in_rows(x), _is_in_columns(x))
    return True if True in found else None if None in found else False


def _is_in_columns_alone(x: Any) -> bool | None:
    rows, columns = _is_in_rows(x), _is_in_columns(x)
    return None if rows is None or columns is None else columns and not rows


_KNOWN: dict[str, Callable[[Any], bool | None]] = {
    **dict.fromkeys(("C", "C_CONTIGUOUS", "CONTIGUOUS"), _is_in_rows),
    **dict.fromkeys(("F", "F_CONTIGUOUS", "FORTRAN"), _is_in_columns),
    "FORC": _is_in_either,
    "FNC": _is_in_columns_alone,
}
_UNKNOWN_NAMES = ("owndata", "writeable", "aligned", "writebackifcopy", "behaved", "carray", "farray", "num")
_NAMES = {name.lower() for name in _KNOWN if len(name) > 1}.union(_UNKNOWN_NAMES)
_SHORT = ("O", "A", "W", "B", "CA", "FA", "X")
