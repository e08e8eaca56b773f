"""NumPy's functions of integers, of the array API and of SciPy, and anywhere in a plan."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy_functions import INTEGERS, Function, plain, values
from support import HOST, INF, NAN, NUMPY, Engine, assert_equal, normal, unit

import cupyfuse as cf
from cupyfuse.settings import force_plans
from cupyfuse.trace.numpy import signatures

# Integers -----------------------------------------------------------------------------------------------------------

INTEGER_FUNCTIONS: dict[str, Function] = {
    "arithmetic": lambda x, y: (x + y, x - y, x * y, -x, x + 1, 3 - x, x * x * 50),
    "masks": lambda x, y: (x + y, x * y, np.maximum(x, y), x & y, x | y, ~x, x ^ y),
    "with_floats": lambda x, y: (x + 1.5, x * 0.5, x / 3, 2.0 - y, x / y.max()),
    "comparisons": lambda x, y: (x > y, x == y, x <= 2, x != 0, x > 1.5, x < 300, np.isnan(x)),
    "extremes": lambda x, y: (np.maximum(x, y), np.minimum(x, 2), np.clip(x, 1, 3), x.max(axis=1), x.min()),
    "powers": lambda x, y: (x**2, x**3, np.square(x), np.abs(x), np.sign(x), x ** np.abs(y)),
    "division": lambda x, y: (x // 2, x % 3, x // y, x % y, np.divmod(x, 2)[0]),
    "bits": lambda x, y: (x & y, x | 1, x ^ y, ~x, x << 1, x >> 1),
    "floats_of": lambda x, y: (np.exp(x), np.sqrt(np.abs(x)), np.tanh(x), np.log1p(np.abs(x)), np.sin(y)),
    "rounding": lambda x, y: (np.floor(x), np.ceil(x), np.trunc(x), np.rint(x), np.round(x), np.fabs(x)),
    "sums": lambda x, y: (x.sum(axis=1), x.sum(), x.mean(axis=0), x.var(axis=1), np.prod(x, axis=1)),
    "counts": lambda x, y: (np.count_nonzero(x, axis=1), np.argmax(x, axis=1), x.any(axis=0), np.all(x, axis=1)),
    "choice": lambda x, y: (np.where(x > y, x, y), np.where(x > y, x, 0.5), np.where(x > 1, x, 7)),
    "conversions": lambda x, y: (x.astype(np.float32) + 1, x.astype(np.int8), x.astype(bool), x.astype(np.uint16)),
    "library": lambda x, y: (np.sort(x, axis=1), np.cumsum(x, axis=1), np.concatenate([x, y]), x @ y.T, x.dot(y.T)),
    "with_other": lambda x, y: (x + y.astype(np.int16), x * y.astype(np.float32), x + y.astype(np.float16)),
    "norm": lambda x, y: (np.linalg.norm(x, axis=1), np.average(x, axis=1), np.nanmax(x, axis=1), np.nansum(x)),
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", INTEGER_FUNCTIONS)
def test_integers_follow_numpy(name: str, dtype: str, engine: Engine) -> None:
    function = INTEGER_FUNCTIONS[name]
    x, y = values(dtype, seed=1), values(dtype, seed=2)
    try:
        expected = plain(function, x, y)
    except TypeError:
        with pytest.raises(TypeError):  # what NumPy refuses of masks, fused functions refuse
            cf.fuse(function)(x, y)
        return
    with engine.active(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = engine.host(cf.fuse(function)(*engine.arrays([x, y])))
    for k, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        got, wanted = np.asarray(got), np.asarray(wanted)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), k
        if wanted.dtype.kind in "biu":
            np.testing.assert_array_equal(got, wanted, err_msg=str(k))
        else:
            tolerance = 16 * unit(str(wanted.dtype))
            np.testing.assert_allclose(
                got.astype(np.float64), wanted.astype(np.float64), rtol=tolerance, atol=tolerance, err_msg=str(k)
            )


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d != "bool"])
def test_integers_wrap_at_their_ends(dtype: str) -> None:
    limits = np.iinfo(dtype)
    x = np.array([[limits.min, limits.max, 0], [1, limits.max - 1, limits.min]], dtype)
    for function in (lambda x: x + 1, lambda x: x * 3, lambda x: -x, lambda x: np.abs(x), lambda x: x - x[..., :] * 2):
        with np.errstate(all="ignore"):
            expected = function(x)
        for engine in (NUMPY, HOST):
            with engine.active():
                assert_equal(engine.host(cf.fuse(function)(engine.array(x))), expected)


def test_images() -> None:
    """Bytes scaled to floats, as image code does."""

    def normalise(image: Any, mean: Any) -> Any:
        x = image / 255.0
        return (x - mean) / (x.std(axis=1, keepdims=True) + 1e-6), image.astype(np.float32) / 255, image.mean(axis=0)

    image, mean = np.random.default_rng(0).integers(0, 256, (8, 12)).astype(np.uint8), np.full(12, 0.5, np.float32)
    for engine in (NUMPY, HOST):
        with engine.active():
            actual = engine.host(cf.fuse(normalise)(*engine.arrays([image, mean])))
        for got, wanted in zip(actual, normalise(image, mean), strict=True):
            assert got.dtype == wanted.dtype
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-7)


# The array API standard ---------------------------------------------------------------------------------------------


def test_scipys_functions_work_on_traced_arrays() -> None:
    special = pytest.importorskip("scipy.special")
    x = np.abs(values("float64")) + 0.1

    def function(x: Any) -> Any:
        return special.xlogy(x, x + 1), special.entr(x), special.rel_entr(x, x + 1), special.expit(x), special.logit(x)

    for got, wanted in zip(cf.fuse(function)(x), function(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    for value in (0.0, -1.0, NAN, INF):
        y = np.array([[value, 0.5]])
        for name in ("entr", "xlogy"):
            arguments = [y] if name == "entr" else [y, y]
            got = cf.fuse(lambda *a, name=name: getattr(special, name)(*a))(*arguments)
            np.testing.assert_array_equal(got, getattr(special, name)(*arguments))


def test_scipys_softmax_works_on_traced_arrays() -> None:
    special = pytest.importorskip("scipy.special")
    x = values("float64")
    fused = cf.fuse(lambda x: special.softmax(x, axis=1))
    np.testing.assert_allclose(fused(x), special.softmax(x, axis=1), rtol=1e-13)
    assert fused.plan(x).launches == 1


def test_conversions_are_numpys_own_outside_of_traces() -> None:
    before = np.asarray, np.array
    cf.fuse(lambda x: np.asarray(x) + 1)(np.ones(3))
    with pytest.raises(ZeroDivisionError):
        cf.fuse(lambda x: x / (1 // 0))(np.ones(3))
    assert (np.asarray, np.array) == before


@pytest.mark.parametrize("name", signatures.IN_C)
def test_signatures_of_functions_in_c_are_numpys(name: str) -> None:
    def parameters(function: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    try:
        own = parameters(getattr(np, name))
    except ValueError:
        pytest.skip("NumPy tells it from 2.4 on")
    assert parameters(signatures.IN_C[name]) == own


def _masked_changes(x: Any, w: Any) -> None:
    np.putmask(x, x > 0, 7.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: np.dot(x, w.T),
        lambda x, w: np.dot(x, w.T, np.empty((4, 5))),
        lambda x, w: np.concatenate((x, w), 0, np.empty((9, 3))),
        lambda x, w: np.concatenate((x, w), dtype=np.float32),
        lambda x, w: np.where(x > 0, x, 1.0) + np.vdot(w, w),
        _masked_changes,
    ],
)
def test_functions_that_tell_no_signature(
    function: Callable[..., Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in C, before NumPy 2.4."""

    def signature(of: Any) -> inspect.Signature:
        if not hasattr(of, "__code__") and not hasattr(getattr(of, "__wrapped__", of), "__code__"):
            raise ValueError(f"no signature found for builtin {of!r}")
        return inspect.signature(of)

    monkeypatch.setattr(signatures, "inspect", SimpleNamespace(signature=signature, Parameter=inspect.Parameter))
    signatures.names_of_parameters.cache_clear()
    x, w = normal(rng, (4, 3), "float64"), normal(rng, (5, 3), "float64")
    ours, theirs = x.copy(), x.copy()
    found, expected = cf.fuse(function)(ours, w), function(theirs, w)
    signatures.names_of_parameters.cache_clear()
    np.testing.assert_array_equal(ours, theirs)
    if expected is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_namespace_of_other_versions() -> None:
    with pytest.raises(ValueError, match="api_version"):
        cf.fuse(lambda x: x.__array_namespace__(api_version="2099.12").exp(x))(np.ones(3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (np.median(x + 1, axis=0, overwrite_input=True), (x + 1) * 2),
        lambda x: ((x + 1).sum(axis=1), np.nanmedian(x + 1, 0, None, True), np.sort(x + 1, axis=1)),
        lambda x: (np.quantile(x + 1, 0.3, 0, None, True), np.quantile(x + 1, 0.3, axis=1)),
        lambda x: (np.nanpercentile(x + 1, [30, 60], axis=0, overwrite_input=True), x + 1),
    ],
)
def test_operands_of_several_steps_are_not_overwritten(function: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((7, 6))
    with force_plans():
        results = cf.fuse(function)(x)
    for got, wanted in zip(results, function(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-13)
    before = x.copy()
    with force_plans():
        np.testing.assert_allclose(cf.fuse(lambda x: np.median(x, 1, None, True))(x), np.median(before, axis=1))
    np.testing.assert_array_equal(x, before)


# Anywhere in a plan -------------------------------------------------------------------------------------------------

PIECES: list[Function] = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5 - b.mean(axis=1, keepdims=True),
    lambda a, b: np.sort(a, axis=1),
    lambda a, b: np.cumsum(b, axis=0) / 4,
    lambda a, b: np.where(a > b, a, np.flip(b, axis=1)),
    lambda a, b: (a @ b.T) / 8,
    lambda a, b: a.T + 0,
    lambda a, b: np.tanh(a) + b.max(axis=0),
    lambda a, b: np.concatenate([a[:, None].sum(axis=1), b]).reshape(2, -1)[None].sum(axis=1).reshape(a.shape),
    lambda a, b: np.broadcast_to(np.median(a, axis=0), a.shape),
    lambda a, b: np.roll(a.T, 1, axis=0).T * np.argmax(b, axis=1)[:, None],
    lambda a, b: a - np.logaddexp.reduce(b, axis=1, keepdims=True),
    lambda a, b: np.linalg.qr(a + 3 * np.diag(np.ones_like(a.sum(axis=0))))[0] * b,
    lambda a, b: np.outer(a.sum(axis=1), np.sort(b.ravel()).reshape(b.shape).sum(axis=0)) / 9,
    lambda a, b: (a % 1.5) + (b // 2.0),
]


def random_program(seed: int) -> Function:
    """A chain of pieces on square matrices, each on two earlier values."""
    rng = np.random.default_rng(seed)
    choices = [(PIECES[rng.integers(len(PIECES))], *rng.integers(0, 99, 2)) for _ in range(rng.integers(2, 8))]

    def program(x: Any, y: Any) -> Any:
        made = [x, y]
        for piece, i, j in choices:
            made.append(piece(made[-1] if i % 3 else made[i % len(made)], made[j % len(made)]))
        return made[-1], made[-2].sum(axis=0)

    return program


def agree(seed: int, engine: Engine) -> None:
    program = random_program(seed)
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 5, 5))
    with np.errstate(all="ignore"):
        expected = program(x, y)
        # Steps (floor, argmax, a sign of a factor) may fall either way within a rounding: such programs prove nothing.
        near = program(x * (1 + 1e-13), y * (1 - 1e-13))
    if any(not np.allclose(a, b, rtol=1e-7, atol=1e-7) for a, b in zip(expected, near, strict=True)):
        return
    fused = cf.fuse(program)
    with engine.active():
        actual = engine.host(fused(*engine.arrays([x, y])))
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6, err_msg=f"program {seed}")


