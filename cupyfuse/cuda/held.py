"""Emit where a row program holds rows in shared memory as they were loaded, and how it copies and takes their packs."""

from __future__ import annotations

from collections.abc import Sequence

from .program import FULL, Parameter, Program, stored_type


def held_rows(program: Program) -> str:
    """Emit where packs of full inputs are held in shared memory, an array for each, and how they are copied.

    `Single` holds one element of each. `at_row` is the program with the addresses of a row, which loops would
    compute for each pack.
    """
    inputs = [(p.name, f"Pack<{stored_type(p.dtype)}, V>", p.element_address) for p in program.full_inputs]
    fields = " ".join(f"{kind}* {name};" for name, kind, _ in inputs)
    places = [f"h.{name} = held_from<{kind}>(memory, count, {address});" for name, kind, address in inputs]
    copies = " ".join(f"copy_pack<V>(to.{name}[at], {address});" for name, _, address in inputs)
    full = [p.name for p in program.parameters if p.extent == FULL]
    singles = " ".join(f"{kind.replace('V>', '1>')} {name};" for name, kind, _ in inputs)
    loads = " ".join(f"s.{name} = load_pack<1>({address});" for name, _, address in inputs)
    return "\n".join(
        [
            f"struct Single {{ {singles} }};",
            f"__device__ void hold(i64 row, i64 col, Single& s) const {{ {loads} }}",
            f"template <int V> struct Held {{ {fields} }};",
            "template <int V>",
            "__device__ Held<V> held(i64 row, i64 col, char* memory, int count) const {",
            "    Held<V> h;",
            *(f"    {place}" for place in places),
            "    return h;",
            "}",
            "template <int V>",
            f"__device__ void hold(i64 row, i64 col, const Held<V>& to, int at) const {{ {copies} }}",
            "__device__ Program at_row(i64 row) const {",
            "    Program p = *this;",
            *(f"    p.{name} = computed_once({name} + row * {name}_rows); p.{name}_rows = 0;" for name in full),
            "    return p;",
            "}",
        ]
    )


def take_functions(stage: int, read: Sequence[Parameter]) -> list[str]:
    """Emit the functions that fill a stage's tile with what it reads, from a held pack or from `Single`, as lines."""
    full = [p.name for p in read if p.extent == FULL]
    packs = " ".join(f"t.{name} = from.{name}[at];" for name in full)
    singles = " ".join(f"t.{name} = from.{name};" for name in full)
    return [
        "template <int V>",
        f"__device__ void take(At<{stage}>, const Held<V>& from, int at, Tile{stage}<V>& t) const {{ {packs} }}",
        f"__device__ void take(At<{stage}>, const Single& from, Tile{stage}<1>& t) const {{ {singles} }}",
    ]
