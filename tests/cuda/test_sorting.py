"""Sorts, searches and quantiles of CuPy's arrays are NumPy's, where CuPy's are not."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from cupy_stand_in import CUPY, Array, array
from support import CUDA, NAN

import cupyfuse as cf
from cupyfuse.cuda import sorting
from cupyfuse.cuda.library_functions import resolve
from cupyfuse.ir.library import LibraryCall
from cupyfuse.ir.quantiles import CONTINUOUS, SELECTING, place_of

SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, NAN, -NAN, 3.5, 3.5]
METHODS = [*CONTINUOUS, *SELECTING, "midpoint", "averaged_inverted_cdf"]


@pytest.fixture(params=["merged", "by keys"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with rows sorted as CuPy does, and as one vector of keys."""
    if request.param == "by keys":
        monkeypatch.setattr(sorting, "_MANY", 1)


def function(name: str) -> Any:
    """What stands for a function of NumPy on CuPy's arrays."""
    own = resolve(LibraryCall(name, (), {}, (), (), ()), CUPY)

    def call(*args: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return own(*args, **options)

    return call


def reference(name: str, *args: Any, **options: Any) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(np, name)(*args, **options)


def samples(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Values with ties and, of floats, zeros of both signs, infinities, and NaN of both signs."""
    if np.dtype(dtype).kind == "f":
        values = rng.choice([*SPECIAL, *rng.standard_normal(10)], shape)
        return values.astype(dtype).view(Array)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool).view(Array)
    limits = np.iinfo(dtype)
    return rng.choice([limits.min, limits.max, 0, 1, 2, 5], shape).astype(dtype).view(Array)


rows_either_way = pytest.mark.usefixtures("many")
DTYPES = ["float16", "float32", "float64", "bool", "int8", "uint8", "int32", "uint32", "int64"]
SHAPES = [((9,), -1), ((5, 9), 1), ((5, 9), 0), ((3, 4, 5), 1), ((4, 6), None), ((1, 7), -1), ((40, 70), 1)]


@rows_either_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_sort(dtype: str, shape: tuple[int, ...], axis: Any, rng: np.random.Generator) -> None:
    x = samples(rng, dtype, shape)
    before = x.copy()
    for options in ({}, {"kind": "quicksort"}, {"kind": "heapsort"}, {"stable": True}, {"kind": "stable"}):
        found, wanted = function("sort")(x, axis, **options), np.sort(np.asarray(x), axis, **options)
        np.testing.assert_array_equal(found, wanted)
        assert found.dtype == x.dtype
        if options in ({"stable": True}, {"kind": "stable"}) and x.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(found)[found == 0], np.signbit(wanted)[wanted == 0])
    np.testing.assert_array_equal(x, before)


@rows_either_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_argsort(dtype: str, shape: tuple[int, ...], axis: Any, rng: np.random.Generator) -> None:
    x = samples(rng, dtype, shape)
    for options in ({}, {"kind": "mergesort"}, {"stable": True}):
        found = function("argsort")(x, axis, **options)
        np.testing.assert_array_equal(found, np.argsort(np.asarray(x), axis, kind="stable"))


@pytest.mark.rotates
@rows_either_way
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("kth", [0, 3, -1, (1, -2)])
@pytest.mark.parametrize("short", [0, 160])
def test_partition(
    dtype: str, shape: tuple[int, ...], axis: Any, kth: Any, short: int, monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    monkeypatch.setattr(sorting, "_SHORT", short)
    x = samples(rng, dtype, shape)
    ordered = np.sort(np.asarray(x), axis)
    by_position = np.asarray(x) if axis is not None else np.asarray(x).ravel()
    along = -1 if axis is None else axis
    for found in (
        function("partition")(x, kth, axis),
        np.take_along_axis(by_position, np.asarray(function("argpartition")(x, kth, axis)), along),
    ):
        np.testing.assert_array_equal(np.sort(np.asarray(found), along), ordered)  # a permutation
        for k in np.atleast_1d(kth) % ordered.shape[along]:
            parts = np.split(np.asarray(found), [k, k + 1], along)
            np.testing.assert_array_equal(parts[1], np.take(ordered, [k], along))
            np.testing.assert_array_equal(np.sort(parts[0], along), np.take(ordered, range(k), along))


def test_places_far_from_the_first_are_sorted(rng: np.random.Generator) -> None:
    """CuPy's partition would sort there, too; complex numbers have no integers of their order."""
    x = samples(rng, "float32", (3, 1200))
    np.testing.assert_array_equal(function("partition")(x, 600), np.sort(np.asarray(x)))
    np.testing.assert_array_equal(function("argpartition")(x, 600), np.argsort(np.asarray(x), kind="stable"))
    z = x[:, :9].astype(complex)
    z.imag = x[:, 9:18]
    np.testing.assert_array_equal(function("partition")(z, 2), np.sort(np.asarray(z)))


def test_lexsort(rng: np.random.Generator) -> None:
    keys = tuple(samples(rng, dtype, (4, 30)) for dtype in ("float32", "int64", "bool"))
    for given in (keys, keys[:1], [keys[0][0], keys[1][0]], samples(rng, "float64", (3, 30))):
        np.testing.assert_array_equal(function("lexsort")(given), np.lexsort([np.asarray(k) for k in given]))
    np.testing.assert_array_equal(function("lexsort")(keys, 0), np.lexsort([np.asarray(k) for k in keys], 0))


BIG = np.array([2**24 + 1, 2**24, 3, 2**53 + 1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_searches(dtype: str, rng: np.random.Generator) -> None:
    edges, x = array(np.sort(np.asarray(samples(rng, "float32", (12,))))), samples(rng, dtype, (5, 7))
    for side in ("left", "right"):
        np.testing.assert_array_equal(
            function("searchsorted")(edges, x, side=side), np.searchsorted(np.asarray(edges), np.asarray(x), side)
        )
    floats = np.float32([1, 2**24, 2**24 + 2])
    for side in ("left", "right"):  # of which float32 holds no neighbours
        found = function("searchsorted")(array(floats), array(BIG), side)
        np.testing.assert_array_equal(found, np.searchsorted(floats, BIG, side))
    np.testing.assert_array_equal(function("digitize")(array(BIG), array(floats)), np.digitize(BIG, floats))
    for tests in (samples(rng, "float32", (6,)), samples(rng, "float64", (2, 3)), BIG, [1.0, 3.5], edges[:0]):
        for invert in (False, True):
            found = function("isin")(x, array(tests), invert=invert, kind="sort")
            np.testing.assert_array_equal(found, np.isin(np.asarray(x), np.asarray(tests), invert=invert))
    np.testing.assert_array_equal(function("isin")(array(BIG), array(floats)), np.isin(BIG, floats))


# Quantiles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_places(method: str, rng: np.random.Generator) -> None:
    for n in (1, 2, 3, 10, 11):
        x = np.sort(rng.standard_normal(n))
        for q in (0, 1, 0.0, 0.1, 0.25, 0.3, 0.5, 0.85, 1.0):
            below, above, weight = place_of(n, q, method)
            assert 0 <= below <= above < n
            found = x[below] + (x[above] - x[below]) * (weight or 0)
            np.testing.assert_allclose(found, np.quantile(x, q, method=method), rtol=1e-12, atol=1e-14)


AXES = [((9,), None), ((8,), 0), ((5, 9), 1), ((5, 9), 0), ((5, 9), None), ((3, 4, 5), (0, 2)), ((3, 4, 5), -2)]
# Finite values: of infinities NumPy's interpolation makes NaN also where a weight is zero, in several ways.
FINITE = [0.0, 1.0, -1.0, 3.5, 3.5, 7.25]


def data(dtype: str, shape: tuple[int, ...], rng: np.random.Generator, nans: float) -> Any:
    x = rng.choice([*FINITE, *rng.standard_normal(20).round(3)], shape)
    if np.dtype(dtype).kind != "f":
        return (x * 10).astype(dtype).view(Array)
    x[rng.random(shape) < nans] = NAN
    x[rng.random(shape) < nans / 4] = -NAN
    return x.astype(dtype).view(Array)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize(("shape", "axis"), AXES)
@pytest.mark.parametrize("name", ["quantile", "nanquantile", "percentile", "nanpercentile"])
def test_quantiles(name: str, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator) -> None:
    scale = 100 if "percentile" in name else 1
    for nans in (0.0, 0.1, 0.7):
        x = data(dtype, shape, rng, nans)
        for q in (0.5, 0, 1, [0.1, 0.75], [0.3], np.float64(0.3)):
            q = (np.multiply(q, scale)).tolist() if isinstance(q, list) else type(q)(q * scale)
            for method in ("linear", "lower", "higher", "nearest", "midpoint", "hazen"):
                options = {"axis": axis, "keepdims": method == "linear", "method": method}
                wanted = reference(name, np.asarray(x), q, **options)
                found = function(name)(x, q, **options)
                assert found.shape == wanted.shape
                # NumPy's percentiles of float32 are computed from q / 100 in float32.
                unit = 64 * np.finfo(np.float32 if dtype == "float32" else np.float64).eps
                np.testing.assert_allclose(found, wanted, rtol=unit, atol=20 * unit)


def test_quantiles_of_arrays_of_places(rng: np.random.Generator) -> None:
    x, q = data("float64", (5, 9), rng, 0.1), array(rng.random((2, 3)))
    for name in ("quantile", "nanquantile"):
        for method in ("linear", "weibull", "lower", "midpoint"):
            found = function(name)(x, q, axis=1, method=method)
            wanted = reference(name, np.asarray(x), np.asarray(q), axis=1, method=method)
            np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-14)
        with pytest.raises(ValueError, match="range"):
            function(name)(x, array(np.array([0.5, 1.5])), axis=1)
        for refused in ({"method": "averaged_inverted_cdf"}, {"weights": x}):
            with pytest.raises(NotImplementedError):
                function(name)(x, q, axis=1, **refused)


@pytest.mark.parametrize("method", METHODS)
def test_quantiles_of_infinities(method: str) -> None:
    """Infinity, where an element is chosen; where there is interpolation, NaN in the cases that are NumPy's."""
    rows = [[1, 2, np.inf, np.inf], [-np.inf, -np.inf, 3, np.inf], [-np.inf, 1, 2, np.inf], [2, np.inf, np.inf, np.inf]]
    x = array(np.array(rows))
    for q in (0, 1, 0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0, [0, 1], [0.0, 0.25], np.int64(1)):
        names = (
            ("quantile",) if method.endswith("cdf") or method == "closest_observation" else ("quantile", "nanquantile")
        )
        for name in names:
            wanted = reference(name, np.asarray(x), q, axis=1, method=method)
            np.testing.assert_allclose(function(name)(x, q, axis=1, method=method), wanted, err_msg=f"{name} {q}")


def test_quantiles_that_are_integers_keep_all_digits() -> None:
    """Floats hold no integers beyond 2**53."""
    x = np.array([2**62 + 1, -(2**62) - 1, 3])
    for q in ([0, 1], np.int64(1)):
        for method in ("linear", "weibull", "averaged_inverted_cdf"):
            wanted = np.quantile(x, q, method=method)
            np.testing.assert_array_equal(np.asarray(function("quantile")(array(x), q, method=method)), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("name", ["nanquantile", "nanpercentile"])
def test_quantiles_of_no_elements(name: str, dtype: str) -> None:
    x = np.zeros((3, 0), dtype)
    for q in (0.5, [0.1, 0.5]):
        for axis, keepdims in ((1, False), (1, True), (None, False)):
            wanted = reference(name, x, q, axis=axis, keepdims=keepdims)
            found = function(name)(array(x), q, axis=axis, keepdims=keepdims)
            assert np.shape(found) == np.shape(wanted) and np.isnan(found).all()


@pytest.mark.parametrize(("shape", "axis"), [*AXES, ((3, 0), 1), ((0,), None)])
def test_medians_of_what_is_no_nan(shape: tuple[int, ...], axis: Any, rng: np.random.Generator) -> None:
    """Infinities beside NaN, too: CuPy 14 takes NaN for the largest finite number."""
    for dtype in ("float16", "float32", "float64", "int32", "bool"):
        x = samples(rng, dtype, shape)
        if np.dtype(dtype).kind == "f":
            x[x == -np.inf] = np.inf  # the middle of two infinities of both signs is NaN, with either sign
        for keepdims in (False, True):
            for name in ("median", "nanmedian"):
                wanted = reference(name, np.asarray(x), axis=axis, keepdims=keepdims)
                found = function(name)(x, axis=axis, keepdims=keepdims)
                assert found.shape == np.shape(wanted)
                np.testing.assert_array_equal(np.asarray(found).astype(wanted.dtype), wanted)
    assert function("nanmedian")(array(np.float32([1, np.inf, NAN]))) == np.inf


@pytest.mark.gpu
def test_on_a_gpu(rng: np.random.Generator) -> None:
    CUDA.require()

    def sorts(x: Any, y: Any) -> Any:
        order = np.argsort(x, axis=1, kind="stable")
        return (
            np.sort(x, axis=0),
            np.sort(x, axis=None),
            order,
            np.partition(x, 3, axis=1)[:, :4].max(axis=1),
            np.sort(y),
        )

    def quantiles(x: Any, y: Any) -> Any:
        return (
            np.quantile(x, 0.3, axis=1), np.percentile(x, [10, 90], axis=0), np.nanquantile(x, 0.3, axis=1),
            np.nanmedian(x, axis=0), np.median(x, axis=1), np.nanpercentile(y, 20), np.quantile(y, 0.5),
        )  # fmt: skip

    for rows, columns in ((5, 9), (300, 40), (1100, 700)):
        for dtype in ("float32", "float64"):
            x, y = np.asarray(samples(rng, dtype, (rows, columns))), np.asarray(samples(rng, dtype, (rows,)))
            given = CUDA.arrays([x, y])
            for got, wanted in zip(CUDA.host(cf.fuse(sorts)(*given)), sorts(x, y), strict=True):
                np.testing.assert_array_equal(got, wanted)
            for array_of in (x, y):
                array_of[np.isinf(array_of)] = 2.5
            given = CUDA.arrays([x, y])
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = quantiles(x, y)
            for got, wanted in zip(CUDA.host(cf.fuse(quantiles)(*given)), expected, strict=True):
                unit = 64 * np.finfo(dtype).eps
                np.testing.assert_allclose(got, wanted, rtol=unit, atol=20 * unit)
