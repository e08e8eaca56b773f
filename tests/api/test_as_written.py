"""Functions that run as written: on the CPU, where their plan would gain nothing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import HOST

import cupyfuse as cf
from cupyfuse.api.as_written import AsWritten
from cupyfuse.api.parameters import Parameters
from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.settings import force_plans

RNG = np.random.default_rng(5)
X = RNG.standard_normal((8, 6)).astype(np.float32)


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """In the place of the fixture that lets plans run always."""
    yield


def runs_as_written(function: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Whether later calls run the function's own code, as its plan says."""
    fused = cf.fuse(function, **options)
    fused(*arguments)
    entered = []

    def note(frame: Any, event: str, argument: Any) -> None:
        entered.append(event == "call" and frame.f_code is function.__code__)

    sys.setprofile(note)
    try:
        fused(*arguments)
    finally:
        sys.setprofile(None)
    assert any(entered) == bool(fused.plans[-1].as_written)
    return any(entered)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def test_small_functions_run_as_written_and_give_their_own_bits() -> None:
    fused = cf.fuse(softmax)
    for _ in range(3):
        assert fused(X).tobytes() == softmax(X).tobytes()
    assert runs_as_written(softmax, X)
    assert isinstance(cf.fuse(lambda x: (x * x).sum())(X), np.float32)
    assert "on the CPU the function runs as written: about" in str(fused.plan(X))
    assert fused.plan(X).record()["as_written"] == fused.plan(X).as_written != ""


def test_what_gains_runs_as_a_plan() -> None:
    large = np.zeros((512, 512), np.float32)
    assert not runs_as_written(lambda x: np.logaddexp.reduce(x, axis=1), large)
    assert not runs_as_written(lambda x, w: (x @ w).sum(axis=1), large, large)  # a matrix-vector product
    assert cf.fuse(softmax).plan(cf.spec((8, 6))).as_written == ""


@pytest.mark.parametrize(
    "function",
    [
        lambda x: cf.softmax(x, axis=1),
        lambda x: cf.fuse(softmax)(x) + 1,
        lambda x: x.astype(np.float16) + 1,
    ],
    ids=["own function", "another fused function", "16-bit floats"],
)
def test_what_would_be_another_result_runs_as_a_plan(function: Callable[..., Any]) -> None:
    assert not runs_as_written(function, X)


def test_loops_over_elements_run_as_written() -> None:
    """Operations on scalars, and assignments to elements, take NumPy a tenth of a microsecond each."""

    def alignment(a: Any, b: Any) -> Any:
        cost = np.zeros((6, 6))
        for i in range(1, 6):
            for j in range(1, 6):
                cost[i, j] = (a[i] - b[j]) ** 2 + min(cost[i - 1, j], cost[i, j - 1])
        return cost[-1, -1]

    assert runs_as_written(alignment, X[0], X[1])
    calls = cf.fuse(alignment).plan(X[0], X[1]).calls
    assignments = [call for call in calls if call.name == "setitem"]
    assert len(assignments) == 25 and all((call.writes, call.nodes) == (8, ()) for call in assignments)


def test_functions_of_the_package_run_as_plans_on_arrays() -> None:
    np.testing.assert_allclose(cf.logsumexp(X, axis=1), np.logaddexp.reduce(X, axis=1), rtol=1e-6)
    np.testing.assert_array_equal(cf.relu(X), np.maximum(X, 0))


def test_arguments_changed_in_place() -> None:
    def double(x: Any) -> Any:
        x *= 2
        return x

    fused, x = cf.fuse(double), X.copy()
    result = fused(x)
    assert fused.plans[-1].as_written and not np.shares_memory(result, x)
    np.testing.assert_array_equal(x, X * 2)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        fused(x)


