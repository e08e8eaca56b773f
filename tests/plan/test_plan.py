"""Plans: what the three heads become, planning without arrays, what `bind` splits off, printing, best times."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support import FLOATS, HEADS, Head, head_logsumexp, head_softmax, head_softmax_training, head_sum

import cupyfuse as cf
from cupyfuse import devices, dtypes
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.report import quantity
from cupyfuse.plan.schedule import Step

ROWS, INNER, COLUMNS = 1024, 8192, 8192  # the benchmark shape
FEW_LONG_ROWS = (3, 5, 1_000_003)  # blocks share them: one more launch merges, and full rows are a step of their own
SHAPES = [(ROWS, INNER, COLUMNS), (1, 1, 1), (1, 5, 3), (7, 1, 3), (7, 5, 1), FEW_LONG_ROWS, (100_000, 3, 1000)]


def specs(head: Any, rows: int, inner: int, columns: int, dtype: str = "float32") -> list[cf.Spec]:
    given = [cf.spec((rows, inner), dtype), cf.spec((columns, inner), dtype), cf.spec(columns, dtype)]
    if head in (head_softmax, head_softmax_training):
        given += [cf.spec(columns, dtype)] * 4 + [cf.spec(1, dtype)]
    return given


def plan_of(head: Any, *shape: Any, bound: bool = False) -> Plan:
    arguments = specs(head, *shape)
    fused = cf.fuse(head, precision="ieee")  # one launch of cuBLAS; test_products.py has the others
    if not bound:
        return fused.plan(*arguments)
    weights = dict(zip(fused.names[1:], arguments[1:], strict=False))  # options keep their defaults
    return fused.bind(**weights).plan(arguments[0])


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def without_copies(plan: Plan) -> list[Step]:
    """Steps but those that copy arguments of 16 bits, whose rows are not aligned, for our product."""
    return [s for s in plan.steps if not (plan.scheduled.padded.intersection(s.outputs) and s.fused == ("cast",))]


def blocks(plan: Plan) -> int:
    return plan.blocks.count if plan.blocks else 1


def operators(plan: Plan) -> set[str]:
    return {name for step in plan.steps for name in step.fused}


# The three heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_sum_with_bound_weights_is_one_launch_without_a_product(shape: tuple[int, ...], dtype: str) -> None:
    plan = plan_of(head_sum, *shape, dtype, bound=True)
    if shape[2] == 1:  # nothing to sum: the product with one column is all there is
        assert plan.launches <= 2
        return
    assert plan.launches == 1 and len(plan.steps) == 1
    assert "matmul" not in operators(plan)
    if shape == SHAPES[0]:
        assert kinds(plan) == ["MatVec"] and plan.flops < 2.1 * ROWS * INNER
        assert plan.prepare is not None and "ColumnStats" in kinds(plan.prepare)


def test_head_sum_without_bound_weights_reads_the_weight_once() -> None:
    plan = plan_of(head_sum, *SHAPES[0])
    assert "Gemm" not in kinds(plan) and kinds(plan)[-1] == "MatVec"
    assert plan.reads <= 4 * (INNER * COLUMNS + ROWS * INNER) * 1.001
    assert plan.best_time("H200") <= 80e-6


def assert_a_product_and_one_launch(plan: Plan) -> None:
    """Check that a row program follows the product, which cuBLAS or an epilogue stores, or is its epilogue.

    One more launch merges the reductions of an epilogue.

    Where weights are not bound, many rows share what one more launch computes for each column.
    """
    of_columns = [s for s in plan.steps if s.domain[0] == 1 < plan.graph.outputs[0].shape[0]]
    steps = [s for s in without_copies(plan) if s not in of_columns]
    epilogue = None if steps[0].by_library else steps[0].epilogue
    if epilogue is not None and not epilogue.nodes:  # it stores the product
        epilogue = None
    assert [s.kind for s in steps] == (["Gemm", "RowProgram"] if epilogue is None else ["Gemm"])
    merged = epilogue is None or any(n.reduction for n in epilogue.nodes)
    copies = len(plan.steps) - len(without_copies(plan))
    assert plan.launches == ((2 if merged else 1) + len(of_columns) + copies) * blocks(plan)
    assert len(of_columns) <= (plan.prepare is None)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_logsumexp_is_a_product_and_one_launch(shape: tuple[int, ...], dtype: str, bound: bool) -> None:
    plan = plan_of(head_logsumexp, *shape, dtype, bound=bound)
    if shape == FEW_LONG_ROWS:
        twice = dtype == "float64"  # a pass for the maxima, and one for the rest
        assert kinds(plan) == ["Gemm"] + ["RowProgram"] * (1 + twice) and plan.launches == 3 + 2 * twice
        return
    assert_a_product_and_one_launch(plan)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_head_softmax_in_inference_is_a_product_and_one_launch(shape: Any, dtype: str, bound: bool) -> None:
    plan = plan_of(head_softmax, *shape, dtype, bound=bound)
    if shape == FEW_LONG_ROWS:
        # One of them computes numbers of the columns, where weights are not bound.
        assert kinds(plan) == ["Gemm"] + ["RowProgram"] * (2 if bound else 3) and plan.launches == 5 - bound
        return
    assert_a_product_and_one_launch(plan)
    if bound and shape == SHAPES[0]:
        # y once, and four numbers a column: bias, mean, gamma over the deviation, beta. One scale for all.
        wide = 8 if dtype == "float64" else 4
        size = dtypes.ITEMSIZE[dtype]
        assert plan.steps[1].reads == wide * (ROWS * COLUMNS + COLUMNS) + size * (3 * COLUMNS + 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] > 1])
def test_head_softmax_in_training_is_a_product_the_statistics_and_one_launch(shape: Any, dtype: str) -> None:
    plan = cf.fuse(head_softmax_training, precision="ieee").plan(*specs(head_softmax_training, *shape, dtype), None)
    steps = [step.kind for step in without_copies(plan)]
    assert steps == ["Gemm", "ColumnStats", "RowProgram"] + ["RowProgram"] * (shape == FEW_LONG_ROWS)
    assert plan.launches == 3 or shape != SHAPES[0]


def test_elements_of_head_softmax_in_training_are_not_divided_by_their_deviation() -> None:
    """The exact form of a folded scale, a division, is taken only where it lets steps share a launch."""
    arguments = specs(head_softmax_training, *SHAPES[0])
    step = cf.fuse(head_softmax_training).plan(*arguments, None).steps[-1]
    assert step.fused.count("divide") == 1 and "guard" in step.fused


def test_counting_batches_costs_no_launch_of_its_own() -> None:
    arguments = specs(head_softmax_training, *SHAPES[0])
    fused = cf.fuse(head_softmax_training, precision="ieee")
    assert fused.plan(*arguments, cf.spec((), "int64")).launches == 3


def test_bytes_and_flops_of_head_logsumexp() -> None:
    gemm, row = plan_of(head_logsumexp, *SHAPES[0]).steps
    assert gemm.reads == 4 * (ROWS * INNER + COLUMNS * INNER) and gemm.writes == 4 * ROWS * COLUMNS
    assert gemm.flops == 2 * ROWS * INNER * COLUMNS
    assert row.reads == 4 * (ROWS * COLUMNS + COLUMNS) and row.writes == 4 * ROWS
    assert row.domain == (ROWS, COLUMNS)
    assert row.fused[0] == "add" and row.fused[-4:] == ("leaky_relu", "leaky_relu", "gelu", "gelu")


@pytest.mark.parametrize("head", HEADS, ids=lambda h: h.name)
def test_no_rows_launch_nothing(head: Head) -> None:
    assert plan_of(head.function, 0, 5, 7, bound=True).launches == 0


# Without arrays -----------------------------------------------------------------------------------------------------


def test_arrays_and_specs_give_the_same_plan(rng: np.random.Generator) -> None:
    for head in HEADS:
        for shape in ((6, 5, 7), (1, 5, 7), (6, 1, 7), (6, 5, 1), (0, 5, 7)):
            arguments = head.arguments(rng, *shape)
            fused = cf.fuse(head.function)
            described = [cf.spec(a.shape, a.dtype) for a in arguments]
            assert str(fused.plan(*arguments)) == str(fused.plan(*described))
            assert str(fused.plan(arguments[0], *described[1:])) == str(fused.plan(*described))


@pytest.mark.parametrize("vector", [(7, 1), (1, 5), (1, 1), (7,), (1,), ()])
def test_vectors_are_described_as_they_lie(vector: tuple[int, ...]) -> None:
    """A column that is transposed is a row that lies as well: specs know that as arrays do."""
    fused = cf.fuse(lambda z, v: z * v.T)
    steps = fused.plan(np.ones((5, 7), np.float32), np.ones(vector, np.float32)).steps
    described = fused.plan(cf.spec((5, 7)), cf.spec(vector)).steps
    assert [(s.kind, s.reads, s.launches) for s in steps] == [(s.kind, s.reads, s.launches) for s in described]


def test_forms_of_a_spec() -> None:
    assert cf.spec(5) == cf.spec((5,)) == cf.spec([5], "float32") == cf.spec(np.int64(5), np.float32)
    assert cf.spec((2, 3), np.dtype("f8")) == cf.Spec((2, 3), "float64")
    assert cf.spec(()).ndim == 0 and cf.spec((2, 3)).ndim == 2
    for wrong in ((-1,), (2, -3)):
        with pytest.raises(ValueError, match="shape"):
            cf.spec(wrong)
    assert cf.spec(3, np.int32).dtype == "int32"
    with pytest.raises(TypeError, match="str"):
        cf.spec(3, "U4")
    with pytest.raises(TypeError):
        cf.spec((2.5, 3))
    assert [o.shape for o in cf.fuse(lambda x: x).plan(cf.spec((2, 3, 4))).outputs] == [(2, 3, 4)]


def test_planning_is_quick_and_needs_no_memory() -> None:
    """Ten million rows by a million columns: no array of that size could exist here."""
    plan = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1)).plan(cf.spec((10**7, 64)), cf.spec((10**6, 64)))
    # The blocks have few rows, which several thread blocks share: the maxima and sums of rows are stored between steps,
    # and merged in a launch of their own.
    assert plan.writes == 2 * 4 * 10**13 + 2 * 4 * 10**7 and kinds(plan) == ["Gemm", "RowProgram", "RowProgram"]
    assert plan.blocks is not None and plan.launches == 4 * plan.blocks.count


def test_plans_do_not_depend_on_what_was_called_before(rng: np.random.Generator) -> None:
    fused = cf.fuse(head_softmax)
    first = str(fused.plan(*specs(head_softmax, 6, 5, 7)))
    fused(*HEADS[2].arguments(rng, 6, 5, 7))
    assert str(fused.plan(*specs(head_softmax, 6, 5, 7))) == first


# What bind splits off -----------------------------------------------------------------------------------------------


def split(text: str, bound: str, **shapes: Any) -> Plan:
    given = {"x": cf.spec((64, 32)), "w": cf.spec((48, 32)), "b": cf.spec(48), "c": cf.spec(32), **shapes}
    fused = cf.fuse(eval(f"lambda x, w, b, c: {text}", {"np": np, "cf": cf}))
    return fused.bind(**{k: given[k] for k in bound}).plan(**{k: v for k, v in given.items() if k not in bound})


@pytest.mark.parametrize(
    ("text", "bound", "prepared", "left"),
    [
        ("(x @ w.T).sum(axis=1)", "w", ["ColumnStats"], ["MatVec"]),
        ("x * np.exp(c)", "c", ["RowProgram"], ["RowProgram"]),
        ("x @ (w * 2).T", "w", ["RowProgram"], ["Gemm"]),
        ("x + w.sum(axis=0) / 3", "w", ["ColumnStats"], ["RowProgram"]),
        ("x + c", "c", [], ["RowProgram"]),
        ("x @ w.T + b", "wb", [], ["Gemm", "RowProgram"]),
        ("x * 2", "", [], ["RowProgram"]),
        ("(x @ w.T) + (w @ w.T).sum(axis=0)", "w", ["ColumnStats"], ["Gemm", "RowProgram"]),
    ],
)
def test_values_of_bound_arguments_alone_are_prepared(text: str, bound: str, prepared: Any, left: Any) -> None:
    plan = split(text, bound)
    assert (kinds(plan.prepare) if plan.prepare else [])[-1:] == prepared[-1:]
    assert kinds(plan) == left


def test_an_argument_that_changes_is_never_prepared_from() -> None:
    def function(x: Any, total: Any) -> Any:
        total += x.sum(axis=0)
        return x * np.exp(total)

    plan = cf.fuse(function).bind(total=cf.spec(32)).plan(cf.spec((64, 32)))
    assert plan.prepare is None


def test_rows_that_come_again_are_prepared_once() -> None:
    fused = cf.fuse(lambda x, m: np.maximum(x + np.exp(m)[:, None], 0))
    plan = fused.bind(m=cf.spec((4, 6, 32))).plan(cf.spec((4, 8, 6, 32)))
    kept = [o.node.size for o in plan.prepare.outputs] if plan.prepare else []
    assert sum(kept) <= 4 * 6 * 32 and plan.launches == 1
    m, x = np.ones((4, 6, 32), "float32"), np.ones((4, 8, 6, 32), "float32")
    np.testing.assert_allclose(fused.bind(m=m)(x), x + np.exp(m)[:, None], rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "x @ (w.reshape(4, 8, 32) * m[:, None]).reshape(32, 32)",  # other rows, each with one that comes again
        "x + w.reshape(4, 8, 32) * m[:, None]",
        "x @ np.exp(np.broadcast_to(m[:, None], (4, 8, 32))).reshape(32, 32)",  # a product reads all rows
    ],
)
def test_weights_that_are_computed_with_rows_that_come_again_are_prepared_once(text: str) -> None:
    fused = cf.fuse(eval(f"lambda x, w, m: {text}", {"np": np}))
    plan = fused.bind(w=cf.spec((32, 32)), m=cf.spec((4, 32))).plan(cf.spec((4, 8, 32)))
    assert plan.prepare is not None and [o.node.size for o in plan.prepare.outputs] == [32 * 32]
    assert plan.launches == 1


@pytest.mark.parametrize(
    ("text", "quick"),
    [
        ("x * np.exp(c)", True),
        ("x * (w + 1)", False),  # a matrix
        ("x + w.sum(axis=0)", False),
        ("(x @ w.T).sum(axis=1)", False),
        ("np.maximum((x.reshape(8, 4, 64) - c[:4, None]) / np.sqrt(c[:4, None]), 0)", True),
    ],
)
def test_what_takes_less_time_than_a_check_is_not_prepared_where_calls_check(text: str, quick: bool) -> None:
    fused = cf.fuse(eval(f"lambda x, w, c: {text}", {"np": np}))
    traced = fused.trace([cf.spec((64, 32)), cf.spec((64, 32)), cf.spec(32)])
    bound = frozenset({1, 2})
    assert build(traced, bound=bound).prepare is not None
    assert (build(traced, bound=bound, checked=True).prepare is None) == quick


def test_prepared_values_are_inputs_of_the_plan() -> None:
    plan = plan_of(head_softmax, 6, 5, 7, bound=True)
    names = [n.name for n in plan.graph.inputs]
    assert names[:3] == ["x", "weight", "bias"] and names[-2:] == ["scale", "prepacked0"]
    assert plan.prepare is not None and len(plan.prepare.outputs) == 1


# Printing -----------------------------------------------------------------------------------------------------------


def test_a_plan_reads_as_a_report() -> None:
    text = str(plan_of(head_softmax, *SHAPES[0], bound=True))
    assert text.startswith("plan of head_softmax(x 1024 x 8192 float32")
    for part in (
        "1. Gemm over 1024 x 8192: 1 launch; reads 302 MB, writes 33.6 MB, 137 GFLOP",
        "2. RowProgram over 1024 x 8192: 1 launch",
        "fused: add, subtract, multiply, guard, add, multiply, max, subtract, exp, expsum, divide",
        "prepacked once, when the arguments are bound:",
        "divide -> multiply; saves 3.36e+07 FLOPs",
        "evaluated as written",
        "fused:   2 launches, 403 MB moved, 138 GFLOP; at best",
        "unfused: 4 operations (linear, batch_norm, multiply, softmax), 537 MB moved",
    ):
        assert part in text, f"{part!r} is not in\n{text}"
    assert "object at 0x" not in text and max(map(len, text.splitlines())) < 400


def test_the_report_names_the_functions_that_users_wrote() -> None:
    text = str(cf.fuse(lambda x, w: np.exp(x @ w.T).sum(axis=1)).plan(cf.spec((6, 5)), cf.spec((7, 5))))
    assert "3 operations (matmul, exp, sum)" in text
    assert "plan of <lambda>(x 6 x 5 float32, w 7 x 5 float32), precision highest" in text


def test_the_report_of_nothing() -> None:
    assert "1 launch" in str(cf.fuse(lambda x: x).plan(cf.spec(3)))
    assert "0 launches" in str(cf.fuse(lambda x: x).plan(cf.spec(0)))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (33_554_432, "33.6 MB"), (2.5e9, "2.5 GB"), (1.374e11, "137 GB")]
    + [(1.5e13, "15 TB"), (1, "1 B"), (12_345, "12.3 kB")],
)
def test_quantities(value: float, text: str) -> None:
    assert quantity(value, "B") == text


def test_the_source_of_a_plan_is_cuda() -> None:
    source = plan_of(head_logsumexp, *SHAPES[0]).source()
    assert "struct" in source and "#include" in source
    assert "#include" not in re.sub(r"#include <.*>", "", plan_of(head_logsumexp, *SHAPES[0]).source(inline=True))


def test_the_source_of_a_plan_in_blocks_of_rows() -> None:
    def total(x: Any, weight: Any) -> Any:
        return cf.logsumexp(x @ weight.T, axis=1).sum()

    plan = cf.fuse(total, max_workspace=1 << 12).plan(cf.spec((64, 32), "float32"), cf.spec((128, 32), "float32"))
    assert plan.blocks is not None and len(plan.parts) > 1
    assert plan.source().count("struct") >= sum(step.kind == "RowProgram" for step in plan.steps) > 0


# Best times ---------------------------------------------------------------------------------------------------------


def test_best_time_is_bytes_or_flops_whichever_takes_longer() -> None:
    device = devices.DEVICES["H200"]
    row = cf.fuse(lambda x: x + 1).plan(cf.spec((1024, 1024)))
    assert row.best_time("H200") == pytest.approx(2 * 4 * 2**20 / device.bandwidth)
    product = cf.fuse(lambda x, w: x @ w.T, precision="ieee").plan(cf.spec((4096, 4096)), cf.spec((4096, 4096)))
    assert product.best_time("H200") == pytest.approx(2 * 4096**3 / device.simt)
    assert product.best_time() == product.best_time("NVIDIA H200")
    assert row.best_time("T4") > row.best_time("A100") > row.best_time("H200")


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [("float32", "ieee", "simt"), ("float32", "tf32", "half"), ("float32", "high", "half")]
    + [("float16", "highest", "half"), ("bfloat16", "highest", "half")]
    + [("float64", "highest", None), ("float64", "medium", None)],
)
def test_precision_and_dtype_choose_the_unit(dtype: str, precision: str, rate: str | None) -> None:
    x = cf.spec((8192, 8192), dtype)
    with cf.precision(precision):
        plan = cf.fuse(lambda x, w: x @ w).plan(x, x)
    h200 = devices.DEVICES["H200"]
    peak = getattr(h200, rate) if rate else h200.simt64
    splits = rate == "half" and dtype == "float32"  # a few operations for each element of the operands
    assert plan.best_time("H200") == pytest.approx(2 * 8192**3 / peak, rel=0.01 if splits else 1e-9)


def test_unknown_gpus() -> None:
    with pytest.raises(ValueError, match=r"gpu: expected one of H200.*'GTX 960'"):
        cf.fuse(lambda x: x + 1).plan(cf.spec(3)).best_time("GTX 960")


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("h200", "H200"),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA T400 4GB", None),
        ("Quadro T4000", None),
        ("", None),
    ],
)
def test_names_of_gpus_as_drivers_report_them(reported: str, name: str | None) -> None:
    assert devices.is_known(reported) == (name is not None)
    if name is not None:
        assert devices.find(reported).name == name
