"""logsumexp, softmax and log_softmax, called on arrays: what SciPy gives, for every kind of array and argument."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special as scipy_special
from support import INF, NAN, SHAPES_AND_AXES, Engine, assert_close, compute, dtype_of, normal, sprinkle, unit

import cupyfuse as cf


def rounding(value: Any, dtype: str, terms: int) -> Any:
    """Bound for a logarithm of a sum of `terms` exponentials, and for the store in `dtype`."""
    u = unit(compute(dtype))
    size = np.where(np.isfinite(value), np.abs(np.asarray(value, np.float64)), 0)
    return (2 * terms + 32) * u + 16 * u * size + 2 * unit(dtype) * (size + 1)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
def test_logsumexp(engine: Engine, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator) -> None:
    a = normal(rng, shape, dtype, 3.0)
    ways = itertools.product((False, True), repeat=2)
    engine.prepare(
        lambda way=way: cf.logsumexp(engine.array(a), axis=axis, keepdims=way[0], return_sign=way[1]) for way in ways
    )
    for keepdims in (False, True):
        expected = scipy_special.logsumexp(a.astype(np.float64), axis=axis, keepdims=keepdims)
        actual = engine.host(cf.logsumexp(engine.array(a), axis=axis, keepdims=keepdims))
        assert np.asarray(actual).dtype == dtype_of(dtype)
        assert_close(actual, expected, rounding(expected, dtype, a.size))
        value, sign = cf.logsumexp(engine.array(a), axis=axis, keepdims=keepdims, return_sign=True)
        assert_close(engine.host(value), actual, 0)
        assert np.asarray(engine.host(sign)).dtype == dtype_of(dtype)
        assert_close(engine.host(sign), np.ones_like(expected), 0)


@pytest.mark.rotates
@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
def test_softmax(
    engine: Engine, function: str, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator
) -> None:
    x = normal(rng, shape, dtype, 3.0)
    expected = getattr(scipy_special, function)(x.astype(np.float64), axis=axis)
    actual = engine.host(getattr(cf, function)(engine.array(x), axis=axis))
    assert actual.dtype == dtype_of(dtype)
    assert_close(actual, expected, rounding(expected, dtype, x.size))


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("specials", [(INF,), (-INF,), (NAN,), (INF, -INF), (INF, NAN), (0.0, -0.0, 1e30, -1e30)])
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
def test_special_values_are_scipys(
    engine: Engine, function: str, specials: tuple[float, ...], rng: np.random.Generator
) -> None:
    x = sprinkle(rng, normal(rng, (40, 5), "float64"), 0.3, specials)
    x[0], x[1, 1:] = -INF, -INF
    for axis in (0, 1, None):
        with np.errstate(all="ignore"):
            expected = getattr(scipy_special, function)(x, axis=axis)
        actual = engine.host(getattr(cf, function)(engine.array(x), axis=axis))
        assert_close(actual, expected, rounding(expected, "float64", x.size), f"axis {axis}")


B_CASES: list[tuple[tuple[int, ...], tuple[int, ...], Any]] = [
    ((5, 8), (5, 8), 1),
    ((5, 8), (8,), 1),
    ((5, 8), (5, 1), 1),
    ((5, 8), (1, 8), 0),
    ((5, 8), (5, 8), None),
    ((5, 1), (5, 8), 1),
    ((8,), (8,), 0),
    ((5, 8), (1,), -1),
    ((5, 8), (), -1),
]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("shape", "b_shape", "axis"), B_CASES)
def test_logsumexp_with_factors(
    engine: Engine, shape: tuple[int, ...], b_shape: tuple[int, ...], axis: Any, signed: bool, rng: np.random.Generator
) -> None:
    a, b = normal(rng, shape, "float64"), np.asarray(normal(rng, b_shape, "float64"))
    b = b if signed else np.abs(b)
    for keepdims in (False, True):
        with np.errstate(all="ignore"):
            expected = scipy_special.logsumexp(a, axis=axis, b=b, keepdims=keepdims)
        actual = engine.host(cf.logsumexp(engine.array(a), axis=axis, b=engine.array(b), keepdims=keepdims))
        # Signed terms cancel: their rounding is relative to what would be there without cancellation.
        whole = scipy_special.logsumexp(a, axis=axis, b=np.abs(b), keepdims=keepdims)
        assert_close(actual, expected, 64 * unit("float64") * np.exp(np.abs(whole - np.nan_to_num(expected)) + 3))
        value, sign = cf.logsumexp(engine.array(a), axis, engine.array(b), keepdims, True)
        expected_value, expected_sign = scipy_special.logsumexp(a, axis, b, keepdims, True)
        assert_close(engine.host(sign), expected_sign, 0)
        assert_close(engine.host(value), expected_value, 1e-12 * np.exp(whole - expected_value))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([INF, 1.0], [1.0, 1.0]),
        ([INF, INF], [1.0, -1.0]),
        ([INF, 1.0], [0.0, 1.0]),
        ([NAN, 1.0], [0.0, 1.0]),
        ([1.0, 2.0], [0.0, 0.0]),
        ([1.0, 1.0], [1.0, -1.0]),
        ([-INF, 1.0], [1.0, -1.0]),
        ([-INF, -INF], [1.0, -1.0]),
        ([1000.0, 1000.0], [1.0, 1.0]),
        ([1.0, 2.0], [NAN, 1.0]),
        ([1.0, 2.0], [INF, 1.0]),
        ([1.0, 2.0], [-INF, INF]),
    ],
)
def test_logsumexp_of_special_factors(a: list[float], b: list[float]) -> None:
    for sign in (False, True):
        with np.errstate(all="ignore"):
            expected = scipy_special.logsumexp(np.array(a), b=np.array(b), return_sign=sign)
        np.testing.assert_allclose(cf.logsumexp(np.array(a), b=np.array(b), return_sign=sign), expected, rtol=1e-14)


@pytest.mark.parametrize("a", [[1, 2, 3], [1.5, 2.5], 5.0, 3, [[1, 2], [3, 4]], True, np.float32(2), np.array(2.0)])
def test_numbers_and_lists_come_in_as_scipy_takes_them(a: Any) -> None:
    for name in ("logsumexp", "softmax", "log_softmax"):
        expected = getattr(scipy_special, name)(np.asarray(a) * 1.0)
        actual = getattr(cf, name)(a)
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
        assert np.shape(actual) == np.shape(expected)
        assert isinstance(actual, np.ndarray) == isinstance(expected, np.ndarray)


FACTORS: list[Any] = [
    [1, 2],
    (1.0, 2.0),
    2.0,
    3,
    True,
    np.float64(2.0),
    np.array([1.0, 2.0], np.float32),
    *(np.array([1, 2], dtype) for dtype in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint64", "float16")),
]


@pytest.mark.parametrize("b", FACTORS, ids=repr)
def test_factors_promote_as_scipy_promotes_them(b: Any) -> None:
    for a in ([1.0, 2.0], 1.5, 2, *(np.array([1, 2], dtype) for dtype in ("float16", "float32", "int8", "uint16"))):
        expected = scipy_special.logsumexp(a, b=b)
        actual = cf.logsumexp(a, b=b)
        assert np.asarray(actual).dtype == expected.dtype, repr(a)
        assert actual == pytest.approx(expected, rel=4 * unit(expected.dtype.name)), repr(a)
        if isinstance(b, np.ndarray):
            actual = cf.fuse(lambda b, a=a: cf.logsumexp(a, b=b))(b)
            assert actual.dtype == expected.dtype, repr(a)
            assert actual == pytest.approx(expected, rel=4 * unit(expected.dtype.name)), repr(a)


@pytest.mark.kernels_rotate
def test_factors_of_any_rank_broadcast(engine: Engine, rng: np.random.Generator) -> None:
    for a_shape, b_shape, axis in (
        ((2, 3, 4), (2, 3, 4), 1),
        ((2, 3, 4), (4,), (0, 2)),
        ((2, 3, 4), (3, 1), -1),
        ((4,), (2, 3, 4), None),
        ((4, 1, 2, 1), (3, 1, 5), (1, 3)),
        ((5, 1), (5, 8), 1),
    ):
        a, b = normal(rng, a_shape, "float64"), normal(rng, b_shape, "float64")
        for keepdims in (False, True):
            expected, sign = scipy_special.logsumexp(a, axis, b, keepdims, True)
            actual = engine.host(cf.logsumexp(engine.array(a), axis, engine.array(b), keepdims, True))
            whole = scipy_special.logsumexp(a, axis, np.abs(b), keepdims)
            assert_close(actual[0], expected, 1e-12 * np.exp(whole - expected), f"{a_shape} {b_shape}")
            assert_close(actual[1], sign, 0)
            alone = scipy_special.logsumexp(a, axis, 2.0, keepdims)
            assert_close(engine.host(cf.logsumexp(engine.array(a), axis, 2.0, keepdims)), alone, 1e-12 * np.abs(alone))


def test_factors_of_other_shapes_are_refused() -> None:
    for a, b in (((2, 3), (4, 3)), ((2, 3, 4), (5,))):
        with pytest.raises(ValueError, match="broadcast"):
            cf.logsumexp(np.ones(a), b=np.ones(b))


COMPLEX = (complex(1, 2), complex(-30, 7), complex(2, -3), 0j, complex(-INF, 1), complex(INF, 0), complex(0, NAN))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize(("a_shape", "b_shape", "axis"), [((3, 4), None, 1), ((3, 4), (4,), 0), ((), (), None),
    ((2, 3, 4), (3, 1), (0, 2)), ((6,), (6,), -1), ((5, 0), None, 1), ((5, 0), (5, 1), 0), ((5, 7), (5, 7), ()),
])  # fmt: skip
def test_logsumexp_of_complex_numbers(
    a_shape: Any, b_shape: Any, axis: Any, dtype: str, rng: np.random.Generator
) -> None:
    def draw(shape: Any) -> Any:
        return np.asarray(rng.standard_normal(shape) * 3 + 1j * rng.uniform(-9, 9, shape)).astype(dtype)

    close = {"rtol": 1e-5 if dtype == "complex64" else 1e-13, "atol": 1e-5 if dtype == "complex64" else 1e-13}
    a, b = draw(a_shape), None if b_shape is None else draw(b_shape)
    for keepdims in (False, True):
        expected = scipy_special.logsumexp(a, axis, b, keepdims)
        actual = cf.logsumexp(a, axis, b, keepdims)
        np.testing.assert_allclose(actual, expected, **close)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        actual = cf.logsumexp(a, axis, b, keepdims, True)
        # Their product is the sum; where there is nothing to add, SciPy 1.17 gives NaN for the phase.
        terms = np.exp(a) if b is None else b * np.exp(a)
        np.testing.assert_allclose(actual[1] * np.exp(actual[0]), terms.sum(axis=axis, keepdims=keepdims), **close)
        assert actual[0].dtype == np.empty(0, dtype).real.dtype and actual[1].dtype == dtype
    with np.errstate(all="ignore"):
        special = rng.choice(np.array(COMPLEX, dtype), (200, 2))
        np.testing.assert_allclose(cf.logsumexp(special, 1), scipy_special.logsumexp(special, 1), **close)


def test_only_logsumexp_takes_complex_numbers_and_only_outside_of_fused_functions() -> None:
    for function in (cf.softmax, cf.log_softmax, cf.relu, cf.fuse(lambda x: cf.logsumexp(x))):
        with pytest.raises(TypeError, match=r"complex128.*convert"):
            function(np.ones(3, complex))


def test_logsumexp_of_nothing_is_minus_infinity() -> None:
    for shape, axis in (((3, 0), 1), ((0, 3), 0), ((0,), 0), ((0, 3), 1), ((0, 0), None)):
        expected = np.full(np.sum(np.ones(shape), axis=axis).shape, -INF)
        np.testing.assert_array_equal(cf.logsumexp(np.ones(shape), axis=axis), expected)
        np.testing.assert_array_equal(cf.logsumexp(np.ones(shape), axis=axis, b=2.0), expected)
        np.testing.assert_array_equal(cf.logsumexp(np.ones(shape), axis=axis, b=np.ones(shape)), expected)
        # The sum of nothing is 0: where SciPy 1.17 gives -1 for its sign, ours is that of 0.
        for b in (None, np.ones(shape)):
            value, sign = cf.logsumexp(np.ones(shape), axis=axis, b=b, return_sign=True)
            np.testing.assert_array_equal(value, expected)
            np.testing.assert_array_equal(sign, np.zeros_like(expected))


def test_a_number_kept_as_an_axis_is_an_axis_of_one() -> None:
    for a, b in ((2.0, None), (np.array(2.0), None), (np.float32(2), 3.0), (1j, None), (2.0, np.array(2.0))):
        expected = scipy_special.logsumexp(a, b=b, keepdims=True)
        actual = cf.logsumexp(a, b=b, keepdims=True)
        assert actual.shape == expected.shape == (1,)
        np.testing.assert_allclose(actual, expected)


@pytest.mark.parametrize("axis", [None, 0, -1, (0,), (), np.int64(0)])
def test_a_number_has_one_axis_within_fused_functions_too(axis: Any) -> None:
    x, ways = np.float32([2.0]).reshape(()), ({}, {"keepdims": True}, {"return_sign": True})
    for b in (None, -3.0, np.array(2.0, np.float32), [2.0, 0.0]):
        for way in ways:
            expected = scipy_special.logsumexp(x, axis, b, **way)
            for function in (cf.logsumexp, cf.fuse(functools.partial(cf.logsumexp, axis=axis, **way))):
                actual = function(x, b=b) if function is not cf.logsumexp else function(x, axis, b, **way)
                assert np.shape(actual) == np.shape(expected)
                np.testing.assert_allclose(actual, expected, rtol=1e-6)
    if axis not in ((0,), ()):
        assert cf.softmax(x, axis) == 1.0
        assert cf.fuse(lambda x: cf.log_softmax(x, axis))(x) == 0.0


@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (2, 0, 3), (0, 0)])
def test_empty_arrays_do_what_they_do_in_scipy(name: str, shape: tuple[int, ...]) -> None:
    for axis in (None, *range(len(shape)), tuple(range(len(shape)))):
        try:
            if name == "logsumexp":
                expected = np.full(np.sum(np.ones(shape), axis=axis).shape, -INF)[()]  # SciPy 1.17 fails on tuples
            else:
                expected = getattr(scipy_special, name)(np.ones(shape), axis=axis)
        except ValueError:
            with pytest.raises(ValueError, match="zero-size"):
                getattr(cf, name)(np.ones(shape), axis=axis)
        else:
            np.testing.assert_array_equal(getattr(cf, name)(np.ones(shape), axis=axis), expected, strict=True)


@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax", "sum", "relu"])
def test_other_libraries_get_their_own_arrays_back_in_any_rank(name: str) -> None:
    for shape in ((4,), (3, 4), (2, 3, 4), (2, 3, 4, 5)):
        x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) / 7
        options: list[dict[str, Any]] = [{}] if name == "relu" else [{}, {"axis": -1}, {"axis": 0}]
        for each in options:
            expected = getattr(cf, name)(x.numpy(), **each)
            for given in (x, x.T.contiguous().T if x.ndim == 2 else x.transpose(0, -1).contiguous().transpose(0, -1)):
                actual = getattr(cf, name)(given, **each)
                assert isinstance(actual, torch.Tensor)
                np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-14)
    assert isinstance(cf.logsumexp(x, return_sign=True)[1], torch.Tensor)
    assert cf.softmax(torch.tensor([1, 2]), axis=0).dtype is torch.float64


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_results_are_written_to_out(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x, out = normal(rng, shape, "float64"), np.full(shape, NAN)
    assert cf.softmax(x, axis=-1, out=out) is out
    np.testing.assert_array_equal(out, cf.softmax(x, axis=-1))
    assert cf.softmax(x.tolist(), -1, out=torch.from_numpy(out)) is not None
    np.testing.assert_array_equal(out, cf.softmax(x, axis=-1))
    both = np.full(shape[:-1], NAN), np.full(shape[:-1], NAN)
    assert cf.logsumexp(x, -1, x, return_sign=True, out=both) is both
    np.testing.assert_array_equal(both, cf.logsumexp(x, -1, x, return_sign=True))
    with pytest.raises(ValueError, match=r"out: expected shape"):
        cf.softmax(x.tolist(), out=np.empty((7, 7)))
    with pytest.raises(TypeError, match=r"out: expected an array, got list"):
        cf.softmax(x.tolist(), out=[[1.0]])
    with pytest.raises(ValueError, match=r"out: expected 1 array\(s\)"):
        cf.softmax(x.tolist(), out=(out, out))


def test_logsumexp_does_not_overflow_where_the_result_fits(engine: Engine) -> None:
    a = engine.array(np.array([[80000.0] * 4, [-90000.0] * 4, [3e38, -3e38, 0, 0]], np.float32))
    expected = np.array([80000 + np.log(4), -90000 + np.log(4), 3e38])
    assert_close(engine.host(cf.logsumexp(a, axis=1)), expected, unit("float32") * np.abs(expected))


@pytest.mark.parametrize("name", ["logsumexp", "softmax", "log_softmax"])
def test_signatures_are_scipys(name: str) -> None:
    ours = inspect.signature(getattr(cf, name)).parameters
    theirs = inspect.signature(getattr(scipy_special, name)).parameters
    common = [p for p in theirs if p in ours]
    assert list(ours) == common
    assert [ours[p].default for p in ours] == [theirs[p].default for p in common]
