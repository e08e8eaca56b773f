"""Activations written by hand: all spellings are found, nothing else is, and the operators are what was written."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import Passes, torch_passes
from scipy import special
from support import FLOATS, HOST, dtype_of, kinds
from torch.nn import functional

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.ir.operators import POINTWISE
from cupyfuse.plan import build
from cupyfuse.rewrite.activations import IDENTITIES, Identity
from cupyfuse.selftest.oracle import wide_formula
from cupyfuse.settings import Settings

IDENTITY = pytest.mark.parametrize("identity", IDENTITIES, ids=lambda i: i.text.split(",")[0])


# The identities ----------------------------------------------------------------------------------------------------


class Arrays:
    """The namespace of the formulas on arrays: the operators' semantics, in a wide format their definitions."""

    def __init__(self, wide: bool):
        self.wide = wide

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = wide_formula(name) if self.wide else POINTWISE[name].numpy
        return lambda x, *numbers: function(x, *(np.asarray(n, x.dtype) for n in numbers))


def samples(dtype: str) -> Any:
    """Finite numbers of all sizes, for which no formula overflows, and dense ones where they change."""
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal(4000) * 3, np.linspace(-60, 60, 4001), np.ldexp(1.0, np.arange(-100, 6))]
    return np.concatenate([*drawn, -drawn[-1]]).astype(dtype)


@pytest.mark.rotates
@IDENTITY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operators_are_as_accurate_as_what_is_written(identity: Identity, dtype: str) -> None:
    x = samples(dtype)
    wide = np.longdouble if dtype == "float64" else np.float64
    with np.errstate(all="ignore"):
        exact = identity.operator(Arrays(True), x.astype(wide))
        got, written = (np.asarray(f(Arrays(False), x), wide) for f in (identity.operator, identity.written))
        assert got.dtype == wide and identity.operator(Arrays(False), x).dtype == dtype
        unit = np.finfo(dtype).eps * np.abs(exact) + 4 * np.finfo(dtype).tiny
        errors, ours = np.abs(written - exact) / unit, np.abs(got - exact) / unit
    # Roundings differ from one x to another: of the neighbours that sorting gives, the largest error counts.
    order = np.argsort(x)
    allowed = np.array([errors[order][max(0, k - 50) : k + 50].max() for k in range(x.size)])
    assert (ours[order] <= 1.5 * allowed + 2).all(), x[order][np.argmax(ours[order] - allowed)]


SPECIALS = (np.inf, -np.inf, np.nan, 0.0, -0.0)


@IDENTITY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values_are_those_of_what_is_written(identity: Identity, dtype: str) -> None:
    x = np.array(SPECIALS, dtype)
    with np.errstate(all="ignore"):
        got, written = (f(Arrays(False), x) for f in (identity.operator, identity.written))
    np.testing.assert_array_equal(got, written)
    np.testing.assert_array_equal(np.signbit(got[3:]), np.signbit(written[3:]))


# Spellings ---------------------------------------------------------------------------------------------------------


