"""Cotangents in few operations: what is taken out of their sums, and quotients whose operands belong together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import Passes, torch_passes
from support import INF, NAN

import cupyfuse as cf
from cupyfuse.ir import graph as g
from cupyfuse.ir.graph import Node
from cupyfuse.trace.autodiff import gradients

SHAPE = (6, 4)


def argument(number: int, shape: tuple[int, int]) -> Node:
    return g.argument(number, f"x{number}", shape, "float64")


def gradient(output: Node, of: Node) -> Node:
    (found,) = gradients([output], [argument(9, output.shape)], [of])
    assert found is not None
    return found


def elements(node: Node) -> list[str]:
    """The operators that compute a value for each element of a matrix."""
    return sorted(n.op for n in g.topological([node]) if n.shape == SHAPE and n.pointwise)


@pytest.mark.parametrize("axis", [0, 1])
def test_factors_that_do_not_vary_are_taken_out_of_a_sum(axis: int) -> None:
    single = (1, SHAPE[1]) if axis == 0 else (SHAPE[0], 1)
    x, b, v, w = argument(0, SHAPE), argument(1, single), argument(2, single), argument(3, single)
    scaled = g.pointwise("divide", g.pointwise("multiply", g.pointwise("add", x, b), v), w)
    found = gradient(g.pointwise("negative", scaled), b)
    (total,) = (n for n in g.topological([found]) if n.op == "sum")
    assert total.inputs[0].op == "input", "the cotangent itself is summed"
    assert found.shape == single


def test_computed_numbers_stay_within_a_sum() -> None:
    """The cotangent of a loss multiplies each element, and is part of what sums add up: both are one matrix."""
    x, b, v, number = argument(0, SHAPE), argument(1, (1, SHAPE[1])), argument(2, (1, SHAPE[1])), argument(3, (1, 1))
    of_b = gradient(g.pointwise("multiply", g.pointwise("multiply", g.pointwise("add", x, b), v), number), b)
    (total,) = (n for n in g.topological([of_b]) if n.op == "sum")
    assert total.inputs[0].op == "multiply" and number in total.inputs[0].inputs
    assert of_b.op == "multiply" and v in of_b.inputs


def test_factors_of_the_forward_pass_stay_within_a_sum() -> None:
    """x of 1e200 divided by v of 1e200 is in range where x times its cotangent is not."""
    x, v, w = argument(0, SHAPE), argument(1, (1, SHAPE[1])), argument(2, (1, SHAPE[1]))
    output = g.pointwise("multiply", g.pointwise("divide", x, v), w)
    found = gradient(output, w)
    assert output.inputs[0] in set(g.topological([found]))

    passes = Passes(lambda x, v, w: x / v * w, [np.ones(SHAPE), np.ones(SHAPE[1]), np.ones(SHAPE[1])])
    arrays = [np.full(SHAPE, 1e200), np.full(SHAPE[1], 1e200), np.ones(SHAPE[1])]
    _, (_, _, of_w) = passes(arrays, [np.full(SHAPE, 1e200)])
    np.testing.assert_allclose(of_w, 6e200)


def test_sums_of_nothing_are_zero_whatever_multiplies_them() -> None:
    x, b, v = argument(0, (0, 3)), argument(1, (1, 3)), argument(2, (1, 3))
    passes = Passes(lambda x, b, v: (x + b) * v, [np.ones((0, 3)), np.ones(3), np.ones(3)])
    _, (_, of_b, _) = passes([np.ones((0, 3)), np.ones(3), np.full(3, INF)], [np.ones((0, 3))])
    np.testing.assert_array_equal(of_b, np.zeros(3))
    assert gradient(g.pointwise("multiply", g.pointwise("add", x, b), v), b).shape == (1, 3)


def test_numbers_multiply_the_smaller_value() -> None:
    """2 (x - mean) / n times a cotangent of each column: one subtraction and one product for each element."""
    x = argument(0, SHAPE)
    assert elements(gradient(g.reduce("moment2", x, 0), x)) == ["multiply", "subtract"]


SHARES = {
    "softmax": lambda x: cf.softmax(x, axis=1),
    "exponentials": lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    "absolute": lambda x: abs(x) / abs(x).sum(1, keepdims=True),
    "down the columns": lambda x: np.exp(x) / np.exp(x).sum(0),
    "of a sum used elsewhere": lambda x: (
        np.exp(x) / np.exp(x).sum(1, keepdims=True) + np.log(np.exp(x).sum(1))[:, None]
    ),
}
THEIRS = {
    "softmax": lambda x: torch.softmax(x, 1),
    "exponentials": lambda x: torch.exp(x) / torch.exp(x).sum(1, keepdim=True),
    "absolute": lambda x: x.abs() / x.abs().sum(1, keepdim=True),
    "down the columns": lambda x: torch.exp(x) / torch.exp(x).sum(0),
    "of a sum used elsewhere": lambda x: (
        torch.exp(x) / torch.exp(x).sum(1, keepdim=True) + torch.exp(x).sum(1).log()[:, None]
    ),
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_of_a_sum(name: str, rng: np.random.Generator) -> None:
    rows = rng.standard_normal(SHAPE)
    rows[1, 2], rows[3] = NAN, 0.0 if name == "absolute" else -1.5
    _, cotangents, expected = torch_passes(THEIRS[name], [rows], [0], rng)
    _, found = Passes(SHARES[name], [rows])([rows], cotangents)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, atol=1e-15)


def test_a_share_has_one_quotient() -> None:
    """Its cotangent too is made of the share: a second one would divide each element again."""
    e = g.pointwise("exp", argument(0, SHAPE))
    share = g.pointwise("divide", e, g.reduce("sum", e, 1))
    found = gradient(share, e.inputs[0])
    assert elements(found) == ["divide", "exp", "multiply", "multiply", "subtract"]


def test_a_maximum_that_has_a_gradient_keeps_it(rng: np.random.Generator) -> None:
    """The sum of exponentials relative to it is a sum like others; the maximum's own gradient is not left out."""
    rows = rng.standard_normal(SHAPE)

    def ours(x: np.ndarray) -> np.ndarray:
        e = np.exp(0.5 * (x - x.max(1, keepdims=True)))
        return e / e.sum(1, keepdims=True) * x.max(1, keepdims=True)

    def theirs(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(0.5 * (x - x.amax(1, keepdim=True)))
        return e / e.sum(1, keepdim=True) * x.amax(1, keepdim=True)

    _, cotangents, expected = torch_passes(theirs, [rows], [0], rng)
    _, found = Passes(ours, [rows])([rows], cotangents)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, atol=1e-15)


