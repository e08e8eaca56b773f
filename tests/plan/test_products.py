"""How products run: which take halves and why, and that chains on top of them give what float64 gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from support import CUDA, HEADS, HOST, Engine, Head

import cupyfuse as cf
from cupyfuse import devices
from cupyfuse.plan.schedule import products

H200 = devices.DEVICES["H200"]
F32 = np.float32


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that takes halves for every product of float32, however small."""
    chosen: Engine = request.param
    chosen.require()
    monkeypatch.setattr(products, "LEAST_DEPTH", 1)
    monkeypatch.setattr(products, "split_time", lambda *_: 0.0)
    if chosen is HOST:
        monkeypatch.setattr(chosen.runtime, "device", H200)
    with chosen.active():
        if chosen is CUDA and not _device(chosen).split:
            pytest.skip("needs a GPU with Hopper's tensor cores")
        yield chosen


def _device(engine: Engine) -> Any:
    from cupyfuse.cuda.runtime import on_device

    return on_device(0).device or devices.DEVICES["T4"]


def close(actual: Any, expected: Any, scale: float = 1.0) -> None:
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("shape", [(5, 70, 9), (33, 130, 100)])
@pytest.mark.parametrize("head", [h for h in HEADS if h.name != "head_sum"], ids=lambda h: h.name)
def test_heads_on_halves(engine: Engine, head: Head, shape: Any, bound: bool, rng: np.random.Generator) -> None:
    given = head.arguments(rng, *shape)
    expected = head.plain(*(a.astype(np.float64) for a in given))
    arguments = engine.arrays(given)
    fused: Any = cf.fuse(head.function)
    if bound:
        names = list(fused.signature.parameters)
        fixed = {n: a for n, a in zip(names, arguments, strict=False) if n in head.bound}
        fused = fused.bind(**fixed)
        arguments = [a for n, a in zip(names, arguments, strict=False) if n not in fixed]
    plan = fused.plan(*arguments)
    assert plan.steps[0].fused == (("split",) if bound else ("split", "split")) + ("matmul",)
    assert plan.steps[0].launches == 4 - bound and "hi/lo split on tensor cores" in plan.steps[0].how
    assert plan.prepare is None or not bound or "split" in plan.prepare.steps[-1].fused
    close(engine.host(fused(*arguments)), expected)


def test_refreshed_weights_are_split_again(engine: Engine, rng: np.random.Generator) -> None:
    x, weight = engine.arrays(rng.standard_normal(s).astype(F32) for s in ((6, 80), (10, 80)))
    serve = cf.fuse(lambda x, weight: x @ weight.T).bind(weight=weight)
    before = engine.host(serve(x))
    weight *= 2
    assert (engine.host(serve(x)) == before).all(), "halves are kept until they are refreshed"
    serve.refresh()
    assert (engine.host(serve(x)) == 2 * before).all()


def test_without_kept_halves_weights_are_split_in_the_call(engine: Engine, rng: np.random.Generator) -> None:
    x, weight = engine.arrays(rng.standard_normal(s).astype(F32) for s in ((6, 80), (10, 80)))
    kept = cf.fuse(lambda x, weight: x @ weight.T).bind(weight=weight)
    serve = cf.fuse(lambda x, weight: x @ weight.T, keep_halves=False).bind(weight=weight)
    assert serve.plan(x).prepare is None and serve.plan(x).steps[0].fused == ("split", "split", "matmul")
    assert (engine.host(serve(x)) == engine.host(kept(x))).all()
    weight *= 2
    assert (engine.host(serve(x)) == 2 * engine.host(kept(x))).all(), "nothing to refresh"


CHAINS = [
    (lambda x, w: x @ w, (7, 70), (70, 12)),  # the second operand transposed, by a copy
    (lambda x, w: (x * 2 + 1) @ w.T, (7, 70), (12, 70)),  # an operand that is computed
    (lambda x, w: (x @ w.T) @ w, (7, 70), (12, 70)),  # a product of a product
    (lambda x, w: (x @ x.T, x @ w.T), (7, 70), (12, 70)),  # halves that two products share
    (lambda x, w: cf.softmax(x @ w.T - (x @ w.T).max(axis=0), axis=1), (7, 70), (12, 70)),
    (lambda x, w: (x.T @ x) @ w.T, (7, 70), (12, 70)),
]


