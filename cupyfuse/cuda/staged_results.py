"""Results of 16-bit products, staged in shared memory: the panels of a warp, and what a struct has for them.

See `kernels_cu/gemm_results.cuh`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from .parameters import COLUMN, FULL, Parameter
from .program import Program

PANEL_ROWS = 16  # of a warp's part of a tile
_PANEL_LINE = 128  # bytes of a row of one result, at most: as the copy engine swizzles them
PANEL_ALIGNMENT = 128  # bytes: where the copy engine reads
_PANEL_BYTES = 4096  # of all results together, at most, where 16 columns take no more
CONSUMER_WARPS = 8  # of a block


def results_of(program: Program) -> list[Parameter]:
    """Return the full-size results of an epilogue, in the order of their tensor maps in its struct."""
    return [p for p in program.outputs.values() if p.extent == FULL]


def result_sizes(program: Program) -> list[int]:
    """Return the bytes of an element of each full-size result."""
    return [dtypes.ITEMSIZE[p.dtype] for p in results_of(program)]


def are_shifted(program: Program, row_strides: Sequence[int] = ()) -> bool:
    """Whether rows of results may begin at any element, rather than at multiples of 16 bytes behind the first.

    `row_strides` are those of the results: of pieces of matrices side by side that of the whole.
    """
    sizes = result_sizes(program)
    lengths = [*((program.domain[1], size) for size in sizes), *zip(row_strides, sizes, strict=False)]
    return any(length * size % 16 for length, size in lengths)


def widest_panel(sizes: list[int]) -> int:
    """Return the columns of panels of results with elements of so many bytes, up to 64."""
    fitting = min(_PANEL_LINE // max(sizes), _PANEL_BYTES // (PANEL_ROWS * sum(sizes)))
    return next(columns for columns in (64, 32, 16) if columns <= max(16, fitting))


def panels_bytes(panels: int, columns: int, staged: int) -> int:
    """Return the bytes of shared memory of a block whose warps have so many panels; elements take `staged` bytes."""
    return CONSUMER_WARPS * panels * PANEL_ROWS * columns * staged


def map_members(program: Program) -> str:
    """Return the declarations of the tensor maps of results."""
    return " ".join(f"TensorMap {p.name}_map;" for p in results_of(program))


def staging_functions(stage: int, writes: list[Parameter], mapped: bool) -> list[str]:
    """Emit functions that visit results, and where they go, with their first bytes in `staged`, as lines.

    If `mapped` the results have tensor maps.
    """
    sizes = [dtypes.ITEMSIZE[p.dtype] for p in writes]
    firsts = [f"At<{sum(sizes[:k])}>()" for k in range(len(writes))]
    pairs = list(zip(firsts, writes, strict=True))
    results = " ".join(f"visit({f}, rounded<V>(out.{p.name}), {p.name}, {p.name}_rows);" for f, p in pairs)
    maps = {p: f", {p.name}_map" if mapped else "" for p in writes}
    targets = " ".join(f"visit({f}, {p.name}, {p.name}_rows{maps[p]});" for f, p in pairs)
    return [
        f"static constexpr int staged = {sum(sizes)};",
        "template <int V, class Visit>",
        f"__device__ void results(At<{stage}>, const Out{stage}<V>& out, const Visit& visit) const {{ {results} }}",
        "template <class Visit>",
        f"__device__ void targets(At<{stage}>, const Visit& visit) const {{ {targets} }}",
    ]


def vectors_function(program: Program, stage: int) -> list[str]:
    """Emit a function that visits the inputs with an element for each column, as lines."""
    vectors = " ".join(f"visit({p.name});" for p in program.loaded.values() if p.extent == COLUMN)
    return ["template <class Visit>", f"__device__ void vectors(At<{stage}>, const Visit& visit) const {{ {vectors} }}"]
