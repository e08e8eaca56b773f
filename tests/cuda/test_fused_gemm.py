"""16-bit products by our own kernel, with row programs as their epilogues, by their kernels on the CPU or on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import bounds
import numpy as np
import pytest
from bounds import Value
from own_kernels import OWN_KERNELS, by_own_kernels
from support import Engine, assert_equal, dtype_of, kinds, normal, sprinkle

import cupyfuse as cf
from cupyfuse.plan.schedule import tiles

DTYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


CUTS = pytest.mark.parametrize("cut", tiles._TILES, ids=lambda cut: f"{cut[0]}by{cut[1]}{'alternating' * cut[2]}")


@pytest.fixture(params=OWN_KERNELS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that computes every 16-bit product that it can by our own kernel."""
    with by_own_kernels(request.param, monkeypatch) as chosen:
        yield chosen


def product(x: Any, w: Any, dtype: str) -> Value:
    """`x @ w.T` as our kernel hands it on: summed in float32, with twice the error as tensor cores truncate."""
    value = bounds.matmul(bounds.exact(x, dtype), bounds.exact(w.T, dtype), "float32")
    return dataclasses.replace(value, e=2 * value.e, dtype=dtype)


def plus(*operands: Value) -> Value:
    return bounds.pointwise("add", *operands, dtype=operands[0].dtype)


def times(*operands: Value) -> Value:
    return bounds.pointwise("multiply", *operands, dtype=operands[0].dtype)


def one(name: str, value: Value) -> Value:
    return bounds.pointwise(name, value, dtype=value.dtype)


def rows(value: Value) -> Value:
    """Reductions without the axis that they keep."""
    return value.view(lambda a: a[:, 0])


def in_float32(value: Value) -> Value:
    return bounds.cast(value, "float32")


# Each tail as a function of the product, a bias, a matrix and a column; the same for bounds; launches of the product.
Tail = tuple[Callable[..., Any], Callable[..., Any], int]
TAILS: dict[str, Tail] = {
    "nothing": (lambda y, b, r, c: y, lambda y, b, r, c: y, 1),
    "bias": (lambda y, b, r, c: y + b, lambda y, b, r, c: plus(y, b), 1),
    "gelu": (lambda y, b, r, c: cf.gelu(y + b), lambda y, b, r, c: one("gelu", plus(y, b)), 1),
    "residual": (lambda y, b, r, c: np.tanh(y + b) + r, lambda y, b, r, c: plus(one("tanh", plus(y, b)), r), 1),
    "row factor": (lambda y, b, r, c: (y + b) * c, lambda y, b, r, c: times(plus(y, b), c), 1),
    "float32": (lambda y, b, r, c: y.astype("float32"), lambda y, b, r, c: in_float32(y), 1),
    "two results": (
        lambda y, b, r, c: (np.tanh(y), (y + b).astype("float32")),
        lambda y, b, r, c: (one("tanh", y), in_float32(plus(y, b))),
        1,
    ),
    "sum": (
        lambda y, b, r, c: cf.relu(y + b).sum(axis=1),
        lambda y, b, r, c: rows(bounds.total(one("relu", plus(y, b)), 1)),
        2,
    ),
    "logsumexp": (
        lambda y, b, r, c: cf.leaky_relu(cf.logsumexp(y + b, axis=1), 0.125),
        lambda y, b, r, c: bounds.pointwise(
            "leaky_relu", rows(bounds.logsumexp(plus(y, b), 1)), bounds.constant(0.125, y.dtype), dtype=y.dtype
        ),
        2,
    ),
    "several reductions": (
        lambda y, b, r, c: (y.max(axis=1), y.min(axis=1), np.tanh(y).mean(axis=1), cf.logsumexp(y + r, axis=1)),
        lambda y, b, r, c: (
            rows(bounds.extreme(y, 1, "max")),
            rows(bounds.extreme(y, 1, "min")),
            rows(bounds.mean(one("tanh", y), 1)),
            rows(bounds.logsumexp(plus(y, r), 1)),
        ),
        2,
    ),
    "written and reduced": (
        lambda y, b, r, c: (np.tanh(y), cf.relu(y).sum(axis=1)),
        lambda y, b, r, c: (one("tanh", y), rows(bounds.total(one("relu", y), 1))),
        2,
    ),
    "columns": (
        lambda y, b, r, c: cf.relu(y).sum(axis=0),
        lambda y, b, r, c: bounds.total(one("relu", y), 0).view(lambda a: a[0]),
        1,
    ),
    "softmax": (lambda y, b, r, c: cf.softmax(y + b, axis=1), lambda y, b, r, c: bounds.softmax(plus(y, b), 1), 2),
    "variances": (
        lambda y, b, r, c: ((y + b).var(axis=1), cf.relu(y + 100).std(axis=1)),
        lambda y, b, r, c: (
            rows(bounds.variance(plus(y, b), 1)),
            rows(one("sqrt", bounds.variance(one("relu", plus(y, bounds.constant(100, y.dtype))), 1))),
        ),
        2,
    ),
    "costly columns": (
        lambda y, b, r, c: cf.softmax(y * np.exp(b), axis=1),
        lambda y, b, r, c: bounds.softmax(times(y, one("exp", b)), 1),
        2,
    ),
    "variance": (lambda y, b, r, c: y.var(axis=1), lambda y, b, r, c: rows(bounds.variance(y, 1)), 2),
}


