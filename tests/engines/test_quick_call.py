"""The generated call of a plan: what it allocates, how long that lives, on which device and stream it launches."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import HOST

import cupyfuse as cf
from cupyfuse.cuda.runtime import CupyRuntime
from cupyfuse.engines.cuda import CudaExecutable, load
from cupyfuse.engines.quick_call import quick_call


class Memory:
    def __init__(self, ptr: int):
        self.ptr = ptr


class Recorder:
    """A runtime that hands out addresses, and what was launched on which stream."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.stream = lambda: 7
        self.address = lambda array: array
        self.memory: Any = None
        self.alive: list[bool] = []
        self.fails = False
        self.current = True
        self.held: list[Any] = []
        self.is_current = lambda: self.current

    def hold(self, *memory: Any) -> None:
        self.held += memory

    def made_current(self) -> contextlib.AbstractContextManager[Any]:
        raise AssertionError("the device is current")

    def workspace(self, nbytes: int, held: bool = True) -> Memory:
        assert not held
        memory = Memory(10_000 + nbytes)
        self.memory = weakref.ref(memory)
        return memory

    def launch(self, addresses: list[Any], stream: int) -> None:
        if self.fails:
            raise RuntimeError("no luck")
        self.launched.append((addresses, stream))
        self.alive.append(self.memory is not None and self.memory() is not None)


def test_addresses_follow_each_other() -> None:
    runtime: Any = Recorder()
    call = quick_call(runtime, 2, [lambda: 30, lambda: 40], True, 512, [0, 256], runtime.launch)
    assert call([10, 20], [0.5]) == [30, 40]
    assert runtime.launched == [([10, 20, 30, 40, [0.5], 10_512, 10_768], 7)]
    assert runtime.alive == [True]
    assert runtime.held.pop() is runtime.memory() and runtime.held == [30, 40]
    assert runtime.memory() is None
    into = quick_call(runtime, 1, [None, None], False, 0, [], runtime.launch)
    assert into([10], (), [50, 60]) == [50, 60]
    assert runtime.launched.pop() == ([10, 50, 60], 7)
    plain = quick_call(runtime, 0, [lambda: 30], False, 0, [], runtime.launch)
    assert plain([], ()) == [30]
    assert runtime.launched[1] == ([30], 7)


def test_what_is_allocated_is_held_on_streams_alone() -> None:
    runtime: Any = Recorder()
    call = quick_call(runtime, 1, [lambda: 30, None], False, 512, [0], runtime.launch)
    call([10], (), [40])
    assert runtime.held == [30, runtime.memory()]
    runtime.held.clear()
    runtime.stream = lambda: 0  # nothing captures the default stream
    quick_call(runtime, 1, [lambda: 30, None], False, 512, [0], runtime.launch)([10], (), [40])
    assert not runtime.held and len(runtime.launched) == 2


def test_a_call_that_fails_holds_nothing() -> None:
    runtime: Any = Recorder()
    runtime.hold = None
    call = quick_call(runtime, 1, [lambda: 30], False, 512, [0], runtime.launch)
    runtime.fails = True
    with pytest.raises(RuntimeError, match="no luck"):
        call([10], ())
    assert runtime.memory() is None
    runtime.fails = False
    assert call([10], ()) == [30]
    assert runtime.launched == [([10, 30, 10_512], 7)]


def softmax_of_scaled(x: Any, a: Any) -> Any:
    return cf.softmax(x * a, axis=1)


@contextlib.contextmanager
def executable(rng: np.random.Generator) -> Iterator[tuple[CudaExecutable, list[Any], Any]]:
    """A plan on the host's kernels, its arguments, and its result."""
    x, a = rng.standard_normal((5, 40)).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    function = cf.fuse(softmax_of_scaled)
    with HOST.active():
        arrays = [HOST.array(x), HOST.array(a)]
        plan = function.plan(*arrays)
        yield load(plan, arrays, HOST.runtime), arrays, function.__wrapped__(x.astype(np.float64), a)


