"""Library steps that check their values: the shapes of their results come from sample arrays that they accept."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.linalg
import scipy.ndimage
import scipy.signal
import scipy.spatial
from scipy import special, stats
from scipy.spatial.distance import cdist, seuclidean

import cupyfuse as cf
from cupyfuse.settings import force_plans

_RNG = np.random.default_rng(0)
Y, Z = _RNG.standard_normal((2, 64))
POINTS = _RNG.standard_normal((8, 3))
MATRIX = POINTS.T @ POINTS + np.eye(3)
BANDS = np.vstack([np.zeros(5), np.full(5, 9.0), np.ones(5)])
SOS = scipy.signal.butter(4, 0.2, output="sos")
B, A = scipy.signal.butter(4, 0.2)
SHARES = np.array([0.5, 0.25, 0.25])

CALLS: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
    "sosfilt": (lambda y: scipy.signal.sosfilt(SOS, y), [Y]),
    "lfilter": (lambda y: scipy.signal.lfilter(B, A, y), [Y]),
    "filtfilt": (lambda b, a, y: scipy.signal.filtfilt(b, a, y), [B, A, Y]),
    "sosfiltfilt": (lambda y: scipy.signal.sosfiltfilt(SOS, y), [Y]),
    "deconvolve": (lambda y, a: scipy.signal.deconvolve(y, a), [Y, np.array([1.0, 2.0, 3.0])]),
    "linregress": (lambda a, b: stats.linregress(a, b).slope, [Y, Z]),
    "multigammaln": (lambda a: special.multigammaln(a, 2), [np.abs(Y) + 1]),
    "solve_banded": (lambda ab, b: scipy.linalg.solve_banded((1, 1), ab, b), [BANDS, np.ones(5)]),
    "lyapunov": (lambda a, q: scipy.linalg.solve_discrete_lyapunov(a, q), [MATRIX / 100, MATRIX]),
    "procrustes": (lambda x, z: scipy.spatial.procrustes(x, z), [POINTS, POINTS[::-1].copy()]),
    "seuclidean": (lambda u, v, w: seuclidean(u, v, w), [POINTS[0], POINTS[1], SHARES]),
    "mahalanobis": (lambda x, z: cdist(x, z, "mahalanobis"), [POINTS, POINTS + 1]),
    "simpson": (lambda y, t: scipy.integrate.cumulative_simpson(y, x=t), [Y, np.arange(64.0)]),
    "dirichlet": (lambda x, a: stats.dirichlet.logpdf(x, a), [SHARES, np.array([1.0, 2.0, 3.0])]),
    "wishart": (lambda s: stats.wishart.logpdf(s, 8, np.eye(3)), [MATRIX]),
    "multivariate_t": (lambda x: stats.multivariate_t.logpdf(x, np.zeros(3), np.eye(3), 4), [POINTS]),
    "matrix_normal": (lambda x: stats.matrix_normal.logpdf(x, np.zeros((8, 3))), [POINTS]),
    "invwishart": (lambda s: stats.invwishart.logpdf(s, 8, np.eye(3)), [MATRIX]),
    "ks_1samp": (lambda y: stats.ks_1samp(y, stats.norm.cdf), [Y]),
    "kstest": (lambda y: stats.kstest(y, "norm"), [Y]),
    "label": (lambda x: scipy.ndimage.label(x > 0), [POINTS]),
    "sqrtm": (lambda m: scipy.linalg.sqrtm(m), [MATRIX]),
    "logm": (lambda m: scipy.linalg.logm(m), [MATRIX]),
    "cov": (lambda x, w: np.cov(x, aweights=w), [POINTS.T, np.arange(8.0) + 1]),
    "quantile": (lambda x, w: np.quantile(x, 0.3, weights=w, method="inverted_cdf"), [Y, np.abs(Z)]),
    "geomspace": (lambda a, b: np.geomspace(a, b, 5), [np.abs(Y) + 1, np.abs(Z) + 3]),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_check_their_values(name: str) -> None:
    function, arguments = CALLS[name]
    expected = function(*arguments)
    with force_plans():
        actual = cf.fuse(function)(*arguments)
    several = isinstance(expected, tuple)
    for a, e in zip(actual if several else [actual], expected if several else [expected], strict=True):
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(e), np.asarray(e).dtype)
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-12)


def test_the_plan_shows_the_step() -> None:
    plan = cf.fuse(lambda y: scipy.signal.sosfilt(SOS, y)).plan(Y)
    assert [step.kind for step in plan.steps] == ["Library"]


def test_rejected_samples_name_the_way_out() -> None:
    """No sample is above 149.5."""
    with pytest.raises(
        cf.TraceError,
        match=r"special\.multigammaln: .*rejects those of each kind, zeros.*outside of the fused function\n  at",
    ):
        cf.fuse(lambda a: special.multigammaln(a, 300))(np.full(2, 200.0))


def test_mistakes_stay_as_numpy_raises_them() -> None:
    with pytest.raises(ValueError, match=r"sos array must be shape.*\n  at .*test_library_samples"):
        cf.fuse(lambda s, y: scipy.signal.sosfilt(s, y))(np.ones((2, 5)), Y)


def test_results_that_depend_on_values_are_refused() -> None:
    with pytest.raises(cf.TraceError, match=r"np\.repeat: the shape or dtype of its result depends on values"):
        cf.fuse(lambda x, n: np.repeat(x, n))(np.ones(3), np.array([1, 2, 3]))


@pytest.mark.parametrize(
    "test", [stats.pearsonr, stats.ttest_ind, stats.spearmanr, stats.kendalltau, stats.ks_2samp, stats.wilcoxon]
)
def test_result_objects(test: Callable[..., Any]) -> None:
    """A fused function returns SciPy's result, by fields and as a tuple."""
    expected = test(Y, Z)
    for _ in range(2):
        with force_plans():
            found = cf.fuse(lambda a, b: test(a, b))(Y, Z)
        np.testing.assert_allclose(tuple(found), tuple(expected), rtol=1e-9)
        assert found.statistic == found[0]
        assert found.pvalue == found[1]
        assert type(found).__name__ == type(expected).__name__
        assert pickle.loads(pickle.dumps(found)) == found


def test_attributes_of_result_objects() -> None:
    found = cf.fuse(lambda a, b: stats.pearsonr(a, b).correlation)(Y, Z)
    np.testing.assert_allclose(found, stats.pearsonr(Y, Z).statistic, rtol=1e-12)
    with pytest.raises(
        cf.TraceError, match=r"\.df of SciPy's TtestResult.*statistic, pvalue; call the function outside\n  at"
    ):
        cf.fuse(lambda a, b: stats.ttest_ind(a, b).df)(Y, Z)


def test_nested_results() -> None:
    with force_plans():
        found = cf.fuse(lambda y: stats.describe(y * 2))(Y)
    expected = stats.describe(Y * 2)
    assert type(found) is type(expected)
    assert type(found.nobs) is type(expected.nobs)
    assert (found.nobs, found.minmax) == (expected.nobs, expected.minmax)
    np.testing.assert_allclose(found[2:], expected[2:], rtol=1e-9)