class Spelling:
    """Draws ways to write formulas: the order and grouping of factors and terms, and the forms of constants."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def one_of(self, *texts: str) -> str:
        return self._random.choice(texts)

    def _grouped(self, parts: list[str], sign: str) -> str:
        self._random.shuffle(parts)
        while len(parts) > 1:
            k = self._random.randrange(len(parts) - 1)
            parts[k : k + 2] = [f"({parts[k]} {sign} {parts[k + 1]})"]
        return parts[0]

    def product(self, *factors: str) -> str:
        return self._grouped(list(factors), "*")

    def sum(self, *terms: str) -> str:
        return self._grouped(list(terms), "+")

    def negative(self, x: str) -> str:
        return self.one_of(f"(-{x})", f"({x} * -1)", f"np.negative({x})", f"({x} / -1.0)")

    def half(self, *factors: str) -> str:
        if self._random.random() < 0.3:
            return f"({self.product(*factors)} / 2)"
        return self.product("0.5", *factors)

    def cube(self, x: str) -> str:
        return self.one_of(f"{x} ** 3", self.product(x, x, x), f"np.power({x}, 3.0)", f"{x} * np.square({x})")

    def exp(self, x: str) -> str:
        return f"np.exp({x})"


def sigmoid(s: Spelling, x: str) -> str:
    below = s.sum("1", s.exp(s.negative(x)))
    return s.one_of(f"(1 / {below})", f"np.reciprocal({below})", f"{below} ** -1", f"(1.0 / {below})")


def silu(s: Spelling, x: str) -> str:
    return s.one_of(
        f"{x} / {s.sum('1', s.exp(s.negative(x)))}", s.product(x, sigmoid(s, x)), s.product(x, f"cf.sigmoid({x})")
    )


def gelu(s: Spelling, x: str) -> str:
    root = s.one_of("0.5 ** 0.5", "0.7071067811865476", "math.sqrt(0.5)")
    scaled = s.one_of(s.product(x, f"({root})"), f"{x} / 2 ** 0.5", f"{x} / math.sqrt(2)")
    return s.half(x, s.sum("1", f"special.erf({scaled})"))


def gelu_tanh(s: Spelling, x: str) -> str:
    root = s.one_of("math.sqrt(2 / math.pi)", "0.7978845608028654", "(2 / math.pi) ** 0.5")
    whole = s.product(root, s.sum(x, s.product("0.044715", s.cube(x))))
    factored = s.product(root, x, s.sum("1", s.product("0.044715", s.one_of(f"{x} ** 2", s.product(x, x)))))
    return s.half(x, s.sum("1", f"np.tanh({s.one_of(whole, factored)})"))


def softplus(s: Spelling, x: str) -> str:
    part = s.one_of(f"np.maximum({x}, 0)", f"np.maximum(0.0, {x})", f"cf.relu({x})")
    stable = s.sum(part, f"np.log1p({s.exp(s.negative(s.one_of(f'np.abs({x})', f'abs({x})')))})")
    return stable


def mish(s: Spelling, x: str) -> str:
    exponential = f"np.log1p({s.exp(x)})", f"np.log({s.sum('1', s.exp(x))})"
    return s.product(x, f"np.tanh({s.one_of(softplus(s, x), *exponential, f'cf.softplus({x})')})")


SPELLINGS = {f.__name__: f for f in (sigmoid, silu, gelu, gelu_tanh, softplus, mish)}
NAMES = {"np": np, "cf": cf, "special": special, "math": math}
CALLS = {"gelu_tanh": "cf.gelu({}, approximate='tanh')"}
ARGUMENTS = {
    "y": "y",
    "y * 3 + 1": "(y * 3 + 1)",
    "np.tanh(y) * z": "(np.tanh(y) * z)",
    "y - max": "(y - y.max(1, keepdims=True))",
}


def found(function: Callable[..., Any], dtype: str = "float32") -> list[str]:
    """The operators of a function's graph after simplification."""
    graph, _ = rewrite.simplify(cf.fuse(function).trace((cf.spec((6, 5), dtype), cf.spec((6, 5), dtype))).graph)
    return [n.op for n in g.topological(graph.roots) if n.op not in ("input", "const")]


@pytest.mark.rotates
@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=ARGUMENTS)
def test_every_spelling_is_found(name: str, argument: str) -> None:
    """Whatever x is, also where x is a product whose factors could be taken for those of the formula."""
    base = found(eval(f"lambda y, z: {CALLS.get(name, f'cf.{name}({{}})').format(argument)}", NAMES))
    # SciPy's erf of float16 is float32, and a formula of two dtypes is none; in float64 erf is quicker than erfc.
    allowed = ("bfloat16", "float32") if name == "gelu" else FLOATS
    for seed in range(60):
        text = SPELLINGS[name](Spelling(seed), "x")
        dtype = allowed[seed % len(allowed)]
        function = eval(f"lambda y, z: (lambda x: {text})({argument})", NAMES)
        assert sorted(found(function, dtype)) == sorted(base), text


