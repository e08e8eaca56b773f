"""Products with epilogues compile for Hopper, for every cut of a product, and leave nothing in local memory.

Where a guard fails, a function is called, which may save a few registers there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import docs_script

import cupyfuse as cf
from cupyfuse import heads, settings
from cupyfuse.cuda import fused_gemm
from cupyfuse.cuda.compile import cubin
from cupyfuse.cuda.fused_gemm import GemmShape, emit_gemm, kernels_of, program_of, shape_of
from cupyfuse.cuda.program import Program
from cupyfuse.cuda.warpgroup import SHARED_BYTES
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import Tiles, tiles

M, K, N = 1024, 512, 4096
SAVED = 32  # bytes of a call


def loss_and_statistics(y: Any) -> Any:
    labels = np.array([(7 * k) % N for k in range(M)])
    log_p = cf.log_softmax(y, axis=1)
    entropy = -(cf.softmax(y, axis=1) * log_p).sum(axis=1)
    return cf.cross_entropy(y, labels), np.take_along_axis(log_p, labels[:, None], 1), entropy, y.argmax(axis=1)


TAILS: dict[str, Callable[..., Any]] = {
    "nothing": lambda x, w, b, r: x @ w.T,
    "bias, gelu": lambda x, w, b, r: cf.gelu(x @ w.T + b),
    "residual": lambda x, w, b, r: cf.gelu(x @ w.T + b) + r,
    "two results": lambda x, w, b, r: (cf.gelu(x @ w.T), (x @ w.T + b).astype("float32")),
    "logsumexp": lambda x, w, b, r: cf.logsumexp(x @ w.T + b, axis=1),
    "softmax": lambda x, w, b, r: cf.softmax(x @ w.T + b, axis=1),
    "variance": lambda x, w, b, r: (x @ w.T + b).var(axis=1),
    "four reductions": lambda x, w, b, r: (
        (x @ w.T).max(axis=1),
        (x @ w.T).min(axis=1),
        cf.relu(x @ w.T).sum(axis=1),
        cf.logsumexp(x @ w.T + b, axis=1),
    ),
    "loss and statistics": lambda x, w, b, r: loss_and_statistics(x @ w.T),
    "positions": lambda x, w, b, r: ((y := x @ w.T + b).argmax(axis=1), y.argmin(axis=1), cf.logsumexp(y, axis=1)),
}


def plans(dtype: str) -> Iterator[Plan]:
    x, w, b, r = (cf.spec(s, dtype) for s in ((M, K), (N, K), (N,), (M, N)))
    columns = {"running_mean": b, "running_var": b, "gamma": b, "beta": b, "scale": cf.spec(1, dtype)}
    with settings.epilogues("always"):
        for function in TAILS.values():
            yield cf.fuse(function).plan(x, w, b, r)
        yield cf.fuse(lambda x, w: x @ w).plan(x, cf.spec((K, N), dtype))
        yield cf.fuse(lambda x, w: x.T @ w).plan(cf.spec((K, M), dtype), cf.spec((K, N), dtype))
        yield heads.head_softmax.bind(weight=w, bias=b, **columns).plan(x)


def products(dtype: str, vec: int = 2) -> Iterator[tuple[Program, GemmShape]]:
    """The epilogue of each plan, and how its product is cut."""
    for plan in plans(dtype):
        step = plan.steps[0]
        if step.epilogue is not None:
            program = program_of(step, plan.scheduled.storage)
            yield program, shape_of(step, program, 132, vec)


registers = docs_script("registers")


def local_bytes(binary: bytes) -> int:
    """The stack frames of a binary's kernels, in which spilled registers are."""
    return int(registers.resources_of(binary).stack)


@pytest.mark.rotates
@pytest.mark.parametrize("cut", tiles._TILES, ids=lambda cut: f"{cut[0]}by{cut[1]}{'alternating' * cut[2]}")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_cut_compiles_without_spills(dtype: str, cut: tuple[int, int, bool]) -> None:
    """Every product of the widest cuts, and every third of the others, in one dtype or the other."""
    taken = [number for number in range(len(TAILS) + 3) if cut[0] == 256 or number % 3 == 0]
    for number, (program, shape) in enumerate(products(dtype)):
        if number in taken[dtype == "float16" :: 2]:
            kernels = emit_gemm(program, dataclasses.replace(shape, tiles=Tiles(*cut)))
            allowed = SAVED if any(n.op == "guard" for n in program.step.nodes) else 0
            assert max(local_bytes(cubin(k.source, f"sm_{k.arch}")) for k in kernels) <= allowed


@pytest.mark.rotates
@pytest.mark.parametrize("number", range(len(TAILS) + 3))
def test_elements_that_are_read_one_by_one(number: int) -> None:
    program, shape = list(products("bfloat16", vec=1))[number]
    kernel, *_ = emit_gemm(program, shape)
    assert local_bytes(cubin(kernel.source, f"sm_{kernel.arch}")) == 0


def test_a_kernel_that_spills_is_seen() -> None:
    program, shape = next(p for p in products("bfloat16") if len(p[0].accumulators(0)) > 3)
    kernel, *_ = emit_gemm(program, dataclasses.replace(shape, chunk=128))
    assert local_bytes(cubin(kernel.source, f"sm_{kernel.arch}")) > 0


def test_states_of_mixed_dtypes_fit_what_a_launch_allocates() -> None:
    """Compilation asserts it: 8 bytes between 4 and 4 are padded to 24."""
    x, w = cf.spec((M, K), "bfloat16"), cf.spec((N, K), "bfloat16")

    def sums(x: Any, w: Any) -> Any:
        y = x @ w.T
        return y.sum(axis=1), y.astype("float64").sum(axis=1), np.abs(y).sum(axis=1)

    with settings.epilogues("always"):
        plan = cf.fuse(sums).plan(x, w)
    step = plan.steps[0]
    assert step.epilogue is not None and len({n.dtype for n in step.epilogue.nodes if n.reduction}) > 1
    for kernel in kernels_of(step, plan.scheduled.storage):
        assert cubin(kernel.source, f"sm_{kernel.arch}")


def test_shared_memory_suffices_for_the_least_stages() -> None:
    """Of the tiles that each product takes, beside its panels."""
    found = [shape for _, shape in products("float16")]
    assert {shape.tiles.columns for shape in found} >= {128, 256}
    assert len(found) >= 11 and {shape.transposed for shape in found} >= {(False, False), (False, True), (True, True)}
    for shape in found:
        assert shape.stages >= fused_gemm._LEAST_STAGES[shape.tiles.columns] and shape.shared <= SHARED_BYTES


def test_a_launch_asks_for_what_the_kernel_needs() -> None:
    plan = next(plans("bfloat16"))
    (kernel,) = kernels_of(plan.steps[0], plan.scheduled.storage)
    assert kernel.cluster == 2 and "__cluster_dims__(2, 1, 1)" in kernel.source
    assert f"::shared == {kernel.shared}" in kernel.source