@pytest.mark.rotates
def test_views_that_interleave_share_no_memory() -> None:
    def add(x: Any, y: Any) -> Any:
        x += y
        return x.sum()

    fused = cf.fuse(add)
    for engine in (np.array, HOST.array):
        with HOST.active():
            m = engine(np.ones((4, 6), np.float32))
            fused(m[:, :3], m[:, 3:])
            fused(m.T[:3:2], m.T[1:4:2])
            expected = np.ones((4, 6))
            expected[:, :3] += 1
            expected[:, :3:2] += expected[:, 1:4:2]
            np.testing.assert_array_equal(HOST.host(m), expected)
            for overlapping in ((m[:, :3], m[:, 2:5]), (m[::2], m[2:]), (m[:, :3], m[::-1, 2::-1])):
                with pytest.raises(ValueError, match="shares memory with argument 'y'"):
                    fused(*overlapping)


def test_arguments_are_not_half_changed_where_a_library_step_fails() -> None:
    def solved(x: Any, a: Any) -> Any:
        x *= 2
        return np.linalg.inv(a) @ x

    fused, x = cf.fuse(solved), np.ones((2, 2))
    with pytest.raises(np.linalg.LinAlgError):
        fused(x, np.zeros((2, 2)))
    np.testing.assert_array_equal(x, 1)


def test_other_libraries_and_engines_run_plans() -> None:
    torch = pytest.importorskip("torch")
    fused = cf.fuse(softmax)
    assert type(fused(torch.from_numpy(X))) is torch.Tensor and not fused.plans[-1].as_written
    with HOST.active():
        HOST.host(fused(HOST.array(X)))
        assert not fused.plans[-1].as_written


@pytest.mark.parametrize("bound", [False, True])
def test_each_kind_of_array_has_a_plan_of_its_own(tmp_path: Path, bound: bool) -> None:
    """The function as written gets NumPy's arrays alone, whatever came before them."""
    torch = pytest.importorskip("torch")
    mapped = np.memmap(tmp_path / "x", X.dtype, "w+", shape=X.shape)
    mapped[:] = X
    kinds = [X, torch.from_numpy(X.copy()), mapped]

    def tiled(x: Any, scale: float = 1.0) -> Any:
        assert not isinstance(x, (torch.Tensor, np.memmap))
        return np.stack([x.repeat(2).std() * scale, x.max()])

    for order in itertools.permutations(kinds):
        fused: Any = cf.fuse(tiled).bind(scale=1.0) if bound else cf.fuse(tiled)
        for x in [x for x in order for _ in range(10)]:  # enough for calls to be recognised
            result = fused(x)
            assert type(result) is (torch.Tensor if type(x) is torch.Tensor else np.ndarray)
            np.testing.assert_allclose(np.asarray(result), tiled(X), rtol=1e-6)


def test_memory_is_bounded() -> None:
    def deep(x: Any) -> Any:
        return softmax(np.tanh(x) + softmax(x))

    assert runs_as_written(deep, X)
    assert not runs_as_written(deep, X, max_workspace=X.nbytes)


def test_results_share_no_memory() -> None:
    def some(x: Any) -> Any:
        y = x + 1
        return x, x.T, y, y[:2], y, x[0], np.arange(3)

    results = cf.fuse(some)(X)
    assert cf.fuse(some).plan(X).as_written
    for k, result in enumerate(results):
        np.testing.assert_array_equal(result, some(X)[k])
        assert not any(np.shares_memory(result, other) for other in (X, *results[:k]))
        assert result.flags.writeable
    for function in (
        lambda x: np.broadcast_to(x.sum(), (3,)),
        lambda x: np.diagonal(x + 1),
        lambda x: np.broadcast_arrays(x[:1], x)[0],
        lambda x: ((x + 1)[1:], x),
        lambda x: {"a": x + 1, "b": [x + 1, x]},
    ):
        results = cf.fuse(function)(X)
        own = [results] if isinstance(results, np.ndarray) else [a for a in results if isinstance(a, np.ndarray)]
        for array in own:
            assert array.flags.writeable and 0 not in array.strides and not np.shares_memory(array, X)


