"""Everything that traces: NumPy's operators, functions, methods and views mean what they mean outside."""

from __future__ import annotations

import operator
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import FLOATS, INF, NAN, Engine, assert_close, assert_equal, dtype_of, info, normal, unit

import cupyfuse as cf

# Arguments: x and z matrices, w another, b one value a column, r one a row, c a column vector, s a scalar.
SHAPES = {"x": (4, 3), "z": (4, 3), "w": (5, 3), "b": (3,), "r": (4,), "c": (4, 1), "s": ()}


def function_of(text: str) -> Callable[..., Any]:
    """`lambda x, z, w, b, r, c, s: text`."""
    return eval(f"lambda {', '.join(SHAPES)}: {text}", {"np": np, "cf": cf})  # type: ignore[no-any-return]


@pytest.fixture
def arguments(rng: np.random.Generator) -> list[Any]:
    return [np.asarray(normal(rng, shape)) for shape in SHAPES.values()]


def same_as_numpy(engine: Engine, function: Callable[..., Any], arguments: list[Any]) -> None:
    """Fused against plain NumPy: shapes and dtypes equal, values to the rounding of a dozen float32 operations."""
    expected = function(*arguments)
    actual = engine.host(cf.fuse(function)(*engine.arrays(arguments)))
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for a, e in pairs:
        assert np.shape(a) == np.shape(e)
        assert np.asarray(a).dtype == np.asarray(e).dtype
        assert_close(a, e, 32 * unit("float32") * (1 + np.abs(np.asarray(e, np.float64)) * 3))


