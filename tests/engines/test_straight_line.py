"""Straight-line programs of small steps give the bits that evaluation by blocks gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import FLOATS, normal

import cupyfuse as cf
from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.plan.plan import Plan

Program = Callable[..., Any]

FUNCTIONS: list[Program] = [
    lambda x, y, v: cf.softmax(x, axis=1) * v,
    lambda x, y, v: cf.log_softmax(x * v + y, axis=1),
    lambda x, y, v: (x - x.max(axis=1, keepdims=True), cf.softmax(x, axis=1).sum(axis=1), x.max(axis=1)),
    lambda x, y, v: cf.softmax(x, axis=0) + cf.logsumexp(y, axis=0),
    lambda x, y, v: (cf.logsumexp(x, axis=1), cf.logsumexp(y * 2, axis=1, keepdims=True) - y),
    lambda x, y, v: (x.sum(axis=0), y.mean(axis=1), (x * y).var(axis=0), x.min()),
    lambda x, y, v: np.where(x > y, x, y * 2).astype(np.float32) + (x > 0).astype(np.float32),
    lambda x, y, v: (x.T, x, x + y, x + y, (x + y).T * 2),
    lambda x, y, v: (np.broadcast_to(v, x.shape), np.zeros_like(x), np.full_like(x, 3), v + 1),
    lambda x, y, v: (x.astype(np.float64) * y).astype(x.dtype) - x,
    lambda x, y, v: ((x > 0) & (y > 0), (x > 0).sum(axis=1), (x == x).all(), np.isnan(x)),
    lambda x, y, v: x * 0.1 + 0.1 * x - (-0.0) * y + (x * 0.0),
    lambda x, y, v: np.exp(x - x.max(axis=1, keepdims=True)) / np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=0),
]


def bits(values: Any) -> list[Any]:
    return [(np.asarray(v).dtype, np.asarray(v).shape, np.ascontiguousarray(v).tobytes()) for v in values]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_programs_and_blocks_agree(number: int, special: bool, dtype: str, rng: np.random.Generator) -> None:
    x, y, v = normal(rng, (6, 7), dtype), normal(rng, (6, 7), dtype), normal(rng, 7, dtype)
    if special:
        x[0, :4], x[1, :], y[2, 2:5] = [np.inf, -np.inf, np.nan, -0.0], -np.inf, [0.0, -0.0, np.inf]
    fused = cf.fuse(FUNCTIONS[number])
    plan: Plan = fused.plan(x, y, v)
    given = [np.asarray(a) for a in (x, y, v)]
    straight, blocks = NumpyExecutable(plan, given), NumpyExecutable(plan, given)
    assert any(p is not None for p in straight._programs)
    blocks._programs = [None] * len(plan.steps)
    outs = [None] * len(plan.outputs)
    for layout in (lambda a: a, np.asfortranarray, lambda a: np.repeat(a, 2, axis=-1)[..., ::2]):
        arrays = [layout(a) for a in given]
        results = straight(arrays, outs)
        assert bits(results) == bits(blocks(arrays, outs))
        for i, result in enumerate(results):
            assert not any(np.shares_memory(result, a) for a in arrays), "results are arrays of their own"
            assert not any(np.shares_memory(result, other) for other in results[:i])


def test_results_can_be_written_to() -> None:
    x = np.arange(6.0).reshape(2, 3)
    fused = cf.fuse(lambda x: (np.broadcast_to(x.sum(axis=0), (2, 3)), x * 2, np.ones_like(x)))
    first = fused(x)
    for result in first:
        result[...] = -1
    for result, expected in zip(fused(x), fused.__wrapped__(x), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_a_shared_maximum_is_computed_once() -> None:
    x = np.ones((4, 5))
    fused = cf.fuse(lambda x: cf.softmax(x, axis=1))
    (program,) = NumpyExecutable(fused.plan(x), [x])._programs
    assert program is not None and len(program._calls) == 5, "max, subtract, exp, sum, divide"


def test_large_steps_run_by_blocks() -> None:
    plan = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((4096, 1024)))
    assert NumpyExecutable(plan, [])._programs == [None]
