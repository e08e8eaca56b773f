"""Gradients as graphs: against PyTorch's eager backward, operator by operator and chain by chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import SHAPES, Ours, Passes, Torch, chain, drawn, execute, torch_passes
from support import INF, NAN

import cupyfuse as cf
from cupyfuse.errors import NotDifferentiable
from cupyfuse.ir import graph as g
from cupyfuse.ir.graph import Node
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.ir.products import split
from cupyfuse.ir.slices import strided_copy
from cupyfuse.plan.build import build
from cupyfuse.plan.traced import Traced
from cupyfuse.trace.autodiff import gradients
from cupyfuse.trace.saved import extract_graph

# Operators ----------------------------------------------------------------------------------------------------------

F = torch.nn.functional
POINTS = (
    -INF,
    -1e300,
    -50.0,
    -6.0,
    -3.0,
    -1.0,
    -0.75,
    -0.5,
    -1e-3,
    -0.0,
    0.0,
    1e-3,
    0.5,
    1.0,
    1.25,
    3.0,
    6.0,
    50.0,
    1e300,
)
POINTS += (INF, NAN)


def slope_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative of a function of PyTorch's, to be differentiated again."""
    return lambda x: torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]


# What PyTorch calls otherwise, or takes as numbers: the function, and the numbers.
THEIRS: dict[str, Callable[..., Any]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "log_sigmoid": F.logsigmoid,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.125),
    "softplus": lambda x: F.softplus(x, 2.0, 20.0),
    "elu": lambda x: F.elu(x, 0.75),
    "celu": lambda x: F.celu(x, 1.5),
    "hardtanh": lambda x: F.hardtanh(x, -0.75, 1.25),
    "clip": torch.clamp,
    "power": torch.pow,
    "rint": torch.round,
    "floor_divide": lambda a, b: torch.floor(a / b),  # whose own has no derivative
    "where": lambda c, a, b: torch.where(c != 0, a, b),
    "gelu_slope": slope_of(F.gelu),
    "gelu_tanh_slope": slope_of(lambda x: F.gelu(x, approximate="tanh")),
    "silu_slope": slope_of(F.silu),
    "finite_or_zero": lambda x: torch.where(torch.isfinite(x), x, 0.0),
}
NUMBERS = {"leaky_relu": (0.125,), "softplus": (2.0, 20.0), "elu": (0.75,), "celu": (1.5,), "hardtanh": (-0.75, 1.25)}
# PyTorch's float32 constant in its float64 kernel.
LOOSE = {"hardsigmoid": 1e-7}
# Formulas of PyTorch's with 1 + erf, 1 + tanh or 1 - sigmoid, which cancel: the absolute error.
CANCELLING = dict.fromkeys(("gelu", "gelu_tanh", "gelu_tanh_slope", "silu_slope"), 1e-15)
# Points that PyTorch's composition makes NaN of.
INSANE = {"softsign": [-INF, INF]}
INSANE |= {name: [-INF, -1e300, 1e300, INF] for name in ("gelu_tanh", "gelu_tanh_slope", "gelu_slope", "silu_slope")}
# Written by rewrites alone, after gradients were taken, or parts of log_softmax, which is compared as a whole.
INTERNAL = {"safe_multiply", "safe_divide", "log_relative", "plus_log"}
DIFFERENTIABLE = [r for r in POINTWISE.values() if r.takes_floats and r.result != "bool" and r.name not in INTERNAL]


@pytest.mark.parametrize("row", [pytest.param(r, id=r.name) for r in DIFFERENTIABLE])
def test_pointwise_operators(row: Any) -> None:
    """On a grid with the boundaries, zeros of both signs, large values, infinities and NaN."""
    numbers = NUMBERS.get(row.name, ())
    count = row.arity - len(numbers)
    points = {1: POINTS, 2: POINTS, 3: (-INF, -1.0, -0.0, 0.0, 0.5, 1.0, 2.0, INF, NAN)}[count]
    grid = [a.reshape(1, -1) for a in np.meshgrid(*[np.array(points)] * count)]
    if row.name in INSANE:
        keep = ~np.isin(grid[0], INSANE[row.name])
        grid = [a[keep][None, :] for a in grid]
    if row.name == "clip" and torch.__version__ >= (2, 14):  # which shares slopes with bounds where they meet
        x, low, high = grid
        grid = [a[(x != low) & (x != high) & (low < high) & ~np.isnan(x)][None, :] for a in grid]
    shape = grid[0].shape
    leaves = [g.argument(k, f"x{k}", shape, "float64") for k in range(count + 1)]
    node = g.pointwise(row.name, *leaves[:count], *(g.const(n) for n in numbers))
    found = gradients([node], [leaves[count]], leaves[:count])
    cotangent = np.linspace(0.5, 1.5, grid[0].size).reshape(shape)
    tensors = [torch.tensor(a, requires_grad=True) for a in grid]
    function = THEIRS.get(row.name) or getattr(F, row.name, None) or getattr(torch, row.name)
    result = function(*tensors)
    expected = torch.autograd.grad(result, tensors, torch.tensor(cotangent), allow_unused=True)
    for leaf, ours, theirs in zip(leaves, found, expected, strict=False):
        if ours is None:
            assert theirs is None or not torch.any(torch.nan_to_num(theirs)), leaf
            continue
        assert theirs is not None
        assert (ours.shape, ours.dtype) == (shape, "float64")
        plan = build(Traced("slope", extract_graph([ours], [(n, n.name) for n in leaves]), ((0, 1),), ()))
        (value,) = execute(plan, [*grid, cotangent], "numpy")
        rtol, atol = LOOSE.get(row.name, 1e-12), CANCELLING.get(row.name, 1e-300)
        np.testing.assert_allclose(value, theirs.numpy(), rtol=rtol, atol=atol, err_msg=str(leaf))


