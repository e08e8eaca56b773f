"""`bind`: what depends on fixed arrays alone is prepared once; everything else stays as it was."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support import FLOATS, HEADS, Engine, Head, assert_close, assert_equal, compute, dtype_of, normal, unit

import cupyfuse as cf


def function(x: Any, w: Any, b: Any, slope: float = 0.5) -> Any:
    return cf.leaky_relu((x @ w.T + b).sum(axis=1), slope)


@pytest.fixture
def arguments(rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    return [normal(rng, shape, "float64") for shape in ((6, 5), (4, 5), (4,))]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_bound_heads_are_the_heads(engine: Engine, head: Head, dtype: str, rng: np.random.Generator) -> None:
    arguments = head.arguments(rng, 17, 12, 9, dtype)
    given = engine.arrays(arguments)
    fused = cf.fuse(head.function)
    serve = fused.bind(**dict(zip(head.bound, given[1:], strict=True)))
    expected = head.plain(*[a.astype(np.float64) for a in arguments])
    bound = (400 * unit(compute(dtype)) + 4 * unit(dtype)) * (1 + np.abs(expected))
    for rows in (17, 1, 0, 5):
        result = engine.host(serve(engine.array(arguments[0][:rows])))
        assert result.dtype == dtype_of(dtype)
        assert_close(result, expected[:rows], bound[:rows])


def test_any_argument_can_be_bound(arguments: list[Any]) -> None:
    x, w, b = arguments
    fused = cf.fuse(function)
    expected = fused(x, w, b, 0.25)
    for call in (
        lambda: fused.bind(w=w)(x, b, 0.25),
        lambda: fused.bind(w=w)(x, b=b, slope=0.25),
        lambda: fused.bind(x=x)(w, b, 0.25),
        lambda: fused.bind(slope=0.25)(x, w, b),
        lambda: fused.bind(w=w, b=b, slope=0.25)(x),
        lambda: fused.bind(x=x, w=w, b=b, slope=0.25)(),
        lambda: fused.bind()(x, w, b, slope=0.25),
    ):
        np.testing.assert_allclose(call(), expected, rtol=1e-13)
    np.testing.assert_allclose(fused.bind(w=w, b=b)(x), fused(x, w, b), rtol=1e-13)


def test_the_unfused_function_stays_at_hand(arguments: list[Any]) -> None:
    x, w, b = arguments
    serve = cf.fuse(function).bind(w=w, b=b)
    np.testing.assert_allclose(serve(x), serve.__wrapped__(x), rtol=1e-13)
    assert "function" in repr(serve) and "w, b" in repr(serve)


@pytest.mark.parametrize(
    ("fixed", "args", "kwargs", "words"),
    [
        (("w",), (1, 2, 3, 4), {}, "expected at most 3 arguments by place"),
        (("w",), (), {"w": 1}, "'w' is bound"),
        (("w",), (1,), {"x": 1}, "'x' was given twice"),
        (("w",), (1,), {"q": 1}, "'q' is unknown"),
        (("w",), (1,), {}, "missing argument 'b'"),
        (("w", "b"), (), {}, "missing argument 'x'"),
    ],
)
def test_wrong_calls(fixed: Any, args: Any, kwargs: Any, words: str, arguments: list[Any]) -> None:
    named = dict(zip("xwb", arguments, strict=True))
    serve = cf.fuse(function).bind(**{name: named[name] for name in fixed})
    with pytest.raises(TypeError, match=words):
        serve(*args, **kwargs)


def test_parameters_that_are_given_by_name_alone_are_named() -> None:
    serve = cf.fuse(lambda x, w, *, scale=1.0: x @ w * scale).bind(w=np.eye(3))
    with pytest.raises(TypeError, match=r"at most 1 arguments by place \(x\), got 2; give scale by name"):
        serve(np.eye(3), 2.0)


def test_unknown_names_are_refused_at_once(arguments: list[Any]) -> None:
    with pytest.raises(TypeError, match=r"'weights'.*x, w, b, slope"):
        cf.fuse(function).bind(weights=arguments[1])


def test_preparation_runs_once_for_all_shapes(arguments: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, b = arguments
    serve = cf.fuse(function).bind(w=w, b=b)
    for rows in (6, 1, 3, 6):
        serve(x[:rows])
    assert len(serve._prepacked._plans) == 1


def test_refresh_follows_changed_weights(engine: Engine, arguments: list[Any]) -> None:
    x, w, b = engine.arrays(arguments)
    fused = cf.fuse(function)
    serve = fused.bind(w=w, b=b)
    serve.refresh()  # nothing is prepared yet
    serve(x)
    w *= 3
    b += 1
    serve.refresh()
    np.testing.assert_allclose(engine.host(serve(x)), engine.host(fused(x, w, b)), rtol=1e-12)


def test_refresh_reaches_every_prepared_shape(arguments: list[Any]) -> None:
    """Other numbers of rows, other dtypes of x and other precisions may prepare other things."""
    x, w, b = arguments
    fused = cf.fuse(lambda x, w, b: (cf.softmax((x @ w.T + b) * b + b, axis=1), (x @ w.T).sum(axis=1)))
    serve = fused.bind(w=w, b=b)
    variants = [x, x[:1], x.astype(np.float32), x[:0]]
    for v in variants:
        serve(v)
    w += 1
    b *= 2
    serve.refresh()
    for v in variants:
        for actual, expected in zip(serve(v), fused(v, w, b), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_bound_arguments_that_the_call_changes_are_not_taken_as_fixed(engine: Engine) -> None:
    def count(x: Any, total: Any) -> Any:
        total += 1
        return x * total.sum()

    total = engine.array(np.zeros(2))
    serve = cf.fuse(count).bind(total=total)
    results = [float(engine.host(serve(engine.array(np.ones(1))))[0]) for _ in range(3)]
    assert results == [2.0, 4.0, 6.0]
    assert_equal(engine.host(total), np.full(2, 3.0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_of_bound_arguments_alone(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """They have their own dtype, and no two calls share their memory."""
    w = normal(rng, (4, 5), dtype)
    serve = cf.fuse(lambda x, w: (x + 1, w * 2, w.sum(axis=0), w)).bind(w=engine.array(w))
    x = engine.array(normal(rng, (2, 2), dtype))
    _, first, _, _ = serve(x)
    first[...] = 0
    _, doubled, total, same = engine.host(serve(x))
    assert_equal(doubled, (w.astype(np.float64) * 2).astype(dtype_of(dtype)))
    assert_equal(same, w)
    assert total.dtype == dtype_of(dtype)
    wide = w.astype(np.float64)
    assert_close(total, wide.sum(axis=0), 2 * unit(dtype) * np.abs(wide).sum(axis=0))


def test_out_and_bound_arrays(engine: Engine, arguments: list[Any]) -> None:
    """A result may be asked for in the memory of a bound array, or of the result before."""
    x, w, _ = engine.arrays(arguments)
    serve = cf.fuse(lambda x, w: x @ w.T).bind(w=w)
    expected = engine.host(serve(x))
    out = engine.xp.empty_like(engine.array(expected))
    assert serve(x, out=out) is out
    assert_equal(engine.host(out), expected)
    square = engine.array(np.eye(5))
    cf.fuse(lambda x, w: x @ w.T + w).bind(w=square)(engine.array(arguments[0][:5]), out=square)
    np.testing.assert_allclose(engine.host(square), arguments[0][:5] + np.eye(5))


def test_structures_can_be_bound(arguments: list[Any]) -> None:
    x, w, b = arguments
    fused = cf.fuse(lambda x, p: (x @ p["w"].T + p["more"][0]).sum(axis=1))
    serve = fused.bind(p={"w": w, "more": [b]})
    np.testing.assert_allclose(serve(x), (x @ w.T + b).sum(axis=1), rtol=1e-13)
    w *= 2
    serve.refresh()
    np.testing.assert_allclose(serve(x), (x @ w.T + b).sum(axis=1), rtol=1e-13)


@dataclass
class Scale:
    k: float

    @cf.fuse
    def head(self, x: Any, w: Any) -> Any:
        return (x @ w.T).sum(axis=1) * self.k


def test_bound_objects_are_looked_at_in_every_call(engine: Engine, arguments: list[Any]) -> None:
    x, w, _ = engine.arrays(arguments)
    scale = Scale(2.0)
    other = cf.fuse(lambda scale, x, w: scale.head(x, w))
    serves = [scale.head.bind(w=w), other.bind(scale=scale, w=w), other.bind(scale=scale, x=x)]
    for k in (2.0, 3.0, 2.0, -1.0):
        scale.k = k
        for serve, given in zip(serves, (x, x, w), strict=True):
            assert_close(engine.host(serve(given)), Scale.head.__wrapped__(scale, *arguments[:2]), 1e-13)
    w *= 2
    scale.k = 5.0
    for serve in serves:
        serve.refresh()
    expected = Scale.head.__wrapped__(scale, arguments[0], engine.host(w))
    for serve, given in zip(serves, (x, x, w), strict=True):
        assert_close(engine.host(serve(given)), expected, 1e-12)


def test_bound_containers_are_looked_at_in_every_call(arguments: list[Any]) -> None:
    x, w, b = arguments
    fused = cf.fuse(lambda x, p, q: (x @ p["w"].T + p["more"][0]).sum(axis=1) * p["k"] + q[0] + q[1][0])
    p, q = {"w": w, "more": [b], "k": 2.0}, (1.0, [0.5])
    serve = fused.bind(p=p, q=q)

    def check() -> None:
        for rows in (6, 3, 6):
            np.testing.assert_allclose(serve(x[:rows]), fused.__wrapped__(x[:rows], p, q), rtol=1e-12)

    check()
    p["k"] = 3.0
    check()
    p["w"] = w * 2  # another array of the same shape
    check()
    p["more"][0] = np.float64(0.25)
    check()
    p["more"][0] = b
    q[1][0] = 4.0
    check()
    p["w"] *= 3
    serve.refresh()
    check()
    p["w"] = w
    serve.refresh()
    check()


def test_arrays_that_a_bound_container_held_are_let_go() -> None:
    held = {"w": np.ones((4, 5))}
    serve = cf.fuse(lambda x, p: (x @ p["w"].T).sum(axis=1)).bind(p=held)
    reference = weakref.ref(held["w"])
    serve(np.ones((2, 5)))
    held["w"] = np.zeros((4, 5))
    serve(np.ones((2, 5)))
    gc.collect()
    assert reference() is None


def test_bound_structures_that_stay_are_traced_and_prepared_once(arguments: list[Any]) -> None:
    x, w, b = arguments

    def traced(x: Any, p: Any, scale: Any) -> Any:
        return (x @ p["w"].T + p["b"]).sum(axis=1) * scale.k

    serve = cf.fuse(traced).bind(p={"w": w, "b": b}, scale=Scale(2.0))
    for rows in (6, 3, 6, 3):
        serve(x[:rows])
    assert len(serve._runnables) == 2 and len(serve._prepacked._plans) == 1


def test_planning_with_specs(arguments: list[Any]) -> None:
    serve = cf.fuse(function).bind(w=cf.spec((4, 5), "float64"), b=cf.spec(4, "float64"))
    assert serve.plan(cf.spec((6, 5), "float64")).launches == 1
    with pytest.raises(TypeError, match="spec"):
        serve(arguments[0])


def test_free_arguments_are_not_kept_alive(arguments: list[Any]) -> None:
    x, w, b = arguments
    serve = cf.fuse(function).bind(w=w, b=b)
    first = x.copy()
    reference = weakref.ref(first)
    serve(first)
    del first
    gc.collect()
    assert reference() is None


def test_threads_that_call_for_the_first_time_together(arguments: list[Any]) -> None:
    x, w, b = arguments
    expected = cf.fuse(function)(x, w, b)
    for _ in range(20):
        serve, barrier, failures = cf.fuse(function).bind(w=w, b=b), threading.Barrier(6), []

        def run(serve: Any = serve, barrier: Any = barrier, failures: list[Any] = failures) -> None:
            try:
                barrier.wait()
                np.testing.assert_allclose(serve(x), expected, rtol=1e-12)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_prepared_values_are_rounded_once(dtype: str) -> None:
    """A value that is kept, and rounded, is the one of which the others are made: a maximum is one of its elements."""

    def function(y: Any, x: Any) -> Any:
        v = x * x
        return v, (y + v) - v.max(0)

    kind = dtype_of(dtype)
    x = np.array([[70.75, 3.3], [70.7, 1.1], [1.0, 3.25]]).astype(kind)
    for got, want in zip(cf.fuse(function).bind(x=x)(0 * x), function(0 * x, x), strict=True):
        assert got.dtype == kind
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


def test_parameters_of_all_kinds() -> None:
    def named(x: Any, *rest: Any, k: float = 1.0, **others: Any) -> Any:
        return x * k + sum(rest) + others.get("q", 0.0)

    x, y = np.arange(3.0), np.array([10.0, 20, 30])
    bound = cf.fuse(named).bind(k=2.0)
    for _ in range(12):
        for args, others in [((x, y), {}), ((x,), {}), ((x, y, y), {"q": x}), ((x,), {"q": y})]:
            np.testing.assert_array_equal(bound(*args, **others), named(*args, k=2.0, **others))
    first = cf.fuse(named).bind(x=x)
    np.testing.assert_array_equal(first(y, k=3.0), named(x, y, k=3.0))
    np.testing.assert_array_equal(cf.fuse(named).bind(rest=(y,))(x), named(x, y))
    with pytest.raises(TypeError, match="'k' is bound"):
        bound(x, k=1.0)
    with pytest.raises(TypeError, match="missing argument 'x'"):
        bound()
    by_name = cf.fuse(lambda x, *, k: x * k).bind(x=x)
    with pytest.raises(TypeError):
        by_name(2.0)


def test_parameters_of_all_kinds_inside_another_function() -> None:
    def named(x: Any, /, y: Any, *rest: Any, k: float = 1.0, **others: Any) -> Any:
        return x * k + y + sum(rest) + others.get("q", 0.0)

    x, y = np.arange(3.0), np.array([10.0, 20, 30])
    for fixed, args, others in [
        ({"k": 2.0}, (x, y, y), {"q": x}),
        ({"x": x}, (y,), {"q": y}),
        ({"y": y}, (x, x), {"k": 3.0}),
    ]:
        bound = cf.fuse(named).bind(**fixed)
        expected = bound(*args, **others)
        around = functools.partial(lambda bound, *a, **o: bound(*a, **o) + 1, bound)
        np.testing.assert_array_equal(cf.fuse(around)(*args, **others), expected + 1)
    np.testing.assert_array_equal(expected, named(x, y, x, k=3.0))


def test_the_signature_is_that_of_the_remaining_parameters(arguments: list[np.ndarray[Any, Any]]) -> None:
    x, w, b = arguments
    bound = cf.fuse(function).bind(w=w)
    assert str(inspect.signature(bound)) == "(x: 'Any', b: 'Any', slope: 'float' = 0.5) -> 'Any'"
    inner, outer = cf.fuse(function).bind(w=w, slope=0.25), cf.fuse(lambda x, b: inner(x, b) + 1)
    np.testing.assert_allclose(cf.fuse(inner)(x, b), function(x, w, b, 0.25))
    np.testing.assert_allclose(outer(x, b), function(x, w, b, 0.25) + 1)
