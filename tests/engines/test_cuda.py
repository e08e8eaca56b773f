"""The CUDA engine on a GPU: layouts, streams, sizes, determinism; what needs no CuPy is tested elsewhere."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse import heads

cp = pytest.importorskip("cupy", reason="needs a GPU: CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cp.cuda.is_available(), reason="needs a GPU")]

EPS = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}  # unit roundoffs


def tail(y, a, c):
    z = cf.softmax(y * a + c, axis=1)
    return z, cf.logsumexp(y + c, axis=1, keepdims=True)


tail_fused = cf.fuse(tail)


def draw(shape, dtype="float32", seed=0, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def agree(got, expected, dtype, roundings=16.0):
    """Within some roundings of the largest value, NaN and inf in the same places."""
    got, expected = cp.asnumpy(got).astype(np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.array_equal(got[~finite & ~np.isnan(expected)], expected[~finite & ~np.isnan(expected)])
    if finite.any():
        bound = roundings * EPS[dtype] * max(1.0, np.abs(expected[finite]).max())
        assert np.abs(got[finite] - expected[finite]).max() <= bound


def check_tail(y, a, c, dtype):
    host = [cp.asnumpy(v).astype(np.float64) for v in (y, a, c)]
    with np.errstate(all="ignore"):
        expected = tail_fused(*host)
    for got, want in zip(tail_fused(y, a, c), expected, strict=True):
        agree(got, want, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(0, 5), (1, 1), (7, 1), (5, 2), (3, 31), (33, 100), (2, 1023), (9, 1024), (4, 1025), (300, 4096), (3, 8191),
     (5, 8192), (2, 16385), (2, 32768), (3, 40001), (1, 1_000_003), (20_000, 3)],
)  # fmt: skip
def test_every_template_over_odd_shapes(shape, dtype):
    y, a, c = draw(shape, dtype, 1), draw(shape[1], dtype, 2), draw(shape[1], dtype, 3)
    check_tail(cp.asarray(y), cp.asarray(a), cp.asarray(c), dtype)


@pytest.mark.parametrize("cols", [64, 1024, 8192, 40_000])
def test_misaligned_and_strided_rows_need_no_copy(cols):
    base = cp.asarray(draw((12, 2 * cols + 8)))
    a, c = cp.asarray(draw(cols + 1, seed=2)), cp.asarray(draw(cols + 1, seed=3))
    for view in (base[:, 1 : cols + 1], base[::3, 4 : cols + 4], base[::-1, :cols], base[2:3, 3 : cols + 3]):
        assert all(s.kind != "Copy" for s in tail_fused.plan(view, a[1:], c[:-1]).steps)
        check_tail(view, a[1:], c[:-1], "float32")


def test_other_layouts_are_copied_and_the_plan_says_so():
    y = cp.asarray(draw((40, 60)))
    a = cp.asarray(draw(120))[::2]
    plan = tail_fused.plan(cp.asfortranarray(y), a, a)
    assert [s.kind for s in plan.steps].count("Copy") == 2  # y, and the vector, once for both arguments
    check_tail(cp.asfortranarray(y), a, a, "float32")
    check_tail(cp.broadcast_to(y[:1], (40, 60)), a, a, "float32")


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("cols", [5, 1000, 8192, 40_000])
def test_special_values_reach_no_other_row(special, cols):
    y, a, c = draw((9, cols)), np.abs(draw(cols, seed=2)) + 0.5, draw(cols, seed=3)
    y[3, cols // 2] = special
    y[5] = -np.inf
    check_tail(cp.asarray(y), cp.asarray(a), cp.asarray(c), "float32")


@pytest.mark.parametrize("shape", [(3, 5), (1000, 7), (50_000, 3), (300, 8192), (4096, 33), (100_000, 1), (2, 100_001)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reductions_down_the_columns(shape, dtype):
    y = draw(shape, dtype, 5) + 3.0

    def stats(y):
        return y.sum(axis=0), y.mean(axis=0), y.var(axis=0), y.max(axis=0), cf.logsumexp(y, axis=0), y.min()

    expected = cf.fuse(stats)(y.astype(np.float64))
    for got, want in zip(cf.fuse(stats)(cp.asarray(y)), expected, strict=True):
        agree(got, want, dtype, roundings=64.0)


def test_column_variance_survives_a_large_mean():
    y = draw((5000, 40), seed=6) + 10_000.0
    got = cp.asnumpy(cf.fuse(lambda y: y.var(axis=0))(cp.asarray(y)))
    want = y.astype(np.float64).var(axis=0)
    # Squares of the mean would lose 8 digits; rounding of the inputs themselves is in `want` as well.
    assert np.abs(got / want - 1).max() < 1e-5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_all_layouts(dtype, transposed):
    x, w, b = draw((37, 53), dtype, 1), draw((29, 53), dtype, 2), draw(29, dtype, 3)
    expected = cf.fuse(heads.head_logsumexp.__wrapped__)(*[v.astype(np.float64) for v in (x, w, b)])
    dx, dw, db = cp.asarray(x), cp.asarray(w), cp.asarray(b)
    if transposed:
        dx, dw = cp.asfortranarray(dx), cp.asfortranarray(dw)
    agree(heads.head_logsumexp(dx, dw, db), expected, dtype, roundings=64.0)
    wide = cp.zeros((74, 60), dx.dtype)
    wide[::2, :53] = dx
    agree(heads.head_logsumexp(wide[::2, :53], dw, db), expected, dtype, roundings=64.0)


def test_results_are_written_where_asked_and_nowhere_else():
    y, a = cp.asarray(draw((30, 500))), cp.ones(500, cp.float32)
    frame = cp.full((32, 600), np.nan, cp.float32)
    expected = tail_fused(y, a, a)
    outs = (frame[1:31, 50:550], frame[1:31, 590:591])
    returned = tail_fused(y, a, a, out=outs)
    assert returned is outs
    assert cp.array_equal(frame[1:31, 50:550], expected[0])
    assert cp.array_equal(frame[1:31, 590:591], expected[1])
    frame[1:31, 50:550] = np.nan
    frame[1:31, 590] = np.nan
    assert cp.isnan(frame).all()


def test_out_over_an_input_gives_the_result_all_the_same():
    y, a = cp.asarray(draw((30, 500))), cp.ones(500, cp.float32)
    soft = cf.fuse(lambda y, a: cf.softmax(y * a, axis=1))
    expected = soft(y, a)
    soft(y, a, out=y)
    assert cp.array_equal(y, expected)


def test_arguments_change_in_place():
    y, mean, var = cp.asarray(draw((64, 300))), cp.zeros(300, cp.float32), cp.ones(300, cp.float32)
    host = [cp.asnumpy(v) for v in (y, mean, var)]
    fused = cf.fuse(lambda y, mean, var: cf.softmax(cf.batch_norm(y, mean, var, training=True), axis=1))
    agree(fused(y, mean, var), fused(*host), "float32")
    agree(mean, host[1], "float32")
    agree(var, host[2], "float32", roundings=64.0)
    with pytest.raises(ValueError, match="shares memory"):
        fused(y, mean, mean[::-1])


def test_training_counts_batches_on_the_device():
    y, mean, var = cp.asarray(draw((64, 30))), cp.zeros(30, cp.float32), cp.ones(30, cp.float32)
    count = cp.asarray(3)

    @cf.fuse
    def norm(y, mean, var, count):
        return cf.batch_norm(y, mean, var, training=True, momentum=None, num_batches_tracked=count)

    norm(y, mean, var, count)
    assert int(count) == 4
    agree(mean, cp.asnumpy(y).mean(axis=0) / 4, "float32")


def test_the_callers_stream_is_used():
    y, a = cp.asarray(draw((2000, 4096))), cp.ones(4096, cp.float32)
    expected = tail_fused(y, a, a)[0]
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        # Unordered with this stream's earlier work, the fused call would read what the copies have not written yet.
        z = cp.zeros_like(y)
        for _ in range(20):
            cp.multiply(z, 0, out=z)
        cp.copyto(z, y)
        got = tail_fused(z, a, a)[0]
    stream.synchronize()
    assert cp.array_equal(got, expected)


def test_two_threads_on_two_streams():
    y, a = cp.asarray(draw((500, 3000))), cp.ones(3000, cp.float32)
    serve = cf.fuse(tail).bind(a=a, c=a)
    expected = serve(y)[0]
    results: list[bool] = []

    def work():
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            same = [cp.array_equal(serve(y)[0], expected) for _ in range(20)]
            results.append(all(bool(s) for s in same))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [True, True]


@pytest.mark.parametrize("cols", [100, 5000, 8192, 100_000])
def test_the_same_bits_every_time_and_whatever_rows_came_along(cols):
    """Several blocks share long rows where they are few, and add in another order then."""
    y, a, c = (cp.asarray(draw(s, seed=i)) for i, s in enumerate([(600, cols), cols, cols]))
    first = tail_fused(y, a, c)
    for _ in range(20):
        assert all(cp.array_equal(p, q) for p, q in zip(tail_fused(y, a, c), first, strict=True))
    for rows in (1, 7, 130) if cols < 16384 else ():
        assert all(cp.array_equal(p, q[:rows]) for p, q in zip(tail_fused(y[:rows], a, c), first, strict=True))


def test_refresh_follows_weights():
    x, w, b = (cp.asarray(draw(s, seed=i)) for i, s in enumerate([(20, 64), (96, 64), 96]))
    serve = heads.head_sum.bind(weight=w, bias=b)
    serve(x)
    w *= 2
    serve.refresh()
    agree(serve(x), heads.head_sum(*[cp.asnumpy(v).astype(np.float64) for v in (x, w, b)]), "float32", 64.0)


def test_rows_that_are_not_finite_are_repaired_on_the_device():
    x, w, b = draw((20, 300), seed=1), draw((70, 300), seed=2), draw(70, seed=3)
    x[3, 5], x[4, 5], x[6], w[2] = np.inf, np.nan, -np.inf, 0.0
    x[8, 7] = np.inf
    w[:, 7] = np.abs(w[:, 7])
    w[:, 5] = 0.0
    dx, dw, db = cp.asarray(x), cp.asarray(w), cp.asarray(b)
    expected = heads.head_sum.__wrapped__(x, w, b)
    agree(heads.head_sum(dx, dw, db), expected, "float32", 64.0)
    agree(heads.head_sum.bind(weight=dw, bias=db)(dx), expected, "float32", 64.0)


def test_more_elements_than_a_32_bit_offset_reaches():
    rows, cols = 70_000, 32_768
    if cp.cuda.Device().mem_info[0] < 12 * rows * cols:
        pytest.skip("needs a GPU with 26 GB free")
    y = cp.zeros((rows, cols), cp.float16)
    y[-1] = cp.arange(cols) % 7
    got = cf.logsumexp(y, axis=1)
    assert float(got[0]) == pytest.approx(np.log(cols), rel=1e-3)
    last = np.log(np.exp((np.arange(cols) % 7).astype(np.float64)).sum())
    assert float(got[-1]) == pytest.approx(last, rel=1e-3)
    z = cf.softmax(y, axis=1)
    assert float(z[-1, 6]) == pytest.approx(np.exp(6 - last), rel=1e-2)
    del z
    assert float(cf.relu(y)[-1, -1]) == (cols - 1) % 7
    sums = cf.sum(y, axis=0)
    assert float(sums[6]) == 6.0
    del y
    cp.get_default_memory_pool().free_all_blocks()


def test_more_accesses_than_a_32_bit_number_counts():
    rows, cols = 70_000, 61_357  # more than 2**32 elements, and no vectors: the rows have an odd length
    if cp.cuda.Device().mem_info[0] < 5 * rows * cols:
        pytest.skip("needs a GPU with 22 GB free")
    y, r = cp.zeros((rows, cols), cp.float16), cp.zeros((rows, 1), cp.float16)
    y[-1], r[-1] = cp.arange(cols) % 7, 1
    z = cf.fuse(lambda y, r: y + r)(y, r)
    assert cp.array_equal(z[-1], y[-1] + 1)
    assert float(z[:-1].max()) == 0.0
    del y, z
    cp.get_default_memory_pool().free_all_blocks()


def test_one_launch_programs_can_be_captured():
    y, a = cp.asarray(draw((100, 2000))), cp.ones(2000, cp.float32)
    soft = cf.fuse(lambda y, a: cf.softmax(y * a, axis=1))
    out = cp.empty_like(y)
    expected = soft(y, a)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        soft(y, a, out=out)
        stream.begin_capture()
        soft(y, a, out=out)
        graph = stream.end_capture()
        out.fill(np.nan)
        graph.launch(stream)
    stream.synchronize()
    assert cp.array_equal(out, expected)


def test_mixing_memories_is_refused():
    with pytest.raises(TypeError, match="different devices"):
        tail_fused(cp.ones((2, 3), cp.float32), np.ones(3, np.float32), np.ones(3, np.float32))
    with pytest.raises(TypeError, match="out"):
        cf.fuse(lambda x: x + 1)(cp.ones(3), out=np.empty(3))


def test_torch_tensors_go_in_and_come_back():
    torch = pytest.importorskip("torch", reason="needs a GPU and torch")
    x = torch.randn(30, 40, device="cuda")
    y = cf.softmax(x, axis=1)
    assert isinstance(y, torch.Tensor)
    assert y.device == x.device
    assert torch.allclose(y, torch.softmax(x, 1), atol=1e-6)
    with pytest.raises(TypeError, match="detach"):
        cf.softmax(x.requires_grad_(), axis=1)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs a GPU and ml_dtypes")
    y = draw((30, 500)).astype(ml_dtypes.bfloat16)
    got = cp.asnumpy(cf.softmax(cp.asarray(y), axis=1))
    assert got.dtype == ml_dtypes.bfloat16
    want = cf.softmax(y.astype(np.float64), axis=1)
    assert np.abs(got.astype(np.float64) - want).max() <= want.max() * 2.0**-8


@pytest.mark.parametrize("precision", ["highest", "high", "medium", "ieee"])
def test_precisions_are_as_accurate_as_they_say(precision):
    x, w = cp.asarray(draw((64, 512), seed=1)), cp.asarray(draw((96, 512), seed=2))
    with cf.precision(precision):
        got = cp.asnumpy(cf.linear(x, w)).astype(np.float64)
    host = [cp.asnumpy(v).astype(np.float64) for v in (x, w)]
    error = np.abs(got - host[0] @ host[1].T) / (np.abs(host[0]) @ np.abs(host[1]).T)
    # Unit roundoffs of both operands: 24, 11 (TF32) and 8 (bfloat16) bits; float32 accumulates over 512 products.
    bound = {"highest": 512 * 2.0**-24, "ieee": 512 * 2.0**-24, "high": 2 * 2.0**-11, "medium": 2 * 2.0**-8}[precision]
    assert error.max() <= bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_16_bits_add_up_in_float32(dtype):
    """Random chains found partial sums that cuBLAS kept in 16 bits: long rows, few of them."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs a GPU and ml_dtypes")
    kind, half_ulp = (np.float16, 2.0**-11) if dtype == "float16" else (ml_dtypes.bfloat16, 2.0**-8)
    for rows, inner in ((13, 1023), (13, 4096), (64, 8192)):
        x = draw((rows, inner), "float32", seed=inner).astype(kind)
        wide = x.astype(np.float64)
        got = cp.asnumpy(cf.fuse(lambda x: x @ x.T)(cp.asarray(x))).astype(np.float64)
        expected, size = wide @ wide.T, np.abs(wide) @ np.abs(wide).T
        assert (np.abs(got - expected) <= (inner + 2) * 2.0**-24 * size + half_ulp * np.abs(expected)).all()


