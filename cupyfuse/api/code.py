"""Analysis of functions: the variables and attributes that their bytecode reads, and where their code comes from."""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AttributePath = tuple[str, ...]  # of config.model.eps: ("model", "eps")


@dataclass(frozen=True)
class Reads:
    """What code, with the functions nested in it, reads beside its arguments.

    Attributes
    ----------
    variables : dict
        For each free variable or global, by name, the attribute paths that are read of it; () is the value as a whole.
    globals : tuple of str
        The globals among the variables.
    called : frozenset of str
        Those of them that the code calls.
    called_attributes : frozenset of (str, str)
        A global and the attribute of it that the code calls, as in `np.float32(x)`.
    attributes : frozenset of str
        The names of all attributes that are read of anything; `ANY` among them where names may be computed, `CLASS`
        where the class of any object may be got.
    strings : frozenset of str
        The constants that could be names of attributes, for `getattr`.
    assigned : tuple of str
        Free variables and globals that the code assigns.
    imported : tuple of str
        Modules that the code imports.
    """

    variables: dict[str, frozenset[AttributePath]]
    globals: tuple[str, ...]
    called: frozenset[str]
    called_attributes: frozenset[tuple[str, str]]
    attributes: frozenset[str]
    strings: frozenset[str]
    assigned: tuple[str, ...]
    imported: tuple[str, ...]


_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_VARIABLES |= {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ASSIGNMENTS = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_READ_ANY = {"getattr", "vars"}  # builtins that read attributes by names that are computed
ANY = "__dict__"  # stands for the names of all attributes among those that code reads
CLASS = "__class__"  # and for all ways to get the class of any object
CALLED = "()"  # behind the names of globals that rebuilt code calls, as `call_sites` names them
_PREFIXES = {"CACHE", "EXTENDED_ARG"}  # parts of other instructions
_IDLE = {"PUSH_NULL", "PRECALL", "RESUME"}


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> Reads:
    """Find what code reads, from its bytecode."""
    variables: dict[str, set[AttributePath]] = {}
    attributes: set[str] = set()
    called: set[str] = set()
    called_attributes: set[tuple[str, str]] = set()
    strings: set[str] = set()
    assigned: list[str] = []
    imported: list[str] = []
    for inner in _with_nested(code):
        # A nested function may have a variable of its own by the name of one outside.
        outside = set(code.co_freevars) - (set(inner.co_cellvars) if inner is not code else set())
        instructions, of_globals = instructions_of(inner)
        called_attributes.update((name, load.argval) for name, load in of_globals)
        path: list[str] | None = None  # attributes read so far of `variable`, which was loaded last
        variable = ""
        constant: Any = ()  # loaded last; before MATCH_CLASS the names of the pattern's attributes
        for place, instruction in enumerate(instructions):
            operation, name = instruction.opname, instruction.argval
            name = plain_name(name) if operation in _VARIABLES else name
            if operation in _ATTRIBUTES:
                attributes.add(name)
                if path is not None:
                    path.append(name)
                continue
            if path is not None:
                variables.setdefault(variable, set()).add(tuple(path))
                path = None
            if operation in _VARIABLES and name in _READ_ANY:
                attributes.add(ANY)
            if operation in _VARIABLES and _reads_class(instructions, place):
                attributes.add(CLASS)
            is_outside = "DEREF" not in operation or name in outside
            if operation in _VARIABLES and is_outside:
                variable, path = name, []
                called.update((name,) if is_called(instructions, place) else ())
            elif operation in _ASSIGNMENTS and is_outside:
                assigned.append(name)
            elif operation == "IMPORT_NAME":
                imported.append(name)
                attributes.update([CLASS] if name == "builtins" else [])
            elif operation == "LOAD_CONST":
                constant = name
                strings.update(s for s in (name if isinstance(name, tuple) else (name,)) if _is_name(s))
            elif operation == "MATCH_CLASS":
                attributes.update(constant, ("__match_args__",))
    found = {name: frozenset(paths) for name, paths in variables.items()}
    global_names = tuple(name for name in found if name not in code.co_freevars)
    return Reads(
        found,
        global_names,
        frozenset(called),
        frozenset(called_attributes),
        frozenset(attributes),
        frozenset(strings),
        tuple(assigned),
        tuple(imported),
    )


def instructions_of(code: types.CodeType) -> tuple[list[dis.Instruction], list[tuple[str, dis.Instruction]]]:
    """Return the instructions of code but those that do nothing, and those that load attributes of globals for calls.

    The latter are with the names of the globals.
    """
    found = [i for i in dis.get_instructions(code) if i.opname not in _PREFIXES]
    calls = [
        (plain_name(before.argval), load)
        for before, load, after in zip(found, found[1:], found[2:])  # noqa: B905 (of three lengths)
        if before.opname == "LOAD_GLOBAL" and _calls_attribute(before, load, after)
    ]
    return [i for i in found if i.opname not in _IDLE], calls


def is_called(instructions: Sequence[dis.Instruction], place: int) -> bool:
    """Whether the global that an instruction loads is called, as in `f(x)`."""
    load = instructions[place]
    if load.opname != "LOAD_GLOBAL":
        return False
    if sys.version_info >= (3, 11):
        # A load that pushes NULL is of what is called, or of the global whose attribute is: `int.from_bytes(*x)`.
        of_attribute = any(i.opname in _ATTRIBUTES for i in instructions[place + 1 : place + 2])
        return bool((load.arg or 0) & 1) and not of_attribute
    # Before, nothing in the load tells: follow the stack to the call that takes the value, but not past a jump.
    above = 0  # values above it on the stack
    for following in instructions[place + 1 :]:
        taken = {"CALL_FUNCTION": 0, "CALL_FUNCTION_KW": 1}.get(following.opname)
        if taken is not None and above == following.arg + taken:
            return True
        above += dis.stack_effect(following.opcode, following.arg, jump=False)
        if above < 0 or following.opcode in (*dis.hasjrel, *dis.hasjabs):
            return False
    return False


def _calls_attribute(before: dis.Instruction, load: dis.Instruction, after: dis.Instruction) -> bool:
    """Whether an instruction loads an attribute for a call; those before and after it, also idle ones, tell."""
    if load.opname == "LOAD_METHOD":
        return True
    if load.opname != "LOAD_ATTR" or after.opname in _ATTRIBUTES:
        return False
    if sys.version_info >= (3, 12) and (load.arg or 0) & 1:
        return True  # as a method
    if sys.version_info >= (3, 13):
        return after.opname == "PUSH_NULL"
    # Of calls over several lines, or with `*args`, the global was loaded behind NULL: they are no method calls.
    return sys.version_info >= (3, 11) and bool((before.arg or 0) & 1)


def _reads_class(instructions: Sequence[dis.Instruction], place: int) -> bool:
    """Whether the variable that an instruction loads is `type`, or `__class__` for other ends than `super()`."""
    name = plain_name(instructions[place].argval)
    if name == CLASS:
        return not any(i.opname == "LOAD_SUPER_ATTR" for i in instructions[place + 2 : place + 3])
    return bool(name == "type")


def plain_name(name: str) -> str:
    """Return the name of a global in the user's code, also of one that rebuilt code calls."""
    return name.removesuffix(CALLED)


def _is_name(value: Any) -> bool:
    return type(value) is str and value.isidentifier()


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code and the code of all functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)


