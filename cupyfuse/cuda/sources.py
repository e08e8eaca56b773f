"""Emit the kernels of row and column steps, and the sources of whole plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..ir.graph import Node
from ..plan.plan import Plan
from ..plan.schedule import Step
from . import fused_gemm, split
from .configure import Config, default_config, fitting_vec
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
}


def emit_kernels(program: Program, config: Config, conditional: bool = False) -> tuple[Kernel, ...]:
    """Emit the kernels of a row or column step in launch order; a second one merges what blocks share."""
    kernels = [emit(program, config, conditional=conditional)]
    if config.shares > 1:
        kernels.append(emit(program, config, merge=True, conditional=conditional))
    return tuple(kernels)


def kernels_of(step: Step, storage: dict[Node, str], row_stride_bits: int | None = None) -> tuple[Kernel, ...]:
    """Emit the kernels of a row or column step in its default configuration; `row_stride_bits` as in `fitting_vec`."""
    program = Program(step, storage)
    return emit_kernels(program, default_config(program, fitting_vec(program, row_stride_bits)))


def plan_sources(plan: Plan, inline: bool) -> list[str]:
    """Return the sources of a plan's kernels in launch order, with a comment for each launch of a library."""
    finish: Callable[[str], str] = inlined if inline else str
    texts: list[str] = []
    for part in plan.parts:
        for step in part.steps:
            texts += _step_sources(step, part.scheduled.storage, finish)
    return texts


def _step_sources(step: Step, storage: dict[Node, str], finish: Callable[[str], str]) -> Iterator[str]:
    """Yield the source of each kernel of a step, or a comment for what a library launches."""
    if step.kind == "Library":
        yield f"// Library: {step.fused[0]}"
    elif step.epilogue is not None and step.product.op == "matmul":
        yield from (finish(k.source) for k in fused_gemm.kernels_of(step, storage))
    elif step.kind in ("Gemm", "Split", "Copy"):
        for node in (n for n in step.nodes if step.epilogue is None or n not in step.epilogue.nodes):
            if node.op in _LIBRARY_LAUNCHES:
                yield f"// {step.kind} over {step.domain[0]} x {step.domain[1]}: {_LIBRARY_LAUNCHES[node.op]}"
            elif node.op == "split_matmul" and node.parts == 2:
                yield from (finish(k.source) for k in split.product_kernels_of(step, storage))
            else:
                yield from (finish(k.source) for k in split.kernels_of(node))
    else:
        yield from (finish(k.source) for k in kernels_of(step, storage))
