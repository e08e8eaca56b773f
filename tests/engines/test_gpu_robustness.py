"""On a GPU: the same bits every time and everywhere, arrays past 32-bit offsets, and errors that leave no trace."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse import heads
from cupyfuse.cuda import compile as compiling

cp = pytest.importorskip("cupy", reason="needs a GPU: CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cp.cuda.is_available(), reason="needs a GPU")]

Call = Callable[[], Any]


def draw(shape: Any, dtype: str = "float32", seed: int = 0) -> Any:
    return cp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def bits(array: Any) -> Any:
    """The array's bits, so that NaN equals NaN and zeros have signs."""
    return cp.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def results_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple) else [value]


def same(one: Any, other: Any) -> bool:
    pairs = zip(results_of(one), results_of(other), strict=True)
    return all(a.shape == b.shape and bool((bits(a) == bits(b)).all()) for a, b in pairs)


# What is repeated ---------------------------------------------------------------------------------------------------


@cf.fuse
def rows(y: Any, a: Any) -> Any:
    """Two stages over the rows, with an input for each column, and a number for each row."""
    return cf.softmax(y * a, axis=1), cf.logsumexp(y, axis=1)


@cf.fuse
def one_stage(y: Any) -> Any:
    return y.sum(axis=1), y.max(axis=1), y.var(axis=1), cf.logsumexp(y, axis=1)


@cf.fuse
def columns(y: Any) -> Any:
    return y.sum(axis=0), y.mean(axis=0), y.var(axis=0), cf.logsumexp(y, axis=0)


def of_rows(cols: int, dtype: str = "float32", count: int = 700) -> Call:
    y, a = draw((count, cols), dtype, 1), draw(cols, dtype, 2)
    return lambda: rows(y, a)


def of_one_stage(cols: int) -> Call:
    y = draw((300, cols), seed=3)
    return lambda: one_stage(y)


def of_columns(shape: tuple[int, int]) -> Call:
    y = draw(shape, seed=4)
    return lambda: columns(y)


def of_head(head: Any, bound: bool, size: tuple[int, int, int] = (256, 1024, 2048), **options: Any) -> Call:
    count, inner, outer = size
    x, weight, bias = draw((count, inner), seed=5), draw((outer, inner), seed=6) / 32, draw(outer, seed=7)
    named = {"weight": weight, "bias": bias}
    if head is heads.head_softmax:
        named |= {"running_mean": draw(outer, seed=8), "running_var": cp.abs(draw(outer, seed=9)) + 0.5}
        named |= {"gamma": draw(outer, seed=10), "beta": draw(outer, seed=11), "scale": draw(1, seed=12)}
    if bound:
        serve = head.bind(**named)
        return lambda: serve(x)
    return lambda: head(x, **named, **options)


WORK: dict[str, Callable[[], Call]] = {
    **{f"rows of {n}": lambda n=n: of_rows(n) for n in (33, 100, 1000, 4096, 8191, 8192, 40_000)},
    "rows of 8192 float16": lambda: of_rows(8192, "float16"),
    "rows of 1000 float64": lambda: of_rows(1000, "float64"),
    **{f"one stage of {n}": lambda n=n: of_one_stage(n) for n in (31, 5000, 200_000)},
    # Rows shared among blocks, whose partial results another kernel merges.
    "columns 100000x7": lambda: of_columns((100_000, 7)),
    "columns 5000x300": lambda: of_columns((5000, 300)),
    "columns 64x8192": lambda: of_columns((64, 8192)),
    **{
        f"{head.__name__}{', bound' if bound else ''}": lambda head=head, bound=bound: of_head(head, bound)
        for head in (heads.head_sum, heads.head_logsumexp, heads.head_softmax)
        for bound in (False, True)
    },
}


@pytest.fixture(params=WORK)
def work(request: pytest.FixtureRequest) -> Call:
    return WORK[request.param]()


def test_the_same_bits_a_hundred_times(work: Call) -> None:
    first = work()
    assert all(same(work(), first) for _ in range(100))