ARITHMETIC = (
    "x + z; x - z; x * z; x / z; -x; +x; abs(x); x ** 2; x ** 3; abs(x) ** 0.5; abs(x) ** 1.5; x ** -1; 2.0 ** x; "
    "x + 1; 1 + x; x - 1; 1 - x; x * 2.5; 2.5 * x; x / 3; 3 / x; x == z; x != z; x < z; x <= z; x > z; x >= z; "
    "x > 0; 0.5 >= x; (x > 0) & (z > 0); (x > 0) | (z > 0); ~(x > 0); (x > 0) & True; True | (x > 0); x @ w.T; "
    "x.dot(w.T); x @ b; r @ x; b @ b; w.T.T @ b; (x > 0) * z; (x > 0) * 2.5; (x > 0) + (z > 0); x * True; "
    "x.dot(2.0); x.dot(s); s.dot(x)"
)
NUMPY_FUNCTIONS = (
    "np.exp(x); np.exp2(x); np.expm1(x); np.log(abs(x)); np.log2(abs(x)); np.log10(abs(x)); np.log1p(abs(x)); "
    "np.sqrt(abs(x)); np.square(x); np.reciprocal(x); np.negative(x); np.positive(x); np.abs(x); np.fabs(x); "
    "np.sign(x); np.sin(x); np.cos(x); np.tan(x); np.arctan(x); np.sinh(x); np.cosh(x); np.tanh(x); np.floor(x); "
    "np.arcsin(np.tanh(x)); np.arccos(np.tanh(x)); np.arcsinh(x); np.arccosh(1 + abs(x)); np.arctanh(0.5 * np.sin(x)); "
    "np.arctan2(x, z); np.arctan2(1, x); "
    "np.ceil(x); np.rint(x); np.trunc(x); np.round(x); np.around(x); np.add(x, z); np.subtract(x, z); "
    "np.multiply(x, z); np.divide(x, z); np.true_divide(x, z); np.power(abs(x), z); np.power(x, 2); "
    "np.maximum(x, z); np.minimum(x, 0); np.logaddexp(x, z); np.greater(x, z); np.less_equal(x, z); "
    "np.not_equal(x, z); np.logical_and(x, z > 0); np.logical_or(x > 0, z > 0); np.logical_not(x > 0); "
    "np.logical_xor(x > 0, z > 0); np.logical_xor(x, True); np.logical_xor(False, x > 0); "
    "np.logical_xor(np.True_, x); np.logical_xor(x, np.float64(0)); np.logical_xor(x > 0, z); "
    "np.bitwise_and(x > 0, z > 0); np.bitwise_or(x > 0, z > 0); np.invert(x > 0); "
    "np.isnan(x); np.isinf(x); np.isfinite(x); np.matmul(x, w.T); np.dot(x, w.T); np.where(x > 0, x, z); "
    "np.dot(x, 2.0); np.dot(s, x); np.where(x > 0, 1.0, z); np.where(x > 0, x, 0); np.where(x > 0, 1.0, 0.0); "
    "np.where(x > 0, 1, 0); "
    "np.where(x, z, b); np.clip(x, -0.5, 0.5); np.clip(x, None, 0.5); np.clip(x, a_min=0, a_max=None); "
    "np.clip(x, b, 1.0); np.clip(x, min=-1, max=1); np.nan_to_num(x / 0); np.nan_to_num(x > 0); "
    "np.nan_to_num(x, nan=2.0, posinf=1, neginf=-1); np.linalg.norm(x, axis=1); np.linalg.norm(x); "
    "np.linalg.norm(x, ord=1, axis=0); np.linalg.norm(x, np.inf, 1); np.linalg.norm(b, keepdims=True); "
    "np.zeros_like(x) + z; np.ones_like(x) * z; np.full_like(x, 2.5); np.zeros_like(x, dtype=np.float64); "
    "np.full_like(x, b); np.full_like(x, r[:, None]); np.copy(x); np.transpose(x); np.transpose(x, (1, 0)); "
    "np.squeeze(c); np.squeeze(c, axis=1); "
    "np.expand_dims(x, 1); np.expand_dims(x, [0]); np.expand_dims(b, (0, 1)); np.expand_dims(r, -1); "
    "np.reshape(x, (3, 4)); np.reshape(x, -1); np.ravel(x); np.broadcast_to(b, (4, 3)); np.broadcast_to(c, (4, 3)); "
    "np.broadcast_to(s, (2, 5)); x * np.shape(x)[0] + np.ndim(x) + np.size(x) + np.size(x, 1); "
    "np.add.reduce(x, axis=1); np.add.reduce(x); np.maximum.reduce(x, axis=1, keepdims=True); "
    "np.minimum.reduce(x, 0); np.multiply.reduce(x, axis=1)"
)
REDUCTIONS = [
    f"np.{name}(x, axis={axis}{keepdims})"
    for name in ("sum", "prod", "mean", "max", "min", "amax", "amin", "var", "std")
    for axis in (None, 0, 1, -1, -2, "(0, 1)", "(1,)")
    for keepdims in ("", ", keepdims=True")
]
METHODS = (
    "x.sum(); x.sum(1); x.sum(axis=0, keepdims=True); x.prod(axis=1); x.mean(axis=1); x.max(axis=0); "
    "x.min(axis=1); x.var(axis=0); x.var(axis=1, ddof=1); x.var(0, ddof=1); x.std(axis=1); x.std(ddof=1); "
    "(x > 0).any(); (x > 0).any(axis=1); (x > -9).all(axis=0, keepdims=True); x.any(axis=1); (x > 0).sum(axis=1); "
    "(x > 0).mean(axis=0); x.clip(-1, 1); x.clip(0); x.clip(max=0); x.T; x.transpose(); x.transpose(1, 0); "
    "(x > 0).var(axis=0); (x > 0).std(); x.transpose((1, 0)); x.reshape(3, 4); x.reshape((2, 6)); "
    "x.reshape(-1); x.reshape(12, -1); "
    "x.reshape(4, 3, 1); x.ravel(); c.squeeze(); c.squeeze(1); c.squeeze(axis=-1); x.astype(np.float64); "
    "x.astype('float16'); (x > 0).astype(np.float32); x.astype(x.dtype); x.copy(); "
    "x.sum(axis=1, dtype=np.float64); np.mean(x, dtype='f8'); x * len(x); x * x.shape[1]; x * x.ndim; x / x.size; "
    "x * np.float32(2); x * np.float64(2); x * np.array(2.0); np.sum(x, 1); np.mean(x, 0); x.sum(axis=()); "
    "x ** np.float64(2); x ** np.float32(2); x.mean(()); x.sum().max(axis=0); "
    "s.min(-1); s.sum(axis=0, keepdims=True); np.prod(s, axis=-1); np.add.reduce(s); s.any(axis=0); "
    "(s > 0).all(axis=-1); (s > 0).sum(axis=0)"
)
BROADCASTS = (
    "x + b; b + x; x * r[:, None]; x - c; c - x; x + s; s + x; x + b[None]; x + b[None, :]; r[:, None] + b; r + s; "
    "x + [1, 2, 3]; (0.5, 1, 2) * x; np.maximum([0, 1, 0], x); x @ [1.0, 2.0, 3.0]; x == [[1], [2], [3], [4]]; "
    "np.where([True, False, True], x, b); x > [0, 0, 1]; np.clip(x, [-1, 0, 0], (1, 1, 2)); x - [s, 1.0, x[0, 0]]; "
    "max(v.sum() for v in x); min({0: x[0, 0], 1: x[1, 1]}.values()); max(map(np.sum, x), default=0); "
    "min(iter([x[0, 0], 0.5])); max(x[:, 0]); "
    "r[:, None] * b[None, :]; x - x.mean(axis=1, keepdims=True); x - x.mean(axis=0); x - x.mean(axis=1)[:, None]; "
    "x / x.sum(); x.T + r; x.T - x.max(axis=1); x.T * b[:, None]; x.sum(axis=1) + r; x.sum(axis=0) + b; "
    "x.sum(axis=1) * x.max(axis=1); x.sum(axis=1)[:, None] + x.sum(axis=0)[None]; x.sum(axis=1)[:, None] * b; "
    "(x + z).T + r; (x + z).T.T + b; (x * z).sum(axis=1)[:, None] * c; x[:, :, None].sum(axis=2); x[None] + b; "
    "x[None, ...] * s; x[..., None].squeeze(); x[:]; x[...]; x[:, :]; x[:, None, :] + r[:, None, None]; "
    "x.reshape(-1) + s; x.reshape(3, 4).sum(axis=1); x.T.reshape(-1); (x + 1).T.reshape(4, 3); "
    "(x + 1).reshape(2, 6).max(axis=1); x.sum(axis=1).reshape(2, 2); x.sum(axis=1).reshape(-1, 1) + x; "
    "(x @ w.T).T; (x @ w.T) * r[:, None]; x.T @ x; (w @ x.T).T; x @ x.T + r; x @ x.T + r[:, None]; "
    "(x @ x.T).sum(axis=0) + r; (x @ x.T).T - r; x @ (w + 1).T; (x * 2) @ w.T; c @ c.T; c.T @ c; c @ b[None]; "
    "x @ w.T @ w; b[:, None] @ b[None]; x.mean(axis=0) @ x.T; s * 2; s + s; np.exp(s) * x; x @ b + r; "
    "(x @ b)[:, None] + x; x.max() + b; x.T.sum(axis=0) + r; x.T.sum(axis=1) * b; x - x.T.mean(axis=0)[:, None]; "
    "(x.T - r).sum(axis=0); (x.T * 2).T @ w.T; (x @ w.T).T + w @ z.T; np.exp(x @ w.T).T * (w @ z.T); "
    "cf.softmax(x @ w.T, axis=1).T - cf.softmax(w @ z.T, axis=1); ((x @ w.T).T * (w @ z.T)).sum(axis=0); "
    "np.where((x @ w.T).T > 0, w @ z.T, 0).max(axis=1); (x @ w.T).sum(axis=1, keepdims=True).T * (z @ x.T)"
)
TEXTS = "; ".join((ARITHMETIC, NUMPY_FUNCTIONS, METHODS, BROADCASTS)).split("; ")


