"""What is refused because a fused function cannot tell what it reads, or would do once what each call should do."""

from __future__ import annotations

import sys
import types
from typing import Any

from .code import Reads, is_library_module

WAYS_OUT = (
    "pass what the function needs of it, name it in cf.fuse(static=(...)) if its hash and equality tell all that the "
    "function reads, or teach its type to cf.register(type, flatten, unflatten)"
)


def refusal(value: Any) -> str:
    """Say why an object cannot be part of a fused call."""
    cls = type(value)
    return (
        f"expected an array, a number, a constant, or a tuple, list, dict or dataclass of these, got "
        f"{cls.__module__}.{cls.__qualname__}, of which a fused function cannot tell what it reads; {WAYS_OUT}"
    )


def check_changes_nothing(function: types.FunctionType, reads: Reads, package: str) -> None:
    if reads.assigned:
        raise TypeError(
            f"{function.__qualname__} assigns the global or nonlocal variable {reads.assigned[0]!r}, which later calls "
            "of a fused function would not; return the value, and assign it outside"
        )
    for name in reads.imported:
        module = sys.modules.get(name)
        if module is not None and not is_library_module(module, package):
            raise TypeError(
                f"{function.__qualname__} imports {name} when it is called, whose changes a fused function would not "
                "notice; import it outside of the function"
            )
