"""Values between steps whose rows are padded, as our product reads them: by their kernels on the CPU or on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import bounds
import numpy as np
import pytest
from bounds import Value
from own_kernels import OWN_KERNELS, by_own_kernels
from support import Engine, dtype_of, normal

import cupyfuse as cf
from cupyfuse import settings
from cupyfuse.plan.schedule import tiles

Arrays = list[np.ndarray[Any, Any]]


@pytest.fixture(params=OWN_KERNELS)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that computes every 16-bit product that it can by our own kernel."""
    with by_own_kernels(request.param, monkeypatch) as chosen:
        yield chosen


def product(x: Value, w: Value) -> Value:
    """`x @ w` as our kernel hands it on: summed in float32, with twice the error as tensor cores truncate."""
    value = bounds.matmul(x, w, "float32")
    return dataclasses.replace(value, e=2 * value.e, dtype=x.dtype)


def transposed(value: Value) -> Value:
    return value.view(lambda a: a.T)


def doubled(y: Any) -> Any:
    """Exact in 16 bits, so that what is stored is known."""
    return cf.relu(y) * 2


def exactly_doubled(y: np.ndarray[Any, Any], dtype: str) -> Value:
    return bounds.exact((np.maximum(y.astype(np.float64), 0) * 2).astype(y.dtype), dtype)


def operands(rng: np.random.Generator, rows: int, width: int, dtype: str) -> Arrays:
    """A matrix of odd rows, and the right and the left operand of its products."""
    return [normal(rng, shape, dtype, 0.5) for shape in ((rows, width), (width, 24), (rows, 40))]


def by_our_kernel(fused: Any, given: Any) -> list[bool]:
    return [step.by_tiles for step in fused.plan(*given).steps if step.kind == "Gemm"]


def padded_values(fused: Any, given: Any) -> list[tuple[int, ...]]:
    return [value.shape for value in fused.plan(*given).scheduled.padded]


# More rows and columns than a tile, with every remainder to a pack.
SHAPES = [(1, 9), (2, 3), (37, 131), (5, 258), (140, 263), (9, 12), (130, 14)]


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_a_row_program_writes(engine: Engine, shape: Any, dtype: str, rng: np.random.Generator) -> None:
    """As a gradient is read: by a product, by another one transposed, and by a sum down the columns."""
    y, w, x = operands(rng, *shape, dtype)
    fused = cf.fuse(lambda y, w, x: (doubled(y) @ w, doubled(y).T @ x, doubled(y).astype("float32").sum(axis=0)))
    given = engine.arrays([y, w, x])
    d = exactly_doubled(y, dtype)
    assert by_our_kernel(fused, given) == [True, True]
    assert padded_values(fused, given) == ([shape] if shape[0] > 1 else [])
    results = engine.host(fused(*given))
    right, left, sums = product(d, bounds.exact(w, dtype)), product(transposed(d), bounds.exact(x, dtype)), d
    for k, (result, value) in enumerate(zip(results[:2], (right, left), strict=True)):
        assert bounds.check(result, value, f"product {k}") > 0.99
    expected = bounds.total(bounds.cast(sums, "float32"), 0).view(lambda a: a[0])
    assert bounds.check(results[2], expected, "sums") == 1


