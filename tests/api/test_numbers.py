"""Float arguments: parameters of a plan, which serves all their values; what reads a value gets a plan for it."""

from __future__ import annotations

import contextlib
import copy
import decimal
import json
import math
import pickle
import statistics
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from support import Engine, assert_close, assert_equal, dtype_of, normal

import cupyfuse as cf
from cupyfuse.api import cache
from cupyfuse.api.planned_function import PlannedFunction
from cupyfuse.settings import force_plans

VALUES = (0.5, -0.0, 0.0, 3.0, 1.0, -1.0, 1e300, math.inf, -math.inf, math.nan, 2.0**-1074, 0.1)
ONES = np.ones(3)


def whole_numbers(x: Any, k: float) -> Any:
    """Of values that have one: Python raises errors for the others. int(k) times a traced integer would be read."""
    return x * math.floor(k) + int(x.sum() * 4) * 0.5 + x * int(k * 2) + math.ceil(k + 3)


FUNCTIONS: list[Callable[[Any, float], Any]] = [
    lambda x, k: x * k,
    lambda x, k: k / x + x / 2 * k * 3,
    lambda x, k: (2 * k - 1) * x + k,
    lambda x, k: ((x * 3 + k) * (k * k) - 1) * k + 5,
    lambda x, k: np.exp(x * k).sum(axis=1) * k,
    lambda x, k: np.where(x > k, x, k),
    lambda x, k: np.maximum(x, k) + np.clip(x, -abs(k), k),
    lambda x, k: cf.leaky_relu(x, k) + cf.elu(x, alpha=k),
    lambda x, k: (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + k),
    lambda x, k: (x @ (x.T * k)).sum(axis=1) * -k,
    lambda x, k: np.power(np.abs(x), k) + np.maximum(k, x) - np.where(x > 0, k, x),
    lambda x, k: (x.sum(axis=0) * k, np.full_like(x, k), x + (-k) + (+k)),
    lambda x, k: cf.logsumexp(x * k, axis=1, b=2.0) + cf.logsumexp(x, axis=0).sum() * k,
    lambda x, k: x.sum() * k + k,
    lambda x, k: x * float(k) + float(x.sum()) * float(k * 2),
    whole_numbers,
]


# Library steps of dtypes that kernels do not compute with.
OF_LIBRARY_STEPS: list[Callable[[Any, float], Any]] = [
    lambda x, k: x * k,
    lambda x, k: (x + np.float64(2 * k) - k, k - x),
    lambda x, k: np.where(x > 1, x, k),
    lambda x, k: (np.maximum(x, k), x == k),
    lambda x, k: np.clip(x, k, 9.5),  # CuPy has none of complex numbers
    lambda x, k: np.power(x, k),
    lambda x, k: (x * (k + 1j), x * (2j - k), x * (1j**k)),
    lambda x, k: np.histogram(abs(x), 2, (0, k)),
]


@pytest.mark.parametrize("dtype", ["uint64", "complex64", "complex128"])
@pytest.mark.parametrize("function", OF_LIBRARY_STEPS)
def test_library_steps_take_the_number_of_the_call(
    engine: Engine, function: Callable[[Any, float], Any], dtype: str
) -> None:
    x = np.array([[0, 1, 2], [3, 4, 5]], dtype)
    fused = cf.fuse(function)
    if engine.name == "cuda" and "clip" in function.__code__.co_names and np.iscomplexobj(x):
        with pytest.raises(TypeError, match="cupy_clip"):
            fused(engine.array(x), 0.5)
        return
    engine.prepare(lambda k=k: fused(engine.array(x), k) for k in (0.5, 3.0))
    for k in (0.5, 3.0, 0.5):
        got, want = fused(engine.array(x), k), function(x, k)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            np.testing.assert_allclose(engine.host(a), b, rtol=1e-6, strict=True)


