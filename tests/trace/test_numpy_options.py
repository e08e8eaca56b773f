"""Options of NumPy's functions and of array methods: the values, shapes, dtypes and types of NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from support import Engine, assert_close, normal

import cupyfuse as cf

TEXTS = (
    "x.var(), x.var(0, dtype='f4'), x.std(dtype=np.float64), s.var(dtype=np.float64), s.std(0, dtype='f8', ddof=1)",
    "np.var(k, dtype='f4'), np.var(k, dtype='f8'), np.var(x > 0, dtype='f8'), np.var(s, 1, dtype='f2')",
    "np.var(x, axis=0, where=x > 0), x.std(1, where=x > 0, ddof=1), np.var(x, 1, where=x > 0, keepdims=True)",
    "np.var(x, where=x[0] > 0), s.std(where=x > 0), np.var(k, where=k > 0), np.var(x, axis=0, where=x > 9)",
    "np.var(x, 0, mean=x.mean(0, keepdims=True)), np.std(s, mean=0.5), np.var(s, 0, mean=s.mean(0, keepdims=True))",
    "np.std(k, mean=k.mean(keepdims=True), ddof=1), np.var(x, 0, mean=x.mean(0, keepdims=True), where=x > 0)",
    "np.nanvar(n, 1, where=x > -1), np.nanstd(n, 0, correction=1), np.nanvar(n, 0, mean=x.mean(0, keepdims=True))",
    "np.nanvar(n, dtype=np.float64), np.nanmean(n, 1, where=x > -1), np.nanmean(k, where=k > 0)",
    "np.nanmax(n, initial=0.0), np.nanmin(n, 0, initial=9.0, where=x < 0.5), np.nanmax(n[:, :0], 1, initial=2)",
    "np.nanmax(n, 1, initial=np.nan), np.nanmin(k, initial=1, where=k > 0), np.nanmax(s, initial=2)",
    "np.nanvar(k, where=k > 0), np.nanstd(s, where=s > 0), np.nanvar(k, dtype='f4')",
    "np.clip(0.5, s, s + 1), np.clip(1, k.astype('i1'), 5), np.clip(True, s, None), np.clip(np.float32(1), k, None)",
    "z = np.zeros((4, 4)); x.dot(x.T, out=z); z",
    "z = x.copy(); x.clip(-1, 1, out=z); z",
    "z = x.copy(); np.clip(x, -1, 1, z); z[0] = np.sum(x, 0, None, z[1]); z",
    "z = x[0] > 0; x.all(0, out=z); z, x.any(where=x > 1), x.all(1, keepdims=True, where=x > 0)",
    "np.any(x, 0, None, True), np.mean(x, 0, None, None, True), np.round(x, 1, None)",
    "x.compress([True, False, True]), x.compress(np.array([False, True, True]), axis=1), x.compress(k > 0).sum()",
    "np.put(a=x, ind=[1], v=9); np.putmask(x, mask=x > 0, values=k[:3]); x",
    "np.put_along_axis(x, k[None, :3], 7, axis=0); np.fill_diagonal(a=x, val=x[0]); x",
    "z = x * 1; y = z.clip(-1, 1, z); y += 1; z",
    "z = np.zeros((4, 3)); np.var(x, 0, out=z[1]); z",
    "x.astype('f4', order='F'), x.astype('f8', 'C'), x.astype('f4', 'K', 'same_kind', False, True)",
    "np.zeros_like(x, shape=(2,)) + x[0, 0], np.ones_like(x, shape=3, dtype=int), np.full_like(x, x[0], shape=(2, 3))",
    "np.zeros_like(k, shape=(2, 2), dtype=np.int32) + k[0], np.full_like(x, 2, shape=())",
    "np.full(np.array([2, 3]), x[0]), np.full(np.array(3), x.sum()), np.zeros_like(x, shape=np.array([2])) + x[0, 0]",
    "x.reshape(np.array([2, 6])), x.reshape(range(3, 5)), np.reshape(x, np.array([3, -1])), x.reshape(np.array(12))",
    "np.broadcast_to(x, np.array([2, 4, 3])) + 1, np.full(range(2, 4), x[0])",
    "np.vecdot(x, x, axis=0), np.vecdot(x.T, x[:, 0], axis=-1), np.vecdot(x, x, axes=[0, 0, ()])",
    "np.matmul(x, x, axes=[(0, 1), (1, 0), (1, 0)]), np.matmul(x, x, axes=[(1, 0), (0, 1), (0, 1)], dtype='f8')",
    "np.matmul(x[None], x[:, :, None], axes=[(1, 2), (1, 0), (0, -1)]), np.matmul(k[:, None], k, axes=[(1, 0), 0, 0])",
    "np.require(x, 'f4', ['C', 'A', 'W']), np.require(x, None, 'F'), np.require([x[0, 0], 1])",
    "z = np.require(np.zeros(3)); z[:] = x[0]; z",
    "z = np.zeros(3, int); np.sum(x * 9, 0, out=z); w = np.zeros(3, bool); x.max(0, out=w); z, w",
    "z = np.zeros((4, 4), 'i2'); x.mean(1, out=z[0]); np.var(x * 9, 1, out=z[1]); np.mean(k, out=z[2, 0, ...]); z",
    "z = np.zeros(3, int); (x * 9)[0].cumsum(out=z); w = np.zeros(3, int); np.median(x * 9, 0, out=w); z, w",
    "z = np.zeros(3); np.sum(s + 1e8, axis=0, out=z); w = np.zeros(4); np.cumsum(s[:, 0] + 1e8, out=w); z, w",
    "z = np.zeros(4, int); np.add.reduce(x * 9, 1, None, z); z",
    "z = np.zeros(3); np.add.reduce(s + 1e8, out=z); np.add.accumulate(s[0] + 1e8, out=z[::-1]); z",
    "np.add(k, x[:, 0] * 9, out=k, casting='unsafe'); np.multiply(k, 1.5, k, casting='unsafe', where=k > 0); k",
    "z = np.zeros((2, 4, 3)); y = np.modf(x, out=(z[0], z[1])); y[0] + 1, np.modf(x, z[1], None)[1], z",
    "z, w = x * 0, np.ones((4, 3)); np.divmod(x, 0.3, out=(z, w), where=x > 0); z, w",
    "z = np.zeros((4, 3), int); np.divmod(x, 0.3, out=(z, x), casting='unsafe'); z, x",
    "x.sum(0, where=[1, 0, 1]), x.mean(1, where=[1, 0, 1]), np.any(x, where=1), np.add(x, 1, where=1, out=x * 0)",
    "np.add(x + 1j, 1, dtype=np.float64, casting='unsafe'), np.add(x, [1, 2, 3], dtype='f4'), np.exp(k, dtype='f4')",
    "np.apply_over_axes(np.sum, x, [0, 1]), np.apply_over_axes(np.cumsum, x, -1), np.apply_over_axes(np.max, x, (0,))",
    "np.max(x[0, 0], -1, initial=1), np.min(x[0, 0], axis=0, initial=0, where=True), np.max(k[0], 0, initial=1)",
    "np.logaddexp.reduce(k.astype('u1')), np.logaddexp.reduce(x > 0), np.logaddexp.reduce(k, dtype='f4')",
    "np.mean(k * 2**61, where=k > -1), np.mean(k, 0, 'i4', where=k > -1), np.mean(x > 0, 0, where=x < 1)",
    "np.nanmean(k * 2**61), np.mean(k, dtype='?', where=k > 0), np.mean(x + 1j, where=x > -9).real, np.conj(x > 0)",
    "np.exp(np.arange(3.0), out=x[0]); np.add(1, 2, out=x[1]); np.maximum(0, np.ones(3, 'f4'), out=x[2]); x",
    "np.log10(2.0, out=x, where=x > 0); np.deg2rad(90, out=s[0]); np.multiply(2.0, np.float32(3), out=s[1]); x, s",
    "np.dot(np.ones((4, 2)), np.ones((2, 3)), out=x); np.matmul(np.ones((4, 2)), np.ones((2, 3), 'f4'), out=x[:]); x",
    "np.sum(np.ones((4, 3)), axis=0, out=x[0]); np.clip(np.arange(3.0), 1, 2, out=x[1]); x",
    "np.max(np.ones((4, 3)), 0, out=x[2]); np.modf(2.5, out=(x[0], x[1])); x",
    "np.einsum('ij,jk', np.ones((4, 2)), np.ones((2, 3)), out=x); x",
    "np.mean(np.ones((4, 3)), 1, where=x > -9), np.std(np.arange(12.0).reshape(4, 3), 1, where=x > -9)",
    "np.any(np.ones((4, 3)), axis=1, where=x > 0), np.sum([1, 2, 3], where=x[0] > 0)",
    "np.multiply.outer(x[0], x[1], where=x[:3] > 0, out=np.ones((3, 3))), np.less.outer(x[0], [0.0, 1.0])",
    "np.add.outer(x[0], x[1], dtype=np.float32), np.add.outer(x[0], k, dtype=int, casting='unsafe')",
    "np.add(x, 1, where=np.True_, out=x * 0), np.clip(k.astype('u8'), -1, None), np.clip(k.astype('u8'), None, 2**70)",
    "np.piecewise(x[0], [True, False, True], [1, 2]), np.piecewise(x, [x < 0, x > 1], [lambda v: -v, 5])",
    "np.piecewise(x[0], x[0] > 0, [1, 2]), np.piecewise([1.0, 2.0, 3.0], [x[0] > 0], [1, 2])",
    "x[[True, False, False, False], k[:1]], x[np.array([True, True, False, True]), k[:3]]",
    "(x + 1j)**-1, (x + 1j)**0.5, (x + 1j)**2, (x + 1j)**2.0",
    "np.bincount(k * 0, minlength=1), np.bincount(k * 0, x[:, 0], minlength=1), np.bincount(k, k, 3)",
)
# CuPy has none of these functions: on a GPU they are errors that name them.
NOT_IN_CUPY = (
    "np.vecdot(x + 1j, x, axis=0).imag",
    "z = np.zeros(4, int); np.hypot.reduce(x, axis=1, out=z[:]); z",
    "np.polynomial.polynomial.polyvander(x[:, 0], 2), np.polynomial.legendre.legvander(x, 2)",
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", (*TEXTS, *NOT_IN_CUPY))
def test_options(engine: Engine, text: str, rng: np.random.Generator) -> None:
    """Sums here have twelve numbers, of which the squares double the error."""
    *lines, result = text.split("; ")
    scope: dict[str, Any] = {"np": np}
    exec("def function(x, s, n, k):\n" + "".join(f"    {line}\n" for line in [*lines, f"return {result}"]), scope)
    x = normal(rng, (4, 3), "float64")
    arguments = [x, x.astype(np.float32), np.where(x > 1, np.nan, x), rng.integers(0, 3, 4)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scope["function"](*(a.copy() for a in arguments))
    fused = cf.fuse(scope["function"])
    if engine.name == "cuda" and text in NOT_IN_CUPY:
        with pytest.raises(cf.EngineError, match="has no counterpart in CuPy"):
            fused(*engine.arrays(arguments))
        return
    actual = fused(*engine.arrays(arguments))
    many = isinstance(expected, tuple)
    for a, e in zip(actual if many else [actual], expected if many else [expected], strict=True):
        assert engine.name != "numpy" or type(a) is type(e)
        a = engine.host(a)
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(e), np.asarray(e).dtype)
        eps = np.finfo(e.dtype if e.dtype.kind in "fc" else np.float64).eps
        assert_close(a, e, 24 * float(eps) * (1 + np.abs(e)))


def test_powers_of_infinite_complex_numbers() -> None:
    """As NumPy's operator has them, which calls another ufunc than `np.power`; CuPy divides by them to NaN."""
    for power in (-1, -1.0, 2, 2.0, 0.5, 0.0, 3):
        for z in (complex(np.inf, 0), complex(-np.inf, 1), complex(0, np.inf), complex(np.inf, np.nan)):
            with np.errstate(all="ignore"):
                x = np.array([z, 1j])
                np.testing.assert_array_equal(cf.fuse(lambda x, p=power: x**p)(x), x**power)


