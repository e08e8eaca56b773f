"""Rows whose columns change places in pairs, which kernels read where they are; on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine

import cupyfuse as cf


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def swapped(x: Any) -> Any:
    return x.reshape(x.shape[0], -1, 2)[:, :, ::-1].reshape(x.shape)


def standardised(y: Any) -> Any:
    return (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-3)


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "rotary": lambda x, c: x * c + swapped(x) * c[::-1],
    "alone": lambda x, c: swapped(x) * 2,
    "both_swapped": lambda x, c: swapped(x) - swapped(c),
    "vector": lambda x, c: x * c[:1] + swapped(c[:1]) * swapped(x),
    "part": lambda x, c: x[:, : x.shape[1] // 4 * 2] - swapped(x[:, : x.shape[1] // 4 * 2]) * 3,
    "sum": lambda x, c: (x * c + swapped(x) * swapped(c)).sum(1),
    "logsumexp": lambda x, c: cf.logsumexp(x + 2 * swapped(x), axis=1),
    "softmax": lambda x, c: cf.softmax(x * c - swapped(x), axis=1),
    "norm": lambda x, c: standardised(x * c + swapped(x)),
    "columns": lambda x, c: (x * c + swapped(x)).sum(0),
    "rows_and_columns": lambda x, c: ((x + swapped(x) * c).sum(0), (swapped(x) * c).sum(1), swapped(x) * c),
    "argmax": lambda x, c: (swapped(x) * c).argmax(1),
    "guarded": lambda x, c: cf.relu((x - swapped(x)[:1]) / np.sqrt(c * c + 1e-5) * c),
    "product": lambda x, c: (swapped(x) * c) @ x.T,
    "of_a_product": lambda x, c: swapped(x @ x.T[:, : len(x) // 2 * 2]) * 2 if len(x) > 1 else x,
    "transposed": lambda x, c: (swapped(x) + c).T * 2,
}
SHAPES = [(5, 6), (33, 64), (7, 130), (3, 1026), (9, 4100), (2, 20000), (1, 70), (4, 2), (3, 4)]


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("layout", ["contiguous", "offset", "row_gap"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_swapped_columns(
    name: str, shape: tuple[int, int], layout: str, dtype: str, engine: Engine, rng: np.random.Generator
) -> None:
    """Rows at any address, and of lengths for every template; what is infinite stays where it is."""
    program = PROGRAMS[name]
    x, c = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    found = engine.host(cf.fuse(program)(engine.array(x, layout), engine.array(c)))
    with np.errstate(all="ignore"):
        expected = program(x.astype(np.float64), c.astype(np.float64))
    tolerance = {"float32": 1e-4, "float16": 5e-2, "float64": 1e-11}[dtype]
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for ours, theirs in pairs:
        scale = np.abs(theirs).max(initial=0) + 1
        np.testing.assert_allclose(ours.astype(np.float64) / scale, theirs / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(5, 6), (9, 1030)])
def test_results_at_odd_addresses(shape: tuple[int, int], engine: Engine, rng: np.random.Generator) -> None:
    """Vectors that begin between two in all arrays would have the elements of a pair in two."""
    x, c = (engine.array(rng.standard_normal(shape).astype("float32"), "offset") for _ in range(2))
    out = engine.array(np.full(shape, np.nan, np.float32), "offset")
    for name in ("rotary", "softmax"):
        found = engine.host(cf.fuse(PROGRAMS[name])(x, c, out=out))
        expected = PROGRAMS[name](engine.host(x).astype(np.float64), engine.host(c).astype(np.float64))
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)


def test_a_swap_is_read_where_it_is() -> None:
    """One launch: nothing is copied. Of rows of an odd number of columns there are no pairs."""
    spec = cf.spec((64, 128), "float32")
    plan = cf.fuse(PROGRAMS["rotary"]).plan(spec, spec)
    assert [step.kind for step in plan.steps] == ["RowProgram"]
    reversed_rows = cf.fuse(lambda x: x * 2 + x[:, ::-1]).plan(spec)
    assert len(reversed_rows.steps) == 2


@pytest.mark.parametrize("cols", [2, 6, 8])
def test_other_orders_are_no_swaps(cols: int, engine: Engine, rng: np.random.Generator) -> None:
    """Views that differ from it in one stride, length or offset."""
    x = rng.standard_normal((6, cols)).astype("float32")

    def views(x: Any) -> Any:
        threes = x.reshape(-1, 3, 2)[:, ::-1].reshape(x.shape)
        halves = x.reshape(x.shape[0], 2, -1)[:, ::-1].reshape(x.shape)
        shifted = x.reshape(-1)[1:-1].reshape(-1, 2)[:, ::-1].reshape(1, -1)
        rows = x.reshape(-1, 2, x.shape[1])[:, ::-1].reshape(x.shape)
        return x + threes, x - halves, shifted * 2, x + rows

    for ours, theirs in zip(engine.host(cf.fuse(views)(engine.array(x))), views(x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