@pytest.mark.rotates
@pytest.mark.parametrize("layout", ["contiguous", "fortran", "row_gap", "column_gap", "offset", "reversed"])
@pytest.mark.parametrize("number", range(len(CHAINS)))
def test_operands_of_every_kind(engine: Engine, number: int, layout: str, rng: np.random.Generator) -> None:
    chain, *shapes = CHAINS[number]
    values = [rng.standard_normal(s).astype(F32) for s in shapes]
    fused = cf.fuse(chain)
    results, expected = (
        fused(*(engine.array(v, layout) for v in values)),
        chain(*(v.astype(np.float64) for v in values)),
    )
    pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    for result, value in pairs:
        close(engine.host(result), value, scale=float(np.abs(value).max()))


def test_blocks_of_rows_share_the_halves_of_weights(engine: Engine, rng: np.random.Generator) -> None:
    x, w = engine.arrays(rng.standard_normal(s).astype(F32) for s in ((50, 70), (60, 70)))
    whole, blocks = (cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1), max_workspace=n) for n in (1 << 20, 12000))
    plan = blocks.plan(x, w)
    assert plan.blocks is not None and plan.blocks.common is not None
    assert [s.fused for s in plan.blocks.common.steps] == [("split",)]
    assert (engine.host(blocks(x, w)) == engine.host(whole(x, w))).all(), "rows do not depend on each other"


def test_special_values_go_through_chains(engine: Engine, rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (12, 70)))
    x[1, 3], x[2, 4], x[3], x[4, 5], x[5, 5] = np.inf, np.nan, 0, np.finfo(F32).max, 1e-40
    w[2, 9], w[3] = 1e-37, 0

    def tail(y: Any) -> Any:
        return y, cf.logsumexp(y, axis=1), cf.softmax(y, axis=1)

    with np.errstate(all="ignore"):
        expected = tail((x.astype(np.float64) @ w.astype(np.float64).T).astype(F32).astype(np.float64))
    for result, value in zip(cf.fuse(lambda x, w: tail(x @ w.T))(*engine.arrays((x, w))), expected, strict=True):
        np.testing.assert_allclose(engine.host(result), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["highest", "ieee"])
def test_a_product_may_replace_its_operand(engine: Engine, precision: str, rng: np.random.Generator) -> None:
    """It is read until the last element is written, by repairs among others."""

    def square(x: Any, w: Any) -> Any:
        x[...] = x @ w.T
        return w.sum(axis=1)

    x, w = (rng.standard_normal((140, 140)).astype(F32) for _ in range(2))
    x[17, 4], x[130, 9] = np.inf, 1e-33
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
    there = engine.array(x)
    cf.fuse(square, precision=precision)(there, engine.array(w))
    np.testing.assert_allclose(engine.host(there), expected, rtol=1e-4, atol=1e-4)


