"""Emit the kernels of row and column steps, and the sources of whole plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .. import devices
from ..ir.graph import Node
from ..plan.plan import Plan
from ..plan.schedule import Step
from . import fused_gemm, scan, split
from .config import Config, accesses
from .configure import default_config
from .emit import emit
from .kernel import Kernel, inlined
from .program import Program

# What launches operators that have no kernel of ours.
_LIBRARY_LAUNCHES = {
    "matmul": "cuBLAS gemmEx",
    "accumulate": "cuBLAS gemmEx",
    "batched_matmul": "cuBLAS gemmStridedBatchedEx",
    "copy": "a device copy",
    "strided": "a device copy",
    "put": "a device copy, and one to a part of it",
    "concat": "no launch, its pieces are written there",
}


def emit_kernels(program: Program, config: Config, conditional: bool = False) -> tuple[Kernel, ...]:
    """Emit the kernels of a row or column step in launch order; a second one merges what blocks share."""
    kernels = [emit(program, config, conditional=conditional)]
    if config.shares > 1:
        kernels.append(emit(program, config, merge=True, conditional=conditional))
    return tuple(kernels)


def kernels_of(
    step: Step, storage: dict[Node, str], row_stride_bits: int | None = None, clusters: bool = False
) -> tuple[Kernel, ...]:
    """Emit the kernels of a row or column step in its default configuration.

    `row_stride_bits` is as in `fitting_vec`; `clusters` tells whether the GPU has clusters of blocks.
    """
    program = Program(step, storage)
    strides = None if row_stride_bits is None else [program.domain[1], row_stride_bits]
    return emit_kernels(program, default_config(program, next(accesses(program, strides)), clusters))


def plan_sources(plan: Plan, inline: bool) -> list[str]:
    """Return the sources of a plan's kernels in launch order, with a comment for each launch of a library."""
    finish: Callable[[str], str] = inlined if inline else str
    texts: list[str] = []
    device = plan.settings.device or devices.find(devices.DEFAULT)
    for part in plan.parts:
        for step in part.steps:
            texts += _step_sources(step, part.scheduled.storage, finish, device.has_warpgroups)
    return texts


def _step_sources(step: Step, storage: dict[Node, str], finish: Callable[[str], str], clusters: bool) -> Iterator[str]:
    """Yield the source of each kernel of a step, or a comment for what a library launches."""
    if step.kind == "Library":
        yield f"// Library: {step.fused[0]}"
    elif step.kind == "Scan":
        yield from (finish(scan.kernel_of(node).source) for node in step.nodes)
    elif step.by_library:
        yield f"// {step.kind} over {step.domain[0]} x {step.domain[1]}: cuBLASLt matmul, its epilogue a bias"
    elif step.by_tiles:
        splits = [n for n in step.nodes if n.op == "split"]
        kernels = [*(k for n in splits for k in split.kernels_of(n)), *fused_gemm.kernels_of(step, storage)]
        yield from (finish(k.source) for k in kernels)
    elif step.kind in ("Gemm", "Split", "Copy"):
        for node in (n for n in step.nodes if step.epilogue is None or n not in step.epilogue.nodes):
            if node.op in _LIBRARY_LAUNCHES:
                yield f"// {step.kind} over {step.domain[0]} x {step.domain[1]}: {_LIBRARY_LAUNCHES[node.op]}"
            elif node.op == "split_matmul" and node.parts == 2:
                yield from (finish(k.source) for k in split.product_kernels_of(step, storage))
            else:
                yield from (finish(k.source) for k in split.kernels_of(node))
    else:
        yield from (finish(k.source) for k in kernels_of(step, storage, clusters=clusters))