@pytest.mark.rotates
@pytest.mark.parametrize("text", [*TEXTS, *REDUCTIONS])
def test_means_what_numpy_means(engine: Engine, text: str, arguments: list[Any]) -> None:
    with np.errstate(all="ignore"):
        same_as_numpy(engine, function_of(text), arguments)


INTEGERS = (
    "n ** 2; n ** 3; n ** 2.0; n ** 0.5; n ** -1.0; 2.0 ** n; abs(n); np.sign(n); np.floor(n); np.ceil(n); "
    "np.trunc(n); np.rint(n); np.round(n); np.fabs(n); np.square(n); -n; n * n; n / n; n + (n > 1); "
    "np.maximum(n, 2.5); "
    "np.sqrt(n); np.clip(n, -1, 1); np.where(n > 1, n, 0); np.where(n, n, 0.5); np.nan_to_num(n); "
    "n.mean(axis=1); n.var(axis=0); "
    "n.std(axis=1, ddof=1); np.linalg.norm(n - 2.0, axis=1); np.linalg.norm(n); n.any(axis=1); np.isfinite(n)"
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", INTEGERS.split("; "))
def test_functions_of_integers_have_numpys_dtypes(engine: Engine, text: str) -> None:
    same_as_numpy(engine, eval(f"lambda n: {text}", {"np": np}), [np.arange(1, 13).reshape(4, 3)])


def test_nan_to_num_stays_finite_in_every_dtype(engine: Engine) -> None:
    for dtype in FLOATS:
        x = np.array([[INF, -INF, NAN, 1.0]]).astype(dtype_of(dtype))
        result = engine.host(cf.fuse(np.nan_to_num)(engine.array(x))).astype(np.float64)
        largest = float(info(dtype).max)
        assert_equal(result, np.array([[largest, -largest, 0.0, 1.0]]))


def test_16_bit_values_are_compared_with_numbers_of_their_dtype(engine: Engine) -> None:
    x = np.array([0.1, 2048, 2050], np.float16)
    for function in (lambda x: x >= 0.1, lambda x: x == 2049, lambda x: x > 2049, lambda x: x > True):
        assert_equal(engine.host(cf.fuse(function)(engine.array(x))), function(x))


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [(1, 3), (4, 1), (1, 1), (0, 3), (4, 0)])
@pytest.mark.parametrize(
    "text",
    ["x + z", "x.sum(axis=1)", "x.sum(axis=0)", "x.sum()", "x.mean(axis=1, keepdims=True)", "x - x.sum(axis=0)", "x.T"]
    + ["x @ x.T", "x.T @ x", "x.reshape(-1)", "(x * 2).T + z.T", "x.sum(axis=1)[:, None] * x", "x.any(axis=1)"]
    + ["x.all()", "(x > 0).sum(axis=0)", "x.prod(axis=1)", "np.exp(x).sum(axis=0, keepdims=True) + x"],
)
def test_short_and_empty_axes(engine: Engine, text: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    function = eval(f"lambda x, z: {text}", {"np": np})
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing
        same_as_numpy(engine, function, [normal(rng, shape), normal(rng, shape)])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bool", "int64"])
@pytest.mark.parametrize("other", ["float16", "float32", "float64", "bool", "int64", "python int", "python float"])
@pytest.mark.parametrize("op", [operator.add, operator.mul, operator.truediv, operator.gt, np.maximum])
def test_promotion_is_numpys(dtype: str, other: str, op: Callable[..., Any]) -> None:
    x = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    y = {"python int": 2, "python float": 2.0}.get(other)
    y = np.array([1, 1, 2], other) if y is None else y
    with np.errstate(all="ignore"):
        expected = op(x, y)
    fused = cf.fuse(lambda a, b: op(a, b))
    actual = fused(x, y)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual.astype(np.float64), expected.astype(np.float64), rtol=1e-3)