PARTS = 10


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_shapes_and_values_on_a_gpu(engine: Engine, part: int) -> None:
    """As accurate as cuBLAS's float32, or as halves and the rounding of a short sum allow."""
    if engine is not CUDA:
        pytest.skip("needs a GPU: thousands of products")
    import cupy as cp

    rng = np.random.default_rng(part if settings().derandomize else random.randrange(2**32))
    fast, plain = (cf.fuse(lambda x, w: x @ w.T, precision=p) for p in ("highest", "ieee"))
    edges = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 168, 169, 255, 256, 257, 500, 1000, 1023)
    for _ in range(settings().max_examples // 2 // PARTS):
        m, n = (int(rng.choice(edges)) for _ in range(2))
        k = int(rng.choice([*edges, 2048, 4099]))
        x, w = (_drawn(cp, rng, rows, k) for rows in (m, n))
        got, reference = fast(x, w), plain(x, w)
        # NumPy converts subnormal numbers too.
        a, b = (cp.asarray(cp.asnumpy(v).astype(np.float64)) for v in (x, w))
        exact, size = a @ b.T, cp.abs(a) @ cp.abs(b).T
        special = ~cp.isfinite(size)  # an operand is infinite or NaN
        assert bool((cp.isnan(got) == cp.isnan(reference))[special].all()), (m, n, k)
        assert bool((cp.isinf(got) == cp.isinf(reference))[special].all()), (m, n, k)
        # Where sums may pass float32's largest number, the order decides; tiny ones have fewer digits.
        counts = (size < 1e38) & (size > 1e-30)
        ratios = [float(cp.where(counts, cp.abs(y - exact) / size, 0).max()) for y in (got, reference)]
        # Both operands and what they leave out; sums of 64, cut off in four steps; sums of those.
        bound = 3 * 2.0**-22 + 4 * 2.0**-23 + 2 * (k / 64) ** 0.5 * 2.0**-24
        assert ratios[0] <= max(ratios[1], bound), (m, n, k, ratios)
        assert bool(cp.isfinite(got[counts]).all()) and bool((got[size == 0] == 0).all()), (m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1024, 1024, 1024), (512, 4096, 512), (4096, 512, 600), (128, 8192, 2048), (2048, 2048, 4096), (300, 5000, 16384)],
)
def test_where_halves_are_chosen_they_are_no_less_accurate(m: int, n: int, k: int, positive: bool) -> None:
    CUDA.require()
    import cupy as cp

    rng = cp.random.default_rng(m + n + k)
    x, w = (rng.standard_normal(s, dtype=cp.float32) for s in ((m, k), (n, k)))
    x, w = (cp.abs(x), cp.abs(w)) if positive else (x, w)
    fused = cf.fuse(lambda x, w: x @ w.T).bind(w=w)
    if "hi/lo split on tensor cores" not in fused.plan(x).steps[0].how:
        pytest.skip("needs a GPU with Hopper's tensor cores")
    a, b = x.astype(cp.float64), w.astype(cp.float64)
    exact, size = a @ b.T, cp.abs(a) @ cp.abs(b).T
    errors = [float((cp.abs(y - exact) / size).max()) for y in (fused(x), cp.matmul(x, w.T))]
    assert errors[0] <= errors[1]


def _drawn(cp: Any, rng: np.random.Generator, rows: int, cols: int) -> Any:
    values = rng.standard_normal((rows, cols))
    kind = rng.integers(6)
    if kind == 1:
        values = np.abs(values)
    elif kind == 2:
        values *= 2.0 ** rng.integers(-40, 40, (rows, 1))
    elif kind == 3:
        values *= 2.0 ** rng.integers(-14, 14, (rows, cols))
    elif kind == 4:
        values = np.where(rng.random((rows, cols)) < 0.01, rng.choice([0.0, 1e-30, 1e30], (rows, cols)), values)
    elif kind == 5:
        special = rng.choice([np.inf, -np.inf, np.nan, 0.0, 1e-41], (rows, cols))
        values = np.where(rng.random((rows, cols)) < 1 / (rows * cols), special, values)
    return cp.asarray(values.astype(F32))


# Which way is taken -------------------------------------------------------------------------------------------------


def how(x: tuple[int, int], w: tuple[int, int], dtype: str = "float32", **options: Any) -> str:
    plan = cf.fuse(lambda x, w: x @ w.T, **options).bind(w=cf.spec(w, dtype)).plan(cf.spec(x, dtype))
    (found,) = (step.how for step in plan.steps if step.kind == "Gemm")
    return found


