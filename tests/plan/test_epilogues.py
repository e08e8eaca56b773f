"""Which 16-bit products run by our own kernel, what becomes their epilogues, and what the plan says about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import HEADS, Head, normal

import cupyfuse as cf
from cupyfuse import devices, settings
from cupyfuse.ir.operators import POINTWISE
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import Tiles, fused_product, tiles_for
from cupyfuse.plan.schedule.fused_product import stream_seconds
from cupyfuse.plan.schedule.tiles import own_time, quick_flops
from cupyfuse.plan.soundness import check_plan

H200 = devices.DEVICES["H200"]


@pytest.fixture
def always() -> Iterator[None]:
    with settings.epilogues("always"):
        yield


def plan_of(function: Callable[..., Any], *shapes: Any, dtype: str = "bfloat16") -> Plan:
    return cf.fuse(function).plan(*(cf.spec(s, dtype) for s in shapes))


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def test_a_gpu_without_a_measured_rate_uses_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(devices.DEVICES, "H200", dataclasses.replace(H200, own_half=0.0))
    plan = plan_of(lambda x, w: cf.gelu(x @ w.T), (4096, 768), (3072, 768))
    assert kinds(plan) == ["Gemm", "RowProgram"] and plan.steps[0].epilogue is None
    assert plan.steps[0].how == "cuBLAS bfloat16 with float32 sums"


def test_the_estimate_decides() -> None:
    fused = plan_of(lambda x, w: cf.gelu(x @ w.T), (4096, 768), (3072, 768))
    assert kinds(fused) == ["Gemm"] and "own bfloat16" in fused.steps[0].how
    # A softmax would write as much as before, and launch one kernel more.
    apart = plan_of(lambda x, w: cf.softmax(x @ w.T, axis=1), (1024, 8192), (8192, 8192))
    assert kinds(apart) == ["Gemm", "RowProgram"] and "rather than our own kernel" in apart.steps[0].how
    assert " us, where that would take " in apart.steps[0].how
    # So does that of rows which blocks share.
    assert plan_of(lambda x, w: cf.softmax(x @ w.T, axis=1), (1024, 512), (131072, 512)).steps[0].epilogue is None


def test_small_products_are_ours_where_the_host_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of cuBLAS takes the host several times as long as a launch; how long the GPU takes decides for others."""
    shapes = {16: (768, 768), 64: (256, 512), 128: (1024, 1024), 1024: (1024, 1024), 16384: (1024, 1024)}
    small = [16, 64, 128, 1024]

    def ours(rows: int) -> bool:
        depth, columns = shapes[rows]
        plan = plan_of(lambda x, w: cf.softmax(x @ w.T, axis=1), (rows, depth), (columns, depth))
        assert kinds(plan) == ["Gemm", "RowProgram"] and plan.steps[1].fused[-1] == "divide"
        return plan.steps[0].by_tiles

    assert [rows for rows in shapes if ours(rows)] == small
    # Work that the host does meanwhile is not what decides.
    deep = plan_of(lambda x, w: cf.softmax(x @ w.T, axis=1), (64, 8192), (512, 8192))
    assert not deep.steps[0].by_tiles, "our kernel would take the GPU much longer"
    monkeypatch.setattr(fused_product, "_HOST_SHARE", 0.0)
    assert not any(map(ours, small))


