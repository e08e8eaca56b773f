"""Arrays of any number of dimensions: what runs fused is what NumPy computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import LAYOUTS, Engine, assert_close, dtype_of, normal, sprinkle, unit

import cupyfuse as cf
from cupyfuse.settings import force_plans


def compare(engine: Engine, function: Callable[..., Any], arguments: list[Any], roundings: float = 256) -> Any:
    """Fused against plain NumPy in float64: same shapes and dtypes, values to some roundings of the largest."""
    with np.errstate(all="ignore"):
        expected = function(*arguments)
        exact = function(*(a.astype(np.float64) if a.dtype.kind in "fV" else a for a in arguments))
    fused = cf.fuse(function)
    actual = engine.host(fused(*engine.arrays(arguments)))
    alone = not isinstance(expected, tuple)
    for a, e, x in zip(*(([v] if alone else v) for v in (actual, expected, exact)), strict=True):
        assert np.shape(a) == np.shape(e)
        dtype = np.asarray(a).dtype
        # NumPy's product of bfloat16 arrays is of float32.
        assert dtype == np.asarray(e).dtype or (dtype == dtype_of("bfloat16") and np.asarray(e).dtype == np.float32)
        if dtype.kind in "fV":
            finite = np.abs(np.asarray(x, np.float64)[np.isfinite(np.asarray(x, np.float64))])
            bound = roundings * unit(dtype.name) * (1 + finite.max(initial=0.0))
            assert_close(a, x, bound)
        else:
            np.testing.assert_array_equal(a, e)
    return fused


# Programs over a (2, 3, 4, 5), b (3, 1, 5), c (4, 5), d (2, 1, 1, 1), w (5, 6), v (5,), k (2, 3, 6, 5).
SHAPES = {"a": (2, 3, 4, 5), "b": (3, 1, 5), "c": (4, 5), "d": (2, 1, 1, 1), "w": (5, 6), "v": (5,), "k": (2, 3, 6, 5)}


def function_of(text: str) -> Callable[..., Any]:
    return eval(f"lambda {', '.join(SHAPES)}: {text}", {"np": np, "cf": cf})  # type: ignore[no-any-return]


PROGRAMS = (
    "a * 2 + 1; a + b; b - a; a * c; a * d + v; c[:, None] + v; np.where(a > b, a, d); (a > 0) & (b > 0); "
    "a.sum(); a.sum(0); a.sum(1); a.sum(2); a.sum(-1); a.sum((0, 2)); a.mean((1, 3)); a.mean((0, 1, 2)); "
    "a.max((1, 2)); "
    "a.min(1, keepdims=True); a.prod((2, 3), keepdims=True); a.var(1); a.std((0, 3), ddof=1); a.var((2, 3)); "
    "cf.logsumexp(a, axis=(1, 3)); cf.logsumexp(a, axis=2, keepdims=True); cf.softmax(a, axis=1); "
    "cf.softmax(a, axis=-1) * b; cf.log_softmax(a, axis=(0, 1)); (a > 0).any(1); (a > 0).all((1, 2)); "
    "(a > 0).sum(2); np.linalg.norm(a, axis=1); a - a.mean(1, keepdims=True); a / a.sum((1, 2), keepdims=True); "
    "a.reshape(6, 20); a.reshape(2, 12, 5).sum(1); (a * 2).reshape(24, 5) + v; (a + b).reshape(3, -1).mean(-1); "
    "a.ravel() * 2; a.reshape(6, 20, order='F') + 1; a.ravel('F')[None] * v[:, None]; "
    "a.T + 1; a.transpose(0, 2, 1, 3) * c[:, None]; a.swapaxes(1, 3).sum(-1); a.mT; "
    "a.swapaxes(0, 1)[None]; "
    "np.moveaxis(a, 1, -1).reshape(-1, 3).mean(0); np.moveaxis(a, (0, 1), (-1, 0)) * 2; np.rollaxis(a, 3, 1).sum(1); "
    "a.squeeze(); d.squeeze((1, 2)) + 1; np.broadcast_to(b, (2, 3, 4, 5)) * a; np.expand_dims(b, (0, 2)) * 2; "
    "a @ w; a @ v; v @ k.mT; (a + b) @ w * 2; np.dot(a, w); np.dot(c, k.mT); a @ k.swapaxes(-1, -2); c @ k.mT; "
    "k @ a.mT; a[:, :, None] @ w; b @ k.mT; (a * 2) @ np.tanh(k).mT; b.mT @ b; "
    "cf.softmax(a @ k.mT / 2.0, axis=-1) @ k; (a @ k.mT).transpose(0, 2, 1, 3).reshape(2, 4, 18).sum(-1)"
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", PROGRAMS.split("; "))
def test_programs(engine: Engine, text: str, rng: np.random.Generator) -> None:
    compare(engine, function_of(text), [normal(rng, shape) for shape in SHAPES.values()])


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "text",
    [
        *("a + b", "a.mean((1, 3))", "a - a.mean(1, keepdims=True)", "cf.softmax(a, axis=1)"),
        *("a.transpose(0, 2, 1, 3) * 2", "(a * 2).swapaxes(1, 2).reshape(2, 4, 15) * 2", "a @ w", "a @ k.mT"),
        "(a * b) @ (k + 1).mT",
    ],
)
def test_dtypes(engine: Engine, text: str, dtype: str, rng: np.random.Generator) -> None:
    """Of 16 bits: intermediate values are rounded less often than NumPy's own."""
    compare(engine, function_of(text), [normal(rng, s, dtype, 0.5) for s in SHAPES.values()], 64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "text", ["a * 2 + b", "a.sum(1)", "a.transpose(2, 0, 3, 1) * 2", "a @ k.mT", "a.reshape(8, 15)"]
)
def test_layouts(engine: Engine, text: str, layout: str, rng: np.random.Generator) -> None:
    arguments = [normal(rng, shape) for shape in SHAPES.values()]
    function = function_of(text)
    actual = engine.host(cf.fuse(function)(*(engine.array(a, layout) for a in arguments)))
    expected = function(*(a.astype(np.float64) for a in arguments))
    assert_close(actual, expected, 64 * unit("float32") * (1 + np.abs(expected).max()))


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0), (1, 1, 1), (1, 3, 1), (3, 1, 1, 2)])
def test_short_and_empty_axes(engine: Engine, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = normal(rng, shape, "float64")
    for text in (
        *(
            "x + 1",
            "x.sum(1)",
            "x.mean((0, 1))",
            "x.sum((1, 2), keepdims=True)",
            "x.transpose(2, 0, 1, *range(3, x.ndim))",
        ),
        *("x - x.sum(1, keepdims=True)", "x.reshape(-1, *x.shape[:0])", "x @ x.swapaxes(-1, -2)", "x.prod(0) * 2"),
        *("x.mT @ x", "x @ np.ones_like(x).mT"),
    ):
        if "shape[:0]" in text and not x.size:
            continue
        compare(engine, eval(f"lambda x: {text}", {"np": np}), [x])


def test_special_values(engine: Engine, rng: np.random.Generator) -> None:
    """Infinities, NaN and zeros of both signs go where NumPy's go."""
    arguments = [sprinkle(rng, normal(rng, shape, "float64"), 0.1) for shape in SHAPES.values()]
    for text in ("a + b", "a.max(1)", "a.min((0, 2))", "a.swapaxes(1, 2) * 2", "np.where(a > b, a, d)", "-a.T"):
        with np.errstate(all="ignore"):
            expected = function_of(text)(*arguments)
        actual = engine.host(cf.fuse(function_of(text))(*engine.arrays(arguments)))
        np.testing.assert_array_equal(actual, expected)


def test_integers_and_masks(engine: Engine, rng: np.random.Generator) -> None:
    n, m = rng.integers(-5, 5, (2, 3, 4)), rng.random((2, 1, 4)) < 0.5
    for text in (
        "n + 1",
        "n.transpose(1, 0, 2) * 2",
        "np.where(m, n, 0)",
        "(n > 0) & m",
        "m.sum(-1)",
        "n.reshape(6, 4).T",
    ):
        compare(engine, eval(f"lambda n, m: {text}", {"np": np}), [n, m])


def test_arguments_change_in_place(engine: Engine, rng: np.random.Generator) -> None:
    def function(x: Any, y: Any) -> Any:
        x += y
        return x.sum(1)

    for layout in ("contiguous", "fortran", "row_gap"):
        x, y = normal(rng, (2, 3, 4)), normal(rng, (3, 1))
        held = engine.array(x, layout)
        result = engine.host(cf.fuse(function)(held, engine.array(y)))
        np.testing.assert_array_equal(engine.host(held), x + y)
        assert_close(result, (x.astype(np.float64) + y).sum(1), 1e-5)


def test_results_are_written_to_out(engine: Engine, rng: np.random.Generator) -> None:
    x = normal(rng, (2, 3, 4))
    for function in (lambda x: x * 2, lambda x: x.transpose(2, 0, 1) * 2, lambda x: x.reshape(4, 6) + 1):
        out = engine.array(np.empty(function(x).shape, np.float32))
        cf.fuse(function)(engine.array(x), out=out)
        np.testing.assert_array_equal(engine.host(out), function(x))


def test_lengths_are_integers() -> None:
    """As in NumPy: `n / 2` is none."""
    x = np.ones((4, 6), np.float32)
    for function in (lambda x: x.reshape(x.shape[0] / 2, -1) + 1, lambda x: np.reshape(x, (2.0, 12)) + 1):
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            cf.fuse(function)(x)


# What a plan costs ----------------------------------------------------------------------------------------------------


def kinds(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    return [step.kind for step in cf.fuse(function).plan(*(cf.spec(s, "float32") for s in shapes)).steps]


def test_leading_axes_are_rows() -> None:
    """Work along the last axis, or on all leading ones, is one launch, as of a matrix."""

    def layer_norm(x: Any, gamma: Any, beta: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * gamma + beta

    assert kinds(layer_norm, (4, 8, 64), (64,), (64,)) == ["RowProgram"]
    assert kinds(lambda x: x.mean((0, 1)), (4, 8, 64)) == ["ColumnStats"]
    assert kinds(lambda x, w: np.tanh(x @ w), (4, 8, 64), (64, 32)) == ["Gemm", "RowProgram"]
    assert kinds(lambda x: x.reshape(4, 2, -1).var(-1), (4, 8, 6, 6)) == ["RowProgram"]
    assert kinds(lambda x: cf.softmax(x.transpose(0, 2, 1) * 2, axis=1), (4, 8, 64)) == ["RowProgram"]


def test_one_copy_serves_a_normalisation_over_a_middle_axis() -> None:
    def normalised(x: Any) -> Any:
        mean = x.mean(1, keepdims=True)
        return (x - mean) / np.sqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1e-5)

    assert kinds(normalised, (4, 8, 64)) == ["Copy", "RowProgram"]


@pytest.mark.parametrize(
    ("shape", "axis", "steps"),
    [
        ((300, 70), None, ["RowProgram", "RowProgram"]),
        ((8, 16, 12, 12), (0, 2, 3), ["RowProgram", "ColumnStats"]),
        ((8, 16, 12, 12), None, ["RowProgram", "RowProgram"]),
        ((300, 1), None, ["ColumnStats"]),
    ],
)
def test_variances_read_an_array_once(shape: tuple[int, ...], axis: Any, steps: list[str]) -> None:
    plan = cf.fuse(lambda x: x.std(axis)).plan(cf.spec(shape, "float32"))
    assert [step.kind for step in plan.steps] == steps
    assert plan.reads < 1.2 * 4 * math.prod(shape)


def test_sums_of_first_and_last_axes_copy_nothing() -> None:
    for axis in ((0, 2, 3), (0, 1, 3)):
        assert kinds(lambda x, axis=axis: x.sum(axis), (4, 6, 8, 10)) == ["RowProgram", "ColumnStats"]  # type: ignore[misc]


def test_reshapes_of_transposes_copy_nothing() -> None:
    assert kinds(lambda x: np.exp(x.transpose(2, 0, 1).reshape(4, 6)).max(0), (2, 3, 4)) == ["RowProgram"]


def test_what_was_reshaped_is_stored_once(engine: Engine, rng: np.random.Generator) -> None:
    def function(x: Any, y: Any) -> Any:
        return np.exp(x.T).reshape(2, 3) * y.sum(axis=2)

    assert kinds(function, (2, 3), (2, 3, 8)) == ["RowProgram", "Copy", "RowProgram"]
    compare(engine, function, [rng.standard_normal(s).astype(np.float32) for s in ((2, 3), (2, 3, 8))])


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("distance", [0.0, 1e3, 1e5, 1e6])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((40, 70), None), ((7, 9), None), ((8, 5, 6, 7), (0, 2, 3)), ((8, 5, 6, 7), (0, 3)), ((5, 6, 7), (0, 2))],
)
def test_variances_in_parts(
    shape: tuple[int, ...], axis: Any, dtype: str, distance: float, engine: Engine, rng: np.random.Generator
) -> None:
    """As exact as from the exact mean of all and the distances to it, far from zero too."""
    x = (rng.standard_normal(shape) + min(distance, float(np.finfo(dtype).max) / 8)).astype(dtype)
    with force_plans():
        result = engine.host(cf.fuse(lambda x: x.var(axis))(engine.array(x)))
    exact = x.astype(np.longdouble).var(axis)
    assert result.dtype == x.dtype
    np.testing.assert_allclose(result.astype(np.longdouble), exact, rtol=8 * unit(dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_variances_in_parts_of_rows_that_are_not_finite(value: float, engine: Engine) -> None:
    x = np.ones((3, 4, 5), np.float32)
    x[2, 1, 3] = value
    result = engine.host(cf.fuse(lambda x: (x.var(), x.var((0, 2))))(engine.array(x)))
    np.testing.assert_array_equal(result[0], np.nan)
    np.testing.assert_array_equal(result[1], [0, np.nan, 0, 0])


def test_attention_copies_nothing() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        return cf.softmax(q @ k.swapaxes(-1, -2) / 8.0, axis=-1) @ v

    shape = (2, 4, 16, 64)
    assert kinds(attention, shape, shape, shape) == ["Gemm", "RowProgram", "Gemm"]
    assert kinds(lambda x, w: x @ w, (16, 64), (4, 64, 8)) == ["Gemm"]  # one left operand for all batches


def test_a_step_of_a_copy_counts_what_it_moves() -> None:
    (step,) = cf.fuse(lambda x, y: x + y).plan(cf.spec((2, 3, 5), "float32"), cf.spec((2, 1, 5), "float32")).steps[:1]
    assert (step.kind, step.reads, step.writes) == ("Copy", 10 * 4, 30 * 4)


def test_errors_name_shapes_and_line() -> None:
    x, y = np.ones((2, 3, 4)), np.ones((3, 3, 4))
    for function, words in (
        (lambda x, y: x + y, r"shapes \(2, 3, 4\) \(3, 3, 4\)"),
        (lambda x, y: x @ y, r"last dimension of \(2, 3, 4\) must equal the last but one of \(3, 3, 4\)"),
        (lambda x, y: x @ y.mT, r"batches of shapes \(2, 3, 4\) and \(3, 4, 3\)"),
        (lambda x, y: np.moveaxis(x, (0, 1), 2), "same number of axes"),
        (lambda x, y: x.reshape(5, -1), r"shape \(2, 3, 4\) into shape \(5, -1\)"),
        (lambda x, y: x.sum(3), "axis 3 is out of bounds"),
        (lambda x, y: x.sum().mT, "0 dimensions holds no matrices"),
    ):
        with pytest.raises(ValueError, match=f"(?s){words}.*test_dimensions.py"):
            cf.fuse(function)(x, y)


def test_blocks_of_rows(engine: Engine, rng: np.random.Generator) -> None:
    """Leading axes are rows in blocks, too, whichever way the argument and `out` lie in memory."""

    def head(x: Any, w: Any) -> Any:
        y = x @ w
        return cf.softmax(y, axis=-1), y.max(-1)

    x, w = normal(rng, (6, 50, 8), "float64"), normal(rng, (8, 64), "float64")
    fused = cf.fuse(head, max_workspace=64 * 8 * 130)
    expected = cf.fuse(head)(x, w)
    for layout in ("contiguous", "row_gap", "fortran"):
        out = tuple(engine.array(np.empty(e.shape), layout) for e in expected)
        fused(engine.array(x, layout), engine.array(w), out=out)
        for a, e in zip(engine.host(out), expected, strict=True):
            assert_close(a, e, 1e-12)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.count == 3 and plan.blocks.rows == 128
    for a, e in zip(engine.host(fused(*engine.arrays([x, w]))), expected, strict=True):
        assert_close(a, e, 1e-12)
    assert "several strides" in fused.plan(np.asfortranarray(x), w).whole
    assert "several strides" not in fused.plan(x[:, :, ::-1], w).whole


def test_a_new_axis_of_an_array_without_dimensions_is_sliced(engine: Engine) -> None:
    compare(engine, lambda x: x[..., None][1:].sum() + x[None, None][:, :0].sum(1) + x, [np.full((), 2.5)])
