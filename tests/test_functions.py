"""The public functions, called on arrays: SciPy's reductions, PyTorch's activations, NumPy's statistics."""

from __future__ import annotations

import inspect
import math
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
        with pytest.raises(TypeError, match=r"complex128.*expected one of.*convert first"):
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