def test_quick_expressions_are_estimated_by_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by hand, too: the plan knows the operator."""

    def mish(x: Any, w: Any) -> Any:
        y = x @ w.T
        return y * np.tanh(np.log1p(np.exp(-np.abs(y))) + np.maximum(y, 0))

    shapes = (1024, 8192), (8192, 8192)
    (step,) = plan_of(mish, *shapes).steps
    assert step.fused == ("matmul", "mish") and step.epilogue is not None
    quick, seconds = quick_flops(step.epilogue), own_time(step, H200)
    monkeypatch.setitem(POINTWISE, "mish", dataclasses.replace(POINTWISE["mish"], quick_flops=0))
    assert quick_flops(step.epilogue) > 1.5 * quick and own_time(step, H200) > seconds


def test_the_arithmetic_of_a_row_program_of_its_own_counts() -> None:
    seconds = []
    with settings.epilogues("never"):
        for function in (lambda x, w: np.maximum(x @ w.T, 0), lambda x, w: cf.mish(x @ w.T)):
            seconds.append(stream_seconds(plan_of(function, (4096, 768), (3072, 768)).steps[1:], H200))
    assert seconds[0] < seconds[1] < 1.5 * seconds[0]


def test_matrices_that_an_epilogue_reads_cost_what_was_measured(always: None) -> None:
    """On an H200, behind 4096 x 768 x 3072 and 2048 x 5632 x 2048 in bfloat16: docs of `_MATRIX`."""
    functions: list[Callable[..., Any]] = [
        lambda x, w, b, *_: x @ w.T + b,
        lambda x, w, b, r, *_: x @ w.T + b + r,
        lambda x, w, b, r, f, h: (x @ w.T + f + h).astype("bfloat16"),
    ]
    for sizes, measured in (((4096, 768, 3072), (35.3, 49.2, 62.0)), ((2048, 5632, 2048), (62.6, 65.0, 68.8))):
        m, k, n = sizes
        operands = [cf.spec(s, "bfloat16") for s in ((m, k), (n, k), (n,), (m, n))]
        wide = [cf.spec((m, n), "float32")] * 2
        for function, seconds in zip(functions, measured, strict=True):
            (step,) = cf.fuse(function).plan(*operands, *wide).steps
            assert step.by_tiles and 0.85 < own_time(step, H200) * 1e6 / seconds < 1.1


def test_biases_of_several_products_are_theirs() -> None:
    """Not one row program, which would read all products but the last in float32."""

    def heads(x: Any, q: Any, k: Any, v: Any, a: Any, b: Any, c: Any) -> Any:
        return x @ q.T + a, cf.gelu(x @ k.T + b), (x @ v.T) * c, np.tanh(x)

    width = [(768, 768)] * 3
    plan = plan_of(heads, (4096, 768), *width, *[(768,)] * 3)
    assert [step.fused for step in plan.steps if step.kind == "Gemm"] == [
        ("matmul", "add"),
        ("matmul", "add", "gelu"),
        ("matmul", "multiply"),
    ]
    assert [step.fused for step in plan.steps if step.kind != "Gemm"] == [("tanh",)]
    # What shares an operand, or a reduction, stays together; so do products of float32, which are none of our kernel's.
    joint = plan_of(lambda x, q, k: (x @ q.T) * (x @ k.T), (4096, 768), *width[:2])
    assert sum("multiply" in step.fused for step in joint.steps) == 1
    wide = plan_of(heads, (64, 32), *[(32, 32)] * 3, *[(32,)] * 3, dtype="float64")
    assert [step.fused for step in wide.steps if step.kind == "RowProgram"][1:] == [("add", "add", "gelu", "multiply")]


def test_what_gains_behind_a_split_product() -> None:
    def epilogue_of(function: Callable[..., Any], m: int, k: int, n: int) -> Any:
        (step,) = (s for s in plan_of(function, (m, k), (n, k), (n,), dtype="float32").steps if s.kind == "Gemm")
        return step.epilogue

    assert epilogue_of(lambda x, w, b: cf.gelu(x @ w.T + b), 4096, 768, 3072) is not None
    assert epilogue_of(lambda x, w, b: cf.relu(x @ w.T + b), 4096, 3072, 768) is not None
    # Few tiles: an epilogue of many FLOPs runs alone on each multiprocessor's last one.
    assert epilogue_of(lambda x, w, b: cf.gelu(x @ w.T + b), 4096, 3072, 768) is None
    # Guards take registers; reductions would have to wait for the repair.
    assert epilogue_of(lambda x, w, b: (x @ w.T - b) / np.sqrt(b * b + 1) * b, 4096, 4096, 4096) is None
    assert epilogue_of(lambda x, w, b: cf.logsumexp(x @ w.T + b, axis=1), 4096, 768, 3072) is None


def test_never_means_never() -> None:
    with settings.epilogues("never"):
        plan = plan_of(lambda x, w: cf.gelu(x @ w.T), (4096, 768), (3072, 768))
    assert kinds(plan) == ["Gemm", "RowProgram"]


def test_other_values_are_refused() -> None:
    words = "epilogues: expected one of 'measured', 'always', 'never', got 'on'"
    with pytest.raises(ValueError, match=words), settings.epilogues("on"):
        pass


def test_a_call_of_another_choice_has_another_plan() -> None:
    fused = cf.fuse(lambda x, w: np.tanh(x @ w.T))
    x, w = np.ones((4, 8), np.float16), np.ones((3, 8), np.float16)
    fused(x, w)
    with settings.epilogues("always"):
        fused(x, w)
    assert len(fused.plans) == 2


TAILS: list[tuple[Callable[..., Any], list[str], int, str]] = [
    (lambda x, w, b: x @ w.T, ["Gemm"], 1, "own"),
    (lambda x, w, b: cf.gelu(x @ w.T + b), ["Gemm"], 1, "epilogue"),
    (lambda x, w, b: cf.logsumexp(x @ w.T + b, axis=1), ["Gemm"], 2, "epilogue"),
    (lambda x, w, b: ((x @ w.T).max(axis=1), cf.relu(x @ w.T).sum(axis=1)), ["Gemm"], 2, "epilogue"),
    (lambda x, w, b: cf.softmax(x @ w.T + b, axis=1), ["Gemm", "RowProgram"], 2, "epilogue"),
    (lambda x, w, b: cf.relu(x @ w.T + b) @ w.T, ["Gemm", "Gemm"], 1, "epilogue"),
    (lambda x, w, b: cf.relu(x @ w.T).sum(axis=0), ["Gemm", "ColumnStats"], 1, "a ColumnStats over 64 x 64 reads it"),
    (lambda x, w, b: np.tanh(x @ w.T) + (x @ w.T)[:1], ["Gemm", "RowProgram"], 1, "a view of it is read"),
    (
        lambda x, w, b: (x @ w.T + b, cf.softmax(x @ w.T + b, axis=1)),
        ["Gemm", "RowProgram"],
        1,
        "a result is read again, but rounded",
    ),
    (lambda x, w, b: x @ w.T > b, ["Gemm", "RowProgram"], 1, "results of 1 or 8 bytes an element follow"),
    (lambda x, w, b: (x @ w.T).astype("float64") * 2, ["Gemm", "RowProgram"], 1, "results of 1 or 8 bytes"),
]


@pytest.mark.parametrize("number", range(len(TAILS)))
def test_what_becomes_an_epilogue(always: None, number: int) -> None:
    function, expected, launches, words = TAILS[number]
    plan = plan_of(function, (64, 64), (64, 64), (64,))
    step = plan.steps[0]
    assert kinds(plan) == expected and step.launches == launches
    assert words in step.how and step.how in str(plan)
    assert "gemm_kernel" in plan.source()


def test_costly_values_of_columns_are_computed_once(always: None) -> None:
    """An epilogue would compute them for every row; a few additions are cheaper there than a launch."""
    shapes = (64, 64), (64, 64), (64,)
    costly = plan_of(lambda x, w, b: (x @ w.T) * np.exp(b), *shapes)
    assert kinds(costly) == ["RowProgram", "Gemm"]
    columns, product = costly.steps
    assert columns.domain == (1, 64) and [n.op for n in columns.nodes if n.op != "cast"] == ["exp"]
    assert columns.outputs[0] in product.inputs
    both = plan_of(lambda x, w, b: (np.sqrt(b), (x @ w.T) * np.sqrt(b)), *shapes)
    assert kinds(both) == ["RowProgram", "Gemm"] and len(both.steps[0].outputs) == 1
    assert kinds(plan_of(lambda x, w, b: (x @ w.T) * (2 * b), *shapes)) == ["Gemm"]


@pytest.mark.parametrize(
    ("function", "shapes", "words"),
    [
        (lambda x, w: x @ w.reshape(64, 60).T, ((64, 60), (60, 64)), "rows of 60 elements do not begin at multiples"),
        (lambda x, w: x @ w.reshape(64, 33), ((64, 64), (33, 64)), "rows of 33 elements do not begin at multiples"),
        (lambda x, w: x.reshape(64, 33).T @ w, ((33, 64), (64, 64)), "rows of 33 elements do not begin at multiples"),
        (lambda x, w: x @ w.T, ((64, 0), (64, 0)), "the product is empty"),
    ],
)
def test_what_the_copy_engine_cannot_read(always: None, function: Any, shapes: Any, words: str) -> None:
    (step,) = plan_of(function, *shapes).steps
    assert step.epilogue is None and step.how.startswith("cuBLAS bfloat16") and words in step.how


def test_rows_of_odd_lengths_may_be_columns_of_the_product(always: None) -> None:
    assert plan_of(lambda x, w: x @ w.T, (33, 64), (35, 64)).steps[0].epilogue is not None
    assert plan_of(lambda x, w: x @ w.T, (1, 61), (1, 61)).steps[0].epilogue is not None, "one row begins anywhere"


def test_arguments_that_are_not_contiguous(always: None) -> None:
    x = np.ones((8, 32), np.float16)[:, :16]
    w = np.ones((8, 16), np.float16)
    assert "an operand is not contiguous" in cf.fuse(lambda x, w: x @ w.T).plan(x, w).steps[0].how


def test_other_gpus_and_dtypes_are_left_alone(always: None) -> None:
    for dtype in ("float32", "float64"):
        assert all(s.epilogue is None for s in plan_of(lambda x, w: x @ w.T, (64, 64), (64, 64), dtype=dtype).steps)
    fused = cf.fuse(lambda x, w: np.tanh(x @ w.T))
    arguments = [cf.spec((64, 64), "float16")] * 2
    assert all(s.epilogue is None for s in fused.plan_for(arguments, "A100", ()).steps)


@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_the_numpy_engine_runs_the_same_plans(always: None, head: Head, rng: np.random.Generator) -> None:
    given = head.arguments(rng, 9, 64, 24, "float16")
    fused = cf.fuse(head.function)
    result = np.asarray(fused(*given), np.float64)
    with settings.epilogues("never"):
        np.testing.assert_allclose(result, np.asarray(fused(*given), np.float64), rtol=2e-3, atol=2e-3)


def test_numpy_writes_the_product_too(always: None, rng: np.random.Generator) -> None:
    x, w = normal(rng, (5, 16), "float16"), normal(rng, (7, 16), "float16")
    y, total = cf.fuse(lambda x, w: (x @ w.T, cf.relu(x @ w.T).sum(axis=1)))(x, w)
    np.testing.assert_array_equal(y, (x.astype(np.float32) @ w.T.astype(np.float32)).astype(np.float16))
    np.testing.assert_allclose(total, np.maximum(y.astype(np.float64), 0).sum(axis=1), rtol=1e-3)


def test_blocks_of_rows_have_epilogues(always: None) -> None:
    fused = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1), max_workspace=1 << 20)
    plan = fused.plan(cf.spec((4096, 64), "bfloat16"), cf.spec((1024, 64), "bfloat16"))
    assert plan.blocks is not None and plan.steps[0].epilogue is not None
    reduced = cf.fuse(lambda x, w: cf.logsumexp(x @ w.T, axis=1), max_workspace=1 << 20)
    assert reduced.plan(cf.spec((4096, 64), "bfloat16"), cf.spec((1024, 64), "bfloat16")).blocks is None


def test_variances_are_taken_in_one_pass(always: None, rng: np.random.Generator) -> None:
    plan = plan_of(lambda x, w, b: (x @ w.T + b).var(axis=1), (64, 64), (64, 64), (64,))
    assert kinds(plan) == ["Gemm"] and plan.steps[0].fused[-1] == "moment2"

    def normalized(x: Any, w: Any) -> Any:
        y = cf.relu(x @ w.T)
        return (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 1e-5)

    plan = plan_of(normalized, (64, 64), (64, 64))
    assert kinds(plan) == ["Gemm", "RowProgram"] and not any(n.reduction for n in plan.steps[1].nodes)
    x, w = normal(rng, (9, 64), "float16"), normal(rng, (40, 64), "float16")
    wide = normalized(x.astype(np.float64), w.astype(np.float64))
    np.testing.assert_allclose(cf.fuse(normalized)(x, w).astype(np.float64), wide, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: np.square(x @ w.T - (x @ w.T).max(axis=1, keepdims=True)).mean(axis=1),
        lambda x, w: np.square(cf.relu(x @ w.T) - (x @ w.T).mean(axis=1, keepdims=True)).mean(axis=1),
        lambda x, w: x.var(axis=1),
    ],
)
def test_what_is_no_variance_of_a_product_is_left_alone(always: None, function: Any) -> None:
    plan = plan_of(function, (64, 64), (64, 64))
    assert not any(n.op == "moment2" for step in plan.steps for n in step.nodes)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("shape", [(1024, 1024, 1024), (4096, 768, 3072)], ids=str)
def test_steps_read_what_steps_before_them_write(shape: tuple[int, int, int], precision: Any) -> None:
    """Also where two products share the split of an operand, and one row program reads both."""
    m, k, n = shape
    given = [cf.spec(s, "float32") for s in ((m, k), (n, k), (n, k))]
    for function in (
        lambda x, w, v: (x @ w.T) * cf.sigmoid(x @ v.T),
        lambda x, w, v: cf.logsumexp(x @ w.T, axis=1) + cf.logsumexp(x @ v.T, axis=1),
        lambda x, w, v: (cf.gelu(x @ v.T) + x @ w.T, cf.softmax(x @ w.T, axis=1)),
    ):
        for choice in ("measured", "always"):
            with settings.epilogues(choice):
                plan = cf.fuse(function, precision=precision).plan(*given)
            check_plan(plan, plan.graph.inputs)


def test_tiles() -> None:
    light, heavy = 1.6e-6, 10e-6  # seconds of a tile's results
    assert tiles_for((8192, 8192), 8192, light, 132) == Tiles(256, 2)
    assert tiles_for((128, 8192), 8192, light, 132).cluster == 1, "nothing to share"
    assert tiles_for((1024, 1024), 1024, light, 132) == Tiles(64, 1), "too few large tiles"
    assert tiles_for((4096, 768), 3072, light, 132).columns == 192, "as many tiles as fit at once"
    assert tiles_for((4096, 4096), 4096, heavy, 132).alternating, "a long epilogue, under the other tile's products"
    assert not tiles_for((1024, 1024), 1024, heavy, 132).alternating, "one tile for each block"
    for shape in ((1, 1), (129, 257), (8192, 4096)):
        for tiles in (Tiles(256, 2), Tiles(128, 1)):
            assert tiles.count_blocks(shape, 132) % tiles.cluster == 0
            assert tiles.count_tiles(shape) * 128 * tiles.columns >= shape[0] * shape[1]