@pytest.mark.parametrize("name", ["relu", "relu6", "hardtanh", "clip", "where", "maximum", "leaky_relu", "elu"])
def test_what_is_shut_out_is_zero_even_of_an_infinite_cotangent(name: str) -> None:
    """PyTorch's masks choose; a product with 0 would make NaN."""
    text = {"where": "m.where(x > 0, x, r)", "maximum": "m.maximum(x, r)", "clip": "m.clip(x, -0.5, 0.5)"}
    form = text.get(name, f"m.{name}(x) + 0 * r" if name not in ("clip",) else "")
    arrays = drawn(np.random.default_rng(3))
    passes = Passes(chain(form, Ours()), arrays, [0])
    tensors = [torch.tensor(a) for a in arrays]
    tensors[0].requires_grad_()
    cotangent = np.full((6, 5), INF)
    (theirs,) = torch.autograd.grad(chain(form, Torch())(*tensors), tensors[0], torch.tensor(cotangent))
    _, (ours,) = passes(arrays, [cotangent])
    np.testing.assert_array_equal(ours, theirs.numpy())


REDUCED = {
    "sum": lambda x, axis: torch.sum(x, axis, keepdim=True),
    "prod": lambda x, axis: torch.prod(x, axis, keepdim=True),
    "mean": lambda x, axis: torch.mean(x, axis, keepdim=True),
    "max": lambda x, axis: torch.amax(x, axis, keepdim=True),
    "min": lambda x, axis: torch.amin(x, axis, keepdim=True),
    "logsumexp": lambda x, axis: torch.logsumexp(x, axis, keepdim=True),
    "moment2": lambda x, axis: torch.var(x, axis, correction=0, keepdim=True),
    "expsum": lambda x, axis: torch.exp(distance_below_maximum(x, axis)).sum(axis, keepdim=True),
    "distances": lambda x, axis: distance_below_maximum(x, axis).sum(axis, keepdim=True),
    "expdistances": lambda x, axis: torch.sum(
        distance_below_maximum(x, axis) * torch.exp(distance_below_maximum(x, axis)), axis, keepdim=True
    ),
}


def distance_below_maximum(x: torch.Tensor, axis: int) -> torch.Tensor:
    return x - torch.amax(x, axis, keepdim=True).detach()


ROWS = np.array(
    [
        [1.0, 2.0, 3.0, 4.0],
        [2.0, 2.0, -1.0, -1.0],  # ties
        [0.0, 2.0, 3.0, 4.0],
        [0.0, -0.0, 3.0, 4.0],
        [-INF, -INF, -INF, -INF],
        [INF, 1.0, 2.0, INF],
        [-INF, 1.0, 2.0, 0.5],
        [NAN, 1.0, 2.0, 0.0],
        [1e300, -1e300, 1.0, 1e-300],
    ]
)


def argument(number: int, shape: tuple[int, int]) -> Node:
    return g.argument(number, f"x{number}", shape, "float64")


