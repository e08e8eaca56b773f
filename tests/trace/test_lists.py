"""NumPy's functions and ufuncs of lists and tuples that hold traced arrays: the values, shapes and dtypes of NumPy."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.special
from numpy import exp, fromiter, logical_and, where
from support import NUMPY, Engine, assert_close, assert_equal, normal

import cupyfuse as cf
from cupyfuse.settings import force_plans
from cupyfuse.trace.numpy.lists import replacements

SCOPE: dict[str, Any] = {
    **{"np": np, "exp": exp, "logical_and": logical_and, "where": where, "scipy": scipy, "functools": functools},
    "OPERATIONS": {"+": np.add, "exp": np.exp},
}


def made(text: str) -> Any:
    *lines, result = text.split("; ")
    scope = dict(SCOPE)
    exec("def function(x, k):\n" + "".join(f"    {line}\n" for line in [*lines, f"return {result}"]), scope)
    return scope["function"]


def same(engine: Engine, text: str, rng: np.random.Generator) -> cf.Plan:
    """Values, shapes and dtypes are NumPy's; the longest sums here have 12 numbers."""
    function, arguments = made(text), (normal(rng, (4, 3), "float64"), rng.integers(0, 3, 4))
    expected = function(*(a.copy() for a in arguments))
    fused = cf.fuse(function)
    actual = engine.host(fused(*engine.arrays(arguments)))
    many = isinstance(expected, tuple)
    for a, e in zip(actual if many else [actual], expected if many else [expected], strict=True):
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(e), np.asarray(e).dtype)
        assert_close(a, e, 12 * np.finfo(np.float64).eps * (1 + np.abs(e)))
    return fused.plan(*arguments)