# Library steps that take the number itself, and what kernels do with one that they test.
TAKING_NUMBERS: list[Callable[[Any, float], Any]] = [
    # CuPy flushes what lies next to 0.
    lambda x, k: (np.hypot(x, k), np.arctan2(x, k) * k, np.arctan2(k, x), np.copysign(x, -k), np.nextafter(x + 2, k)),
    lambda x, k: np.hypot(x * 2, k) + np.hypot(x, 2 * k) + np.hypot(x, k),
    lambda x, k: np.interp(x, np.arange(3.0), np.arange(3.0) * 2, left=-k, right=k * k),
    lambda x, k: (np.gradient(x, k, axis=0), np.trapezoid(x, dx=k), np.pad(x, 1, constant_values=k)),
    lambda x, k: (np.append(x, k), np.unwrap(x, discont=k)),
    lambda x, k: (np.fmax(x, k), np.fmin(k, x), np.isclose(x, k), np.allclose(x, 0, atol=k), np.heaviside(x, k)),
    lambda x, k: np.nan_to_num(x / x, nan=k, posinf=2 * k, neginf=-k),
    lambda x, k: (x.__setitem__(x > k, k), np.put(x, [0, 3], k), np.putmask(x, x < 0, -k), x)[3],
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("number", range(len(TAKING_NUMBERS)))
def test_one_plan_serves_all_numbers_of_library_steps(engine: Engine, number: int, dtype: str) -> None:
    function, x = TAKING_NUMBERS[number], np.array([[-0.5, 1, 2], [3, 0, 5]], dtype)
    fused, values = cf.fuse(function), (0.5, 3.0, 0.1, 7.0, 0.5)
    engine.prepare(lambda k=k: fused(engine.array(x), k) for k in values)
    with force_plans(), np.errstate(all="ignore"):
        for k in values:
            got, want = fused(engine.array(x), k), function(x.copy(), k)
            for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
                np.testing.assert_allclose(engine.host(a), b, rtol=1e-6)
                assert np.asarray(engine.host(a)).dtype == np.asarray(b).dtype
    assert len(fused.plans) == 1


def test_numbers_that_shapes_depend_on_are_read() -> None:
    """What the values of the first call give for others is not known, nor for those that a function refuses."""
    for function in (lambda x, k: scipy.ndimage.zoom(x, k), lambda x, k: np.quantile(x, k / 4, axis=0)):
        fused, x = cf.fuse(function), np.arange(6.0)
        with force_plans():
            for k in (1.0, 2.0, 3.0):
                np.testing.assert_allclose(fused(x, k), function(x, k), rtol=1e-12)
        assert len(fused.plans) == 3


def test_steps_of_bound_arguments_and_a_number_run_in_each_call(engine: Engine) -> None:
    w, x = np.arange(6.0), np.arange(6.0) + 1
    bound = cf.fuse(lambda x, w, k: x * np.hypot(w, k) + np.fmax(w * 2, k)).bind(w=engine.array(w))
    with force_plans():
        for k in (1.0, 2.0, 3.0):
            want = x * np.hypot(w, k) + np.fmax(w * 2, k)
            np.testing.assert_allclose(engine.host(bound(engine.array(x), k=k)), want, rtol=1e-12)


def test_numbers_around_a_function_reach_library_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x = cf.fuse(lambda x: np.hypot(x, RATE)), np.arange(6.0)
    with force_plans():
        for k in (1.0, 2.0, 3.0, 4.0):
            monkeypatch.setattr(f"{__name__}.RATE", k)
            np.testing.assert_allclose(fused(x), np.hypot(x, k))
    assert len(fused.plans) == 2


DTYPES = ["float64", "float32", "float16", "bfloat16"]


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_one_plan_serves_all_values(engine: Engine, number: int, dtype: str, rng: np.random.Generator) -> None:
    """With the bits of a plan that is made for the value alone."""
    function = FUNCTIONS[number]
    x = engine.array(normal(rng, (4, 5), dtype))
    fused = cf.fuse(function)
    values = [k for k in VALUES if function is not whole_numbers or abs(k) < 4]
    # Kernels have each value's plan compiled: in a half of the dtypes each, and all in one or the other.
    taken = values if engine.name != "host" else values[(number + DTYPES.index(dtype)) % 2 :: 2]
    pairs = [(k, cf.fuse(function).bind(k=k)) for k in taken]
    if function is not whole_numbers:  # of what is not computed there
        engine.prepare(lambda k=k, bound=bound: (fused(x, k), bound(x)) for k, bound in pairs)
    for k, bound in pairs:
        with np.errstate(all="ignore"):
            got, want = fused(x, k), bound(x)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            a, b = (np.asarray(engine.host(v)) for v in (a, b))
            assert a.dtype == b.dtype
            scale = np.finfo(np.float32 if dtype != "float64" else np.float64).eps * 32
            unit = max(scale, 2.0**-7 if dtype == "bfloat16" else 2.0**-10 if dtype == "float16" else 0)
            a, b = a.astype(np.float64), b.astype(np.float64)
            assert_close(a, b, unit * (1 + np.abs(np.where(np.isfinite(b), b, 0))) * 4)
    assert len(fused._runnables) == 1


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_against_numpy(number: int, rng: np.random.Generator) -> None:
    function, x = FUNCTIONS[number], normal(rng, (4, 5), "float64")
    fused = cf.fuse(function)
    for k in (0.5, 3.0, 0.1, 1.0):
        got, want = fused(x, k), function(x, k)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


READING: list[Callable[[Any, float], Any]] = [
    lambda x, k: x * np.exp(k, dtype=np.float32),
    lambda x, k: x * np.float64(str(k)),
    lambda x, k: x + len(str(k)),
    lambda x, k: x + len(f"{k:.1f}"),
    lambda x, k: x + {0.5: 1.0}.get(k, 7.0),
    lambda x, k: x + np.full(3, complex(k).real),
]
# With the number of plans for the values of the test.
BRANCHING: list[tuple[Callable[[Any, float], Any], int]] = [
    (lambda x, k: x * 2 if k > 1 else x * 3, 2),
    (lambda x, k: x * (2 if k else 3), 1),
    (lambda x, k: x + [0.5, 3.0].index(k) if k in (0.5, 3.0) else x, 3),
    (lambda x, k: x * max(k, 1.0) + min(2.0, k), 3),
    (lambda x, k: x * (1.0 if k == 0.5 else 2.0), 2),
    (lambda x, k: x * (1 - k if k < 1 else k - 1), 2),
    (lambda x, k: x * (3 if k == "auto" or k is None else k), 1),
    (lambda x, k: (x, k), 1),
    (lambda x, k: x * np.float64(k) + np.int64(k) * x + np.float32(k), 1),
    (lambda x, k: x * round(k) + round(k, 1) * x + divmod(k, 2.0)[1] + divmod(9, k)[0], 1),
    (lambda x, k: x * k.real + k.imag + k.conjugate() + np.exp(k).item() + k.is_integer(), 2),
    (lambda x, k: x * np.clip(k, 0, 0.9) + np.round(k, 1) + np.sinc(k) + np.isnan(k) + np.real(k), 1),
    (lambda x, k: (x, {"k": [k * 2, -k]}), 1),
]


def assert_same_as_plain(fused: cf.Fused, k: Any) -> None:
    got, want = fused(ONES, k), fused.__wrapped__(ONES, k)
    for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
        assert type(a) is type(b)
        if isinstance(b, dict):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=1e-14)


