"""Chains whose products run on operands in one fp16 part: by our own kernel, or by cuBLAS with factors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HEADS, HOST, Engine, Head, require_hopper

import cupyfuse as cf
from cupyfuse import devices, settings
from cupyfuse.plan.schedule import products

F32 = np.float32


@pytest.fixture(params=["measured", "always"], ids=["library", "own"])
def kernel(request: pytest.FixtureRequest) -> str:
    """Where products have epilogues: by the estimates, of which that of cuBLAS is 0 here, or always."""
    chosen: str = request.param
    return chosen


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, kernel: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that rounds the operands of every float32 product, however small."""
    chosen: Engine = request.param
    chosen.require()
    monkeypatch.setattr(products, "rounded_time", lambda *_, **__: 0.0)
    if chosen is HOST:
        monkeypatch.setattr(chosen.runtime, "device", devices.DEVICES["H200"])
    elif kernel == "always":
        require_hopper()
    with chosen.active(), settings.epilogues(kernel):
        yield chosen


def close(actual: Any, expected: Any, depth: int) -> None:
    """Within what operands rounded to 11 bits may change, relative to the largest value."""
    scale = float(np.nanmax(np.abs(expected), initial=1, where=np.isfinite(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * 2.0**-11 * scale * np.sqrt(depth))


@pytest.mark.rotates
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("shape", [(5, 70, 9), (33, 130, 100)])
@pytest.mark.parametrize("head", [h for h in HEADS if h.name != "head_sum"], ids=lambda h: h.name)
def test_heads(engine: Engine, kernel: str, head: Head, shape: Any, bound: bool, rng: np.random.Generator) -> None:
    given = head.arguments(rng, *shape)
    expected = head.plain(*(a.astype(np.float64) for a in given))
    arguments = engine.arrays(given)
    fused: Any = cf.fuse(head.function, precision="high")
    if bound:
        names = list(fused.signature.parameters)
        fixed = {n: a for n, a in zip(names, arguments, strict=False) if n in head.bound}
        fused = fused.bind(**fixed)
        arguments = [a for n, a in zip(names, arguments, strict=False) if n not in fixed]
    plan = fused.plan(*arguments)
    product = next(step for step in plan.steps if step.kind == "Gemm")
    assert "11 bits" in product.how and product.how.startswith("own") == (kernel == "always")
    assert kernel == "always" or product.launches == 4 - bound
    assert not any(step.kind == "RowProgram" and step.fused == ("multiply",) * 3 for step in plan.steps), "no pass"
    result, wanted = engine.host(fused(*arguments)), expected
    np.testing.assert_allclose(result, wanted, rtol=2e-2, atol=2e-2 * float(np.abs(wanted).max()))


CHAINS = [
    (lambda x, w: x @ w, (7, 70), (70, 12)),
    (lambda x, w: (x * 2 + 1) @ w.T, (7, 70), (12, 70)),
    (lambda x, w: (x @ w.T) @ w, (7, 70), (12, 70)),
    (lambda x, w: (x @ x.T, x @ w.T), (7, 70), (12, 70)),
    (lambda x, w: (x.T @ x) @ w.T, (7, 70), (12, 70)),
    (lambda x, w: (x @ w.T).T, (7, 70), (12, 70)),
    (lambda x, w: (x @ w.T).sum(axis=0), (7, 70), (12, 70)),
    (lambda x, w: x @ w.T - (x @ w.T).mean(axis=0), (7, 70), (12, 70)),
    (lambda x, w: cf.logsumexp(x @ w.T, axis=1), (300, 70), (130, 70)),
    (lambda x, w: (x @ w.T).max(axis=1, keepdims=True) + x @ w.T, (1, 70), (1, 70)),
]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("layout", ["contiguous", "fortran", "row_gap", "offset"])
@pytest.mark.parametrize("number", range(len(CHAINS)))
def test_chains(engine: Engine, number: int, layout: str, rng: np.random.Generator) -> None:
    chain, *shapes = CHAINS[number]
    values = [rng.standard_normal(s).astype(F32) for s in shapes]
    results = cf.fuse(chain, precision="high")(*(engine.array(v, layout) for v in values))
    expected = chain(*(v.astype(np.float64) for v in values))
    pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    for result, value in pairs:
        close(engine.host(result), value, 70)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-30, 1e30), (1e30, 1e-30), (1e-20, 1e-12), (1.0, 1e25), (1e25, 1.0)])
