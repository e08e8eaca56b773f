"""±inf, NaN, overflow and zeros: a fused chain gives what the unfused one gives, element by element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cupyfuse.heads import oracle
from support import (
    FLOATS,
    HEADS,
    INF,
    NAN,
    Engine,
    Head,
    assert_close,
    assert_same_kinds,
    compute,
    dtype_of,
    normal,
    sprinkle,
    unit,
)

import cupyfuse as cf
from cupyfuse import rewrite

WIDE = ("float32", "float64")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def poisoned(
    head: Head, rng: np.random.Generator, where: str, special: tuple[float, ...], dtype: str
) -> list[np.ndarray[Any, Any]]:
    """A head's arguments with special values in one of them: in a few rows of x, or a few places of the weights."""
    arguments = head.arguments(rng, 24, 10, 7, dtype)
    names = dict(zip(["x", *head.bound], range(len(arguments)), strict=True))
    array = arguments[names[where]]
    if where == "x":
        array[::3] = sprinkle(rng, array[::3], 0.2, special)
    else:
        array[...] = sprinkle(rng, array, 0.1, special)
        array.flat[array.size // 2] = special[0]
    return arguments


PLACES = [(head, where) for head in HEADS for where in ("x", *head.bound) if where not in ("scale", "running_var")]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound"])
@pytest.mark.parametrize("special", [(INF,), (-INF,), (NAN,), (INF, -INF), (INF, -INF, NAN, 0.0)], ids=str)
@pytest.mark.parametrize(("head", "where"), [pytest.param(h, w, id=f"{h.name}-{w}") for h, w in PLACES])
def test_heads(
    engine: Engine, head: Head, where: str, special: tuple[float, ...], bound: bool, rng: np.random.Generator
) -> None:
    for dtype in FLOATS:
        arguments = poisoned(head, rng, where, special, dtype)
        expected = head.plain(*[a.astype(np.float64) for a in arguments])
        given = engine.arrays(arguments)
        if bound:
            fused = cf.fuse(head.function).bind(**dict(zip(head.bound, given[1:], strict=True)))
            actual = engine.host(fused(given[0]))
        else:
            actual = engine.host(cf.fuse(head.function)(*given))
        assert actual.dtype == dtype_of(dtype)
        # Exactly the kinds of the float64 chain: no intermediate of these sizes overflows in any of the types.
        bound_ = 400 * unit(compute(dtype)) * (1 + np.abs(expected)) + 4 * unit(dtype) * (1 + np.abs(expected))
        assert_close(actual, expected, bound_, dtype)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_heads_are_their_unfused_selves(engine: Engine, head: Head, dtype: str, rng: np.random.Generator) -> None:
    """`__wrapped__` is the oracle that users have."""
    for where in ("x", "weight", "bias"):
        given = engine.arrays(poisoned(head, rng, where, (INF, -INF, NAN), dtype))
        fused = cf.fuse(head.function)
        assert_same_kinds(engine.host(fused(*given)), engine.host(fused.__wrapped__(*given)), where)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_collapsed_sum_where_weights_cancel(engine: Engine, dtype: str) -> None:
    """Infinities of both signs in one column of the weight: their sum is NaN, but x = 0 meets each of them alone."""
    weight = np.array([[INF, 1.0], [-INF, 1.0], [1.0, 1.0]], dtype)
    x = np.array([[0.0, 1.0], [1.0, 1.0], [INF, 1.0], [-1.0, -1.0]], dtype)
    bias = np.zeros(3, dtype)
    for head in HEADS[:2]:
        expected = head.plain(x, weight, bias)
        assert_same_kinds(engine.host(cf.fuse(head.function)(*engine.arrays([x, weight, bias]))), expected, head.name)


@pytest.mark.parametrize("dtype", WIDE)
def test_the_collapsed_sum_where_only_its_own_partial_results_overflow(engine: Engine, dtype: str) -> None:
    """Columns whose sum overflows although every product is finite, and so is the sum of the row as written."""
    top = float(np.finfo(dtype).max)
    weight = np.array([[top / 2], [top / 2], [top / 2], [-top / 2]], dtype)
    x = np.array([[0.25], [1e-30], [0.0]], dtype)
    bias = np.zeros(4, dtype)
    expected = (x @ weight.T + bias).sum(axis=1, keepdims=True)
    assert np.isfinite(expected).all()
    serve = cf.fuse(HEADS[1].function).bind(weight=engine.array(weight), bias=engine.array(bias))
    for actual in (serve(engine.array(x)), cf.fuse(HEADS[1].function)(*engine.arrays([x, weight, bias]))):
        assert_close(engine.host(actual), expected, 8 * unit(dtype) * np.abs(expected))


def test_the_documented_difference_of_the_collapse(engine: Engine) -> None:
    """Finite arguments whose products overflow and cancel: as written inf - inf, by the identity finite."""
    x, weight = np.array([[2.0]], np.float32), np.array([[3e38], [-3e38]], np.float32)
    bias = np.zeros(2, np.float32)
    assert np.isnan((x @ weight.T + bias).sum(axis=1)).all()
    result = engine.host(cf.fuse(HEADS[1].function)(*engine.arrays([x, weight, bias])))
    assert result == 0
    assert "overflow" in str(rewrite.collapse_sum.__doc__)


@pytest.mark.parametrize("dtype", WIDE)
def test_pooled_weights_that_overflow_where_nothing_else_does(engine: Engine, dtype: str) -> None:
    weight = np.full((4, 1), float(np.finfo(dtype).max) * 0.9, dtype)
    x = np.array([[1e-30], [0.5]], dtype)
    expected = (x @ weight.T).astype(np.longdouble).reshape(2, 2, 2).mean(axis=2).astype(dtype)
    assert np.isfinite(expected).all()
    pool = cf.fuse(lambda x, w: cf.avg_pool1d(x @ w.T, 2))
    assert_close(engine.host(pool(*engine.arrays([x, weight]))), expected, 4 * unit(dtype) * expected)


@pytest.mark.parametrize("dtype", WIDE)
def test_folded_factors_that_underflow_or_overflow(engine: Engine, dtype: str) -> None:
    """A BatchNorm whose factors leave the range of the type one by one, and come back."""
    big, small = float(np.finfo(dtype).max) / 4, float(np.finfo(dtype).smallest_normal)
    y = np.array([[1.0, 2.0, -3.0, 4.0, 1.0, big, 1.0, 3.0]], dtype)
    mean = np.array([0.5, 0.0, 0.0, 1.0, 0.0, -big, 0.0, -big], dtype)
    var = np.array([1.0, small, small, big, 0.0, big, INF, 1.0], dtype)
    gamma = np.array([1.0, small, big, big, small, 1.0, 1.0, small], dtype)
    beta = np.array([0.0, 1.0, 0.0, -1.0, 0.0, 0.0, 2.0, 0.0], dtype)
    scale = np.array([1.0, big, small, 2.0, big, 1e-3, 1.0, big], dtype)

    def chain(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any, scale: Any) -> Any:
        return ((x @ w - mean) / np.sqrt(var + 0.0) * gamma + beta) * scale

    arguments = [y, np.eye(8, dtype=dtype), mean, var, gamma, beta, scale]
    expected = chain(*arguments)
    actual = engine.host(cf.fuse(chain)(*engine.arrays(arguments)))
    bound = 64 * unit(dtype) * np.abs(expected)
    finite = np.isfinite(expected)
    assert_close(actual[finite], expected[finite], bound[finite])


ROWS = [
    [INF, 0.0, 1.0, 2.0],
    [-INF, 0.0, 1.0, 2.0],
    [NAN, 0.0, 1.0, 2.0],
    [INF, -INF, 0.0, 1.0],
    [INF, INF, INF, INF],
    [-INF, -INF, -INF, -INF],
    [NAN, INF, -INF, 0.0],
    [0.0, -0.0, 0.0, -0.0],
    [60000.0, 60000.0, -60000.0, 0.0],
    [1e-7, -1e-7, 6e-8, 0.0],
]


def exponentials(x: Any) -> Any:
    return np.exp(x - x.max(axis=1, keepdims=True))


CHAINS: dict[str, Callable[..., Any]] = {
    "logsumexp": lambda x: cf.logsumexp(x, axis=1),
    "logsumexp of all": lambda x: cf.logsumexp(x),
    "logsumexp of columns": lambda x: cf.logsumexp(x, axis=0),
    "softmax": lambda x: cf.softmax(x, axis=1),
    "softmax of columns": lambda x: cf.softmax(x, axis=0),
    "log_softmax": lambda x: cf.log_softmax(x, axis=1),
    "written softmax": lambda x: exponentials(x) / exponentials(x).sum(axis=1, keepdims=True),
    "written logsumexp": lambda x: np.log(exponentials(x).sum(axis=1)) + x.max(axis=1),
    "max then min": lambda x: x.max(axis=1, keepdims=True) - x.min(axis=1, keepdims=True),
    "normalise": lambda x: (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5),
    "normalise columns": lambda x: (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5),
    "rms": lambda x: x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6),
    "relu": lambda x: cf.relu(x).sum(axis=1),
    "leaky twice": lambda x: cf.leaky_relu(cf.leaky_relu(x.max(axis=1))),
    "gelu twice": lambda x: cf.gelu(cf.gelu(x.max(axis=1))),
    "clip": lambda x: np.clip(x, -1, 1).sum(axis=1),
    "minimum and maximum": lambda x: np.minimum(np.maximum(x, 0), 6).prod(axis=1),
    "where": lambda x: np.where(np.isnan(x), 0, x).sum(axis=1),
    "where of masks": lambda x: np.where((x > 0) & np.isfinite(x), np.log(x), -1.0).max(axis=1),
    "counts": lambda x: (x > 0).sum(axis=1) + np.isnan(x).sum(axis=1),
    "any and all": lambda x: (np.isinf(x).any(axis=1), (x == x).all(axis=1), x.any(axis=1)),
    "nan_to_num": lambda x: np.nan_to_num(x, posinf=9.0, neginf=-9.0).mean(axis=1),
    "reductions of one": lambda x: x.max(axis=1, keepdims=True).sum(axis=1, keepdims=True).prod(axis=1).mean(),
    "zeros keep their sign": lambda x: 1.0 / np.where(np.isfinite(x), x * 0.0, 1.0),
    "sum of squares": lambda x: np.sqrt((x * x).sum(axis=1)),
    "sum over everything": lambda x: x.sum(),
    "sums of sums": lambda x: x.sum(axis=1).sum(),
}


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chain", [pytest.param(c, id=name) for name, c in CHAINS.items()])
def test_small_chains(engine: Engine, chain: Callable[..., Any], dtype: str) -> None:
    """Each row alone and all together: fused has the kinds of unfused; 16-bit types those of unfused float32.

    (NumPy rounds every 16-bit intermediate, which can overflow where one chain held in float32 does not.)
    """
    given = [np.array(values).astype(dtype_of(dtype)) for values in (*([row] for row in ROWS), ROWS[:8], ROWS)]
    fused = cf.fuse(chain)
    engine.prepare(lambda x=x: fused(engine.array(x)) for x in given)
    for x in given:
        expected = chain(x.astype(compute(dtype)))
        actual = engine.host(fused(engine.array(x)))
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for a, e in pairs:
            top = float(np.finfo(np.float16).max) if dtype == "float16" else INF
            e = np.where(np.abs(e) > top, np.sign(e) * INF, e) if np.asarray(e).dtype.kind == "f" else e
            size = np.abs(np.asarray(e, np.float64))
            assert_close(a, e, 64 * unit(compute(dtype)) * (1 + size) + 2 * unit(dtype) * size + 1e-7, str(x))