UFUNCS = (
    "np.exp([x[0].sum(), x[1].sum()]), np.exp(([x[0], x[1]], [x[2], x[3]])), exp([x[0, 0], 1])",
    "np.maximum([x[0], x[1]], 0), np.maximum(0, (x[0], x[1])), np.add([x[0, 0], 1], [2, x[0, 1]])",
    "np.hypot([x[0], x[1]], [x[1], x[2]]), np.power(2, [x[0, 0], 1]), np.matmul([x[0], x[1]], x.T)",
    "np.divmod([x[0], x[1]], 2), np.isfinite([x[0, 0], np.nan]), np.vecdot([x[0], x[1]], x[0])",
    "np.add.reduce([x[0], k[:3]]), np.logaddexp.reduce([x[0], x[1]])",
    "np.add.reduce([x[0], x[1]], where=[x[0] > 0, x[1] > 0]), np.add.reduce([x[0], x[1]], initial=2.0)",
    "np.minimum.reduce([x, 2 * x, -x], 1), np.maximum.reduce([x, -x], axis=None), np.logical_and.reduce([x > 0])",
    "np.add.accumulate([x[0], x[1]]), np.add.reduceat([x[0, 0], x[0, 1], x[0, 2], 1.0], [0, 2])",
    "np.multiply.outer([x[0, 0], 2.0], x[1]), np.multiply.outer(x[1], [x[0, 0], 2.0])",
    "z = x.copy(); np.add.at(z, (k % 2, [0, 1, 2, 0]), [x[0, 0], 1, 2, 3]); np.add.at(z, [k[0], 1], 2.0); z",
    "z = x.copy(); np.maximum([x[0, 0], 1, 2], 0, out=z[0]); z",
    "OPERATIONS['+'].reduce([x, x]), OPERATIONS['exp']([x[0, 0], 1]), functools.reduce(np.add, [x, x, x])",
    "np.matmul([1, 2, 3], x.T), np.fmax(x, [2, 2, 2]), np.fmin((1, 2, 3), x), np.hypot(x, [3, 4, 5])",
    "np.copysign([1, 2, 3], x), np.divmod(x, [2, 3, 4])[1], np.heaviside(x, [0, 1, 2]), np.float_power(x, [2, 3, 4])",
    "np.logical_xor(x > 0, [1, 0, 1]), np.gcd(k, [2, 4, 6, 8]), np.ldexp(x, [1, 2, 3]), np.nextafter([1.0, 2, 3], x)",
    "scipy.special.xlogy([1, 2, 3], x + 9), scipy.special.beta([1, 2, 3], x + 9), np.r_[[x.sum(), x.mean()], x[0]]",
    "scipy.special.expit([x[0, 0], 1]), scipy.special.erf([x[0], x[1]]), scipy.special.logsumexp([x[0], x[1]], axis=0)",
)
# Pairs of items give the same: these need no array of the list, and no library step.
FOLDED = (
    "np.logical_and.reduce([x > -1, x < 1, x != 0]), logical_and.reduce([x > 0, x < 1])",
    "np.logical_or.reduce((x > 1, x < -1)), np.logical_and.reduce([x, x - 1]), np.bitwise_or.reduce([k, k + 1])",
    "np.maximum.reduce([x, 2 * x, -x]), np.fmin.reduce([x[0], x[1], x[2]], axis=0)",
    "np.add.reduce((x[0], x[1])), np.multiply.reduce([x[0].sum(), x[1].sum()])",
)
# Sums of masks are integers, and those of few narrow integers are wide.
NOT_FOLDED = "np.add.reduce([x > 0, x > 1]), np.add.reduce([k.astype('int8'), k.astype('int8')])"
NOT_IN_CUPY = "np.subtract.reduce([x[0], x[1], x[2]])"
FUNCTIONS = (
    "np.clip([x[0, 0], 3], 0, 1), np.clip(x, [x[0, 0] - 9, -1, 0], 1), np.where([x[0] > 0, x[1] > 0], 1, 0)",
    "np.where(x > 0, [x[0, 0], 1, 2], [x[1], x[2], x[0], x[1]]), where([x[0, 0] > 0, False], 1, 2)",
    "np.dot([x[0, 0], x[0, 1]], [1, 2]), np.dot([1, 2], [x[0, 0], x[0, 1]]), np.outer([x[0, 0], 1], x[1])",
    "np.einsum('ij,kj->ik', [x[0], x[1]], x), np.vdot([x[0, 0], 1], [x[1, 0], 2]), np.kron([x[0, 0], 1], x[1])",
    "np.repeat([x[0, 0], 1], 2), np.tile([x[0, 0], 1], 2), np.roll([x[0], x[1]], 1, axis=1), np.flip([x[0, 0], 1])",
    "np.trapezoid([x[0, 0], x[0, 1]], [0, 2]), np.count_nonzero([x[0] > 0, x[1] > 0], axis=0)",
    "np.polyval([x[0, 0], 1, 2], x[1]), np.polyval([1, 2], [x[0, 0], 2]), np.linspace([x[0, 0], 0], [1, x[0, 1]], 3)",
    "np.interp([x[0, 0], 0], [-1, 0, 1], [x[1, 0], x[1, 1], 2]), np.cross([x[0, 0], 0, 1], [x[1, 0], 1, x[1, 2]])",
    "np.concatenate([[x[0, 0], 1], [x[0, 1]]]), np.concatenate((x, [[x[0, 0], 2, 3]]))",
    "np.vstack([x, [x[0, 0], 1, 2]]), np.stack([[x[0, 0], 1], [x[0, 1], 2]])",
    "np.concat([[x[0, 0], 1], x[0]]), np.block([[x, x], [x, x]])",
    "np.select([x > 0, x < -1], [x, 2 * x], 0), np.select([[x[0, 0] > 0, True]], [[x[0, 1], 1]], 0)",
    "np.choose(k % 2, [x[:, 0], x[:, 1]]), np.lexsort([[x[0, 0], 1], [x[0, 1], 0]]), np.lexsort((x[0], x[1]))",
    "np.searchsorted([-1, 0, 1], [x[0, 0], 0]), np.take(x, [k[0], 1], axis=0), np.take([x[0], x[1]], 1, axis=0)",
    "np.linalg.inv([[x[0, 0], 1], [1, -9]]), np.linalg.solve([[x[0, 0], 1], [1, -9]], [x[0, 1], 2])",
    "np.linalg.multi_dot([x.T, x, [[x[0, 0]], [1.0], [2.0]]]), np.fft.ifft(np.fft.fft([x[0, 0], 1, 2])).real",
    "np.full((2, 2), [x[0, 0], 1]), np.full_like(x, [x[0, 0], 1, 2]), np.zeros_like([x[0], x[1]])",
    "np.histogram([x[0, 0], x[0, 1], 0.5], 3, (-3, 3))[0], np.histogram(x, 3, range=(x.min(), x.max()))[0]",
    "np.histogram2d(x[:, 0], x[:, 1], [[-9.0, 0.0, 9.0], [-9.0, -1.0, 0.0, 9.0]])[0], np.cov([x[0], x[1]])",
    "np.pad([x[0, 0], 1], 1), np.pad(x[0], 1, constant_values=(1, 2)), np.insert(x[0], 1, [x[1, 0], 2])",
    "np.average([x[0], x[1]], axis=0, weights=[x[0, 0] + 9, 9.0]), np.nanvar([x[0], x[1]], axis=0)",
    "np.bincount(k, weights=[x[0, 0], 1, 2, 3], minlength=3), np.isin([k[0], 1], [1, 2]), np.ix_([k[0], 1], [0, 1])[0]",
    "x * np.shape([x[0], x[1]])[0] * np.ndim([x[0], x[1]]) * np.size([x[0], x[1]]) * (2 if np.isscalar([x[0]]) else 3)",
    "z = x.copy(); np.put(z, [0, 1], [x[1, 0], 7]); np.fill_diagonal(z, [x[0, 0], 1, 2]); z",
    "z = np.zeros(2); np.copyto(z, [x[0, 0], 1]); z",
    "np.array([k[0], 2**53 + 1, x[0, 0]], dtype=np.int64), np.array([[x[0, 0], 1], [2, x[0, 1]]], np.float32)",
)


