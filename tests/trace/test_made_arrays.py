"""Arrays that a traced function makes itself: it may read their values until something traced is written to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy import array, mean, zeros
from scipy.spatial import cKDTree
from support import Engine, assert_close, normal

import cupyfuse as cf
from cupyfuse.settings import force_plans
from cupyfuse.trace import indexing


def same(engine: Engine, function: Any, *arguments: Any) -> None:
    """Values, shapes and dtypes are NumPy's; a sum of n = 12 numbers here rounds n times."""
    expected = function(*(a.copy() for a in arguments))
    actual = engine.host(cf.fuse(function)(*engine.arrays(arguments)))
    many = isinstance(expected, tuple)
    for a, e in zip(actual if many else [actual], expected if many else [expected], strict=True):
        assert (np.shape(a), np.asarray(a).dtype) == (np.shape(e), np.asarray(e).dtype)
        assert_close(a, e, 12 * np.finfo(np.float64).eps * (1 + np.abs(e)))


TEXTS = (
    "z = np.zeros((4, 3)); z[1] = x[1]; z",
    "z = np.zeros(4); z[:] = x.sum(1); z",
    "z = np.empty((2, *x.shape)); z[0] = x; z[1] = -x; z",
    "z = np.ones(3, x.dtype); z += x[0]; z",
    "z = np.ones(3); z *= x[0]; z @ x.T",
    "z = np.full((4, 3), -np.inf); z[:, 0] = x[:, 0]; z.max(1)",
    "z = np.eye(4); z[np.arange(4), k] += x[:, 0]; z",
    "z = np.zeros((4, 3), int); z[np.arange(4), k] = 1; z",
    "z = np.zeros((4, 3), bool); z[x > 0] = True; z",
    "z = np.zeros(3); np.add.at(z, k, x[:, 0]); z",
    "z = np.zeros_like(np.ones(3)); z[k] = 2; z",
    "z = np.zeros(()); z += x.sum(); z",
    "z = np.array([1.0, 2.0, 3.0]); z[1] = x[0, 0]; z",
    "z = np.zeros((4, 3)); np.exp(x, out=z); z",
    "z = np.zeros((0, 3)); np.concatenate([z, x])",
    # Arrays that nothing is assigned to keep their values.
    "z = np.zeros((3, 3)); z[0] = x[0]; z[~np.eye(3, dtype=bool)].reshape(3, 2)",
    "z = np.zeros((3, 3)); z[np.tri(3, dtype=bool)] = x.ravel()[:6]; z",
    "z = np.zeros(2); z[0] = x[0, 0]; sum(x[s:].sum() for s in np.array([0, 1, 2])) * z",
    "z = np.zeros(2); z[1] = x[0, 0]; [z * t for t in np.linspace(0, 1, 3) if t > 0.25][1]",
    "n = np.array([0, 2, 6]); z = np.zeros(2); z[0] = x.ravel()[n[0] : n[1]].sum(); z[1] = n[2]; z",
    "w = np.arange(3.0); np.identity(3)[k] * w if w[0] == 0 else 0",
    "w, z = np.arange(3.0), np.ones(3); z += x[0]; z * w if w[0] == 0 else 0",
    "w, m = np.arange(3.0), np.zeros((3, 3)); np.fill_diagonal(m, x[0]); m * w if w[0] == 0 else 0",
    "z = np.zeros((2, 3)); row = z[1] + 1; row[:] = x[1]; z[0, k[0]] = 2; row * z",
    "z = np.arange(3.0); np.add.at(z, k, x[:, 0]); np.copyto(y := np.zeros(3), x[0]); z + y",
    "z = np.identity(3)[k]; z * x",
    "np.array([2, 0, 1])[k] * x[:, 0]",
    "np.linspace(0.0, 1.0, 3)[k]",
    "np.take_along_axis(np.linspace(0, 1, 4), np.argsort(x[:, 0]), 0), np.hanning(4)[np.argmax(x[:, 1])]",
    "np.fft.rfftfreq(6, 0.5)[k], np.fft.fftfreq(3)[k] * x[:, 0], np.take(np.blackman(8), k)",
    "w = np.hamming(3); w[1] = x[0, 0]; i = np.indices((3, 4))[1]; w * 2, i[k]",
    "np.bartlett(4)[:2].searchsorted(x[:, 1])",
    "np.hanning(3).mean(where=x[0] > 0.2), np.kaiser(3, 2.0).dot(x.T)",
    "np.full(5, x.mean()); np.full((2, 3), x[0], dtype='float32'); np.full(5, x.mean())",
    "edges = np.linspace(-1, 1, 4); sum(float(e) * (x > e).sum() for e in edges)",
    "n = int(np.ones(3).sum()); x[:n] * (1 if np.zeros(2).any() else 2)",
    "np.mean([x[0], x[1]]); np.mean([x[0], x[1]], axis=0); np.max([x.sum(), x.max()])",
    "np.sum([x, x * 2], axis=0); np.std([x[0], x[1]], axis=0); np.linalg.norm([x[0], x[1]], axis=1)",
    "z = zeros(4); z[0] = mean([x[0], x[1]]); z",
    "array([x.sum(), x.max()]) * 2",
    "np.apply_along_axis(lambda r: r / np.abs(r).sum(), 1, x); np.apply_along_axis(np.sum, 0, x)",
    "np.apply_along_axis(lambda r: np.outer(r, r), 1, x); np.apply_along_axis(lambda r: r[:2], 0, x)",
    "np.piecewise(x, [x < 0, x >= 1], [-1, 1]); np.piecewise(x, [x < 0], [np.abs, lambda v: v * 2])",
    "np.piecewise(x[0], x[0] > 0, [2, lambda v: v - 1]); np.piecewise(x, [x > 0, x > 1], [1, lambda v: v ** 2, 5])",
    "np.bincount(k, minlength=3); np.bincount(k, weights=x[:, 0], minlength=4); x[np.ix_(k, k % 3)]",
    "np.c_[np.ones(4), x, k]; np.r_[x[0], 1.0, x[1]]; np.r_[1:4, x[0]]; np.c_[x[:, 0], x[:, 1]]; np.r_[x, x]",
    "x * min(1.0, 2.0 / np.abs(x).sum()); x / max(1, k.sum()); max(x[0, 0], x[1, 1], x[2, 2]); min([x.max(), 0.5])",
    "max(x.shape) * x; max([1, 2], key=lambda v: -v) * x; round(x.sum(), 2); round(x.sum())",
    "(np.arange(3) != 1) & (x > 0); (x > 0) | np.array([True, False, True]); k & np.arange(4)",
    "np.polyfit(x[:, 0], x[:, 1], 1); np.polyfit(np.arange(4), x, 2)",
    "z = np.linspace(-1, 1, 12).reshape(4, 3); z += x; z",
    "np.linalg.lstsq(x, x[:, 0], rcond=None)[0]; np.lib.stride_tricks.sliding_window_view(x, 2, axis=0).sum(-1)",
)

