"""Signatures of NumPy's functions: those in C tell theirs from NumPy 2.4 on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

# Of functions in C, those whose parameters matter by name: with `out`, or written by a library step.
IN_C: dict[str, Callable[..., None]] = {
    "concatenate": lambda arrays, axis=0, out=None, *, dtype=None, casting="same_kind": None,
    "dot": lambda a, b, out=None: None,
    "putmask": lambda a, mask, values: None,
}


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of one of NumPy's functions; one of any number of arguments if it tells none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return inspect.signature(IN_C.get(function.__name__, lambda *args, **kwargs: None))


@cache
def names_of_parameters(func: Any) -> tuple[str, ...]:
    """Return the names of the parameters that may be given by position; none if any number may."""
    found = list(signature_of(func).parameters.values())
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in found)
    return tuple(p.name for p in found if p.kind in kinds) if named else ()
