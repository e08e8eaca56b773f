"""The kernels, on the CPU and on a GPU: every template, dtype and kind of layout; right, and whatever the order of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, Case
from support import CUDA, HOST, Engine, assert_equal

import cupyfuse as cf
from cupyfuse.cuda import emit

ORDERS = 4  # in which threads take turns, two of each kind
FUSED: dict[Any, cf.Fused] = {}


def fused(case: Case) -> cf.Fused:
    return FUSED.setdefault(case.program, cf.fuse(case.program))


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels compiled together, which is quicker than one by one."""
    with HOST.active(), HOST.runtime.only_collecting():
        for case in CASES:
            fused(case)(*case.laid_out(HOST.xp))


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    if request.param is HOST:
        request.getfixturevalue("compiled")
    with request.param.active():
        yield request.param


def run(engine: Engine, case: Case) -> tuple[Any, ...]:
    results = engine.host(fused(case)(*case.laid_out(engine.xp)))
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(device: Engine, case: Case) -> None:
    first = run(device, case)
    case.check(first)
    for _ in range(ORDERS - 1):
        for again, before in zip(run(device, case), first, strict=True):
            assert_equal(again, before)


def test_the_cases_reach_every_template() -> None:
    reached = set()
    for case in CASES:
        plan = fused(case).plan(*[cf.spec(a.shape, str(a.dtype)) for a in case.arguments()])
        for step in plan.steps:
            if step.kind not in ("Gemm", "Copy"):
                kernels = emit.kernels_of(step, plan.scheduled.storage)
                reached |= {(k.name, "Pack<" in k.source and k.config.vec > 1) for k in kernels}
    names = {"row_lanes", "row_block", "row_persistent", "row_stream", "elementwise", "column_stats"}
    assert {name for name, _ in reached} == {f"{n}_kernel" for n in names} | {"column_merge_kernel"}
    assert {name for name, vectors in reached if vectors} >= {f"{n}_kernel" for n in names}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_further_apart_than_a_32_bit_offset_reaches(dtype: str) -> None:
    """Memory that is only reserved, not there: three rows, 2**31 + 64 elements from one to the next."""
    with HOST.active():
        whole = HOST.runtime.reserved(3, 2**31 + 64, dtype)
        y = whole[:, :70]
        y[...] = np.arange(210).reshape(3, 70) / 64
        expected = np.asarray(y, np.float64)
        total, tripled = cf.fuse(lambda y: (y.sum(axis=1), y * 3))(y)
        np.testing.assert_allclose(np.asarray(total, np.float64), expected.sum(axis=1), rtol=2e-3)
        np.testing.assert_allclose(np.asarray(tripled, np.float64), 3 * expected, rtol=2e-3)
        (down,) = cf.fuse(lambda y: (y.sum(axis=0),))(y)
        np.testing.assert_allclose(np.asarray(down, np.float64), expected.sum(axis=0), rtol=2e-3)
