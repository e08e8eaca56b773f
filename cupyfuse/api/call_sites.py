"""Code that loads some names otherwise where it calls them, as in `int(x)` and `np.int8(x)`; else, these are types."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

import numpy as np

from ..trace.numpy import SCALAR_CONVERTERS, SCALAR_TYPES
from .code import CALLED, Reads, instructions_of, is_called

# Of a name's number above the bit that tells a call, in instructions that have it.
_SHIFTS = {"LOAD_GLOBAL": int(sys.version_info >= (3, 11)), "LOAD_ATTR": int(sys.version_info >= (3, 12))}


def name_where_called(name: str) -> str:
    """Return the name, which no source can have, by which rebuilt code loads a global that it calls."""
    return name + CALLED


def scalar_types_called(namespace: dict[str, Any], reads: Reads) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """Return the globals, of any name, and the attributes of NumPy that are its types of numbers and are called."""
    own = {n for n in reads.called if type(cls := namespace.get(n)) is type and cls in SCALAR_CONVERTERS}
    of_numpy = {
        (name, label)
        for name, label in reads.called_attributes
        if label in SCALAR_TYPES and namespace.get(name) is np and getattr(np, label, None) is SCALAR_TYPES[label]
    }
    return frozenset(own), frozenset(of_numpy)


def with_calls_apart(
    code: types.CodeType, names: frozenset[str], attributes: frozenset[tuple[str, str]] = frozenset()
) -> types.CodeType:
    """Return code, with the functions nested in it, that loads the globals of some names otherwise where it calls them.

    `attributes` are pairs of a global and its attribute, such as `("np", "float32")`, which are loaded alike.
    All instructions stay where they are. So where a name is not only called, a call stays as it was if its instruction
    has no room for the number of a new name: in code of 128 names of globals and attributes (256 in Python 3.10).
    """
    return _with_calls_apart(code, names, attributes, code.co_filename) if names or attributes else code


@functools.lru_cache(maxsize=4096)
def _with_calls_apart(
    code: types.CodeType, names: frozenset[str], attributes: frozenset[tuple[str, str]], filename: str
) -> types.CodeType:
    """Compute `with_calls_apart`; equal code of two files must not share one object, since tracebacks name its file."""
    found, written = list(code.co_names), bytearray(code.co_code)
    instructions, attribute_calls = instructions_of(code)
    of_globals = [load for name, load in attribute_calls if (name, load.argval) in attributes]
    for name in names.union(load.argval for load in of_globals).intersection(found):
        uses = [k for k, i in enumerate(instructions) if i.opcode in dis.hasname and i.argval == name]
        calls = [instructions[k] for k in uses if name in names and is_called(instructions, k)]
        calls += [load for load in of_globals if load.argval == name]
        if len(calls) == len(uses):
            found[found.index(name)] = name_where_called(name)
        elif calls and all(_has_room(load, len(found)) for load in calls):
            for load in calls:
                _rename(written, load, len(found))
            found.append(name_where_called(name))
    consts = tuple(
        _with_calls_apart(c, names, attributes, filename) if isinstance(c, types.CodeType) else c
        for c in code.co_consts
    )
    return code.replace(co_names=tuple(found), co_code=bytes(written), co_consts=consts)


def _argument(load: dis.Instruction, number: int) -> int:
    """Return the argument with which an instruction loads what has the name of a number, with its bit as it is."""
    shift = _SHIFTS.get(load.opname, 0)
    return number << shift | ((load.arg or 0) & shift)


def _has_room(load: dis.Instruction, number: int) -> bool:
    """Whether an instruction may load the global of a number: an argument above 255 takes one more before it."""
    return _argument(load, number) <= 255 or (load.arg or 0) > 255


def _rename(written: bytearray, load: dis.Instruction, number: int) -> None:
    """Make an instruction that has room for it load the global of a number."""
    argument = _argument(load, number)
    written[load.offset + 1] = argument & 255
    if (load.arg or 0) > 255:  # an EXTENDED_ARG before the instruction has the rest
        written[load.offset - 1] = argument >> 8
