"""What a function's code reads beside its arguments: its free variables and globals, and which of their attributes."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Chain = tuple[str, ...]


@dataclass(frozen=True)
class Reads:
    """What code reads beside its arguments, functions within it included.

    Attributes
    ----------
    variables : dict
        For each free variable or global, by name, the chains of attributes that are read of it: ``config.model.eps`` is
        ("model", "eps"), and the value as a whole is ().
    globals : tuple of str
        Those of them that are no free variables.
    attributes : frozenset of str
        The names of all attributes that are read of anything.
    assigned : tuple of str
        Free variables and globals that the code assigns.
    imported : tuple of str
        Modules that it imports.
    """

    variables: dict[str, frozenset[Chain]]
    globals: tuple[str, ...]
    attributes: frozenset[str]
    assigned: tuple[str, ...]
    imported: tuple[str, ...]


_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_VARIABLES |= {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ASSIGNMENTS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_IGNORED = {"CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "RESUME"}


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """Find what code reads, from its instructions."""
    variables: dict[str, set[Chain]] = {}
    attributes: set[str] = set()
    assigned: list[str] = []
    imported: list[str] = []
    for inner in _with_nested(code):
        outside = set(code.co_freevars) - (set(inner.co_cellvars) if inner is not code else set())
        chain: list[str] | None = None  # attributes of the variable that was loaded last
        variable = ""
        names: Any = ()  # the constant that was loaded last: those of the attributes in a class pattern
        for instruction in dis.get_instructions(inner):
            operation, name = instruction.opname, instruction.argval
            if operation in _ATTRIBUTES:
                attributes.add(name)
                if chain is not None:
                    chain.append(name)
                continue
            if chain is not None and operation not in _IGNORED:
                variables.setdefault(variable, set()).add(tuple(chain))
                chain = None
            is_outside = "DEREF" not in operation or name in outside
            if operation in _VARIABLES and is_outside:
                variable, chain = name, []
            elif operation in _ASSIGNMENTS and is_outside:
                assigned.append(name)
            elif operation == "IMPORT_NAME":
                imported.append(name)
            elif operation == "LOAD_CONST":
                names = name
            elif operation == "MATCH_CLASS":
                attributes.update(names, ("__match_args__",))
    found = {name: frozenset(chains) for name, chains in variables.items()}
    free = code.co_freevars
    return Reads(
        found, tuple(n for n in found if n not in free), frozenset(attributes), tuple(assigned), tuple(imported)
    )


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)


# Code that is taken not to change: the standard library, installed packages, this package.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_PATHS.add(os.path.dirname(os.path.dirname(os.path.abspath(np.__file__))))
_INSTALLED = (*(path + os.sep for path in _PATHS if path), "<frozen ")


def package_of(module: str | None) -> str:
    """Return the top-level package of a module's name."""
    return (module or "").partition(".")[0]


def is_own(filename: str) -> bool:
    """Whether a file is part of this package."""
    return filename.startswith(_HERE)


@functools.lru_cache(maxsize=4096)
def is_library(filename: str, module: str, package: str) -> bool:
    """Whether a file belongs to an installed package other than `package`, or to the standard library."""
    if is_own(filename):
        return True
    return filename.startswith(_INSTALLED) and (package_of(module) != package or not package)


def is_library_module(module: types.ModuleType, package: str) -> bool:
    name = module.__name__
    if package_of(name) in sys.stdlib_module_names and name != "__main__":
        return True
    filename = getattr(module, "__file__", None)
    return name != "__main__" if filename is None else is_library(filename, name, package)


def is_generated(code: types.CodeType) -> bool:
    """Whether code was generated by `dataclasses`."""
    if code.co_filename != "<string>":
        return False
    name = getattr(code, "co_qualname", None)
    # Python 3.10 has no qualified names of code; there each method is the second line of a function of its own.
    return code.co_firstlineno == 2 if name is None else name.startswith("__create_fn__.")
