"""Values that repeat, and sums of linear maps: products of which vectors remain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rewrites import SPECS, simplified, traced
from support import INF, NAN, assert_close, assert_same_kinds, normal

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g

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
