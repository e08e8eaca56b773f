"""What is computed again and what is stored: no plan costs much more than its operations one by one."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from searched import EXAMPLES, searched
from support import HOST, Engine, dtype_of, normal, unit

import cupyfuse as cf
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import MOST_FLOPS, cost_of, recompute, unfused_cost
from cupyfuse.plan.schedule.partition import Scheduler
from cupyfuse.settings import force_plans


def sinkhorn(k: Any, iterations: int) -> Any:
    for _ in range(iterations):
        k = k / k.sum(axis=1, keepdims=True)
        k = k / k.sum(axis=0)
    return k


def log_sinkhorn(k: Any, iterations: int) -> Any:
    for _ in range(iterations):
        k = k - cf.logsumexp(k, axis=1, keepdims=True)
        k = k - cf.logsumexp(k, axis=0)
    return k


def scaling_vectors(k: Any, iterations: int) -> Any:
    u = k.sum(axis=1)
    for _ in range(iterations):
        v = 1 / (k.T @ u)
        u = 1 / (k @ v)
    return u[:, None] * k * v


def centred(x: Any, times: int) -> Any:
    for _ in range(times):
        x = np.tanh(x - x.mean(axis=1, keepdims=True))
        x = x - x.mean(axis=0)
    return x


def centred_with_products(x: Any, times: int) -> Any:
    for _ in range(times):
        x = (x - x.max(axis=0)) @ (x.T @ x)
        x = x / (1 + np.abs(x).max(axis=1, keepdims=True))
    return x


def each_step_kept(x: Any, times: int) -> Any:
    """Every value is a result, or read again at the end."""
    values = [x]
    for _ in range(times):
        values.append(np.exp(values[-1] - values[-1].max(axis=len(values) % 2, keepdims=True)))
    total = values[0]
    for value in values[1:]:
        total = total + value * value.sum(axis=0)
    return total, values[-1], values[len(values) // 2]


PROGRAMS = [sinkhorn, log_sinkhorn, scaling_vectors, centred, centred_with_products, each_step_kept]


def plan_of(program: Any, count: int, shape: tuple[int, int], dtype: str = "float64") -> Plan:
    return cf.fuse(lambda x: program(x, count)).plan(cf.spec(shape, dtype))


def copied(plan: Plan) -> int:
    """Bytes moved to give an argument a layout that kernels read."""
    return sum(s.reads + s.writes for s in plan.steps if s.kind == "Copy")


@pytest.mark.rotates
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("shape", [(100, 100), (300, 40), (40, 300)])
def test_cost_grows_linearly_with_the_length_of_a_program(program: Any, shape: tuple[int, int]) -> None:
    if program is scaling_vectors and shape[0] != shape[1]:
        shape = (shape[0], shape[0])
    plans = [plan_of(program, n, shape) for n in (20, 40, 60)]
    for first, second in itertools.pairwise(itertools.pairwise(plans)):
        steps, flops, moved = (
            [f(q) - f(p) for p, q in (first, second)]
            for f in (lambda p: len(p.steps), lambda p: p.flops, lambda p: p.reads + p.writes)
        )
        assert steps[0] == steps[1] > 0
        assert abs(flops[1] / flops[0] - 1) < 0.02 and abs(moved[1] / moved[0] - 1) < 0.02
    for plan in plans:
        written = unfused_cost(plan.graph)
        cost = cost_of(plan.steps)
        assert cost.repeatable <= MOST_FLOPS * written.repeatable and cost.products == written.products
        assert plan.reads + plan.writes - copied(plan) <= written.bytes


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_deep_programs_are_right(program: Any, engine: Engine, rng: np.random.Generator) -> None:
    x = np.abs(normal(rng, (6, 6), "float64")) + 0.1
    function = cf.fuse(lambda x: program(x, 7))
    expected = program(x, 7)
    results = engine.host(function(*engine.arrays([x])))
    pairs = [(results, expected)] if not isinstance(expected, tuple) else zip(results, expected, strict=True)
    for result, value in pairs:
        np.testing.assert_allclose(result, value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, -0.0])
def test_deep_programs_of_special_values(special: float, engine: Engine, rng: np.random.Generator) -> None:
    x = normal(rng, (5, 4), "float64")
    x[1, 2] = special
    with np.errstate(all="ignore"):
        expected = sinkhorn(x, 6)
    result = engine.host(cf.fuse(lambda x: sinkhorn(x, 6))(*engine.arrays([x])))
    np.testing.assert_allclose(result, expected, rtol=1e-9)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 5), (5, 1), (1, 1)])
def test_deep_programs_of_few_elements(shape: tuple[int, int], engine: Engine, rng: np.random.Generator) -> None:
    x = np.abs(normal(rng, shape, "float64")) + 0.1
    result = engine.host(cf.fuse(lambda x: sinkhorn(x, 6))(*engine.arrays([x])))
    np.testing.assert_allclose(result, sinkhorn(x, 6), rtol=1e-12)


@pytest.mark.parametrize("layout", ["fortran", "row_gap", "column_gap", "reversed", "transposed", "misaligned"])
def test_deep_programs_of_any_layout(layout: str, engine: Engine, rng: np.random.Generator) -> None:
    x = np.abs(normal(rng, (5, 7), "float64")) + 0.1
    result = engine.host(cf.fuse(lambda x: sinkhorn(x, 6))(engine.array(x, layout)))
    np.testing.assert_allclose(result, sinkhorn(x, 6), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_deep_programs_in_narrow_dtypes(dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    """Each of 12 divisions and sums of 6 elements may round, in float32 or, where it is stored, in the dtype."""
    x = (np.abs(normal(rng, (6, 6))) + 0.5).astype(cf.dtypes.to_numpy(dtype))
    result = engine.host(cf.fuse(lambda x: sinkhorn(x, 6))(*engine.arrays([x])))
    exact = sinkhorn(x.astype(np.float64), 6)
    assert result.dtype == x.dtype
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=100 * unit(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_values_are_stored_rounded_sums_are_not(dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    """A result wider than the argument makes the plan round what it stores; a softmax still rounds once."""

    def program(x: Any) -> Any:
        return cf.avg_pool1d(cf.softmax(-x, axis=0), 1).astype(np.float64)

    x = (8 * normal(rng, (32, 2))).astype(cf.dtypes.to_numpy(dtype))
    result = engine.host(cf.fuse(program)(*engine.arrays([x])))
    exact = np.exp(-x.astype(np.float64) - np.max(-x.astype(np.float64), axis=0))
    exact /= exact.sum(axis=0)
    np.testing.assert_allclose(
        result, exact, rtol=1.01 * unit(dtype), atol=float(np.finfo(np.float16).smallest_subnormal)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_where_values_are_stored_rounded_means_are_not(dtype: str, engine: Engine) -> None:
    """A mean is a sum divided: rounded to the dtype, this one would be as far from the elements as they are apart."""
    x = (1 + 2 * unit(dtype) * (np.arange(32) % 2)).astype(cf.dtypes.to_numpy(dtype))[:, None]

    def rounding(graph: Any, once: Any) -> Any:
        yield Scheduler(graph, round_stored=True)

    with mock.patch.object(recompute, "_candidates", rounding), force_plans():
        result = engine.host(cf.fuse(lambda x: np.std(x, axis=None))(*engine.arrays([x])))
    np.testing.assert_allclose(result.astype(np.float64), unit(dtype), rtol=4 * unit(dtype))


def test_what_another_domain_computes_again_reads_stored_values(engine: Engine) -> None:
    """A scalar is stored by one step and read, through a function of it, by a step over more columns."""

    def program(x: Any) -> Any:
        y = np.cos(x)
        y = y / (1 + np.abs(y))
        return np.broadcast_to(np.tanh(y), (3, 1)) * 1, y

    function, x = cf.fuse(program), np.array(0.7)
    for result, value in zip(engine.host(function(*engine.arrays([x]))), program(x), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-14)
    plan = function.plan(cf.spec((), "float64"))
    assert plan.flops <= MOST_FLOPS * unfused_cost(plan.graph).flops


def standardised(x: Any) -> Any:
    return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + 1e-5)


def softmax_gradient(y: Any, cotangent: Any, mean: Any, deviation: Any) -> Any:
    """The gradient of the rows behind a softmax of standardised columns."""
    centred = (y - mean) / deviation
    weights = np.exp(centred - centred.max(axis=1, keepdims=True))
    weights = weights / weights.sum(axis=1, keepdims=True)
    along_rows = weights * (cotangent - (weights * cotangent).sum(axis=1, keepdims=True))
    return along_rows - along_rows.sum(axis=0) / len(y) - centred * ((along_rows * centred).sum(axis=0) / len(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_takes_few_operations_is_not_stored(dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    """Three steps need the centred elements: each computes them from the argument, which it may read anyway."""
    shape = (70, 96)
    arrays = [normal(rng, s, dtype) for s in (shape, shape, shape[1:])]
    arrays.append(np.abs(normal(rng, shape[1:], dtype)) + dtype_of(dtype).type(1))
    function = cf.fuse(softmax_gradient)
    plan = function.plan(*(cf.spec(a.shape, dtype) for a in arrays))
    stored = [n for step in plan.steps[:-1] for n in step.outputs if n.shape == shape]
    assert len(plan.steps) == 3 and len(stored) == 1, plan
    expected = softmax_gradient(*(a.astype(np.float64) for a in arrays))
    found = engine.host(function(*engine.arrays(arrays)))
    assert np.abs(found - expected).max() <= 32 * unit(dtype) * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_operands_of_products_are_read_again(dtype: str, engine: Engine, rng: np.random.Generator) -> None:
    """Where two matrices would have to be read to compute one that is stored anyway."""

    def program(a: Any, x: Any, w: Any, v: Any) -> Any:
        h = standardised(a @ w.T + x)
        return standardised(cf.gelu(h @ v.T) @ v + h)

    function = cf.fuse(program)
    shapes = [(96, 64), (96, 64), (64, 64), (128, 64)]
    last = function.plan(*(cf.spec(s, dtype) for s in shapes)).steps[-1]
    assert len(last.nodes) < 15, "one norm"
    assert sum(n.size == 96 * 64 for n in last.inputs) == 2, "the product, and what it is added to"
    arguments = [normal(rng, s, dtype) * dtype_of(dtype).type(s[1] ** -0.5) for s in shapes]
    with force_plans():
        result = engine.host(function(*engine.arrays(arguments)))
    exact = program(*(a.astype(np.float64) for a in arguments))
    # Sums of 64 and 128 terms round to a few units; two norms, of elements below 4, carry that on.
    np.testing.assert_allclose(result.astype(np.float64), exact, rtol=0, atol=64 * unit(dtype))


@pytest.mark.parametrize("activation", [lambda y: y, cf.relu], ids=["linear", "relu"])
def test_column_steps_read_what_is_rounded_for_all(activation: Any, engine: Engine, rng: np.random.Generator) -> None:
    """Not the float32 product, of twice the bytes, which nothing else reads."""

    def program(x: Any, w: Any, b: Any) -> Any:
        y = activation(x @ w.T + b)
        return y, (y - y.mean(axis=0)) / np.sqrt(y.var(axis=0) + 1)

    function = cf.fuse(program)
    shapes = [(64, 32), (96, 32), (96,)]
    product, columns, _ = function.plan(*(cf.spec(s, "bfloat16") for s in shapes)).steps
    (stored,) = product.outputs
    assert columns.kind == "ColumnStats" and columns.inputs == (stored,) and stored.dtype == "bfloat16"
    arrays = [normal(rng, s, "bfloat16") for s in shapes]
    y, normalised = engine.host(function(*engine.arrays(arrays)))
    exact = np.asarray(y, np.float64)
    exact = (exact - exact.mean(axis=0)) / np.sqrt(exact.var(axis=0) + 1)
    np.testing.assert_allclose(normalised.astype(np.float64), exact, rtol=0, atol=4 * unit("bfloat16"))


def test_column_steps_read_vectors_that_other_steps_of_their_layer_store(
    engine: Engine, rng: np.random.Generator
) -> None:
    """A vector costs too much to compute again; two row steps and a column step, of the same layer, need it."""

    def program(x: Any, y: Any) -> Any:
        for _ in range(20):
            y = np.exp(-y)
        return x.sum(axis=0) * y, x * y, x[1:] * y

    function, arguments = cf.fuse(program), [normal(rng, (3, 5), "float64"), normal(rng, 5, "float64")]
    with force_plans():
        results = engine.host(function(*engine.arrays(arguments)))
    for result, value in zip(results, program(*arguments), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-12)
    plan = function.plan(*arguments)
    assert plan.flops <= MOST_FLOPS * unfused_cost(plan.graph).flops


def test_parts_that_are_assigned_to_are_computed_once(engine: Engine) -> None:
    """What is assigned is an effect, and read over more rows."""

    def program(x: Any, y: Any) -> Any:
        y[::2] = y[1]
        y = y * 1
        return y - x

    x, y = engine.arrays([np.ones((3, 5)), np.arange(5.0)])
    with force_plans():
        np.testing.assert_array_equal(engine.host(cf.fuse(program)(x, y)), [[0, 0, 0, 2, 0]] * 3)
    np.testing.assert_array_equal(engine.host(y), [1, 1, 1, 3, 1])


# Random deep programs -----------------------------------------------------------------------------------------------

LINES = (
    "{0} - {0}.max(axis=1, keepdims=True)",
    "{0} / {0}.sum(axis=1, keepdims=True)",
    "{0} - {0}.mean(axis=0)",
    "{0} / (1 + {0}.std(axis=0))",
    "{0} * {0}.max(axis=0) + np.exp(b) * {0}.min(axis=1, keepdims=True)",
    "cf.softmax({0}, axis=1)",
    "cf.softmax({0}, axis=0)",
    "np.tanh({0})",
    "np.exp(-np.abs({0}))",
    "{0} + {1}",
    "{0} * {1}",
    "{0} - {1}.sum(axis=0)",
    "{0} * b",
    "{0} / (1 + np.abs({0}).sum())",
    "np.where({0} > {1}, {0}, b)",
    "({0} @ w) * 0.1",
    "({0} @ ({1}.T @ {0})) * 0.01",
)


@st.composite
def deep_programs(draw: Any, longest: int = 60) -> tuple[str, int]:
    """Draw the source of a program of one matrix `x`, and the number of its lines."""
    count = draw(st.sampled_from([n for n in (5, 12, 30, 60) if n <= longest]))
    some = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=6, unique=True))
    names, lines = ["x"], []
    for n in range(count):
        other = names[-1 - draw(st.integers(0, min(len(names) - 1, draw(st.sampled_from((1, 3, 40))))))]
        lines.append(f"    v{n} = " + draw(st.sampled_from(some)).format(names[-1], other))
        names.append(f"v{n}")
    returned = ", ".join(dict.fromkeys([names[-1], *draw(st.lists(st.sampled_from(names[1:]), max_size=3))]))
    return "\n".join(["def program(x, b, w):", *lines, f"    return ({returned},)"]), count


def compiled(source: str) -> Any:
    scope: dict[str, Any] = {"np": np, "cf": cf}
    exec(source, scope)
    return scope["program"]


PARTS = 3  # in which examples are drawn
FLOATS, SEEDS = st.sampled_from(["float32", "float64"]), st.integers(0, 2**32 - 1)
LARGER = st.sampled_from([(64, 48), (300, 200), (48, 5), (5, 48), (1, 40), (40, 1)])


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(PARTS))
def test_no_plan_costs_more_than_its_operations(part: int) -> None:
    @searched(part, EXAMPLES // 8 // PARTS, program=deep_programs(), shape=LARGER, dtype=FLOATS)
    def check(program: tuple[str, int], shape: tuple[int, int], dtype: str) -> None:
        source, _ = program
        columns = shape[1]
        fused = cf.fuse(compiled(source))
        arguments = cf.spec(shape, dtype), cf.spec(columns, dtype), cf.spec((columns, columns), dtype)
        plan, traced = fused.plan(*arguments), fused.trace(arguments)
        written, cost = unfused_cost(traced.graph), cost_of(plan.steps)
        # A mean's division is not in its count.
        divisions = 2 * sum(shape) * len(plan.calls)
        assert cost.products <= written.products
        assert cost.repeatable <= MOST_FLOPS * written.repeatable + divisions
        assert cost.bytes - copied(plan) <= written.bytes + 8 * 3 * divisions
        assert (cost.flops, cost.bytes) == (plan.flops, plan.reads + plan.writes)

    check()


def agree(function: Any, arguments: list[Any], results: Any, rng: np.random.Generator) -> None:
    """Assert that results are those of the function as written."""
    with np.errstate(all="ignore"):
        expected = function(*arguments)
        disturbed = function(*[a * (1 + 1e-12 * rng.standard_normal(a.shape)) for a in arguments])
    for result, value, other in zip(results, expected, disturbed, strict=True):
        # What a change of the arguments by 1e-12 of themselves does, roundings may do.
        with np.errstate(invalid="ignore"):
            error = 1e-9 * (1 + np.abs(value)) + 100 * np.abs(value - other)
            wrong = np.isfinite(error) & ~(np.abs(result - value) <= error)
        assert not wrong.any()


@pytest.mark.rotates
@settings(max_examples=settings().max_examples // 8)
@given(
    program=deep_programs(longest=30),
    shape=st.sampled_from([(6, 5), (1, 4), (4, 1), (9, 3)]),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_deep_programs_are_right(program: tuple[str, int], shape: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = shape[1]
    arguments = [rng.standard_normal(s) for s in (shape, (columns,), (columns, columns))]
    function = compiled(program[0])
    agree(function, arguments, cf.fuse(function)(*arguments), rng)


SMALLER = st.sampled_from([(6, 5), (1, 4), (4, 1), (9, 3)])


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(PARTS))
def test_a_partition_that_stores_everything_computes_nothing_twice(part: int) -> None:
    """It is what is left where no other partition is within the bounds."""

    @searched(part, EXAMPLES // 8 // PARTS, program=deep_programs(longest=30), shape=SMALLER, seed=SEEDS)
    def check(program: tuple[str, int], shape: tuple[int, int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        columns = shape[1]
        arguments = [rng.standard_normal(s) for s in (shape, (columns,), (columns, columns))]
        function = compiled(program[0])
        with mock.patch.object(recompute, "_candidates", lambda graph, once: iter(())), force_plans():
            fused = cf.fuse(function)
            plan = fused.plan(*arguments)
            results = fused(*arguments)
        assert cost_of(plan.steps).flops == unfused_cost(plan.graph).flops
        agree(function, arguments, results, rng)

    check()


# Long chains --------------------------------------------------------------------------------------------------------

LONG = 1500  # more than Python's limit of recursion
LINKS = {
    "shifts": lambda x, k: x + 1.0 * (k % 3),
    "choices": lambda x, k: np.where(x > 0.1, x * 0.9, x + 0.1),
    "transposes": lambda x, k: np.tanh(x).T,
    "conversions": lambda x, k: (x * 0.5).astype(np.float32 if k % 2 else np.float64),
    "row sums": lambda x, k: x / (1 + np.abs(x).sum(axis=1, keepdims=True)),
    "alternating sums": lambda x, k: x / (1 + np.abs(x).sum(axis=k % 2, keepdims=True)),
    "products": lambda x, k: (x @ x) * 0.1 if k % 10 == 0 else np.tanh(x),
    "scales": lambda x, k: x * x.mean(axis=0) / 2 * 0.5 - 1,
}


def linked(x: Any, name: str, count: int) -> Any:
    for k in range(count):
        x = LINKS[name](x, k)
    return x


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["shifts", "choices", "transposes", "conversions"])
def test_thousands_of_chained_operations(name: str) -> None:
    """Through the trace, the plan, its source and report, and NumPy: nothing recurses along a chain."""
    x = np.linspace(-1, 1, 16).reshape(4, 4)
    function = cf.fuse(lambda x: linked(x, name, LONG))
    plan = function.plan(x)
    assert len(plan.source()) > 10 * LONG and repr(plan) and str(plan)
    np.testing.assert_allclose(function(x), linked(x, name, LONG), rtol=1e-6)


@pytest.mark.rotates
@pytest.mark.parametrize("name", sorted(LINKS))
def test_the_source_of_a_chain_grows_with_its_length(name: str) -> None:
    x = np.linspace(-1, 1, 16).reshape(4, 4)
    lengths = []
    for count in (200, 400):
        function = cf.fuse(lambda x, count=count: linked(x, name, count))
        lengths.append(len(function.plan(x).source()))
        with np.errstate(all="ignore"):
            expected = linked(x, name, count)
        np.testing.assert_allclose(function(x), expected, rtol=1e-6)
    assert 1.7 < lengths[1] / lengths[0] < 2.3


def by_rows(x: Any) -> Any:
    return x / (1 + np.abs(x).sum(axis=1, keepdims=True))


def whole_too(x: Any) -> Any:
    return np.exp(x) + 0 * np.floor(np.exp(x))


BESIDE_EXTREMA = {
    "quotients by rows": lambda x: np.where(by_rows(x) == by_rows(x).max(axis=0), 1, 0 * np.tanh(np.tanh(x))),
    "softmax": lambda x: np.where(
        cf.softmax(x, axis=1) < cf.softmax(x, axis=1).max(axis=0),
        0,
        1 + 0 * linked(x, "shifts", 9) * np.tanh(np.tanh(x)),
    ),
    "differences": lambda x: np.where(np.sqrt(by_rows(x) - by_rows(x).min(axis=0)) == 0, 1, 0 * np.tanh(np.tanh(x))),
    "whole numbers": lambda x: np.where(np.exp(x) == np.exp(x).max(axis=0), 1, 0 * whole_too(x) * np.tanh(np.tanh(x))),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BESIDE_EXTREMA)
def test_values_equal_their_extrema_in_16_bits(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Kernels divide, or are quick, in forms of their own: in a third of the columns no element was the maximum."""
    with HOST.active(), force_plans():
        found = HOST.host(cf.fuse(BESIDE_EXTREMA[name])(HOST.array(normal(rng, (70, 96), dtype))))
    assert (found == 1).any(axis=0).all()


