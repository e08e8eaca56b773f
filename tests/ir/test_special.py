"""Accuracy and conventions of `cupyfuse.ir.operators.special`, against the scalar functions of `math`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from cupyfuse.ir.operators.special import erf, erfc

Floats = NDArray[np.floating[Any]]
Function = Callable[[ArrayLike], Floats]

FUNCTIONS = [pytest.param(erf, math.erf, 4, id="erf"), pytest.param(erfc, math.erfc, 8, id="erfc")]
NORMAL = {np.dtype(d): np.finfo(d).smallest_normal for d in ("f4", "f8")}


@pytest.fixture(params=["f4", "f8"])
def dtype(request: pytest.FixtureRequest) -> np.dtype[Any]:
    return np.dtype(str(request.param))


def arguments(dtype: np.dtype[Any]) -> Floats:
    """Dense grids, random values, the neighbourhood of the split, and the extremes of the type, with both signs."""
    rng = np.random.default_rng(2024)
    info = np.finfo(dtype)
    exponents = rng.uniform(math.log2(info.smallest_normal), math.log2(info.max) - 1, 2000)
    split = 0.75 + np.arange(-200, 201) * float(info.eps) / 2
    subnormal = np.arange(1, 200) * float(info.smallest_subnormal)
    x = np.concatenate(
        [
            np.linspace(0, 1, 5001),
            np.linspace(1, 7, 6001),
            np.linspace(7, 28, 6001),
            rng.standard_normal(5000),
            2.0**exponents,
            split,
            subnormal,
            [info.max, info.smallest_normal, info.eps, 0.75, 1.5, 3.5, 4, 4.25, 6, 6.25, 11, 28],
        ]
    ).astype(dtype)
    return np.concatenate([x, -x])


def ulp_error(y: Floats, exact: NDArray[np.float64]) -> NDArray[np.float64]:
    """Error in units of the last place that the exact value has in the type of `y`."""
    unit = np.spacing(np.maximum(np.abs(exact), NORMAL[y.dtype]).astype(y.dtype)).astype(np.float64)
    return np.abs(y.astype(np.float64) - exact) / unit


@pytest.mark.parametrize(("function", "scalar", "limit"), FUNCTIONS)
def test_accuracy(function: Function, scalar: Callable[[float], float], limit: float, dtype: np.dtype[Any]) -> None:
    x = arguments(dtype)
    exact = np.array([scalar(v) for v in x.tolist()])
    y = function(x)
    assert y.dtype == dtype
    error = ulp_error(y, exact)
    subnormal = np.abs(exact) < NORMAL[dtype]
    if function is erfc:
        # Down there the exponential itself may be flushed to zero; the absolute error is all that can be asked for.
        assert np.all(np.abs(y[subnormal]) <= NORMAL[dtype])
        error = error[~subnormal]
    assert error.max() <= limit


@pytest.mark.parametrize(("function", "at_plus", "at_minus"), [(erf, 1, -1), (erfc, 0, 2)])
def test_infinities_and_nan(function: Function, at_plus: int, at_minus: int, dtype: np.dtype[Any]) -> None:
    huge = np.finfo(dtype).max
    x = np.array([np.inf, huge, 30, -np.inf, -huge, -30], dtype)
    assert function(x).tolist() == [at_plus] * 3 + [at_minus] * 3
    assert np.isnan(function(np.array([np.nan, -np.nan], dtype))).all()
    # NaN must not disturb its neighbours in the same block.
    assert np.isnan(function(np.array([0.1, np.nan, 5], dtype))).tolist() == [False, True, False]


def test_zero_and_symmetry(dtype: np.dtype[Any]) -> None:
    zeros = erf(np.array([0.0, -0.0], dtype))
    assert zeros.tolist() == [0, 0]
    assert np.signbit(zeros).tolist() == [False, True]
    assert erfc(np.array([0.0, -0.0], dtype)).tolist() == [1, 1]
    x = arguments(dtype)
    np.testing.assert_array_equal(erf(-x), -erf(x))
    assert np.abs(erf(x)).max() == 1


def test_saturation_agrees_with_rounding(dtype: np.dtype[Any]) -> None:
    edge = 3.92 if dtype.itemsize == 4 else 5.93  # erfc is less than half the spacing below one from about here
    assert erf(np.array([edge, edge + 0.1], dtype)).tolist() == [1, 1]
    assert erf(np.array([edge - 0.15], dtype))[0] < 1


@pytest.mark.parametrize("function", [erf, erfc])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (2, 3, 5), (70001,), (3, 40000)])
def test_shapes(function: Function, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    x = np.linspace(-3, 3, math.prod(shape)).reshape(shape).astype(dtype)
    y = function(x)
    assert isinstance(y, np.ndarray)
    assert (y.shape, y.dtype) == (shape, dtype)


@pytest.mark.parametrize("function", [erf, erfc])
def test_layout_and_position_do_not_matter(function: Function, dtype: np.dtype[Any]) -> None:
    x = np.random.default_rng(1).normal(scale=2, size=(301, 257)).astype(dtype)
    original = x.copy()
    y = function(x)
    np.testing.assert_array_equal(x, original)  # the argument is left alone
    assert not np.shares_memory(x, y)
    # NumPy's exponential may use other instructions for the last few elements, hence not bit for bit.
    limit = 4 * float(np.finfo(dtype).eps)
    np.testing.assert_allclose(function(np.asfortranarray(x)), y, rtol=limit)
    np.testing.assert_allclose(function(x[::-2, 3::7]), y[::-2, 3::7], rtol=limit)
    np.testing.assert_allclose(function(x[17, 5]), y[17, 5], rtol=limit)
    np.testing.assert_allclose(function(x.astype(dtype.newbyteorder())), y, rtol=limit)
    x.flags.writeable = False
    np.testing.assert_array_equal(function(x), y)


@pytest.mark.parametrize(
    ("given", "expected"), [("f2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i1", "f8"), ("i8", "f8"), ("?", "f8")]
)
def test_dtypes(given: str, expected: str) -> None:
    y = erf(np.array([0, 1], given))
    assert y.dtype == np.dtype(expected)
    assert y[1] == pytest.approx(math.erf(1), rel=1e-6)
    assert erf([0, 1]).dtype == erf(0.5).dtype == np.float64


@pytest.mark.parametrize("value", [1j, "1", None, np.array(1, "M8[s]")])
@pytest.mark.parametrize("function", [erf, erfc])
def test_rejects_what_is_not_real(function: Function, value: ArrayLike) -> None:
    with pytest.raises(TypeError, match="real numbers"):
        function(value)


@pytest.mark.parametrize("function", [erf, erfc])
def test_raises_no_floating_point_error_or_warning(function: Function, dtype: np.dtype[Any]) -> None:
    x = np.concatenate([arguments(dtype), np.array([np.inf, -np.inf, np.nan], dtype)])
    before = np.geterr()
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        function(x)
        for v in x[:: len(x) // 50]:
            function(v)
    assert np.geterr() == before
