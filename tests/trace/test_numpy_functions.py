"""NumPy's functions in fused functions: the values, shapes and dtypes of plain NumPy, native or as library steps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import HOST, INF, NAN, NUMPY, Engine, assert_equal, dtype_of, normal, unit

import cupyfuse as cf
from cupyfuse.settings import force_plans
from cupyfuse.trace.numpy import dispatch, signatures

Function = Callable[..., Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


def plain(function: Function, *arguments: Any) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def compare(function: Function, arguments: list[Any], engine: Engine, ulps: float, dtype: str = "") -> cf.Plan:
    """The fused function gives what the plain one gives: bit for bit, or within so many ulps of float64's results."""
    fused = cf.fuse(function)
    with engine.active(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = engine.host(fused(*engine.arrays(arguments)))
    expected = plain(function, *arguments)
    wide = plain(function, *(a.astype(np.float64) if a.dtype.name in DTYPES else a for a in arguments))
    several = isinstance(expected, (tuple, list))
    triples = zip(actual, expected, wide, strict=True) if several else [(actual, expected, wide)]
    for got, wanted, exact in triples:
        got, wanted, exact = (np.asarray(v) for v in (got, wanted, exact))
        if dtype == "bfloat16" and wanted.dtype.kind == "f":
            wanted = wanted.astype(got.dtype)  # ml_dtypes widens where NumPy calls astype(float)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        if not ulps or wanted.dtype.kind in "biu":
            assert_equal(got, wanted)
            continue
        value, reference = got.astype(np.float64), exact.astype(np.float64)
        finite = np.isfinite(reference)
        largest = float(ml_dtypes.finfo(wanted.dtype).max)
        fits = finite & (np.abs(reference) < largest / 4)
        np.testing.assert_array_equal(np.isnan(value), np.isnan(reference))
        np.testing.assert_array_equal(value[~finite], reference[~finite])
        size = np.abs(reference[fits]) + 1
        assert np.all(np.abs(value[fits] - reference[fits]) <= ulps * 2 * unit(str(wanted.dtype)) * size)
    return fused.plan(*arguments)


def values(dtype: str, shape: tuple[int, ...] = (6, 9), specials: bool = False, seed: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -5
        return rng.integers(low, 6, shape).astype(dtype)
    x = np.round(rng.standard_normal(shape) * 2, 2)
    if specials:
        hit = rng.random(shape) < 0.2
        x = np.where(hit, rng.choice(np.array([INF, -INF, NAN, 0.0, -0.0]), shape), x)
    return x.astype(dtype_of(dtype))


def test_numbers_of_elements_beyond_16_bits(engine: Engine) -> None:
    """Sums over numbers of elements that float16 rounds, or has not: 5001 and 65600."""
    for n in (5001, 65600):
        x = np.ones((2, n), np.float16)
        x[:, ::2], x[1, :3] = 3, np.nan
        mask = np.arange(n) % 1000 != 1

        def statistics(x: Any, mask: Any) -> Any:
            filled = np.where(np.isnan(x), 0, x)
            return (
                *(np.mean(filled, axis=1, where=mask), np.mean(filled, where=mask, dtype=np.float32)),
                *(np.nanmean(x, axis=1), np.nanvar(x, axis=1), np.nanvar(x, ddof=1)),
            )

        with force_plans():
            results = cf.fuse(statistics)(engine.array(x), engine.array(mask))
        for k, exact in enumerate(statistics(x.astype(np.float64), mask)):
            result = engine.host(results[k])
            assert result.dtype == (np.float32 if k == 1 else np.float16)
            np.testing.assert_allclose(result, exact, rtol=2**-11)


def test_degrees_of_freedom_of_any_number() -> None:
    x, empty = np.ones((3, 5), np.float32) * np.arange(5, dtype=np.float32), np.ones((2, 0), np.float32)
    with force_plans():
        for ddof in (1, 1.0, np.int64(1), np.float64(1)):
            result = cf.fuse(lambda x, ddof=ddof: x.var(axis=1, ddof=ddof))(x)
            assert result.dtype == np.float32
            np.testing.assert_allclose(result, 2.5)
        np.testing.assert_array_equal(cf.fuse(lambda x: x.var(1, ddof=-1))(empty), [0, 0])
        np.testing.assert_array_equal(cf.fuse(lambda x: x.var(1))(empty), [np.nan, np.nan])
    with pytest.raises(ValueError, match="ddof=1 and correction=1"):
        cf.fuse(lambda x: np.var(x, ddof=1, correction=1))(x)
    with pytest.raises(TypeError, match="axis True is not an integer"):
        cf.fuse(lambda x: x.sum(axis=True))(x)


def test_weights_of_an_infinite_average(engine: Engine) -> None:
    mean, total = cf.fuse(lambda x: np.average(x, axis=1, returned=True))(engine.array(np.array([[1.0, INF], [1, 3]])))
    np.testing.assert_array_equal(engine.host(mean), [INF, 2.0])
    np.testing.assert_array_equal(engine.host(total), [2.0, 2.0])


# Native forms: name, function, ulps of the result's dtype.
NATIVE: dict[str, tuple[Function, float]] = {
    "argmax": (lambda x: np.argmax(x, axis=1), 0),
    "argmax_columns": (lambda x: np.argmax(x, axis=0), 0),
    "argmax_all": (lambda x: np.argmax(x), 0),
    "argmax_kept": (lambda x: x.argmax(axis=-1, keepdims=True), 0),
    "argmin": (lambda x: x.argmin(axis=1), 0),
    "argmin_all_kept": (lambda x: np.argmin(x, keepdims=True), 0),
    "any": (lambda x: (np.any(x > 1, axis=1), (x > 1).any(), np.any(x, axis=0, keepdims=True)), 0),
    "all": (lambda x: (np.all(x > -3, axis=1), (x > -3).all(), np.all(x, axis=0)), 0),
    "any_where": (lambda x: np.any(x > 0, axis=1, where=x < 1), 0),
    "all_where": (lambda x: np.all(x > 0, axis=1, where=x < 1), 0),
    "count_nonzero": (lambda x: (np.count_nonzero(x, axis=1), np.count_nonzero(x), np.count_nonzero(x, 0)), 0),
    "ptp": (lambda x: (np.ptp(x, axis=1), np.ptp(x), np.ptp(x, axis=0, keepdims=True)), 2),
    "sum_where": (lambda x: np.sum(x, axis=1, where=x > 0), 16),
    "diag": (lambda x: np.diag(x.sum(axis=0)), 16),
    "sum_initial": (lambda x: x.sum(axis=1, initial=2), 16),
    "max_where": (lambda x: np.max(x, axis=1, where=x < 1, initial=-9), 0),
    "min_initial": (lambda x: np.min(x, axis=0, initial=-1), 0),
    "prod_where": (lambda x: np.prod(x, axis=1, where=(x > 0) & (x < 2)), 32),
    "mean_where": (lambda x: np.mean(x, axis=1, where=x < 3), 32),
    "var_correction": (lambda x: np.var(x, axis=1, correction=1), 64),
    "average": (lambda x: (np.average(x, axis=1), np.average(x)), 32),
    "average_weights": (lambda x: np.average(x, axis=1, weights=np.abs(x) + 1), 64),
    "average_vector": (lambda x: np.average(x, axis=0, weights=np.abs(x[:, None].sum(axis=-1).ravel()) + 1), 64),
    "average_returned": (lambda x: np.average(x, axis=1, weights=x * x + 1, returned=True), 64),
    "nansum": (lambda x: (np.nansum(x, axis=1), np.nansum(x)), 64),
    "nanprod": (lambda x: np.nanprod(x, axis=1), 64),
    "nanmax": (lambda x: (np.nanmax(x, axis=1), np.nanmax(x), np.nanmax(x, axis=0, keepdims=True)), 0),
    "nanmin": (lambda x: (np.nanmin(x, axis=1), np.nanmin(x)), 0),
    "nanmean": (lambda x: (np.nanmean(x, axis=1), np.nanmean(x)), 32),
    "nanvar": (lambda x: (np.nanvar(x, axis=1), np.nanvar(x, axis=0, ddof=1)), 128),
    "nanstd": (lambda x: np.nanstd(x, axis=1), 128),
    "logaddexp.reduce": (lambda x: (np.logaddexp.reduce(x, axis=1), np.logaddexp.reduce(x)), 32),
    "logical.reduce": (lambda x: (np.logical_and.reduce(x > 0, axis=1), np.logical_or.reduce(x > 0)), 0),
    "norm": (lambda x: (np.linalg.norm(x, axis=1), np.linalg.norm(x), np.linalg.norm(x, axis=(0, 1))), 32),
    "norm_of_a_float_axis": (lambda x: (np.linalg.norm(x, axis=1.0), np.linalg.norm(x, np.inf, axis=-2.0)), 32),
    "norm_orders": (lambda x: tuple(np.linalg.norm(x, o, axis=1) for o in (0, 1, 2, np.inf, -np.inf)), 32),
    "norm_3": (lambda x: np.linalg.norm(x, 3, axis=1, keepdims=True), 128),
    "norm_matrix": (lambda x: tuple(np.linalg.norm(x, o) for o in (1, -1, np.inf, -np.inf, "fro")), 64),
    "vector_norm": (lambda x: (np.linalg.vector_norm(x, axis=1), np.linalg.vector_norm(x)), 64),
    "remainder": (lambda x: (x % 1.5, x % -0.75, 2.5 % x, np.mod(x, x.T.T + 1), np.remainder(x, 2)), 4),
    "fmod": (lambda x: (np.fmod(x, 1.5), np.fmod(2.5, x)), 4),
    "floor_divide": (lambda x: (x // 1.5, x // -0.75, 7.25 // x, np.floor_divide(x, 2)), 0),
    "divmod": (lambda x: divmod(x, 0.75), 4),
    "xor": (lambda x: ((x > 0) ^ (x > 1), np.logical_xor(x, x > 1), True ^ (x > 0)), 0),
    "round": (lambda x: (np.round(x), x.round(), np.around(x), np.fix(x), np.rint(x), np.trunc(x)), 0),
    "round_decimals": (lambda x: (np.round(x * 1.37, 1), np.round(x * 137, -1)), 8),
    "floor": (lambda x: (np.floor(x), np.ceil(x)), 0),
    "sign": (lambda x: np.sign(x), 1),
    "isclose": (lambda x: (np.isclose(x, x + 1e-9), np.isclose(x, 1, atol=0.5), np.isclose(x, x, equal_nan=True)), 0),
    "isclose_bools": (lambda x: (np.isclose(x > 0, True), np.isclose(x > 0, False), np.isclose(True, x > 0)), 0),
    "allclose": (lambda x: np.allclose(x, x), 0),
    "isposinf": (lambda x: (np.isposinf(x), np.isneginf(x)), 0),
    "fmax": (lambda x: (np.fmax(x, 0.5), np.fmin(x, -0.5), np.fmax(x, -x)), 1),
    "heaviside": (lambda x: np.heaviside(x, 0.5), 0),
    "radians": (lambda x: (np.radians(x), np.degrees(x), np.deg2rad(x), np.rad2deg(x)), 8),
    "outer": (lambda x: (np.add.outer(x.ravel(), np.ravel(x)), np.outer(x, x)), 8),
    "inner": (lambda x: (np.inner(x, x), np.inner(x[None].ravel(), x.ravel())), 256),
    "vdot": (lambda x: np.vdot(x, x), 256),
    "tensordot": (lambda x: (np.tensordot(x, x.T, 1), np.tensordot(x, x, ([0], [0])), np.tensordot(x, x, 2)), 256),
    "multi_dot": (lambda x: np.linalg.multi_dot([x, x.T, x]), 4096),
    "einsum_product": (lambda x: np.einsum("ij,kj->ik", x, x), 256),
    "einsum_turned": (lambda x: np.einsum("ij,ik->kj", x, x), 256),
    "einsum_rows": (lambda x: (np.einsum("ij,ij->i", x, x), np.einsum("ij->j", x), np.einsum("ij->", x)), 256),
    "einsum_implicit": (lambda x: (np.einsum("ij,jk", x, x.T), np.einsum("ji", x)), 256),
    "einsum_outer": (lambda x: np.einsum("ij,kj->ik", x, x + 1), 256),
    "diff": (lambda x: (np.diff(x), np.diff(x, axis=0), np.diff(x, n=0), np.diff(x, 2, 0), np.diff(x > 0)), 4),
    "split": (lambda x: np.split(x, 3, axis=1), 0),
    "array_split": (lambda x: (*np.array_split(x, [2, 5], axis=0), *np.hsplit(x, 3), *np.vsplit(x, 2)), 0),
    "unstack": (lambda x: (*np.unstack(x, axis=1), *np.broadcast_arrays(x, x[:1])), 0),
    "flip": (lambda x: (np.flip(x, axis=1), np.fliplr(x), np.flipud(x), np.flip(x)), 0),
    "rot90": (lambda x: tuple(np.rot90(x, k) for k in range(4)), 0),
    "asarray": (lambda x: np.asarray(x) + np.array(x) + np.ascontiguousarray(x) + np.asanyarray(x), 8),
    "atleast": (lambda x: (np.atleast_1d(x), np.atleast_2d(x.sum(axis=0)), np.atleast_2d(x.sum())), 16),
    "like": (lambda x: (np.zeros_like(x), np.ones_like(x), np.full_like(x, 3), np.isnan(np.empty_like(x)) & False), 0),
    "meshgrid": (lambda x: np.meshgrid(x.sum(axis=0), x.sum(axis=1)), 32),
    "dtype": (lambda x: np.add(x, x, dtype=np.float64), 16),
    "where": (lambda x: np.exp(x, out=x * 0, where=x < 1), 16),
    "real": (lambda x: (x.real, np.real(x), x.imag, np.conj(x), x.conj()), 0),
    "transposes": (lambda x: (x.mT + 0, np.matrix_transpose(x) * 2), 2),
    "namespace": (lambda x: x.__array_namespace__(api_version="2023.12").exp(x), 8),
    "vecdot": (lambda x: np.vecdot(x, x), 64),
}  # fmt: skip


@pytest.mark.rotates
@pytest.mark.parametrize("special", [False, True], ids=["finite", "special"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NATIVE)
def test_native_functions(name: str, dtype: str, special: bool) -> None:
    function, ulps = NATIVE[name]
    x = values(dtype, specials=special)
    try:
        plain(function, x)
    except TypeError:
        return  # NumPy itself has no such function of this dtype
    plan = compare(function, [x], NUMPY, ulps, dtype)
    assert not any(step.kind == "Library" for step in plan.steps)


@pytest.mark.rotates
@pytest.mark.parametrize("name", NATIVE)
def test_native_functions_in_kernels(name: str) -> None:
    function, ulps = NATIVE[name]
    for special in (False, True):
        compare(function, [values("float32", specials=special)], HOST, ulps)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64", "complex128", "bool", "float64"])
def test_differences(dtype: str, rng: np.random.Generator) -> None:
    """With values at the ends; of unsigned integers they wrap around, of masks they are masks."""
    x = rng.integers(0, 200, (4, 6)).astype(dtype)
    for options in ({}, {"n": 3}, {"prepend": x[:, :2]}, {"append": 1, "axis": 0}, {"prepend": 0, "append": 1, "n": 2}):
        got, expected = cf.fuse(lambda x, options=options: np.diff(x, **options))(x), np.diff(x, **options)
        assert got.dtype == expected.dtype and np.array_equal(got, expected)


@pytest.mark.parametrize("options", [{"n": -1}, {"axis": 2}])
def test_differences_that_do_not_exist(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="diff"):
        cf.fuse(lambda x: np.diff(x, **options))(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="diff"):
        cf.fuse(lambda x: np.diff(x.sum()))(np.zeros((2, 3)))


# Library steps ------------------------------------------------------------------------------------------------------

SQUARE = (6, 6)
LIBRARY: dict[str, Function] = {
    "sort": lambda x: (np.sort(x, axis=1), np.sort(x, axis=0), np.sort(x, axis=None)),
    "argsort": lambda x: (np.argsort(x, axis=1, kind="stable"), x.argsort(axis=0, kind="stable")),
    "partition": lambda x: np.partition(x, 3, axis=1)[:, None].sum(axis=-1),
    "top_k": lambda x: np.sort(-x, axis=1) * -1,
    "median": lambda x: (np.median(x, axis=1), np.median(x), np.median(x, axis=0, keepdims=True)),
    "percentile": lambda x: (np.percentile(x, 30, axis=1), np.quantile(x, [0.25, 0.75], axis=1)),
    "nanmedian": lambda x: (np.nanmedian(x, axis=1), np.nanpercentile(x, 20, axis=1)),
    "cumsum": lambda x: (np.cumsum(x, axis=1), x.cumsum(axis=0), np.cumprod(x, axis=1), np.cumsum(x)),
    "accumulate": lambda x: (np.maximum.accumulate(x, axis=1), np.add.accumulate(x)),
    "gradient": lambda x: np.gradient(x, axis=1),
    "concatenate": lambda x: (np.concatenate([x, x * 2]), np.concatenate((x, x), axis=1)),
    "stack": lambda x: (np.stack([x.sum(axis=1), x.max(axis=1)]), np.hstack([x, x]), np.vstack((x, x))),
    "column_stack": lambda x: np.column_stack([x.sum(axis=1), x]),
    "repeat": lambda x: (np.repeat(x, 2, axis=1), np.tile(x, (2, 1)), x.repeat(3)),
    "roll": lambda x: (np.roll(x, 2, axis=0), np.roll(x, 1)),
    "pad": lambda x: (np.pad(x, 1), np.pad(x, ((0, 0), (2, 1)), mode="edge"), np.pad(x, 2, constant_values=-1)),
    "triu": lambda x: (np.triu(x), np.tril(x, -1), np.diag(x), np.diagonal(x, 1), np.trace(x), x.trace()),
    "take_range": lambda x: (np.take(x, range(2, 0, -1), axis=1), x.take(range(3)), np.isin(x, range(2))),
    "take": lambda x: (np.take(x, [2, 0], axis=1), x.take(3), np.take_along_axis(x, np.argsort(x, axis=1), axis=1)),
    "searchsorted": lambda x: np.searchsorted(np.sort(x.ravel()), x.sum(axis=1)),
    "digitize": lambda x: np.digitize(x, [-1.0, 0.0, 1.0]),
    "interp": lambda x: np.interp(x.sum(axis=1), [0.0, 1.0, 2.0], [3.0, 4.0, 8.0]),
    "kron": lambda x: np.kron(x, [[1.0, 2.0]]),
    "cov": lambda x: (np.cov(x), np.corrcoef(x, rowvar=False)),
    "convolve": lambda x: np.convolve(x.sum(axis=0), x.mean(axis=1), mode="same"),
    "histogram": lambda x: np.histogram(x, bins=4, range=(-3, 3)),
    "ufuncs": lambda x: (np.arcsin(x), np.hypot(x, 2), np.arctan2(x, x + 1), np.cbrt(x), np.copysign(1.0, x)),
    "more_ufuncs": lambda x: (np.signbit(x), np.nextafter(x, x + 1), np.logaddexp2(x, 1), np.float_power(x, 2)),
    "two_results": lambda x: np.modf(x),
    "frexp": lambda x: np.frexp(x),
    "ufunc_reduce": lambda x: (np.hypot.reduce(x, axis=1), np.logaddexp2.reduce(x, axis=1)),
    "sinc": lambda x: (np.sinc(x), np.unwrap(x, axis=1)),
    "within": lambda x: (np.sort(x * 2 + 1, axis=1) - np.median(x, axis=1)[:, None]).sum(axis=0) * 0 + 1,
    "array_of_arrays": lambda x: np.array([x.sum(axis=1), x.max(axis=1)]),
    "in_place": lambda x: [y := x + 0, y.sort(axis=1), y][::2],
}  # fmt: skip
LINALG: dict[str, Function] = {
    "inv": lambda x: np.linalg.inv(x),
    "det": lambda x: (np.linalg.det(x), np.linalg.slogdet(x)[1]),
    "solve": lambda x: (np.linalg.solve(x, x.sum(axis=1)), np.linalg.solve(x, x.T)),
    "cholesky": lambda x: np.linalg.cholesky(x @ x.T + 1 * np.diag(x.sum(axis=0) * 0 + 1)),
    "svd": lambda x: np.linalg.svd(x),
    "svdvals": lambda x: (np.linalg.svd(x, compute_uv=False), np.linalg.svdvals(x)),
    "eigh": lambda x: np.linalg.eigh(x + x.T),
    "eigvalsh": lambda x: np.linalg.eigvalsh(x @ x.T),
    "qr": lambda x: np.linalg.qr(x),
    "pinv": lambda x: (np.linalg.pinv(x), np.linalg.matrix_power(x, 3), np.linalg.cond(x)),
    "rank": lambda x: (np.linalg.matrix_rank(x), np.linalg.norm(x, 2), np.linalg.norm(x, "nuc")),
    "eigvals": lambda x: np.linalg.eigvals(x + x.T * 1j).real,
    "fft": lambda x: (np.fft.fft(x), np.fft.rfft(x, axis=0), np.fft.ifft2(x)),
    "spectrum": lambda x: np.abs(np.fft.rfft(x - x.mean(axis=1, keepdims=True), axis=1)) ** 2,
    "filter": lambda x: np.fft.irfft(np.fft.rfft(x, axis=1) * np.exp(-1.0), n=6, axis=1),
    "complex": lambda x: ((x + 2j * x) * 2, np.angle(x + 1j), (x * 1j).imag, (x + 1j).conj().sum(axis=1)),
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*LIBRARY, *LINALG])
def test_library_steps(name: str, dtype: str, engine: Engine) -> None:
    """The library's own functions on the same values: bit for bit, unless kernels computed the operands."""
    function = (LIBRARY | LINALG)[name]
    for special in (False, True) if name in LIBRARY else (False,):
        x = values(dtype, SQUARE, special and name not in ("histogram", "interp"))
        fused = cf.fuse(function)
        with engine.active(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actual = engine.host(fused(engine.array(x)))
        expected = plain(function, x)
        several = isinstance(expected, (tuple, list))
        assert type(actual) is type(expected) or not several
        for got, wanted in zip(actual, expected, strict=True) if several else [(actual, expected)]:
            if got is None:
                continue
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_allclose(got, wanted, rtol=1e4 * unit(dtype), atol=1e4 * unit(dtype))
        assert any(step.kind == "Library" for step in fused.plan(x).steps)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["sort", "argsort", "concatenate", "repeat", "roll", "take"])
def test_library_steps_of_16_bits(name: str, dtype: str) -> None:
    x = values(dtype, SQUARE)
    actual, expected = cf.fuse(LIBRARY[name])(x), LIBRARY[name](x)
    for got, wanted in zip(actual, expected, strict=True):
        assert_equal(got, wanted)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
def test_what_library_steps_choose_equals_what_they_choose_from(engine: Engine, dtype: str) -> None:
    """Neither is rounded to 16 bits where the other is not."""
    x = values(dtype, SQUARE)
    with engine.active():
        for compute in (lambda x: x * 1.1, lambda x: x @ x.T, lambda x: np.exp(x) - 1):
            largest = cf.fuse(lambda x, c=compute: (c(x) >= np.sort(c(x), axis=1)[:, -2:-1]).sum(axis=1))
            below = cf.fuse(lambda x, c=compute: (c(x) > -np.partition(-c(x), 1, axis=1)[:, 1:2]).sum(axis=1))
            assert (engine.host(largest(engine.array(x))) >= 2).all()
            assert (engine.host(below(engine.array(x))) <= 1).all()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (1, 1), (1, 5), (5, 1)])
def test_library_steps_of_few_elements(shape: tuple[int, int]) -> None:
    def function(x: Any) -> Any:
        return np.sort(x, axis=1), np.cumsum(x, axis=0), np.concatenate([x, x]), np.flip(x), np.repeat(x, 2)

    x = values("float64", shape)
    for got, wanted in zip(cf.fuse(function)(x), function(x), strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("layout", ["fortran", "row_gap", "column_gap", "reversed"])
def test_library_steps_read_any_layout(layout: str) -> None:
    for engine in (NUMPY, HOST):
        x = engine.array(values("float32"), layout)
        with engine.active():
            assert_equal(engine.host(cf.fuse(lambda x: np.sort(x, axis=1))(x)), np.sort(values("float32"), axis=1))


def test_a_library_step_is_shown_in_the_plan() -> None:
    plan = cf.fuse(lambda x: np.sort(x * 2, axis=1).sum(axis=1)).plan(cf.spec((8, 16)))
    assert [step.kind for step in plan.steps] == ["RowProgram", "Library", "RowProgram"]
    assert plan.steps[1].fused == ("np.sort",) and plan.steps[1].reads == plan.steps[1].writes == 8 * 16 * 4
    assert "Library np.sort: reads 512 B, writes 512 B" in str(plan)
    assert "// Library: np.sort" in plan.source()


def test_results_of_one_call_are_one_step() -> None:
    plan = cf.fuse(lambda x: np.linalg.svd(x, full_matrices=False)).plan(np.ones((4, 3)))
    assert [step.fused for step in plan.steps] == [("np.linalg.svd",)]
    unused = cf.fuse(lambda x: np.linalg.svd(x, full_matrices=False)[1]).plan(np.ones((4, 3)))
    assert len(unused.steps[0].outputs) == 1


def test_equal_calls_are_one_step() -> None:
    plan = cf.fuse(lambda x: np.sort(x, axis=1) + np.sort(x, axis=1)).plan(np.ones((4, 3)))
    assert sum(step.kind == "Library" for step in plan.steps) == 1
    plan = cf.fuse(lambda x: np.sort(x, axis=1) + np.sort(x, axis=0)).plan(np.ones((4, 3)))
    assert sum(step.kind == "Library" for step in plan.steps) == 2
    plan = cf.fuse(lambda x: np.pad(x, 1, constant_values=0.0) + np.pad(x, 1, constant_values=-0.0)).plan(
        X := np.ones((2, 2))
    )
    assert X.shape == (2, 2) and sum(step.kind == "Library" for step in plan.steps) == 2


def test_strict_functions_refuse_library_steps() -> None:
    strict = cf.fuse(lambda x: np.sort(x, axis=1) + 1, strict=True)
    with pytest.raises(
        cf.TraceError, match=r"np\.sort: it runs through .* strict=True .*\n  at .*test_numpy_functions"
    ):
        strict(np.ones((2, 3)))
    assert_equal(cf.fuse(strict=True)(lambda x: np.argmax(x, axis=1))(np.eye(3)), np.arange(3))


def test_library_steps_of_bound_arguments_run_once() -> None:
    def whiten(x: Any, covariance: Any) -> Any:
        return x @ np.linalg.inv(covariance)

    x, covariance = values("float64", (4, 3)), np.diag([1.0, 2.0, 4.0])
    bound = cf.fuse(whiten).bind(covariance=covariance)
    np.testing.assert_allclose(bound(x), whiten(x, covariance))
    plan = bound.plan(x)
    assert plan.prepare is not None and [s.kind for s in plan.prepare.steps] == ["Library"]
    assert all(step.kind != "Library" for step in plan.steps)


def test_plans_with_library_steps_over_rows_are_not_cut_into_blocks() -> None:
    def ranked(x: Any, w: Any) -> Any:
        return np.sort(x @ w, axis=1).sum(axis=1)

    fused = cf.fuse(ranked, max_workspace=1 << 10)
    x, w = values("float64", (64, 8)), values("float64", (8, 32))
    plan = fused.plan(x, w)
    assert plan.blocks is None and "np.sort" in plan.whole
    np.testing.assert_allclose(fused(x, w), ranked(x, w))


COMPLEX = {
    **{f"nan{op}": getattr(np, f"nan{op}") for op in ("sum", "prod", "mean", "var", "std", "max", "min")},
    "nan_to_num": np.nan_to_num,
    "average": lambda x: np.average(np.where(np.isfinite(x), x, 7), axis=1, weights=[1.0, 2.0, 5.0]),
}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", COMPLEX)
def test_functions_with_forms_for_reals_keep_complex_numbers(name: str, dtype: str) -> None:
    """Their forms for floats took them for integers: NaN stayed in, and imaginary parts were dropped."""
    x = np.array([[1 + 1j, complex(NAN, 2), 3 - 1j], [2, 5j, complex(-1, INF)]], dtype)
    result, expected = cf.fuse(lambda x: COMPLEX[name](x))(x), plain(COMPLEX[name], x)
    assert result.dtype == expected.dtype
    np.testing.assert_array_max_ulp(result.real, expected.real, 4)
    np.testing.assert_array_max_ulp(result.imag, expected.imag, 4)


def test_extremes_of_complex_numbers_are_refused_as_by_numpy() -> None:
    with pytest.raises(TypeError, match="ambiguous"):
        cf.fuse(lambda x: np.isposinf(x))(np.ones(2, "complex128"))
    with pytest.raises(cf.TraceError, match="masked complex"):
        cf.fuse(lambda x: np.quantile(x[x != 1], 0.5))(np.ones(2, "complex128"))


def test_an_initial_value_is_combined_once_beside_a_mask() -> None:
    """It took the place of each element that the mask leaves out."""
    x = np.arange(1.0, 7.0).reshape(2, 3)
    for function in (np.sum, np.prod):
        fused = cf.fuse(lambda x, function=function: function(x, axis=1, initial=3, where=x > 2))
        assert_equal(fused(x), function(x, axis=1, initial=3, where=x > 2))
    highest = cf.fuse(lambda x: np.max(x, axis=0, initial=4.5, where=x > 2))
    assert_equal(highest(x), np.max(x, axis=0, initial=4.5, where=x > 2))


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_ufuncs_take_a_dtype_beside_a_mask(dtype: str) -> None:
    """The mask was ignored where a library step computes in the dtype."""
    x = np.arange(6, dtype="int32" if dtype == "int64" else dtype)
    fused = cf.fuse(lambda x, y: np.add(x, 1, dtype=dtype, out=y, where=x > 2) * 1)
    assert_equal(fused(x, np.full(6, 9, dtype)), np.where(x > 2, x + 1, 9).astype(dtype))


def test_compress_takes_short_conditions() -> None:
    x = np.arange(6.0).reshape(2, 3)
    assert_equal(cf.fuse(lambda x: np.compress([False, True], x))(x), np.compress([False, True], x))


def test_options_left_out_explicitly() -> None:
    """NumPy's own code passes `np._NoValue` and `None` on."""
    x = np.arange(6.0).reshape(2, 3)
    for function in (np.mean, np.var):
        fused = cf.fuse(lambda x, function=function: function(x, axis=0, keepdims=np._NoValue))
        assert_equal(fused(x), function(x, axis=0))
    assert_equal(cf.fuse(lambda x: np.logical_and.reduce(x > 0, 0, None))(x), np.all(x > 0, axis=0))
    assert_equal(cf.fuse(lambda x: x / np.size(x, (0, 1)))(x), x / 6)
    with pytest.raises(ValueError, match="do not match"):
        cf.fuse(lambda x: x.transpose(()))(x)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64"])
def test_clip_takes_numbers_beyond_an_integer_dtype(dtype: str) -> None:
    x = values(dtype)
    for low, high in ((-(2**70), 3), (-2, 2**70), (-300, 300), (None, 300)):
        assert_equal(cf.fuse(lambda x, low=low, high=high: np.clip(x, low, high))(x), np.clip(x, low, high))


def test_results_never_share_memory_with_arguments() -> None:
    x = np.arange(6.0).reshape(2, 3)
    for part in cf.fuse(lambda x: np.split(x, 3, axis=1))(x):
        assert not np.shares_memory(part, x)
    assert not np.shares_memory(cf.fuse(lambda z: z.real)(x.astype(complex)), x)
    z = x * 1j
    assert not np.shares_memory(cf.fuse(lambda z: z)(z), z)


def test_errors_of_the_library_at_run_time_are_its_own() -> None:
    with pytest.raises(np.linalg.LinAlgError, match="Singular"):
        cf.fuse(lambda x: np.linalg.inv(x))(np.ones((2, 2)))


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

    monkeypatch.setattr(signatures, "inspect", SimpleNamespace(signature=signature))
    dispatch._names_of_parameters.cache_clear()
    x, w = normal(rng, (4, 3), "float64"), normal(rng, (5, 3), "float64")
    ours, theirs = x.copy(), x.copy()
    found, expected = cf.fuse(function)(ours, w), function(theirs, w)
    dispatch._names_of_parameters.cache_clear()
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