# What is written to them, or reads them by a traced index, while `w` keeps its values.
WRITTEN = (
    "z = np.zeros_like(w); z[0] = x[0, 0]",
    "z = np.empty_like(w, shape=4, dtype='f4'); z[:] = x[:, 0]",
    "z = np.full_like(w, x[0, 0]); z[1] = 2",
    "z = w.copy(); z[1] = x[0, 1]",
    "z = np.copy(w); z += x[0]",
    "z = np.array(w); z[k] = 7",
    "z = np.asarray([1.0, 2.0, 3.0]); y = np.asarray(z); y[0] = x[0, 0]",
    "z = np.zeros((4, 3)); np.cumsum(x, axis=1, out=z)",
    "z = np.zeros(4); np.sum(x, 1, None, z)",
    "z = np.zeros(3); x.mean(0, None, z)",
    "z = np.zeros((4, 4)); np.matmul(x, x.T, out=z)",
    "z = np.zeros((4, 4)); np.dot(x, x.T, z)",
    "z = np.zeros((4, 3)); np.clip(x, 0, 1, z)",
    "z = np.zeros(3, bool); np.any(x > 1, 0, z)",
    "z = np.zeros(12); z.put(k + 3 * np.arange(4), x[:, 0])",
    "z = np.zeros(3); z.fill(x[0, 0])",
    "z = np.zeros((4, 3)); z.flat[...] = x",
    "z = np.zeros((3, 3)); z.flat[::4] = x[0]; len(z.flat), z.flat[0]",
    "z = np.zeros(4); z.flat = x[:, 0]",
    "z = np.zeros(12); np.put(a=z, ind=k + 3 * np.arange(4), v=x[:, 0])",
    "z = np.zeros((4, 3)); np.place(z, x > 0, [1, 2])",
    "z = np.zeros((4, 3)); np.putmask(z, x > 0, x)",
    "z = np.zeros(3); np.copyto(dst=z, src=x[0])",
    "z = np.zeros((2, 3)); np.copyto(z, [x[0], x[1]])",
    "z = np.zeros((3, 3)); np.put_along_axis(z, k[None, :3], 1, axis=0)",
    "v = np.arange(3.0); z = v.take(k) + v.dot(x.T)",
    "z = np.tile([1.0, 2.0, 3.0], (4, 1)); z += x",
    "z = np.repeat([1.0, 2.0], 2); z[x[:, 0] > 0] = 5",
    "z = np.broadcast_to(0.5, (4, 3)).copy(); z[x > 0] = 1",
    "z = np.concatenate([[1.0], [2.0, 3.0]]); z[k[:2]] = x[0, :2]",
    "z = np.atleast_2d([1.0, 2.0, 3.0]); y = np.atleast_2d(z); y[0] = x[0]",
    "z = np.array(np.random.default_rng(0).random((4, 3))); z *= x; z[x > 1] = 0",
    "z = np.divide(1.0, w, out=np.zeros_like(w), where=w > 0); z[0] = x.max()",
    "z = np.zeros(3); s = np.sum(w, where=w > 1); z[:] = x[0]; z *= s",
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", WRITTEN)
def test_only_what_is_assigned_to_is_traced(text: str, engine: Engine, rng: np.random.Generator) -> None:
    scope: dict[str, Any] = {"np": np}
    exec(f"def function(x, k):\n    w = np.arange(3.0)\n    {text}\n    return z * 1 if w[0] == 0 else None", scope)
    same(engine, scope["function"], normal(rng, (4, 3), "float64"), rng.integers(0, 3, 4))


@pytest.mark.kernels_rotate
def test_diagonals_at_offsets_that_change(engine: Engine) -> None:
    x = np.arange(20.0).reshape(4, 5)
    fused = cf.fuse(lambda x, s: (np.diagonal(x, s).sum(), x.diagonal(s) * 2, np.linalg.diagonal(x, offset=s) * 1))
    for s in (1, 2, -1):
        expected = np.diagonal(x, s).sum(), x.diagonal(s) * 2, x.diagonal(s)
        for a, e in zip(fused(engine.array(x), s), expected, strict=True):
            np.testing.assert_array_equal(engine.host(a), e)


def test_arrays_that_are_written_to_may_be_the_last_ones_that_fail() -> None:
    """The error is that of the line that fails with such arrays traced, not of one that would fail with all traced."""

    def fills(x: Any) -> Any:
        z = np.zeros(3)
        if np.arange(3)[0] > 0:
            return x
        z[0] = x[0]
        return z * x[1].__float__()

    with pytest.raises(cf.TraceError, match=r"conversion(.|\n)*return z \* x"):
        cf.fuse(fills)(np.ones(3))


DRAWN = (
    "np.random.RandomState(0).rand(4, 3)",
    "np.random.seed(0) or np.random.normal(size=(4, 3))",
    "np.random.default_rng(0).random((4, 3))",
    "cKDTree(np.arange(6.0).reshape(3, 2)).query(np.ones((4, 2)), 3)[0]",
)


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("fill", ["z[x > 0] = 1", "z *= x", "z[0] = x[0]"])
def test_arrays_that_compiled_code_makes_are_filled_in_copies(drawn: str, fill: str, rng: np.random.Generator) -> None:
    """Traced ones crashed the process, since compiled code writes to their memory."""
    scope: dict[str, Any] = {"np": np, "cKDTree": cKDTree}
    exec(f"def direct(x):\n    z = {drawn}\n    {fill}\n    return z", scope)
    exec(f"def copied(x):\n    z = np.array({drawn})\n    {fill}\n    return z", scope)
    x = normal(rng, (4, 3), "float64")
    with pytest.raises(cf.TraceError, match=r"copy by np\.array\(a\)"):
        cf.fuse(scope["direct"])(x)
    np.testing.assert_allclose(cf.fuse(scope["copied"])(x), scope["direct"](x), rtol=1e-15)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", TEXTS)
def test_made_arrays(engine: Engine, text: str, rng: np.random.Generator) -> None:
    *lines, result = text.split("; ")
    if "=" not in lines[0].partition("(")[0] if lines else False:  # several results
        lines, result = [], ", ".join([*lines, result])
    scope: dict[str, Any] = {"np": np, "array": array, "zeros": zeros, "mean": mean}
    exec("def function(x, k):\n" + "".join(f"    {line}\n" for line in [*lines, f"return {result}"]), scope)
    same(engine, scope["function"], normal(rng, (4, 3), "float64"), rng.integers(0, 3, 4))


def test_arrays_stay_numpys_where_nothing_traced_is_written() -> None:
    def shifted(x: Any) -> Any:
        shift = np.ones(3)
        assert type(shift) is np.ndarray
        return x + shift

    np.testing.assert_array_equal(cf.fuse(shifted)(np.ones(3)), np.full(3, 2.0))


def test_complex_arrays_are_made(engine: Engine) -> None:
    def steps(x: Any) -> Any:
        z = np.zeros_like(x * 1j)
        for _ in range(3):
            z = z * z + x * 1j
        return abs(z)

    same(engine, steps, np.linspace(-0.5, 0.5, 12).reshape(4, 3))


def test_the_error_of_the_second_attempt_names_the_line() -> None:
    def fills(x: Any) -> Any:
        z = np.zeros(3)
        z[0] = x[0]
        return z if z.sum() > 0 else x

    with pytest.raises(cf.TraceError, match=r"branch(.|\n)*return z if"):
        cf.fuse(fills)(np.ones(3))


def test_modules_are_as_before_after_a_trace() -> None:
    before = {name: getattr(np, name) for name in ("zeros", "array", "sum", "full", "add", "dot", "exp")}
    with pytest.raises(cf.TraceError):
        cf.fuse(lambda x: x[0].__float__())(np.ones(3))
    assert before == {name: getattr(np, name) for name in before}


def test_complex_results_where_real_ones_were_planned_are_an_error() -> None:
    eigenvalues = cf.fuse(lambda a: np.linalg.eigvals(a))
    np.testing.assert_allclose(np.sort(eigenvalues(np.diag([2.0, 1.0]))), [1, 2])
    if np.linalg.eigvals(np.eye(2)).dtype == complex:  # from NumPy 2.5 on: planned as complex
        np.testing.assert_allclose(np.sort(eigenvalues(np.array([[0.0, -1.0], [1.0, 0.0]]))), [-1j, 1j])
        return
    with pytest.raises(cf.EngineError, match=r"complex128.*\.astype\(complex\)"):
        eigenvalues(np.array([[0.0, -1.0], [1.0, 0.0]]))


def test_rows_that_are_filled_one_by_one_are_traced_in_linear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of an array reads none of the parts of it that were made before, unless they are used again."""

    def filled(x: Any) -> Any:
        out = np.zeros(x.shape)
        out[0] = x[0]
        for i in range(1, len(x)):
            out[i] = 0.5 * out[i - 1] + x[i]
        return out

    calls = []
    original = indexing.part
    monkeypatch.setattr(indexing, "part", lambda *args: (calls.append(0), original(*args))[1])
    counts = []
    for rows in (8, 16, 32):
        x = np.random.default_rng(rows).standard_normal((rows, 3))
        calls.clear()
        np.testing.assert_allclose(cf.fuse(filled)(x), filled(x))
        counts.append(len(calls) / rows)
    assert max(counts) < 1.3 * min(counts)


def test_views_are_read_again_after_changes() -> None:
    def changed(x: Any) -> Any:
        y = x.copy()
        row, column, corner = y[1], y[:, 1], y[1:][:1, 1:]
        y[1] = 0
        first = row + column[1]
        corner += 5
        y[:] = y * 2
        return first, row, column, corner.sum(), row.shape

    x = np.arange(9.0).reshape(3, 3)
    with force_plans():
        for ours, theirs in zip(cf.fuse(changed)(x), changed(x), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_mistakes_are_named_where_tracing_made_arrays_would_be_refused() -> None:
    def pairs(x: Any) -> Any:
        rows, cols = np.where(np.triu(np.ones((3, 3)), 1))
        return (x[rows] - x[cols]).sum(axis=1)

    x = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(cf.fuse(pairs)(x), pairs(x))
    with pytest.raises(np.exceptions.AxisError):
        cf.fuse(pairs)(x[:, 0])


@pytest.mark.parametrize(
    "ends",
    [
        lambda x, k: (np.linspace(k, x, 3), np.linspace(k, x, 4), np.linspace(x, k, 5, endpoint=False)),
        lambda x, k: (
            np.linspace(k, [1, 2, 3], 4),
            np.linspace(k, x, 1),
            np.linspace(k, x[1], 1),
            np.linspace(k, 4, 0),
        ),
        lambda x, k: (np.linspace(k, x, 3, axis=1, dtype=np.float64), np.linspace(np.int64(2), k, 3)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [0.5, 2])
def test_numbers_evenly_spaced_from_an_argument_to_an_array(ends: Any, dtype: str, k: float) -> None:
    x = np.array([1.0, 2.0, 3.0], dtype)
    function = cf.fuse(lambda x, k: (cf.relu(x), *ends(x, k)))
    for number in (k, k + 1):
        for actual, expected in zip(function(x, number)[1:], ends(x, number), strict=True):
            assert actual.dtype == expected.dtype
            np.testing.assert_allclose(actual, expected, rtol=4 * np.finfo(dtype).eps)
