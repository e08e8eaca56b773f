"""Row programs with reductions down the columns: which steps share a launch, and their kernel in many shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, assert_equal, compute, normal, unit

import cupyfuse as cf
from cupyfuse.cuda.config import Access, Config
from cupyfuse.cuda.configure import default_config
from cupyfuse.cuda.program import Program
from cupyfuse.engines import kernel_launch
from cupyfuse.plan import schedule
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import Step, column_sums


def norm_gradients(x: Any, dy: Any, gamma: Any) -> Any:
    """The gradients of a layer norm by its operand, its scale and its bias: four stages, two sums of columns."""
    centred = x - x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + 0.25)
    normal, g = centred * scale, dy * gamma
    along_rows = scale * (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True))
    return along_rows, (dy * normal).sum(axis=0), dy.sum(axis=0)


def softmax_gradients(x: Any, dy: Any, gamma: Any) -> Any:
    """Exponentials along rows; what follows the sums of columns reads a vector, and a number of the call."""
    y = cf.softmax(x * gamma, axis=1)
    d = y * (dy - (y * dy).sum(axis=1, keepdims=True))
    return d * gamma, gamma - 0.5 * (d * x).sum(axis=0), cf.logsumexp(x, axis=1)


def all_columns(x: Any, dy: Any, gamma: Any) -> Any:
    """Accumulators of every kind, of values of an early stage and of the last one."""
    z = x * gamma - np.abs(dy).mean(axis=1, keepdims=True)
    return z.max(axis=0), z.min(axis=0), (x * dy).sum(axis=0), z.var(axis=0), z.argmax(axis=0), cf.logsumexp(z, axis=0)


def no_rows(x: Any, dy: Any, gamma: Any) -> Any:
    """Nothing is stored of rows but their sums, for the columns alone."""
    return ((x - x.mean(axis=1, keepdims=True)) * dy).sum(axis=0) * gamma


def activation_gradients(x: Any, dy: Any, gamma: Any) -> Any:
    """No reductions along rows: the columns' step stores the elements, too."""
    z = x * gamma
    d = dy * (1 - np.tanh(z) ** 2)
    return d * gamma, (d * x).sum(axis=0), d.sum(axis=0)


PROGRAMS = [norm_gradients, softmax_gradients, all_columns, no_rows]
# Lanes of a warp, several teams of a block, one team; a thread has one pack, or several, or no whole one.
CONFIGURATIONS = [
    Config("row_columns", 64, 1, 4, 4, shares=3, packed=True),
    Config("row_columns", 64, 2, 4, 16, shares=2, packed=True),
    Config("row_columns", 96, 1, 4, 32, shares=5, packed=True),
    Config("row_columns", 128, 1, 2, 64, shares=3, packed=True),
    Config("row_columns", 192, 1, 1, 96, shares=2),
    Config("row_columns", 64, 1, 8, 64, shares=4, packed=True),
    Config("row_columns", 64, 1, 8, 64, shares=2, packed=True),
    Config("row_columns", 128, 1, 4, 128, shares=40),
]


def name_of(config: Config) -> str:
    held = "loaded" if config.packed else "values"
    return f"{config.threads}by{config.group}-{config.vec}-{config.shares}shares-{held}"