def test_what_nobody_else_holds_is_not_copied() -> None:
    large = np.zeros((512, 512))
    wrapped = cf.fuse(lambda x: ((x + 1).reshape(-1), (x * 2)[1:].T))
    first, second = wrapped(large)
    assert wrapped.plans[-1].as_written and first.base is not None and second.base is not None


def test_views_of_one_result_are_apart() -> None:
    def some(x: Any) -> Any:
        y = x + 1
        return y[1:], y

    part, whole = cf.fuse(some)(X)
    part[:] = 9
    assert not (whole == 9).any()


def test_what_is_kept_elsewhere_is_copied() -> None:
    class Config:
        def __init__(self) -> None:
            self.w = np.ones(3)

    config = Config()
    fused = cf.fuse(lambda x, cfg: np.broadcast_arrays(cfg.w, x)[0], static=("cfg",))
    result = fused(np.zeros((2, 3)), config)
    result[:] = 5
    assert (config.w == 1).all()


@pytest.mark.parametrize("container", [list, tuple, lambda arrays: dict(enumerate(arrays)), lambda arrays: arrays[0]])
@pytest.mark.parametrize("keeps", ["container", "array", "view", "nothing"])
def test_new_results_are_returned_as_they_are_unless_kept(container: Callable[..., Any], keeps: str) -> None:
    kept = []

    def function(x: Any) -> Any:
        first, second = x + 1, x * 2
        made = container([first, second])
        kept.append({"container": made, "array": first, "view": first[1:], "nothing": None}[keeps])
        kept.append(list(map(id, (made, first, second))))
        return made

    result = AsWritten(function, Parameters(function))((X,))
    first = result[0] if isinstance(result, (list, tuple, dict)) else result
    held, (made_id, first_id, _) = kept
    if keeps == "nothing":
        assert id(result) == made_id and id(first) == first_id
    else:
        of = held[0] if isinstance(held, (list, tuple, dict)) else held
        assert not np.shares_memory(first, of) and (first[0] == X[0] + 1).all()


def test_variables_around_a_function_share_no_memory_with_results() -> None:
    table = np.arange(6, dtype=np.float32)
    fused = cf.fuse(lambda x: (x + 1, table))
    fused(X)
    result = fused(X)[1]
    assert fused.plans[-1].as_written and not np.shares_memory(result, table)
    result[:] = 7
    assert table[1] == 1


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


def test_results_keep_their_structure() -> None:
    def nested(x: Any, *rest: Any, scale: float = 2.0, **options: Any) -> Any:
        return {"pair": Pair(x * scale, [rest[0] - 1, "name", 3]), "shift": (x + options["shift"],)}

    fused = cf.fuse(nested)
    for scale in (2.0, 2.0, 3.0):
        got, wanted = (f(X, X, scale=scale, shift=X) for f in (fused, nested))
        assert fused.plans[-1].as_written and list(got) == list(wanted)
        np.testing.assert_array_equal(got["pair"].first, wanted["pair"].first)
        np.testing.assert_array_equal(got["pair"].second[0], wanted["pair"].second[0])
        assert got["pair"].second[1:] == ["name", 3] and type(got["shift"]) is tuple


def test_floats_among_the_arguments_are_read_in_each_call() -> None:
    fused = cf.fuse(lambda x, k: x * k)
    for k in (1.0, 2.0, 5.0):
        np.testing.assert_array_equal(fused(X, k), X * np.float32(k))
    assert len(fused.plans) == 1 and fused.plans[0].as_written


