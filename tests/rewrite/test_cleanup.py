"""Exact clean-up of graphs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rewrites import SPECS, ops, simplified, traced
from support import INF, NAN

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.rewrite.reductions import counted_logsumexp

RULES = [getattr(rewrite, name) for name in rewrite.__all__ if name not in ("Note", "simplify")]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_states_when_it_is_exact(rule: Callable[..., Any]) -> None:
    text = inspect.getdoc(rule) or ""
    assert any(word in text for word in ("Exact", "exact", "rounding", "inf")), rule.__name__


def test_equal_values_are_computed_once() -> None:
    found, _ = simplified("np.exp(x + 1) * np.exp(x + 1) + np.exp(1 + x)")
    assert found["exp"] == 2  # 1 + x and x + 1 are two values: operands keep their order
    found, _ = simplified("(np.exp(x).sum(axis=1), np.exp(x).sum(axis=1) + 1)")
    assert found["exp"] == found["sum"] == 1
    found, _ = simplified("x * 0.0 + x * -0.0")
    assert found["multiply"] == 2, "0.0 and -0.0 are different constants"
    found, _ = simplified("(x + 1) * (x + 1.0)")
    assert found["add"] == 2 or found["add"] == 1


def test_casts_to_the_same_dtype_vanish() -> None:
    assert simplified("(x + 1).astype(np.float32) * 2")[0]["cast"] == 0
    assert simplified("(x + 1).astype(np.float64) * 2")[0]["cast"] == 1
    assert simplified("(x + 1).astype(np.float16).astype(np.float32)")[0]["cast"] == 2, "a rounding is not dropped"


def test_views_of_views_are_one_view() -> None:
    assert simplified("(x + 1).T.T * 2")[0]["transpose"] == 0
    assert simplified("(x + 1).reshape(5, 6).reshape(30).reshape(3, 10) * 2")[0]["reshape"] == 1
    assert simplified("(x + 1).reshape(5, 6).reshape(6, 5) * 2")[0]["reshape"] == 0


def test_transposes_of_vectors_move_to_the_arguments() -> None:
    """A computed vector would have to be stored to be transposed; an argument can be read either way."""
    graph, _ = rewrite.simplify(traced("z + np.exp(b * 2) + np.tanh(r + 1)[:, None]"))
    transposed = [n for n in g.topological(graph.roots) if n.op == "transpose"]
    assert transposed and all(n.inputs[0].op == "input" for n in transposed)


def test_products_read_transposes_of_what_is_stored() -> None:
    """A vector that is computed for a product is not computed again for its transpose."""
    fused = cf.fuse(lambda x: (lambda v: v @ (v.T @ v))(np.tanh(x - x.max(axis=0))))
    for shape in ((40, 1), (1, 40)):
        graph, _ = rewrite.simplify(fused.trace((cf.spec(shape),)).graph)
        assert ops(graph)["tanh"] == ops(graph)["transpose"] == 1


@pytest.mark.rotates
@pytest.mark.parametrize("step", ["v + 1", "v * v + v"])
def test_long_chains_of_vectors_are_transposed(step: str) -> None:
    """Each value of the chain once, however often it is used, and without recursion."""
    advance = eval(f"lambda v: {step}")

    def chain(x: Any, r: Any) -> Any:
        for _ in range(2000):
            r = advance(r)
        return x + r[:, None]

    graph, _ = rewrite.simplify(cf.fuse(chain).trace((cf.spec((4, 3)), cf.spec(4))).graph)
    assert sum(ops(graph).values()) <= 2 * 2000 + 2
    assert all(n.inputs[0].op == "input" for n in g.topological(graph.roots) if n.op == "transpose")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", sorted(REDUCTIONS))
def test_reductions_of_one_element(name: str, axis: int) -> None:
    shape = (1, 4) if axis == 0 else (4, 1)
    x = g.argument(0, "x", shape, "float64")
    result = rewrite.drop_unit_reductions(g.reduce(name, x, axis))
    if REDUCTIONS[name].identity_on_one:
        assert result is x
    elif REDUCTIONS[name].gives_position:
        zero = result.inputs[0]
        assert (result.op, zero.op, zero.inputs[0].value) == ("broadcast", "cast", 0)
        assert (result.shape, result.dtype) == (shape, "int64")
    else:
        assert result.op == {"expsum": "exp", "moment2": "square"}.get(name, "subtract")
    other = g.reduce(name, x, 1 - axis)
    assert rewrite.drop_unit_reductions(other) is other


@pytest.mark.parametrize(
    "filled",
    [
        lambda value: g.broadcast(value, (3, 4)),
        lambda value: g.reduce("max", g.broadcast(value, (3, 4)), 1),
        lambda value: g.reduce("max", value, 1),
    ],
    ids=["broadcast", "reduced", "one_element"],
)
def test_constants_that_fill_arrays_stay_arrays(filled: Callable[[g.Node], g.Node]) -> None:
    """A float32 array is compared with one of float64 in float64, however this was filled; and steps can read it."""
    x, full = g.argument(0, "x", (3, 4), "float32"), filled(g.const(0.1))
    results = [g.Node("greater", (x, full), (3, 4), "bool"), g.Node("library", (full,), full.shape, "float64")]
    graph, _ = rewrite.simplify(g.Graph([x], results))
    assert g.operand_dtypes(graph.outputs[0]) == ["float64", "float64"]
    assert graph.outputs[1].inputs[0].op != "const"


def test_a_chain_of_reductions_of_one_element_disappears() -> None:
    found, notes = simplified("x.sum(axis=1, keepdims=True).max(axis=1, keepdims=True).mean(axis=1).sum()")
    assert found["max"] == 0 and found["sum"] == 2
    assert [n.identity for n in notes].count("a reduction along an axis of length 1 is the identity") == 2
    assert all("6 x 1" in n.what and n.saved == "48 bytes" for n in notes)


@pytest.mark.parametrize("values", [[2.0], [INF], [-INF], [NAN], [-0.0]])
def test_reductions_of_one_element_keep_special_values(values: list[float]) -> None:
    x = np.array([values])
    with np.errstate(all="ignore"):
        for name in ("sum", "prod", "mean", "max", "min", "var", "std", "logsumexp", "softmax", "log_softmax"):
            fused = cf.fuse(lambda x, name=name: getattr(cf, name)(x, axis=1))(x)
            if name in ("sum", "prod", "mean", "max", "min", "logsumexp"):
                np.testing.assert_array_equal(fused, x[:, 0], err_msg=name)
                assert np.signbit(fused) == np.signbit(x[:, 0])  # also of -0, of which NumPy's sum is 0
            else:
                finite = np.isfinite(values[0])
                expected = {"var": 0.0, "std": 0.0, "softmax": 1.0, "log_softmax": 0.0}[name] if finite else NAN
                np.testing.assert_array_equal(fused.ravel(), [expected], err_msg=name)


@pytest.mark.parametrize(
    ("count", "others", "expected"),
    [(1, 0.0, 0.0), (1, 1e-18, 1e-18), (3, 0.5, np.log(3.5)), (0, 1.0, 0.0), (0, 1.25, np.log(1.25))],
)
def test_logsumexp_counts_a_maximum_that_no_element_equals(count: float, others: float, expected: float) -> None:
    """An element that was computed twice may be rounded twice; its exponential is among the others then."""
    named = {name: g.argument(k, name, (1, 1), "float64") for k, name in enumerate(("top", "count", "others"))}
    values = dict(zip(named.values(), map(np.float64, (0.0, count, others)), strict=True))
    result = counted_logsumexp(*named.values())
    for node in g.topological([result]):
        if node.op == "const":
            values[node] = np.float64(node.value)
        elif node not in values:
            values[node] = POINTWISE[node.op].numpy(*(values[i] for i in node.inputs))
    assert values[result] == pytest.approx(expected, rel=4e-16)


def test_composites_are_lowered() -> None:
    found, _ = simplified("x.mean(axis=1)")
    assert (found["mean"], found["sum"], found["divide"]) == (0, 1, 1)
    found, _ = simplified("cf.logsumexp(x, axis=1)")
    assert found == Counter(max=1, expsum=1, plus_log=1)
    assert cf.fuse(lambda x: cf.logsumexp(x, axis=1)).plan(SPECS["x"]).launches == 1


def test_a_softmax_written_out_is_recognised() -> None:
    text = "(lambda e: e / e.sum(axis=1, keepdims=True))(np.exp(x - x.max(axis=1, keepdims=True)))"
    found, _ = simplified(text)
    assert found["expsum"] == 1 and found["sum"] == 0
    assert found == simplified("cf.softmax(x, axis=1)")[0]
    for other in (
        "np.exp(x - x.max(axis=0)).sum(axis=1)",
        "np.exp(x - x.min(axis=1, keepdims=True)).sum(axis=1)",
        "np.exp(x + x.max(axis=1, keepdims=True)).sum(axis=1)",
        "np.exp(x - z.max(axis=1, keepdims=True)).sum(axis=1)",
    ):
        assert simplified(other)[0]["expsum"] == 0, other


def test_operands_of_products_are_converted_first() -> None:
    graph, _ = rewrite.simplify(traced("x @ h.T"))
    (product,) = (n for n in g.topological(graph.roots) if n.op == "matmul")
    assert product.dtype == "float32" and {i.dtype for i in product.inputs} == {"float32"}
    assert simplified("x @ w.T")[0]["cast"] == 0