def drawn(shape: tuple[int, int], dtype: str = "float32", special: bool = False) -> list[Any]:
    rng = np.random.default_rng(shape[0] * 1000 + shape[1])
    x, dy = normal(rng, shape, dtype), normal(rng, shape, dtype)
    if special:
        x[shape[0] // 2, shape[1] // 2], x[-1, 0], dy[0, 0] = np.nan, np.inf, -np.inf
    return [x, dy, normal(rng, shape[1], dtype)]


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps share a launch for few rows, where it gains nothing."""
    monkeypatch.setattr(column_sums, "_WORTH", 0)
    monkeypatch.setattr(column_sums, "_FEWEST_ROWS", 2)
    monkeypatch.setattr(column_sums, "_SHORTEST", 1)
    monkeypatch.setattr(column_sums, "fewest_shared", lambda cols: 0)


def force(monkeypatch: pytest.MonkeyPatch, config: Config, cols: int) -> None:
    """Let rows with reductions of columns run in a configuration, with as many packs a thread as that takes."""

    def choose(program: Program, access: Access, clusters: bool = False) -> Config:
        if program.columns is None:
            return default_config(program, access, clusters)
        vec = min(access.vec, config.vec)
        return replace(config, vec=vec, items=-(-cols // (config.group * vec)))

    monkeypatch.setattr(kernel_launch, "default_config", choose)


def merged(steps: list[Step]) -> list[Step]:
    return [s for s in steps if s.columns is not None]


def run(engine: Any, function: Callable[..., Any], arrays: list[Any]) -> list[np.ndarray[Any, Any]]:
    with engine.active():
        found = engine.host(cf.fuse(function)(*[engine.array(a) for a in arrays]))
    return [np.asarray(r) for r in (found if isinstance(found, tuple) else (found,))]


def check(function: Callable[..., Any], arrays: list[Any], results: list[Any]) -> None:
    """Compare results with float64: the same NaN and infinities, and errors that roundings explain."""
    with np.errstate(all="ignore"):
        wanted = function(*[a.astype(np.float64) for a in arrays])
    dtype = str(arrays[0].dtype)
    for got, want in zip(results, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert got.shape == want.shape
        if want.dtype.kind in "iu":
            np.testing.assert_array_equal(got, want)
            continue
        a = got.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(want))
        finite = np.isfinite(want)
        a, want = a[finite], want[finite]
        bound = (64 + max(arrays[0].shape)) * unit(compute(dtype)) * max(1.0, np.abs(want).max(initial=0.0))
        assert (np.abs(a - want) <= bound + 2 * unit(str(got.dtype)) * np.abs(want)).all()


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=name_of)
@pytest.mark.parametrize("shape", [(3, 32), (67, 64), (50, 100)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("program", PROGRAMS)
def test_rows_and_columns_are_computed_in_one_launch(
    monkeypatch: pytest.MonkeyPatch, any_size: None, config: Config, shape: tuple[int, int], program: Any
) -> None:
    """Teams have many rows, few or none; the last turn has rows for some of them."""
    if shape[1] > config.group * config.vec * 8:
        pytest.fail("a thread would hold more columns than any default has")
    force(monkeypatch, config, shape[1])
    for dtype in ("float32", "float16"):
        for special in (False, True):
            arrays = drawn(shape, dtype, special and dtype == "float32")
            with HOST.active():
                plan = cf.fuse(program).plan(*[cf.spec(a.shape, str(a.dtype)) for a in arrays])
            assert merged(plan.steps) or dtype == "float16"
            first = run(HOST, program, arrays)
            check(program, arrays, first)
            for again, before in zip(run(HOST, program, arrays), first, strict=True):  # in another order of the threads
                assert_equal(again, before)


@pytest.mark.parametrize("shape", [(40, 64), (700, 96)])
def test_elements_are_stored_where_columns_are_reduced(any_size: None, shape: tuple[int, int]) -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        arrays = drawn(shape, dtype)
        (step,) = cf.fuse(activation_gradients).plan(*[cf.spec(a.shape, dtype) for a in arrays]).steps
        assert step.kind == "ColumnStats"
        check(activation_gradients, arrays, run(HOST, activation_gradients, arrays))


@pytest.mark.parametrize("program", [*PROGRAMS, activation_gradients])
def test_results_do_not_depend_on_sharing(monkeypatch: pytest.MonkeyPatch, any_size: None, program: Any) -> None:
    """What is added up in another order differs by roundings."""
    arrays = drawn((130, 64))
    together = run(HOST, program, arrays)
    monkeypatch.setattr("cupyfuse.plan.prepacking.share_launches", lambda steps, *_: list(steps))
    for a, b in zip(together, run(HOST, program, arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [32, 64, 100, 256, 768, 1000, 1536, 2560, 4096, 5120, 8192])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_defaults_on_a_gpu(cols: int, dtype: str) -> None:
    CUDA.require()
    arrays = drawn((5003, cols), dtype)
    for program in (norm_gradients, softmax_gradients, activation_gradients):
        results = run(CUDA, program, arrays)
        check(program, arrays, results)
        for again, before in zip(run(CUDA, program, arrays), results, strict=True):
            assert_equal(again, before)


def plan_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "float32") -> Plan:
    return cf.fuse(function).plan(*[cf.spec(s, dtype) for s in shapes])


LARGE = (16384, 768)


def test_a_shared_launch_reads_matrices_once() -> None:
    plan = plan_of(norm_gradients, LARGE, LARGE, LARGE[1:])
    (step,) = plan.steps
    matrix = 4 * LARGE[0] * LARGE[1]
    assert step.columns is not None
    assert (step.kind, step.launches) == ("RowProgram", 2)
    assert step.reads == 2 * matrix + 4 * LARGE[1]
    assert step.writes == matrix + 2 * 4 * LARGE[1]


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((512, 768), "float32", "states of all blocks would take more than is saved"),
        ((16384, 767), "float32", "rows begin between vectors"),
        ((16384, 768), "float64", "threads have no registers for states of float64"),
        ((16384, 16384), "bfloat16", "nor for so many columns"),
    ],
)
def test_steps_stay_apart(shape: tuple[int, int], dtype: str, why: str) -> None:
    plan = plan_of(norm_gradients, shape, shape, shape[1:], dtype=dtype)
    assert not merged(plan.steps), why
    assert {s.kind for s in plan.steps} >= {"RowProgram", "ColumnStats"}


def capped_gradients(x: Any, dy: Any, gamma: Any) -> Any:
    """Scales that are one vector, behind a guard, but for that launches cannot be shared."""
    y = cf.softmax(np.tanh(x * gamma / 30) * 30, axis=1)
    d = y * (dy - (y * dy).sum(axis=1, keepdims=True))
    return d * gamma, (d * x).sum(axis=0)


def test_guards_do_not_keep_launches_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = plan_of(capped_gradients, LARGE, LARGE, LARGE[1:]).steps
    assert step.columns is not None and not any(n.op == "guard" for n in step.nodes)
    few = plan_of(capped_gradients, (64, 768), (64, 768), (768,)).steps
    assert any(n.op == "guard" for s in few for n in s.nodes), "apart they are, either way"
    x, dy, gamma = drawn((40, 96), special=True)
    gamma[3], gamma[5] = 1e-44, 0.0  # divided by 30, the first one is zero
    expected = run(HOST, capped_gradients, [x, dy, gamma])
    monkeypatch.setattr(column_sums, "_WORTH", 0)
    found = run(HOST, lambda x, dy, gamma: capped_gradients(x, dy, gamma), [x, dy, gamma])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_mean_of_stored_elements_is_that_of_what_is_stored() -> None:
    """Rows of float16 are rounded where they are stored: less their mean, nothing but roundings may be left."""

    def centred(x: Any, w: Any) -> Any:
        y = np.tanh(x) * w + 100
        return y, y - y.mean(axis=0)

    def summed(x: Any, w: Any) -> Any:
        y = np.tanh(x) * w + 100
        return y, y.mean(axis=0)

    steps = plan_of(centred, LARGE, LARGE, dtype="float16").steps
    assert [s.kind for s in steps] == ["RowProgram", "ColumnStats", "RowProgram"]
    x, w = np.full((600, 64), 0.3, np.float16), np.full((600, 64), 0.7, np.float16)
    _, differences = run(HOST, centred, [x, w])
    assert np.abs(differences).max() < 0.01 < unit("float16") * 100
    (step,) = plan_of(summed, LARGE, LARGE, dtype="float16").steps
    assert step.kind == "ColumnStats"  # nothing else reads the rounded elements


def test_columns_that_a_row_program_reads_are_a_step_before_it() -> None:
    def normalised(x: Any) -> Any:
        return cf.softmax(x - x.mean(axis=0), axis=1)

    steps = plan_of(normalised, LARGE).steps
    assert [s.kind for s in steps] == ["ColumnStats", "RowProgram"]


def batch_norm_gradients(x: Any, dy: Any, v: Any) -> Any:
    """A deviation for each column, which its sum, and elements behind that, read."""
    r = 1 / np.sqrt(np.abs(v) + 1)
    s = (dy * (x * r)).sum(axis=0)
    return s, dy * r - x * r * s / len(x)


@pytest.mark.parametrize("shape", [(1024, 4100), (67, 1023), (600, 100), (600, 1)])
def test_vectors_that_column_reductions_compute_are_stored_by_them(shape: tuple[int, int]) -> None:
    steps = plan_of(batch_norm_gradients, shape, shape, shape[1:]).steps
    assert [s.kind for s in steps] == ["ColumnStats", "RowProgram"]
    rng = np.random.default_rng(1)
    arrays = [normal(rng, shape), normal(rng, shape), normal(rng, shape[1])]
    check(batch_norm_gradients, arrays, run(HOST, batch_norm_gradients, arrays))


def read_before_as_a_view(x: Any, v: Any) -> Any:
    d = np.sqrt(np.abs(v) + 0.1)
    parts = d.reshape(-1, 8)
    shares = (parts / parts.max(axis=1, keepdims=True)).reshape(-1)
    return (x * d * shares).sum(axis=0), d


def read_before_by_a_library(x: Any, v: Any) -> Any:
    d = np.exp(v)
    return (x * (d + np.repeat(d.reshape(-1, 8).sum(axis=1), 8))).sum(axis=0), d


@pytest.mark.parametrize("function", [read_before_as_a_view, read_before_by_a_library])
def test_vectors_that_a_step_before_the_columns_reads_are_there(function: Any) -> None:
    rng = np.random.default_rng(2)
    arrays = [normal(rng, (600, 64)), normal(rng, 64)]
    check(function, arrays, run(HOST, function, arrays))


def test_narrow_elements_are_not_left_to_one_block() -> None:
    """A block reduces a few thousand short rows sooner than several; costly elements are for the whole GPU."""
    alone = plan_of(activation_gradients, (2048, 8), (2048, 8), (8,)).steps
    assert not any(n.shape == (2048, 8) for s in alone if s.kind == "ColumnStats" for n in s.outputs)


def scaled_by_rows(x: Any, v: Any) -> Any:
    """Factors of rows, which are results themselves."""
    t = np.tanh(v)
    return (x * t).sum(axis=0), x * t * 0.5, t


def scaled_by_columns(x: Any, v: Any) -> Any:
    """Factors of elements, and of the sums of their columns."""
    t, z = np.tanh(v), x + 1
    return z.sum(axis=0) * t, z * t - z.max(axis=1, keepdims=True), t


@pytest.mark.parametrize("function", [scaled_by_rows, scaled_by_columns])
def test_what_one_step_reads_and_the_other_computes_is_read(any_size: None, function: Any) -> None:
    """A matrix whose columns lie apart is copied first: rows are in a later layer than the factors they read."""
    rng = np.random.default_rng(2)
    x, v = normal(rng, (600, 64)), normal(rng, (600, 1) if function is scaled_by_rows else 64)
    with HOST.active():
        found = HOST.host(cf.fuse(function)(HOST.array(x, "column_gap"), HOST.array(v)))
    check(function, [x, v], [np.asarray(r) for r in found])


@pytest.mark.parametrize(("dtype", "of_columns"), [("bfloat16", "float32"), ("float32", "float64")])
def test_wide_values_of_columns_beside_narrow_elements(dtype: str, of_columns: str) -> None:
    """Vectors of elements are no longer than those of a vector that is read for values of columns of theirs alone."""

    def function(x: Any, v: Any) -> Any:
        return np.tanh(x / (np.abs(v) + 1)).sum(axis=0)

    rng = np.random.default_rng(3)
    arrays = [normal(rng, (600, 64), dtype), normal(rng, 64, of_columns)]
    check(function, arrays, run(HOST, function, arrays))


def test_kernels_of_the_host_are_compiled_together(any_size: None) -> None:
    arrays = drawn((40, 64))
    with HOST.active():
        HOST.prepare([partial(run, HOST, p, arrays) for p in PROGRAMS])
    check(no_rows, arrays, run(HOST, no_rows, arrays))


def test_a_product_between_two_steps_reads_what_the_shared_launch_has_written() -> None:
    """The rows are a product's operand, and the columns are read behind it."""

    def function(x: Any, dy: Any, w: Any) -> Any:
        d = dy * (1 - np.tanh(x) ** 2)
        y = d @ w
        return y + d.sum(axis=0)[:4], d.sum(axis=0)

    arrays = [*drawn((600, 64))[:2], normal(np.random.default_rng(1), (64, 4), "float32")]
    plan = plan_of(function, *[a.shape for a in arrays])
    kinds = [s.kind for s in plan.steps]
    assert kinds.index("ColumnStats") < kinds.index("Gemm")
    assert "RowProgram" not in kinds[: kinds.index("Gemm")]
    check(function, arrays, run(HOST, function, arrays))


def test_results_may_overwrite_what_the_shared_launch_reads(any_size: None) -> None:
    """Gradients in the place of the operand, and of a vector that all rows read."""

    def function(x: Any, dy: Any, gamma: Any) -> None:
        along_rows, scale, _ = norm_gradients(x, dy, gamma)
        x[...] = along_rows
        gamma[...] = gamma - 0.1 * scale

    arrays = drawn((90, 64))
    along_rows, scale, _ = norm_gradients(*[a.astype(np.float64) for a in arrays])
    with HOST.active():
        x, dy, gamma = [HOST.array(a) for a in arrays]
        cf.fuse(function)(x, dy, gamma)
        x, gamma = np.asarray(HOST.host(x)), np.asarray(HOST.host(gamma))
    np.testing.assert_allclose(x, along_rows, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gamma, arrays[2] - 0.1 * scale, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(1021, 100), (67, 33)])