@pytest.mark.parametrize("text", (*UFUNCS[:6], *FOLDED))
def test_on_each_engine(engine: Engine, text: str, rng: np.random.Generator) -> None:
    same(engine, text, rng)


@pytest.mark.parametrize("text", (*UFUNCS[6:], NOT_FOLDED, NOT_IN_CUPY, *FUNCTIONS))
def test_lists_of_arrays(text: str, rng: np.random.Generator) -> None:
    same(NUMPY, text, rng)


@pytest.mark.parametrize("text", FOLDED)
def test_reductions_of_lists_are_fused(text: str) -> None:
    cf.fuse(made(text), strict=True).plan(cf.spec((4, 3), "float64"), cf.spec(4, "int64"))


def test_a_tuple_of_indices_is_no_array() -> None:
    def add(x: Any, i: Any, j: Any) -> Any:
        np.add.at(x, (i, j), 1.0)
        return x

    i, j = np.array([0, 0, 1]), np.array([1, 1, 2])
    np.testing.assert_array_equal(cf.fuse(add)(np.zeros((2, 3)), i, j), add(np.zeros((2, 3)), i, j))


def test_lists_without_a_common_dtype() -> None:
    """NumPy makes an array of objects of them."""
    x = np.ones(4, ml_dtypes.bfloat16)
    with pytest.raises(cf.TraceError, match=r"a list of bfloat16 and int64.*dtype=.*\n  at .*test_lists"):
        cf.fuse(lambda x: np.array([[1, x[0]], [x[1], 2]]))(x)
    given = cf.fuse(lambda x: np.array([[1, x[0]], [x[1], 2]], dtype=x.dtype))(x)
    assert given.dtype == x.dtype
    np.testing.assert_array_equal(given.astype(float), [[1, 1], [1, 2]])


def test_numbers_that_do_not_fit_are_errors_as_in_numpy() -> None:
    with pytest.raises(OverflowError):
        cf.fuse(lambda x: np.array([x[0], 300], dtype=np.uint8))(np.ones(2))


def test_the_first_of_many_rows_can_be_taken() -> None:
    x = np.arange(300.0).reshape(100, 3)

    def function(x: Any) -> Any:
        found = [row.sum() * i for i, row in zip(range(3), x, strict=False)] + [*itertools.islice(x.flat, 2)]
        for i, row in enumerate(x):
            if i == 2:
                break
            found.append(row[0])
        return [*found, next(iter(x))]

    for ours, theirs in zip(cf.fuse(function)(x), function(x), strict=True):
        assert_equal(ours, theirs)


