"""Every identity of the algebra: that it is applied, where it must not be, what it notes, and what it keeps true."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from support import HEADS, INF, NAN, assert_close, assert_same_kinds, normal, unit

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.ir.rebuild import rebuild
from cupyfuse.rewrite.reductions import counted_logsumexp

SPECS = {
    "x": cf.spec((6, 5)),
    "w": cf.spec((7, 5)),
    "b": cf.spec(7),
    "r": cf.spec(6),
    "z": cf.spec((6, 7)),
    "h": cf.spec((7, 5), "float16"),
    "d": cf.spec(7, "float64"),
    "s": cf.spec((1, 7)),
}


def traced(text: str) -> g.Graph:
    """The graph of `lambda x, w, b, r, z, h, d, s: text`, as it was written."""
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    trace = cf.fuse(function).trace(tuple(SPECS.values()))
    return trace.graph


def ops(graph: g.Graph) -> Counter[str]:
    """How often each operator is evaluated."""
    return Counter(n.op for n in g.topological(graph.roots, g.eager_inputs) if n.op not in ("input", "const"))


def simplified(text: str) -> tuple[Counter[str], list[rewrite.Note]]:
    graph, notes = rewrite.simplify(traced(text))
    return ops(graph), notes


RULES = [getattr(rewrite, name) for name in rewrite.__all__ if name not in ("Note", "simplify")]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_states_when_it_is_exact(rule: Callable[..., Any]) -> None:
    text = inspect.getdoc(rule) or ""
    assert any(word in text for word in ("Exact", "exact", "rounding", "inf")), rule.__name__


# Exact clean-up -----------------------------------------------------------------------------------------------------


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


# Values that repeat -------------------------------------------------------------------------------------------------

REPEATED = "a product with a broadcast operand is a weighted sum (infinite values may give inf for NaN)"
# Products with a value that repeats along the sums of the product, and along the rows or columns of the result.
ALONG_SUMS = [
    "np.broadcast_to(r[:, None], (6, 7)) @ w",
    "np.exp(np.broadcast_to(r[:, None], (6, 7)) * 2) @ w",
    "x @ np.broadcast_to(b, (5, 7))",
    "(np.broadcast_to(b[:, None], (7, 6)) @ x) * 2",
    "x.T @ np.broadcast_to(b, (6, 7))",
    "np.broadcast_to(np.float32(2.0) * r[:, None], (6, 5)) @ w.T",
]
ALONG_RESULTS = [
    "np.broadcast_to(b, (6, 7)) @ w",
    "np.broadcast_to(np.tanh(b), (6, 7)) @ w + x",
    "x @ np.broadcast_to(x.sum(axis=0)[:, None], (5, 4))",
    "z.T @ np.broadcast_to(r[:, None], (6, 4))",
    "(z.T @ np.broadcast_to(r[:, None], (6, 5))).T",
    "np.broadcast_to(x.max(axis=0), (6, 5)) @ w.T",
]


def run_both(text: str, arguments: list[Any]) -> tuple[Any, Any]:
    """The function fused, and as it was written in float64."""
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    with np.errstate(all="ignore"):
        return cf.fuse(function)(*arguments), function(*[a.astype(np.float64) for a in arguments])


@pytest.mark.parametrize("text", ALONG_SUMS + ALONG_RESULTS)
def test_products_with_values_that_repeat_are_weighted_sums(text: str, rng: np.random.Generator) -> None:
    found, notes = simplified(text)
    assert found["matmul"] == 0 and found["sum"] >= 1
    assert [n.identity for n in notes if "broadcast" in n.identity] == [REPEATED]
    arguments = [normal(rng, s.shape, s.dtype) for s in SPECS.values()]
    fused, wide = run_both(text, arguments)
    # Seven terms of ordinary size.
    assert_close(fused, wide, 1e-5 * (1 + np.abs(wide).max()))


@pytest.mark.parametrize("special", [INF, -INF, NAN])
@pytest.mark.parametrize("text", ALONG_RESULTS)
def test_what_repeats_in_the_result_keeps_special_values(text: str, special: float, rng: np.random.Generator) -> None:
    arguments = [normal(rng, s.shape, s.dtype) for s in SPECS.values()]
    for a in arguments[:5]:
        a.flat[1] = special
    fused, wide = run_both(text, arguments)
    assert_same_kinds(fused, wide)


def test_an_infinite_factor_of_a_sum_may_give_an_infinity() -> None:
    """As written each term is infinite, of either sign; here their sum is multiplied once."""
    arguments = [np.ones(s.shape, s.dtype) for s in SPECS.values()]
    r, w = arguments[3], arguments[1]
    r[0], w[0] = INF, -2.0
    fused, wide = run_both("np.broadcast_to(r[:, None], (6, 7)) @ w", arguments)
    assert np.all(np.isnan(wide[0])) and np.all(fused[0] == INF)
    np.testing.assert_array_equal(fused[1:], wide[1:])


@pytest.mark.parametrize(
    "text",
    [
        "x @ w.T",
        "(x * r[:, None]) @ w.T",
        "np.where(x > 0, 1.0, 0.0) @ w.T",
        "np.broadcast_to(b[:, None], (7, 1)) @ b[None]",
    ]
    + ["(np.broadcast_to(r[:, None], (6, 5)) + x) @ w.T", "np.broadcast_to(b, (6, 7)).reshape(7, 6) @ x"],
)
def test_other_products_stay(text: str) -> None:
    found, notes = simplified(text)
    assert found["matmul"] == 1 and not any("broadcast" in n.identity for n in notes)


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("np.broadcast_to(b, (6, 7)).max(axis=0)", "max"),
        ("np.broadcast_to(b, (6, 7)).min(axis=0) + b", "min"),
        ("np.broadcast_to(b, (6, 7)).sum(axis=0)", "sum"),
        ("np.tanh(np.broadcast_to(r[:, None], (6, 7))).mean(axis=1)", "mean"),
        ("np.broadcast_to(r[:, None], (6, 7)) * z", "broadcast"),
        ("(np.broadcast_to(r[:, None], (6, 7)).T + 1) * z.T", "broadcast"),
    ],
)
def test_what_repeats_is_computed_once(text: str, gone: str, rng: np.random.Generator) -> None:
    found, _ = simplified(text)
    assert found[gone] == 0
    arguments = [normal(rng, s.shape, s.dtype) for s in SPECS.values()]
    fused, wide = run_both(text, arguments)
    assert_close(fused, wide, 1e-5 * (1 + np.abs(wide).max()))


def test_the_sum_of_no_copies_is_nothing() -> None:
    fused = cf.fuse(lambda b: np.broadcast_to(b, (0, 7)).sum(axis=0))
    np.testing.assert_array_equal(fused(np.full(7, INF)), np.zeros(7))


def test_a_function_of_what_repeats_is_evaluated_once_a_row() -> None:
    graph, _ = rewrite.simplify(traced("np.exp(np.broadcast_to(r[:, None], (6, 7))).T"))
    (exponential,) = (n for n in g.topological(graph.roots) if n.op == "exp")
    assert exponential.size == 6
    assert graph.outputs[0].shape == (7, 6)


def test_products_that_are_read_transposed_alone_are_transposed() -> None:
    for text in ("(x @ w.T).T", "(x @ w.T).T @ x", "np.exp((x @ w.T).T)"):
        graph, _ = rewrite.simplify(traced(text))
        nodes = list(g.topological(graph.roots))
        assert all(n.inputs[0].op == "input" for n in nodes if n.op == "transpose"), text
    for text in ("(x @ w.T).T @ (x @ w.T)", "(x @ w.T, (x @ w.T).T)", "b[None] @ (x @ w.T).T"):
        graph, _ = rewrite.simplify(traced(text))
        products = [n for n in g.topological(graph.roots) if n.op == "matmul" and n.shape == (6, 7)]
        assert len(products) == 1, text


# The sum of a linear map --------------------------------------------------------------------------------------------

COLLAPSING = [
    "(x @ w.T).sum(axis=1)",
    "(x @ w.T).sum(axis=1, keepdims=True)",
    "(x @ w.T).mean(axis=1)",
    "(x @ w.T).sum()",
    "(x @ w.T).mean()",
    "(x @ w.T + b).sum(axis=1)",
    "(b + x @ w.T).sum(axis=1)",
    "(x @ w.T - b).sum(axis=1)",
    "(b - x @ w.T).sum(axis=1)",
    "(-(x @ w.T)).sum(axis=1)",
    "(x @ w.T * b).sum(axis=1)",
    "(x @ w.T / b).sum(axis=1)",
    "(x @ w.T * r[:, None]).sum(axis=1)",
    "(x @ w.T / r[:, None] + r[:, None]).sum(axis=1)",
    "(x @ w.T * 2 + 1).sum(axis=1)",
    "(x @ w.T + z).sum(axis=1)",
    "(x @ w.T * b + z * b).sum(axis=1)",
    "(((x @ w.T + b) * b - b) / 3 * r[:, None]).sum(axis=1)",
    "(x @ w.T + x @ h.T).sum(axis=1)",
    "(np.tanh(x) @ w.T).sum(axis=1)",
    "(x @ (w * 2).T).sum(axis=1)",
    "(x @ w.T * d + d).sum(axis=1)",
    "(z @ w).sum(axis=1)",
    "cf.linear(x, w, b).sum(axis=1, keepdims=True).max(axis=1)",
    "(r[None] @ z + b).sum(axis=1)",
]
STAYING = [
    "(x @ w.T).sum(axis=0)",
    "(x @ w.T).max(axis=1)",
    "np.exp(x @ w.T).sum(axis=1)",
    "(x @ w.T * (x @ w.T)).sum(axis=1)",
    "(z / (x @ w.T)).sum(axis=1)",
    "np.maximum(x @ w.T, 0).sum(axis=1)",
    "(x @ w.T).prod(axis=1)",
    "(x @ w.T, (x @ w.T).sum(axis=1))",
    "((x @ w.T).sum(axis=1), (x @ w.T).max(axis=1))",
    "cf.softmax(x @ w.T, axis=1) + (x @ w.T).sum(axis=1, keepdims=True)",
]


@pytest.mark.parametrize("text", COLLAPSING)
def test_sums_of_linear_maps_lose_the_product(text: str, rng: np.random.Generator) -> None:
    found, notes = simplified(text)
    assert found["matmul"] == 0 and found["guard"] >= 1
    assert any(n.identity == "the sum of a linear map is a matrix-vector product" for n in notes)
    arguments = [normal(rng, s.shape, s.dtype) for s in SPECS.values()]
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    wide = function(*[a.astype(np.float64) for a in arguments])
    # Two hundred terms of ordinary size; quotients by numbers near zero set the scale of the rest.
    assert_close(cf.fuse(function)(*arguments), wide, 1e-5 * (1 + np.abs(wide).max()) * 20)


@pytest.mark.parametrize(
    "text",
    ["(x @ w.T + b).sum(axis=1)", "(x @ w.T + r[:, None]).sum(axis=1)", "(x @ w.T / b - b * b).sum(axis=1)"]
    + ["(x @ w.T * r[:, None] + b / r[:, None]).mean(axis=1)", "((x @ w.T + b) * b + b) / b", "(x @ w.T + z).sum()"],
)
def test_float64_products_keep_their_digits_among_float32_terms(text: str, rng: np.random.Generator) -> None:
    """Terms and factors of lower dtypes are converted before they are combined, as they are when written out."""
    shapes = {"x": (6, 5), "w": (7, 5), "b": (7,), "r": (6,), "z": (6, 7)}
    arguments = [normal(rng, shape, "float64" if name in "xw" else "float32") for name, shape in shapes.items()]
    function = eval(f"lambda x, w, b, r, z: {text}")
    expected = function(*arguments)  # b * b is a float32 product as written, too
    assert_close(cf.fuse(function)(*arguments), expected, 1e-12 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("text", STAYING)
def test_products_that_are_needed_stay(text: str) -> None:
    found, notes = simplified(text)
    assert found["matmul"] >= 1
    assert not any("linear map" in n.identity for n in notes)


def test_the_note_says_what_the_collapse_saves() -> None:
    _, notes = simplified("(x @ w.T).sum(axis=1)")
    (note,) = notes
    assert note.what == "sum over 7 columns of (6 x 5) @ (5 x 7)"
    assert note.saved == f"{2 * 6 * 5 * 7 - 2 * 6 * 5} FLOPs"


def test_the_collapse_does_not_come_back_through_a_transposed_result() -> None:
    found, _ = simplified("(lambda s: (s, s @ s.T, z + s))((x @ w.T).sum(axis=1, keepdims=True))")
    assert found["matmul"] == 1
    plan = cf.fuse(lambda x, w: (lambda s: (s, s @ s.T))((x @ w.T).sum(axis=1, keepdims=True))).plan(
        SPECS["x"], SPECS["w"]
    )
    assert [s.kind for s in plan.steps].count("Gemm") == 1


@pytest.mark.parametrize(
    "text",
    [
        "(x @ w.T + (z - d)).sum(axis=1)",
        "((z - x @ w.T) - d).sum(axis=1)",
        "((x @ w.T + b) - d).mean(axis=1)",
        "(((b - x @ w.T) - d) * d * r).sum(axis=1)",
        "(x @ w.T * r + (z - d) * d).sum(axis=1)",
        "((b - z) / d + x @ w.T).sum()",
        "(b - z) / d * b",
        "(-z + b) / d * b",
        "(z * 2 - b) * b / d",
    ],
)
def test_what_cancels_before_it_is_summed_or_scaled_does_so_still(text: str, rng: np.random.Generator) -> None:
    """Values near 1000 whose differences are small: their sums, and their products, share no digits."""
    shapes = {"x": (4, 3), "w": (64, 3), "b": (64,), "d": (64,), "z": (4, 64), "r": (4, 1)}
    arguments = {name: normal(rng, shape) + (1000 if name in "bdz" else 0) for name, shape in shapes.items()}
    if "2" in text:
        arguments["b"] *= 2
    function = eval(f"lambda {', '.join(shapes)}: {text}")
    exact = function(*(a.astype(np.float64) for a in arguments.values()))
    written = np.abs(function(*arguments.values()) - exact).max()
    fused = np.abs(cf.fuse(function)(*arguments.values()) - exact).max()
    assert fused <= 8 * written + 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize(
    "text",
    [
        "(x @ w.T - True - True).sum(axis=1)",
        "((x @ w.T + 2**62) + 2**62).sum(axis=1)",
        "(((x @ w.T + 1) * 10**10 * 10**10) + b).sum(axis=1)",
        "(x @ w.T - True) * b * True",
        "((x @ w.T + True) * b - True) / b",
    ],
)
def test_numbers_of_every_kind_are_floats_among_floats(text: str, rng: np.random.Generator) -> None:
    function = eval(f"lambda x, w, b: {text}")
    arguments = [normal(rng, shape, "float64") for shape in ((4, 3), (5, 3), (5,))]
    np.testing.assert_allclose(cf.fuse(function)(*arguments), function(*arguments), rtol=1e-9)


def test_a_pool_above_the_product_of_another_pool_is_pooled_too() -> None:
    def twice(x: Any, w: Any, v: Any) -> Any:
        return cf.avg_pool1d(cf.avg_pool1d(x @ w.T, 2) @ v.T, 3)

    _, notes = rewrite.simplify(cf.fuse(twice).trace((cf.spec((8, 5)), cf.spec((12, 5)), cf.spec((9, 6)))).graph)
    assert [n.what for n in notes] == [
        "means of 2 columns of (8 x 5) @ (5 x 12)",
        "means of 3 columns of (8 x 6) @ (6 x 9)",
    ]


def test_a_value_of_too_many_terms_is_not_taken_apart() -> None:
    """y + y has twice the terms of y: forty doublings must neither take forever nor come out wrong."""

    def doubled(x: Any, w: Any) -> Any:
        y = x @ w.T
        for _ in range(40):
            y = y + y
        return y.sum(axis=1)

    x, w = np.eye(3), np.ones((2, 3))
    np.testing.assert_allclose(cf.fuse(doubled)(x, w), doubled(x, w), rtol=1e-12)


# Column-wise scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("(x @ w.T + b) / d * b + b", "divide -> multiply"),
        ("((x @ w.T - b) / np.sqrt(b + 1) * b + b) * 2", "divide -> multiply"),
        ("-(x @ w.T + b) * b * d", "negative -> multiply -> multiply"),
        ("b - (x @ w.T * 2 * d * b + b)", "multiply -> multiply -> multiply"),
        ("((b - x @ w.T) - b) / 3 / d", "divide -> divide"),
        ("z * b / d", "multiply -> divide"),
        ("cf.batch_norm(cf.linear(x, w), b, b, b, b) - 2.0", "divide -> multiply"),
    ],
)
def test_column_wise_scales_become_one(text: str, steps: str, rng: np.random.Generator) -> None:
    graph, notes = rewrite.simplify(traced(text))
    (note,) = (n for n in notes if n.identity.startswith("per-column scales"))
    assert note.what == steps
    names = steps.split(" -> ")
    assert note.saved == f"{42 * (sum(4 if n == 'divide' else 1 for n in names) - 1)} FLOPs"
    written = Counter(n.op for n in g.topological(traced(text).roots) if n.shape == (6, 7))
    full = Counter(n.op for n in g.topological(graph.roots, g.eager_inputs) if n.shape == (6, 7))
    expected = written - Counter(names) + Counter(multiply=1)
    assert {op: full[op] for op in ("add", "subtract", "multiply", "divide", "negative")} == {
        op: expected[op] for op in ("add", "subtract", "multiply", "divide", "negative")
    }
    arguments = [np.abs(normal(rng, s.shape, s.dtype)) + s.shape[0] % 2 for s in SPECS.values()]
    arguments = [a.astype(s.dtype) for a, s in zip(arguments, SPECS.values(), strict=True)]
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    wide = function(*[a.astype(np.float64) for a in arguments])
    assert_close(cf.fuse(function)(*arguments), wide, 1e-5 * (1 + np.abs(wide).max()))


@pytest.mark.parametrize(
    "text",
    [
        "(x @ w.T + b) * b",
        "((x @ w.T + b) * b + b) * b - b",
        "(x @ w.T - b) / b + b",
        "((x @ w.T + r[:, None]) * b + b)",
        "(x @ w.T * b + z) * b + r[:, None]",
        "b / ((x @ w.T + b) * b)",
        "np.tanh((x @ w.T + b) * b) * 2",
        "(x + 1) * 2 + 3",
        "(lambda y: (y + y) * b * b)(x @ w.T)",
        "s * b / d * b + z",
        "(x @ w.T + b) * b * d",
    ],
)
def test_other_chains_are_left_alone(text: str) -> None:
    _, notes = simplified(text)
    assert not any("per-column scales" in n.identity for n in notes)


CHAINS = {
    "add": lambda y, v: y + v,
    "subtract": lambda y, v: y - v,
    "reversed": lambda y, v: v - y,
    "multiply": lambda y, v: y * v,
    "divide": lambda y, v: y / v,
    "negative": lambda y, v: -y,
}


@pytest.mark.rotates
@settings(max_examples=settings().max_examples // 4)
@given(
    names=st.lists(st.sampled_from(sorted(CHAINS)), min_size=2, max_size=8),
    inner=st.sampled_from(["onehot", "product", "matrix"]),
    scales=st.lists(st.sampled_from([1e-12, 1e-5, 0.1, 1.0, 3.0, 1e4, 1e8]), min_size=8, max_size=8),
    spread=st.sampled_from([0.0, 1e-6, 0.3]),
    bound=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_chain_is_much_less_accurate_than_as_written(
    names: list[str], inner: str, scales: list[float], spread: float, bound: bool, seed: int
) -> None:
    """Means far above deviations, factors of any size: at most 4 times the error as written, and some roundings."""
    rng = np.random.default_rng(seed)
    rows, columns = 9, 5
    table = (scales[0] * (1 + spread * rng.standard_normal((rows, columns)))).astype(np.float32)
    left = np.eye(rows) if inner == "onehot" else rng.standard_normal((rows, rows)) / rows
    vectors = [(s * (1 + spread * rng.standard_normal(columns))).astype(np.float32) for s in scales[: len(names)]]

    def chain(x: Any, t: Any, *vectors: Any) -> Any:
        y = t if inner == "matrix" else x @ t
        for name, vector in zip(names, vectors, strict=True):
            y = CHAINS[name](y, vector)
        return y

    arguments = [left.astype(np.float32), table, *vectors]
    parameters = ", ".join(f"v{i}" for i in range(len(names)))
    function = eval(f"lambda x, t, {parameters}: chain(x, t, {parameters})", {"chain": chain})
    with np.errstate(all="ignore"):
        exact, written = function(*[a.astype(np.float64) for a in arguments]), function(*arguments)
        fused = cf.fuse(function)
        result = (
            fused.bind(**{f"v{i}": v for i, v in enumerate(vectors)})(*arguments[:2]) if bound else fused(*arguments)
        )
        # Column by column: errors of one scale.
        error, allowed = (np.abs(a - exact).max(axis=0) for a in (result, written))
        allowed = 4 * allowed + 8 * unit("float32") * np.abs(exact).max(axis=0) + 1e-37
    known = np.isfinite(allowed) & np.isfinite(written).all(axis=0)
    assert (error <= allowed)[known].all()


def test_a_mean_far_above_the_deviation_cancels_as_written(rng: np.random.Generator) -> None:
    """What one multiply-add a column made of it had an error of 3e-2."""

    def normalised(onehot: Any, table: Any, mean: Any, std: Any, gamma: Any, beta: Any) -> Any:
        return (onehot @ table - mean) / std * gamma + beta

    table = (1e4 + 1e-2 * rng.standard_normal((50, 30))).astype(np.float32)
    onehot = np.eye(50, dtype=np.float32)[rng.integers(0, 50, 200)]
    vectors = [table.mean(axis=0), table.std(axis=0) + np.float32(1e-3), *normal(rng, (2, 30))]
    exact = normalised(*[a.astype(np.float64) for a in (onehot, table, *vectors)])
    fused = cf.fuse(normalised)
    bound = fused.bind(table=table, mean=vectors[0], std=vectors[1], gamma=vectors[2], beta=vectors[3])
    for result in (fused(onehot, table, *vectors), bound(onehot)):
        assert_close(result, exact, 4e-7 * (1 + np.abs(exact)))


def test_what_an_extreme_is_taken_from_is_not_folded_away(rng: np.random.Generator) -> None:
    """y - min(y) is zero where y is smallest, and nowhere below: its root is a number."""

    def spread(x: Any, w: Any, b: Any) -> Any:
        y = x @ w.T * b + b
        low, high = y.min(axis=0), y.max()
        return np.sqrt((y - low) / (high - low) * 2), np.sqrt(high - (y * b - b) / b + 1 - y) * 0

    x, w, b = normal(rng, (200, 30)), normal(rng, (40, 30)), np.abs(normal(rng, (40,))) + 1
    scaled, _ = cf.fuse(spread)(x, w, b)
    assert not np.isnan(scaled).any() and (scaled == 0).sum() == 40


def test_a_chain_is_folded_once_and_where_it_ends() -> None:
    _, notes = simplified("(lambda y: (y + 2, y * d))((x @ w.T + b) * b / b)")
    folds = [n.what for n in notes if "per-column scales" in n.identity]
    assert sorted(folds) == ["multiply -> divide", "multiply -> divide -> multiply"]


# All together -------------------------------------------------------------------------------------------------------


def test_simplifying_is_idempotent() -> None:
    for head in HEADS:
        columns = [cf.spec(7)] * (len(head.bound) - 3) + [cf.spec(1)] * (len(head.bound) > 2)
        fused = cf.fuse(head.function)
        values, _ = fused.parameters.bind((SPECS["x"], SPECS["w"], SPECS["b"], *columns), {})
        traced = fused.trace(values)
        once, _ = rewrite.simplify(traced.graph)
        twice, _ = rewrite.simplify(once)
        assert ops(once) == ops(twice)


def test_the_written_graph_is_left_alone() -> None:
    graph = traced("(x @ w.T + b).sum(axis=1)")
    before = [(n.op, n.inputs) for n in g.topological(graph.roots)]
    rewrite.simplify(graph)
    assert [(n.op, n.inputs) for n in g.topological(graph.roots)] == before


def test_notes_of_plans_reach_the_reader() -> None:
    text = str(cf.fuse(HEADS[1].function).plan(SPECS["x"], SPECS["w"], SPECS["b"]))
    assert "a reduction along an axis of length 1 is the identity" in text
    assert "logsumexp of 6 x 1 along axis 1 (2 times); saves 48 bytes each" in text
    assert "the sum of a linear map is a matrix-vector product" in text
    assert "evaluated as written" in text


def test_a_rewrite_that_changes_nothing_returns_the_graph_whose_order_is_known():
    x = g.argument(0, "x", (4, 3), "float32")
    graph = g.Graph([x], [g.pointwise("exp", g.pointwise("tanh", x))])
    assert rebuild(graph, lambda node: node) is graph
    assert rebuild(graph, rewrite.drop_no_ops).order is graph.order
    changed = rebuild(graph, lambda node: x if node.op == "tanh" else node)
    assert [n.op for n in changed.order] == ["input", "exp"] and [n.op for n in graph.order] == ["input", "tanh", "exp"]