def test_results_of_columns_in_the_place_of_what_other_ones_read(shape: tuple[int, int]) -> None:
    """Vectors exchanged, in the launch that adds up columns, or merges them: all are read before any is written."""

    def function(x: Any, v: Any, w: Any) -> None:
        r, t = 1 / np.sqrt(np.abs(v) + 1), np.tanh(w)
        s = (x * (r + t)).sum(axis=0)
        v[...] = t + s
        w[...] = r * x.max(axis=0)

    rng = np.random.default_rng(5)
    arrays = [normal(rng, shape), normal(rng, shape[1]), normal(rng, shape[1])]
    wanted = [a.astype(np.float64) for a in arrays]
    function(*wanted)
    with HOST.active():
        given = [HOST.array(a) for a in arrays]
        (step,) = cf.fuse(function).plan(*given).steps
        assert step.kind == "ColumnStats"
        cf.fuse(function)(*given)
        found = [HOST.host(a) for a in given]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4)


def test_strided_and_misaligned_rows(any_size: None) -> None:
    """Rows further apart than they are long, and arrays that begin between two vectors: narrower vectors."""
    arrays = drawn((70, 64))
    for start, wide in ((0, 80), (1, 80), (2, 66)):
        with HOST.active():
            laid = []
            for a in arrays[:2]:
                whole = HOST.array(np.full((70, wide + start), np.nan, np.float32))
                whole[:, start : start + 64] = HOST.array(a)
                laid.append(whole[:, start : start + 64])
            found = HOST.host(cf.fuse(norm_gradients)(*laid, HOST.array(arrays[2])))
        check(norm_gradients, arrays, [np.asarray(r) for r in found])


