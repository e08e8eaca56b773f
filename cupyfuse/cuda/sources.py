"""The kernels of steps and plans, as text."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.graph import Node
from ..plan.plan import Plan
from ..plan.schedule import Step
from . import split
from .configure import default_config, fitting_vec
from .emit import emit
from .kernel import Kernel, inlined
from .program import Program


def kernels_of(step: Step, storage: dict[Node, str], aligned: int | None = None) -> list[Kernel]:
    """The kernels of a step in the configuration that is chosen for it."""
    program = Program(step, storage)
    config = default_config(program, fitting_vec(program, aligned))
    kernels = [emit(program, config)]
    if config.template == "column_stats" and config.shares > 1:
        kernels.append(emit(program, config, merge=True))
    return kernels


def plan_sources(plan: Plan, inline: bool = False) -> list[str]:
    """The sources of all kernels that a plan launches, in order; products of matrices are cuBLAS's."""
    finish: Callable[[str], str] = inlined if inline else str
    texts = []
    for step in plan.steps:
        if step.kind in ("Gemm", "Split", "Copy"):
            for node in step.nodes:
                if node.op in ("matmul", "copy"):
                    library = "cuBLAS gemmEx" if node.op == "matmul" else "a device copy"
                    texts.append(f"// {step.kind} over {step.domain[0]} x {step.domain[1]}: {library}")
                else:
                    texts += [finish(k.source) for k in split.kernels_of(node)]
        else:
            texts += [finish(k.source) for k in kernels_of(step, plan.scheduled.storage)]
    return texts
