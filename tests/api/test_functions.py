"""The public functions, called on arrays: PyTorch's activations, NumPy's statistics. SciPy's: test_row_functions.py."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special as scipy_special
from support import NAN, SHAPES_AND_AXES, Engine, assert_close, compute, dtype_of, normal, unit
from torch.nn import functional as torch_functions

import cupyfuse as cf

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


@pytest.mark.rotates
@pytest.mark.parametrize(("name", "theirs", "options"), ACTIVATIONS)
def test_activations(
    engine: Engine, name: str, theirs: Callable[..., Any], options: dict[str, Any], rng: np.random.Generator
) -> None:
    ours = functools.partial(getattr(cf, name), **options)
    shapes = ((), (1,), (9,), (4, 5), (2, 3, 4), (2, 3, 4, 5), (0,), (3, 0), (0, 4, 2))
    kinds = itertools.product(shapes, ("float32", "float64", "float16"))
    given = [(shape, dtype, np.asarray(normal(rng, shape, dtype, 4.0))) for shape, dtype in kinds]
    engine.prepare(lambda x=x: ours(engine.array(x)) for _, _, x in given)
    for shape, dtype, x in given:
        wide = x.astype(np.float64)
        expected = theirs(torch.from_numpy(wide.reshape(shape)), **options).numpy()
        actual = engine.host(ours(engine.array(x)))
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


@pytest.mark.parametrize("shape", [(2, 1, 3), (2, 2, 3), (3,), (2, 1, 1, 3)])
@pytest.mark.parametrize("limit", [(2, 1), (3,), (2, 2, 1), (1, 3), ()])
def test_parameters_that_are_arrays_are_broadcast(shape: tuple[int, ...], limit: tuple[int, ...], rng: Any) -> None:
    x, low = rng.standard_normal(shape), rng.standard_normal(limit)
    np.testing.assert_array_equal(cf.clip(x, low, low + 1), np.clip(x, low, low + 1))
    np.testing.assert_array_equal(cf.clip(x, low.tolist()), np.clip(x, low, None))
    np.testing.assert_allclose(cf.leaky_relu(x, low), np.where(x > 0, x, x * low), rtol=1e-15)


def test_parameters_that_are_arrays_and_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"could not be broadcast together with shapes \(2, 2, 2\) \(4, 1\)"):
        cf.clip(np.zeros((2, 2, 2)), np.zeros((4, 1)))


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


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["sum", "prod", "mean", "max", "min", "var", "std"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
def test_statistics(engine: Engine, name: str, shape: tuple[int, ...], axis: Any, rng: np.random.Generator) -> None:
    a, ours = normal(rng, shape), functools.partial(getattr(cf, name), axis=axis)
    ways: list[dict[str, Any]] = [{}, {"keepdims": True}, *([{"ddof": 1}] if name in ("var", "std") else [])]
    engine.prepare(lambda options=options: ours(engine.array(a), **options) for options in ways)
    for options in ways:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # the variance of one element, one degree of freedom less
            expected = getattr(np, name)(a.astype(np.float64), axis=axis, **options)
        actual = engine.host(ours(engine.array(a), **options))
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


# Within fused functions -------------------------------------------------------------------------------------------

OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(cf, name)
        for name in ("relu", "gelu", "tanh", "softplus", "elu", "leaky_relu", "hardtanh", "silu")
    },
    **{
        name: functools.partial(getattr(cf, name), axis=1)
        for name in ("sum", "prod", "max", "min", "mean", "var", "std", "softmax", "log_softmax", "logsumexp")
    },
    "softmax of all": cf.softmax,
    "log_softmax of all": cf.log_softmax,
    "signed": lambda x: cf.logsumexp(x, 1, return_sign=True)[1],
    "factors": lambda x: cf.logsumexp(x, 1, b=x),
    "float factors": lambda x: cf.logsumexp(x, 1, b=x.astype(np.float32)),
    "of float": lambda x: cf.logsumexp(x.astype(np.float32), 1, b=x),
    "clip": lambda x: cf.clip(x, 1, 3),
    "clip to floats": lambda x: cf.clip(x, 0.5, 2.5),
    "linear": lambda x: cf.linear(x, x),
    "pool": lambda x: cf.avg_pool1d(x, 2),
    "batch_norm": cf.batch_norm,
    "mse_loss": lambda x: cf.mse_loss(x, x[::-1]),
    "cross_entropy": lambda x: cf.cross_entropy(x, np.array([0, 1, 3])),
}


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_are_the_same_fused_and_eager(name: str, dtype: str) -> None:
    """The whole range of narrow integers, whose differences and products do not fit them."""
    limits = np.iinfo(dtype) if dtype != "bool" else np.iinfo("uint8")
    low, high = max(limits.min, -300), min(limits.max, 300)
    x = np.array([[low, high, 1, 0], [3, 2, low, 1], [high, 0, high, low // 2]]).astype(dtype)
    eager, fused = OF_INTEGERS[name](x), cf.fuse(OF_INTEGERS[name])(x)
    assert np.asarray(eager).dtype == np.asarray(fused).dtype and np.shape(eager) == np.shape(fused)
    np.testing.assert_allclose(fused, eager, rtol=1e-6 if "float" in name else 1e-12)
    if name in ("sum", "prod", "max", "min"):
        expected = getattr(np, name)(x, axis=1)
        np.testing.assert_array_equal(eager, expected, strict=True)
    elif name.partition(" ")[0] in ("softmax", "log_softmax"):
        axis = None if " " in name else 1
        wide = getattr(scipy_special, name.partition(" ")[0])(x.astype(float), axis=axis)
        np.testing.assert_allclose(eager, wide, rtol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: cf.batch_norm(x, np.zeros(4, np.float32), np.ones(4, np.float32), np.ones(4), np.zeros(4)),
        lambda x: cf.nll_loss(x, np.array([0, 1, 2]), weight=np.ones(4)),
        lambda x: cf.cross_entropy(np.ones((3, 4)), cf.softmax(x, 1)),
        lambda x: cf.mse_loss(np.ones((3, 4)), x),
        lambda x: cf.binary_cross_entropy_with_logits(x, np.ones((3, 4)), weight=np.ones(4), pos_weight=np.ones(4)),
        lambda x: cf.linear(np.eye(4), x),
        lambda x: cf.linear([[1, 2, 3, 4]], x),
        lambda x: cf.batch_norm(np.ones((3, 4)), x[0], x[1] + 1),
        lambda x: cf.logsumexp(np.arange(4), axis=1, b=x),
        lambda x: cf.softmax([x[0], x[1]], axis=1),
        lambda x: cf.sum((x, x), 0),
        lambda x: cf.softmax(np.arange(4)) * x,
    ],
)
def test_arrays_and_lists_that_a_fused_function_makes(engine: Engine, function: Any, rng: np.random.Generator) -> None:
    x = rng.random((3, 4)).astype(np.float32)
    fused = cf.fuse(function)
    engine.prepare([lambda: fused(engine.array(x))])
    eager, actual = function(x), engine.host(fused(engine.array(x)))
    assert np.asarray(actual).dtype == np.asarray(eager).dtype
    np.testing.assert_allclose(actual, eager, rtol=1e-5)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_arrays_without_dimensions_have_the_axes_of_scipy(name: str) -> None:
    function = getattr(cf, name)
    for axis in (None, 0, -1):
        expected = getattr(scipy_special, name)(np.array(1.5), axis=axis)
        assert function(np.array(1.5), axis) == expected == cf.fuse(function)(np.array(1.5), axis)
    for call in (function, cf.fuse(function)):
        with pytest.raises(np.exceptions.AxisError, match=f"^{name}: axis 1 is out of bounds"):
            call(np.array(1.5), 1)


def test_linear_takes_lists() -> None:
    x, weight, bias = [[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]], [0.5, -0.5]
    for function in (cf.linear, cf.fuse(cf.linear)):
        np.testing.assert_array_equal(function(np.array(x), weight, bias), [[11.5, 16.5]])
        np.testing.assert_array_equal(function(x, np.array(weight), bias), [[11.5, 16.5]])
