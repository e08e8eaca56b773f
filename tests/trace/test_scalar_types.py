"""NumPy's types of numbers that code calls with traced arrays and numbers, as in `np.float32(x.sum())`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy import float32, uint8
from numpy import float32 as f32

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(6.0).reshape(2, 3)


class Scaler:
    scale = 255

    def __call__(self, x: Any) -> Any:
        return np.uint8(x * self.scale), np.float32(x.mean())


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, (tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
        return
    assert type(found) is type(expected)
    assert np.asarray(found).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(found, expected)


FUNCTIONS: list[Callable[..., Any]] = [
    lambda x: np.float32(x.sum()) * x,
    lambda x: (np.float64(x.mean()), np.float16(x.max()), np.int64(x.sum()), np.intp(x.argmax()), np.bool_(x.sum())),
    lambda x: (np.complex64(x.sum()), np.complex128(x), np.complex64((x * 1j).sum())),
    lambda x: (np.float32((x * (2 + 1j)).sum()), np.int64((x * (2 + 1j))[0, 1]), np.float64(x + 1j)),
    lambda x: (np.int32(x), np.float32(x) / 255, np.bool_(x), np.uint8(x * 50 + 200), np.float64(x) * 2),
    lambda x: (np.float32([x.sum(), 1]), np.int64([[x[0, 0]], [x[1, 1]]]), np.float32((x[0], x[1]))),
    lambda x: (np.uint8(x.sum() * 20), np.int8(x.argmax()), np.uint8(x.sum().item()), np.int64(x.mean().item())),
    lambda x: (
        np.float32(x.sum().item()) * x,
        np.float32(np.float64(x.sum())),
        isinstance(np.float32(x[0, 0]), np.float32),
    ),
    lambda x: [np.float32(row.sum()) for row in x],
    lambda x: (np.single(x.sum()), np.double(x.sum()), np.half(x.sum()), np.int_(x.sum())),
    lambda x: (float32(x.sum()) * x, uint8(x), np.zeros(3, float32), np.ones(2, dtype=np.float32)),
    lambda x: (x.astype(np.float32), np.float32(3) * x, np.float32(0.1) + np.float32(x.min()), np.int64("3")),
    lambda x: (
        np.float32 is float32,
        np.dtype(np.float32) == float32,
        np.float32(np.float32(x.sum())),
        np.float64(),
    ),
    lambda x: (f32(x.sum()) * x, f32 is float32, {f32: 1}[np.float32], x.astype(f32), isinstance(f32(x.sum()), f32)),
    lambda x: np.asarray([np.float32(x.max()), np.float32(2)]),
    lambda x: np.float32(x[x > 1].sum()) + np.float32(x[x > 1]).sum(),
    Scaler(),
    Scaler().__call__,
]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_conversions(function: Callable[..., Any], dtype: str) -> None:
    fused = cf.fuse(function)
    with force_plans(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x in (X, X[:, ::-1] + 1):
            given = x.astype(dtype)
            assert_same(fused(given), function(given))


def test_arguments_without_dimensions() -> None:
    function = lambda x: (np.float64(x), np.float32(x), np.int64(x))  # noqa: E731
    with force_plans():
        assert_same(cf.fuse(function)(np.array(2.5)), function(np.array(2.5)))


def test_methods_of_types_called_with_unpacked_arguments() -> None:
    arguments = [b"a", "big"]
    function = lambda x: (x * int.from_bytes(*arguments), float(x.sum()) * float.fromhex(*["0x8"]), int(x.max()))  # noqa: E731
    with force_plans():
        assert_same(cf.fuse(function)(X), function(X))


def test_numbers_of_the_call() -> None:
    function = lambda x, k: (x * np.float32(k), np.int64(k), np.float64(k) / 3)  # noqa: E731
    fused, x = cf.fuse(function), X.astype(np.float32)
    with force_plans():
        for k in (1.5, 2.5, 3.5, 4.25, 1, 2, 3, np.float32(1.5), np.float32(2.5), np.float32(3.5)):
            assert_same(fused(x, k), function(x, k))
    assert len(fused.plans) == 5


def test_python_numbers_have_to_fit() -> None:
    for function in (lambda x: np.uint8(x.sum().item() * 100), lambda x: np.int8(int(x.sum()) * 100)):
        fused = cf.fuse(function)
        with force_plans(), pytest.raises(OverflowError, match="out of bounds"):
            fused(X)


def test_a_name_that_is_another_type_stays() -> None:
    namespace: dict[str, Any] = {"np": np, "float32": lambda v: v * 3}
    exec("def function(x): return float32(x.sum()), np.float32(x.sum())", namespace)
    with force_plans():
        assert_same(cf.fuse(namespace["function"])(X), namespace["function"](X))


def test_a_name_of_a_type_that_changes() -> None:
    namespace: dict[str, Any] = {"real": np.float32}
    exec("def function(x): return real(x.sum()), x.astype(real)", namespace)
    fused = cf.fuse(namespace["function"])
    with force_plans():
        for real in (np.float32, np.float16, np.float64, np.float32):
            namespace["real"] = real
            assert_same(fused(X), namespace["function"](X))


def test_functions_that_traces_keep_have_their_own_code_again() -> None:
    code = Scaler.__call__.__code__
    with force_plans():
        cf.fuse(Scaler())(X)
        with pytest.raises(cf.TraceError):
            cf.fuse(lambda x: (Scaler()(x), bool(x.sum() > 0) and 1 / len(str(x.base))))(X)
    assert Scaler.__call__.__code__ is code and np.float32 is float32