@pytest.mark.parametrize("dtype", WIDE)
def test_a_special_row_leaves_the_others_alone(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """The same bits in every other row, whether a row of the block needs the exact form or not."""
    for head in HEADS:
        arguments = head.arguments(rng, 33, 10, 7, dtype)
        fused = cf.fuse(head.function)
        before = engine.host(fused(*engine.arrays(arguments)))
        arguments[0][[3, 20]] = INF
        after = engine.host(fused(*engine.arrays(arguments)))
        others = np.setdiff1d(np.arange(33), [3, 20])
        np.testing.assert_array_equal(after[others], before[others])


def test_gelu_of_the_logsumexp_far_left(engine: Engine, rng: np.random.Generator) -> None:
    """A row of -inf: logsumexp -inf, LeakyReLU -inf, GELU NaN (-inf times 0), as in eager."""
    x = np.zeros((3, 4), np.float32)
    weight, bias = normal(rng, (5, 4)), np.full(5, -INF, np.float32)
    result = engine.host(cf.fuse(HEADS[0].function)(*engine.arrays([x, weight, bias])))
    assert np.isnan(result).all() and np.isnan(oracle.gelu(np.array(-INF)))


def test_a_guarded_sum_of_guarded_sums(engine: Engine, rng: np.random.Generator) -> None:
    """Random chains found that the exact form of one collapsed sum needed another one that no step had at hand."""

    def chain(a: Any, b: Any) -> Any:
        inner = (b @ a.T + b @ a.T).mean(axis=1, keepdims=True)
        return (inner @ inner.T - b - inner).sum(axis=1, keepdims=True)

    for rows in (1, 5, 9):
        a, b = normal(rng, (rows, 1), "float64"), normal(rng, (rows, 1), "float64")
        for special in (None, INF, NAN):
            if special is not None:
                b[rows // 2] = special
            actual = engine.host(cf.fuse(chain)(*engine.arrays([a, b])))
            expected = chain(a, b)
            assert_close(actual, expected, 1e-13 * (1 + np.abs(expected)) * rows)