@pytest.mark.rotates
@pytest.mark.parametrize("cut", tiles._TILES, ids=lambda cut: f"{cut[0]}by{cut[1]}{'alternating' * cut[2]}")
@pytest.mark.parametrize(("width", "stride"), [(131, 136), (262, 264), (268, 272), (523, 576), (520, 576)])
def test_what_a_product_writes(
    engine: Engine, width: int, stride: int, cut: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """The epilogue of one product is the operand of two more."""
    monkeypatch.setattr(tiles, "_TILES", (cut,))
    a, b = (normal(rng, shape, "bfloat16", 0.5) for shape in ((140, 8), (width, 8)))
    _, w, x = operands(rng, 140, width, "bfloat16")
    # Eighths of at most 8 terms of 4 bits each: exact in float32, and rounded once.
    a, b = (np.round(i.astype(np.float32) * 2).astype(i.dtype) for i in (a, b))

    def function(a: Any, b: Any, w: Any, x: Any) -> Any:
        d = doubled(a @ b.T)
        return d @ w, d.T @ x

    fused, given = cf.fuse(function), engine.arrays([a, b, w, x])
    assert by_our_kernel(fused, given) == [True] * 3
    assert padded_values(fused, given) == [(140, width)]
    scheduled = fused.plan(*given).scheduled
    assert [scheduled.row_stride(value) for value in scheduled.padded] == [stride]
    y = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(a.dtype)
    d = exactly_doubled(y, "bfloat16")
    results = engine.host(fused(*given))
    assert bounds.check(results[0], product(d, bounds.exact(w, "bfloat16")), "right") > 0.99
    assert bounds.check(results[1], product(transposed(d), bounds.exact(x, "bfloat16")), "left") > 0.99


KEPT: dict[str, Callable[..., Any]] = {
    "a result": lambda y, w: (doubled(y), doubled(y) @ w),
    "a reshaped value": lambda y, w: (doubled(y) @ w, doubled(y).reshape(131, 36) + 1),
    "an argument that is bound": lambda y, w: y @ w,
}


@pytest.mark.parametrize("why", KEPT)
def test_what_others_read_as_it_lies_is_not_padded(engine: Engine, why: str, rng: np.random.Generator) -> None:
    y, w, _ = operands(rng, 36, 131, "bfloat16")
    fused, given = cf.fuse(KEPT[why]), engine.arrays([y, w])
    if why == "an argument that is bound":
        bound = fused.bind(y=given[0])
        assert not bound.plan(given[1]).scheduled.padded
        results = engine.host(bound(given[1]))
    else:
        assert padded_values(fused, given) == []
        results = engine.host(fused(*given))
    values = results if isinstance(results, tuple) else (results,)
    d = bounds.exact(y, "bfloat16") if why == "an argument that is bound" else exactly_doubled(y, "bfloat16")
    (found,) = (v for v in values if v.shape == (36, 24))
    assert bounds.check(found, product(d, bounds.exact(w, "bfloat16")), why) > 0.99


@pytest.mark.rotates
@pytest.mark.parametrize("layout", ["contiguous", "row_gap", "offset", "transposed"])
@pytest.mark.parametrize("shape", [(37, 131), (140, 523), (2, 9)], ids=str)
def test_arguments_are_copied_once_for_all_products(
    engine: Engine, shape: Any, layout: str, rng: np.random.Generator
) -> None:
    """Gradients of a layer of odd width, as PyTorch asks for them."""
    y, w, x = operands(rng, *shape, "bfloat16")
    given = [engine.array(y, layout), *engine.arrays([w, x])]
    fused = cf.fuse(lambda y, w, x: (y @ w, y.T @ x))
    assert by_our_kernel(fused, given) == [True, True]
    assert padded_values(fused, given) == [shape]
    assert [step.kind for step in fused.plan(*given).steps].count("RowProgram") == 1
    right, left = engine.host(fused(*given))
    d = bounds.exact(y, "bfloat16")
    assert bounds.check(right, product(d, bounds.exact(w, "bfloat16")), "right") > 0.99
    assert bounds.check(left, product(transposed(d), bounds.exact(x, "bfloat16")), "left") > 0.99


@pytest.mark.parametrize(
    ("rows", "width", "copied"), [(2048, 50257, True), (64, 1001, True), (2048, 50264, False), (1, 50257, False)]
)
def test_arguments_are_copied_where_that_pays(rows: int, width: int, copied: bool) -> None:
    arrays = [cf.spec(shape, "bfloat16") for shape in ((rows, width), (width, 768), (rows, 768))]
    plan = cf.fuse(lambda y, w, x: (y @ w, y.T @ x)).plan(*arrays)
    assert [step.kind for step in plan.steps] == ["RowProgram"] * copied + ["Gemm"] * 2
    assert [plan.scheduled.row_stride(value) for value in plan.scheduled.padded] == [-(-width // 64) * 64] * copied


def largest(y: Any) -> Any:
    return y.max(axis=1, keepdims=True)


# Of a column, whose transpose is read as a row: by a row program, as a vector, and by an epilogue.
COLUMNS: dict[str, Callable[..., Any]] = {
    "row": lambda y, w, x: (largest(y) @ w, x + largest(y).T),
    "vector": lambda y, w, x: (largest(y) @ w, (largest(y).T * x).sum(axis=1)),
    "epilogue": lambda y, w, x: (largest(y) @ w, (x.T @ x).astype("float32") * largest(y).T),
}


@pytest.mark.parametrize("reader", COLUMNS)
def test_columns_are_not_padded(engine: Engine, reader: str, rng: np.random.Generator) -> None:
    y, w, x = (normal(rng, shape, "bfloat16", 0.5) for shape in ((37, 131), (1, 24), (5, 37)))
    fused, given = cf.fuse(COLUMNS[reader]), engine.arrays([y, w, x])
    assert (37, 1) not in padded_values(fused, given)
    exact = COLUMNS[reader](*(a.astype(np.float64) for a in (y, w, x)))
    with np.errstate(all="ignore"):
        for found, expected in zip(engine.host(fused(*given)), exact, strict=True):
            np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-6, atol=2**-6)


NOT_COPIED: dict[str, Callable[..., Any]] = {
    "a reshaped operand beside it": lambda y, w: y @ w.reshape(131, 36),
    "a slice beside it": lambda y, w: y @ w[:, 1:].T,
    "itself twice": lambda y, w: y @ y.T,
}


@pytest.mark.parametrize("why", NOT_COPIED)
def test_arguments_are_copied_for_our_product_alone(engine: Engine, why: str, rng: np.random.Generator) -> None:
    y, w = (normal(rng, shape, "bfloat16", 0.5) for shape in ((37, 131), (36, 131)))
    wide = normal(rng, (36, 132), "bfloat16", 0.5) if "slice" in why else w
    fused, given = cf.fuse(NOT_COPIED[why]), engine.arrays([y, wide])
    steps = fused.plan(*given).steps
    assert (sum(step.kind == "RowProgram" for step in steps), padded_values(fused, given)) == (
        (1, [y.shape]) if "twice" in why else (0, [])
    )
    expected = NOT_COPIED[why](y.astype(np.float64), wide.astype(np.float64))
    np.testing.assert_allclose(engine.host(fused(*given)).astype(np.float64), expected, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("shapes", [((0, 9), (9, 8)), ((9, 7), (7, 0)), ((5, 0), (0, 9))], ids=str)
def test_nothing_is_copied_for_empty_products(shapes: Any) -> None:
    plan = cf.fuse(lambda y, w: y @ w).plan(*(cf.spec(shape, "bfloat16") for shape in shapes))
    assert not plan.scheduled.padded and [step.kind for step in plan.steps] == ["Gemm"]


def test_the_padding_counts_as_workspace(rng: np.random.Generator) -> None:
    y, w, _ = operands(rng, 37, 131, "bfloat16")
    with settings.epilogues("always"):
        plan = cf.fuse(lambda y, w: doubled(y) @ w).plan(y, w)
    assert plan.workspace == 37 * 136 * 2 and plan.steps[0].writes == 37 * 131 * 2


def test_sums_over_blocks(engine: Engine, rng: np.random.Generator) -> None:
    """Blocks of columns, the last of them of odd rows: our product adds its addend to the sum, in place."""
    x, w = (np.round(2 * normal(rng, shape, "float32")).astype(dtype_of("bfloat16")) for shape in ((300, 8), (1051, 8)))

    def function(x: Any, w: Any) -> Any:
        d = doubled(x @ w.T)
        return d @ w, d.T @ x

    fused, given = cf.fuse(function, max_workspace=300 * 300 * 2), engine.arrays([x, w])
    plan = fused.plan(*given)
    assert plan.blocks is not None and plan.blocks.transposed and plan.blocks.count > 1
    last = plan.blocks.last
    assert last is not None and last.scheduled.padded
    assert [s.by_tiles for s in last.steps if s.kind == "Gemm"] == [True] * 3
    y = (x.astype(np.float64) @ w.T.astype(np.float64)).astype(x.dtype)
    d = exactly_doubled(y, "bfloat16")
    results = engine.host(fused(*given))
    assert bounds.check(results[0], product(d, bounds.exact(w, "bfloat16")), "the sum") > 0.95
    assert bounds.check(results[1], product(transposed(d), bounds.exact(x, "bfloat16")), "left") > 0.99


def test_what_a_product_adds_to_is_changed_in_place(engine: Engine, rng: np.random.Generator) -> None:
    """Unless it is an operand too."""
    for width in (24, 21):
        x, w, y = (normal(rng, shape, "bfloat16", 0.5) for shape in ((140, 40), (width, 40), (140, width)))
        total, square = y.astype("float32"), normal(rng, (264, 264), "bfloat16", 0.5)

        def add(total: Any, x: Any, w: Any) -> None:
            total += (x @ w.T).astype("float32")

        def grow(square: Any, x: Any) -> None:
            square += square @ square

        given = engine.arrays([total, x, w])
        fused = cf.fuse(add)
        (step,) = fused.plan(*given).steps
        assert step.by_tiles
        fused(*given)
        exact = product(bounds.exact(x, "bfloat16"), bounds.exact(w.T, "bfloat16"))
        expected = bounds.pointwise(
            "add", bounds.exact(total, "float32"), bounds.cast(exact, "float32"), dtype="float32"
        )
        assert bounds.check(engine.host(given[0]), expected, "the sum") == 1
        (changed,) = engine.arrays([square])
        cf.fuse(grow)(changed, given[1])
        s = bounds.exact(square, "bfloat16")
        assert (
            bounds.check(engine.host(changed), bounds.pointwise("add", s, product(s, s), dtype="bfloat16"), "") > 0.99
        )