@pytest.mark.parametrize("length", [4, 1])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", sorted(name for name, row in REDUCTIONS.items() if not row.gives_position))
def test_reductions(name: str, axis: int, length: int) -> None:
    # Of one element a reduction is the identity, and so is its gradient. One zero anywhere sends all of PyTorch's
    # products along another way, on which infinities come out otherwise.
    rows = ROWS[:4] if name == "prod" or length == 1 else ROWS
    rows = np.ascontiguousarray(rows[:, :length] if axis == 1 else rows[:, :length].T)
    x = argument(0, rows.shape)
    node = g.reduce(name, x, axis)
    c = argument(1, node.shape)
    (found,) = gradients([node], [c], [x])
    tensor = torch.tensor(rows, requires_grad=True)
    cotangent = np.linspace(0.5, 1.5, c.size).reshape(c.shape)
    (expected,) = torch.autograd.grad(REDUCED[name](tensor, axis), tensor, torch.tensor(cotangent))
    assert found is not None
    plan = build(Traced("slope", extract_graph([found], [(x, "x"), (c, "c")]), ((0, 1),), ()))
    (value,) = execute(plan, [rows, cotangent], "numpy")
    np.testing.assert_allclose(value, expected.numpy(), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("axis", [0, 1])
def test_what_is_repeated_no_times_has_a_gradient_of_zero(axis: int) -> None:
    """The cotangent of a mean of nothing is 0 / 0, for no element of the operand."""
    shape, single = ((0, 3), (1, 3)) if axis == 0 else ((3, 0), (3, 1))
    x, b = argument(0, shape), argument(1, single)
    node = g.pointwise("subtract", x, g.reduce("mean", g.pointwise("add", x, b), axis))
    c = argument(2, shape)
    (found,) = gradients([node], [c], [b])
    assert found is not None
    plan = build(Traced("slope", extract_graph([found], [(x, "x"), (b, "b"), (c, "c")]), ((0, 1),), ()))
    (value,) = execute(plan, [np.zeros(shape), np.ones(single), np.zeros(shape)], "numpy")
    np.testing.assert_array_equal(value, np.zeros(single))


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_have_no_gradient(name: str) -> None:
    """What is computed from one is a constant: of two terms here, the other has the gradient."""
    x, c = argument(0, (3, 4)), argument(1, (3, 4))
    place = g.cast(g.reduce(name, x, 1), "float64")
    assert gradients([g.pointwise("exp", place)], [g.reduce("sum", c, 1)], [x]) == [None]
    (found,) = gradients([g.pointwise("multiply", x, place)], [c], [x])
    assert found is not None and found.op == "multiply" and set(found.inputs) == {c, place}


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_special_values(name: str, rng: np.random.Generator) -> None:
    passes = Passes(lambda x: getattr(cf, name)(x, axis=1), [ROWS])
    _, cotangents, expected = torch_passes(lambda x: getattr(torch, name)(x, 1), [ROWS], [0], rng)
    _, found = passes([ROWS], cotangents)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12, atol=1e-15)


# What is saved ------------------------------------------------------------------------------------------------------


def saved(text: str) -> list[str]:
    passes = Passes(chain(text, Ours()), [cf.spec(s, "float64") for s in SHAPES.values()])
    return [f"{n.op}{n.axis if n.axis >= 0 else ''}" for n in passes.saved]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m.tanh(m.exp(x * c)) * r", []),
        ("m.tanh(m.sum(x * x, axis=1, keepdims=True)) * x", []),
        ("m.linear(x, w, b)", []),
        ("m.tanh(m.linear(x, w, b))", ["matmul"]),
        ("m.tanh(m.sum(x, axis=0)) * x", ["sum0"]),
        # The product itself is needed for nothing but its sum, which needs no product.
        ("m.tanh(m.sum(m.linear(x, w, b), axis=1))", ["sum1"]),
        ("(lambda z: m.tanh(m.sum(z, axis=1)) + m.max(z, axis=1))(m.linear(x, w, b))", ["add", "sum1"]),
        # Elements that are compared with their extreme, unless they are had again to the last bit.
        ("m.max(x * c + r, axis=0)", ["add"]),
        ("m.min(m.max(x * c + r, axis=1), axis=0)", ["add"]),
        ("m.max(m.relu(-x * c), axis=0)", ["multiply"]),
        ("m.max(m.relu(-x), axis=0)", []),
        ("m.max(m.relu(x @ w.T), axis=0)", ["matmul"]),
        ("m.max(m.sum(m.exp(x), axis=1), axis=0)", ["sum1"]),
        ("m.log_softmax(m.linear(x, w, b), axis=1)", ["matmul"]),
        ("m.tanh(m.tanh(x @ w.T) @ w)", ["matmul", "matmul"]),
    ],
)
def test_what_is_saved(text: str, expected: list[str]) -> None:
    assert saved(text) == expected