# Changes in place ---------------------------------------------------------------------------------------------------


def change(text: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"np": np, "cf": cf, "INF": INF}
    exec("def function(x, y):\n" + "".join(f"    {line.strip()}\n" for line in text.split(";")), scope)
    return scope["function"]  # type: ignore[no-any-return]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize(
    "text",
    [
        "x += 1; return x * 2",
        "x -= y; return x",
        "x *= 2; x += y; return x.sum()",
        "x /= 2; return y",
        "x **= 2; return x + y",
        "x @= y.T; return x",
        "x[...] = y; return x * 2",
        "x[:] = 0; return x + y",
        "x[...] = 0.5; return x * y",
        "x[:, :] = y + 1; return y",
        "x[...] = x.mean(axis=0); return x",
        "a = x; a += 1; return x + y",
        "a = x.copy(); a += 1; return x + a",
        "a = x * 1; b = a; b += 1; return a + b",
        "a = x + y; a *= 2; x += a; return a",
        "t = x.copy(); x[...] = y; y[...] = t; return x - y",
        "x += x; return x",
        "x += 1; y += x; return x * y",
        "x += y.astype(np.float64); return x",
        "x[...] = np.where(y > 0, 1.0, 0.0); return x",
        "x[...] = x > y; return x + 1",
        "x[...] = y[None]; return x",
        "x[...] = (y * INF); np.nan_to_num(x, copy=False); return x",
        "np.nan_to_num(x, copy=True); return x",
        "d = x @ y.mean(axis=0); m = y.mean(axis=0); e = m @ x + x @ m; m += 1; return d + e * m",
        "a = x; x = x + 1; a += 5; return x",
        "a = x.astype(np.float32, copy=False); a += 1; return a",
        "a = x.astype(np.float32); a += 1; return a",
        "np.add(x, y, out=x); return x",
        "np.exp(y, out=x); return x + 1",
        "np.multiply(x, 2, out=(x,)); return x",
        "x += 1",
        "a = x.T; x += 1; return a",
        "a = x.T; a += 1; return a * 2",
        "x += x.T; return x",
        "a = x[1:]; a *= y[1:]; return x.sum()",
        "a = x[:, ::2]; x += 1; return a",
        "a = x.T[1:3][:, ::2]; a[0] -= y[0, :2]; return a + x[0, 0]",
        "b = y * 2; a = b[1]; b[:, 1] = 0; return a",
        "b = y * 2; a = b[1].copy(); b[:, 1] = 0; return a",
        "a = np.zeros_like(x); a += y; return a",
        "m = x > 0; m &= y > 0; return m",
        "m = x > 0; m |= y > 0; return m",
        "a = cf.softmax(x, axis=1); a *= 2; return a",
        "a = cf.logsumexp(x, axis=1, b=y * y); a += 1; return a",
        "a = x @ y.T; a += 1; return a.T",
        "a = np.where(x > 0, x, y); a -= y; return a",
    ],
)
def test_changes_in_place(engine: Engine, text: str, rng: np.random.Generator) -> None:
    """The results, and what the caller's arrays hold afterwards, are NumPy's."""
    function = change(text)
    x, y = normal(rng, (4, 4)), normal(rng, (4, 4))
    plain, fused = [x.copy(), y.copy()], engine.arrays([x, y])
    expected, actual = function(*plain), engine.host(cf.fuse(function)(*fused))
    if expected is None:
        assert actual is None
    else:
        assert_close(actual, expected, 1e-5 * (1 + np.abs(expected)))
    for a, e in zip(engine.host(fused), plain, strict=True):
        assert_close(a, e, 1e-5 * (1 + np.abs(e)))


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4), (0, 3), (3, 0), (4, 5), (4,), (1,), ()])
@pytest.mark.parametrize("value", ["0", "-0.0", "INF", "x.sum()", "x.mean(axis=0) if x.ndim else x"])
def test_one_value_assigned_to_a_whole_argument(
    engine: Engine, shape: tuple[int, ...], value: str, rng: np.random.Generator
) -> None:
    """Columns and rows of length one too: the value is repeated along an axis that its own node does not have."""
    if shape[:1] == (0,) and "mean" in value:
        return  # NumPy warns of the mean of nothing
    function = change(f"x[...] = {value}")
    x, y = np.asarray(normal(rng, shape)), np.asarray(normal(rng, shape))
    plain, fused = [x.copy(), y.copy()], engine.arrays([x, y])
    function(*plain)
    cf.fuse(function)(*fused)
    actual = np.asarray(engine.host(fused)[0])
    assert_close(actual, plain[0], 1e-5 * (1 + np.abs(plain[0])))
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(plain[0]))


