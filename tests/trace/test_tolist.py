"""`tolist`, `map` with types of numbers, and ranges beside arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(6.0).reshape(2, 3) - 2

FUNCTIONS: list[Callable[[Any], Any]] = [
    lambda x: x.tolist(),
    lambda x: (x * 2).sum().tolist(),
    lambda x: {"labels": x.argmax(axis=1).tolist(), "scores": x.max(axis=1).tolist(), "any": (x > 0).any(0).tolist()},
    lambda x: [v * 2 for v in x[0].tolist()] + [len(x.tolist()), max(x[1].tolist()), sum(x[0].tolist())],
    lambda x: (x * np.array(x[0].tolist()), x + x.tolist(), x.astype(np.float32) * x[0, 0].tolist()),
    lambda x: (x[:0].tolist(), x[:, :0].tolist(), (x * 1j).tolist()),
    lambda x: list(map(float, x[0])) + list(map(int, x.sum(axis=1))) + list(map(bool, x[1])),
    lambda x: list(map(np.float32, x[0])),
    lambda x: [*map(np.sum, x), *map(max, x[0], x[1]), *map(len, x)],
    lambda x: x * sum(map(float, x[0])),
    lambda x: (x + range(3), range(3) * x, np.add(x, range(1, 4)), x ** range(3), np.where(x > 0, range(3), x)),
]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert getattr(found, "dtype", None) == getattr(expected, "dtype", None)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32", "int32", "uint64"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_against_numpy(function: Callable[[Any], Any], dtype: str) -> None:
    fused = cf.fuse(function)
    with force_plans():
        for x in (X, X + 7):
            if dtype != "uint64" or x.min() >= 0:
                assert_same(fused(x.astype(dtype)), function(x.astype(dtype)))