def test_plans_say_how_products_run_and_why() -> None:
    large = (1024, 8192), (8192, 8192)
    assert "hi/lo split on tensor cores" in how(*large)
    for precision in ("high", "medium", "tf32"):
        assert f"11 bits with a scale for each row, as the precision {precision!r} allows" in how(
            *large, precision=precision
        )
        assert "cuBLAS TF32" in how((64, 600), (64, 600), precision=precision)
    assert "the precision 'ieee' asks" in how(*large, precision="ieee")
    assert "more accurate" in how((100000, 64), (100000, 64))
    assert "us, where the hi/lo split would take" in how((64, 600), (64, 600))
    assert how(*large, dtype="bfloat16").startswith("cuBLAS bfloat16 with float32 sums, rather than our own kernel: ")
    assert how(*large, dtype="float64") == "cuBLAS float64 with float64 sums"
    plan = cf.fuse(lambda x, w: x @ w.T).bind(w=cf.spec(large[1])).plan(cf.spec(large[0]))
    assert "270 MB are kept" in str(plan) and plan.flops >= 3 * 2 * 1024 * 8192**2
    plan = cf.fuse(lambda x, w: x @ w.T, precision="high").bind(w=cf.spec(large[1])).plan(cf.spec(large[0]))
    assert "134 MB are kept" in str(plan) and plan.flops < 1.01 * 2 * 1024 * 8192**2
    assert [s.launches for s in plan.steps] == [2], "split, product"
    bound = cf.fuse(lambda x, w: x @ w.T, precision="high").bind(w=cf.spec((8192, 32768)))
    plan = bound.plan(cf.spec((128, 32768)))
    assert plan.steps[0].how.startswith("cuBLAS float16: operands rounded to 11 bits"), "it splits sums"
    assert [s.launches for s in plan.steps] == [3, 1], "split, product and its factors; the factors applied"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high", "medium", "ieee", "tf32"])
def test_precisions_are_as_accurate_as_they_say(precision: str, rng: np.random.Generator) -> None:
    CUDA.require()
    x, w = (CUDA.array(rng.standard_normal(s).astype(F32)) for s in ((300, 2048), (4000, 2048)))
    result = CUDA.host(cf.fuse(lambda x, w: x @ w.T, precision=precision)(x, w))
    exact = CUDA.host(x).astype(np.float64) @ CUDA.host(w).astype(np.float64).T
    relative = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    bound = {"highest": 1e-6, "ieee": 1e-6}.get(precision, 4e-4)
    assert relative <= bound


def test_other_gpus_keep_cublas_at_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    for article, name in (("an", "A100"), ("a", "T4"), ("an", "L40S"), ("an", "RTX 4090")):
        monkeypatch.setattr(devices, "DEFAULT", name)
        assert f"not faster on {article} {name}" in how((1024, 8192), (8192, 8192))
        assert "11 bits" in how((1024, 8192), (8192, 8192), precision="high")


def test_split_products_beat_float32_by_the_estimate_of_large_ones() -> None:
    plan = cf.fuse(lambda x, w: x @ w.T).plan(cf.spec((1024, 8192)), cf.spec((8192, 8192)))
    assert plan.best_time("H200") < 0.3 * cf.fuse(lambda x, w: x @ w.T, precision="ieee").plan(
        cf.spec((1024, 8192)), cf.spec((8192, 8192))
    ).best_time("H200")


# What several products, bind and blocks share -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "precision", "kinds"),
    [
        ((8192, 8192), "highest", ["Split"]),
        ((8192, 2048), "highest", ["Split"]),
        ((8192, 8192), "high", ["Split"]),
        ((8192, 2048), "high", ["Copy", "Split"]),
    ],
)
def test_transposed_operands_are_split_as_they_are(shape: tuple[int, int], precision: str, kinds: list[str]) -> None:
    """In one part only where there are enough of their columns; else a copy is quicker."""
    fused = cf.fuse(lambda x, w: x @ w, precision=precision)
    plan = fused.bind(w=cf.spec(shape)).plan(cf.spec((8192, shape[0])))
    assert plan.prepare is not None and [s.kind for s in plan.prepare.steps] == kinds
    source = plan.prepare.source()
    assert ("split_columns" in source) == (kinds == ["Split"]) and ("split_rows" in source) == (kinds != ["Split"])


def test_arguments_in_fortran_order_are_split_as_they_are() -> None:
    x, w = np.zeros((4096, 1024), np.float32), np.zeros((1024, 1024), np.float32)
    function = cf.fuse(lambda x, w: x @ w.T)
    for order, kernel in (("C", "split_rows"), ("F", "split_columns")):
        plan = function.bind(w=np.asarray(w, order=order)).plan(x).prepare
        assert plan is not None and [s.kind for s in plan.steps] == ["Split"] and f"{kernel}_kernel" in plan.source()