VARIOUS = (0.5, 3.0, 1.0, 0.5, 0.25, 3.0)


@pytest.mark.parametrize("number", range(len(READING)))
def test_functions_that_read_a_value_get_a_plan_for_it(number: int) -> None:
    fused = cf.fuse(READING[number])
    for k in VARIOUS:
        assert_same_as_plain(fused, k)
    assert len(fused.plans) == 4


@pytest.mark.parametrize("number", range(len(BRANCHING)))
def test_functions_that_branch_get_a_plan_for_each_outcome(number: int) -> None:
    function, plans = BRANCHING[number]
    fused = cf.fuse(function)
    for k in VARIOUS * 5:
        assert_same_as_plain(fused, k)
    assert len(fused.plans) == plans
    assert fused.inline_cache._runnables, "generated code recognises these calls"


def test_values_that_are_read_in_some_cases_only() -> None:
    def function(x: Any, a: float, b: float) -> Any:
        if a > 0:
            return x * (2 if b > 0 else 3)
        return x * b

    fused = cf.fuse(function)
    for _ in range(2):
        for a in (-1.0, 1.0, -2.0, 2.0):
            for b in (-5.0, 5.0, 7.0):
                assert_equal(fused(ONES, a, b), function(ONES, a, b))


@dataclass
class Layer:
    k: float
    bias: Any = 0.0

    def apply(self, x: Any) -> Any:
        return x * self.k + self.bias


@pytest.mark.parametrize(
    "read",
    [
        lambda k: float(decimal.Decimal(k) * 2),
        lambda k: statistics.fmean([k, 1.5]) + statistics.stdev([k, 2.5]),
        lambda k: len(json.dumps({"k": k})),
    ],
)
def test_code_that_is_not_followed_takes_pythons_floats(read: Callable[[float], float]) -> None:
    fused, x = cf.fuse(lambda x, k: cf.relu(x) * read(k)), np.arange(4.0) - 1
    for k in (0.5, 0.25, 1.0, 0.5, 1e-7, 3.0) * 2:
        assert_equal(fused(x, k), np.maximum(x, 0) * read(k))
    assert fused.plan(x, 0.5).launches


