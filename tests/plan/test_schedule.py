"""Scheduling: which steps a chain becomes, what they read and write, and what holds for every schedule."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from chains import Chain, chains
from hypothesis import given, settings
from support import FLOATS, LAYOUTS, Engine, lay_out, normal, unit

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.ir import graph as g
from cupyfuse.ir.kinds import is_product
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import base_of, column_launches, column_splits
from cupyfuse.plan.schedule import columns as separate
from cupyfuse.settings import epilogues

SPECS = {
    "x": cf.spec((64, 32)),
    "w": cf.spec((48, 32)),
    "b": cf.spec(32),
    "r": cf.spec(64),
    "q": cf.spec((64, 64)),
}


def plan_of(text: str) -> Plan:
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    return cf.fuse(function).plan(*SPECS.values())


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("x + 1", "RowProgram"),
        ("x.T + 1", "RowProgram"),
        ("x", "RowProgram"),
        ("(x, x.T)", "RowProgram"),
        ("x * b + r[:, None]", "RowProgram"),
        ("r[:, None] - r[None, :]", "RowProgram"),
        ("x.sum(axis=1)", "RowProgram"),
        ("np.exp(r).sum()", "RowProgram"),
        ("x.sum(axis=1) + r", "RowProgram"),
        ("cf.softmax(x, axis=1)", "RowProgram"),
        ("cf.log_softmax(cf.softmax(x, axis=1) * b, axis=1)", "RowProgram"),
        ("(x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5) * b + b", "RowProgram"),
        ("x.sum(axis=0)", "ColumnStats"),
        ("x.var(axis=0)", "ColumnStats"),
        ("(x.sum(axis=0), x.max(axis=0), x.std(axis=0) * b)", "ColumnStats"),
        ("x.sum()", "RowProgram ColumnStats"),
        ("x.sum(axis=1).max()", "RowProgram ColumnStats"),
        ("x * x.max()", "RowProgram ColumnStats RowProgram"),
        ("x - x.mean(axis=0)", "ColumnStats RowProgram"),
        ("cf.softmax(x, axis=0)", "ColumnStats RowProgram"),
        ("cf.batch_norm(x, training=True)", "ColumnStats RowProgram"),
        ("cf.softmax(x + x.sum(axis=0), axis=1)", "ColumnStats RowProgram"),
        ("np.where(x > x.mean(axis=0), x, 0).sum(axis=0)", "ColumnStats ColumnStats"),
        ("(x.sum(axis=1, keepdims=True) - x).max(axis=0)", "RowProgram ColumnStats"),
        # The columns of what a later step reads too are reduced there: matrices are read once.
        ("(x.sum(axis=0), (x.sum(axis=1, keepdims=True) - x).max(axis=0))", "RowProgram ColumnStats"),
        ("(x.sum(axis=0) + 1, ((x - x.sum(axis=1)[:, None]) * b).max(axis=0))", "RowProgram ColumnStats"),
        ("(q.sum(axis=0), (x.sum(axis=1, keepdims=True) - x).max(axis=0))", "RowProgram ColumnStats ColumnStats"),
        ("(x.max(axis=0) - x.sum(axis=1)[:, None] * x).sum(axis=0)", "RowProgram ColumnStats ColumnStats"),
        ("(x.max(axis=0), (x.sum(axis=1) - r) @ (x / x.max(axis=0)))", "RowProgram ColumnStats ColumnStats"),
        ("x.sum(axis=1)[:, None] * x.sum(axis=0)", "ColumnStats RowProgram"),
        ("(x + 1, x.sum(axis=1), x.sum(axis=0))", "RowProgram ColumnStats"),
        ("x @ w.T", "Gemm"),
        ("x.T @ x", "Gemm"),
        ("x @ w.T @ w", "Gemm Gemm"),
        ("np.exp(x) @ w.T", "RowProgram Gemm"),
        ("cf.softmax(x @ w.T, axis=1) @ w", "Gemm RowProgram Gemm"),
        ("cf.relu(x @ w.T) + 1", "Gemm RowProgram"),
        ("x @ b", "MatVec"),
        ("b @ b", "MatVec"),
        ("cf.gelu(x @ b + r)", "MatVec"),
        ("r @ x", "ColumnStats"),
        ("(x @ w.T).sum(axis=1)", "ColumnStats MatVec"),
        ("x.reshape(-1) + 1", "RowProgram"),
        ("q + q.T", "Copy RowProgram"),
        ("x.sum(axis=1)[None] + q", "RowProgram RowProgram"),
    ],
)
def test_kinds_of_steps(text: str, kinds: str) -> None:
    assert " ".join(step.kind for step in plan_of(text).steps) == kinds


def test_whole_chains_are_one_step() -> None:
    """Any number of stages over one row, however long the chain."""
    stages = "x"
    for _ in range(6):
        stages = f"cf.gelu(cf.softmax({stages} * b, axis=1) + r[:, None])"
    (step,) = plan_of(stages).steps
    assert step.kind == "RowProgram" and step.launches == 1
    assert step.reads == 4 * (64 * 32 + 32 + 64) and step.writes == 4 * 64 * 32


@pytest.mark.parametrize(
    ("text", "reads", "writes", "flops"),
    [
        ("x + 1", [64 * 32], [64 * 32], [64 * 32]),
        ("x * x * x", [64 * 32], [64 * 32], [2 * 64 * 32]),
        ("x * b", [64 * 32 + 32], [64 * 32], [64 * 32]),
        ("x.sum(axis=1)", [64 * 32], [64], [64 * 32]),
        ("x.max(axis=0)", [64 * 32], [32], [64 * 32]),
        ("np.exp(x)", [64 * 32], [64 * 32], [8 * 64 * 32]),
        ("x @ w.T", [64 * 32 + 48 * 32], [64 * 48], [2 * 64 * 32 * 48]),
        ("x @ b", [64 * 32 + 32], [64], [2 * 64 * 32]),
        ("cf.relu(x @ w.T)", [64 * 32 + 48 * 32, 64 * 48], [64 * 48, 64 * 48], [2 * 64 * 32 * 48, 64 * 48]),
        ("x @ x.T", [2 * 64 * 32], [64 * 64], [2 * 64 * 64 * 32]),
        ("(x + 1, x * 2)", [64 * 32], [2 * 64 * 32], [2 * 64 * 32]),
        ("x > 0", [64 * 32], [64 * 32 / 4], [64 * 32]),
        ("x.astype(np.float64)", [64 * 32], [2 * 64 * 32], [0]),
        ("q + q.T", [64 * 64, 2 * 64 * 64], [64 * 64, 64 * 64], [0, 64 * 64]),
    ],
)
def test_bytes_and_flops(text: str, reads: list[int], writes: list[int], flops: list[int]) -> None:
    """In units of four bytes: every value read once a step, and written once."""
    plan = plan_of(text)
    assert [s.reads for s in plan.steps] == [4 * r for r in reads]
    assert [s.writes for s in plan.steps] == [4 * w for w in writes]
    assert [s.flops for s in plan.steps] == flops
    assert (plan.reads, plan.writes, plan.flops) == (4 * sum(reads), 4 * sum(writes), sum(flops))


@pytest.mark.parametrize("dtype", FLOATS)
def test_16_bit_values_are_kept_wide_between_steps(dtype: str) -> None:
    x, w = cf.spec((64, 32), dtype), cf.spec((48, 32), dtype)
    size, wide = dtypes.ITEMSIZE[dtype], dtypes.ITEMSIZE[dtypes.compute_dtype(dtype)]
    gemm, row = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1)).plan(x, w).steps
    assert gemm.writes == row.reads == 64 * 48 * wide and row.writes == 64 * 48 * size
    gemm, row = cf.fuse(lambda x, w: (x @ w.T, cf.softmax(x @ w.T, axis=1))).plan(x, w).steps
    assert gemm.writes == row.reads == 64 * 48 * size, "a result has its own dtype, for all who read it"


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_is_launched_for_nothing(shape: tuple[int, int]) -> None:
    assert cf.fuse(lambda x: x + 1).plan(cf.spec(shape)).launches == 0
    assert cf.fuse(lambda x: x.sum(axis=1)).plan(cf.spec(shape)).launches == (1 if shape == (5, 0) else 0)
    assert cf.fuse(lambda x: x.sum(axis=0)).plan(cf.spec(shape)).launches >= (1 if shape == (0, 5) else 0)


def test_tall_columns_are_shared_among_blocks() -> None:
    assert column_splits((1024, 8192)) == 1, "128 strips of 64 columns fill a GPU"
    assert column_launches((1024, 8192)) == 1
    assert column_splits((1_000_000, 32)) > 1 and column_launches((1_000_000, 32)) == 2
    assert column_splits((4, 1)) == 1 and column_splits((0, 0)) == 1
    for columns in (1, 4, 16, 64):  # a block reads so many elements in little more than the time of a launch
        rows = 32768 // max(4, columns)
        assert column_splits((rows - 1, columns)) == 1 < column_splits((rows, columns))
    for rows in (1, 255, 256, 512, 10_000, 10**9):
        for columns in (1, 31, 32, 33, 4096, 10**6):
            splits = column_splits((rows, columns))
            assert 1 <= splits <= 264
            assert splits == 1 or (rows // splits >= 64 and splits * -(-columns // 64) <= 264)


@pytest.mark.parametrize("shapes", [((128, 0), (0, 256)), ((0, 64), (64, 256)), ((128, 64), (64, 0))])
def test_products_without_elements_have_an_estimate(shapes: Any) -> None:
    plan = cf.fuse(lambda x, w: cf.relu(x @ w)).plan(*(cf.spec(shape, "bfloat16") for shape in shapes))
    assert 0 <= plan.estimated_time < 1e-3


# Layouts ------------------------------------------------------------------------------------------------------------

BASE = np.zeros((64, 64), np.float32)
VIEWS: dict[str, tuple[Any, bool]] = {  # a view, and whether kernels can read its rows as they lie
    "contiguous": (BASE, True),
    "rows apart": (BASE[::2], True),
    "part of each row": (BASE[:, :32], True),
    "rows backwards": (BASE[::-1], True),
    "columns apart": (BASE[:, ::2], False),
    "columns backwards": (BASE[:, ::-1], False),
    "transposed": (BASE[:32].T, False),
    "one row repeated": (np.broadcast_to(BASE[0], (64, 64)), True),
    "one column": (BASE[:, :1], True),
    "one value repeated": (np.broadcast_to(np.float32(1), (64, 64)), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_arguments_are_copied_only_where_their_rows_cannot_be_read(name: str) -> None:
    array, readable = VIEWS[name]
    steps = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(array).steps
    assert [s.kind for s in steps] == ["RowProgram"] if readable else ["Copy", "RowProgram"]
    if not readable:
        assert steps[0].fused == ("copy",) and steps[0].reads == steps[0].writes == array.size * 4
        assert steps[0].launches == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_take_transposed_matrices_as_they_are(layout: str) -> None:
    """cuBLAS reads either orientation, and rows apart; it cannot read gaps within both, or backwards."""
    x = lay_out(np, np.zeros((64, 32), np.float32), layout)
    kinds = [s.kind for s in cf.fuse(lambda x, w: x @ w.T).plan(x, np.zeros((48, 32), np.float32)).steps]
    copied = layout in ("column_gap", "reversed")
    assert kinds == (["Copy", "Gemm"] if copied else ["Gemm"])


def test_a_copy_serves_every_reader() -> None:
    transposed = BASE[:32].T
    steps = cf.fuse(lambda x: (cf.softmax(x, axis=1), cf.relu(x).sum(axis=1), x.sum(axis=0))).plan(transposed).steps
    assert [s.kind for s in steps].count("Copy") <= 1


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("(x @ w.T).T + w @ x.T", "Gemm RowProgram"),
        ("(q @ q).T + q @ q", "Gemm Copy RowProgram"),
        ("np.exp(q).T * cf.softmax(q, axis=1)", "RowProgram Copy RowProgram"),
        ("(q @ q).T @ (q @ q)", "Gemm Gemm"),
        ("(x.sum(axis=1, keepdims=True) + 1).T * q", "RowProgram RowProgram"),
        ("x.sum(axis=0, keepdims=True).T @ r[None]", "ColumnStats Gemm"),
    ],
)
def test_computed_values_are_copied_where_rows_of_them_transposed_are_read(text: str, kinds: str) -> None:
    """A kernel reads neighbouring columns; a vector transposed is the vector, and a product takes either."""
    assert sorted(s.kind for s in plan_of(text).steps) == sorted(kinds.split())


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("np.broadcast_to(x, (3, 4, 6)).reshape(72) >= 0.25", [144, 72]),  # what repeats an argument
        ("np.stack([x, x]).T * 2", [96, 96]),  # what NumPy returns for float16 arrays
    ],
)
def test_values_that_are_exact_in_16_bits_are_stored_so(text: str, written: list[int]) -> None:
    plan = cf.fuse(eval(f"lambda x: {text}", {"np": np})).plan(cf.spec((4, 6), "float16"))
    assert [s.writes for s in plan.steps] == written


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stored_16_bit_values_are_rounded_where_wide_ones_take_more_bytes_than_as_written(dtype: str) -> None:
    function = cf.fuse(lambda x, b: (x * b).reshape(1, 144)[:, 38:39] + 1)
    assert [s.writes for s in function.plan(cf.spec((3, 48), dtype), cf.spec(48, dtype)).steps] == [288, 2]


def test_stored_16_bit_values_are_rounded_beside_library_steps_that_keep_theirs_wide() -> None:
    function = cf.fuse(lambda x: np.exp(np.pad(x.sum(axis=1), (0, 28))).reshape(8, 4).max(axis=0))
    assert [s.writes for s in function.plan(cf.spec((4, 2), "float16")).steps] == [16, 128, 64, 8]


def test_steps_without_elements_move_nothing() -> None:
    plan = cf.fuse(lambda x, r: np.exp(x) * r).plan(cf.spec((3, 0)), cf.spec((3, 1)))
    assert [(s.reads, s.writes, s.launches) for s in plan.steps] == [(0, 0, 0)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_products_of_copies_read_the_dtype_that_was_stored(
    dtype: str, engine: Engine, rng: np.random.Generator
) -> None:
    """The copy of a 16-bit value keeps the dtype of what it copies, which otherwise would be the wider one."""
    x, q, w = (normal(rng, shape, dtype) for shape in ((4, 4), (4, 4), (8, 3)))
    chain = cf.fuse(lambda x, q, w: (np.exp(x).T.reshape(2, 8) @ w, (x @ q).T.reshape(2, 8) @ w))
    results = engine.host(chain(*engine.arrays([x, q, w])))
    wide = [a.astype(np.float64) for a in (x, q, w)]
    for result, exact in zip(results, chain.__wrapped__(*wide), strict=True):
        # Two roundings to the dtype on the way, and one at the end, of values below 100.
        assert np.abs(result.astype(np.float64) - exact).max() <= 300 * unit(dtype)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "text",
    [
        "(x + x).T.reshape(-1)",
        "(x + x).T.reshape(2, 3)",
        "np.tanh(x).T.ravel()",
        "(x * x).T.reshape(6, 1), (x * x).sum(1)",
        "(x @ x.T @ x).T.reshape(-1)",
        "np.exp(x).T.reshape(-1), np.exp(x).T.reshape(2, 3) @ x.T",
    ],
)
def test_results_that_are_copies_have_their_own_dtype(text: str, dtype: str, engine: Engine) -> None:
    function = eval(f"lambda x: ({text})", {"np": np})
    x = (np.arange(6).reshape(2, 3) / 4).astype(dtypes.to_numpy(dtype))
    serve, given = cf.fuse(function), engine.array(x)
    for results in (serve(given), serve.bind(x=given)()):
        results = engine.host(results if isinstance(results, tuple) else (results,))
        exact = function(x.astype(np.float64))
        for result, value in zip(results, exact if isinstance(exact, tuple) else (exact,), strict=True):
            assert result.dtype == x.dtype
            assert (np.abs(result.astype(np.float64) - value) <= 8 * unit(dtype) * (1 + np.abs(value))).all()


def test_vectors_with_gaps_are_copied() -> None:
    plan = cf.fuse(lambda x, b: x + b).plan(BASE, np.zeros(128, np.float32)[::2])
    assert [s.kind for s in plan.steps] == ["Copy", "RowProgram"]
    assert plan.steps[0].reads == 64 * 4


# What holds for every schedule --------------------------------------------------------------------------------------


def check(plan: Plan) -> None:
    """Steps report what they do, and do in their domain what their kind can do; that they are sound, `build` checks."""
    for step in plan.steps:
        assert step.fused == tuple("matmul" if is_product(n) else n.op for n in step.nodes)
        assert step.flops == sum(g.flops(n) for n in step.nodes)
        stored = plan.scheduled.storage
        assert step.writes == sum(n.size * dtypes.ITEMSIZE[stored[n]] for n in step.outputs)
        unique = dict.fromkeys(step.inputs)
        assert step.reads == sum(n.size * dtypes.ITEMSIZE[stored[base_of(n)]] for n in unique)
        if step.kind in ("Gemm", "Copy"):
            nodes = [n for n in step.nodes if n.op not in ("split", "factor")]  # of operands, and of a product
            assert nodes[1:] == list(() if step.epilogue is None else step.epilogue.nodes)
            continue
        if step.kind == "Split":
            assert {n.op for n in step.nodes} == {"split"}
            continue
        rows, columns = step.domain
        for node in step.nodes:
            if step.kind != "ColumnStats":
                assert node.shape[0] in (rows, 1) and node.shape[1] in (columns, 1)
                assert not (node.reduction and node.axis == 0)
            else:
                assert not (node.reduction and node.axis == 1)
                assert node.shape[1] in (columns, 1)
    assert plan.launches == sum(s.launches for s in plan.steps)


@pytest.mark.rotates
@settings(max_examples=settings().max_examples // 8)
@given(
    chain=chains(FLOATS, mixed=True),
    layout=st.sampled_from(LAYOUTS),
    which=st.integers(0, 7),
    forced=st.booleans(),
    precision=st.sampled_from(("highest", "high")),
)
def test_every_schedule_is_sound(chain: Chain, layout: str, which: int, forced: bool, precision: Any) -> None:
    """Also where products by our kernel, their epilogues and steps of columns are taken whatever they cost."""
    with pytest.MonkeyPatch.context() as patch, epilogues("always" if forced else "measured"):
        if forced:
            patch.setattr(separate, "_WORTH", -1.0)
        check_plans(chain, layout, which, precision)


def check_plans(chain: Chain, layout: str, which: int, precision: Any) -> None:
    arguments = [lay_out(np, a, layout) for a in chain.arrays]
    fused = cf.fuse(chain.function, precision=precision)
    check(fused.plan(*arguments))
    fixed = {n: a for k, (n, a) in enumerate(zip(chain.names, arguments, strict=True)) if which >> k & 1}
    plan = fused.bind(**fixed).plan(**{n: a for n, a in zip(chain.names, arguments, strict=True) if n not in fixed})
    check(plan)
    if plan.prepare is not None:
        check(plan.prepare)


def test_columns_are_summed_of_what_is_stored_where_that_is_less_to_read() -> None:
    """A result, or a product's operand; of 16 bits it is the rounded one, as the function as written sums it."""
    function = cf.fuse(lambda x, y: (lambda p: (p, p.sum(axis=0)))(np.exp(x) * y))
    for dtype in ("float32", "float64", "float16"):
        spec = cf.spec((64, 32), dtype)
        (columns,) = (s for s in function.plan(spec, spec).steps if s.kind == "ColumnStats")
        assert columns.reads == 64 * 32 * np.dtype(dtype).itemsize
    # Where another sum reads the arguments anyway, one pass does for both.
    both = cf.fuse(lambda x, y: (lambda p: (p, p.sum(axis=0), (x * y * y).sum(axis=0)))(x * y))
    assert [s.kind for s in both.plan(cf.spec((64, 32)), cf.spec((64, 32))).steps].count("ColumnStats") == 1


