"""What takes the place of a library's function, and is equal to it, while a function is traced."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="Replacement")


class Replacement:
    """A callable in the place of a function that is no Python function: no method of the class that holds it.

    To `isinstance`, `==`, `hash`, `repr`, copies and pickles it is the original, `__wrapped__`.
    """

    __wrapped__: Any
    _module: str  # where the original is found by its name

    def __init__(self, original: Callable[..., Any], module: str):
        update_wrapper(self, original)  # type: ignore[arg-type]
        self._module = module

    # What `isinstance` reads.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__wrapped__)

    def __eq__(self, other: Any) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: Any) -> _Self:
        return self

    def __reduce__(self) -> Any:
        # By name, as the original, and what a module that was imported during a trace holds.
        return pkgutil.resolve_name, (f"{self._module}:{self.__wrapped__.__name__}",)
