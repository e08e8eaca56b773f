"""The NumPy engine: accuracy no worse than unfused, blocks that must not show, no side effects, and its gain."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import FLOATS, HEADS, Engine, Head, assert_close, compute, normal, unit

import cupyfuse as cf
from cupyfuse.engines import numpy as numpy_engine


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])  # float64 is what errors are measured with
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_the_error_is_no_larger_than_that_of_the_unfused_chain(
    head: Head, dtype: str, bound: bool, rng: np.random.Generator
) -> None:
    """Largest and mean error against float64, fused and unfused in the same dtype, plus one rounding of the result."""
    arguments = head.arguments(rng, 128, 512, 384, dtype)
    exact = head.plain(*[a.astype(np.float64) for a in arguments])
    unfused = np.abs(cf.fuse(head.function).__wrapped__(*arguments).astype(np.float64) - exact)
    fused = cf.fuse(head.function)
    if bound:
        result = fused.bind(**dict(zip(head.bound, arguments[1:], strict=True)))(arguments[0])
    else:
        result = fused(*arguments)
    error = np.abs(result.astype(np.float64) - exact)
    rounding = unit(dtype) * np.abs(exact)
    # The largest of many roundings varies from one order of summation to another, hence the half on top.
    assert error.max() <= 1.5 * unfused.max() + 2 * rounding.max()
    assert error.mean() <= 1.1 * unfused.mean() + 2 * rounding.mean()


@pytest.mark.parametrize("offset", [0.0, 1.0, 30.0, 1000.0])
def test_folded_normalisation_of_columns_far_from_zero(offset: float, rng: np.random.Generator) -> None:
    """y a + c cancels what (y - mean) / std cancels; the product's own rounding, magnified alike, is as large."""
    x = (rng.random((256, 128)) + offset).astype(np.float32)
    w = (normal(rng, (64, 128)) / 11 + np.float32(0.05)).astype(np.float32)
    y = x.astype(np.float64) @ w.T.astype(np.float64)
    mean, var = y.mean(axis=0).astype(np.float32), y.var(axis=0).astype(np.float32)
    one, zero = np.ones(64, np.float32), np.zeros(64, np.float32)

    def chain(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
        return (x @ w.T - mean) / np.sqrt(var + 1e-5) * gamma + beta

    arguments = [x, w, mean, var, one, zero]
    exact = chain(*[a.astype(np.float64) for a in arguments])
    unfused = np.abs(chain(*arguments) - exact)
    error = np.abs(cf.fuse(chain)(*arguments) - exact)
    assert error.max() <= 1.5 * unfused.max() and error.mean() <= 1.2 * unfused.mean()


@pytest.mark.parametrize("shape", [(700_000, 3), (3, 700_000), (1, 1_000_003), (1_000_003, 1), (1300, 1300)])
def test_blocks_do_not_show(shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Arrays of many blocks, along either axis, whole and not: softmax, column statistics, pointwise, all at once."""
    x = normal(rng, shape, "float64")
    fused = cf.fuse(lambda x: (cf.softmax(x, axis=1), x - x.mean(axis=0), x.max(axis=0), np.exp(x).sum(), x.sum(1)))
    softmax, centred, top, total, rows = fused(x)
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    scale = 64 * unit("float64")
    assert_close(softmax, exponentials / exponentials.sum(axis=1, keepdims=True), scale)
    assert_close(centred, x - x.mean(axis=0), 100 * scale)
    np.testing.assert_array_equal(top, x.max(axis=0))
    assert total == pytest.approx(np.exp(x).sum(), rel=1e-12)
    assert_close(rows, x.sum(axis=1), unit("float64") * np.abs(x).sum(axis=1) * 32)


@pytest.mark.parametrize("block", [1, 2, 5, 7, 64])
def test_any_size_of_blocks_gives_the_same(
    block: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Rows with inf in several blocks: the exact form finds its rows wherever the block begins."""
    for head in HEADS:
        arguments = head.arguments(rng, 11, 5, 7)
        arguments[0][[1, 4, 10], 2] = np.inf, np.nan, -np.inf
        with np.errstate(all="ignore"):
            exact = head.plain(*[a.astype(np.float64) for a in arguments])
        monkeypatch.setattr(numpy_engine, "BLOCK", block)
        result = cf.fuse(head.function)(*arguments)
        assert_close(result, exact, 400 * unit("float32") * (1 + np.nan_to_num(np.abs(exact), posinf=0)))


def test_long_sums_are_accurate(rng: np.random.Generator) -> None:
    """Sums down and along a million numbers lose no more than a pairwise sum: log2 n roundings, not n."""
    x = rng.random((1_000_000, 2), np.float32)
    exact = x.astype(np.float64).sum(axis=0)
    for array, axis in ((x, 0), (np.ascontiguousarray(x.T), 1)):
        result = cf.fuse(lambda x, axis=axis: x.sum(axis=axis))(array)
        assert np.abs(result - exact).max() <= 32 * unit("float32") * exact.max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_accumulate_in_float32(dtype: str) -> None:
    x = np.full((1, 5000), 1.0 if dtype == "float16" else 0.01).astype(cf.dtypes.to_numpy(dtype))
    result = cf.fuse(lambda x: x.mean(axis=1))(x)
    assert abs(float(result[0]) / float(x[0, 0]) - 1) <= 2 * unit(dtype)
    products = cf.fuse(lambda x: (x @ x.T) / 5000)(x)
    assert float(products[0, 0]) == pytest.approx(float(x[0, 0]) ** 2, rel=2 * unit(dtype))


def test_calls_leave_no_trace(rng: np.random.Generator) -> None:
    """Arguments unchanged, no warning, no floating-point flag, error state as it was."""
    x = normal(rng, (5, 4))
    x[0, 0], x[1, 1] = np.inf, np.nan
    before, state = x.copy(), np.geterr()
    fused = cf.fuse(lambda x: (np.log(x), cf.softmax(x, axis=1), x / 0.0, np.exp(x * 1000), cf.logsumexp(x, axis=0)))
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        fused(x)
    np.testing.assert_array_equal(x, before)
    assert np.geterr() == state


def test_calls_repeat_bit_for_bit(rng: np.random.Generator) -> None:
    for head in HEADS:
        arguments = head.arguments(rng, 100, 60, 300)
        fused = cf.fuse(head.function)
        first = fused(*arguments)
        for _ in range(3):
            assert fused(*arguments).tobytes() == first.tobytes()


@pytest.mark.parametrize("head", HEADS[1:2], ids=lambda h: h.name)
def test_a_row_does_not_depend_on_how_many_came_with_it(head: Head, rng: np.random.Generator) -> None:
    arguments = head.arguments(rng, 50, 64, 32)
    serve = cf.fuse(head.function).bind(**dict(zip(head.bound, arguments[1:], strict=True)))
    whole = serve(arguments[0])
    for rows in (1, 7, 50):
        np.testing.assert_array_equal(serve(arguments[0][:rows]), whole[:rows])


def best_of(function: Callable[[], Any], times: int = 5) -> float:
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        function()
        spent.append(time.perf_counter() - start)
    return min(spent)


def test_the_algebra_speeds_up_the_processor_too(rng: np.random.Generator) -> None:
    """head_sum with bound weights needs one multiply-add where the unfused function needs a thousand.

    The benchmark shape asks for 50 times; this smaller one leaves room for a busy machine.
    """
    head = HEADS[1]
    arguments = head.arguments(rng, 512, 1024, 1024)
    fused = cf.fuse(head.function)
    serve = fused.bind(weight=arguments[1], bias=arguments[2])
    serve(arguments[0])
    assert best_of(lambda: serve(arguments[0])) * 3 < best_of(lambda: fused.__wrapped__(*arguments))


def test_compute_types() -> None:
    assert [cf.dtypes.compute_dtype(d) for d in FLOATS] == [compute(d) for d in FLOATS]


def test_what_is_guarded_within_a_guarded_sum(engine: Engine) -> None:
    """The exact form of some rows evaluates no others: several of them, in blocks of any size."""

    def scaled(x: Any, d: Any, g: Any) -> Any:
        return (np.tanh(x) * g * g * g @ d).sum(1)

    def shifted(x: Any, d: Any, g: Any) -> Any:
        y = 1 - (x @ d) * g * g
        return y, (y @ d).sum(1)

    x = np.linspace(-1, 1, 14, dtype=np.float32).reshape(7, 2)
    d, g = np.eye(2, dtype=np.float32), np.array([1, 2], np.float32)
    for rows, value in (((1,), np.nan), ((0, 3, 6), np.inf), (range(7), -np.inf), ((), 0)):
        x[list(rows), 0] = value
        for function in (scaled, shifted):
            with np.errstate(all="ignore"):
                expected = function(x, d, g)
            results = engine.host(cf.fuse(function)(*engine.arrays([x, d, g])))
            pairs = zip(results, expected, strict=True) if function is shifted else [(results, expected)]
            for result, value_ in pairs:
                assert_close(result, value_, 64 * unit("float32") * (1 + np.nan_to_num(np.abs(value_), posinf=0)))