def test_errors_are_those_of_a_trace_with_numbers_that_change() -> None:
    def function(x: Any, k: float) -> Any:
        if k < 0:
            raise ValueError(f"negative: {k}")
        return x * k

    with pytest.raises(ValueError, match="negative: -1"):
        cf.fuse(function)(ONES, -1.0)
    with pytest.raises(cf.TraceError, match="a conversion of a traced array to a Python value"):
        cf.fuse(lambda x, k: [x * k for _ in range(int(x.sum()))])(ONES, 0.5)


def test_floats_in_containers_and_objects() -> None:
    fused = cf.fuse(lambda layer, more, x: layer.apply(x) * more["k"][0] + more["k"][1])
    for k in (2.0, 3.0, -1.0):
        assert_equal(fused(Layer(k, 1.0), {"k": [k, 0.5]}, ONES), (ONES * k + 1) * k + 0.5)
    assert len(fused._runnables) == 1
    with pytest.raises(cf.TraceError, match="a change of 'layer'"):
        cf.fuse(lambda x, layer: setattr(layer, "k", layer.k + 1) or x)(ONES, Layer(1.0))


def test_isinstance_knows_floats() -> None:
    fused = cf.fuse(lambda x, k: x * (k if isinstance(k, float) and not isinstance(k, int) else 0))
    assert [fused(ONES, k)[0] for k in (2.0, 3.0)] == [2, 3]


def test_numbers_that_cannot_be_computed_raise_what_python_raises() -> None:
    fused = cf.fuse(lambda x, k: x * (1 / k))
    assert fused(ONES, 2.0)[0] == 0.5
    with pytest.raises(ZeroDivisionError):
        fused(ONES, 0.0)
    root = cf.fuse(lambda x, k: x * k**0.5)
    assert root(ONES, 4.0)[0] == 2
    assert root(ONES, 9.0)[0] == 3 and len(root.plans) == 1
    assert root(ONES, -4.0)[0] == (-4.0) ** 0.5


