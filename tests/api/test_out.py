"""`out=`: honoured in every layout, checked, and never written to before what it shares memory with has been read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from host_cuda.runtime import DEVICE, HostArray
from support import HOST, LAYOUTS, Engine, assert_equal

import cupyfuse as cf

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_in_any_layout(engine: Engine, layout: str) -> None:
    out = engine.array(np.zeros((4, 3), np.float32), layout)
    assert cf.fuse(lambda x: x * 2)(engine.array(X), out=out) is out
    assert_equal(engine.host(out), X * 2)


def test_out_that_is_an_argument(engine: Engine) -> None:
    """Nothing is read after it was overwritten: a transposed, a shifted, a repeated target."""
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    turn = cf.fuse(lambda x, y: x.T + y)
    for target in (lambda a: a, lambda a: a.T, lambda a: a[::-1]):
        a = engine.array(square)
        out = target(a)
        turn(a, a, out=out)
        assert_equal(engine.host(out), square.T + square)
    base = engine.array(np.arange(20, dtype=np.float32).reshape(5, 4))
    cf.fuse(lambda x: x * 2)(base[:4], out=base[1:])
    assert_equal(engine.host(base[1:]), square * 2)


def test_out_for_several_results(engine: Engine) -> None:
    fused = cf.fuse(lambda x: (x.sum(axis=1), {"m": x.max(axis=0)}, x * 2))
    out = engine.arrays([np.zeros(4, np.float32), np.zeros(3, np.float32), np.zeros((4, 3), np.float32)])
    for form in (tuple(out), list(out)):
        assert fused(engine.array(X), out=form) is form
        for array, expected in zip(engine.host(out), (X.sum(1), X.max(0), X * 2), strict=True):
            assert_equal(array, expected)


def test_out_of_zero_dimensions() -> None:
    out = np.zeros((), np.float32)
    assert cf.fuse(lambda x: x.sum())(X, out=out) is out
    assert out == 66


def test_a_parameter_named_out_is_the_functions_own(engine: Engine) -> None:
    def exponential(x: Any, out: Any = None) -> Any:
        return np.exp(x, out=out) + 1

    def scaled(out: Any, by: Any = 2.0) -> Any:
        out *= by
        return out.sum()

    fused, x = cf.fuse(exponential), X / 8
    target = engine.array(np.zeros_like(x))
    for arguments, named in (((), {}), ((None,), {}), ((), {"out": None}), ((target,), {}), ((), {"out": target})):
        np.testing.assert_allclose(engine.host(fused(engine.array(x), *arguments, **named)), np.exp(x) + 1, rtol=1e-6)
    np.testing.assert_allclose(engine.host(target), np.exp(x), rtol=1e-6)
    target = engine.array(x)
    np.testing.assert_allclose(engine.host(cf.fuse(scaled).bind(by=3.0)(out=target)), x.sum() * 3, rtol=1e-6)
    np.testing.assert_allclose(engine.host(target), x * 3, rtol=1e-6)
    inside = cf.fuse(lambda x: fused(x, out=x * 0) + fused(x, out=None))
    np.testing.assert_allclose(engine.host(inside(engine.array(x))), 2 * (np.exp(x) + 1), rtol=1e-6)
    with pytest.raises(TypeError, match="argument 'out' is bound"):
        fused.bind(out=target)(x, out=target)


READ_ONLY = np.zeros((4, 3), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (np.zeros((3, 4), np.float32), ValueError, r"out: expected shape .*4, 3\).*3, 4\)"),
        (np.zeros((4, 3)), ValueError, r"out: expected .*float32.*float64"),
        (np.zeros((4, 3), np.int32), (TypeError, ValueError), r"out"),
        (np.zeros((1, 4, 3), np.float32), ValueError, r"out: expected shape"),
        (READ_ONLY, ValueError, "out: .*read-only"),
        (np.broadcast_to(np.zeros(3, np.float32), (4, 3)), ValueError, "out: "),
        (np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (4, 3), (0, 4)), ValueError, "out: .*share"),
        ("text", TypeError, "out: expected an array, got str"),
        (3.0, TypeError, "out: expected an array, got float"),
        (cf.spec((4, 3)), TypeError, "out: expected an array, got Spec"),
        ((), ValueError, r"out: expected 1 array\(s\).*got 0"),
        ((X, X), ValueError, r"out: expected 1 array\(s\).*got 2"),
        (np.ma.masked_array(X.copy()), TypeError, "out.*MaskedArray"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        cf.fuse(lambda x: x * 2),
        cf.relu,  # run as it is, and in three dimensions as a matrix
        lambda x, out: cf.relu(x[None], out=out[None] if isinstance(out, np.ndarray) else out),
        lambda x, out: cf.batch_norm(x, out=out),
        lambda x, out: cf.mse_loss(x, x, reduction="none", out=out),
    ],
    ids=["fused", "eager", "eager3d", "batch_norm", "loss"],
)
def test_out_is_checked(function: Any, out: Any, error: Any, words: str) -> None:
    before = X.copy()
    with pytest.raises(error, match=words):
        function(X, out=out)
    assert_equal(X, before)


def test_nothing_is_written_where_one_array_of_out_is_wrong() -> None:
    good, wrong = np.zeros((1, 4), np.float32), np.zeros((1, 5), np.float32)
    with pytest.raises(ValueError, match=r"out\[1\]: expected shape \(1, 4\)"):
        cf.logsumexp(X[None], axis=2, return_sign=True, out=(good, wrong))
    assert_equal(good, np.zeros_like(good))
    mean, var = np.zeros(3, np.float32), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"out: expected shape \(4, 3\)"):
        cf.batch_norm(X, mean, var, training=True, out=X[:3].copy())
    assert_equal(mean, np.zeros_like(mean))
    assert_equal(var, np.ones_like(var))


def test_out_on_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with HOST.active():
        x, out = HOST.array(X), HOST.array(np.zeros((4, 3), np.float32))
        fused = cf.fuse(lambda x: x * 2)
        fused(x, out=out)
        assert_equal(HOST.host(out), X * 2)

        def data(array: Any) -> Any:
            return SimpleNamespace(ptr=array.ctypes.data, device_id="another" if array is out else DEVICE)

        monkeypatch.setattr(HostArray, "data", property(data))
        with pytest.raises(TypeError, match="out: expected an array in the same memory"):
            fused(x, out=out)


@pytest.mark.parametrize("workspace", [False, True])
def test_out_for_some_of_the_results_in_place(workspace: bool, rng: np.random.Generator) -> None:
    """Contiguous targets are written directly, others by a copy; calls of all kinds in turn."""
    x = rng.standard_normal((4, 3)).astype(np.float32)
    w = rng.standard_normal((3, 3)).astype(np.float32)
    fused = cf.fuse((lambda x, w: (cf.relu(x @ w), cf.gelu(x @ w))) if workspace else lambda x, w: (cf.relu(x), x @ w))
    want = fused(x.astype(np.float64), w.astype(np.float64))
    with HOST.active():
        given = HOST.arrays((x, w))
        for layouts in (("contiguous", "contiguous"), ("contiguous", "fortran"), ("row_gap", "contiguous")) * 2:
            out = [HOST.array(np.zeros((4, 3), np.float32), layout) for layout in layouts]
            assert fused(*given, out=out) is out
            for result, target, expected in zip(fused(*given), out, want, strict=True):
                assert_equal(HOST.host(target), HOST.host(result))
                np.testing.assert_allclose(HOST.host(target), expected, rtol=1e-4, atol=1e-5)


def test_results_have_memory_of_their_own(engine: Engine) -> None:
    """One buffer for two results would hold the last one written alone; interleaved views have no byte in common."""
    both, buffer = cf.fuse(lambda x: (x + 1, x + 2)), engine.array(np.zeros((8, 3), np.float32))
    for other in (buffer[:4], buffer[3:7]):
        with pytest.raises(ValueError, match=r"out\[1\]: shares memory with out\[0\]; pass an array of its own"):
            both(engine.array(X), out=(buffer[:4], other))
    assert not engine.host(buffer).any()
    both(engine.array(X), out=(buffer[::2], buffer[1::2]))
    assert_equal(engine.host(buffer), np.stack([X + 1, X + 2], axis=1).reshape(8, 3))


def test_out_is_no_argument_that_the_function_changes(engine: Engine) -> None:
    def centre(x: Any, mean: Any) -> Any:
        mean[...] = x.mean(axis=0)
        return x - mean

    out = engine.array(np.zeros((4, 3), np.float32))
    with pytest.raises(ValueError, match="out: shares memory with argument 'mean', which the function changes"):
        cf.fuse(centre)(engine.array(X), out[1], out=out)
    assert not engine.host(out).any()


def test_out_is_the_argument_that_the_function_changes_and_returns(engine: Engine) -> None:
    def add(x: Any, y: Any) -> Any:
        y += x
        return y

    def add_and_multiply(x: Any, y: Any) -> Any:
        y += x
        return y * 2

    y = engine.array(np.ones((4, 3), np.float32))
    assert cf.fuse(add)(engine.array(X), y, out=y) is y
    np.testing.assert_array_equal(engine.host(y), X + np.float32(1))
    with pytest.raises(ValueError, match="out: shares memory with argument 'y', which the function changes"):
        cf.fuse(add_and_multiply)(engine.array(X), y, out=y)

    def add_and_transpose(x: Any, y: Any) -> Any:
        y += x
        return y.T

    y = engine.array(np.ones((3, 3), np.float32))
    with pytest.raises(ValueError, match="out: shares memory with argument 'y', which the function changes"):
        cf.fuse(add_and_transpose)(engine.array(X[:3, :3].copy()), y, out=y)