def test_an_argument_changed_in_every_layout(engine: Engine, rng: np.random.Generator) -> None:
    fused = cf.fuse(change("x += y; return x.sum(axis=1)"))
    for layout in ("contiguous", "fortran", "row_gap", "column_gap", "reversed", "offset", "transposed", "misaligned"):
        x, y = normal(rng, (5, 7)), normal(rng, (5, 7))
        a = engine.array(x, layout)
        fused(a, engine.array(y))
        assert_equal(engine.host(a), x + y)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = np.broadcast_to(x, (4, 4)); x += 1; return a", "may share memory"),
        ("a = np.broadcast_to(x, (4, 4)); a += 1; return a", "may share memory"),
        ("a = x * 2; b = a.reshape(2, 8); a[0] = 1; return b", "after a change in place"),
        ("a = np.asfortranarray(x * 2); a[0] = 1; return a", "may share memory"),
    ],
)
def test_changes_that_cannot_be_fused(text: str, words: str) -> None:
    with pytest.raises(cf.TraceError, match=words):
        cf.fuse(change(text))(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))


@pytest.mark.parametrize("text", ["n += x", "n /= 2", "n *= 0.5", "m += 1", "m += x", "x @= x; n -= 1.5"])
def test_changes_that_would_change_the_kind_of_dtype(text: str) -> None:
    """NumPy refuses to put floats into integers, or numbers into masks, by an in-place operator."""
    scope: dict[str, Any] = {}
    exec("def function(x, n, m):\n" + "".join(f"    {line}\n" for line in text.split("; ")) + "    return x", scope)
    arguments = [np.eye(2), np.ones((2, 2), np.int64), np.ones((2, 2), bool)]
    with pytest.raises(TypeError):
        scope["function"](*[a.copy() for a in arguments])
    with pytest.raises(TypeError, match="casting rule 'same_kind'"):
        cf.fuse(scope["function"])(*arguments)


def test_an_in_place_change_cannot_grow() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        cf.fuse(change("x += y; return x"))(np.ones(3), np.ones((2, 3)))


def test_changed_arguments_are_checked_before_anything_runs() -> None:
    fused = cf.fuse(change("x += y; y += 1; return x"))
    x, y = np.ones((2, 2)), np.ones((2, 2))
    y.flags.writeable = False
    with pytest.raises(ValueError, match=r"'y'.*read-only"):
        fused(x, y)
    assert_equal(x, np.ones((2, 2)))
    with pytest.raises(ValueError, match="shares memory"):
        fused(x, x[:])
    assert_equal(x, np.ones((2, 2)))
    assert_equal(fused(x, x), np.full((2, 2), 3.0))


def test_dtypes_of_other_packages_are_imported_before_a_trace() -> None:
    """ml_dtypes takes what it finds as `numpy.add` for a ufunc, and a trace replaces that."""
    pytest.importorskip("ml_dtypes")
    code = (
        "import sys, numpy as np, cupyfuse as cf\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "print(len(cf.fuse(lambda x: np.where(x > 0, x, x * 0.1)).plan(cf.spec((4, 3), 'bfloat16')).steps))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
