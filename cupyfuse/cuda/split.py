"""Kernels of float32 products on fp16 tensor cores, from operands split into two parts, hi and lo, or into one.

`split_rows.cu` splits a row-major operand and `split_columns.cu` a column-major one. Operands in two parts are
multiplied by `split_gemm.cu` on Hopper, and `split_repair.cu` recomputes what fp16 cannot hold; a pointwise row program
that follows is the epilogue of both. Operands in one part are multiplied by `gemm.cu` (`fused_gemm.py`), whose epilogue
undoes the scales, or by cuBLAS, and then `split_finish.cu` writes the factors that undo them, or repairs the product.
"""

from __future__ import annotations

from functools import lru_cache

from .. import devices
from ..ir import graph as g
from ..ir.graph import Node, Shape
from ..plan.schedule import Step, store_step
from ..plan.schedule.split_tiles import TILE_ROWS, tile_width
from .config import Config
from .emit import Writer
from .kernel import CONDITION, Kernel, translation_unit
from .program import Program
from .warpgroup import ARCHITECTURE, SHARED_BYTES, is_unrolled, write_multiply_add

WARPS_A_TILE = 8
GEMM_THREADS = 384
REPAIR_THREADS = 256
FINISH_THREADS = 256
# Of split_rows: the most threads that have a row, and those of a block of rows of a warp each; the pieces of 8 elements
# that each holds; the threads that find room on a multiprocessor.
_ROW_THREADS, _ROW_HELD, ROW_ROOM = 256, 4, 1024
_COLUMN_WARPS, _COLUMN_AHEAD, _COLUMN_DEPTH = 16, 32, 32  # of split_columns
_CHUNKS = (32, 24)  # columns of a tile that an epilogue works on at once
_SPLIT_MEMBERS = "const float* x; i64 stride; char* tiles; float* inverse; i64 rows; i64 cols;"
_SPLIT_ARGUMENTS = "p.x, p.stride, p.tiles, p.inverse, p.rows, p.cols"


def stages_for(width: int) -> int:
    """Return the pipeline stages of a product in tiles of `width` columns: up to 5, as shared memory allows."""
    return min(5, next(s for s in range(8, 0, -1) if _shared_bytes(width, s) <= SHARED_BYTES))


def _shared_bytes(width: int, stages: int) -> int:
    return 1023 + stages * ((TILE_ROWS + width) * 256 + 16 + 4) + 16 + 4 * (1 + width)


