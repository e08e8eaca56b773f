"""Products of float32 operands in one fp16 part by our own kernel, in every cut: scales, care, and where tiles end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from own_kernels import OWN_KERNELS, by_own_kernels
from support import Engine

import cupyfuse as cf
from cupyfuse.plan.schedule import tiles

F32 = np.float32
CUTS = pytest.mark.parametrize("cut", tiles._TILES, ids=lambda cut: f"{cut[0]}by{cut[1]}{'alternating' * cut[2]}")
# Rows and columns of whole tiles in every cut, and beyond them.
WHOLE, ODD = (256, 768), (277, 781)


@pytest.fixture(params=OWN_KERNELS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that computes every float32 product at "high" by our own kernel."""
    with by_own_kernels(request.param, monkeypatch) as chosen:
        yield chosen


def operands(rng: np.random.Generator, shape: tuple[int, int], powers: int) -> tuple[Any, Any]:
    """x and w, whose rows have scales of up to so many powers of two."""
    m, n = shape
    drawn = (rng.standard_normal((rows, 70)) for rows in (m, n))
    x, w = (np.ldexp(a, rng.integers(-powers, powers + 1, (a.shape[0], 1))).astype(F32) for a in drawn)
    return x, w


def check(engine: Engine, x: Any, w: Any) -> None:
    """The product, and what an epilogue reduces of it: errors are those of 11 bits, element by element."""
    product, largest = cf.fuse(lambda x, w: (x @ w.T, np.abs(x @ w.T).max(axis=1)), precision="high")(
        engine.array(x), engine.array(w)
    )
    with np.errstate(all="ignore"):
        expected = x.astype(np.float64) @ w.astype(np.float64).T
        size = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64)).T
        wanted = expected.astype(F32)
    found, top = engine.host(product), float(np.finfo(F32).max)
    finite = size < top / 2
    assert (np.abs(found[finite] - expected[finite]) <= 2.0**-10 * size[finite] + np.finfo(F32).tiny).all()
    special = ~np.isfinite(expected) | (np.abs(expected) > 2 * top)
    np.testing.assert_array_equal(found[special], wanted[special])
    np.testing.assert_array_equal(engine.host(largest), np.abs(found).max(axis=1))


@CUTS
@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [WHOLE, ODD], ids=["whole", "odd"])
def test_every_row_and_column_has_its_scale(
    engine: Engine, cut: Any, shape: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    check(engine, *operands(rng, shape, 20))


@CUTS
@pytest.mark.kernels_rotate
@pytest.mark.parametrize("why", ["small", "overflow", "underflow"])
def test_tiles_that_need_care(
    engine: Engine, why: str, cut: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small elements that count, and scales whose product one factor could not hold."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    x, w = operands(rng, WHOLE, 5)
    if why == "small":
        x[70, 1:] *= F32(1e-12)
        w[:, 0] = 0
    elif why == "overflow":  # of the factor: the sums are 0
        x[70], w[300] = np.ldexp(x[70], 100), np.ldexp(w[300], 100)
        x[70, :35], w[300, 35:] = 0, 0
    else:  # of the factor: the sum is infinite
        x[70], w[300] = np.ldexp(x[70], -100), np.ldexp(w[300], -100)
        x[70, 3] = np.inf
    check(engine, x, w)


def test_every_order_of_threads_gives_the_same_bits(
    engine: Engine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "_TILES", ((64, 1, False),))
    given = engine.arrays(list(operands(rng, (128, 64), 20)))
    fused = cf.fuse(lambda x, w: np.tanh(x @ w.T), precision="high")
    results = [engine.host(fused(*given)) for _ in range(12)]
    assert all((r.view(np.uint32) == results[0].view(np.uint32)).all() for r in results)


TWO_PRODUCTS = {
    "gated": lambda x, w, v: (x @ w.T) * np.tanh(x @ v.T),
    "sums": lambda x, w, v: ((x @ w.T) * (x @ v.T)).sum(axis=1),
    "three": lambda x, w, v: (x @ w.T) * np.tanh(x @ v.T) + x @ (w + v).T,
    "two results": lambda x, w, v: (np.tanh(x @ v.T) + (x @ w.T), np.abs(x @ w.T).max(axis=1)),
}


@pytest.mark.parametrize("name", TWO_PRODUCTS)
def test_products_that_share_the_split_of_an_operand(engine: Engine, name: str, rng: np.random.Generator) -> None:
    """What reads both follows the second one, which the first one has to precede: it is no epilogue of the first."""
    function = TWO_PRODUCTS[name]
    drawn = [rng.standard_normal((rows, 64)).astype(F32) for rows in (70, 72, 72)]
    results = cf.fuse(function, precision="high")(*map(engine.array, drawn))
    expected = function(*(a.astype(np.float64) for a in drawn))
    for found, wanted in zip(*(r if isinstance(r, tuple) else (r,) for r in (results, expected)), strict=True):
        error = np.abs(engine.host(found).astype(np.float64) - wanted)
        assert error.max() <= 2.0**-10 * np.abs(wanted).max() * 4
