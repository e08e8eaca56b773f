"""Float32 products from fp16 halves on Hopper's tensor cores: the kernels, and how operands lie in memory.

`split_rows.cu` splits an operand, `split_columns.cu` one that lies turned in memory, `split_gemm.cu` multiplies,
`split_repair.cu` computes what halves cannot hold. Their sources say how; here is what depends on the shape: the width
of the tiles, and with it the text of one instruction.
"""

from __future__ import annotations

from functools import lru_cache

from .. import devices
from ..ir.graph import Node
from ..plan.schedule.products import TILE_ROWS, tile_width
from .configure import Config
from .kernel import CONDITION, Kernel, translation_unit

ARCHITECTURE = "90a"
WARPS_A_TILE = 8
_SHARED_BYTES = 232448  # that a block can have
GEMM_THREADS = 384
SPLIT_THREADS, _SPLIT_HELD = 256, 4
_COLUMNS = 16, 32, 32  # warps, and how far lanes read ahead
REPAIR_THREADS = 256


def stages_for(width: int) -> int:
    """How many stages of both operands fit into shared memory, up to 5."""
    return min(5, next(s for s in range(8, 0, -1) if _shared_bytes(width, s) <= _SHARED_BYTES))


def _shared_bytes(width: int, stages: int) -> int:
    return 1023 + stages * ((TILE_ROWS + width) * 256 + 16)


def inverse_at(rows: int, cols: int) -> int:
    """Where the inverse scales are in the memory that holds the halves of a matrix, in bytes."""
    return -(-rows // 8) * 8 * (-(-cols // 64) * 64) * 4


# Sources ------------------------------------------------------------------------------------------------------------


@lru_cache
def split_kernel(conditional: bool = False) -> Kernel:
    """The kernel that splits the rows of a matrix; a conditional one does nothing where its flag is 0."""
    return _kernel(
        "split_rows",
        "const float* x; i64 stride; char* tiles; float* inverse; i64 rows; i64 cols;",
        f"split_rows<{SPLIT_THREADS}, 1, {_SPLIT_HELD}>(p.x, p.stride, p.tiles, p.inverse, p.rows, p.cols)",
        SPLIT_THREADS,
        conditional=conditional,
    )


@lru_cache
def split_columns_kernel(conditional: bool = False) -> Kernel:
    """The kernel that splits the rows of a matrix of which columns lie in memory; conditional like `split_kernel`."""
    return _kernel(
        "split_columns",
        "const float* x; i64 stride; char* tiles; float* inverse; i64 rows; i64 cols;",
        "split_columns<{}, {}, {}>(p.x, p.stride, p.tiles, p.inverse, p.rows, p.cols)".format(*_COLUMNS),
        32 * _COLUMNS[0],
        shared=8192 * _COLUMNS[0],
        conditional=conditional,
    )


@lru_cache
def gemm_kernel(width: int) -> Kernel:
    """The kernel that multiplies, in tiles of this width."""
    stages = stages_for(width)
    shared = _shared_bytes(width, stages)
    return _kernel(
        "split_gemm",
        "const char* a; const char* b; Target to; i64 k;",
        f"split_gemm<{width}, {stages}>(p.a, p.b, p.to, p.k)",
        GEMM_THREADS,
        instruction=_multiply_add(width),
        check=f'static_assert(SplitGemm<{width}, {stages}>::shared == {shared}, "what a launch asks for");',
        arch=ARCHITECTURE,
        shared=shared,
    )


@lru_cache
def repair_kernel() -> Kernel:
    """The kernel that computes the rows and columns that halves cannot hold."""
    return _kernel(
        "split_repair",
        "Matrix a; Matrix b; float* c; i64 cols; const u32* doubts; i64 width;",
        "split_repair(p.a, p.b, p.c, p.cols, p.doubts, p.width)",
        REPAIR_THREADS,
    )


def kernels_of(node: Node) -> list[Kernel]:
    """The kernels that compute a node, with tiles as they are on the default GPU."""
    if node.op == "halves":
        return [split_columns_kernel() if node.attrs.get("by_columns") else split_kernel()]
    return [gemm_kernel(tile_width(*node.shape, devices.find(devices.DEFAULT).processors)), repair_kernel()]


def _kernel(
    name: str,
    members: str,
    call: str,
    threads: int,
    instruction: str = "",
    check: str = "",
    arch: str = "",
    shared: int = 0,
    conditional: bool = False,
) -> Kernel:
    members += f" {CONDITION}" * conditional
    program = "\n".join([*([instruction, check, ""] if instruction else []), f"struct Program {{ {members} }};"])
    entry = f"{name}_kernel"
    source = translation_unit(name, program, entry, call, threads, conditional=conditional)
    return Kernel(entry, source, (), Config(name, threads, 1, 1), arch, shared)


def _multiply_add(width: int) -> str:
    """The product of a warpgroup for tiles of this many columns: one instruction that names every register."""
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.f16.f16"
    return f"""\
#ifdef __CUDA_ARCH__
template <>
__device__ __forceinline__ void multiply_add<{count}>(float (&d)[{count}], u64 a, u64 b, int add) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n"
        "}}"
        : {operands}
        : "l"(a), "l"(b), "r"(add));
}}
#endif
"""
