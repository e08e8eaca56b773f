"""The flags of traced arrays, as far as it is known how these lie in memory: arguments, copies and views of them."""

from __future__ import annotations

from typing import Any

from .user_code import fail, user_line

UNKNOWN = "how an array lies in memory is not known while the function is traced"
_ORDER = f"{UNKNOWN}, but of arguments, contiguous copies and their views; np.ascontiguousarray(x) copies where needed"


class Flags:
    """The flags of a traced array; those that are not known are errors."""

    __slots__ = ("_x",)
    _x: Any

    def __init__(self, x: Any):
        object.__setattr__(self, "_x", x)

    def __getattr__(self, name: str) -> bool:
        key = name.upper()
        is_flag = (_is_key(key) and key not in _LETTERS) or name in _ATTRIBUTES_ALONE
        if not is_flag or name != name.lower():
            text = f"'numpy._core.multiarray.flagsobj' object has no attribute {name!r}"
            raise AttributeError(f"{text}\n  at {user_line()}")
        return self._find(key)

    def __getitem__(self, name: str) -> bool:
        if not _is_key(name):
            raise KeyError("Unknown flag")
        return self._find(name)

    def _find(self, name: str) -> bool:
        """Return a flag that has to do with the order of elements; the others are errors."""
        if name not in _ORDERS and name not in _OF_BOTH_ORDERS:
            fail(f"the flag {name} of an array", "only flags of the order of elements are known while it is traced")
        found = _contiguity(self._x, name)
        if found is None:
            fail(f"the flag {name} of an array", _ORDER)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        fail("a change of an array's flags", "they are those of the arrays of a call; change them outside")

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def __repr__(self) -> str:
        fail("a text of an array's flags", UNKNOWN)

    def __eq__(self, other: object) -> bool:
        fail("a comparison of an array's flags", UNKNOWN)

    __hash__ = None  # type: ignore[assignment]


# The names of flags of one order, and of both.
_ORDERS = {"C": "C", "C_CONTIGUOUS": "C", "CONTIGUOUS": "C", "F": "F", "F_CONTIGUOUS": "F", "FORTRAN": "F"}
_OF_BOTH_ORDERS = ("FORC", "FNC")
# The keys of other flags, and attributes that are no keys.
_OTHERS = ("OWNDATA", "WRITEABLE", "ALIGNED", "WRITEBACKIFCOPY", "BEHAVED", "CARRAY", "FARRAY")
_LETTERS = ("C", "F", "O", "A", "W", "B", "CA", "FA", "X")
_ATTRIBUTES_ALONE = ("num",)


def _is_key(name: str) -> bool:
    return name in _ORDERS or name in _OF_BOTH_ORDERS or name in _OTHERS or name in _LETTERS


def _contiguity(x: Any, name: str) -> bool | None:
    """Return a flag of the order of a traced array's elements; None if it is not known."""
    rows, columns = x._is_contiguous("C"), x._is_contiguous("F")
    if name in _ORDERS:
        found: bool | None = rows if _ORDERS[name] == "C" else columns
        return found
    if name == "FORC" and (rows or columns):
        return True
    if rows is None or columns is None:
        return None
    return bool(name == "FNC" and columns and not rows)