# Where code is that is taken not to change: the standard library, installed packages, this package.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_PATHS.add(os.path.dirname(os.path.dirname(os.path.abspath(np.__file__))))
_INSTALLED = (*(path + os.sep for path in _PATHS if path), "<frozen ")


# Packages that no user of this one develops beside it.
_LIBRARIES = ("cupy", "cupyx", "ml_dtypes", "numpy", "scipy")


def package_of(module: str | None) -> str:
    """Return the top-level package of a module's name."""
    return (module or "").partition(".")[0]


def is_own(filename: str) -> bool:
    """Whether a file is part of this package."""
    return filename.startswith(_HERE)


@functools.lru_cache(maxsize=4096)
def is_library(filename: str, module: str, package: str) -> bool:
    """Whether a module's file belongs to the standard library, or to an installed package other than `package`."""
    if is_own(filename):
        return True
    return filename.startswith(_INSTALLED) and (package_of(module) != package or package in ("", *_LIBRARIES))


def is_library_module(module: types.ModuleType, package: str) -> bool:
    """Whether a module belongs to the standard library, or to an installed package other than `package`."""
    name = module.__name__
    if package_of(name) in sys.stdlib_module_names and name != "__main__":
        return True
    filename = getattr(module, "__file__", None)
    if filename is None:  # built into Python or NumPy, or made by the user: a namespace package, types.ModuleType(...)
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        return origin == "built-in" or package_of(name) in _LIBRARIES
    return is_library(filename, name, package)


def is_generated(code: types.CodeType) -> bool:
    """Whether code was generated by `dataclasses`."""
    if code.co_filename != "<string>":
        return False
    name = getattr(code, "co_qualname", None)
    # Python 3.10 has no co_qualname; there each method is generated as the second line of a factory function.
    return code.co_firstlineno == 2 if name is None else name.startswith("__create_fn__.")