def test_the_same_bits_on_two_streams_at_once(work: Call) -> None:
    expected = work()
    cp.cuda.Device().synchronize()
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    found: list[Any] = []
    for _ in range(25):
        for stream in streams:
            with stream:
                found.append(work())
    for stream in streams:
        stream.synchronize()
    assert all(same(each, expected) for each in found)


def test_the_same_bits_in_eight_threads_at_once(work: Call) -> None:
    expected = work()
    cp.cuda.Device().synchronize()
    together = threading.Barrier(8)
    verdicts: list[bool] = []

    def run() -> None:
        with cp.cuda.Stream(non_blocking=True) as stream:
            together.wait()
            found = [work() for _ in range(10)]
            stream.synchronize()
            verdicts.append(all(same(each, expected) for each in found))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 8


def test_threads_that_meet_a_function_at_once_get_what_it_computes() -> None:
    """Tracing, compiling and loading by several threads, of shapes that are new to all of them."""
    fresh = cf.fuse(lambda y: cf.softmax(y * 1.25, axis=1))
    arrays = [draw((20, n)) for n in (5, 70, 1500, 9000)]
    expected = [cf.softmax(y * 1.25, axis=1) for y in arrays]
    cp.cuda.Device().synchronize()
    together = threading.Barrier(8)
    worst: list[float] = []

    def run(number: int) -> None:
        together.wait()
        for i in range(len(arrays)):
            at = (number + i) % len(arrays)
            worst.append(float(abs(fresh(arrays[at]) - expected[at]).max()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == 32 and max(worst) < 1e-6


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("cols", [1, 7, 32, 100, 1000, 1024, 1025, 4096, 8192, 8200, 33_000])
def test_a_row_does_not_depend_on_the_others(cols: int, dtype: str) -> None:
    """Nor on its place, where rows are whole vectors; on its place in a vector where they are not."""
    y, a = draw((208, cols), dtype, 1), draw(cols, dtype, 2)
    whole = [*rows(y, a), *one_stage(y)]
    groups = np.arange(208).reshape(-1, 1 if cols % 8 == 0 else 8)
    order = cp.asarray(np.random.default_rng(3).permutation(groups).ravel())
    disturbed = y.copy()
    disturbed[::2] = cp.nan
    disturbed[2::4] = cp.inf
    for other, at in ((y[order], order), (y[16:17], slice(16, 17)), (y[104:], slice(104, None)), (y[:9], slice(9))):
        for got, want in zip([*rows(other, a), *one_stage(other)], whole, strict=True):
            assert same(got, want[at])
    for got, want in zip([*rows(disturbed, a), *one_stage(disturbed)], whole, strict=True):
        assert same(got[1::2], want[1::2])


# Outputs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [64, 1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (3, 5), (33, 100), (7, 1023), (9, 1024), (5, 1025), (40, 4096), (3, 8191), (150, 8192), (2, 40_001)],
)
def test_every_element_of_a_result_is_written_and_nothing_beside_it(
    shape: tuple[int, int], dtype: str, shift: int
) -> None:
    """Results go to the middle of memory that holds NaN: aligned for vectors, and one element off."""
    y, a = draw(shape, dtype, 1), draw(shape[1], dtype, 2)

    def framed(wanted: tuple[int, ...]) -> tuple[Any, Any]:
        size = math.prod(wanted)
        frame = cp.full(size + 128, cp.nan, dtype)
        return frame, frame[shift : shift + size].reshape(wanted)

    pointwise = cf.fuse(lambda y, a: cf.relu(y) + a)
    for function, arguments in ((rows, (y, a)), (one_stage, (y,)), (columns, (y,)), (pointwise, (y, a))):
        expected = results_of(function(*arguments))
        frames, outs = zip(*(framed(each.shape) for each in expected), strict=True)
        function(*arguments, out=outs)
        for frame, out, want in zip(frames, outs, expected, strict=True):
            # Another alignment may sum in another order.
            wide = want.astype("float64")
            assert bool((abs(out.astype("float64") - wide) <= 1e-2 * (1 + abs(wide))).all())
            assert not bool(cp.isnan(out).any())
            assert bool(cp.isnan(frame[:shift]).all()) and bool(cp.isnan(frame[shift + out.size :]).all())


# Sizes --------------------------------------------------------------------------------------------------------------


def need(nbytes: int) -> None:
    if cp.cuda.Device().mem_info[0] < nbytes:
        pytest.skip(f"needs a GPU with {nbytes / 1e9:.0f} GB free")


def repeated(cols: int) -> tuple[Any, Any]:
    """Rows of float16, over 2**31 elements in all, and the block that they repeat: of a prime number of rows, or, so
    that rows begin at the same place in a vector, of eight times a prime; more than 4096, from which on other threads
    compute rows."""
    period = 4099 if cols % 8 == 0 else 8 * 521
    count = (2**31 // cols // period + 1) * period
    need(8 * count * cols)  # the array, a result as large, and what compares them
    block = draw((period, cols), "float16", 1)
    y = cp.empty((count, cols), cp.float16)
    y.reshape(-1, block.size)[...] = block.reshape(1, -1)
    assert y.size > 2**31
    return y, block


@pytest.fixture
def returned_memory() -> Any:
    yield
    cp.get_default_memory_pool().free_all_blocks()


def repeats(got: Any, block: Any) -> bool:
    return bool((bits(got).reshape(-1, block.size) == bits(block).reshape(1, -1)).all())


@pytest.mark.usefixtures("returned_memory")
@pytest.mark.parametrize("cols", [33, 1024, 8192, 100_001])
def test_results_of_more_than_2_to_the_31_elements(cols: int) -> None:
    """Each row is that of a small call, to the bit: whatever its offset."""
    y, block = repeated(cols)
    a = draw(cols, "float16", 2)
    for function, arguments in ((lambda y: cf.relu(y), ()), (lambda y, a: cf.softmax(y * a, axis=1), (a,))):
        fused = cf.fuse(function)
        want = fused(block, *arguments)
        out = cp.full(y.shape, cp.nan, cp.float16)
        fused(y, *arguments, out=out)
        assert repeats(out, want)
        del out
    for got, want in zip(one_stage(y), one_stage(block), strict=True):
        assert repeats(got, want)


@pytest.mark.usefixtures("returned_memory")
@pytest.mark.parametrize("cols", [5, 1024, 40_000])
def test_columns_of_more_than_2_to_the_31_elements(cols: int) -> None:
    y, block = repeated(cols)
    y[-1, -1] = 1000.0

    @cf.fuse
    def extremes(y: Any) -> Any:
        return y.max(axis=0), y.min(axis=0), y.mean(axis=0)

    top, bottom, mean = extremes(y)
    assert float(top[-1]) == 1000.0
    assert same(top[:-1], block.max(axis=0)[:-1]) and same(bottom, block.min(axis=0))
    wide = block.astype(cp.float64).mean(axis=0)
    assert float(abs(mean.astype(cp.float64) - wide)[:-1].max()) < 2e-3


@pytest.mark.usefixtures("returned_memory")
def test_rows_longer_than_2_to_the_31_elements() -> None:
    """The second row begins beyond a 32-bit offset, and each of them ends beyond one."""
    cols = 2**31 + 64
    need(8 * 2 * cols)
    y = cp.zeros((2, cols), cp.float16)
    y[1, -1], y[1, 2**31 - 1] = 20.0, 19.0
    top, total, logarithm = cf.fuse(
        lambda y: (y.max(axis=1), y.astype("float32").sum(axis=1), cf.logsumexp(y, axis=1))
    )(y)
    assert [float(v) for v in top] == [0.0, 20.0] and [float(v) for v in total] == [0.0, 39.0]
    expected = [math.log(cols), math.log(math.exp(20.0) + math.exp(19.0) + cols - 2)]
    np.testing.assert_allclose(logarithm.get().astype(np.float64), expected, rtol=2e-3)
    out = cp.full(y.shape, cp.nan, cp.float16)
    cf.fuse(lambda y: cf.relu(y + 1))(y, out=out)
    assert float(out[1, -1]) == 21.0 and float(out[1, 2**31 - 1]) == 20.0
    assert float(out.min()) == 1.0 and int((out != 1).sum()) == 2


# Failures -----------------------------------------------------------------------------------------------------------


def test_a_call_without_memory_for_its_results_can_be_made_again() -> None:
    soft = cf.fuse(lambda y: cf.softmax(y * 3, axis=1))
    y = draw((2000, 3000))
    for ready in (False, True):
        pool = cp.cuda.MemoryPool()
        pool.set_limit(size=1 << 20)
        with cp.cuda.using_allocator(pool.malloc):
            for _ in range(2):
                with pytest.raises(MemoryError, match="Out of memory allocating"):
                    soft(y)
            assert pool.used_bytes() == 0
            pool.set_limit(size=1 << 30)
            got = soft(y)
        assert float(abs(got.sum(axis=1) - 1).max()) < 1e-5, ready
        del got


def test_without_memory_for_what_lies_between_nothing_is_written() -> None:
    """The product needs a workspace: results and arguments that change are as they were, and then as they should be."""

    @cf.fuse
    def chain(x: Any, w: Any, mean: Any, var: Any) -> Any:
        return cf.softmax(cf.batch_norm(x @ w.T, mean, var, training=True), axis=1)

    x, w = draw((500, 64), seed=1), draw((3000, 64), seed=2)
    mean, var, out = cp.zeros(3000, cp.float32), cp.ones(3000, cp.float32), cp.full((500, 3000), cp.nan, cp.float32)
    statistics = mean.copy(), var.copy()
    expected = chain(x, w, *statistics)
    for fresh in (chain, cf.fuse(chain.__wrapped__)):
        pool = cp.cuda.MemoryPool()
        pool.set_limit(size=1 << 20)
        with cp.cuda.using_allocator(pool.malloc), pytest.raises(MemoryError, match="Out of memory allocating"):
            fresh(x, w, mean, var, out=out)
        assert bool(cp.isnan(out).all()) and not bool(mean.any()) and bool((var == 1).all())
    chain(x, w, mean, var, out=out)
    for got, want in zip((out, mean, var), (expected, *statistics), strict=True):
        assert float(abs(got - want).max()) < 1e-6


def test_a_binding_without_memory_to_prepare_can_be_used_later() -> None:
    x, weight, bias = draw((64, 512), seed=1), draw((2000, 512), seed=2), draw(2000, seed=3)
    expected = heads.head_sum(x, weight, bias)
    serve = heads.head_sum.bind(weight=weight, bias=bias)
    pool = cp.cuda.MemoryPool()
    pool.set_limit(size=512)
    with cp.cuda.using_allocator(pool.malloc), pytest.raises(MemoryError):
        serve(x)
    # Sums of 10^6 products of about 1.
    assert float(abs(serve(x) - expected).max()) < 0.1


def test_a_kernel_that_does_not_compile_leaves_the_library_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    y, out = draw((30, 500)), cp.full((30, 500), cp.nan, cp.float32)
    soft = cf.fuse(lambda y: cf.softmax(y * 1.0625, axis=1))
    inlined = compiling.inlined
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "inlined", lambda source: inlined(source) + "\nthis is no CUDA C")
        for _ in range(2):
            with pytest.raises(
                cf.EngineError, match=r"could not be compiled and loaded on GPU 0[^$]*this is no CUDA C"
            ):
                soft(y, out=out)
    assert bool(cp.isnan(out).all())
    soft(y, out=out)
    assert float(abs(out - cf.softmax(y * 1.0625, axis=1)).max()) < 1e-6


def test_a_kernel_for_another_gpu_leaves_the_library_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A binary that this GPU cannot load: the error says so, and CUDA goes on, without what is in the cache now."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))

    def for_another(*args: Any, **named: Any) -> Any:
        return b"no kernel" + bytes(64), None

    y = draw((30, 500))
    soft = cf.fuse(lambda y: cf.softmax(y * 1.03125, axis=1))
    with monkeypatch.context() as patch:
        patch.setattr(cp.cuda.compiler, "compile_using_nvrtc", for_another)
        with pytest.raises(cf.EngineError, match="compute capability"):
            soft(y)
    assert float(abs(soft(y).sum(axis=1) - 1).max()) < 1e-5