def test_arrays_that_may_be_their_arguments_are_not_changed_in_place() -> None:
    """Whether `astype(order=)` copies is known where the strides are."""

    def changed(x: Any) -> Any:
        y = x.astype(x.dtype, order="F", copy=False)
        y += 1
        return x

    for x in (np.zeros((3, 4)), np.zeros((4, 3)).T):
        np.testing.assert_array_equal(cf.fuse(changed)(x.copy("K")), changed(x.copy("K")))
    with pytest.raises(cf.TraceError, match="may share memory"):
        cf.fuse(lambda x: changed(x * 2))(np.zeros((3, 4)))


def test_casts_that_numpy_refuses() -> None:
    for f in (lambda x: x.astype(int, casting="same_kind"), lambda x: x.astype("f4", casting="safe")):
        with pytest.raises(TypeError, match="Cannot cast array data") as caught:
            cf.fuse(f)(np.ones((2, 3)))
        assert __file__ in str(caught.value)
    with pytest.raises(ValueError, match='both "C" and "F"'):
        cf.fuse(lambda x: np.require(x, None, ["C", "F"]))(np.ones((2, 3)))


def test_masks_and_operands_that_numpy_refuses() -> None:
    x = np.ones((2, 3))
    for f in (np.sum, np.prod, np.mean, np.std, np.any, np.all, np.nanmean, np.nanvar):
        for where in (x, x.astype(int)):
            with pytest.raises(TypeError):
                f(x, axis=1, where=where)  # type: ignore[call-overload]
            with pytest.raises(TypeError, match=r"where: expected bools, got (float|int)64; compare it"):
                cf.fuse(lambda x, w, f=f: f(x, axis=1, where=w))(x, where)
    with pytest.raises(TypeError, match=r"np.add: where: expected bools, got float64"):
        cf.fuse(lambda x: np.add(x, 1, out=x * 0, where=x))(x)
    for value in (x + 1j, 1j):
        with pytest.raises(TypeError, match=r"np.add: cannot cast an operand from complex128 to float64"):
            cf.fuse(lambda x, y: np.add(x, y, dtype=np.float64))(x, value)
    with pytest.raises(cf.TraceError, match=r"np.divmod with where="):
        cf.fuse(lambda x: np.divmod(x, 2, out=(x * 0, None), where=x > 0))(x)
    with pytest.raises(ValueError, match=r"apply_over_axes: the function gives 0 dimensions of 2"):
        cf.fuse(lambda x: np.apply_over_axes(lambda a, _: a.sum(), x, 0))(x)


