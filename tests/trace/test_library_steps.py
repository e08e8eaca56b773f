"""NumPy's functions as library steps: the values, shapes and dtypes of plain NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy_functions import Function, plain, values
from support import HOST, INF, NAN, NUMPY, Engine, assert_equal, unit

import cupyfuse as cf

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
    "ufuncs": lambda x: (np.deg2rad(x), np.hypot(x, 2), np.fmax(x, x + 1), np.cbrt(x), np.copysign(1.0, x)),
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
    with pytest.raises(cf.TraceError, match=r"np\.sort: it runs through .* strict=True .*\n  at .*test_library_steps"):
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


def test_results_that_nothing_reads_may_have_other_shapes(engine: Engine) -> None:
    """The residuals of a matrix of full rank have another shape than those of one that is not."""
    x = np.arange(15.0).reshape(5, 3)
    x[:, 1] = x[:, 0]
    function = lambda x: np.linalg.lstsq(x, x[:, 2], rcond=None)  # noqa: E731
    fused = cf.fuse(lambda x: function(x)[0])
    for a in (x, np.vander(x[:, 0], 3), x):
        np.testing.assert_allclose(engine.host(fused(engine.array(a))), function(a)[0], atol=1e-12)
    with pytest.raises(cf.EngineError, match=r"np\.linalg\.lstsq: results of shapes"):
        cf.fuse(lambda x: function(x)[:2])(engine.array(x))


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


def assigned(x: Any) -> Any:
    x[...] = x[0]
    return x


def copied(x: Any) -> Any:
    np.copyto(x, x[:, :1])
    return x


REPEATED = {
    "all": lambda x: (np.broadcast_to(x[0], x.shape), x[0] * 1),
    "columns": lambda x: np.broadcast_to(x[:, :1], x.shape).T.copy(),
    "one": lambda x: (np.full((2, 3), x[0, 0]), np.full_like(x, x.sum()), np.broadcast_to(x[1, 1], ())),
    "dimensions": lambda x: (np.broadcast_to(x[0], (2, *x.shape)) * 2, np.broadcast_to(x, (2, *x.shape))[1]),
    "grid": lambda x: np.meshgrid(x[0], x[:, 0]),
    "sides": lambda x: (np.concatenate([np.broadcast_to(x[0], x.shape), x]), np.stack([np.full(4, x[0, 0]), x[1]])),
    "read": lambda x: (np.sort(np.broadcast_to(x[0], x.shape), 0), np.where(x[:, :1] == x, x[0], x[1])),
    "part": lambda x: np.broadcast_to(x[1], x.shape)[::2, ::-1].copy(),
    "assigned": assigned,
    "copied": copied,
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128", "uint64"])
@pytest.mark.parametrize("name", REPEATED)
def test_values_that_kernels_cannot_read_are_repeated(name: str, dtype: str, engine: Engine) -> None:
    x = (np.arange(12).reshape(3, 4) * (2 + 1j if dtype.startswith("c") else 2**60)).astype(dtype)
    given = engine.array(x.copy())
    with engine.active():
        actual = engine.host(cf.fuse(REPEATED[name])(given))
    expected = REPEATED[name](plain := x.copy())
    several = isinstance(expected, (tuple, list))
    for got, wanted in zip(actual, expected, strict=True) if several else [(actual, expected)]:
        assert (np.shape(got), got.dtype) == (np.shape(wanted), wanted.dtype)
        np.testing.assert_array_equal(got, wanted)
    np.testing.assert_array_equal(engine.host(given), plain)


def test_powers_of_complex_numbers() -> None:
    z, y = np.array([1j, 2, 3 + 1j]), np.array([1.0, 2.0, 0.5])

    def in_place(z: Any, y: Any) -> Any:
        z **= 2
        z **= y
        return z

    powers = (lambda z, y: z**y, lambda z, y: np.exp(1j * y) ** np.arange(3), lambda z, y: z**z, lambda z, y: z**True)
    for function in (*powers, lambda z, y: (z**2, z**0.5, z**-1, z ** np.int64(2), 2**z), in_place):
        for got, wanted in zip(cf.fuse(function)(z.copy(), y), function(z.copy(), y), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-15)


def test_copies_from_arrays_with_leading_ones() -> None:
    for shape, source in (((4,), (1, 4)), ((), (1,)), ((2, 4), (1, 1, 1, 4)), ((3, 4), (1, 3, 1))):
        for where in (True, np.True_):

            def function(x: Any, y: Any, where: Any = where) -> Any:
                np.copyto(x, y, where=where)
                return x

            x, y = np.zeros(shape), 1 + np.arange(float(np.prod(source))).reshape(source)
            assert_equal(cf.fuse(function)(x.copy(), y), function(x, y))
    with pytest.raises(ValueError, match="cannot be broadcast"):
        cf.fuse(lambda x, y: np.copyto(x, y))(np.zeros(4), np.ones((2, 4)))


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