def padded(cols: int) -> int:
    """Return the columns of a split matrix, with padding."""
    return -(-cols // 64) * 64


def inverse_at(rows: int, cols: int, parts: int = 2) -> int:
    """Return the byte offset of a split matrix's inverse row scales, which follow its elements."""
    return -(-rows // 8) * 8 * padded(cols) * parts * 2


@lru_cache
def split_rows_kernel(conditional: bool = False, parts: int = 2, team: int = _ROW_THREADS) -> Kernel:
    """Return the kernel that splits a row-major matrix; a conditional one does nothing where its flag is 0.

    `team` threads have a row, see `row_team`.
    """
    threads = _ROW_THREADS if team == 32 else team
    call = f"split_rows<{team}, {threads // team}, {_ROW_HELD}, {parts}>({_SPLIT_ARGUMENTS})"
    blocks = ROW_ROOM // threads
    return _kernel("split_rows", _SPLIT_MEMBERS, call, threads, blocks=blocks, conditional=conditional)


def row_team(cols: int) -> int:
    """Choose the threads that split a row: as many as hold it, a warp at least and a block at most."""
    team = 32
    while team < _ROW_THREADS and 8 * _ROW_HELD * team < cols:
        team *= 2
    return team


@lru_cache
def split_columns_kernel(conditional: bool = False, parts: int = 2, cluster: int = 1, held: bool = False) -> Kernel:
    """Return the kernel that splits a column-major matrix; a conditional one does nothing where its flag is 0.

    The blocks of a cluster share the columns, which they keep in shared memory if `held`, see `holds_columns`.
    """
    sizes = f"{_COLUMN_WARPS}, {_COLUMN_AHEAD}, {_COLUMN_DEPTH}, {parts}, {cluster}, {str(held).lower()}"
    call = f"split_columns<{sizes}>({_SPLIT_ARGUMENTS})"
    threads, shared = 32 * _COLUMN_WARPS, 4096 * parts * _COLUMN_WARPS
    arch = ARCHITECTURE if cluster > 1 else ""
    return _kernel(
        "split_columns",
        _SPLIT_MEMBERS,
        call,
        threads,
        arch=arch,
        shared=shared,
        conditional=conditional,
        cluster=cluster,
    )


def column_cluster(rows: int, cols: int, parts: int, processors: int) -> int:
    """Choose the blocks that split 32 rows of a column-major matrix: as many as find a multiprocessor, and columns.

    GPUs before Hopper, which split in one part, have no clusters.
    """
    cluster, most = 1, 8 if parts == 2 else 1
    while cluster < most and -(-rows // 32) * 2 * cluster <= processors and cols > 64 * cluster:
        cluster *= 2
    return cluster


def holds_columns(cols: int, cluster: int, parts: int) -> bool:
    """Whether the blocks that split 32 rows of a column-major matrix keep its elements in shared memory.

    They take the room of two parts, 128 KB. GPUs before Hopper, which split in one part, may have 99 KB.
    """
    return parts == 2 and cols <= 64 * _COLUMN_WARPS * cluster


def plain_program(shape: Shape) -> Program:
    """Return the epilogue that stores a product of this shape."""
    product = g.argument(0, "product", shape, "float32")
    return Program(store_step(product), {product: "float32"}, product)


def product_kernels(program: Program, width: int, vec: int) -> tuple[Kernel, Kernel]:
    """Emit the kernels that multiply operands split in two parts, and repair the product.

    Parameters
    ----------
    program : Program
        The epilogue, which has one stage and no reductions.
    width : int
        Columns of a tile.
    vec : int
        Elements per access of the epilogue, 1 or 2.
    """
    stages = stages_for(width)
    shared = _shared_bytes(width, stages)
    chunk = next(c for c in _CHUNKS if width % c == 0)
    unroll = width // chunk if is_unrolled(program.step) else 1
    writer = _EpilogueWriter(program)
    struct = f"// the product and: {', '.join(program.step.fused) or 'nothing'}\n{writer.emit_struct()}"
    check = f'static_assert(SplitGemm<{width}, {stages}>::shared == {shared}, "what a launch asks for");'
    source = translation_unit(
        *("split_gemm", f"{write_multiply_add(width)}\n{check}\n\n{struct}", "split_gemm_kernel"),
        f"split_gemm<{width}, {stages}, {vec}, {chunk}, {unroll}>(p)",
        GEMM_THREADS,
        by_address=True,
        follows=True,
    )
    config, parameters = Config("split_gemm", GEMM_THREADS, 1, vec), tuple(program.parameters)
    gemm = Kernel("split_gemm_kernel", source, parameters, config, ARCHITECTURE, shared)
    source = translation_unit(
        "split_repair", struct, "split_repair_kernel", "split_repair(p)", REPAIR_THREADS, by_address=True
    )
    config = Config("split_repair", REPAIR_THREADS, 1, 1)
    return gemm, Kernel("split_repair_kernel", source, parameters, config)


class _EpilogueWriter(Writer):
    """Writes the struct of an epilogue, which has more members than a row program's: see `split_gemm.cu`."""

    outlines = False  # the templates have such a function, of several elements

    def declare_members(self) -> list[str]:
        own = "const char* tiles_a; const char* tiles_b; Matrix a; Matrix b; i64 depth; u32* flags; i64 width;"
        return [own, *super().declare_members()]


@lru_cache
def finish_kernel() -> Kernel:
    """Return the kernel that writes the factors of a product of operands in one part, or repairs the product."""
    members = "Matrix a; Matrix b; float* c; i64 cols; Factors factors;"
    return _kernel("split_finish", members, "split_finish(p.a, p.b, p.c, p.cols, p.factors)", FINISH_THREADS)


def product_kernels_of(step: Step, storage: dict[Node, str]) -> tuple[Kernel, Kernel]:
    """Emit the kernels of the product of a step for the default GPU, its epilogue reading pairs if columns allow it."""
    width = tile_width(*step.product.shape, devices.find(devices.DEFAULT).processors)
    return product_kernels(program_of(step, storage), width, 2 if step.product.shape[1] % 2 == 0 else 1)


def program_of(step: Step, storage: dict[Node, str]) -> Program:
    """Analyse the epilogue of a product's step; without one it stores the product."""
    return Program(step.epilogue or store_step(step.product), storage, step.product)


def kernels_of(node: Node) -> list[Kernel]:
    """Return the kernels of a split, or those that follow cuBLAS's product of operands in one part."""
    processors = devices.find(devices.DEFAULT).processors
    if node.op == "split" and not node.by_columns:
        return [split_rows_kernel(parts=node.parts, team=row_team(node.inputs[0].shape[1]))]
    if node.op == "split":
        rows, cols = node.inputs[0].shape
        cluster = column_cluster(rows, cols, node.parts, processors)
        return [split_columns_kernel(False, node.parts, cluster, holds_columns(cols, cluster, node.parts))]
    return [finish_kernel()]


def _kernel(
    name: str,
    members: str,
    call: str,
    threads: int,
    arch: str = "",
    shared: int = 0,
    blocks: int = 1,
    conditional: bool = False,
    cluster: int = 1,
) -> Kernel:
    """Make the kernel `<name>_kernel` from the template `<name>.cu`, the members of its struct and its call."""
    members += f" {CONDITION}" * conditional
    entry = f"{name}_kernel"
    source = translation_unit(
        name, f"struct Program {{ {members} }};", entry, call, threads, blocks, conditional, cluster
    )
    return Kernel(entry, source, (), Config(name, threads, 1, 1), arch, shared, cluster)
