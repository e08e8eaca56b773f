"""Emit where a row program holds rows as they were loaded, and values of columns, and how it copies and takes packs."""

from __future__ import annotations

from collections.abc import Sequence

from ..dtypes import ITEMSIZE
from .c_types import stored_type
from .parameters import COLUMN, FULL, Parameter
from .program import Program


def held_rows(program: Program) -> str:
    """Emit where packs of full inputs are held in shared memory, an array for each, and how they are copied.

    `Single` holds one element of each. `at_row` is the program with the addresses of a row, which loops would
    compute for each pack.
    """
    inputs = [(p.name, f"Pack<{stored_type(p.dtype)}, V>", p.pack_address()) for p in program.full_inputs]
    fields = " ".join(f"{kind}* {name};" for name, kind, _ in inputs)
    places = [f"h.{name} = held_from<{kind}>(memory, count, {address});" for name, kind, address in inputs]
    copies = " ".join(f"copy_pack<V>(to.{name}[at], {address});" for name, _, address in inputs)
    taken = " + ".join(f"count * int(sizeof({kind})) + 128" for _, kind, _ in inputs) or "0"
    full = [(p.name, p.row("row")) for p in program.parameters if p.extent == FULL]
    singles = " ".join(f"{kind.replace('V>', '1>')} {name};" for name, kind, _ in inputs)
    loads = " ".join(f"s.{p.name} = load_pack<1>({p.pack_address('1')});" for p in program.full_inputs)
    return "\n".join(
        [
            f"struct Single {{ {singles} }};",
            f"__device__ void hold(i64 row, i64 col, Single& s) const {{ {loads} }}",
            "template <int V>",
            f"__device__ static constexpr int held_bytes(int count) {{ return {taken}; }}",
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
            *(f"    p.{name} = computed_once({name} + {at} * {name}_rows); p.{name}_rows = 0;" for name, at in full),
            "    return p;",
            "}",
        ]
    )


def held_columns(program: Program, held: bool, shifted: bool) -> str:
    """Emit where packs of per-column inputs are held in shared memory, an array for each, if they are.

    Packs that begin between two in memory are copied element by element, once for many rows.
    """
    columns = [p for p in program.loaded.values() if p.extent == COLUMN] if held else []
    inputs = [(p.name, f"Pack<{stored_type(p.dtype)}, V>", p.pack_address()) for p in columns]
    fields = " ".join(f"{kind}* {name};" for name, kind, _ in inputs)
    places = [f"h.{name} = packs_from<{kind}>(memory, count);" for name, kind, _ in inputs]
    if shifted:
        copies = " ".join(f"to.{name}[at] = load_each<V>({address});" for name, _, address in inputs)
    else:
        copies = " ".join(f"copy_pack<V>(to.{name}[at], {address});" for name, _, address in inputs)
    return "\n".join(
        [
            f"static constexpr bool holds_columns = {str(bool(columns)).lower()};",
            f"template <int V> struct Columns {{ {fields} }};",
            "template <int V>",
            "__device__ static Columns<V> columns(char*& memory, int count) {",
            "    Columns<V> h;",
            *(f"    {place}" for place in places),
            "    return h;",
            "}",
            "template <int V>",
            f"__device__ void hold(i64 col, const Columns<V>& to, int at) const {{ {copies} }}",
        ]
    )


def take_functions(stage: int, read: Sequence[Parameter], columns: bool) -> list[str]:
    """Emit the functions that fill a stage's tile with what it reads, from held packs or from `Single`, as lines."""
    full = [p for p in read if p.extent == FULL]
    packs = " ".join(f"t.{p.name} = {p.pack(f'from.{p.name}[at]')};" for p in full)
    singles = " ".join(f"t.{p.name} = from.{p.name};" for p in full)
    held = [p for p in read if columns and p.extent == COLUMN]
    of_columns = " ".join(f"t.{p.name} = {p.pack(f'from.{p.name}[at]')};" for p in held)
    return [
        "template <int V>",
        f"__device__ void take(At<{stage}>, const Held<V>& from, int at, Tile{stage}<V>& t) const {{ {packs} }}",
        "template <int V>",
        f"__device__ void take(At<{stage}>, const Columns<V>& from, int at, Tile{stage}<V>& t) const",
        f"{{ {of_columns} }}",
        f"__device__ void take(At<{stage}>, const Single& from, Tile{stage}<1>& t) const {{ {singles} }}",
    ]


def tile_functions(tile: Sequence[Parameter], packed: bool) -> list[str]:
    """Emit, as lines, how a tile that all stages have is kept as it was loaded, and holds values of columns.

    Where values are computed once, those of wide elements may take their place as soon as the compiler likes.
    """
    rows = [p for p in tile if p.extent == FULL and (packed or ITEMSIZE[p.dtype] < ITEMSIZE["float32"])]
    columns = [p for p in tile if p.extent == COLUMN]
    kept = " ".join(f"keep_packed(t.{p.name});" for p in rows)
    loaded = " ".join(f"t.{p.name} = {p.pack(f'load_pack<V>({p.pack_address()})')};" for p in columns)
    taken = " ".join(f"to.{p.name} = from.{p.name};" for p in columns)
    return [
        "template <int V>",
        f"__device__ static void keep(Tile0<V>& t) {{ {kept} }}",
        "template <int V>",
        f"__device__ void hold_columns(i64 col, Tile0<V>& t) const {{ {loaded} }}",
        "template <int V>",
        f"__device__ static void take_columns(const Tile0<V>& from, Tile0<V>& to) {{ {taken} }}",
    ]
