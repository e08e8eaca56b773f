"""The public functions, called on arrays: SciPy's reductions, PyTorch's activations, NumPy's statistics."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special as scipy_special
from support import INF, NAN, Engine, assert_close, compute, dtype_of, normal, sprinkle, unit
from torch.nn import functional as torch_functions

import cupyfuse as cf

AXES: dict[tuple[int, ...], tuple[Any, ...]] = {
    (7,): (None, 0, -1, (0,)),
    (5, 8): (None, 0, 1, -2, (0, 1), (1,), (-1, 0)),
    (3, 4, 5): (None, 0, 1, 2, -1, (0, 1), (0, 2), (2, 1), (0, 1, 2)),
    (2, 3, 4, 5): (None, 1, (1, 3), (0, 2)),
    (1, 6): (0, 1, None),
    (6, 1): (0, 1, None),
}
CASES = [(shape, axis) for shape, axes in AXES.items() for axis in axes]


def rounding(value: Any, dtype: str, terms: int) -> Any:
    """Bound for a logarithm of a sum of `terms` exponentials, and for the store in `dtype`."""
    u = unit(compute(dtype))
    size = np.where(np.isfinite(value), np.abs(np.asarray(value, np.float64)), 0)
    return (2 * terms + 32) * u + 16 * u * size + 2 * unit(dtype) * (size + 1)


# SciPy's ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_logsumexp(engine: Engine, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator) -> None:
    a = normal(rng, shape, dtype, 3.0)
    for keepdims in (False, True):
        expected = scipy_special.logsumexp(a.astype(np.float64), axis=axis, keepdims=keepdims)
        actual = engine.host(cf.logsumexp(engine.array(a), axis=axis, keepdims=keepdims))
        assert np.asarray(actual).dtype == dtype_of(dtype)
        assert_close(actual, expected, rounding(expected, dtype, a.size))
        value, sign = cf.logsumexp(engine.array(a), axis=axis, keepdims=keepdims, return_sign=True)
        assert_close(engine.host(value), actual, 0)
        assert_close(engine.host(sign), np.ones_like(expected), 0)


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_softmax(
    engine: Engine, function: str, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator
) -> None:
    x = normal(rng, shape, dtype, 3.0)
    expected = getattr(scipy_special, function)(x.astype(np.float64), axis=axis)
    actual = engine.host(getattr(cf, function)(engine.array(x), axis=axis))
    assert actual.dtype == dtype_of(dtype)
    assert_close(actual, expected, rounding(expected, dtype, x.size))


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


def test_factors_may_be_lists_numbers_and_integers() -> None:
    expected = scipy_special.logsumexp([1.0, 2.0], b=[1, 2])
    for a in ([1.0, 2.0], np.array([1.0, 2.0])):
        for b in ([1, 2], (1.0, 2.0), np.array([1, 2]), np.array([1, 2], np.int32), np.array([1.0, 2.0])):
            assert cf.logsumexp(a, b=b) == pytest.approx(expected, rel=1e-15)
        assert cf.logsumexp(a, b=2.0) == pytest.approx(scipy_special.logsumexp(a, b=2.0), rel=1e-15)


def test_logsumexp_of_nothing_is_minus_infinity() -> None:
    for shape, axis in (((3, 0), 1), ((0, 3), 0), ((0,), 0), ((0, 3), 1), ((0, 0), None)):
        expected = np.full(np.sum(np.ones(shape), axis=axis).shape, -INF)
        np.testing.assert_array_equal(cf.logsumexp(np.ones(shape), axis=axis), expected)


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


# PyTorch's ----------------------------------------------------------------------------------------------------------

ACTIVATIONS: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
    ("relu", torch_functions.relu, {}),
    ("relu6", torch_functions.relu6, {}),
    ("leaky_relu", torch_functions.leaky_relu, {}),
    ("leaky_relu", torch_functions.leaky_relu, {"negative_slope": 0.2}),
    ("leaky_relu", torch_functions.leaky_relu, {"negative_slope": -0.5}),
    ("gelu", torch_functions.gelu, {}),
    ("gelu", torch_functions.gelu, {"approximate": "tanh"}),
    ("silu", torch_functions.silu, {}),
    ("sigmoid", torch.sigmoid, {}),
    ("log_sigmoid", torch_functions.logsigmoid, {}),
    ("tanh", torch.tanh, {}),
    ("softplus", torch_functions.softplus, {}),
    ("softplus", torch_functions.softplus, {"beta": 0.5, "threshold": 3.0}),
    ("mish", torch_functions.mish, {}),
    ("elu", torch_functions.elu, {}),
    ("elu", torch_functions.elu, {"alpha": 0.3}),
    ("celu", torch_functions.celu, {}),
    ("celu", torch_functions.celu, {"alpha": 2.0}),
    ("selu", torch_functions.selu, {}),
    ("hardtanh", torch_functions.hardtanh, {}),
    ("hardtanh", torch_functions.hardtanh, {"min_val": -0.2, "max_val": 3.0}),
    ("hardsigmoid", torch_functions.hardsigmoid, {}),
    ("hardswish", torch_functions.hardswish, {}),
    ("softsign", torch_functions.softsign, {}),
    ("erf", torch.erf, {}),
]


@pytest.mark.parametrize(("name", "theirs", "options"), ACTIVATIONS)
def test_activations(
    engine: Engine, name: str, theirs: Callable[..., Any], options: dict[str, Any], rng: np.random.Generator
) -> None:
    for shape in ((), (1,), (9,), (4, 5), (2, 3, 4), (2, 3, 4, 5), (0,), (3, 0), (0, 4, 2)):
        for dtype in ("float32", "float64", "float16"):
            x = np.asarray(normal(rng, shape, dtype, 4.0))
            wide = x.astype(np.float64)
            expected = theirs(torch.from_numpy(wide.reshape(shape)), **options).numpy()
            actual = engine.host(getattr(cf, name)(engine.array(x), **options))
            assert np.shape(actual) == shape and np.asarray(actual).dtype == dtype_of(dtype)
            # A handful of roundings, relative to x where the formula cancels in its tail.
            bound = 32 * unit(compute(dtype)) * (1 + np.abs(wide)) + 2 * unit(dtype) * np.abs(expected)
            assert_close(actual, expected, bound, f"{shape} {dtype}")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("leaky_relu", {"negative_slope": 0.01}),
        ("gelu", {"approximate": "none"}),
        ("softplus", {"beta": 1.0, "threshold": 20.0}),
        ("elu", {"alpha": 1.0}),
        ("celu", {"alpha": 1.0}),
        ("hardtanh", {"min_val": -1.0, "max_val": 1.0}),
    ],
)
def test_activations_have_pytorchs_defaults(name: str, names: dict[str, Any]) -> None:
    parameters = list(inspect.signature(getattr(cf, name)).parameters.values())
    assert {p.name: p.default for p in parameters[1:]} == names


def test_leaky_relu_twice_is_not_leaky_relu_once() -> None:
    assert cf.leaky_relu(cf.leaky_relu(np.array([-2.0])))[0] == pytest.approx(-2e-4)


@pytest.mark.parametrize("wrong", ["erf", "", None, 0])
def test_gelu_knows_two_forms(wrong: Any) -> None:
    with pytest.raises(ValueError, match="approximate"):
        cf.gelu(np.ones(3), approximate=wrong)


def test_clip_takes_either_limit() -> None:
    x = np.array([-2.0, 0.5, NAN, 3.0])
    np.testing.assert_array_equal(cf.clip(x, -1, 1), np.clip(x, -1, 1))
    np.testing.assert_array_equal(cf.clip(x, min=0), np.clip(x, 0, None))
    np.testing.assert_array_equal(cf.clip(x, max=0), np.clip(x, None, 0))
    with pytest.raises(cf.TraceError, match="min, max or both"):
        cf.clip(x)


@pytest.mark.parametrize("shape", [(6, 5), (5,), (2, 3, 5), (0, 5), (1, 5), (2, 0, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_linear(engine: Engine, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> None:
    x, weight, bias = (normal(rng, s, dtype) for s in (shape, (4, 5), (4,)))
    wide = [torch.from_numpy(a.astype(np.float64)) for a in (x, weight, bias)]
    magnitude = torch_functions.linear(*map(torch.abs, wide)).numpy()
    for count in (2, 3):
        expected = torch_functions.linear(*wide[:count]).numpy()
        actual = engine.host(cf.linear(*engine.arrays([x, weight, bias][:count])))
        assert actual.dtype == dtype_of(dtype)
        assert_close(actual, expected, 8 * unit(compute(dtype)) * magnitude + 2 * unit(dtype) * magnitude)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "words"),
    [
        ((6, 5), (4, 3), (4,), r"x: expected 3 columns"),
        ((6, 5), (4,), None, r"weight: .*\(out_features, in_features\)"),
        ((6, 5), (4, 5), (5,), r"bias: expected shape \(4,\), got \(5,\)"),
        ((6, 5), (4, 5), (4, 1), r"bias: .*\(out_features,\)"),
    ],
)
def test_linear_checks_shapes(x: Any, weight: Any, bias: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cf.linear(np.ones(x), np.ones(weight), None if bias is None else np.ones(bias))


# NumPy's ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "prod", "mean", "max", "min", "var", "std"])
@pytest.mark.parametrize(("shape", "axis"), CASES)
def test_statistics(engine: Engine, name: str, shape: tuple[int, ...], axis: Any, rng: np.random.Generator) -> None:
    a = normal(rng, shape)
    for options in ({}, {"keepdims": True}, *([{"ddof": 1}] if name in ("var", "std") else [])):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # the variance of one element, one degree of freedom less
            expected = getattr(np, name)(a.astype(np.float64), axis=axis, **options)
        actual = engine.host(getattr(cf, name)(engine.array(a), axis=axis, **options))
        assert np.asarray(actual).dtype == np.float32
        bound = 2 * a.size * unit("float32") * (1 + np.abs(np.nan_to_num(expected)) + np.abs(a).sum() / a.size)
        assert_close(actual, expected, bound, f"{options}")


@pytest.mark.parametrize("name", ["sum", "mean", "softmax", "logsumexp", "var", "relu", "gelu"])
def test_the_array_may_be_named(name: str, rng: np.random.Generator) -> None:
    function = getattr(cf, name)
    first = next(iter(inspect.signature(function).parameters))
    for shape in ((3,), (3, 4), (2, 3, 4)):
        x = normal(rng, shape, "float64")
        np.testing.assert_array_equal(function(**{first: x}), function(x))


@pytest.mark.parametrize("name", [n for n in cf.__all__ if inspect.isfunction(getattr(cf, n))])
def test_public_functions_are_documented_and_typed(name: str) -> None:
    function = getattr(cf, name)
    assert function.__doc__ and function.__doc__.strip()
    assert function.__name__ == name and function.__module__.startswith("cupyfuse")
    assert all(p.annotation is not p.empty for p in inspect.signature(function).parameters.values())
