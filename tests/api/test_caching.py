"""What a trace depends on: one for every kind of call, never a stale one, safe among threads, keeping nothing alive."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import Engine, assert_equal, dtype_of, normal

import cupyfuse as cf

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@cf.fuse
def scaled(x: Any, factor: float = 2.0) -> Any:
    return x * factor


def counted() -> tuple[dict[Any, Any], cf.Fused]:
    """A fused function, and its plans."""

    def function(x: Any, k: Any = 1.0) -> Any:
        return x * 2

    fused = cf.fuse(function)
    return fused._runnables, fused


def test_a_trace_serves_every_call_of_its_kind() -> None:
    traces, fused = counted()
    for _ in range(3):
        fused(X)
        fused(X.copy() + 1)
    assert len(traces) == 1
    fused(X.astype(np.float64))
    fused(X[:2])
    fused(X, 2.0)
    fused(X, 2)
    fused(X, True)
    fused(X, "a")
    fused(X, (1, 2))
    assert len(traces) == 8
    for k in (2.0, 3.0, 0.0, 2, True, "a", (1, 2)):
        fused(X, k)
    assert len(traces) == 8, "another float needs no trace"


def test_constants_that_compare_equal_are_different_traces() -> None:
    fused = cf.fuse(lambda x, k: x / k)
    with np.errstate(all="ignore"):
        assert fused(np.ones(1), 0.0) == np.inf and fused(np.ones(1), -0.0) == -np.inf
    kinds = cf.fuse(lambda x, k: x + (10 if k is True else 20 if isinstance(k, int) else 30))
    assert [kinds(np.zeros(1), k)[0] for k in (True, 1, 1.0)] == [10, 20, 30]
    nan = cf.fuse(lambda x, k: x * k)
    assert np.isnan(nan(np.ones(1), float("nan"))[0])


@dataclass
class Node:
    value: Any
    child: Any = None


def test_objects_among_the_arguments_are_never_stale() -> None:
    """Their state may change, at any depth, and their addresses may be used again."""
    deep = cf.fuse(lambda node, x: x * node.child.value)
    assert [deep(Node(0, Node(float(k))), np.ones(1))[0] for k in range(20)] == list(range(20))
    node = Node(0, Node(2.0))
    assert deep(node, np.ones(1)) == 2
    node.child.value = 3.0
    assert deep(node, np.ones(1)) == 3
    listed = cf.fuse(lambda node, x: x * node.value[0])
    node = Node([2.0])
    assert listed(node, np.ones(1)) == 2
    node.value[0] = 5.0
    assert listed(node, np.ones(1)) == 5


def test_which_arrays_are_the_same_object_is_part_of_the_trace(engine: Engine) -> None:
    """A function may ask whether they are."""
    fused = cf.fuse(lambda x, y: x * 2 if x is y else x + y + 1)
    a, b = engine.array(X), engine.array(X)
    for x, y, expected in ((a, a, X * 2), (a, b, X * 2 + 1), (b, b, X * 2), (a, a[:], X * 2 + 1)):
        assert_equal(engine.host(fused(x, y)), expected)
    assert len(fused._runnables) == 2
    nested = cf.fuse(lambda x, held: x * 2 if x is held["y"][0] else x)
    assert_equal(engine.host(nested(a, {"y": (a,)})), X * 2)
    assert_equal(engine.host(nested(a, {"y": (b,)})), X)
    around = cf.fuse(lambda x: x * 2 if x is a else x)
    for x, expected in ((a, X * 2), (b, X), (a, X * 2)):
        assert_equal(engine.host(around(x)), expected)
    spec = cf.spec(X.shape, "float32")
    assert len(fused.plan(spec, spec).graph.outputs[0].inputs) == 2, "a spec may stand for several arrays"


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_bound_array_that_is_an_argument_as_well_is_read_in_each_call(name: str) -> None:
    a, b = np.ones(3), np.full(3, 5.0)
    serve = cf.fuse(lambda x, y: np.exp(x) if x is y else x + y).bind(**{name: a})
    for k in (1.0, 2.0):
        a[:] = k
        assert_equal(serve(a), np.exp(a))
    assert_equal(serve(b), a + b)
    assert_equal(serve(a), np.exp(a))


def test_arrays_of_other_libraries_may_be_the_same_object_too() -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.ones(3), torch.ones(3)
    fused = cf.fuse(lambda x, y: x * 4 if x is y else x + y)
    assert [float(fused(x, y)[0]) for x, y in ((a, a), (a, b), (a, a))] == [4, 2, 4]
    serve = fused.bind(y=a)
    assert [float(serve(x)[0]) for x in (a, b, a)] == [4, 2, 4]


@pytest.mark.parametrize(
    "value", [np.dtype("f4"), np.float32, "float32", (1, 2), frozenset({1}), b"a", range(3), None, np, np.exp, Ellipsis]
)
def test_constants_of_many_kinds(value: Any) -> None:
    traces, fused = counted()
    for _ in range(2):
        assert_equal(fused(X, value), X * 2)
    assert len(traces) == 1


def test_precision_is_part_of_the_trace() -> None:
    _, fused = counted()
    fused(X)
    with cf.precision("high"):
        fused(X)
        assert fused.plan(X).precision == "high"
        with cf.precision("medium"):
            assert fused.plan(X).precision == "medium"
        assert fused.plan(X).precision == "high"
    assert fused.plan(X).precision == "highest"
    assert cf.fuse(lambda x: x * 2, precision="ieee").plan(X).precision == "ieee"
    with pytest.raises(RuntimeError, match="leave"), cf.precision("high"):
        raise RuntimeError("leave")
    assert fused.plan(X).precision == "highest", "an exception restores the precision too"


def test_precision_belongs_to_its_thread() -> None:
    seen: list[str] = []
    with cf.precision("medium"):
        thread = threading.Thread(target=lambda: seen.append(scaled.plan(X).precision))
        thread.start()
        thread.join()
    assert seen == ["highest"]


def test_threads_share_a_function(rng: np.random.Generator) -> None:
    fused = cf.fuse(lambda x, w: cf.logsumexp(x @ w.T, axis=1))
    w = normal(rng, (9, 5), "float64")
    inputs = [normal(rng, (1 + k % 7, 5), "float64") for k in range(64)]
    bound = fused.bind(w=w)
    for call in (lambda x: fused(x, w), bound):
        with ThreadPoolExecutor(8) as pool:
            for x, result in zip(inputs, pool.map(call, inputs), strict=True):
                assert_equal(result, np.asarray(fused(x, w)))


def test_the_cache_holds_no_array() -> None:
    fused = cf.fuse(lambda x, w: (x @ w.T).sum(axis=1))
    x, w = np.ones((3, 4)), np.ones((5, 4))
    result = fused(x, w)
    references = [weakref.ref(a) for a in (x, w, result)]
    del x, w, result
    gc.collect()
    assert [r() for r in references] == [None] * 3


def test_the_cache_is_bounded() -> None:
    fused = cf.fuse(lambda x, k: x + k)
    for k in range(1100):
        fused(np.ones(1), k)
    assert len(fused._runnables) <= 1024


def test_dtypes_of_results(rng: np.random.Generator) -> None:
    for name in ("float16", "bfloat16", "float32", "float64"):
        assert scaled(normal(rng, (2, 2), name)).dtype == dtype_of(name)


def test_the_array_that_is_changed_may_be_another_argument_too(engine: Engine) -> None:
    def shifted(x: Any, y: Any, to: Any) -> Any:
        np.subtract(x, y.mean(axis=0), out=to)
        return to.sum() + y.sum()

    fused = cf.fuse(shifted)
    for places in ((0, 0, 0), (0, 1, 0), (0, 1, 2), (1, 0, 0), (0, 0, 1), (0, 0, 0)):
        arrays, expected = ([make(X + i) for i in range(3)] for make in (engine.array, np.array))
        assert_equal(engine.host(fused(*(arrays[p] for p in places))), shifted(*(expected[p] for p in places)))
        for a, b in zip(arrays, expected, strict=True):
            assert_equal(engine.host(a), b)
    a, b = engine.array(X), np.array(X)
    fused.bind(y=a)(a, a)
    shifted(b, b, b)
    assert_equal(engine.host(a), b)
