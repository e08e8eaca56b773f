"""Integer arguments: constants, until they change from call to call; then parameters, where the function lets them."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from number_programs import assert_same
from support import Engine, assert_close, assert_equal, dtype_of, normal, unit

import cupyfuse as cf


def adam(w: Any, g: Any, m: Any, v: Any, t: int, rate: float = 1e-3) -> Any:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v, t + 1


def contractions(dtype: str, w: Any, g: Any, m: Any, v: Any, t: int) -> Any:
    """What fused multiply-adds change, which a GPU's compiler may place in one of two plans and not in the other."""
    magnitudes = (abs(np.asarray(a, np.float64)) for a in (w, g, m, v))
    return [8 * unit(dtype) * a for a in adam(*magnitudes, t, rate=-1e-3)[:3]]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_a_step_count_needs_two_plans(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """The first one, where it is a constant, and one that serves all others, with the values of constants."""
    arrays = [normal(rng, (3, 40), dtype) for _ in range(3)] + [abs(normal(rng, (3, 40), dtype))]
    fused, given = cf.fuse(adam), [engine.array(a) for a in arrays]
    engine.prepare(lambda t=t: fused(*given, t) for t in (1, 2))
    for t in (*range(1, 20), 1, 10**6, 2):
        *found, following = fused(*given, t)
        assert following == t + 1 and type(following) is int
        if t in (1, 2, 19, 10**6):
            constant = cf.fuse(lambda w, g, m, v, t=t: adam(w, g, m, v, t)[:3])
            for a, b, bound in zip(found, constant(*given), contractions(dtype, *arrays, t), strict=True):
                assert a.dtype == dtype_of(dtype)
                if engine.name == "cuda":
                    assert_close(engine.host(a), engine.host(b), bound)
                else:
                    assert_equal(engine.host(a), engine.host(b))
    assert len(fused.plans) == 2
    if engine.name == "numpy":
        assert fused.inline_cache._runnables, "generated code recognises these calls"


X = np.arange(12, dtype=np.float32).reshape(3, 4)
Z = np.arange(12, dtype=np.int8).reshape(3, 4)

# Functions of arrays of floats and of integers, and of an integer; with the number of plans for the integers 1 to 8.
FUNCTIONS: list[tuple[Callable[[Any, Any, int], Any], int]] = [
    (lambda x, z, t: x * t + t, 2),
    (lambda x, z, t: (t - x) / t, 2),
    (lambda x, z, t: np.where(x > t, x, t), 2),
    (lambda x, z, t: np.clip(x, 0, t) + np.maximum(t, x), 2),
    (lambda x, z, t: x * 0.9**t / math.pi, 2),
    (lambda x, z, t: x * (t**-0.5), 2),
    (lambda x, z, t: x * (t // 2 + t % 3 - -t) * (1 / t), 2),
    (lambda x, z, t: x * min(t**-0.5, t * 4**-1.5), 3),
    (lambda x, z, t: x if t % 3 else x * t, 3),
    (lambda x, z, t: x * (2.0 if t < 4 else t), 3),
    (lambda x, z, t: x * t if isinstance(t, int) and not isinstance(t, float) and t is not None else x, 2),
    (lambda x, z, t: (x, t, [t / 2, {"t": t * 2}], 2**t), 2),
    (lambda x, z, t: (x + 1).sum(axis=t % 2), 8),
    (lambda x, z, t: x + z * t, 8),
    (lambda x, z, t: z + t, 8),
    (lambda x, z, t: (z > 3) * t + x, 8),
    (lambda x, z, t: np.where(x > 0, t, 0), 8),
    (lambda x, z, t: np.where(x > 0, t, 0.5), 8),
    (lambda x, z, t: x**t, 8),
    (lambda x, z, t: x * np.float32(t) + np.sqrt(t), 2),
    (lambda x, z, t: x * math.sqrt(t) * math.cos(math.pi * min(t, 5) / 5) / math.log(t + 1), 3),
    (lambda x, z, t: x * math.factorial(t), 2),
    (lambda x, z, t: x[t % 3] + x[:, : t % 4 + 1].sum(), 8),
    (lambda x, z, t: x + np.arange(t).sum() + sum(range(t)), 8),
    (lambda x, z, t: x + np.full(4, t) + np.zeros(t).size, 8),
    (lambda x, z, t: x * {1: 2, 2: 5}.get(t, t), 8),
    (lambda x, z, t: x + len(f"{t}") + int(t) + (t & 1) + (1 << t) + t.bit_length(), 8),
    (lambda x, z, t: x * (2**t) * round(t) + divmod(t, 3)[0], 2),
    (lambda x, z, t: x * t + 1j * t, 8),
]


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_against_numpy(number: int) -> None:
    function, plans = FUNCTIONS[number]
    fused = cf.fuse(function)
    for t in (*range(1, 9), 3, 5, 8, 1):
        assert_same(fused(X, Z, t), function(X, Z, t))
    assert len(fused.plans) == plans


def test_integers_in_containers_and_objects() -> None:
    class State:
        def __init__(self, step: int):
            self.step, self.axis = step, 1

    fused = cf.fuse(lambda x, state, more: x.sum(axis=state.axis) / state.step + more["k"][0])
    for t in range(1, 30):
        np.testing.assert_allclose(fused(X, State(t), {"k": [t * t]}), X.sum(axis=1) / t + t * t, rtol=1e-6)
    assert len(fused.plans) == 2


def test_an_integer_that_changes_later_than_another() -> None:
    fused = cf.fuse(lambda x, t, axis, n: x.sum(axis=axis) * t + n)
    for t, axis, n in [(1, 0, 0), (2, 0, 0), (3, 0, 1), (4, 1, 1), (5, 0, 2), (6, 1, 3), (7, 1, 3), (8, 0, 9)]:
        np.testing.assert_allclose(fused(X, t, axis, n), X.sum(axis=axis) * t + n)
    assert len(fused.plans) == 4, "of constants, with t open, with n open too, for the other axis"


def test_shapes_are_asked_apart() -> None:
    """An integer that is read for some shapes may be open for others."""
    fused = cf.fuse(lambda x, t: x[t % 2] if x.ndim > 1 else x * t)
    for t in range(6):
        assert_equal(fused(X, t), X[t % 2])
        assert_equal(fused(X[0], t), X[0] * t)
    assert len(fused.plans) == 6 + 2


def test_another_type_is_another_plan() -> None:
    fused = cf.fuse(lambda x, t: x * t)
    for t in (1, 2, 3, True, 2.5, False, np.int64(3), np.float64(2), 4):
        found = fused(X, t)
        assert_equal(found, X * t)
        assert found.dtype == (X * t).dtype


def test_an_integer_that_a_float_cannot_hold() -> None:
    fused = cf.fuse(lambda x, t: x * t)
    for t in (1, 2, 2**70):
        assert_equal(fused(X, t), X * t)
    with pytest.raises(OverflowError):
        fused(X, 10**400)
    assert_equal(fused(X, 5), X * 5)


# Of an integer, which may be too large for a float or for NumPy.
TOO_LARGE: list[tuple[Callable[[Any, Any], Any], int]] = [
    (lambda x, t: x * (t + 0.5), 3),
    (lambda x, t: x * (t / 3), 3),
    (lambda x, t: x * ((t * 2) % 2.5), 3),
    (lambda x, t: x * (10**400 + t * 0.5), 3),
    (lambda x, t: x * (np.float64(2.0) * t), 3),
    (lambda x, t: x * np.sqrt(t), 3),
    (lambda x, t: np.maximum(x * t, t), 3),
]


@pytest.mark.parametrize("number", range(len(TOO_LARGE)))
def test_errors_of_integers_that_are_too_large_are_caught(number: int) -> None:
    """In plans that other integers have made, too; and calls with these have their own plan again."""
    function, plans = TOO_LARGE[number]

    def catching(x: Any, t: int) -> Any:
        try:
            return function(x, t)
        except (OverflowError, TypeError):
            return x + 7

    fused = cf.fuse(catching)
    for t in (3, 5, 10**400, 8, 4 * 10**400, 9, 12):
        assert_same(fused(X, t), catching(X, t))
    assert len(fused.plans) == plans


def test_numbers_that_python_refuses_are_errors_of_that_call_alone() -> None:
    fused = cf.fuse(lambda x, t: x * (1 / t))
    for t in (1, 2, 4):
        assert_equal(fused(X, t), X * (1 / t))
    with pytest.raises(ZeroDivisionError):
        fused(X, 0)
    assert_equal(fused(X, 5), X * (1 / 5))


def test_bound_and_default_integers_are_constants() -> None:
    fused = cf.fuse(lambda x, t, n=3: x * t + n)
    for t in range(5):
        assert_equal(fused(X, t), X * t + 3)
        assert_equal(fused.bind(n=t)(X, t), X * t + t)
    assert len(fused.plans) == 2


def test_functions_within_functions() -> None:
    inner = cf.fuse(lambda t, x: x * t)
    fused = cf.fuse(lambda x, t: inner(t, x) + inner(t + 1, x))
    for t in range(6):
        assert_equal(fused(X, t), X * t + X * (t + 1))
    assert len(fused.plans) == 2


def test_an_argument_out_has_its_place() -> None:
    fused, out = cf.fuse(lambda x, t: x * t), np.empty_like(X)
    for t in range(12):
        assert fused(X, t, out=out) is out
        assert_equal(out, X * t)


def test_many_branches_are_forgotten_not_mistaken() -> None:
    fused = cf.fuse(lambda x, t: x + next(n for n in range(100) if n >= t))
    for t in (*range(60), *range(0, 60, 7)):
        assert_equal(fused(X, t), X + t)


BIG = 10**6


class Mode(enum.IntEnum):
    SLOW, FAST = 1, 7


def divided(x: Any, t: int) -> Any:
    try:
        rate = 1 / (t - 7)
    except ZeroDivisionError:
        rate = 5.0
    return x * rate


def newton(x: Any, t: int) -> Any:
    root = t
    for _ in range(40):
        root = 0.5 * (root + t / root)
    return x * root


# Functions of an array and an integer, and integers of which the last one tells a wrong plan.
TRAPS: list[tuple[Callable[[Any, int], Any], tuple[int, ...]]] = [
    (lambda x, t: x * 2 if t == Mode.FAST else x, (1, 2, 7)),
    (lambda x, t: x * 2 if t in (Mode.FAST,) else x, (1, 2, 7)),
    (lambda x, t: x * 2 if t != Mode.FAST else x, (1, 2, 7)),
    (lambda x, t: x * (t + Mode.FAST) - float(Decimal(t) + t), (1, 2, 7)),
    (lambda x, t: x * 2 if type(t) is int and t > 5 else x * 3, (1, 2, 7)),
    (lambda x, t: x * (t if type(t) is int else 0), (5, 0, 7)),
    (lambda x, t: x * np.array([1.0, 2, 3, 4] if type(t) is not int else [4.0, 5, 6, 7]), (1, 2, 3)),
    (lambda x, t: x * 2 if t is BIG else x, (1, BIG)),
    (lambda x, t: x * 2 if t == "auto" or t is None or (t, 1) == (7, 1) else x, (1, 2, 7)),
    (divided, (1, 2, 7, 8, 7)),
    (newton, (1, 2, 3)),
    (lambda x, t: x + sum(1 for n in range(500) if n < t), (100, 200, 300, 40, 300)),
    (lambda x, t: x * functools.reduce(lambda a, _: a * 0.9 + 1, range(2000), t), (1, 2, 3)),
]


@pytest.mark.parametrize("number", range(len(TRAPS)))
def test_what_a_number_does_not_tell(number: int) -> None:
    function, values = TRAPS[number]
    fused = cf.fuse(function)
    for _ in range(2):
        for t in values:
            np.testing.assert_allclose(fused(X, t), function(X, t), rtol=1e-6)


def test_division_by_zero_is_pythons() -> None:
    fused = cf.fuse(lambda x, t: x * (10 / t > 0))
    for t in (1, 2, -3):
        assert_equal(fused(X, t), X * (10 / t > 0))
    with pytest.raises(ZeroDivisionError):
        fused(X, 0)


def test_an_integer_that_must_be_one_does_not_keep_another_from_being_open() -> None:
    fused = cf.fuse(lambda x, axis, t: x.sum(axis=int.__index__(axis)) * t)
    for t in range(12):
        assert_equal(fused(X, t % 2, t), X.sum(axis=t % 2) * t)
    assert len(fused.plans) == 3, "of constants, and for each axis"


def test_beyond_so_many_branches_plans_are_for_values() -> None:
    fused = cf.fuse(lambda x, t: x + next(n for n in range(100) if n >= t))
    for _ in range(2):
        for t in range(30):
            assert_equal(fused(X, t), X + t)
        made = fused.plans
    for t in range(30):
        fused(X, t)
    assert fused.plans == made, "nothing is traced again"
