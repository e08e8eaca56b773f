"""Arguments whose rows lie in blocks or in another order: read where they are, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine

import cupyfuse as cf
from cupyfuse.api.arrays import layout, strided_layout
from cupyfuse.plan.schedule import row_places


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def swapped(q: Any) -> Any:
    return q.reshape(*q.shape[:-1], -1, 2)[..., ::-1].reshape(q.shape)


def standardised(q: Any) -> Any:
    return (q - q.mean(-1, keepdims=True)) / np.sqrt(q.var(-1, keepdims=True) + 1e-3)


# Of four dimensions each, the rows of the first in blocks; the last dimension has eight elements or more.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda q, c: q * c,
    "halves": lambda q, c: q[..., :4] * 2 + q[..., 4:8] * c[..., :4],
    "softmax": lambda q, c: cf.softmax(q + c, axis=-1),
    "swapped": lambda q, c: q[..., :8] * 3 - swapped(q[..., :8]) * c[..., :8],
    "swapped_whole": lambda q, c: q * 3 - swapped(q) * c if q.shape[-1] % 2 == 0 else q,
    "sum": lambda q, c: q.sum(-1) * 2,
    "logsumexp": lambda q, c: cf.logsumexp(q, axis=-1),
    "norm": lambda q, c: standardised(q) * c,
    "argmax": lambda q, c: q.argmax(-1),
    "columns": lambda q, c: q.sum((0, 1, 2)) + (q * c).max((0, 1, 2)),
    "of_a_product": lambda q, c: (q * c).reshape(-1, q.shape[-1]) @ np.ones((q.shape[-1], 3), "float32"),
    "product_alone": lambda q, c: q.reshape(-1, q.shape[-1]) @ np.ones((q.shape[-1], 3), "float32"),
    "returned": lambda q, c: (q, q * 2),
    "transposed": lambda q, c: (q * 2).transpose(0, 2, 1, 3),
    "vector": lambda q, c: q * c[:1, :1, :1] + 1,
    "scan": lambda q, c: np.cumsum(q * c, axis=-1),
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "first_of_three": lambda x: x[:, :, 0],
    "last_of_three": lambda x: x[:, :, 2],
    "without_the_first": lambda x: x.reshape(x.shape[0], x.shape[1], -1, x.shape[-1])[:, 1:],
    "part_of_rows": lambda x: x[:, :, 1][..., :8],
    "one_batch": lambda x: x[:1, :, 1],
    "permuted": lambda x: x[:, :, 1].transpose(0, 2, 1, 3),
    "part_of_permuted": lambda x: x[:, 1:, :2, 1, :8].transpose(2, 0, 1, 3),
    "reversed_batches": lambda x: x[::-1, :, 0],
    "every_second": lambda x: x[:, ::2, 0],
    "three_strides": lambda x: x[:, 1:, 1, 1:],
}


@pytest.mark.rotates
@pytest.mark.parametrize("length", [8, 9, 64, 1100])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_rows_in_blocks(
    name: str, view: str, length: int, engine: Engine, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((3, 5, 3, 4, length)).astype("float32")
    expected_of = VIEWS[view](x.astype(np.float64))
    c = rng.standard_normal(expected_of.shape).astype("float32")
    found = engine.host(cf.fuse(PROGRAMS[name])(VIEWS[view](engine.array(x)), engine.array(c)))
    expected = PROGRAMS[name](expected_of, c.astype(np.float64))
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", ["first_of_three", "without_the_first", "permuted", "part_of_permuted"])
@pytest.mark.parametrize("name", ["product", "halves", "swapped_whole", "softmax", "norm", "columns"])
def test_nothing_is_copied(name: str, view: str, engine: Engine, rng: np.random.Generator) -> None:
    x = engine.array(rng.standard_normal((3, 5, 3, 4, 16)).astype("float32"))
    q = VIEWS[view](x)
    fused = cf.fuse(PROGRAMS[name])
    plan = fused.plan(q, engine.array(np.zeros(q.shape, np.float32)))
    assert all(step.kind != "Copy" for step in plan.steps)


@pytest.mark.parametrize("view", ["first_of_three", "permuted"])
def test_products_read_a_copy(view: str, engine: Engine) -> None:
    """Libraries of products know two strides."""
    q = VIEWS[view](engine.array(np.ones((3, 5, 3, 4, 16), np.float32)))
    plan = cf.fuse(PROGRAMS["product_alone"]).plan(q, engine.array(np.zeros(q.shape, np.float32)))
    assert [step.kind for step in plan.steps].count("Copy") == 1


# Rows whose lengths are no multiples of a vector's begin elsewhere in one, in another order.
ODD: dict[str, Callable[[Any], Any]] = {
    "written": lambda q: q * 2,
    "with_another": lambda q: q * q[::-1].copy(),
    "sum": lambda q: q.sum(-1, dtype="float32"),
    "softmax": lambda q: cf.softmax(q, axis=-1),
    "halves": lambda q: q[..., :130] + q[..., -130:],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("length", [130, 1030, 2100])
def test_rows_that_begin_between_vectors(
    length: int, dtype: str, name: str, engine: Engine, rng: np.random.Generator
) -> None:
    for x in (1 + rng.random((4, 2, length)), 1 + rng.random((3, 5, length))):
        values = x.astype(dtype)
        for of in (values, values[:, 1:].copy()):
            found = engine.host(cf.fuse(ODD[name])(engine.array(of).transpose(1, 0, 2)))
            expected = ODD[name](of.transpose(1, 0, 2).astype(np.float64))
            np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("program", [lambda q, c: q * c[:1], lambda q, c: q * c[0] + 1])
def test_rows_of_several_strides_are_not_joined(
    program: Callable[[Any, Any], Any], engine: Engine, rng: np.random.Generator
) -> None:
    """A value comes again for each of the first dimension, beside an argument with others between its rows."""
    x = rng.standard_normal((2, 4, 4, 17)).astype("float32")
    c = rng.standard_normal((2, 4, 2, 16)).astype("float32")
    q = engine.array(x)[:, :, :2, :16]
    found = engine.host(cf.fuse(program)(q, engine.array(c)))
    expected = program(x[:, :, :2, :16].astype(np.float64), c.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)  # the product and the sum round alone or together


def test_rows_are_told_by_their_strides() -> None:
    def found(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, int] | None:
        places = row_places(shape, strides)
        return places and (tuple(places.repeats), places.stride)

    assert found((3, 5, 4, 8), (480, 96, 8, 1)) == ((4, 1, 4, 12, 1, 0), 8)
    assert found((3, 4, 8), (40, 8, 1)) == ((4, 1, 4, 5, 1, 0), 8)
    assert found((3, 1, 4, 8), (40, 7, 8, 1)) == ((4, 1, 4, 5, 1, 0), 8)
    assert found((3, 4, 5, 8), (480, 8, 96, 1)) == ((20, 5, 4, 60, 1, 12), 8)
    assert found((3, 5, 4, 8), (480, 100, 8, 1)) == ((20, 4, 5, 120, 25, 2), 4)
    assert found((4, 5, 8), (8, 96, 1)) == ((5, 1, 5, 1, 12, 0), 8)
    others = [(160, 32, 8, 1), (480, 0, 8, 1), (480, 96, 0, 1), (480, 96, -8, 1)]
    assert [row_places((3, 5, 4, 8), strides) for strides in others] == [None] * len(others)
    assert row_places((2, 3, 5, 4, 8), (9999, 480, 100, 8, 1)) is None
    assert row_places((0, 5, 4, 8), (480, 96, 8, 1)) is None
    assert strided_layout((3, 5, 4, 8), (480, 96, 8, 1), False).rows == (4, 1, 4, 12, 1, 0)
    assert strided_layout((3, 5, 4, 8), (960, 192, 16, 2), False).rows is None
    assert layout(np.zeros((3, 5, 4, 8))).rows is None