@pytest.mark.rotates
@pytest.mark.parametrize("block", range(10))
def test_random_programs_with_library_steps(block: int) -> None:
    for seed in range(30 * block, 30 * (block + 1)):
        agree(seed, NUMPY)


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(8))
def test_random_programs_with_library_steps_in_kernels(seed: int) -> None:
    agree(seed, HOST)


def test_sorting_an_argument_in_place_changes_it() -> None:
    def function(x: Any) -> Any:
        x.sort(axis=1)
        return x.sum(axis=0)

    for engine in (NUMPY, HOST):
        plain_x = values("float64")
        x = engine.array(plain_x)
        expected = function(plain_x)
        with engine.active():
            result = engine.host(cf.fuse(function)(x))
        np.testing.assert_allclose(result, expected)
        assert_equal(engine.host(x), plain_x)


_EMPTY, _INTEGERS = np.zeros((2, 0, 3), "float32"), np.arange(6, dtype="int32").reshape(2, 3)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: np.add.reduce(x, where=x > 1), _INTEGERS),
        (lambda x: np.add.reduce(x, 1, None, None, True, 5.0, x > 1), _INTEGERS * 1.5),
        (lambda x: np.multiply.reduce(x, where=x > 1, axis=1), _INTEGERS),
        (lambda x: np.maximum.reduce(x, axis=None, where=x < 1, initial=-5), _INTEGERS),
        (lambda x: np.logical_and.reduce(x, where=x > 1), _INTEGERS),
        (lambda x: np.sum(x, initial=2.5), _INTEGERS),
        (lambda x: np.max(x, initial=9.5), _INTEGERS),
        (lambda x: np.max(x, axis=1, initial=0), _EMPTY),
        (lambda x: np.min(x, axis=(0, 1), initial=7, keepdims=True), _EMPTY.astype("int16")),
        (lambda x: np.max(x, initial=-np.inf), _EMPTY),
        (lambda x: np.max(x, axis=1, initial=3, where=x > 0), _EMPTY),
    ],
)
def test_initial_and_where(function: Any, x: Any) -> None:
    """Initial values are converted to the dtype of the result; reductions of nothing have them."""
    expected = function(x)
    with force_plans():
        found = cf.fuse(function)(x)
    assert (type(found), found.dtype, found.shape) == (type(expected), expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


def test_an_initial_value_out_of_range() -> None:
    with pytest.raises(OverflowError, match="1000 out of bounds for int8"):
        cf.fuse(lambda x: np.max(x, initial=1000))(np.zeros(2, "int8"))


@pytest.mark.parametrize(("shape", "ord"), [((0, 3), np.inf), ((3, 0), 1), ((0,), np.inf)])
def test_norms_of_nothing(shape: tuple[int, ...], ord: float) -> None:
    """NumPy 2.4 has 0; there is no smallest absolute value."""
    with force_plans():
        found = cf.fuse(lambda x: np.linalg.norm(x, ord))(np.zeros(shape))
        with pytest.raises(ValueError, match="zero-size"):
            cf.fuse(lambda x: np.linalg.norm(x, -ord))(np.zeros(shape))
    assert type(found) is np.float64
    assert found == 0
