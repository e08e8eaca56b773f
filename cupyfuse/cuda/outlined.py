"""Emit the evaluation of an element as written, as a function of its own.

Templates compute many elements of a row in straight code, and each of them may have to be recomputed as written. That
seldom runs, but in line it would be most of a kernel's code, and of the time to compile it. The function takes and
returns the values that it needs one by one: in whole structs, values that nothing reads any more would keep registers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .c_types import stored_type
from .expressions import rounded_in_pairs
from .parameters import DIVISORS, STEPS, STRIDES, Parameter

_FIELD = re.compile(r"\b([re])\.(\w+)")
_WRITTEN = re.compile(r"^e\.(\w+) = ", re.MULTILINE)


def outlined(
    stage: int,
    lines: Sequence[str],
    tile: Iterable[Parameter],
    writes: Sequence[Parameter],
    parameters: Iterable[Parameter],
) -> tuple[list[str], list[str]]:
    """Return a function that runs the lines, as lines, and the lines that call it in their place.

    Parameters
    ----------
    stage : int
    lines : sequence of str
        Statements for element j, which read the structs `r`, `e` and `tile`, and write `e` and `out`.
    tile : iterable of Parameter
        The members of the tile that they read.
    writes : sequence of Parameter
        The members of `out`, all of which they write.
    parameters : iterable of Parameter
        Members of the program, which they may read.
    """
    text = "\n".join(lines)
    kept = _WRITTEN.findall(text)
    fields = dict.fromkeys(match for match in _FIELD.findall(text) if match[0] == "r" or match[1] not in kept)
    # Passed by value, and not through the program's address: that would take a copy of it in memory.
    members = {name: kind for p in parameters for name, kind in _members(p).items()}
    members |= {"row": "i64", "col": "i64"}
    passed = [(kind, name, name) for name, kind in members.items() if re.search(rf"(?<![\w.]){name}\b", text)]
    passed += [(f"decltype({_STRUCTS[s]}::{name})", f"{s}_{name}", f"{s}.{name}") for s, name in fields]
    passed += [(stored_type(p.dtype), f"tile_{p.name}", f"tile.{p.name}.v[j]") for p in tile]
    results = [(f"decltype(Element::{name})", name, f"e.{name}") for name in kept]
    kinds = ("float" if rounded_in_pairs(p) else stored_type(p.dtype) for p in writes)
    results += [(kind, p.name, f"out.{p.name}.v[j]") for kind, p in zip(kinds, writes, strict=True)]
    signature = ", ".join(f"{kind} {name}" for kind, name, _ in passed)
    function = [
        f"struct Exact{stage} {{ {' '.join(f'{kind} {name};' for kind, name, _ in results)} }};",
        f"__noinline__ __device__ static Exact{stage} exact{stage}({signature}) {{",
        f"    Row r; Element e; Tile{stage}<1> tile; Out{stage}<1> out; constexpr int j = 0;",
        *(f"    {there} = {name};" for _, name, there in passed if name != there),
        *(f"    {line}" for line in lines),
        f"    return {{{', '.join(there for _, _, there in results)}}};",
        "}",
    ]
    call = [f"const Exact{stage} found = exact{stage}({', '.join(there for _, _, there in passed)});"]
    call += [f"{there} = found.{name};" for _, name, there in results]
    return function, call


_STRUCTS = {"r": "Row", "e": "Element"}


def _members(parameter: Parameter) -> dict[str, str]:
    """Return the C types of a parameter's members of the program that an element may read, by their names."""
    if parameter.is_number:
        return {parameter.name: "double"}
    integers = {f"{parameter.name}_{each}": "i64" for each in (*STRIDES, *STEPS)}
    divisors = {f"{parameter.name}_{each}": "Divisor" for each in DIVISORS}
    return {parameter.name: f"const {stored_type(parameter.dtype)}*", **integers, **divisors}