@pytest.mark.parametrize("special", ["", "inf", "nan", "small"])
def test_any_scales_and_special_values(
    engine: Engine, scales: tuple[float, float], special: str, rng: np.random.Generator
) -> None:
    """With factors, and where C itself is repaired: results are the same but for rounding. Tiles are whole, and not."""
    x, w = (rng.standard_normal(s) * scale for s, scale in zip(((20, 100), (260, 100)), scales, strict=True))
    if special in ("inf", "nan"):
        x[4, 7] = float(special)
        w[3, 9] = float(special)
    if special == "small":
        x[2, 5:] *= 1e-12
        w[:, :5] = 0
    x, w = x.astype(F32), w.astype(F32)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        size = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
    fused = cf.fuse(lambda x, w: (x @ w.T, (x @ w.T) * 0.5), precision="high")
    whole, half = map(engine.host, fused(engine.array(x), engine.array(w)))
    finite = np.isfinite(expected) & np.isfinite(size)
    np.testing.assert_array_equal(np.isnan(whole), np.isnan(expected))
    assert (np.abs(whole[finite] - expected[finite]) <= 3 * 2.0**-11 * size[finite] + 1e-38).all()
    # Arithmetic on a GPU flushes subnormal numbers to zero; a product that is stored is none.
    np.testing.assert_allclose(half, whole * F32(0.5), rtol=0, atol=float(np.finfo(F32).tiny))


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("swapped", [False, True])
def test_tiny_numbers_times_infinity_keep_their_sign(engine: Engine, swapped: bool, rng: np.random.Generator) -> None:
    """Beside larger ones they are below fp16's range, and zero times infinity would be NaN, as of a true zero."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((18, 70), (12, 70)))
    x[:, 7] = 1e-30 * np.where(rng.random(18) < 0.5, 1, -1)
    x[5, 7], w[:, 7], w[3, 7], w[8, 7] = 0, 0.5, np.inf, -np.inf
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        if swapped:
            x, w, expected = w, x, expected.T
        result = engine.host(cf.fuse(lambda x, w: x @ w.T, precision="high")(engine.array(x), engine.array(w)))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite], expected[~finite])
    close(result[finite], expected[finite], 70)


def test_infinities_beside_the_smallest_scales(engine: Engine, rng: np.random.Generator) -> None:
    """Rows whose scales are 2^-126 on both sides: an infinity of one stays an infinity, whatever undoes the scales."""
    x, w = (rng.standard_normal(s).astype(F32) * F32(2.0**-126) for s in ((9, 100), (140, 100)))
    x[4, 7], w[3, 9] = np.inf, -np.inf
    result = engine.host(cf.fuse(lambda x, w: x @ w.T, precision="high")(engine.array(x), engine.array(w)))
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_array_equal(result, np.where(np.isfinite(expected), 0, expected))


def test_small_elements_of_slices(engine: Engine, rng: np.random.Generator) -> None:
    """What is computed again is read where the slice begins, not where the array does."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (140, 70)))
    x[:, 2], w[:, 2] = 1e9, 0

    def chain(x: Any, w: Any) -> Any:
        return x[2:] @ w[5:].T, x[:, 2:] @ w[:, 2:].T

    results = cf.fuse(chain, precision="high")(engine.array(x), engine.array(w))
    for result, expected in zip(results, chain(x.astype(np.float64), w.astype(np.float64)), strict=True):
        close(engine.host(result), expected, 70)


def test_products_of_bound_arguments_alone(engine: Engine, rng: np.random.Generator) -> None:
    """A prepacked split that a prepacked product reads as well is read as it is."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (12, 70)))

    def chain(x: Any, w: Any) -> Any:
        return w @ w.T, x @ w.T

    bound = cf.fuse(chain, precision="high").bind(w=engine.array(w))
    for result, expected in zip(bound(engine.array(x)), chain(x, w), strict=True):
        close(engine.host(result), expected, 70)


def test_values_that_steps_would_compute_again(engine: Engine, rng: np.random.Generator) -> None:
    """Plans that store such values ask for the step of each, that of factors among them."""
    x, w = (rng.standard_normal(s).astype(F32) for s in ((9, 70), (12, 70)))

    def chain(x: Any, w: Any) -> Any:
        y = x @ w.T
        for _ in range(12):
            y = y - cf.logsumexp(y, axis=1, keepdims=True)
            y = y - cf.logsumexp(y, axis=0, keepdims=True)
        return y

    result = cf.fuse(chain, precision="high")(engine.array(x), engine.array(w))
    close(engine.host(result), chain(x.astype(np.float64), w.astype(np.float64)), 70)


def test_blocks_of_rows(engine: Engine, rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(s).astype(F32) for s in ((700, 70), (130, 70)))
    x[500] *= 1e-20
    x[600, 3] = np.inf
    chain = cf.fuse(lambda x, w: cf.logsumexp(x @ w.T, axis=1), precision="high", max_workspace=200_000)
    arguments = engine.array(x), engine.array(w)
    plan = chain.plan(*arguments)
    assert plan.blocks is not None and plan.blocks.rows < 700
    with np.errstate(all="ignore"):
        expected = cf.logsumexp(x.astype(np.float64) @ w.astype(np.float64).T, axis=1)
    result = engine.host(chain(*arguments))
    finite = np.isfinite(expected)
    close(result[finite], expected[finite], 70)
    np.testing.assert_array_equal(result[~finite], expected[~finite])


def test_the_rows_that_cublas_is_slow_with_are_those_in_memory() -> None:
    """TF32 where those begin at multiples of 16 bytes, however long sums are; else one part, where that is faster."""

    def count_plain(function: Any, *shapes: tuple[int, int]) -> int:
        plan = cf.fuse(function, precision="high").plan(*(cf.spec(s, "float32") for s in shapes))
        return sum(step.product.op == "matmul" for step in plan.steps if step.kind == "Gemm")

    assert count_plain(lambda x, y: x.T @ y, (8191, 1024), (8191, 1024)) == 1
    assert count_plain(lambda x, y: x @ y.T, (2048, 8192), (2048, 8192)) == 0
    for inner, plain in ((1024, 1), (1023, 0)):
        assert count_plain(lambda x, y: x @ y.T, (4096, inner), (1024, inner)) == plain
