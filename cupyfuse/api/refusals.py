"""Errors for what a fused function cannot read, and for side effects that later calls would not repeat."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

from .code import Reads, is_library_module


def describe_refusal(value: Any, name: str) -> str:
    """Return the error message for an object that cannot be part of a fused call, and is called `name`."""
    cls = type(value)
    return (
        "expected an array, a number, a constant, a tuple, list or dict of these, or an object of your own class, got "
        f"{cls.__module__}.{cls.__qualname__}, of which a fused function cannot tell what it reads; pass what the "
        f"function needs of it, {_way_by_static(name)} if its hash and equality tell all that the function reads, or "
        "teach its type to cf.register(type, flatten, unflatten)"
    )


def _way_by_static(name: str) -> str:
    """Return how to name in `static` what an error calls `name`, such as `log.debug.__self__`.

    Default values, attributes of nested functions and `fn`, the fused function, are no arguments or variables.
    """
    found = re.match(r"(?!__|fn\b)[^\W\d]\w*(?!.*<)", name)
    if found is None:
        return "make it an argument or a variable and name that in cf.fuse(static=(...))"
    return f"name {found[0]} in cf.fuse(static=({found[0]!r},))"


def check_no_side_effects(function: types.FunctionType, reads: Reads, package: str) -> None:
    """Raise TypeError if a function assigns variables around it, or imports a module of the user's when called."""
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