def plain(function: Callable[..., Any], dtype: str = "float32") -> bool:
    """Whether a function is left as it is written."""
    graph, notes = rewrite.simplify(cf.fuse(function).trace((cf.spec((6, 5), dtype),)).graph)
    activations = {n.op for n in g.topological(graph.roots)} & {
        "sigmoid",
        "silu",
        "gelu",
        "gelu_tanh",
        "softplus",
        "mish",
    }
    return not activations and not notes


@pytest.mark.parametrize(
    "text",
    [
        "1 / (2 + np.exp(-y))",
        "2 / (1 + np.exp(-y))",
        "1 / (1 - np.exp(-y))",
        "-1 / (1 + np.exp(-y) * 1.0001)",
        "(y + 1) / (1 + np.exp(-y))",
        "0.5 * y * (1 + special.erf(y * 0.7071))",
        "0.5 * y * (1 - special.erf(y * 0.5**0.5))",
        "y * (1 + special.erf(y * 0.5**0.5))",
        "0.5 * (y + 1) * (1 + special.erf(y * 0.5**0.5))",
        "0.5 * y * (1 + np.tanh(0.7978845608028654 * (y + 0.0447 * y ** 3)))",
        "0.5 * y * (1 + np.tanh(0.7978845608028654 * (y + 0.044715 * y ** 2)))",
        "np.log1p(np.exp(y) + 1)",
        "np.log1p(np.exp(y))",
        "np.log(1 + np.exp(y))",
        "np.log(2 + np.exp(y))",
        "y * np.tanh(np.exp(y))",
        "np.square(y * 1e300) * np.exp(y)",
        "y * 0 / (1 + np.exp(-y) / 1e-300)",
        "np.reciprocal(y * 0.0) + np.exp(y)",
        "y[:, :1] / (1 + np.exp(-y))",
        "y * y / y / (1 + np.exp(-y))",
        "y * (y / y) / (1 + np.exp(-y))",
        "1 / (1 + np.exp(-y).astype(np.float64))",
    ],
)
def test_nothing_else_is_found(text: str) -> None:
    assert plain(eval(f"lambda y: {text}", NAMES))


def test_constants_are_compared_in_the_dtype() -> None:
    """A constant of seven digits is that of float32; in float64 the results would differ."""
    function = eval("lambda y: 0.5 * y * (1 + np.tanh(0.7978846 * (y + 0.044715 * y**3)))", NAMES)
    assert not plain(function, "float32") and not plain(function, "bfloat16") and plain(function, "float64")


def test_an_operator_that_takes_longer_in_float64_is_not_taken_there() -> None:
    function = eval("lambda y: 0.5 * y * (1 + special.erf(y * 0.70710678118654752))", NAMES)
    assert not plain(function, "float32") and plain(function, "float64")


def test_values_that_something_else_reads_stay() -> None:
    """The exponential is computed in any case, and so is what is made of it."""
    assert plain(lambda y: (lambda t: (t * 2, y / t))(1 + np.exp(-y)))
    assert plain(lambda y: (lambda r: (r * 2, np.log1p(np.exp(-np.abs(y))) + r))(np.maximum(y, 0)))
    assert plain(lambda y: (np.exp(-y), 1 / (1 + np.exp(-y))))
    assert plain(lambda y: (lambda e: y / (1 + e) + e)(np.exp(-y)))
    assert not plain(lambda y: (y + 1, (y + 1) / (1 + np.exp(-(y + 1)))))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_integers_are_left_alone(dtype: str) -> None:
    assert plain(lambda y: y / (1 + np.exp(-1.0 * y)), dtype)
    assert plain(lambda y: 1 / (1 + np.exp(y)), dtype) is False, "a float64 formula of integers: x is their conversion"


