"""Average pooling, alone and after a linear map, whose weights are pooled instead."""

from __future__ import annotations

import numpy as np
import pytest
from support import Engine, assert_close, lay_out, normal

import cupyfuse as cf


def head(x, w, b):
    return cf.relu(cf.avg_pool1d(cf.linear(x, w, b), 4))


def by_hand(x, w, b):
    y = x.astype(np.float64) @ w.T.astype(np.float64) + b
    return np.maximum(y.reshape(len(x), 6, 4).mean(axis=2), 0)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 64), (0, 4)])
def test_pooled_weights_give_the_pooled_map(engine: Engine, shape: tuple[int, int], rng: np.random.Generator) -> None:
    rows, k = shape
    x, w, b = normal(rng, (rows, k)), normal(rng, (24, k)), normal(rng, (24,))
    arguments = [engine.array(v) for v in (x, w, b)]
    fused = cf.fuse(head)
    # Roundings of k products and of 4 sums, each of a value below the bound in the brackets.
    bound = (k + 8) * 2.0**-24 * (np.abs(x) @ np.abs(w).T + np.abs(b)).max(initial=1.0)
    for got in (fused(*arguments), fused.bind(w=arguments[1], b=arguments[2])(arguments[0])):
        assert np.abs(engine.host(got) - by_hand(x, w, b)).max(initial=0.0) <= bound


def test_the_product_has_a_column_for_each_group_only() -> None:
    x, w, b = cf.spec((1024, 512)), cf.spec((2048, 512)), cf.spec(2048)
    plan = cf.fuse(head).bind(w=w, b=b).plan(x)
    assert [(s.kind, s.domain) for s in plan.steps] == [("Gemm", (1024, 512)), ("RowProgram", (1024, 512))]
    assert any("pools the weights" in note.identity for note in plan.notes)


def test_a_product_that_is_needed_anyway_is_not_repeated() -> None:
    def both(x, w):
        y = x @ w.T
        return cf.avg_pool1d(y, 2), y.max(axis=1)

    plan = cf.fuse(both).plan(cf.spec((8, 6)), cf.spec((10, 6)))
    assert [s.kind for s in plan.steps].count("Gemm") == 1


def test_pooling_of_anything_else(engine: Engine, rng: np.random.Generator) -> None:
    x = normal(rng, (6, 12))
    expected = np.exp(x.astype(np.float64)).reshape(6, 4, 3).mean(axis=2)
    got = engine.host(cf.fuse(lambda x: cf.avg_pool1d(np.exp(x), 3))(engine.array(x)))
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    transposed = engine.host(cf.fuse(lambda x: cf.avg_pool1d(x.T, 2))(engine.array(x)))
    np.testing.assert_allclose(transposed, x.T.reshape(12, 3, 2).mean(axis=2), rtol=1e-6)


def test_infinite_inputs_differ_as_the_plan_says() -> None:
    """As written, inf * 2 + inf * -1 is NaN; the pooled weight is 0.5, and inf * 0.5 is inf."""
    x, w = np.array([[np.inf]], np.float32), np.array([[2.0], [-1.0], [2.0], [-1.0]], np.float32)
    pool = cf.fuse(lambda x, w: cf.avg_pool1d(x @ w.T, 2))
    with np.errstate(invalid="ignore"):
        assert np.isnan(pool.__wrapped__(x, w)).all()
    assert np.isposinf(pool(x, w)).all()
    assert "inf for NaN" in str(pool.plan(x, w))


@pytest.mark.parametrize(("shape", "size", "words"), [((3, 10), 4, "kernel_size.*divisor of 10"), ((10,), 5, "x: ")])
def test_errors(shape: tuple[int, ...], size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cf.avg_pool1d(np.ones(shape), size)


@pytest.mark.parametrize("layout", ["transposed", "reversed", "row_gap", "fortran"])
def test_a_product_with_a_reshape_of_an_argument_that_is_not_contiguous(
    engine: Engine, layout: str, rng: np.random.Generator
) -> None:
    """Random chains found that a reshape of a reshape took the argument for contiguous."""
    x, w = normal(rng, (12, 6), "float64"), normal(rng, (7, 3), "float64")
    pooled = cf.fuse(lambda x, w: cf.avg_pool1d(x, 1).reshape(24, 3) @ w.T)
    actual = pooled(lay_out(engine.xp, x, layout), engine.array(w))
    assert_close(engine.host(actual), x.reshape(24, 3) @ w.T, 1e-13)


def test_pools_of_products_of_products_that_only_their_guards_compute(engine: Engine, rng: np.random.Generator) -> None:
    """Random chains found that the exact form of a pool read a product which nothing had computed."""

    def chain(x, y):
        inner = cf.log_softmax(y, axis=-1) @ y.T
        return cf.avg_pool1d(x @ inner, 2), (x @ inner).sum(axis=1)

    x, y = normal(rng, (7, 2), "float64"), normal(rng, (2, 5), "float64")
    x[3, 1] = np.nan
    with np.errstate(all="ignore"):
        expected = chain(x, y)
    for actual, wanted in zip(engine.host(cf.fuse(chain)(*engine.arrays([x, y]))), expected, strict=True):
        assert_close(actual, wanted, 1e-12)
