"""Emit the functions that the templates call for the elements of a stage: how they are loaded, computed and stored."""

from __future__ import annotations

from collections.abc import Sequence

from .c_types import stored_type
from .expressions import Body, rounded_in_pairs
from .form import Form
from .held import take_functions, tile_functions
from .outlined import outlined
from .parameters import COLUMN, FULL, Parameter
from .program import Program


def element_functions(
    program: Program,
    form: Form,
    stage: int,
    fast: Body,
    exact: Body | None,
    writes: Sequence[Parameter],
    outlines: bool = True,
) -> list[str]:
    """Wrap the statements for one element in functions for packs of V elements, as lines.

    Parameters
    ----------
    program : Program
    form : Form
    stage : int
    fast : Body
        Evaluates guards optimistically; `element` returns the sum of its checks, which is finite only if all are, as is
        that of `row_check`.
    exact : Body or None
        Evaluates guards as written; None where there are none.
    writes : sequence of Parameter
        The stage's full results.
    outlines : bool
        Whether a function that is not inlined has the exact statements.
    """
    tile, read = _tiles(program, form, fast, exact)
    at = f"At<{stage}>"
    signature = (
        f"({at}, const Tile{stage}<V>& tile, int j, i64 row, i64 col, const Row& r, Element& e, "
        f"Out{stage}<V>& out) const {{"
    )
    lines = [
        *_tile_and_out(form, stage, tile, writes),
        *_loads(form, stage, read),
        "template <int V>",
        f"__device__ auto element{signature}",
        *(f"    {line}" for line in fast.lines),
        f"    return {' + '.join(fast.checks) or '0.0f'};",
        "}",
        f"__device__ auto row_check({at}, const Row& r) const",
        f"{{ return {' + '.join(fast.row_checks) or '0.0f'}; }}",
    ]
    if stage == 0 and form.one_tile:
        lines += tile_functions(tile, form.packed)
    if form.shared:
        lines += take_functions(stage, read, form.columns)
    if exact is not None:
        body = exact.lines
        if outlines and not any("repair_" in line for line in body):  # those are members of the struct
            function, body = outlined(stage, body, exact.tile_parameters, list(writes), program.parameters)
            lines += function
        lines += ["template <int V>", f"__device__ void exact_element{signature}", *(f"    {x}" for x in body), "}"]
    return lines


def store_function(stage: int, writes: Sequence[Parameter]) -> list[str]:
    """Emit the function that stores a stage's full results, as lines."""
    stores = " ".join(f"store_global<V>({p.pack_address()}, rounded<V>(out.{p.name}));" for p in writes)
    head = f"__device__ void store(At<{stage}>, i64 row, i64 col, const Out{stage}<V>& out) const"
    return ["template <int V>", f"{head} {{ {stores} }}"]


def _tiles(program: Program, form: Form, fast: Body, exact: Body | None) -> tuple[list[Parameter], list[Parameter]]:
    """Return the inputs that a stage's tile holds, and those of them that the stage loads."""
    tile = list(dict.fromkeys([*fast.tile_parameters, *(exact.tile_parameters if exact else [])]))
    read = [p for p in tile if p.node is not program.product]
    if form.one_tile:  # per-column inputs are loaded by each, or once for all
        tile = [p for p in program.read_by_rows if p.extent in (FULL, COLUMN)]
        read = [p for p in tile if p.extent == FULL or p in read]
    return tile, read


def _tile_and_out(form: Form, stage: int, tile: Sequence[Parameter], writes: Sequence[Parameter]) -> list[str]:
    """Emit the types of what a stage reads and of what it writes, and functions that make them, as lines."""
    fields = [f"Pack<{stored_type(p.dtype)}, V> {p.name};" for p in tile]
    kinds = {p: "Unrounded" if rounded_in_pairs(p) else "Pack" for p in writes}
    outs = [f"{kind}<{stored_type(p.dtype)}, V> {p.name};" for p, kind in kinds.items()]
    return [
        (
            f"template <int V> using Tile{stage} = Tile0<V>;"
            if form.one_tile and stage > 0
            else f"template <int V> struct Tile{stage} {{ {' '.join(fields)} }};"
        ),
        f"template <int V> struct Out{stage} {{ {' '.join(outs)} }};",
        "template <int V>",
        f"__device__ Out{stage}<V> out(At<{stage}>) const {{ Out{stage}<V> o; return o; }}",
        "template <int V>",
        f"__device__ Tile{stage}<V> tile(At<{stage}>) const {{ Tile{stage}<V> t; return t; }}",
    ]


def _loads(form: Form, stage: int, read: Sequence[Parameter]) -> list[str]:
    """Emit the functions that load a pack of rows, the first time and again, and one of columns, as lines."""
    full = [p for p in read if p.extent == FULL]
    of_rows = "load_between" if form.apart else "load_pack"
    of_columns = "load_each" if form.shifted else "load_pack"
    again = " ".join(f"t.{p.name} = {p.pack(f'{of_rows}<V>({p.pack_address()})')};" for p in full)
    first = " ".join(_load_evicted_last(p) for p in full) if form.evict_last else again
    of_column = [p for p in read if p.extent == COLUMN]
    columns = " ".join(f"t.{p.name} = {p.pack(f'{of_columns}<V>({p.pack_address()})')};" for p in of_column)
    return [
        "template <int V>",
        f"__device__ void load(At<{stage}>, i64 row, i64 col, Tile{stage}<V>& t) const {{ {first} }}",
        "template <int V>",
        f"__device__ void load_again(At<{stage}>, i64 row, i64 col, Tile{stage}<V>& t) const {{ {again} }}",
        "template <int V>",
        f"__device__ void load_columns(At<{stage}>, i64 col, Tile{stage}<V>& t) const {{ {columns} }}",
    ]


def _load_evicted_last(parameter: Parameter) -> str:
    """Emit the load of a full input: whole packs of 16 bytes are evicted last, single elements as others are."""
    whole = f"V * sizeof({stored_type(parameter.dtype)}) == 16"
    target, address = f"t.{parameter.name}", parameter.pack_address()
    first, other = (parameter.pack(f"{load}<V>({address})") for load in ("load_evict_last", "load_pack"))
    return f"if constexpr ({whole}) {target} = {first}; else {target} = {other};"