def test_vectors_that_elements_read_are_aligned_as_they_are() -> None:
    """A vector that begins between two of its own, read before the columns' sums; and a wider one."""

    def weighted(x: Any, w: Any) -> Any:
        return (x * (1 + w)).sum(axis=0)

    rng = np.random.default_rng(0)
    x, w = normal(rng, (600, 64), "float32"), normal(rng, 65, "float32")
    with HOST.active():
        found = HOST.host(cf.fuse(weighted)(HOST.array(x), HOST.array(w)[1:]))
    check(weighted, [x, w[1:]], [np.asarray(found)])
    wide = normal(rng, 64, "float64")
    check(weighted, [x, wide], run(HOST, weighted, [x, wide]))


def test_an_epilogue_that_reads_rounded_elements_needs_sums_of_these() -> None:
    def function(x: Any, w: Any, b: Any) -> Any:
        y = np.tanh(x) * w + 100
        mean = y.mean(axis=0)
        return y @ b + (y - mean)

    steps = plan_of(function, (4096, 256), (4096, 256), (256, 256), dtype="float16").steps
    stored = {o for s in steps for o in s.outputs if o.shape == (4096, 256)}
    for step in steps:
        if step.kind == "ColumnStats" and stored & set(step.outputs):
            (elements,) = stored & set(step.outputs)
            assert not any(s.epilogue is not None and elements in s.epilogue.inputs for s in steps)


