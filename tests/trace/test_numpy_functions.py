"""NumPy's functions in fused functions, native: the values, shapes and dtypes of plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy_functions import DTYPES, Function, compare, plain, values
from support import HOST, INF, NUMPY, Engine

import cupyfuse as cf
from cupyfuse.settings import force_plans


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
    "select": (lambda x: np.select([x > 1, x > 0], [x * 3, x + 2], np.pi), 4),
    "select_rows": (lambda x: np.select((x[0] > 0, np.arange(x.shape[1]) % 2 == 0), [x, 2], x[:, :1]).sum(axis=1), 64),
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


AVERAGES = [((1, 2), (3, 5)), ((2, -2), (5, 3)), ((2, 0), (5, 4)), ((2, 0, 1), (5, 4, 3)), ((-1,), (5,)), (1, (3,))]


@pytest.mark.parametrize(("axis", "shape"), AVERAGES)
def test_averages_along_several_axes(axis: Any, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x, w = rng.random((4, 3, 5)), rng.random(shape)
    found = cf.fuse(lambda x, w: np.average(x, axis, w, returned=True))(x, w)
    # Means of at most 60 numbers between 0 and 1.
    for ours, theirs in zip(found, np.average(x, axis, w, returned=True), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, strict=True)


def test_weights_of_other_shapes_raise_as_in_numpy() -> None:
    x = np.ones((4, 3, 5))
    for axis, shape, error in ((None, (3, 5), TypeError), ((1, 2), (5, 3), ValueError), (0, (4, 1), ValueError)):
        for function in (average := lambda x, w, axis=axis: np.average(x, axis, w), cf.fuse(average)):
            with pytest.raises(error):
                function(x, np.ones(shape))


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


SELECTED: dict[str, Callable[[Any], Any]] = {
    "default": lambda x: np.select([x > 1, x > 0], [x, x * 2]),
    "numbers": lambda x: (np.select([x > 0, x < 0], [1, 2]), np.select([x > 0, x < 0], [1, 2.5], -1)),
    "flags": lambda x: (np.select([x > 0], [x > 1]), np.select([x > 0], [x > 1], False)),
    "scalars": lambda x: (np.select([x.sum() > 0], [x.sum()], 3), np.select([x > 0], [x.max()], x.min())),
    "weak": lambda x: np.select([x > 0, x > 2], [x, int(x[0, 0])], float(x[0, 1])),
    "strong": lambda x: np.select([x > 0], [np.float32(3)], np.int8(1)),
    "small": lambda x: np.select([x > 0, x > 1], [x.astype("int8"), x.astype("float16")], 300),
    "given": lambda x: np.select([[True, False, True, True], x[1] > 0], [[1, 2, 3, 4], x], [5, 6, 7, 8]),
    "complex": lambda x: np.select([x > 0], [x * 1j], 0),
    "arrays": lambda x: np.select(x > 0, x, np.inf),
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int32"])
@pytest.mark.parametrize("name", SELECTED)
def test_select(name: str, dtype: str, engine: Engine) -> None:
    x = np.linspace(-2, 3, 12).reshape(3, 4).astype(dtype)
    expected, actual = SELECTED[name](x), cf.fuse(SELECTED[name])(*engine.arrays([x]))
    many = isinstance(expected, tuple)
    for got, wanted in zip(actual if many else [actual], expected if many else [expected], strict=True):
        got = engine.host(got)
        assert (np.shape(got), got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(got, wanted, rtol=1e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("dtype", [int, "uint8", "float32", float, None])
def test_extremes_in_another_dtype(dtype: Any) -> None:
    x = np.array([[1.5, -2, 3], [4, 5, 6.5]])
    functions: tuple[Any, ...] = (
        lambda x: (np.maximum.reduce(x, 0, dtype), np.maximum.reduce(x, axis=1, dtype=dtype)),
        lambda x: (np.minimum.reduce(x, 0, dtype), np.minimum.reduce(x, axis=1, dtype=dtype)),
    )
    for function in functions:
        for actual, expected in zip(cf.fuse(function)(x), function(x), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)


def test_selects_are_fused_and_checked() -> None:
    x = np.arange(6.0).reshape(2, 3)
    plan = cf.fuse(lambda x: np.select([x > 1, x > 0], [np.exp(x), x], 0).sum(axis=1)).plan(x)
    assert [step.kind for step in plan.steps] == ["RowProgram"]
    for wrong, error in (
        (lambda x: np.select([x > 0], [x, x]), "same length"),
        (lambda x: np.select([], [], x), "empty condition list"),
        (lambda x: np.select([x], [x]), "invalid entry 0 in condlist"),
        (lambda x: np.select([x > 0], [x[:, :2]]), "broadcast"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            cf.fuse(wrong)(x)