def test_nothing_warns() -> None:
    fused = cf.fuse(lambda x: np.log(x) / 0.0)
    broadcast = cf.fuse(lambda x, y: np.broadcast_arrays(x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(fused(X)[X < 0]).all() and fused.plans[-1].as_written
        for y in (np.ones((2, *X.shape)), X):
            assert [found.shape for found in broadcast(X, y)] == [y.shape] * 2


def test_out_is_written_by_the_plan() -> None:
    out = np.empty_like(X)
    assert cf.fuse(softmax)(X, out=out) is out
    np.testing.assert_allclose(out, softmax(X), rtol=1e-6)


def test_bound_functions_run_plans_where_these_gain() -> None:
    def shifted(x: Any, w: Any) -> Any:
        return x @ w + 1

    def summed(x: Any, w: Any) -> Any:
        return (x @ w).sum(axis=1)  # bound, a product with the sum of each row of w

    w = np.eye(6, dtype=np.float32)
    bound = cf.fuse(shifted).bind(w=w)
    for _ in range(12):  # the last ones are recognised
        np.testing.assert_array_equal(bound(X), X + 1)
    assert bound.plans[-1].as_written == bound.plan(X).as_written != ""
    large = np.ones((600, 500), np.float32)
    bound = cf.fuse(summed).bind(w=large)
    for _ in range(12):
        np.testing.assert_array_equal(bound(large[:, :600].T), np.full(500, 300000.0, np.float32))
    assert not bound.plans[-1].as_written


def test_bound_functions_that_run_as_written_write_out_by_plans() -> None:
    """With prepacked values that the first such call computes, and that `refresh` computes again."""
    w, row, out = np.ones((6, 4), np.float32), np.ones(4, np.float32), np.empty((len(X), 4), np.float32)
    bound = cf.fuse(lambda x, w, row: x @ (w * 2) + np.exp(row)).bind(w=w, row=row)
    np.testing.assert_allclose(bound(X), X @ (w * 2) + np.exp(row), rtol=1e-5, atol=1e-5)
    assert bound.plans[-1].as_written and bound.plans[-1].prepare is not None
    for _ in range(3):
        assert bound(X, out=out) is out
        np.testing.assert_allclose(out, X @ (w * 2) + np.exp(row), rtol=1e-5, atol=1e-5)
        w += 1
        row -= 3
        bound.refresh()
    with force_plans():
        np.testing.assert_allclose(bound(X), X @ (w * 2) + np.exp(row), rtol=1e-5, atol=1e-5)
    assert not bound.plans[-1].as_written


def test_a_function_that_tells_traced_arrays_apart_does_as_it_does_plain() -> None:
    def strange(x: Any) -> Any:
        return x + 1 if type(x) is np.ndarray else (x + 2, x)

    fused = cf.fuse(strange)
    for _ in range(2):
        np.testing.assert_array_equal(fused(X), X + 1)


def test_plans_can_run_always() -> None:
    fused = cf.fuse(softmax)
    fused(X)
    with force_plans():
        fused(X)
    assert [bool(plan.as_written) for plan in fused.plans] == [True, False]


def test_a_plan_is_loaded_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes a fifth of a first call: a function that runs as written loads its plan for `out` alone."""
    loaded = []

    class Loaded(NumpyExecutable):
        def __init__(self, *arguments: Any) -> None:
            loaded.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr("cupyfuse.engines.numpy.NumpyExecutable", Loaded)
    fused, out = cf.fuse(lambda x: x * 2 + 1), np.zeros_like(X)
    np.testing.assert_array_equal(fused(X), X * 2 + 1)
    assert fused.plans[0].as_written and not loaded
    for _ in range(2):
        fused(X, out=out)
    np.testing.assert_array_equal(out, X * 2 + 1)
    assert len(loaded) == 1


def test_bound_arrays_are_freed_with_the_bound_function() -> None:
    """At once, without the garbage collector."""

    def use() -> list[Any]:
        w, large = np.ones((6, 4), np.float32), np.ones((600, 600), np.float32)
        as_written = cf.fuse(lambda x, w: x @ w).bind(w=w)
        planned = cf.fuse(lambda x, w: (x @ w).sum(axis=1)).bind(w=large)
        for _ in range(12):
            as_written(X)
            planned(large)
        as_written(X, out=np.empty((8, 4), np.float32))
        assert as_written.plans[-1].as_written and not planned.plans[-1].as_written
        return [weakref.ref(w), weakref.ref(large)]

    gc.collect()
    gc.disable()
    try:
        assert [reference() is None for reference in use()] == [True, True]
    finally:
        gc.enable()