def test_the_largest_formula_is_found() -> None:
    """Formulas within formulas, of formulas, and beside each other."""

    def function(y: Any) -> Any:
        stable = np.log1p(np.exp(-np.abs(y))) + np.maximum(y, 0)
        gate = 1 / (1 + np.exp(-(y / (1 + np.exp(-y)))))
        return y * np.tanh(stable), gate * 2

    trace = cf.fuse(function).trace((cf.spec((6, 5)),))
    graph, notes = rewrite.simplify(trace.graph)
    assert sorted(n.op for n in graph.order if n.inputs) == ["mish", "multiply", "sigmoid", "silu"]
    names = {n.identity.rpartition("= ")[2] for n in notes}
    assert names == {"silu(x)", "sigmoid(x)", "softplus(x)", "mish(x)"} and len(notes) == 4
    graph, notes = rewrite.simplify(cf.fuse(lambda y: y * (1 / (1 + np.exp(-y)))).trace((cf.spec((6, 5)),)).graph)
    assert [n.identity for n in notes] == ["x / (1 + exp(-x)) = silu(x)"], "not the sigmoid within, too"


def test_the_plan_shows_the_operator_and_what_it_was_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    function = cf.fuse(lambda y: 1 / (1 + np.exp(-y)))
    plan = function.plan(cf.spec((64, 64), "bfloat16"))
    assert plan.steps[0].fused == ("sigmoid",)
    assert "1 / (1 + exp(-x)) = sigmoid(x):\n      negative -> exp -> add -> divide, 64 x 64; saves 3 operators" in str(
        plan
    )
    asked = []
    monkeypatch.setattr(
        build, "simplify", lambda graph, on_gpu: asked.append(on_gpu) or rewrite.simplify(graph, on_gpu)
    )
    function(np.zeros((64, 64), np.float32))
    assert asked == [False] and not rewrite.simplify(function.trace((cf.spec((6, 5)),)).graph, on_gpu=False)[1]


# On kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_give_what_numpy_gives(dtype: str) -> None:
    """Special values as eager code gives them, and errors within a rounding of 16 bits or four of other dtypes."""
    names = [name for name in SPELLINGS if (name, dtype) != ("gelu", "float16")]
    texts = [SPELLINGS[name](Spelling(7), "y") for name in names]
    functions = [eval(f"lambda y: {text}", NAMES) for text in texts]
    HOST.require()
    x = np.concatenate([SPECIALS, samples("float32")[::3]]).astype(dtype_of(dtype))
    x = x.reshape(-1, 1)
    with HOST.active(), np.errstate(all="ignore"):
        results = cf.fuse(lambda y: tuple(f(y) for f in functions))(HOST.array(x))
        for text, function, result in zip(texts, functions, results, strict=True):
            got, exact = (
                HOST.host(result).astype(np.float64),
                function(x.astype(np.float64)),
            )
            np.testing.assert_array_equal(kinds(got[:5]), kinds(exact[:5]), text)
            unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
            bound = 16 * unit * (np.abs(exact) + np.abs(x.astype(np.float64))) + 1e-7 * (dtype == "float16")
            assert np.all(np.abs(got - exact)[5:] <= bound[5:]), text


TORCH = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: functional.softplus(x, threshold=40),
    "mish": functional.mish,
}


@pytest.mark.parametrize("name", TORCH)
def test_gradients_are_those_of_the_activation(name: str, rng: np.random.Generator) -> None:
    """The forward pass is the operator, whatever the backward pass reads of it."""
    text = SPELLINGS[name](Spelling(11), "(x * c)")
    both = Passes(
        eval(f"lambda x, c: {text}", NAMES),
        [cf.spec((6, 40), "float64"), cf.spec(40, "float64")],
        settings=Settings(on_gpu=True),
    )
    assert (name in {n.op for n in both.forward.graph.order}) == (name != "gelu")  # which stays erf in float64
    arrays = [rng.standard_normal((6, 40)) * 3, rng.standard_normal(40)]
    expected, cotangents, wanted = torch_passes(lambda x, c: TORCH[name](x * c), arrays, (0, 1), rng)
    outputs, found = both(arrays, cotangents, "host")
    for got, want in zip([*outputs, *found], [*expected, *wanted], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