def test_a_call_with_outs_gives_the_same(rng: np.random.Generator) -> None:
    with executable(rng) as (execute, arrays, want):
        target = HOST.xp.empty((5, 40), np.float32)
        for outs in (None, [None], [target]):
            (got,) = execute(arrays, outs)
            assert (got is target) == (outs is not None and outs[0] is target)
            np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5)


def test_results_with_other_rows_are_written_where_the_caller_gets_them(rng: np.random.Generator) -> None:
    """Rows of images for a matrix that is the same for all, and several shapes of one value."""
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)

    def views(x: Any, c: Any) -> Any:
        y = x * c
        return y, y.reshape(6, 20), y.reshape(-1), y.reshape(6, 20).T, y + 1

    with HOST.active():
        arrays = [HOST.array(x), HOST.array(x[0, 0])]
        function = cf.fuse(lambda x, c: x * c)
        execute = load(function.plan(*arrays), arrays, HOST.runtime)
        assert execute.quick is not None
        np.testing.assert_array_equal(execute(arrays)[0], x * x[0, 0])
        results = cf.fuse(views)(*arrays)
        for k, want in enumerate(views(x, x[0, 0])):
            np.testing.assert_array_equal(results[k], want)
            results[k][...] = 0  # none is a view of another


def test_another_device_is_made_current_and_left(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, order = HOST.runtime, []
    current = True

    @contextlib.contextmanager
    def made_current() -> Iterator[None]:
        nonlocal current
        order.append("made current")
        current = True
        try:
            yield
        finally:
            current = False
            order.append("left")

    monkeypatch.setattr(runtime, "is_current", lambda: current, raising=False)
    monkeypatch.setattr(runtime, "made_current", made_current, raising=False)
    with executable(rng) as (execute, arrays, want):
        order.clear()
        current = True
        execute(arrays)
        assert not order
        current = False
        for outs in (None, [None]):
            np.testing.assert_allclose(np.asarray(execute(arrays, outs)[0]), want, rtol=1e-5)
        assert order == ["made current", "left"] * 2


def test_misaligned_views_are_read_where_they_are(rng: np.random.Generator) -> None:
    """By one executable, in turn: the variant is chosen by the addresses of each call."""
    x, a = rng.standard_normal(5 * 40 + 8).astype(np.float32), rng.standard_normal(40).astype(np.float32)
    with HOST.active():
        flat, weights = HOST.array(x), HOST.array(a)
        aligned = flat[:200].reshape(5, 40)
        plan = cf.fuse(softmax_of_scaled).plan(aligned, weights)
        execute = load(plan, [aligned, weights], HOST.runtime)
        for start in (0, 1, 2, 4, 3, 0, 8):
            view = flat[start : start + 200].reshape(5, 40)
            want = softmax_of_scaled(x[start : start + 200].reshape(5, 40).astype(np.float64), a)
            np.testing.assert_allclose(np.asarray(execute([view, weights])[0]), want, rtol=1e-5)


def test_memory_is_held_while_a_graph_is_captured() -> None:
    stream = SimpleNamespace(ptr=0, is_capturing=lambda: True)
    runtime: Any = object.__new__(CupyRuntime)
    runtime._current_stream, runtime._captured = (lambda: stream), []
    runtime._cupy = SimpleNamespace(ndarray=lambda shape, dtype: Memory(1), cuda=SimpleNamespace(alloc=Memory))
    empty = runtime.allocator((2, 3), np.float32)
    assert isinstance(empty(), Memory) and runtime.workspace(8).ptr == 8
    assert not runtime._captured, "nothing captures the default stream"
    stream.ptr = 5
    held = [empty(), runtime.workspace(16)]
    assert runtime._captured == held and runtime.stream() == 5
    stream.is_capturing = lambda: False
    empty()
    assert runtime._captured == held


def test_launches_are_freed_with_their_plan(rng: np.random.Generator) -> None:
    """Without the garbage collector: generated functions are in no cycle with what they refer to."""
    gc.disable()
    try:
        with executable(rng) as (execute, arrays, _):
            execute(arrays)
            references = [weakref.ref(execute.quick), weakref.ref(execute._enqueue)]
            execute.quick = execute._quick_into = None
            execute._enqueue = None  # type: ignore[assignment]
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
