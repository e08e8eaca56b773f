"""What products by Hopper's tensor cores share: the wgmma instruction, and how their epilogues take accumulators.

The instruction's text depends on the tile: it names every accumulator. Accumulators are registers, which
cannot be indexed: a loop over chunks of them copies each chunk first.
"""

from __future__ import annotations

from ..ir import graph as g
from ..plan.schedule import Step
from .c_types import stored_type

ARCHITECTURE = "90a"
SHARED_BYTES = 232448  # most shared memory of a block
# FLOPs of an epilogue's element, reductions aside: the code of more costs more to fetch than the copies that it saves.
# So does that of guards, even if it does not run.
_MOST_UNROLLED = 16


def is_unrolled(epilogue: Step) -> bool:
    """Whether each chunk of a tile's columns has code of its own, which copies no accumulators: of light epilogues."""
    flops = sum(g.flops(n) for n in epilogue.nodes if not n.reduction)
    rows, cols = epilogue.domain
    return flops <= _MOST_UNROLLED * rows * cols and all(n.op != "guard" for n in epilogue.nodes)


def write_multiply_add(width: int, dtype: str = "float16", transposed: tuple[bool, bool] = (False, False)) -> str:
    """Write the specialisation of `multiply_add` in `kernels_cu/tensor_cores.cuh` for tiles of `width` columns.

    Parameters
    ----------
    width : int
        A multiple of 8, up to 256.
    dtype : str
        Of the operands, float16 or bfloat16.
    transposed : tuple of bool
        Whether each operand is transposed in shared memory.
    """
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind}"
    left, right = map(int, transposed)
    parameters = f"{stored_type(dtype)}, {left}, {right}, {count}"
    return f"""\
#ifdef __CUDA_ARCH__
template <>
__device__ __forceinline__ void multiply_add<{parameters}>(float (&d)[{count}], u64 a, u64 b, int add) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{count + 2}, 0;\\n"
        "{instruction} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1, {left}, {right};\\n"
        "}}"
        : {operands}
        : "l"(a), "l"(b), "r"(add));
}}
#endif
"""
