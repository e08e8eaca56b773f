"""Backward passes of whole chains: against PyTorch's in float64, by both engines, and what their plans are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cupyfuse.heads import HEADS, example_inputs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from passes import Ours, Passes, chain, compare, drawn, torch_passes

import cupyfuse as cf
from cupyfuse.ir import graph as g
from cupyfuse.ir.operators import REDUCTIONS
from cupyfuse.settings import Settings

CHAINS = [
    "x * c + r",
    "x / c - s * x",
    "(x - r) * (c + s) / (1 + m.exp(x))",
    "m.where(x > c, x * r, m.exp(c))",
    "m.where(x > 0, x, 0.0) * (x < r)",
    "m.maximum(x, r) * m.minimum(c, s)",
    "m.sum(x * x, axis=1)",
    "m.sum(x * r, axis=0) * c",
    "m.sum(m.sum(x, axis=0) * c)",
    "m.sum(x + r, axis=1)",
    "m.mean(x - c, axis=0) + m.sum(x / s)",
    "m.logsumexp(m.broadcast_to(r, (6, 5)), axis=0)",
    "m.mean(x) * m.mean(x * c, axis=0)",
    "m.max(x, axis=1) * m.min(x * x, axis=1)",
    "m.max(m.min(x, axis=1), axis=0)",
    "m.prod(x, axis=1, keepdims=True) * r",
    "m.prod(x, axis=0) + c",
    "m.var(x, axis=1) + m.var(x, axis=0).sum()",
    "(x - m.mean(x)) / m.sqrt(m.var(x, axis=None) + 1e-5) * c",
    "m.logsumexp(x * r, axis=1, keepdims=True) - x",
    "m.logsumexp(m.linear(x, w, b), axis=0)",
    "m.softmax(x * c, axis=1) @ w.T",
    "m.softmax(m.linear(x, w), axis=0) * y",
    "m.log_softmax(m.linear(x, w, b), axis=1) * y",
    "m.log_softmax(x, axis=0)",
    "(x @ w.T + b, x * r)",
    "(m.linear(x, w, b), m.sum(m.linear(x, w, b), axis=1), m.exp(x))",
    "m.sum(m.linear(x, w, b), axis=1)",
    "m.leaky_relu(m.sum(m.linear(x, w, b), axis=1))",
    "m.sum(m.linear(x, w, b) * b, axis=1, keepdims=True) * x",
    "m.linear(m.tanh(m.linear(x, w, b)), w.T) + x",
    "m.relu(x.T @ y).T @ x.T",
    "(x.T * r.reshape(6)).reshape(6, 5) * x",
    "m.tanh(x).reshape(30).reshape(5, 6) @ y",
    "x.reshape(30) * 2.0",
    "m.broadcast_to(r, (6, 5)) @ w.T",
    "m.broadcast_to(c, (6, 5)) * x",
    "x @ m.broadcast_to(c[:, None], (5, 3))",
    "m.broadcast_to(c, (6, 5)) @ w.T",
    "m.cast(x, 'float32') * 2.0 + x",
    "m.cast(m.cast(x, 'float32'), 'float64') @ w.T",
    "m.cast(x > 0, 'float64') * x * m.sign(c) + m.floor(x)",
    "m.exp(m.sum(x, axis=1, keepdims=True) * 0.0 + x) + m.sum(x, axis=1, keepdims=True)",
    "(lambda v: v * v + m.exp(v) / (1.0 + v * v))(x * c)",
    "(lambda v: m.sum(v * m.tanh(v), axis=0) @ w.T)(x + r)",
    "(x - m.mean(x, axis=0)) / m.sqrt(m.var(x, axis=0) + 1e-5) * c",
    "(lambda z: (z - m.mean(z, axis=0)) / m.sqrt(m.var(z, axis=0) + 1e-5) * b)(m.linear(x, w, b))",
    "(lambda z: (z - m.mean(z, axis=1, keepdims=True)) / m.sqrt(m.var(z, axis=1, keepdims=True) + 1e-5))(x)",
    "(x @ c) * m.sum(x @ w.T @ b)",
    "m.gelu(m.gelu(m.leaky_relu(m.logsumexp(m.linear(x, w, b), axis=1, keepdims=True))))",
    "m.sum(m.log_softmax(m.linear(x, w, b), axis=1) * y)",
]  # fmt: skip


@pytest.mark.parametrize("text", CHAINS)
def test_chains(text: str, rng: np.random.Generator) -> None:
    compare(text, rng)


@pytest.mark.rotates
@pytest.mark.parametrize("text", CHAINS[::4])
def test_chains_by_kernels(text: str, rng: np.random.Generator) -> None:
    """The kernels of both passes, run on the CPU."""
    compare(text, rng, "host")


SMALL = Settings(max_workspace=250)  # a row or two of the products


@pytest.mark.rotates
@pytest.mark.parametrize("products", [True, False], ids=["stored products", "no products"])
@pytest.mark.parametrize("text", CHAINS)
def test_chains_in_blocks_of_rows(text: str, products: bool, rng: np.random.Generator) -> None:
    compare(text, rng, settings=SMALL, products=products)


def test_chains_in_blocks_reach_every_part(rng: np.random.Generator) -> None:
    """What the chains are for: sums over blocks, and what precedes and follows them."""
    found = set()
    for text in CHAINS:
        passes = Passes(chain(text, Ours()), drawn(rng), settings=SMALL, products=False)
        for blocks in (passes.forward.blocks, passes.backward.blocks):
            if blocks is not None:
                parts = ("common", "zeros", "after", "last")
                found |= {part for part in parts if getattr(blocks, part) is not None}
                found |= {"direct sum"} if any(k is not None for k in blocks.summed) else set()
                found |= {n.op for _, n in blocks.plan.graph.effects}
    assert found >= {"common", "zeros", "after", "last", "direct sum", "accumulate", "add"}


@pytest.mark.rotates
@pytest.mark.parametrize("text", [CHAINS[-1], *CHAINS[20:32:3]])
def test_chains_in_blocks_by_kernels(text: str, rng: np.random.Generator) -> None:
    compare(text, rng, "host", settings=SMALL, products=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: cf.softmax(cf.linear(x, w, b), axis=1),
        lambda x, w, b: cf.sum(cf.linear(x, w, b), axis=1),
        lambda x, w, b: cf.logsumexp(cf.linear(x, w, b), axis=1) + cf.max(x, axis=1),
    ],
)
@pytest.mark.parametrize("engine", ["numpy", "host"])
def test_batches_of_no_rows_leave_weights_alone(function: Callable[..., Any], engine: str) -> None:
    arrays = [np.ones((0, 5)), np.ones((7, 5)), np.ones(7)]
    passes = Passes(function, arrays)
    _, found = passes(arrays, [np.empty((0, 7) if passes.axes[0] == (0, 1) else 0)], engine)
    for ours, argument in zip(found, arrays, strict=True):
        np.testing.assert_array_equal(ours, np.zeros_like(argument))


def test_chains_reach_every_kind_of_plan() -> None:
    """What the chains are for: each kind of node and of step occurs in some backward plan."""
    kinds, reductions = set(), set()
    rng = np.random.default_rng(0)
    for text in CHAINS:
        passes = Passes(chain(text, Ours()), drawn(rng))
        kinds |= {step.kind for step in passes.backward.steps}
        reductions |= {n.op for n in g.topological(passes.outputs) if n.reduction}
    assert kinds >= {"Gemm", "RowProgram", "ColumnStats"}
    positions = {name for name, row in REDUCTIONS.items() if row.gives_position}
    assert reductions == set(REDUCTIONS) - positions - {"distances", "expdistances"}, "these only rewrites make"


# Random chains ------------------------------------------------------------------------------------------------------

UNARY = ("m.tanh({})", "m.exp(0.25 * {})", "m.relu({})", "m.sigmoid({})", "m.gelu({})", "abs({})", "-{}", "{} * {}")
BINARY = ("({} + {})", "({} - {})", "({} * {})", "m.maximum({}, {})", "({} / (1.5 + m.tanh({})))")
# From (6, 5) to a value that can be repeated to (6, 5) again, or to itself.
ROUND = (
    "m.sum({}, axis=1, keepdims=True)",
    "m.mean({}, axis=0)",
    "m.max({}, axis=1, keepdims=True)",
    "m.min({}, axis=0, keepdims=True)",
    "m.logsumexp({}, axis=1, keepdims=True)",
    "m.var({}, axis=0)",
    "m.softmax({}, axis=1)",
    "m.log_softmax({}, axis=0)",
    "m.tanh({} @ w.T @ w)",
    "({}).T.T",
    "m.where({} > c, {}, r)",
)


@st.composite
def random_chains(draw: st.DrawFn) -> str:
    """Chains of values of up to (6, 5), each a function of those before it, so that values are shared."""
    values, steps = ["x", "r", "c", "s", "(x @ w.T @ w)"], []
    for k in range(draw(st.integers(1, 6))):
        form = draw(st.sampled_from(UNARY + BINARY + ROUND))
        places = [draw(st.sampled_from(values)) for _ in range(form.count("{}"))]
        if form in ROUND:  # reductions need both axes: the sum with x has them
            places = [f"({places[0]} + x)"] * len(places)
        elif form in UNARY:
            places = places[:1] * len(places)
        steps.append(form.format(*places))
        values.append(f"v{k}")
    results = [values[-1], *draw(st.lists(st.sampled_from(values), max_size=2))]
    body = f"({', '.join(f'{r} * 2.0' for r in results)},)"
    for k in reversed(range(len(steps))):
        body = f"(lambda v{k}: {body})({steps[k]})"
    return body


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(random_chains(), st.integers(0, 2**32 - 1))
def test_random_chains(text: str, seed: int) -> None:
    compare(text, np.random.default_rng(seed), rtol=1e-8)
    compare(text, np.random.default_rng(seed), rtol=1e-8, settings=SMALL, products=False)


F = torch.nn.functional

# Heads --------------------------------------------------------------------------------------------------------------

ALL = ("x", "weight", "bias", "gamma", "beta", "scale")


def torch_head(name: str, training: bool) -> Callable[..., Any]:
    def logsumexp(x: Any, weight: Any, bias: Any) -> Any:
        s = torch.logsumexp(F.linear(x, weight, bias), 1, keepdim=True)
        return F.gelu(F.gelu(F.leaky_relu(F.leaky_relu(s))))

    def total(x: Any, weight: Any, bias: Any) -> Any:
        s = F.linear(x, weight, bias).sum(1, keepdim=True)
        s = torch.mean(torch.max(s, 1, keepdim=True)[0], 1, keepdim=True)
        return torch.logsumexp(torch.logsumexp(s, 1, keepdim=True), 1, keepdim=True)

    def softmax(x: Any, weight: Any, bias: Any, mean: Any, var: Any, gamma: Any, beta: Any, scale: Any) -> Any:
        y = F.batch_norm(F.linear(x, weight, bias), mean.clone(), var.clone(), gamma, beta, training)
        return torch.softmax(scale * y, 1)

    return {"head_logsumexp": logsumexp, "head_sum": total, "head_softmax": softmax}[name]


def our_head(name: str, training: bool) -> Callable[..., Any]:
    head = HEADS[name].__wrapped__
    if name != "head_softmax":
        return lambda x, weight, bias: head(x, weight, bias)
    return lambda x, weight, bias, running_mean, running_var, gamma, beta, scale: head(
        x, weight, bias, running_mean, running_var, gamma, beta, scale, training=training
    )


CASES = [("head_logsumexp", False), ("head_sum", False), ("head_softmax", False), ("head_softmax", True)]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("engine", ["numpy", "host"])
@pytest.mark.parametrize(("name", "training"), CASES)
def test_heads(name: str, training: bool, engine: str, rng: np.random.Generator) -> None:
    values = example_inputs(name, 12, 9, 33, "float64")
    wanted = [k for k, n in enumerate(values) if n in ALL]
    arrays = list(values.values())
    results, cotangents, expected = torch_passes(torch_head(name, training), arrays, wanted, rng)
    passes = Passes(our_head(name, training), arrays, wanted)
    outputs, found = passes(arrays, cotangents, engine)
    np.testing.assert_allclose(outputs[0], results[0], rtol=1e-12)
    for k, ours, theirs in zip(wanted, found, expected, strict=True):
        # What a batch's mean takes away again is rounding alone: a multiple of the terms' sizes.
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-13, err_msg=list(values)[k])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "training"), CASES)
def test_heads_in_narrow_floats(name: str, training: bool, dtype: str, rng: np.random.Generator) -> None:
    """Gradients have their arguments' dtypes, and are as near float64's as the dtype of what is saved allows."""
    values = example_inputs(name, 12, 9, 33, dtype)
    arrays, wanted = list(values.values()), [k for k, n in enumerate(values) if n in ALL]
    wide = [a.astype(np.float64) for a in arrays]
    _, cotangents, expected = torch_passes(torch_head(name, training), wide, wanted, rng)
    passes = Passes(our_head(name, training), arrays, wanted)
    _, found = passes(arrays, [c.astype(arrays[0].dtype) for c in cotangents])
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for k, ours, theirs in zip(wanted, found, expected, strict=True):
        assert ours.dtype == arrays[k].dtype
        error = np.abs(ours.astype(np.float64) - theirs).max()
        assert error <= 64 * unit * max(np.abs(theirs).max(), 1), list(values)[k]


def steps(name: str, training: bool, wanted: Sequence[str]) -> tuple[Passes, list[tuple[str, Any]]]:
    """The backward pass of a head at the benchmarks' shape on an H200: its steps, kinds and domains."""
    names = list(example_inputs(name, 2, 2, 2))
    shapes = [(1024, 8192), (8192, 8192), *[(8192,)] * (len(names) - 2)]
    shapes[-1] = (1,) if "scale" in names else shapes[-1]
    passes = Passes(our_head(name, training), [cf.spec(s) for s in shapes], [names.index(w) for w in wanted])
    return passes, [(step.kind, step.domain) for step in passes.backward.steps]