def test_arrays_of_what_iterables_yield(rng: np.random.Generator) -> None:
    def function(x: Any) -> Any:
        filled = np.fromiter(range(3), float)
        filled[1] = x.sum()
        several = fromiter((v for row in x for v in row), dtype=np.float32, count=4)
        return filled, several, np.fromiter({"a": x[0, 0], "b": 2.5}.values(), None), fromiter(x[0] > 0, bool)

    fused = cf.fuse(function)
    for dtype, rows in (("float64", 2), ("float64", 3), ("float32", 2), ("int64", 2)):
        x = (3 * rng.standard_normal((rows, 3))).astype(dtype)
        with force_plans():
            got = fused(x)
        for one, expected in zip(got, function(x), strict=True):
            assert (type(one), one.dtype, one.shape) == (type(expected), expected.dtype, expected.shape)
            np.testing.assert_allclose(one, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="iterator too short: Expected 9 but iterator had only 3 items"):
        cf.fuse(lambda x: np.fromiter((v for v in x[0]), float, 9))(x)
    for refused in (
        lambda x: np.fromiter(x, float),
        lambda x: np.fromiter(((v, v) for v in x[0]), np.dtype((float, 2))),
    ):
        with pytest.raises(cf.TraceError, match=r"np\.fromiter of anything but numbers.*\n  at .*test_lists"):
            cf.fuse(refused)(x)


def test_what_dispatches_nowhere_names_the_way_out() -> None:
    exp = np.exp
    with pytest.raises(cf.TraceError, match=r"conversion of a traced array.*np\.stack\(\[\.\.\.\]\)"):
        cf.fuse(lambda x: exp([x[0], x[1]]), static=("exp",))(np.ones((2, 3)))


def test_ufuncs_stay_what_they_are_for_other_code() -> None:
    """While a trace runs, others stand for them in the module, to all of its threads."""
    for name, new in replacements(np):
        old = getattr(np, name)
        assert new.__name__ == old.__name__
        if isinstance(old, np.ufunc):
            assert isinstance(new, np.ufunc) and callable(new) and new == old and old == new
            assert {old: 1}[new] == {new: 1}[old] == 1
            assert new != np.sum and repr(new) == repr(old)
            assert (new.nin, new.nout, new.identity, new.types) == (old.nin, old.nout, old.identity, old.types)
            assert copy.deepcopy(new) is new
    x = cf.fuse(lambda x: x * (pickle.loads(pickle.dumps(np.abs)) is np.abs))(np.ones(2))
    np.testing.assert_array_equal(x, [1, 1])
    table = dict(replacements(np))
    assert table["abs"] is table["absolute"] and table["concat"] is table["concatenate"]
    x = np.array([1.0, 4.0])
    assert table["add"].reduce(x) == 5 and table["add"].reduce([1, 2], initial=3) == 6
    np.testing.assert_array_equal(table["sqrt"](x, where=[True, True], out=x * 0), [1, 2])
    np.testing.assert_array_equal(table["add"].accumulate([1, 2]), [1, 3])
    np.testing.assert_array_equal(table["multiply"].outer([1, 2], [3]), [[3], [6]])
    table["add"].at(x, [0, 0], 1)
    np.testing.assert_array_equal(x, [3, 4])


def test_further_arguments_of_functions_that_call_the_users_are_the_users(rng: np.random.Generator) -> None:
    def along(k: Any, x: Any) -> Any:
        return np.apply_along_axis(lambda v, p: v * p[0] * isinstance(p, list), 0, k, [k[0, 1], x[0, 1]])

    def parts(x: Any) -> Any:
        return np.piecewise(x, [x > 0.5], [lambda v, p: v * p[0].sum() + p[1].sum(), 0.0], p=[x, x[0]])

    k, x = rng.integers(0, 9, (2, 3)), normal(rng, (2, 3), "float64")
    for function, arguments in ((along, (k, x)), (parts, (x,))):
        with force_plans():
            found = cf.fuse(function)(*arguments)
        expected = function(*arguments)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_what_stands_for_a_function_of_numpy_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    original = np.exp
    monkeypatch.setattr(np, "exp", lambda a: original(a) * 2)
    with force_plans():
        found = cf.fuse(lambda x: np.exp(x) + np.sin(x))(np.arange(3.0))
    np.testing.assert_allclose(found, original(np.arange(3.0)) * 2 + np.sin(np.arange(3.0)), rtol=1e-15)


def test_ufuncs_that_an_import_during_a_trace_kept_are_pickled() -> None:
    kept = dict(replacements(np))["add"]
    assert pickle.loads(pickle.dumps(kept)) is np.add and copy.copy(kept) is kept