def test_products_share_what_is_made_of_an_operand() -> None:
    square, w = cf.spec((1024, 4096)), cf.spec((4096, 8192))
    plan = cf.fuse(lambda x, y, w: (x @ w, y @ w)).bind(w=w).plan(square, square)
    assert plan.prepare is not None and [s.kind for s in plan.prepare.steps] == ["Split"]
    assert "split" in plan.steps[0].fused and "135 MB are kept" in str(plan)
    given = [cf.spec((8192, 4096))] * 3
    chain = cf.fuse(lambda x, a, b, c: (x @ a.T, x @ b.T, x @ c.T), precision="medium")
    plan = chain.bind(a=given[0], b=given[1], c=given[2]).plan(square)
    assert [s.fused.count("split") for s in plan.steps if s.kind == "Gemm"] == [1, 0, 0]


def test_products_of_bound_arrays_stay_prepared_without_their_halves() -> None:
    fused = cf.fuse(lambda x, a, b: x @ (a @ b).T, keep_halves=False)
    plan = fused.bind(a=cf.spec((8192, 4096)), b=cf.spec((4096, 4096))).plan(cf.spec((1024, 4096)))
    assert plan.prepare is not None and plan.prepare.steps[-1].kind == "Gemm"
    assert [s.fused for s in plan.steps] == [("split", "split", "matmul")]


@pytest.mark.parametrize(
    ("chain", "precision"),
    [
        (lambda x, w: cf.softmax(x @ (w * 2).T, axis=1), "medium"),
        (lambda x, w: cf.softmax(x @ (w * 2).T, axis=1), "ieee"),
        (lambda x, w: cf.softmax(x @ (w * 2).T, axis=1), "highest"),
    ],
)
def test_what_is_made_of_weights_is_made_once_for_all_blocks(chain: Any, precision: str) -> None:
    plan = cf.fuse(chain, precision=precision).plan(cf.spec((8192, 4096)), cf.spec((131072, 4096)))
    assert plan.blocks is not None and plan.blocks.rows >= 128 and plan.blocks.plan.workspace <= 256 << 20
    assert all(step.domain[0] == plan.blocks.rows for step in plan.blocks.plan.steps)
    assert plan.flops < 1.01 * sum(s.flops for s in plan.scheduled.steps)


def test_what_linear_algebra_reads_is_computed_in_float32() -> None:
    """Through anything but another product; what else a plan multiplies is split."""
    big = cf.spec((4096, 4096))
    for function, forms in {
        "np.linalg.inv(s @ s.T)": ["cuBLAS float32: linear algebra"],
        "np.linalg.cholesky(0.5 * (s @ s.T) + np.eye(4096, dtype=s.dtype))": ["cuBLAS float32: linear algebra"],
        "np.linalg.inv(s) @ s": ["fp16 hi/lo split"],
        "np.linalg.inv((s @ s) @ s)": ["fp16 hi/lo split", "cuBLAS float32: linear algebra"],
        "np.sort(s @ s.T)": ["fp16 hi/lo split"],
    }.items():
        plan = cf.fuse(eval(f"lambda s: {function}", {"np": np})).plan(big)
        found = [step.how for step in plan.steps if step.kind == "Gemm"]
        assert len(found) == len(forms) and all(map(str.startswith, found, forms)), found


def test_slices_of_marked_rows(engine: Engine, rng: np.random.Generator) -> None:
    """Rows with infinities are repaired from where the slice begins, not the array."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (12, 70)))
    x[4, 7], w[6, 9] = np.inf, np.nan

    def chain(x: Any, w: Any) -> Any:
        return x[2:] @ w[5:].T, x[:, 2:] @ w[:, 2:].T

    with np.errstate(all="ignore"):
        for result, expected in zip(
            cf.fuse(chain)(engine.array(x), engine.array(w)), chain(x.astype(np.float64), w), strict=True
        ):
            close(engine.host(result), expected, 10)


def test_products_of_bound_arguments_alone(engine: Engine, rng: np.random.Generator) -> None:
    """A prepacked split that a prepacked product reads as well is read as it is."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (12, 70)))

    def chain(x: Any, w: Any) -> Any:
        return w @ w.T, x @ w.T

    bound = cf.fuse(chain).bind(w=engine.array(w))
    for result, expected in zip(bound(engine.array(x)), chain(x, w), strict=True):
        close(engine.host(result), expected, 10)