def test_statistics_of_16_bits_are_saved_as_they_were_computed(rng: np.random.Generator) -> None:
    """In float32: a variance of a million is infinite in float16."""
    x = (rng.standard_normal((64, 3)) * 1000).astype(np.float16)
    cotangent = rng.standard_normal((64, 3)).astype(np.float16)
    passes = Passes(lambda x: (x - cf.mean(x, axis=0)) / cf.std(x, axis=0), [x])
    assert [(n.op, n.dtype) for n in passes.saved] == [("mean", "float16"), ("moment2", "float16")]
    assert [n.dtype for n in passes.backward.graph.inputs[1:3]] == ["float32", "float32"]
    tensor = torch.tensor(x.astype(np.float64), requires_grad=True)
    result = (tensor - tensor.mean(0)) / tensor.std(0, correction=0)
    (expected,) = torch.autograd.grad(result, tensor, torch.tensor(cotangent.astype(np.float64)))
    for engine in ("numpy", "host"):
        _, (found,) = passes([x], [cotangent], engine)
        # One rounding to float16, whose smallest numbers are 2**-24 apart.
        np.testing.assert_allclose(found, expected.numpy(), rtol=2.0**-10, atol=2.0**-24)


def test_graphs_of_their_own_keep_unneeded_arguments() -> None:
    x, y = argument(0, (4, 3)), argument(1, (4, 3))
    vector = g.argument(2, "v", (1, 3), "float64", 1)
    square = g.pointwise("square", x)
    graph = extract_graph([g.pointwise("add", square, vector)], [(y, "y"), (square, "saved"), (vector, "v"), (x, "x")])
    assert [(n.argument, n.name, n.ndim) for n in graph.inputs] == [
        (0, "y", 2),
        (1, "saved", 2),
        (2, "v", 1),
        (3, "x", 2),
    ]
    arrays = [np.full((4, 3), 9.0), np.ones((4, 3)), np.arange(3.0), np.full((4, 3), 7.0)]
    for engine in ("numpy", "host"):
        (result,) = execute(build(Traced("f", graph, ((0, 1),), ())), arrays, engine)
        np.testing.assert_array_equal(result, np.ones((4, 3)) + np.arange(3.0))


# Where nothing flows ------------------------------------------------------------------------------------------------


def test_constants_stop_gradients_and_leave_plans_alone() -> None:
    x = argument(0, (4, 3))
    held = g.stop_gradient(g.pointwise("exp", x))
    product = g.pointwise("multiply", x, held)
    (found,) = gradients([product], [argument(1, (4, 3))], [x])
    assert found is not None and found.op == "multiply" and found.inputs[1] is held
    plan = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((4, 3)))
    assert not set(g.PASS_THROUGH) & set(plan.steps[0].fused)
    assert gradients([held], [argument(1, (4, 3))], [x]) == [None]


def test_what_nothing_depends_on_has_no_gradient() -> None:
    x, y = argument(0, (4, 3)), argument(1, (4, 3))
    mask = g.pointwise("greater", x, y)
    chosen = g.pointwise("where", mask, g.const(1.0), y)
    assert gradients([chosen], [argument(2, (4, 3))], [x]) == [None]
    assert gradients([chosen], [None], [y]) == [None]
    count = g.argument(0, "n", (4, 3), "int64")
    found = gradients([g.pointwise("multiply", y, count)], [argument(2, (4, 3))], [count, y])
    assert found[0] is None and found[1] is not None


def test_inner_values_have_gradients_too() -> None:
    x = argument(0, (4, 3))
    inner = g.reduce("sum", x, 1)
    outer = g.pointwise("square", inner)
    found = gradients([outer, inner], [argument(1, (4, 1)), argument(2, (4, 1))], [inner, x])
    assert found[0] is not None and found[0].shape == (4, 1)
    assert found[1] is not None and found[1].shape == (4, 3)


def test_inner_values_of_quotients_have_gradients_too() -> None:
    """Also those that a rule for the whole quotient passes over."""
    x, s = argument(0, (4, 3)), argument(1, (1, 3))
    e = g.pointwise("exp", x)
    total = g.reduce("sum", e, 1)
    share = g.pointwise("divide", e, total)
    factor = g.pointwise("reciprocal", g.pointwise("sqrt", s))
    for output, inner in ((share, e), (share, total), (g.pointwise("multiply", x, factor), factor)):
        alone, beside = (gradients([output], [argument(2, (4, 3))], w)[0] for w in ([inner], [inner, x, s]))
        assert alone is not None and alone.shape == inner.shape
        assert beside is not None and beside.shape == inner.shape


def test_operators_without_a_derivative_are_named() -> None:
    x = argument(0, (8, 64))
    with pytest.raises(NotDifferentiable, match="split"):
        gradients([g.cast(split(g.cast(x, "float32")), "float64")], [argument(1, (8, 130))], [x])


def test_copies_of_some_rows_have_no_gradient() -> None:
    x = argument(0, (4, 8))
    some = strided_copy(x, [(3, 0), (2, 8), (8, 1)], (6, 8))
    with pytest.raises(NotDifferentiable, match="all rows"):
        gradients([some], [argument(1, (6, 8))], [x])