def test_sums_of_several_products_are_repaired_too():
    """Two linear maps in a row collapse to two vectors; a row that is not finite needs both products as written."""
    x, a, b = draw((9, 30), seed=1), draw((20, 30), seed=2), draw((15, 20), seed=3)
    x[2, 3], x[4, 4] = np.inf, np.nan
    chain = cf.fuse(lambda x, a, b: (x @ a.T @ b.T).sum(axis=1))
    agree(chain(*map(cp.asarray, (x, a, b))), chain.__wrapped__(x, a, b), "float32", 256.0)


def test_a_guarded_sum_that_follows_no_reduction_of_its_own_step():
    def chain(v0, v4, v5):
        v6 = v5.sum(axis=-1, keepdims=True)
        v9 = (v6 @ v4 + v4).sum(axis=1, keepdims=True)
        return v6, v9, v0 + v9

    arrays = draw((2, 2), seed=1), draw((1, 2), seed=2), draw((2, 2), seed=3)
    arrays[2][1, 1] = np.inf
    for got, want in zip(cf.fuse(chain)(*map(cp.asarray, arrays)), chain(*arrays), strict=True):
        agree(got, want, "float32")


def test_a_prepared_vector_is_read_the_other_way_round():
    """Random chains found a copy of such a value that took its 16-bit dtype, not the one it is stored in."""

    def chain(v0, v5):
        v9 = (v0 @ v0.T).sum(axis=-1)
        return v5 @ v0.T + v9

    v0, v5 = draw((2, 1), "float16", 1), draw((1, 1), "float16", 2)
    expected = chain(v0.astype(np.float64), v5.astype(np.float64))
    d0, d5 = cp.asarray(v0), cp.asarray(v5)
    agree(cf.fuse(chain).bind(v0=d0)(d5), expected, "float16", 16.0)
    transposed = cf.fuse(lambda x, y: np.exp(x.T) + y).bind(x=cp.asarray(draw((3, 4), "float16")))
    expected = np.exp(draw((3, 4), "float16").T.astype(np.float64))
    agree(transposed(cp.zeros((4, 3), "float16")), expected, "float16", 16.0)