def test_reciprocals_of_what_is_no_deviation_keep_their_gradients() -> None:
    """Where x r is infinite and what follows it constant, the cotangent is 0, and so is its product with x."""
    x, v = np.array([[1e38, 1.0, 2.0]], np.float32), np.array([[1e-3]], np.float32)
    passes = Passes(lambda x, v: np.minimum(x * (1 / np.sqrt(v)), 1e4), [x, v])
    _, (_, of_v) = passes([x, v], [np.ones((1, 3), np.float32)])
    np.testing.assert_allclose(of_v, [[-0.5 * 3.0 * 1e-3**-1.5]], rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_deviations_are_known_by_what_they_are_of(axis: int) -> None:
    """As norms and batch norm write them: of the mean square of x, or of what x is less its mean."""
    x, scale = argument(0, SHAPE), argument(1, (1, SHAPE[1]) if axis == 0 else (SHAPE[0], 1))
    centred = g.pointwise("subtract", x, g.reduce("mean", x, axis))
    for spread, of in ((g.reduce("mean", g.pointwise("square", x), axis), x), (g.reduce("moment2", x, axis), centred)):
        root = g.pointwise("sqrt", g.pointwise("add", spread, g.const(1e-5)))
        standard = g.pointwise("multiply", of, g.pointwise("reciprocal", root))
        found = gradients([g.pointwise("multiply", standard, scale)], [argument(9, SHAPE)], [x, scale])
        sums = {n for n in g.topological([n for n in found if n is not None]) if n.op == "sum"}
        assert any(standard in n.inputs[0].inputs for n in sums)
        assert not any(of in n.inputs[0].inputs for n in sums)


def test_the_gradients_of_a_standardised_matrix_are_two_sums() -> None:
    """Of scale and shift; those with regard to mean and deviation are multiples of them."""
    x, scale, shift = argument(0, SHAPE), argument(1, (1, SHAPE[1])), argument(2, (1, SHAPE[1]))
    deviation = g.pointwise("sqrt", g.pointwise("add", g.reduce("moment2", x, 0), g.const(1e-5)))
    centred = g.pointwise("subtract", x, g.reduce("mean", x, 0))
    standard = g.pointwise("multiply", centred, g.pointwise("reciprocal", deviation))
    output = g.pointwise("add", g.pointwise("multiply", standard, scale), shift)
    found = gradients([output], [argument(9, SHAPE)], [x, scale, shift])
    roots = [n for n in found if n is not None]
    assert len({n for n in g.topological(roots) if n.op == "sum"}) == 2


SATURATED: dict[str, Callable[..., Any]] = {
    "clip": lambda m, x, s: m.clip(x * m.reciprocal(s), -1.0, 1.0),
    "tanh": lambda m, x, s: m.tanh(x * m.reciprocal(s)),
    "where": lambda m, x, s: m.where(x < 1e200, x * m.reciprocal(s), 0.0),
}


@pytest.mark.parametrize("name", SATURATED)
def test_products_out_of_range_that_nothing_depends_on_leave_divisors_their_gradients(name: str) -> None:
    """The cotangent of an infinite x / s is 0 there. Its product with x is 0, as in PyTorch, with x / s NaN."""
    function = SATURATED[name]
    x, s = np.full(SHAPE, 0.25), np.array([0.5, 1e-120, 1.0, 2.0])
    x[2, 1] = 1e200
    cotangent = np.linspace(0.5, 1.5, x.size).reshape(SHAPE)
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, s)]
    theirs = torch.autograd.grad(function(torch, *tensors), tensors, torch.tensor(cotangent))
    _, ours = Passes(lambda x, s: function(np, x, s), [x, s])([x, s], [cotangent])
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)