REDUCED_TWICE = {
    "logsumexp": lambda x: (x.sum(1) - cf.logsumexp(x.sum(1), axis=0, keepdims=True), np.exp(x)),
    "products": lambda x: (x.prod(1) - x.prod(1).max(0), np.exp(x)),
    "largest": lambda x: ((x.sum(1) == x.sum(1).max(0)).sum(), np.exp(x), (x.mean(1) == x.mean(1).min()).sum()),
}


@pytest.mark.rotates
@pytest.mark.parametrize("shape", [(2, 3), (7, 33), (40, 130)])
@pytest.mark.parametrize("name", REDUCED_TWICE)
def test_reductions_along_rows_are_computed_by_one_step(name: str, shape: tuple[int, int]) -> None:
    """Two kernels add in two orders: sums did not equal themselves, and a logsumexp of them was NaN."""
    function = REDUCED_TWICE[name]
    steps = cf.fuse(function).plan(cf.spec(shape, "float64")).steps
    reductions = [n for s in steps if s.kind == "RowProgram" for n in s.nodes if n.reduction and n.axis == 1]
    assert len(reductions) == len(set(reductions))
    with HOST.active():
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal(shape)
            found = HOST.host(cf.fuse(function)(HOST.array(x)))
            for ours, right in zip(found, function(x), strict=True):
                np.testing.assert_allclose(ours, right, rtol=1e-13, atol=1e-13)
