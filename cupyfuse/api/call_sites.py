"""Code that loads some globals by names of their own where it calls them, as in `int(x)`; else, `int` is a type."""

from __future__ import annotations

import dis
import functools
import sys
import types

from .code import CALLED, instructions_of, is_called

_SHIFT = 1 if sys.version_info >= (3, 11) else 0  # of a name's number in LOAD_GLOBAL, above the bit that tells a call


def name_where_called(name: str) -> str:
    """Return the name, which no source can have, by which rebuilt code loads a global that it calls."""
    return name + CALLED


def with_calls_apart(code: types.CodeType, names: frozenset[str]) -> types.CodeType:
    """Return code, with the functions nested in it, that loads the globals of some names otherwise where it calls them.

    All instructions stay where they are. So where a name is not only called, a call stays as it was if its instruction
    has no room for the number of a new name: in code of 128 names of globals and attributes (256 in Python 3.10).
    """
    return _with_calls_apart(code, names, code.co_filename) if names else code


@functools.lru_cache(maxsize=4096)
def _with_calls_apart(code: types.CodeType, names: frozenset[str], filename: str) -> types.CodeType:
    """Compute `with_calls_apart`; equal code of two files must not share one object, since tracebacks name its file."""
    found, written = list(code.co_names), bytearray(code.co_code)
    instructions = instructions_of(code)
    for name in names.intersection(found):
        uses = [k for k, i in enumerate(instructions) if i.opcode in dis.hasname and i.argval == name]
        calls = [instructions[k] for k in uses if is_called(instructions, k)]
        if len(calls) == len(uses):
            found[found.index(name)] = name_where_called(name)
        elif calls and all(_has_room(load, len(found)) for load in calls):
            for load in calls:
                _rename(written, load, len(found))
            found.append(name_where_called(name))
    consts = tuple(
        _with_calls_apart(c, names, filename) if isinstance(c, types.CodeType) else c for c in code.co_consts
    )
    return code.replace(co_names=tuple(found), co_code=bytes(written), co_consts=consts)


def _argument(number: int) -> int:
    """Return the argument of an instruction that loads the global whose name has a number, to call it."""
    return number << _SHIFT | _SHIFT  # the bit that is shifted in says from Python 3.11 on that it is called


def _has_room(load: dis.Instruction, number: int) -> bool:
    """Whether an instruction may load the global of a number: an argument above 255 takes one more before it."""
    return _argument(number) <= 255 or (load.arg or 0) > 255


def _rename(written: bytearray, load: dis.Instruction, number: int) -> None:
    """Make an instruction that has room for it load the global of a number."""
    argument = _argument(number)
    written[load.offset + 1] = argument & 255
    if (load.arg or 0) > 255:  # an EXTENDED_ARG before the instruction has the rest
        written[load.offset - 1] = argument >> 8