def operands(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> list[np.ndarray[Any, Any]]:
    m, n, k = shape
    shapes = ((m, k), (n, k), (n,), (m, n), (m, 1))
    return [normal(rng, s, dtype, 0.5 if i < 2 else 1) for i, s in enumerate(shapes)]


def run(engine: Engine, function: Any, arrays: list[Any], launches: int | None = None) -> tuple[Any, ...]:
    """The results of a function, whose first product is ours."""
    given = engine.arrays(arrays)
    fused = cf.fuse(function)
    step = next(s for s in fused.plan(*given).steps if s.kind == "Gemm")
    assert step.epilogue is not None and step.how.startswith("own"), step.how
    assert launches in (None, step.launches)
    results = engine.host(fused(*given))
    return results if isinstance(results, tuple) else (results,)


def check(results: tuple[Any, ...], expected: Any) -> float:
    values = expected if isinstance(expected, tuple) else (expected,)
    return min(bounds.check(r, v, f"result {k}") for k, (r, v) in enumerate(zip(results, values, strict=True)))


def as_values(arrays: list[Any], dtype: str) -> list[Value]:
    return [bounds.exact(a if a.ndim == 2 else a[None], dtype) for a in arrays]


def tail_case(
    engine: Engine, rng: np.random.Generator, dtype: str, shape: tuple[int, int, int], tail: str, claimed: float = 0.99
) -> None:
    function, bound, launches = TAILS[tail]
    arrays = operands(rng, shape, dtype)
    results = run(engine, lambda x, w, b, r, c: function(x @ w.T, b, r, c), arrays, launches)
    x, w, *others = arrays
    assert check(results, bound(product(x, w, dtype), *as_values(others, dtype))) > claimed


# Few elements; fewer than a piece; a prime number of everything, on one tile and on two.
SHAPES = [(1, 2, 8), (3, 5, 16), (37, 41, 72), (131, 7, 64), (9, 263, 40)]


@pytest.mark.rotates
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tails(engine: Engine, shape: Any, tail: str, rng: np.random.Generator) -> None:
    """Every tail in either dtype, every shape in either dtype, and every tail of every shape."""
    turn = SHAPES.index(shape) + list(TAILS).index(tail)
    tail_case(engine, rng, ("bfloat16", "float16")[turn % 2], shape, tail)


@pytest.mark.parametrize("tail", ["nothing", "bias", "residual"])
@pytest.mark.parametrize("shape", [(1, 1, 8), (140, 1, 24)], ids=str)
def test_one_column(engine: Engine, shape: Any, tail: str, rng: np.random.Generator) -> None:
    tail_case(engine, rng, "float16", shape, tail)


@pytest.mark.rotates
@CUTS
@pytest.mark.parametrize("tail", ["two results", "several reductions"])
def test_more_tiles_than_blocks_and_more_of_k_than_stages(
    engine: Engine, tail: str, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    # A mean near 0 may be off by much of itself.
    tail_case(engine, rng, "bfloat16", (261, 523, 456), tail, claimed=0.7)


# Of a function of y, the bytes of an element of each result.
SIZES: dict[str, tuple[int, ...]] = {
    "two": (2,),
    "four": (4,),
    "two and four": (2, 4),
    "four, two, two and four": (4, 2, 2, 4),
    "six of two": (2,) * 6,
    "three of four": (4, 4, 4),
}


def of_sizes(y: Any, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Results of so many bytes an element: y and its halves, quarters, ... in 16 bits or in float32."""
    scaled = (y * 2.0**-k for k in range(len(sizes)))
    return tuple(v if size == 2 else v.astype("float32") for v, size in zip(scaled, sizes, strict=True))


@pytest.mark.rotates
@CUTS
@pytest.mark.parametrize("sizes", SIZES)
def test_results_of_every_size(
    engine: Engine, sizes: str, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Boxes of every width, of which the last ones end beyond the matrix, and every place of a result in a panel."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    m, n, k = 261, 528, 72
    x, w, b = normal(rng, (m, k), "bfloat16"), normal(rng, (n, k), "bfloat16"), normal(rng, (n,), "bfloat16")
    fused, given = cf.fuse(lambda x, w, b: of_sizes(x @ w.T + b, SIZES[sizes])), engine.arrays([x, w, b])
    (step,) = fused.plan(*given).steps
    assert step.epilogue is not None and len(step.outputs) == len(SIZES[sizes])
    found = fused(*given)
    y = plus(product(x, w, "bfloat16"), bounds.exact(b[None], "bfloat16"))
    for k, result in enumerate(map(engine.host, found)):
        scaled = times(y, bounds.constant(2.0**-k, "bfloat16"))
        expected = scaled if result.itemsize == 2 else in_float32(scaled)
        assert result.itemsize == SIZES[sizes][k] and bounds.check(result, expected, f"result {k}") > 0.99


def test_wide_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """More tiles beside each other than lanes merge at once."""
    monkeypatch.setattr(tiles, "_TILES", ((128, 1, False),))
    x, w, _, _, _ = operands(rng, (3, 4300, 8), "float16")
    w[:4200] /= 4  # the largest come last
    results = run(engine, lambda x, w: ((x @ w.T).max(axis=1), cf.logsumexp(x @ w.T, axis=1)), [x, w], 2)
    y = product(x, w, "float16")
    assert check(results, (rows(bounds.extreme(y, 1, "max")), rows(bounds.logsumexp(y, 1)))) == 1


TURNED = ["left", "right", "both"]


@pytest.mark.rotates
@CUTS
@pytest.mark.parametrize("turned", TURNED)
def test_turned_operands(
    engine: Engine, turned: str, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Every way in either dtype, every cut in either dtype, and every way of every cut."""
    dtype = ("bfloat16", "float16")[(tiles._TILES.index(cut) + TURNED.index(turned)) % 2]
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    m, n, k = 136, 264, 88
    x, w = normal(rng, (m, k), dtype), normal(rng, (n, k), dtype)
    expected = product(x, w, dtype)
    left, right = turned in ("left", "both"), turned in ("right", "both")
    given = [np.ascontiguousarray(x.T) if left else x, np.ascontiguousarray(w.T) if right else w]
    results = run(engine, lambda a, b: (a.T if left else a) @ (b if right else b.T), given, 1)
    assert check(results, expected) > 0.99


SPECIAL, HUGE = (np.inf, -np.inf, np.nan), (3e38, -3e38, 1e-38)


@pytest.mark.parametrize(
    ("tail", "values"),
    [(tail, SPECIAL) for tail in ("bias", "logsumexp", "several reductions", "softmax")]
    + [(tail, HUGE) for tail in ("bias", "logsumexp", "several reductions")],
)
def test_special_values(engine: Engine, tail: str, values: Any, rng: np.random.Generator) -> None:
    """Infinite and NaN elements are where exact arithmetic has them; what overflows is not claimed."""
    function, bound, launches = TAILS[tail]
    arrays = operands(rng, (37, 43, 72), "bfloat16")
    arrays[0] = sprinkle(rng, arrays[0], 0.003, values)
    if tail == "bias":  # of the others, one such number of the bias reaches every row
        arrays[2] = sprinkle(rng, arrays[2], 0.05, values)
    results = run(engine, lambda x, w, b, r, c: function(x @ w.T, b, r, c), arrays, launches)
    x, w, *others = arrays
    with np.errstate(all="ignore"):
        assert check(results, bound(product(x, w, "bfloat16"), *as_values(others, "bfloat16"))) > 0.3
        assert values is HUGE or not np.isfinite(product(x, w, "bfloat16").v).all()


def test_guards_fail_in_single_elements(engine: Engine, rng: np.random.Generator) -> None:
    """A zero times a factor that is infinite is evaluated as written, in whole tiles and at their ends."""
    x, w, _, _, _ = operands(rng, (75, 300, 72), "bfloat16")
    x[::7] = 0
    divisor = np.where(np.arange(300) % 5 == 2, 2e-38, 1).astype(dtype_of("bfloat16"))
    factor = np.where(np.arange(300) % 3 == 0, 64, 1).astype(dtype_of("bfloat16"))
    given, *kept = engine.arrays([x, w, divisor, factor])
    fused = cf.fuse(lambda x, w, d, f: cf.relu((x @ w.T) / d * f)).bind(**dict(zip("wdf", kept, strict=True)))
    step = fused.plan(given).steps[0]
    assert step.epilogue is not None and any(n.op == "guard" for n in step.epilogue.nodes)
    result = engine.host(fused(given)).astype(np.float64)
    assert (result[::7] == 0).all()
    with np.errstate(over="ignore"):
        exact = np.maximum(product(x, w, "bfloat16").v / divisor.astype(np.float64) * factor.astype(np.float64), 0)
    usual = divisor == 1
    np.testing.assert_allclose(result[:, usual], exact[:, usual], rtol=2**-7, atol=1e-3)
    assert (result[exact > 1e39] == np.inf).all()


@pytest.mark.parametrize("tail", ["gelu", "logsumexp", "several reductions"])
@DTYPES
def test_rounding_the_product_first_is_no_more_accurate(
    engine: Engine, dtype: str, tail: str, rng: np.random.Generator
) -> None:
    """Against float64, over all elements: a 16-bit product in memory, read by an exact row program, errs as much."""
    function, bound, _ = TAILS[tail]
    arrays = operands(rng, (96, 80, 200), dtype)
    x, w, *others = arrays
    values = as_values(others, dtype)
    exact = product(x, w, dtype)
    stored = dataclasses.replace(exact, v=exact.v.astype(dtype_of(dtype)).astype(np.float64))
    results = run(engine, lambda x, w, b, r, c: function(x @ w.T, b, r, c), arrays)
    expected, rounded_first = bound(exact, *values), bound(stored, *values)
    if not isinstance(expected, tuple):
        expected, rounded_first = (expected,), (rounded_first,)
    for result, right, other in zip(results, expected, rounded_first, strict=True):
        then_rounded = other.v.astype(result.dtype).astype(np.float64)
        assert np.linalg.norm(result.astype(np.float64) - right.v) <= 1.001 * np.linalg.norm(then_rounded - right.v)


def test_a_product_that_is_read_again_is_written(engine: Engine, rng: np.random.Generator) -> None:
    """And what it was rounded to is what its epilogue reads."""
    x, w, b, _, _ = operands(rng, (33, 40, 64), "bfloat16")
    y, total = run(engine, lambda x, w, b: (x @ w.T, cf.relu(x @ w.T).astype("float32").sum(axis=1)), [x, w, b], 2)
    assert check((y,), product(x, w, "bfloat16")) == 1
    sums = bounds.total(one("relu", bounds.exact(y, "float32")), 1)
    assert check((total,), rows(sums)) == 1


def test_rows_keep_their_bits(engine: Engine, rng: np.random.Generator) -> None:
    """Whatever comes beside them, and in whatever order threads run."""
    arrays = operands(rng, (150, 300, 72), "bfloat16")
    x, w, b, _, _ = arrays
    functions = [lambda x, w, b: cf.logsumexp(x @ w.T + b, axis=1), lambda x, w, b: cf.gelu(x @ w.T + b)]
    for function in functions:
        (whole,) = run(engine, function, [x, w, b])
        (again,) = run(engine, function, [x, w, b])
        (part,) = run(engine, function, [np.ascontiguousarray(x[131:]), w, b])
        np.testing.assert_array_equal(whole.view(np.uint16), again.view(np.uint16))
        np.testing.assert_array_equal(whole[131:].view(np.uint16), part.view(np.uint16))


@pytest.mark.rotates
@pytest.mark.parametrize("cut", [(128, 2, False), (128, 2, True)], ids=["shared", "alternating"])
def test_every_order_of_threads_gives_the_same_bits(
    engine: Engine, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """A cluster of two, with a stage more than the ring holds; more tiles than clusters where warpgroups alternate."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    x, w, b, _, _ = operands(rng, (130, 270 if cut[2] else 20, 400), "bfloat16")
    fused = cf.fuse(lambda x, w, b: np.tanh(x @ w.T + b))
    given = engine.arrays([x, w, b])
    results = [engine.host(fused(*given)) for _ in range(12)]
    assert all((r.view(np.uint16) == results[0].view(np.uint16)).all() for r in results)


@pytest.mark.parametrize("m", [1, 19])
@pytest.mark.parametrize("which", ["x", "w", "b", "r", "out"])
def test_arrays_that_begin_anywhere(engine: Engine, which: str, m: int, rng: np.random.Generator) -> None:
    """Arrays that the copy engine cannot read or write where they are, and pairs that lie between two words."""
    arrays = dict(zip("xwbr", operands(rng, (m, 24, 40), "float16"), strict=False))
    fused = cf.fuse(lambda x, w, b, r: cf.gelu(x @ w.T + b) * r)
    given = [engine.array(a, "offset" if name == which else "contiguous") for name, a in arrays.items()]
    plain = engine.host(fused(*engine.arrays(list(arrays.values()))))
    out = engine.array(np.zeros_like(arrays["r"]), "offset" if which == "out" else "contiguous")
    assert fused.plan(*given).steps[0].epilogue is not None
    fused(*given, out=out)
    np.testing.assert_array_equal(engine.host(out).view(np.uint16), plain.view(np.uint16))


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cut", [(64, 1, False), (128, 1, True)], ids=["shared", "alternating"])
def test_rows_that_begin_anywhere(
    engine: Engine, cut: Any, dtype: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Of 16 bits and of 32, in several tiles: elements have the same bits wherever they are, no other is written."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    x, w, b, *_ = operands(rng, (19, 150, 24), dtype)
    fused = cf.fuse(lambda x, w, b: (cf.gelu(x @ w.T + b), (x @ w.T).astype("float32") * 3))
    plain = [engine.host(y) for y in fused(*engine.arrays([x, w, b]))]
    for n in range(128, 150):
        given = engine.arrays([x, w[:n], b[:n]])
        assert all(step.epilogue is not None for step in fused.plan(*given).steps)
        begins = 3 * n % 8, 5 * n % 8
        memory = [engine.array(np.full(19 * n + 16, 7, y.dtype)) for y in plain]
        fused(*given, out=tuple(m[k : k + 19 * n].reshape(19, n) for m, k in zip(memory, begins, strict=True)))
        for m, k, wanted in zip(map(engine.host, memory), begins, plain, strict=True):
            np.testing.assert_array_equal(m[k : k + 19 * n].reshape(19, n), wanted[:, :n])
            assert (m[:k] == 7).all() and (m[k + 19 * n :] == 7).all()


@pytest.mark.parametrize("n", [1, 2, 3, 9, 65])
def test_narrow_results_that_begin_anywhere(engine: Engine, n: int, rng: np.random.Generator) -> None:
    """Rows that end before their first whole pack."""
    x, w, *_ = operands(rng, (19, n, 8), "float16")
    fused = cf.fuse(lambda x, w: x @ w.T)
    wanted = engine.host(fused(*engine.arrays([x, w])))
    for begin in range(8):
        memory = engine.array(np.full(19 * n + 16, 7, np.float16))
        fused(*engine.arrays([x, w]), out=memory[begin : begin + 19 * n].reshape(19, n))
        found = engine.host(memory)
        np.testing.assert_array_equal(found[begin : begin + 19 * n].reshape(19, n), wanted)
        assert (np.delete(found, range(begin, begin + 19 * n)) == 7).all()


@pytest.mark.parametrize("shape", [(4, 6, 0), (0, 6, 8), (4, 0, 8)])
def test_empty_products(engine: Engine, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, w = (engine.array(np.ones(s, np.float16)) for s in ((m, k), (n, k)))
    fused = cf.fuse(lambda x, w: np.tanh(x @ w.T) + 1)
    assert all(step.epilogue is None for step in fused.plan(x, w).steps)
    np.testing.assert_array_equal(engine.host(fused(x, w)), np.ones((m, n), np.float16))


def test_chains_of_products(engine: Engine, rng: np.random.Generator) -> None:
    """The rounded results of one product are the operands of the next."""
    x, w, b, _, _ = operands(rng, (40, 48, 48), "float16")
    results = run(engine, lambda x, w, b: cf.relu(x @ w.T + b) @ w, [x, w, b])
    hidden = TAILS["bias"][1](product(x, w, "float16"), bounds.exact(b[None], "float16"), None, None)
    hidden = one("relu", hidden).stored()
    value = bounds.matmul(dataclasses.replace(hidden, dtype="float16"), bounds.exact(w, "float16"), "float32")
    assert check(results, dataclasses.replace(value, e=2 * value.e, dtype="float16")) > 0.99
    assert kinds(results[0]).max() == 0


def test_an_argument_that_its_own_product_changes(engine: Engine, rng: np.random.Generator) -> None:
    x, w = normal(rng, (40, 40), "float16", 0.5), normal(rng, (40, 40), "float16", 0.5)

    def change(x: Any, w: Any) -> Any:
        y = cf.relu(x @ w.T)
        x[...] = y
        return y.max(axis=1)

    fused, given = cf.fuse(change), engine.arrays([x, w])
    assert fused.plan(*given).steps[0].epilogue is not None
    top = engine.host(fused(*given))
    expected = one("relu", product(x, w, "float16"))
    assert check((engine.host(given[0]),), expected) == 1
    assert check((top,), rows(bounds.extreme(expected, 1, "max"))) == 1


def test_numbers_of_the_call(engine: Engine, rng: np.random.Generator) -> None:
    x, w, _, _, _ = operands(rng, (20, 24, 16), "float16")
    fused = cf.fuse(lambda x, w, s: (x @ w.T) * s)
    given = engine.arrays([x, w])
    one_plan = [engine.host(fused(*given, s)) for s in (1.0, 2.0)]
    assert len(fused.plans) == 1 and fused.plans[0].steps[0].epilogue is not None
    np.testing.assert_array_equal(one_plan[0] * np.float16(2), one_plan[1])


@pytest.mark.rotates
@CUTS
@pytest.mark.parametrize(("m", "columns"), [(133, 7), (133, 300), (133, 523), (9, 4300)])
def test_first_positions(
    engine: Engine, m: int, columns: int, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Of sums of few integers, so that the extreme is in many columns and tiles; rows of infinities and NaN, too."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    x = rng.integers(-1, 2, (m, 8)).astype(dtype_of("bfloat16"))
    w = rng.integers(-1, 2, (columns, 8)).astype(dtype_of("bfloat16"))
    x[0] = 0.0
    x[1], x[2] = np.nan, [-np.inf] + [0] * 7  # NaN where w has a zero there

    def places(x: Any, w: Any) -> Any:
        y = x @ w.T
        return y.argmax(axis=1), y.argmin(axis=1), y.max(axis=1)

    def beside(x: Any, w: Any) -> Any:
        y = (x @ w.T).astype("float32")
        return y.argmax(axis=1), cf.logsumexp(y, axis=1)

    for special in (0.0, -np.inf, np.inf):
        w[min(259, columns - 1), 3] = special
        with np.errstate(all="ignore"):
            y = x.astype(np.float64) @ w.astype(np.float64).T
        found = run(engine, places, [x, w], 2)
        for ours, right in zip(found, (y.argmax(1), y.argmin(1), y.max(1).astype(x.dtype)), strict=True):
            assert_equal(ours, right)
        assert_equal(run(engine, beside, [x, w], 2)[0], y.argmax(1))


@pytest.mark.rotates
@CUTS
@pytest.mark.parametrize(("m", "columns"), [(133, 7), (133, 300), (133, 523), (9, 4300)])
def test_sums_about_the_maximum(
    engine: Engine, m: int, columns: int, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Of logits that bfloat16 products have exactly; the maximum rises from tile to tile in some rows, else falls."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    slope = np.linspace(-2, 2, m).round(2)[:, None]
    x = np.concatenate([np.ones((m, 1)), slope, rng.integers(-3, 4, (m, 6))], axis=1).astype(dtype_of("bfloat16"))
    step = np.arange(columns)[:, None] // 32
    w = np.concatenate([np.zeros((columns, 1)), step, rng.integers(-3, 4, (columns, 6))], axis=1)
    w = w.astype(dtype_of("bfloat16"))
    labels = rng.integers(0, columns, m)
    outside = np.array([-columns - 1, columns, 1 << 32, (1 << 32) + 3, 3 - (1 << 32), 1 << 31])
    given = np.concatenate([outside, labels[outside.size :]])

    def losses(x: Any, w: Any, labels: Any, dtype: str = "float32") -> Any:
        y = (x @ w.T).astype(dtype)
        distance = y - y.max(axis=1, keepdims=True)
        total = np.exp(distance).sum(axis=1, keepdims=True)
        logarithm = distance - np.log(total)
        at_label = logarithm[np.arange(m), labels]
        return at_label, logarithm.sum(axis=1), (np.exp(distance) / total * logarithm).sum(axis=1)

    for special in (0.0, -np.inf):
        w[min(5, columns - 1), 0] = special
        found = run(engine, losses, [x, w, given], 2)
        with np.errstate(all="ignore"):
            expected = losses(x.astype(np.float64), w.astype(np.float64), labels, "float64")
            expected[0][: outside.size] = np.nan
        for ours, right, depth in zip(found, expected, (1, columns, columns), strict=True):
            # A logarithm of up to 2^7, and roundings of one sign in sums of them.
            scale = np.maximum(np.abs(right), depth if np.isfinite(right).all() else 1.0)
            assert np.array_equal(np.isnan(ours), np.isnan(right)) and np.array_equal(np.isinf(ours), np.isinf(right))
            finite = np.isfinite(right)
            assert np.all(np.abs(ours[finite] - right[finite]) <= 64 * 2.0**-23 * (1 + scale[finite]))