ROUNDED_IN_PART = [
    "v, cf.softmax(v, axis=0)",
    "v, v - v.max(0)",
    "v @ w, cf.softmax(v, axis=0)",
    "v, (v - v.max(0)) @ w",
    "v, v - v.T.max(1), (v - v.T.max(1)).sum(0)",
    "v.reshape(-1), v - v.max(0)",
    "v.sum(1), v.max(), np.exp(v.sum(1) - v.sum(1).max())",
]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("text", ROUNDED_IN_PART)
def test_all_readers_of_a_stored_value_see_it_rounded(text: str, dtype: str, engine: Engine) -> None:
    """What some of its readers find in memory, others do not compute unrounded: differences show it."""
    function = eval(f"lambda x, w: (lambda v: ({text}))(x * x)", {"np": np, "cf": cf})
    x = np.array([[70.75, 3.3], [70.7, 1.1], [1.0, 3.25]]).astype(dtypes.to_numpy(dtype))
    w = np.array([[1.0, 0.0], [0.0, 1.0]]).astype(x.dtype)
    results = engine.host(cf.fuse(function)(*engine.arrays([x, w])))
    written = eval(f"lambda v, w: ({text})", {"np": np, "cf": cf})
    for result, exact in zip(results, written((x * x).astype(np.float64), w.astype(np.float64)), strict=True):
        assert (np.abs(result.astype(np.float64) - exact) <= 4 * unit(dtype) * (1 + np.abs(exact))).all()


