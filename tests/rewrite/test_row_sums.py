"""Sums that wait for other reductions of their row take the same pass: values, special values, and plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from passes import execute
from support import INF, NAN

import cupyfuse as cf
import cupyfuse.torch as ct
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.plan.build import build
from cupyfuse.plan.traced import Traced
from cupyfuse.settings import Settings, force_plans
from cupyfuse.torch import losses
from cupyfuse.torch.chains import saving
from cupyfuse.torch.chains.chain import TracedChain

F = torch.nn.functional
TOP, TOTAL = "x.max(axis=1, keepdims=True)", "np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)"
LOGARITHM = f"(x - {TOP} - np.log({TOTAL}))"
SOFTMAX = f"(np.exp(x - {TOP}) / {TOTAL})"
# As written, and the reductions that are left.
FORMS = {
    f"(x - {TOP}).sum(axis=1)": {"distances"},
    f"{LOGARITHM}.sum(axis=1)": {"expsum", "distances"},
    f"({SOFTMAX} * {LOGARITHM}).sum(axis=1)": {"expsum", "expdistances"},
    f"({LOGARITHM} * np.exp({LOGARITHM})).sum(axis=1)": {"expsum", "expdistances"},
    f"({SOFTMAX} * x).sum(axis=1)": {"max", "expsum", "expdistances"},
    "(cf.softmax(x, axis=1) * cf.log_softmax(x, axis=1)).sum(axis=1)": {"expsum", "expdistances"},
    "(np.exp(cf.log_softmax(x, axis=1)) * cf.log_softmax(x, axis=1)).sum(axis=1)": {"expsum", "expdistances"},
    "cf.log_softmax(x, axis=1).sum(axis=1)": {"max", "expsum", "distances"},
    f"(x * {SOFTMAX}).sum(axis=1)": {"max", "expsum", "expdistances"},
    f"{LOGARITHM}[np.arange(7), k]": {"max", "expsum", "sum"},
    f"np.exp({LOGARITHM})[np.arange(7), k] * 3": {"max", "expsum", "sum"},
}
NOT_OF_THESE = (
    "(x - x.max(axis=0)).sum(axis=1)",
    "(x - x.min(axis=1, keepdims=True)).sum(axis=1)",
    "(x - x.mean(axis=1, keepdims=True)).sum(axis=1)",  # would cancel
    f"({SOFTMAX} * x * x).sum(axis=1)",
    f"({TOP} / x)[np.arange(7), k]",  # the sign of a zero would be lost
)


def draw(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape)


def function(text: str) -> Any:
    return eval(f"lambda x, k: {text}", {"np": np, "cf": cf})


def reductions(text: str, dtype: str = "float32") -> Counter[str]:
    graph = cf.fuse(function(text)).trace((cf.spec((7, 33), dtype), cf.spec(7, "int64"))).graph
    found = g.topological(rewrite.simplify(graph)[0].roots)
    return Counter(n.op for n in found if n.reduction)


@pytest.mark.parametrize("text", FORMS)
def test_one_pass_is_left(text: str) -> None:
    found = reductions(text)
    assert set(found) == FORMS[text] and set(found.values()) == {1}


@pytest.mark.parametrize("text", NOT_OF_THESE)
def test_other_sums_are_as_written(text: str) -> None:
    assert not {"distances", "expdistances"} & set(reductions(text))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("offset", [0.0, 4096.0, -4096.0])
@pytest.mark.parametrize("text", FORMS)
def test_values(text: str, offset: float, dtype: str) -> None:
    """Of logits with a large common offset, too: a sum of the logits themselves would round away what is left."""
    x, k = (draw(1, 7, 33) * 3).astype(dtype) + np.dtype(dtype).type(offset), np.arange(7) * 5
    expected = function(text)(x.astype(np.float64), k)
    unit = float(np.finfo(dtype).eps)
    # The logarithms of 33 probabilities, each of a rounded distance; what holds x itself is rounded with it.
    scale = 33 * np.abs(x - x.max(axis=1, keepdims=True)).astype(np.float64).max()
    holds_offset = "* x)" in text or "(x *" in text
    scale += abs(offset) if holds_offset else 0.0
    with np.errstate(all="ignore"):
        found = np.asarray(cf.fuse(function(text))(x, k), dtype=np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=8 * unit * scale)


SPECIAL = [
    [0.0, -0.0, 1.0],
    [-INF, 1.0, 2.0],
    [2.0, -INF, 1.0],
    [-INF, -INF, -INF],
    [INF, 1.0, 2.0],
    [1.0, NAN, 2.0],
    [INF, -INF, 0.0],
]


@pytest.mark.parametrize("label", [0, 1, 2])
@pytest.mark.parametrize("text", FORMS)
def test_special_values(text: str, label: int) -> None:
    x, k = np.array(SPECIAL), np.full(len(SPECIAL), label)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(cf.fuse(function(text))(x, k), function(text)(x, k), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("label", [-100, -1, 33, 1 << 32, (1 << 32) + 3, -(1 << 32) + 3])
def test_labels_out_of_range_choose_nothing(label: int) -> None:
    """Not those of which 32 bits are the number of a class, either."""
    x = torch.tensor(draw(2, 7, 33))
    target = torch.full((7,), label)
    found = ct.linear_cross_entropy(x, torch.eye(33, dtype=x.dtype), target, ignore_index=-7, reduction="none")
    assert torch.isnan(found).all()
    target[0] = 3
    found = ct.linear_cross_entropy(x, torch.eye(33, dtype=x.dtype), target, ignore_index=label, label_smoothing=0.5)
    torch.testing.assert_close(found, F.cross_entropy(x[:1], target[:1], label_smoothing=0.5))


CHOICES = {  # of a label's element: a, b, the choice itself, and what is made of it
    "sum": lambda a, b, chosen: g.pointwise("subtract", g.pointwise("negative", b), chosen),
    "scaled": lambda a, b, chosen: g.pointwise("multiply", g.pointwise("add", chosen, b), a),
    "divided": lambda a, b, chosen: g.pointwise("add", g.pointwise("divide", chosen, a), chosen),
    "of both": lambda a, b, chosen: g.pointwise("exp", g.pointwise("multiply", chosen, chosen)),
}
ENDS = [1.5, -0.25, 0.0, -0.0, INF, -INF, NAN]


@pytest.mark.parametrize("engine", ["numpy", "host"])
@pytest.mark.parametrize("form", CHOICES)
def test_sums_of_choices_are_closed(form: str, engine: str) -> None:
    """No sum is left, and each has the value of the sum as written, infinities and NaN included."""
    pairs = [(a, b, k) for a in ENDS for b in ENDS for k in (0, 4, 5, -1)]
    a, b, k = (g.argument(i, name, (len(pairs), 1), "int64" if i == 2 else "float64") for i, name in enumerate("abk"))
    positions = g.positions(5, 1, "int32")
    chosen = g.pointwise("where", g.pointwise("equal", positions, k), g.pointwise("add", b, g.const(1.0)), g.const(0.0))
    total = g.reduce("sum", CHOICES[form](a, b, chosen), 1)
    plan = build(Traced(form, g.Graph([a, b, k], [total]), ((0, 1),), ()), {}, Settings())
    assert "sum" not in {n.op for step in plan.steps for n in step.nodes}
    values = [np.array(column)[:, None] for column in zip(*pairs, strict=True)]
    with np.errstate(all="ignore"):
        (found,) = execute(plan, values, engine)
        chosen_values = np.where(np.arange(5) == values[2], values[1] + 1.0, 0.0)
        wide = {"sum": -values[1] - chosen_values, "scaled": (chosen_values + values[1]) * values[0]}
        wide |= {"divided": chosen_values / values[0] + chosen_values, "of both": np.exp(chosen_values * chosen_values)}
        np.testing.assert_allclose(found, wide[form].sum(axis=1, keepdims=True), rtol=1e-14)


def test_choices_have_the_dtype_of_both() -> None:
    """A number beside a float32 array is one of float32, whatever it then meets."""
    arguments = (("k", "int64"), ("a", "float32"), ("b", "float64"))
    k, a, b = (g.argument(i, name, (2, 1), dtype) for i, (name, dtype) in enumerate(arguments))
    is_label = g.pointwise("equal", g.positions(5, 1, "int32"), k)
    product = g.pointwise("multiply", g.pointwise("where", is_label, a, g.const(0.1)), b)
    graph = g.Graph([k, a, b], [g.reduce("sum", product, 1)])
    plan = build(Traced("mixed", graph, ((0, 1),), ()), {}, Settings())
    assert "sum" not in {n.op for step in plan.steps for n in step.nodes}
    (found,) = execute(plan, [np.array([[2], [9]]), np.full((2, 1), 2, np.float32), np.full((2, 1), 3.0)], "numpy")
    number = float(np.float32(0.1)) * 3.0
    np.testing.assert_allclose(found, [[4 * number + 6], [5 * number]], rtol=1e-14)


def test_choices_of_two_labels_are_summed() -> None:
    k, m = (g.argument(i, name, (7, 1), "int64") for i, name in enumerate("km"))
    one, zero, positions = g.const(1.0), g.const(0.0), g.positions(33, 1, "int32")
    both = [g.pointwise("where", g.pointwise("equal", positions, label), one, zero) for label in (k, m)]
    graph = g.Graph([k, m], [g.reduce("sum", g.pointwise("multiply", *both), 1)])
    assert "sum" in {n.op for n in g.topological(rewrite.simplify(graph)[0].roots)}


def filled(x: Any) -> Any:
    y, z = np.ones_like(x), np.zeros_like(x)
    y[:, 6:], z[-1] = 2.0, 3.0
    return y.sum(1), y.sum(0), y.mean(1, keepdims=True), z.sum(0), z.sum(1), (y * z[:, :1]).sum(1)


def test_choices_that_are_the_same_in_all_rows_are_summed_in_each() -> None:
    x = np.ones((4, 7), np.float32)
    with force_plans():
        for found, expected in zip(cf.fuse(filled)(x), filled(x), strict=True):
            np.testing.assert_array_equal(found, expected, strict=True)


# Plans for an H200 --------------------------------------------------------------------------------------------------

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-4, "soft_cap": 30.0}


def language_model(**options: Any) -> TracedChain:
    o = losses._Options(*({**_DEFAULTS, **options}[name] for name in losses._Options._fields))
    names = ("input", "weight", "target")
    chain = losses._chain(names, True, o)
    return chain.trace((((8192, 4096), "bfloat16"), ((128256, 4096), "bfloat16"), ((8192,), "int64")))


_DEFAULTS = {
    "ignore_index": -100,
    "reduction": "mean",
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "soft_cap": None,
    "temperature": None,
}


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, EVERYTHING], ids=str)
def test_options_of_a_loss_take_no_further_pass(options: dict[str, Any]) -> None:
    """Forward without logits in memory; backward in the blocks of the plain loss."""
    settings, wanted = Settings(), (True, True, False)
    traced = language_model(**options)
    saved = saving.choose_saved(traced, wanted, (True,), settings)
    forward = saving.build(traced.as_traced(saved.nodes), None, settings)
    (product,) = [s for s in forward.steps if s.kind == "Gemm"]
    assert forward.blocks is None and product.epilogue is not None and product.product not in product.outputs
    cotangents = saving.cotangents_of(traced)
    roots = {k: n for k, n in enumerate(saving.derive(traced, cotangents, wanted)) if n is not None}
    backward = saving._backward_plan(traced, roots, cotangents, saved, settings)
    assert backward.blocks is not None and backward.blocks.transposed
    assert [s.kind for s in backward.blocks.plan.steps] == ["Gemm"] * 3
    assert backward.blocks.count == 16


def test_what_is_wanted_beside_a_loss_takes_no_further_pass() -> None:
    def beside(x: Any, w: Any, k: Any) -> tuple[Any, ...]:
        logits = (x @ w.T).astype("float32")
        top = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - top).sum(axis=1, keepdims=True)
        logarithms = logits - top - np.log(total)
        entropy = -(np.exp(logits - top) / total * logarithms).sum(axis=1)
        return cf.cross_entropy(logits, k), logarithms[np.arange(8192), k], entropy

    plan = cf.fuse(beside).plan(
        cf.spec((8192, 4096), "bfloat16"), cf.spec((128256, 4096), "bfloat16"), cf.spec(8192, "int64")
    )
    (product,) = [s for s in plan.steps if s.kind == "Gemm"]
    assert plan.blocks is None and product.epilogue is not None and product.product not in product.outputs
    found = Counter(n.op for n in product.epilogue.nodes if n.reduction)
    assert found == {"max": 1, "expsum": 1, "expdistances": 1, "sum": 2}  # a sum for each of the two forms of labels
