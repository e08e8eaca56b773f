"""Libraries written for any array library, inside fused functions: einops, and functions of array-api-compat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat
import einops
import numpy as np
import pytest
from support import HOST, NUMPY, Engine, assert_close, normal

import cupyfuse as cf


def standardize(x: Any) -> Any:
    xp = array_api_compat.array_namespace(x)
    variance = xp.var(x, axis=-1, correction=1, keepdims=True)
    return (x - xp.mean(x, axis=-1, keepdims=True)) / xp.sqrt(variance)


def log_softmax(x: Any) -> Any:
    xp = array_api_compat.array_namespace(x)
    shifted = x - xp.max(x, axis=-1, keepdims=True)
    return xp.astype(shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True)), xp.float32)


def swap(x: Any) -> Any:
    xp = array_api_compat.array_namespace(x)
    matrix = xp.reshape(x, (-1, array_api_compat.size(x) // x.shape[0]))
    device = array_api_compat.device(x)
    ones = xp.ones((1, matrix.shape[1]), dtype=x.dtype, device=device)
    return xp.matrix_transpose(xp.concat([matrix, ones], axis=0))


CALLS: dict[str, Callable[[Any], Any]] = {
    "rearrange": lambda x: einops.rearrange(x, "b s (h d) -> b h s d", h=2).max(axis=-1),
    "mean": lambda x: einops.reduce(x, "b s d -> b d", "mean"),
    "pool": lambda x: einops.reduce(x, "b (s t) d -> b s d", "max", t=2),
    "repeat": lambda x: einops.repeat(x.sum(axis=-1), "b s -> b s r", r=3),
    "einsum": lambda x: einops.einsum(x, x, "b s d, b t d -> b s t"),
    "pack": lambda x: einops.pack([x, x[:, 0]], "b * d")[0].sum(axis=1),
    "standardize": standardize,
    "log_softmax": log_softmax,
    "swap": swap,
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)
def test_same_as_on_numpy(engine: Engine, name: str, dtype: str, rng: np.random.Generator) -> None:
    x = normal(rng, (5, 4, 6), dtype)
    expected = np.asarray(CALLS[name](x.astype(np.float64)))
    with engine.active():
        actual = np.asarray(engine.host(cf.fuse(CALLS[name])(engine.array(x))))
    assert (actual.shape, actual.dtype) == (expected.shape, np.asarray(CALLS[name](x)).dtype)
    # Six elements are summed at most, five times, of values below 4; a standard deviation is above 0.1.
    assert_close(actual, expected, 5 * 6 * 40 * float(np.finfo(actual.dtype).eps) * (1 + np.abs(expected)))


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_left_to_a_library(name: str) -> None:
    steps = str(cf.fuse(CALLS[name]).plan(cf.spec((5, 4, 6), "float32")))
    assert ("Library" in steps) == (name in ("pack", "repeat", "swap")), steps