@pytest.mark.parametrize("text", ROUNDED_IN_PART)
def test_rounding_for_all_readers_costs_no_step(text: str) -> None:
    function = cf.fuse(eval(f"lambda x, w: (lambda v: ({text}))(x * x)", {"np": np, "cf": cf}))
    half, single = (function.plan(cf.spec((64, 32), t), cf.spec((32, 32), t)) for t in ("float16", "float32"))
    assert half.launches == single.launches and half.reads < single.reads and half.writes < single.writes
    assert not any("cast" in s.fused for s in single.steps)


@pytest.mark.parametrize(
    "text",
    [
        "cf.softmax(x * x, axis=0)",
        "cf.softmax(x * x, axis=1) - (x * x).max(0)",
        "x * x, cf.softmax(x * x, axis=1)",
        "x * x, (x * x).sum(0)",
        "(x * x) @ w, (x * x).sum(1)",
    ],
)
def test_values_of_16_bits_that_are_read_in_one_way_are_not_rounded(text: str) -> None:
    function = cf.fuse(eval(f"lambda x, w: ({text})", {"np": np, "cf": cf}))
    plan = function.plan(cf.spec((64, 32), "float16"), cf.spec((32, 32), "float16"))
    assert not any("cast" in s.fused for s in plan.steps)