@pytest.mark.parametrize(
    ("compute", "numbers"),
    [
        (lambda a, b: a**b, [(10.0, 1e5), (10.0, 2.0), (10.0, 1e6), (10.0, 3.0), (0.0, -1.0), (-2.0, 2.0)]),
        (lambda a, b: a**2 + b, [(1e200, 1.0), (2.0, 1.0), (1e300, 1.0), (3.0, 1.0)]),
        (lambda a, b: a**-2 + b, [(2.0, 1.0), (0.0, 1.0), (3.0, 1.0)]),
        (lambda a, b: 2**a + b, [(1e4, 1.0), (2.0, 1.0), (1e5, 1.0)]),
        (lambda a, b: a / b, [(1.0, 2.0), (1.0, 0), (1.0, 0.0), (1.0, 4.0)]),
        (lambda a, b: a // b + a % b, [(1.0, 0.0), (1.0, 2.0), (1.0, 0)]),
    ],
)
def test_errors_of_arithmetic_may_be_caught(
    compute: Callable[[float, float], Any], numbers: list[tuple[float, float]]
) -> None:
    def function(x: Any, a: float, b: float) -> Any:
        try:
            return x * compute(a, b)
        except ArithmeticError as error:
            return x - len(type(error).__name__)

    fused = cf.fuse(function)
    with force_plans():
        for a, b in (*numbers, *numbers[::-1]):
            assert_equal(fused(ONES, a, b), function(ONES, a, b))
        assert len(fused.plans) <= 5


def test_functions_of_math_are_computed_in_each_call() -> None:
    from math import exp

    def function(x: Any, k: float, n: int) -> Any:
        found = math.erf(k), math.atan2(k, n), math.hypot(k, 2, n), math.pow(2, k), math.copysign(n, k), math.log(9, 3)
        return x * sum(found), exp(-k), sum(map(math.cos, (k, n, True))), math.sqrt(np.float32(2))

    fused = cf.fuse(function)
    with force_plans():
        for k, n in ((0.5, 1), (3.0, 2), (-1.0, 3), (-0.0, 4)):
            got, want = fused(ONES, k, n), function(ONES, k, n)
            assert_equal(got[0], want[0])
            assert [type(v) for v in got] == [np.ndarray, float, float, float] and got[1:] == want[1:]
        assert len(fused.plans) == 2, "of an integer, and of those that change"


def test_functions_of_math_are_what_they_are() -> None:
    """While a function is traced, too: equal, no methods of classes, to be copied and pickled."""

    def function(x: Any, fn: Any, k: float) -> Any:
        class Scale:
            root = math.sqrt

        same = fn == math.sqrt, {math.sqrt: 1}[fn], isinstance(fn, types.BuiltinFunctionType)
        held = copy.deepcopy([math.sqrt]), pickle.loads(pickle.dumps(math.sqrt)), Scale().root
        return x * sum(same) + held[0][0](k) * held[1](k) * held[2](k), f"{fn.__name__} {fn!r}"

    fused = cf.fuse(function)
    for k in (4.0, 9.0, 25.0):
        got, want = fused(ONES, math.sqrt, k), function(ONES, math.sqrt, k)
        assert_equal(got[0], want[0])
        assert got[1] == want[1]
    assert len(fused.plans) == 1


def of_numpy(x: Any, k: float, n: Any = 3) -> Any:
    """Functions of NumPy's of numbers, whose results are NumPy's float64, also where they meet arrays of float32."""
    rate, root = np.exp(-k), 1 / np.sqrt(n + 1)
    scaled = x * rate + np.where(x > root, x, np.float64(2) * root) ** np.log2(n + 7)
    sign = 1.0 if np.sin(k) > rate else -1.0
    return scaled, sign * rate, root > 0.5, (-rate) ** 0.5, 2**rate / 0.0, abs(rate - n) // root % 3, np.hypot(k, 2)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_functions_of_numpy_are_computed_in_each_call(dtype: str, engine: Engine) -> None:
    fused, x = cf.fuse(of_numpy), np.arange(1, 13).reshape(3, 4).astype(dtype)
    with force_plans(), engine.active(), np.errstate(all="ignore"):
        for k, n in ((0.5, 1), (1.5, 2), (0.25, 5), (-0.0, 7), (2.0, 3.0), (-1.0, 0)):
            (scaled, *got), (wanted, *want) = fused(engine.array(x), k, n), of_numpy(x, k, n)
            assert (scaled.dtype, [type(v) for v in got]) == (wanted.dtype, [type(v) for v in want])
            np.testing.assert_allclose(engine.host(scaled), wanted, rtol=1e-13)
            np.testing.assert_array_equal(got, want)
        assert len(fused.plans) <= 8, "for outcomes of comparisons, of constant integers, and floats in their place"


RATE: Any = 0.5


def flat(value: Any) -> list[Any]:
    """The arrays and NumPy's numbers in a result."""
    if isinstance(value, dict):
        value = list(value.values())
    return [a for v in value for a in flat(v)] if isinstance(value, (tuple, list)) else [value]


# Functions of an array and a NumPy number, with the number of plans for the values of the test.
OF_NUMPY: list[tuple[Callable[[Any, Any], Any], int]] = [
    (lambda x, k: x * k + (2 - k) / (k * k + 1), 2),
    (lambda x, k: (x, k, [k / 2, {"k": -k}], k > 0.3), 3),
    (lambda x, k: np.where(x > k, x, k) + np.clip(x, -abs(k), 9) + np.maximum(k, x) - k // 0.3 % 2, 2),
    (lambda x, k: x * np.exp(-k) + np.float64(2) * k + k * np.float64(3) + math.sqrt(abs(k)), 2),
    (lambda x, k: x / k + k / 0.0 + k**0.5, 2),
    (lambda x, k: x**k + k**x, 2),
    (lambda x, k: x.sum() * k if k > 0.5 else x.max() / k, 3),
    (lambda x, k: x * max(k, 0.4) if isinstance(k, float) and isinstance(k, np.floating) else x, 3),
    (lambda x, k: x * k * RATE, 3),
    (lambda x, k: x * k.astype(np.float32) + k.dtype.itemsize, 7),
    (lambda x, k: x * round(k, 1) + np.clip(k, 0, 1) + k.item() + np.isfinite(k), 3),
    (lambda x, k: x + np.full(3, k) + np.asarray(k), 7),
    (lambda x, k: x * type(k)(2) * k if type(k) is np.float64 else x, 7),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16"])
@pytest.mark.parametrize("number", range(len(OF_NUMPY)))
def test_numpys_numbers(number: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As arguments, in containers, and around functions: once they change, computed with in each call."""
    function, plans = OF_NUMPY[number]
    fused, nested, around = (
        cf.fuse(function),
        cf.fuse(lambda x, d: function(x, d["k"][0])),
        cf.fuse(lambda x: function(x, RATE)),
    )
    x = np.array([0, 1, 2]).astype(dtype)
    with force_plans(), np.errstate(all="ignore"):
        for k in map(np.float64, (0.25, 0.75, 0.125, -1.0, math.inf, math.nan, 2.5, 0.25)):
            monkeypatch.setattr(f"{__name__}.RATE", k)
            want = flat(function(x, k))
            for result in (fused(x, k), nested(x, {"k": [k]}), around(x)):
                got = flat(result)
                assert [(type(v), v.dtype) for v in got] == [(type(v), v.dtype) for v in want]
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(
                        a.astype(float),
                        b.astype(float),
                        rtol=4 * np.finfo(np.float16).eps if dtype == "float16" else 1e-6,
                    )
    assert len(fused.plans) <= plans and len(around.plans) <= plans + 1


NUMPYS_VALUES: dict[type, tuple[float, ...]] = {
    np.float32: (3, 5.5, -1.5, 0, math.nan, math.inf, 1e30, 7, 3),
    np.float16: (3, 5.5, -1.5, 0, 200, 7, math.nan, 3),
    np.int64: (3, 5, -1, 0, 2**40, 2**60 + 1, 7, 3),
    np.int32: (3, 5, -1, 0, 2**31 - 1, 7, 3),
    np.int16: (3, 5, -300, 30000, 7, 3),
    np.uint8: (3, 5, 0, 255, 7, 3),
}
# Functions of an array and a NumPy number, and whether two plans serve all numbers of a type.
OF_NARROW: list[tuple[Callable[[Any, Any], Any], bool]] = [
    (lambda x, k: (x * k, k - x, x / (k * k + 1)), True),
    (lambda x, k: (x > k, np.where(x > k, x, k), np.maximum(k, x), np.clip(x, -3, k)), True),
    (lambda x, k: (k * 2, k / 3, k + k, -k, abs(k), k * 0.5, k // 2, k % 3), True),
    (lambda x, k: (x * np.float32(2) * k, k * np.float64(2) * x, x + (k + np.float16(1))), True),
    (lambda x, k: (x * np.sqrt(abs(k)), np.add(k, 1), np.hypot(k, 2)), True),
    (lambda x, k: (x.astype(k.dtype) + k, k.ndim, isinstance(k, np.integer), isinstance(k, np.floating)), True),
    (lambda x, k: (x.sum() * k, x.sum(axis=0) // k, x.mean() % k), True),
    (lambda x, k: x * k if k > 4 else x - k, False),
    (lambda x, k: (k, [k * k], {"k": k**2}), True),
    (lambda x, k: (k & 1, k << 1) if isinstance(k, np.integer) else k.item() * x, False),
    (lambda x, k: (np.full(3, k) * x, float(k) * x, str(k)), False),
    (lambda x, k: (x * math.sqrt(abs(k)), math.floor(0 * k) if k < 9 else 0), False),
]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8"])
@pytest.mark.parametrize("kind", NUMPYS_VALUES)
@pytest.mark.parametrize("number", range(len(OF_NARROW)))
def test_narrow_numbers_of_numpys(number: int, kind: type, dtype: str) -> None:
    """Floats and integers of each type, which is strong in promotion; integers wrap around."""
    function, serves_all = OF_NARROW[number]
    fused, x = cf.fuse(function), np.array([0, 1, 2]).astype(dtype)
    tolerance = 2e-3 if dtype == "float16" or kind is np.float16 else 1e-6
    with force_plans(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in map(kind, NUMPYS_VALUES[kind]):
            if dtype == "float16" and not abs(k) < 6e4:  # which NumPy rounds to infinity before it computes with it
                continue
            try:
                expected = function(x, k)
            except ValueError as error:  # floor(nan)
                with pytest.raises(type(error)):
                    fused(x, k)
                continue
            for a, b in zip(flat(fused(x, k)), flat(expected), strict=True):
                assert (type(a), getattr(a, "dtype", None)) == (type(b), getattr(b, "dtype", None))
                if isinstance(b, str):
                    assert a == b
                else:
                    np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=tolerance)
    # An integer that no float is has a plan of its own; sums of uint8 are of uint64, which library steps compute.
    assert not serves_all or (number == 6 and dtype == "uint8") or len(fused.plans) <= (4 if kind is np.int64 else 2)


@pytest.mark.parametrize("kind", [float, int, np.float64, np.float32, np.int64, np.uint8])
def test_calls_with_known_outcomes_are_not_traced_again(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons of NumPy's numbers give NumPy's bools, for which each call was traced again."""
    fused, compiled = cf.fuse(lambda x, k: x * k if k > 4 else x - k), []
    compile_plan = PlannedFunction.compile
    monkeypatch.setattr(PlannedFunction, "compile", lambda *a, **o: compiled.append(1) or compile_plan(*a, **o))
    for forced in (True, False):
        with force_plans() if forced else contextlib.nullcontext():
            for k in (1, 9, 2, 7):
                fused(ONES, kind(k))
            count = len(compiled)
            for k in (3, 8, 5, 1, 40, 2):
                np.testing.assert_array_equal(fused(ONES, kind(k)), fused.__wrapped__(ONES, kind(k)))
            assert len(compiled) == count


def test_a_result_that_is_the_next_argument() -> None:
    fused = cf.fuse(lambda x, s: (x * s).sum() / 3)
    with force_plans():
        s: Any = 0.5
        for _ in range(20):
            want = (ONES * s).sum() / 3
            s = fused(ONES * 0.9, s) / 0.9
            assert type(s) is np.float64 and abs(s - want) < 1e-12
    assert len(fused.plans) <= 3, "of a float, of a constant, and of numbers"


def test_functions_of_large_integers() -> None:
    """Of such NumPy makes other numbers, some of which have no square root."""
    for function in (lambda x, n: x * np.sqrt(n), lambda x, n: x * np.abs(n), lambda x, n: x + np.divide(n, 2)):
        fused = cf.fuse(function)
        with force_plans(), np.errstate(all="ignore"):
            for n in (4, 9, 2**63 - 1, 2**63, 2**64, 16, 25, -1):
                try:
                    want = function(ONES, n)
                except (TypeError, AttributeError, OverflowError) as error:
                    with pytest.raises(type(error)):
                        fused(ONES, n)
                else:
                    assert_equal(fused(ONES, n), want)


def test_a_refused_integer_may_be_caught() -> None:
    def function(x: Any, n: int) -> Any:
        try:
            return x * np.sqrt(n)
        except TypeError:
            return x - 1

    fused = cf.fuse(function)
    with force_plans():
        for n in (2**70, 2**71, 2**72, 4, 9, 2**70, 16):
            assert_equal(fused(ONES, n), function(ONES, n))


def test_warnings_of_numbers_are_none(recwarn: pytest.WarningsRecorder) -> None:
    """As of plans."""
    fused = cf.fuse(lambda x, k: x * np.log(k) / np.exp(1e3 * k) + np.sqrt(k) ** -1)
    with force_plans():
        for k in (1.0, 0.0, -1.0, 2.0):
            fused(ONES, k)
    assert not recwarn.list and len(fused.plans) == 1


@pytest.mark.parametrize(
    "compute",
    [
        lambda k: math.sqrt(k),
        lambda k: math.exp(k),
        lambda k: math.log(k) if not math.isinf(k) else 3.0,
        lambda k: math.sin(k),
        lambda k: 2.0 if math.isnan(k) else math.cosh(k),
    ],
)
def test_functions_of_math_raise_as_they_do(compute: Callable[[float], float]) -> None:
    def function(x: Any, k: float) -> Any:
        try:
            return x * compute(k)
        except (ValueError, OverflowError) as error:
            return x - len(type(error).__name__)

    fused, values = cf.fuse(function), (2.0, 0.0, math.inf, -3.0, math.nan, 1e4, 0.5, -math.inf)
    with force_plans():
        for k in (*values, *values[::-1]):
            assert_equal(fused(ONES, k), function(ONES, k))
        assert len(fused.plans) <= 4


def test_powers_of_a_number_make_one_plan() -> None:
    fused = cf.fuse(lambda x, k: sum(k**i * x[i] for i in range(len(x))))
    for k in (0.5, 0.25, 2.0):
        assert_equal(fused(np.ones(100), k), np.array([k**i for i in range(100)]).cumsum()[-1])
    assert len(fused.plans) == 1


def test_bound_floats_are_constants_and_others_are_not(rng: np.random.Generator) -> None:
    x, w = normal(rng, (6, 5), "float64"), normal(rng, (4, 5), "float64")
    fused = cf.fuse(lambda x, w, k, b: ((x @ w.T) * k + b).sum(axis=1))
    serve = fused.bind(w=w, b=0.5)
    for k in (1.0, 2.0, -3.0):
        np.testing.assert_allclose(serve(x, k), ((x @ w.T) * k + 0.5).sum(axis=1), rtol=1e-11, atol=1e-12)
    assert len(serve._runnables) == 1
    prepared = cf.fuse(lambda x, w, k: x * (w.sum() * k)).bind(w=w)
    for k in (1.0, 2.0):
        np.testing.assert_allclose(prepared(x, k), x * w.sum() * k, rtol=1e-12)


def test_blocks_of_rows(engine: Engine, rng: np.random.Generator) -> None:
    x, w = normal(rng, (64, 8)), normal(rng, (128, 8))
    fused = cf.fuse(lambda x, w, k: (cf.softmax(x @ w.T * k, axis=1) @ w) * k, max_workspace=1 << 14)
    assert fused.plan(x, w, 2.0).blocks is not None
    for k in (0.5, 0.25):
        y = np.exp(x.astype(float) @ w.T.astype(float) * k)
        expected = y / y.sum(axis=1, keepdims=True) @ w * k
        got = engine.host(fused(engine.array(x), engine.array(w), k))
        assert_close(got, expected, 1e-4 * (1 + np.abs(expected)))


def test_one_fused_function_within_another_shares_its_numbers() -> None:
    inner = cf.fuse(lambda x, k: x * (k + 1))
    outer = cf.fuse(lambda x, k: inner(x, k * 2) + inner(np.arange(3.0), k))
    for k in (1.0, 2.0):
        assert_equal(outer(ONES, k), ONES * (2 * k + 1) + np.arange(3.0) * (k + 1))


def test_a_number_that_leaks_says_so() -> None:
    class Box:
        value: Any = None

    kept = Box()
    cf.fuse(lambda x, k, kept: setattr(kept, "value", k) or x * k, static=("kept",))(ONES, 2.0, kept)
    with pytest.raises(cf.TraceError, match="another fused function"):
        cf.fuse(lambda x, kept: x * kept.value, static=("kept",))(ONES, kept)


def test_the_least_recently_used_plan_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LIMIT", 8)
    fused = cf.fuse(lambda x, k: x + k)
    plans = {}
    for k in range(30):
        fused(ONES, k)
        fused(ONES, 0)
        plans[k] = fused._runnables.find(("highest", *fused.signature_of((ONES, 0)).key), ())
    assert len({id(p) for p in plans.values()}) == 1, "the one in use stays"
    assert len(fused._runnables) <= 8


def test_dtypes_of_arrays_beside_a_float() -> None:
    for name in ("float16", "float32", "float64", "int64", "bool", "bfloat16"):
        x = np.ones(3).astype(dtype_of(name))
        got = cf.fuse(lambda x, k: x * k)(x, 0.5)
        assert got.dtype == (x * 0.5).dtype if name != "bfloat16" else x.dtype


def test_default_values_are_constants(rng: np.random.Generator) -> None:
    """What depends on them and on bound arrays alone is prepared once."""

    def normalised(x: Any, w: Any, eps: float = 1e-5, *, k: float = 2.0) -> Any:
        return x * k / np.sqrt(w.var(axis=0) + eps)

    x, w = normal(rng, (4, 5), "float64"), normal(rng, (6, 5), "float64")
    fused = cf.fuse(normalised)
    serve = fused.bind(w=w)
    for options in ({}, {"eps": 0.5}, {"k": 3.0}, {"eps": 0.25, "k": 1.0}):
        expected = normalised(x, w, **options)
        np.testing.assert_allclose(fused(x, w, **options), expected, rtol=1e-12)
        np.testing.assert_allclose(serve(x, **options), expected, rtol=1e-12)
    np.testing.assert_allclose(fused(x, w, 1e-5), normalised(x, w), rtol=1e-12)
    plan = serve.plan(x)
    assert plan.prepare is not None and [s.fused[-1] for s in plan.prepare.steps][-1] in (
        "sqrt",
        "safe_divide",
        "divide",
    )


def test_functions_of_numbers_take_no_condition_from_comparisons() -> None:
    """Each call computes them anyway: comparisons after many of them are conditions, and no plan is for a value."""

    @cf.fuse
    def function(x: Any, k: float) -> Any:
        total = 0.0
        for n in range(70):
            total = total + math.exp(k * n / 1000) if n < 3 else total
            math.cos(k + n)
        return x * total if k > 1.0 else x - total

    def expected(x: Any, k: float) -> Any:
        total = sum(math.exp(k * n / 1000) for n in range(3))
        return x * total if k > 1.0 else x - total

    x = np.ones((2, 3))
    for k in (2.5, 3.5, 4.5, 0.5, 0.25):
        np.testing.assert_allclose(function(x, k), expected(x, k))
    assert len(function.plans) <= 4, "of a constant and of numbers, for both outcomes"


def test_functions_of_math_take_float64() -> None:
    function = cf.fuse(lambda x, k: x * math.pow(k, np.float64(2)))
    for k in (1.5, 2.5, 3.5, 4.5):
        np.testing.assert_allclose(function(np.ones(3), k), k * k)
    assert len(function.plans) <= 2, "of a constant and of numbers"