def test_results_and_axes_that_numpy_refuses() -> None:
    for f in (np.nanmean, np.nanvar, np.nanstd):
        for dtype in (int, bool):
            with pytest.raises(TypeError):
                f(np.ones((2, 3)), dtype=dtype)
            with pytest.raises(TypeError, match=r"np.nan(mean|var): dtype: expected a float dtype for float64, got"):
                cf.fuse(lambda x, f=f, dtype=dtype: f(x, dtype=dtype))(np.ones((2, 3)))
    for axis in ((), (0, 1, 2)):
        with pytest.raises(ValueError, match="Improper number of dimensions to norm"):
            cf.fuse(lambda x, axis=axis: np.linalg.norm(x, axis=axis))(np.ones((2, 3, 4)))


def test_counts_of_no_labels_are_integers() -> None:
    function, labels = (lambda k: np.bincount(k, k * 0.5, 3)), np.arange(0)
    np.testing.assert_array_equal(cf.fuse(function)(labels), function(labels), strict=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: np.matmul(x, x.T, axes=[(0, 9), (0, 1), (0, 1)]), np.exceptions.AxisError, "9"),
        (lambda x: np.matmul(x, x.T, axes=[(0, 1), (0, 1)]), ValueError, "entry for all 3"),
        (lambda x: np.matmul(x, x.T, axis=1), TypeError, "core dimension"),
        (lambda x: np.vecdot(x, x, axis=2), np.exceptions.AxisError, "2"),
        (
            lambda x: np.vecdot(x, x, keepdims=True),
            cf.TraceError,
            r"np.vecdot with keepdims=: add .* y\[\.\.\., None\]",
        ),
        (lambda x: np.add(x, x, signature="dd->d"), cf.TraceError, r"np.add with signature=: .*astype"),
    ],
)
def test_axes_and_options_that_ufuncs_do_not_take(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cf.fuse(call)(np.ones((3, 4)))