@pytest.mark.parametrize(
    ("shape", "launches"),
    [
        ((1, 1 << 17), [2, 1]),
        ((4, 1 << 20), [2, 1]),
        ((200, 1 << 20), [2, 1]),
        ((1, 1 << 16), [1]),
        ((4096, 1 << 17), [1]),
    ],
)
def test_several_blocks_have_a_part_of_few_long_rows(shape: tuple[int, int], launches: list[int]) -> None:
    """Their reductions are a step of their own: only there can blocks share a row."""
    plan = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec(shape))
    assert [s.launches for s in plan.steps] == launches
    (reduction,) = cf.fuse(lambda x: cf.gelu(cf.logsumexp(x, axis=1))).plan(cf.spec(shape)).steps
    assert reduction.launches == (1 if shape[0] == 4096 else 2), "what follows for each row is in the merge"


def test_few_long_rows_that_change_in_place(engine: Engine, rng: np.random.Generator) -> None:
    x = normal(rng, (2, 1 << 17))

    def doubled(x: Any) -> Any:
        x *= 2
        return cf.softmax(x, axis=1)

    changed = engine.array(x)
    expected = np.asarray(cf.fuse(lambda x: cf.softmax(2 * x, axis=1))(x.astype(np.float64)))
    got = engine.host(cf.fuse(doubled)(changed))
    np.testing.assert_array_equal(engine.host(changed), 2 * x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