WIDE = (1024, 8192)


def test_the_backward_pass_of_a_sum_has_no_product() -> None:
    passes, found = steps("head_sum", False, ("x", "weight", "bias"))
    assert passes.saved == []
    assert "Gemm" not in dict(found) and "Copy" not in dict(found)
    assert passes.forward.launches <= 4 and "Gemm" not in {s.kind for s in passes.forward.steps}
    # Reads the weights once for x's gradient, x once for the weights'; writes the gradients.
    matrix, batch = 4 * 8192 * 8192, 4 * 1024 * 8192
    assert passes.backward.reads < 1.01 * (matrix + batch)
    assert passes.backward.writes < 1.01 * (matrix + batch)
    _, found = steps("head_sum", False, ("weight", "bias"))
    assert [d for k, d in found if k == "ColumnStats"] == [WIDE, (1024, 1)]


def test_the_backward_pass_of_logsumexp_reads_the_product_once_for_its_gradient() -> None:
    passes, found = steps("head_logsumexp", False, ("x", "weight", "bias"))
    assert [n.op for n in passes.saved] == ["matmul"]
    assert found.count(("RowProgram", WIDE)) == 1
    assert found.count(("ColumnStats", WIDE)) == 1
    assert [kind for kind, _ in found].count("Gemm") == 2
    assert {kind for kind, _ in found} <= {"RowProgram", "ColumnStats", "Gemm", "Copy"}


def test_the_backward_pass_of_softmax_in_training() -> None:
    passes, found = steps("head_softmax", True, ALL)
    assert [n.op for n in passes.saved] == ["matmul", "mean", "moment2"]
    # Sums of softmax along the rows; those of the normalisation down the columns; the product's gradient and its sum.
    assert found.count(("RowProgram", WIDE)) == 1
    columns = [s for s in passes.backward.steps if (s.kind, s.domain) == ("ColumnStats", WIDE)]
    assert len(columns) == 2
    assert columns[1].writes == 4 * 1024 * 8192 + 4 * 8192, "the gradient for the products, and that of the bias"
    assert [kind for kind, _ in found].count("Gemm") == 2


def test_gradients_that_are_not_wanted_cost_nothing() -> None:
    passes, found = steps("head_logsumexp", False, ("bias",))
    assert "Gemm" not in dict(found)
    assert passes.backward.reads < 3 * 4 * 1024 * 8192
