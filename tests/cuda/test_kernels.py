"""The kernels, on the CPU and on a GPU: every template, dtype and layout, whatever the order of the threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import CASES, Case
from support import CUDA, HOST, INF, NAN, Engine, assert_equal, chosen

import cupyfuse as cf
from cupyfuse.cuda import sources
from cupyfuse.plan.schedule import steps

# In which threads take turns, two of each kind; one where an address sanitizer runs, whose findings depend on indices.
ORDERS = int(os.environ.get("CUPYFUSE_ORDERS", "4"))
FUSED: dict[Any, cf.Fused] = {}


def fused(case: Case) -> cf.Fused:
    return FUSED.setdefault(case.program, cf.fuse(case.program))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of all selected cases compiled together, which is quicker than one by one."""
    with HOST.active(), HOST.runtime.only_collecting():
        for params in chosen(request.session, test_kernels):
            if params["device"] is HOST:
                fused(params["case"])(*params["case"].laid_out(HOST.xp))


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


@pytest.mark.rotates
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(device: Engine, case: Case) -> None:
    first = run(device, case)
    case.check(first)
    for _ in range(ORDERS - 1):
        for again, before in zip(run(device, case), first, strict=True):
            assert_equal(again, before)


# What is rounded, and to what: ties to even, overflow, subnormal numbers. NEAR_TIES are of float64 alone: what lies
# beside a tie by less than float32 can tell.
TIES = {
    "float16": [
        (1 + 2**-11, 1.0), (1 + 3 * 2**-11, 1 + 2**-9), (1 + 2**-11 + 2**-20, 1 + 2**-10), (65519.0, 65504.0),
        (65520.0, INF), (2.0**-25, 0.0), (1.5 * 2.0**-25, 2.0**-24), (3 * 2.0**-25, 2.0**-23), (INF, INF), (0.0, 0.0),
    ],
    "bfloat16": [
        (1 + 2**-8, 1.0), (1 + 3 * 2**-8, 1 + 2**-6), (1 + 2**-8 + 2**-20, 1 + 2**-7), (2.0**127, 2.0**127),
        ((2 - 2**-8) * 2.0**127, INF), ((2 - 2**-8 - 2**-20) * 2.0**127, (2 - 2**-7) * 2.0**127), (INF, INF),
    ],
}  # fmt: skip
NEAR_TIES = {
    "float16": [(1 + 2**-11 + 2**-40, 1 + 2**-10), (1 + 3 * 2**-11 - 2**-40, 1 + 2**-10), (65520 - 2**-20, 65504.0)],
    "bfloat16": [(1 + 2**-8 + 2**-40, 1 + 2**-7), (1 + 3 * 2**-8 - 2**-40, 1 + 2**-7)],
}


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_ties_of_conversions(device: Engine, source: str, target: str) -> None:
    pairs = TIES[target] + (NEAR_TIES[target] if source == "float64" else [])
    given, wanted = (np.array([p[i] for p in pairs]) for i in (0, 1))
    given, wanted = np.concatenate([given, -given, [NAN]]), np.concatenate([wanted, -wanted, [NAN]])
    convert = cf.fuse(lambda y: (y * 1.0).astype(target))
    result = device.host(convert(device.array(given.astype(source))))
    assert_equal(result.astype(np.float64), wanted)


def test_integers_of_two_widths_are_compared_as_the_wider(device: Engine) -> None:
    narrow = np.array([[0, 3, -1, 2**31 - 1, -(2**31)]], np.int32)
    wide = np.array([0, 1 << 32, 3, (1 << 32) + 3, -1, (1 << 32) - 1, 2**31 - 1, 2**31, -(2**31), -(1 << 32)])[:, None]
    equal = cf.fuse(lambda a, b: (a == b, b == a))
    for found in device.host(equal(device.array(narrow), device.array(wide))):
        assert_equal(found, narrow == wide)


def test_integers_that_became_unsigned_are_compared_beyond_32_bits(device: Engine) -> None:
    narrow = np.array([[0, 3, -1, -128]], np.int8)
    wide = np.concatenate([narrow.astype(np.uint32).astype(np.int64), narrow], axis=1).T

    def compare(a: Any, b: Any) -> Any:
        unsigned = a.astype("uint32")
        return unsigned == b, b == unsigned.astype("int64")

    for found in device.host(cf.fuse(compare)(device.array(narrow), device.array(wide))):
        assert_equal(found, narrow.astype(np.uint32) == wide)


def test_the_cases_reach_every_template() -> None:
    reached = set()
    for case in CASES:
        plan = fused(case).plan(*[cf.spec(a.shape, str(a.dtype)) for a in case.arguments()])
        for step in plan.steps:
            if step.kind not in ("Gemm", "Split", "Copy"):
                kernels = sources.kernels_of(step, plan.scheduled.storage, clusters=True)
                reached |= {(k.name, "Pack<" in k.source and k.config.vec > 1) for k in kernels}
    names = {"row_lanes", "row_block", "row_shared", "row_shares", "row_stream", "elementwise", "column_stats"}
    assert {name for name, _ in reached} == {f"{n}_kernel" for n in (*names, "column_merge", "row_merge")}
    assert {name for name, vectors in reached if vectors} >= {f"{n}_kernel" for n in names}


@pytest.mark.parametrize(("cols", "strip"), [(4096, 64), (8192, 64), (11008, 32), (12608, 32), (16384, 64)])
def test_multiprocessors_have_as_many_strips_of_columns(cols: int, strip: int) -> None:
    """Not one each and a second one for some."""
    plan = cf.fuse(lambda y: (y.mean(axis=0), y.var(axis=0))).plan(cf.spec((4096, cols), "float32"))
    first, *_ = sources.kernels_of(plan.steps[0], plan.scheduled.storage)
    assert first.config.template == "column_stats" and first.config.group == strip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sums_down_columns_lose_no_more_than_their_last_digits(device: Engine, dtype: str) -> None:
    """Not with the rows: one after the other, sums of so many random numbers lose four digits of the last place."""
    x = np.random.default_rng(5).standard_normal((40_000, 32)).astype(dtype)
    found = device.host(cf.fuse(lambda x: x.astype(np.float32).sum(axis=0))(device.xp.asarray(x)))
    expected = x.astype(np.float64).sum(axis=0)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 2 * 2.0**-24, error


def test_sums_beside_other_reductions_lose_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block has all rows of a strip, in which a lane adds up 312 of them."""
    monkeypatch.setattr(steps, "_ENOUGH_STRIPS", 1)
    x = np.random.default_rng(5).standard_normal((40_000, 16)).astype(np.float32)
    with HOST.active():
        found, _, variance = map(np.asarray, cf.fuse(lambda x: (x.sum(0), x.max(0), x.var(0)))(HOST.array(x)))
    wide = x.astype(np.float64)
    for got, expected in ((found, wide.sum(axis=0)), (variance, wide.var(axis=0))):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 2 * 2.0**-24, error


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
