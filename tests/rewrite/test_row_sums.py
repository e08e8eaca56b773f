"""Sums that wait for other reductions of their row take the same pass: values, special values, and plans."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support import INF, NAN

import cupyfuse as cf
import cupyfuse.torch as ct
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.ir.graph import Graph
from cupyfuse.ir.operators import POINTWISE
from cupyfuse.settings import Settings
from cupyfuse.torch import losses
from cupyfuse.torch.chains import saving
from cupyfuse.torch.chains.chain import Chain, TracedChain

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
    return eval(f"lambda x, k: {text}", {"np": np})


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


def chosen(labels: g.Node, n: int, value: g.Node) -> g.Node:
    """A number of each row at its label, 0 elsewhere."""
    condition = g.pointwise("equal", g.positions(n, 1, g.label_dtype(n)), labels)
    return g.pointwise("where", condition, value, g.const(0.0))


def sum_along_rows(make: Any, n: int, labels: int) -> Graph:
    """The sum of what `make` returns for two columns of numbers, a and b, and columns of labels."""
    inputs = [g.argument(k, name, (7, 1), "float64") for k, name in enumerate("ab")]
    inputs += [g.argument(2 + k, f"k{k}", (7, 1), "int64") for k in range(labels)]
    return Graph(inputs, [g.reduce("sum", make(*inputs[:2], *(chosen_of(n, k) for k in inputs[2:])), 1)])


def chosen_of(n: int, labels: g.Node) -> Any:
    return lambda value: chosen(labels, n, value)


def minus(x: g.Node, y: g.Node) -> g.Node:
    return g.pointwise("subtract", x, y)


def times(x: g.Node, y: g.Node) -> g.Node:
    return g.pointwise("multiply", x, y)


def over(x: g.Node, y: g.Node) -> g.Node:
    return g.pointwise("divide", x, y)


# Values of the row of which sums are closed: with the columns a and b, and what puts a number at each label.
CLOSED = {
    "cotangents": (1, lambda a, b, at: minus(times(minus(at(a), b), g.const(-2.0)), over(at(a), b))),
    "a factor": (1, lambda a, b, at: times(b, at(a))),
    "a divisor": (1, lambda a, b, at: over(at(a), b)),
    "shifted": (1, lambda a, b, at: times(minus(at(g.const(1.0)), g.const(0.25)), a)),
    "two labels": (2, lambda a, b, at, other: over(minus(times(at(a), b), minus(other(b), a)), b)),
}


@pytest.mark.parametrize("n", [3, 33])
@pytest.mark.parametrize("special", [1.0, 0.0, INF, -INF, NAN])
@pytest.mark.parametrize("name", CLOSED)
def test_sums_of_choices_are_closed(name: str, special: float, n: int) -> None:
    """As written, where numbers of the row are infinite or NaN, and where they divide by zero."""
    labels, make = CLOSED[name]
    graph = sum_along_rows(make, n, labels)
    closed = g.rewrite(graph, rewrite.sum_of_choices)
    assert not any(node.reduction for node in g.topological(closed.outputs))
    a, b = draw(3, 7, 1), draw(4, 7, 1)
    a[::2], b[1::3] = special, -special
    first, second = np.array([0, n - 1, n, -1, 1, 2, 1])[:, None], np.array([1, n - 1, n, 0, -5, 2, 1])[:, None]
    given = [a, b, first, second][: len(graph.inputs)]
    with np.errstate(all="ignore"):
        found, expected = evaluate(closed, given), evaluate(graph, given)
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-14)


def evaluate(graph: Graph, arrays: list[Any]) -> Any:
    """The first result of a graph, one operator after the other."""
    values = dict(zip(graph.inputs, arrays, strict=True))
    for node in g.topological(graph.outputs):
        operands = [values[i] for i in node.inputs]
        if node.op == "const":
            values[node] = np.asarray(node.value)
        elif node.op == "positions":
            values[node] = np.arange(node.shape[1])[None]
        elif node.op == "cast":
            values[node] = operands[0].astype(node.dtype)
        elif node.reduction:
            values[node] = np.broadcast_to(*operands, node.inputs[0].shape).sum(axis=node.axis, keepdims=True)
        elif node.op != "input":
            values[node] = POINTWISE[node.op].numpy(*operands)
    return values[graph.outputs[0]]


@pytest.mark.parametrize("make", [lambda a, b, at: over(a, at(b)), lambda a, b, at: times(at(a), at(b))])
def test_other_sums_of_choices_are_as_written(make: Any) -> None:
    graph = sum_along_rows(make, 33, 1)
    assert g.rewrite(graph, rewrite.sum_of_choices).outputs == graph.outputs


def test_each_element_may_be_chosen() -> None:
    """Then none is left whose infinities would be counted."""
    graph = sum_along_rows(CLOSED["two labels"][1], 2, 2)
    assert g.rewrite(graph, rewrite.sum_of_choices).outputs == graph.outputs


# Plans for an H200 --------------------------------------------------------------------------------------------------

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 1e-4, "soft_cap": 30.0}


def language_model(**options: Any) -> TracedChain:
    o = losses._Options(*({**_DEFAULTS, **options}[name] for name in losses._Options._fields))
    names = ("input", "weight", "target")
    calls = tuple(losses._list_calls(names, True, o))
    chain = Chain(names, calls, outputs=calls[-1].results, updates=(), fixed=frozenset({1}))
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
