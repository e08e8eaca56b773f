"""SciPy's functions inside fused functions: ufuncs of scipy.special, and library steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.integrate
import scipy.linalg
import scipy.ndimage
import scipy.optimize
import scipy.signal
import scipy.spatial.distance
import scipy.stats
from scipy import special, stats
from scipy.fft import dct, next_fast_len
from scipy.spatial.distance import cdist
from scipy.special import gammaln, sph_legendre_p
from scipy.stats import norm
from support import HOST, NUMPY, Engine, assert_close, normal

import cupyfuse as cf
from cupyfuse.ir.library import resolve_function
from cupyfuse.settings import force_plans
from cupyfuse.trace.numpy.scipy import FUNCTIONS

WRITING: tuple[Callable[..., Any], ...] = (
    lambda x, out: cdist(x * 1, x + 1, out=out),
    lambda x, out: scipy.ndimage.gaussian_filter(x * 1, 1.0, output=out),
    lambda x, out: scipy.ndimage.gaussian_filter(x * 1, 1.0, 0, out),
    lambda x, out: scipy.ndimage.convolve(x * 1, np.ones((2, 2)), output=out),
)
CALLS: dict[str, Callable[[Any], Any]] = {
    "gammaln": lambda x: gammaln(x * x + 1) - special.digamma(x * x + 1),
    "special": lambda x: special.ndtr(x) + special.erfc(x) + special.betaln(x * x + 1, 2.0) + special.log_ndtr(x),
    "entropies": lambda x: special.entr(x * x) + special.rel_entr(x * x, 0.5) + special.kl_div(x * x, 1.5),
    "zeta": lambda x: special.zeta(x * x + 2, 1) + special.polygamma(1, x * x + 1),
    "factorials": lambda x: special.factorial(x * x) + special.factorial2(np.floor(x * x).astype(int)) * x,
    "counts": lambda x: special.perm(9.0, np.floor(x * x)) + special.stirling2(5, np.floor(x * x).astype(int)),
    "bessel": lambda x: special.spherical_jn(1, x * x + 0.5) + special.jvp(1, x) + special.diric(x, 3),
    "spherical": lambda x: special.sph_harm_y(2, 1, x, 2 * x).real + sph_legendre_p(np.arange(6), 0, x),
    "log_softmax": lambda x: special.log_softmax(x, axis=1) + special.softmax(x, axis=0),
    "cdist": lambda x: cdist(x, x[:3]).min(axis=1),
    "pdist": lambda x: scipy.spatial.distance.squareform(scipy.spatial.distance.pdist(x)),
    "triangular": lambda x: scipy.linalg.solve_triangular(x @ x.T + 9 * np.eye(8), x, lower=True),
    "cholesky": lambda x: scipy.linalg.cho_solve(scipy.linalg.cho_factor(x.T @ x + np.eye(6)), x.T),
    "expm": lambda x: scipy.linalg.expm(x[:6] / 9),
    "toeplitz": lambda x: scipy.linalg.toeplitz(x[0]) @ x.T,
    "gaussian": lambda x: scipy.ndimage.gaussian_filter(x, 1.0) - x,
    "convolve2d": lambda x: scipy.signal.convolve2d(x, np.ones((3, 3)) / 9, mode="same"),
    "filter": lambda x: scipy.signal.lfilter([0.5], [1, -0.5], x, axis=0),
    "dct": lambda x: scipy.fft.dct(x, axis=1, norm="ortho"),
    "dct by name": lambda x: dct(x, n=next_fast_len(6), axis=1),
    "simpson": lambda x: scipy.integrate.simpson(x, axis=0),
    "normal": lambda x: stats.norm.logpdf(x, loc=x.mean(), scale=2.0).sum() + scipy.stats.norm.cdf(x).sum(),
    "imported": lambda x: norm.pdf(x) + norm.isf(0.1),
    "solve_toeplitz": lambda x: scipy.linalg.solve_toeplitz(np.abs(x[0]) * 0 + np.array([9, 1, 1, 0, 0, 0]), x[1]),
    "student": lambda x: stats.t.logpdf(x, 4.0).mean(axis=1),
    "multivariate": lambda x: stats.multivariate_normal.logpdf(x, x.mean(0), np.eye(6)),
    "poisson": lambda x: stats.poisson.logpmf(np.floor(x * x), 2.0),
    "pearson": lambda x: stats.pearsonr(x[0], x[1])[0] * x[0],
    "ranks": lambda x: stats.rankdata(x, axis=1),
    "zscore": lambda x: stats.zscore(x, axis=0),
    "assignment": lambda x: scipy.optimize.linear_sum_assignment(x)[1],
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)
def test_scipy(engine: Engine, name: str, dtype: str, rng: np.random.Generator) -> None:
    """The same code runs on arrays that differ by the rounding of what is fused around it."""
    x = normal(rng, (8, 6), dtype)
    expected = np.asarray(CALLS[name](x.copy()))
    with engine.active():
        actual = np.asarray(engine.host(cf.fuse(CALLS[name])(engine.array(x))))
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    # 48 elements at most are summed; the functions here multiply relative errors by less than 20.
    assert_close(actual, expected, 48 * 20 * float(np.finfo(dtype).eps) * (1 + np.abs(expected)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_relative_entropy_of_any_ratio(dtype: str) -> None:
    """The ratio may overflow, underflow or be next to one."""
    with np.errstate(over="ignore"):
        x = np.array([1e200, 1e-200, 1e-30, 1e20, 1 + 1e-6, 2, 0, 0, -1, np.inf, 1, np.nan, 1e-320]).astype(dtype)
        y = np.array([1e-200, 1e200, 1e20, 1e-30, 1, 1, 1, 0, 1, 1, np.inf, 1, 1e10]).astype(dtype)
    with force_plans():
        found = cf.fuse(lambda x, y: special.rel_entr(x, y))(x, y)
    np.testing.assert_allclose(found, special.rel_entr(x, y), rtol=8 * np.finfo(dtype).eps)


def test_results_by_name() -> None:
    x = np.random.default_rng(0).standard_normal((2, 9))
    found = cf.fuse(lambda x: stats.pearsonr(x[0], x[1]).statistic)(x)
    np.testing.assert_allclose(found, stats.pearsonr(x[0], x[1]).statistic, rtol=1e-12)


@pytest.mark.parametrize("module", FUNCTIONS)
def test_functions_exist(module: str) -> None:
    for name in FUNCTIONS[module].split():
        assert callable(resolve_function(f"{module}.{name}", np)), f"{module}.{name}"


def test_strict_refuses() -> None:
    with pytest.raises(cf.TraceError, match=r"scipy\.spatial\.distance\.cdist.*strict=True"):
        cf.fuse(lambda x: cdist(x, x), strict=True)(np.ones((3, 2)))


def test_operands_are_not_overwritten() -> None:
    a, b = np.random.default_rng(0).standard_normal((5, 5)).T + 5 * np.eye(5), np.ones(5)
    before = a.copy(), b.copy()
    solve = cf.fuse(lambda a, b: scipy.linalg.solve(a, b, overwrite_a=True, overwrite_b=True))
    np.testing.assert_allclose(a @ solve(a, b), b, rtol=1e-12)
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)
@pytest.mark.parametrize("write", WRITING, ids=range(len(WRITING)))
def test_arrays_for_results_are_written(engine: Engine, write: Callable[..., Any], rng: np.random.Generator) -> None:
    """Those that the function makes, and its arguments; what it returns is that array."""

    def function(x: Any, y: Any) -> Any:
        made = np.zeros((4, 4))
        found = write(x, made)
        write(y, y)
        return made, found + 1, cf.relu(y)

    x, y = (normal(rng, (4, 4), "float64") for _ in range(2))
    mine, (given, changed) = y.copy(), engine.arrays([x, y])
    with force_plans(), engine.active():
        found = cf.fuse(function)(given, changed)
    for actual, expected in zip((*found, changed), (*function(x, mine), mine), strict=True):
        assert_close(engine.host(actual), expected, 1e-13)


def test_arrays_of_library_code_are_refused_for_results() -> None:
    with pytest.raises(cf.TraceError, match=r"cdist with an array for its result.*has to be an argument"):
        cf.fuse(lambda x: cdist(x, x, out=np.mgrid[:3.0, :3.0][0]) + cf.relu(x))(np.ones((3, 3)))


def test_arrays_around_the_function_are_written() -> None:
    target = np.zeros((3, 3))
    function = cf.fuse(lambda x: cdist(x, -x, out=target) + cf.relu(x))
    for k in range(3):
        x = np.arange(9.0).reshape(3, 3) + k
        np.testing.assert_allclose(function(x), cdist(x, -x) + x)
        np.testing.assert_allclose(target, cdist(x, -x))


def test_mistakes_name_the_line() -> None:
    with pytest.raises(ValueError, match=r"scipy\.spatial\.distance\.cdist.*\n  at .*test_scipy_functions"):
        cf.fuse(lambda x: cdist(x, x.T))(np.ones((3, 2)))
    with pytest.raises(cf.TraceError, match=r"cdist.*neither an array nor a constant"):
        cf.fuse(lambda x: cdist(x, x, lambda a, b: 0.0))(np.ones((3, 2)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint16", "int32", "int64", "bool"])
@pytest.mark.parametrize("name", ["expit", "logit", "log_expit", "erf", "log1p", "cbrt", "xlogy", "entr", "rel_entr"])
def test_ufuncs_have_scipys_dtypes(name: str, dtype: str) -> None:
    function = getattr(special, name)
    x = np.array([0.0, 0.25, 0.5, 1.0]).astype(dtype)
    arguments = (x,) * function.nin
    with np.errstate(all="ignore"):
        expected = function(*arguments)
    got = cf.fuse(lambda *v: function(*v))(*arguments)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-6 if expected.dtype == np.float32 else 1e-14)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_ufuncs_take_numbers_that_change_from_call_to_call(kind: type) -> None:
    x = np.linspace(0.5, 4, 12, dtype=np.float32).reshape(3, 4)
    functions = [special.xlogy, lambda x, k: special.jv(k, x), lambda x, k: special.gammainc(k + 1, x)]
    for function in functions:
        fused = cf.fuse(function)
        for k in map(kind, (2.0, 3.0, 0.5, 2.25)):
            found, expected = fused(x, k), function(x, k)
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_logit_near_one_half() -> None:
    x = 0.5 + np.array([0.0, 1e-12, -1e-9, 1e-3, 0.1, -0.2, 0.149, 0.151])
    np.testing.assert_allclose(cf.fuse(lambda v: special.logit(v))(x), special.logit(x), rtol=1e-14)


def test_ufuncs_within_scipys_functions() -> None:
    x = np.linspace(0.1, 2, 6).reshape(2, 3)
    with force_plans():
        got = cf.fuse(lambda v: special.lambertw(v).real)(x)
    np.testing.assert_array_equal(got, special.lambertw(x).real)


# What functions that choose among ufuncs along axes return for an array of angles or cosines, also with derivatives.
CHOOSING: dict[str, Callable[[Any], Any]] = {
    "legendre_p": lambda v: special.legendre_p(3, v, diff_n=1),
    "sph_legendre_p": lambda v: special.sph_legendre_p(2, 1, v),
    "assoc_legendre_p": lambda v: special.assoc_legendre_p(np.arange(3), 1, v, norm=True),
    "sph_harm_y": lambda v: special.sph_harm_y(2, 1, v, 2 * v),
    "sph_harm_y_all": lambda v: special.sph_harm_y_all(2, 1, v, 0.5),
    "by name": lambda v: sph_legendre_p(2, 1, v),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CHOOSING)
def test_functions_that_choose_among_ufuncs(name: str, dtype: str) -> None:
    fused = cf.fuse(CHOOSING[name])
    for rows in (2, 4):
        x = np.linspace(-0.9, 0.9, 3 * rows).reshape(rows, 3).astype(dtype)
        with force_plans():
            got = fused(x)
        expected = CHOOSING[name](x)
        assert (type(got), np.shape(got)) == (type(expected), np.shape(expected))
        for one, wanted in zip(got, expected, strict=True):
            assert one.dtype == wanted.dtype
            np.testing.assert_array_equal(one, wanted)


def test_ufuncs_of_arrays_along_axes_are_refused() -> None:
    """They were taken for pointwise ones, with results of another shape."""
    ufunc = special.legendre_p._resolve_ufunc(diff_n=0)
    with pytest.raises(cf.TraceError, match=r"takes arrays along some axes.*\n  at .*test_scipy_functions"):
        cf.fuse(lambda v: ufunc(1, v))(np.linspace(-0.9, 0.9, 6).reshape(2, 3))


def test_results_have_the_type_that_they_have_for_values_that_differ(rng: np.random.Generator) -> None:
    x, y = normal(rng, 9, "float64"), normal(rng, 9, "float64")
    with force_plans():
        got = cf.fuse(lambda x, y: stats.spearmanr(x, y).statistic)(x, y)
    assert type(got) is np.float64 and got == stats.spearmanr(x, y).statistic