def test_states_of_teams_fit_into_shared_memory() -> None:
    """Sixteen sums of 640 columns: so many for each of two teams would not."""

    def many_sums(x: Any) -> Any:
        y = cf.softmax(x, axis=1)
        return y, *((y * k).sum(axis=0) for k in range(2, 7))

    for cols in (640, 656, 1024, 2048):
        plan = plan_of(many_sums, (1_000_000, cols), dtype="float16")
        for step in merged(plan.steps):
            program = Program(step, plan.scheduled.storage)
            config = default_config(program, Access(8), clusters=True)
            states = config.group * config.items * config.vec * schedule.state_size(step.columns)
            assert config.threads == config.group or states <= 40 << 10
            assert config.items * config.vec * schedule.state_size(step.columns) <= 128


@pytest.mark.parametrize("cols", [4097, 1001])
def test_elements_of_rows_between_vectors_are_stored_by_themselves(cols: int) -> None:
    steps = plan_of(activation_gradients, (4096, cols), (4096, cols), (cols,)).steps
    assert [s.kind for s in steps].count("RowProgram") == 1


@pytest.mark.parametrize(("dtype", "large"), [("float32", 3e19), ("float64", 2e154)])
@pytest.mark.parametrize("shape", [(4, 1), (4, 4), (5, 3), (600, 4)], ids=lambda s: "x".join(map(str, s)))
def test_variances_that_overflow_are_infinite(shape: tuple[int, int], dtype: str, large: float) -> None:
    """No element before the first ones is 0 times their distance, which squared is infinite."""
    x = np.full(shape, large, dtype)
    x[0] = 0
    for axis in (0, 1):
        y = x if axis == 0 else np.ascontiguousarray(x.T)
        (found,) = run(HOST, lambda y, axis=axis: y.var(axis=axis), [y])
        np.testing.assert_array_equal(found, np.inf)
