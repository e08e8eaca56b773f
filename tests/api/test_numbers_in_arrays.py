"""Arrays that a function makes of floats among its arguments: traced once the floats change, where it lets them be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from number_programs import assert_same
from support import Engine, assert_equal

import cupyfuse as cf
from cupyfuse.api.cache import _Forms
from cupyfuse.settings import force_plans

X = np.linspace(0, 9, 12, dtype=np.float32).reshape(3, 4)


def weights(k: float) -> Any:
    made = np.full(4, k)
    made[0] = 1
    made[1:] += k
    made /= made.sum()
    return made


def rotation(k: float) -> Any:
    return np.array([[math.cos(k), -math.sin(k)], [math.sin(k), math.cos(k)]])


# Functions of an array and a float: two plans serve all of it.
SERVED: list[Callable[[Any, float], Any]] = [
    lambda x, k: x + np.full(4, k),
    lambda x, k: x + np.full((3, 4), k, dtype=np.float32),
    lambda x, k: (np.full(3, k), np.full(2, -k), np.full((), k) * x),
    lambda x, k: x * abs(k) ** np.arange(4),
    lambda x, k: x * np.exp(-np.arange(4) / (k + 9)),
    lambda x, k: x @ np.maximum(np.arange(4.0), k),
    lambda x, k: x * weights(k),
    lambda x, k: x[:, :2] @ rotation(k),
    lambda x, k: x * np.array([k, 1, k * k, 3]) + np.asarray((k, 2.0, 1, 0)),
    lambda x, k: np.array([[k, 0], [0, 1]], dtype=np.float16) @ x[:2],
    lambda x, k: (np.linspace(0, k, 4) * x, np.linspace(k, 2 * k, num=5), np.linspace(k, 1, 3, endpoint=False)),
    lambda x, k: (np.linspace(0, k, 1), np.linspace(k, 1, 0), np.linspace(0, k, 4, dtype=np.float32)),
    lambda x, k: np.interp(x, np.arange(4) * (abs(k) + 1), np.arange(4.0)),
    lambda x, k: (x * np.asarray(k), x + np.array(k, np.float32), np.array(k), np.array(k).item() * x),
    lambda x, k: (np.dot(x + 1, k), np.outer(x[0], k), np.r_[x[0], k], np.r_[x[0], x.max().item()], np.asarray(k) > 1),
    lambda x, k: x * float(np.full(3, k)[0]),
    lambda x, k: x * complex(np.full(3, k)[0]).real,
    lambda x, k: x * np.full(3, k).tolist()[0],
]
# Others need the values of the array.
READ: list[Callable[[Any, float], Any]] = [
    lambda x, k: x[:, np.arange(4) > k],
    lambda x, k: x if (np.full(4, k) > 0.7).all() else -x,
    lambda x, k: (x, str(np.full(2, k)), np.array([k, "a"]).dtype.kind),
    lambda x, k: x.astype(np.float64) if type(np.full(2, k)) is np.ndarray else x,
    lambda x, k: x * np.full(int(abs(k)) + 1, k).sum(),
]


@pytest.mark.parametrize(("function", "plans"), [*((f, 2) for f in SERVED), *((f, 6) for f in READ)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_against_numpy(function: Callable[[Any, float], Any], plans: int, dtype: str) -> None:
    fused, x = cf.fuse(function), X.astype(dtype)
    with force_plans():
        for k in (0.5, 0.75, 1.25, 0.5, -3.0, 2.5, 0.0, math.nan):
            if math.isnan(k) and plans > 2:
                continue
            assert_same(fused(x, k), function(x, k))
    assert len(fused.plans) == plans


@pytest.mark.parametrize("array", [np.float16(1.5), np.array(1.5, np.float16), np.full((3, 4), 1.5, np.float16)])
def test_beside_arrays_they_take_their_dtype(array: Any) -> None:
    """As numbers of Python's do; NumPy makes an array of the scalar that `np.clip` is given."""
    fused = cf.fuse(lambda x, k: x * np.clip(array, k, None))
    for k in (0.5, 0.25, 2.5, 1.75):
        assert_equal(fused(X, k), X * np.clip(array, k, None))


def test_common_dtypes_with_them() -> None:
    functions: list[Callable[..., Any]] = [
        lambda x, k: x.astype(np.result_type(x, k)) * k,
        lambda x, k: x + np.zeros(4, np.result_type(k)),
        lambda x, k: x.astype(np.result_type(k, np.float16)),
    ]
    for function in functions:
        fused = cf.fuse(function)
        for k in (0.5, 0.25, 2.5, np.float64(1.5), np.float64(0.5), np.float32(3), 2, 3, 4):
            assert_equal(fused(X, k), function(X, k))


def test_of_one_value_they_are_constants() -> None:
    """Which no kernel computes anew for each row."""
    fused = cf.fuse(lambda x, k: x * k ** np.arange(4))
    with force_plans():
        fused(X, 0.5)
        assert "power" not in str(fused.plans[0])
        fused(X, 0.75)
    assert "power" in str(fused.plans[1])


@pytest.mark.kernels_rotate
def test_on_each_engine(engine: Engine) -> None:
    function = SERVED[8]
    fused = cf.fuse(function)
    with force_plans():
        for k in (0.5, 0.75, 2.0):
            found = engine.host(fused(engine.array(X), k))
            np.testing.assert_allclose(found, function(X, k), rtol=1e-12)
    assert len(fused.plans) == 2


def test_what_is_read_does_not_try_again() -> None:
    fused = cf.fuse(READ[0])
    with force_plans():
        for k in (0.5, 0.75, 1.5):
            assert_equal(fused(X, k), READ[0](X, k))
    (forms,) = [f for f in fused._runnables._found.values() if isinstance(f, _Forms)]
    assert not forms.traces_arrays
