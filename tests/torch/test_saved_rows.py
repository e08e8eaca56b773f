"""Values of long rows that the forward pass saves: of norms, where both passes compute them alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import HOST
from torch import Tensor, nn
from torch.nn import functional as F
from torch_support import Code, OnHost
from torch_ways import operators

import cupyfuse.torch as ct
from cupyfuse import devices
from cupyfuse.ir import graph as g
from cupyfuse.settings import Settings
from cupyfuse.torch.chains import backward as backward_pass
from cupyfuse.torch.chains import compiled as compiled_chain
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.chains.tensors import without_memory
from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.symbols import Ref
from cupyfuse.trace.autodiff import gradients

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WAYS: dict[str, Callable[[Any], Any]] = {
    "fuse": lambda m: ct.fuse(m, only_gains=False),
    "operator": lambda m: torch.compile(m, backend=operators),
}
H200 = Settings("highest", devices.find("H200"))
ROWS, COLUMNS = 4400, 256  # enough of both


def backward_of(dtype: str, *steps: tuple[Any, ...], shape: tuple[int, int] = (ROWS, COLUMNS)) -> Backward:
    """The backward pass of a chain of (rule, arguments ...) on two matrices, which have the first numbers."""
    inputs = 2
    calls = []
    for k, (rule, *arguments) in enumerate(steps):
        bound = RULES[rule].signature.bind(*arguments)
        bound.apply_defaults()
        calls.append(Call(rule, bound.args, (inputs + k,)))
    outputs = (inputs + len(steps) - 1,)
    chain = Chain(tuple(f"x{k}" for k in range(inputs)), tuple(calls), outputs, (), frozenset())
    return Backward(chain.trace(((shape, dtype),) * inputs), (True,) * inputs, H200)


def saved(dtype: str, *steps: tuple[Any, ...], **shape: Any) -> list[str]:
    """The operators of what such a chain saves."""
    return [n.op for n in backward_of(dtype, *steps, **shape).saving.nodes]


NORM = ("layer_norm", Ref(0), (COLUMNS,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_mean_and_the_deviation_of_a_norm_are_saved(dtype: str) -> None:
    assert sorted(saved(dtype, NORM)) == ["mean", "reciprocal", "sqrt"]
    assert sorted(saved(dtype, ("rms_norm", Ref(0), (COLUMNS,)))) == ["reciprocal", "sqrt"]


def test_values_of_short_or_few_rows_are_not() -> None:
    assert saved("float32", ("layer_norm", Ref(0), (128,)), shape=(1 << 15, 128)) == []
    assert saved("float32", NORM, shape=(512, COLUMNS)) == []


def test_nor_are_those_of_exponentials() -> None:
    assert saved("float32", ("softmax", Ref(0), 1)) == []
    assert saved("float32", ("logsumexp", Ref(0), 1)) == ["logsumexp"]  # one number, which gradients are relative to


def test_nor_those_of_elements_that_one_pass_may_round() -> None:
    """What a mean is subtracted from has to be what it is the mean of."""
    behind = ("layer_norm", Ref(2), (COLUMNS,))
    assert saved("bfloat16", ("add", Ref(0), Ref(1)), behind) == []
    assert sorted(saved("float32", ("add", Ref(0), Ref(1)), behind)) == ["mean", "reciprocal", "sqrt"]


class Norms(nn.Module):
    """A function of a matrix and of two vectors of parameters."""

    def __init__(self, code: Callable[..., Any]):
        super().__init__()
        self.code = code
        self.scale, self.shift = nn.Parameter(torch.rand(COLUMNS) + 0.5), nn.Parameter(torch.randn(COLUMNS))

    def forward(self, x: Tensor) -> Any:
        return self.code(x, self.scale, self.shift)


def written_out(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * scale + shift


def with_residual(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 3 * torch.tanh(x)
    return y, F.layer_norm(y, (COLUMNS,), scale, shift)


CODES: dict[str, Callable[..., Any]] = {
    "layer norm": lambda x, scale, shift: F.layer_norm(x, (COLUMNS,), scale, shift),
    "rms norm": lambda x, scale, shift: F.rms_norm(x, (COLUMNS,), scale) + shift,
    "written out": written_out,
    "residual": with_residual,
    "activation": lambda x, scale, shift: F.gelu(x * scale + shift),
    "affine softmax": lambda x, scale, shift: (x * scale + shift).softmax(-1),
    "standard deviation": lambda x, scale, shift: x.std(-1) * scale.max() + shift.min(),
}


@pytest.fixture(params=["numpy", "kernels"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chains run by NumPy, or by the kernels of an H200."""
    if request.param == "kernels":
        HOST.require()
        runtime = OnHost()
        for module in (backward_pass, compiled_chain):
            monkeypatch.setattr(module, "load", runtime.load)
            monkeypatch.setattr(module, "begin", runtime.begin)
        monkeypatch.setattr(Options, "settings_on", lambda *_: H200)


def step(module: Any, x: Tensor) -> list[Tensor]:
    """Results, and gradients by the input and the parameters, in float64."""
    x = x.detach().clone().requires_grad_()
    found = module(x)
    results = list(found) if isinstance(found, tuple) else [found]
    weights = [torch.arange(1.0, y.numel() + 1).sin().view(y.shape).to(y) for y in results]
    grads = torch.autograd.grad(results, [x, *module.parameters()], weights, allow_unused=True)
    return [t.detach().double() for t in (*results, *(g for g in grads if g is not None))]


@pytest.mark.rotates
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_errors_of_gradients_are_of_the_size_of_eager_s(name: str, dtype: torch.dtype, way: str, engine: None) -> None:
    module, x = Norms(CODES[name]).to(dtype), torch.randn(ROWS, COLUMNS).to(dtype)
    exact = step(copy.deepcopy(module).double(), x.double())
    eager, fused = step(copy.deepcopy(module), x), step(WAYS[way](copy.deepcopy(module)), x)
    unit = torch.finfo(dtype).eps / 2
    for found, expected, truth in zip(fused, eager, exact, strict=True):
        floor = max(float((expected - truth).norm()), unit * float(truth.norm()))
        assert float((found - truth).norm()) <= 3 * floor


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["layer norm", "residual", "written out"])
def test_rows_of_one_number_have_no_gradient(name: str, way: str, engine: None) -> None:
    """All that is left of them beside their mean is what roundings left, times 1 / sqrt(eps)."""
    module = Norms(CODES[name]).to(torch.bfloat16)
    x = torch.linspace(1, 100, ROWS).to(torch.bfloat16)[:, None].expand(ROWS, COLUMNS).contiguous()
    exact = step(copy.deepcopy(module).double(), x.double())
    fused = step(WAYS[way](copy.deepcopy(module)), x)
    assert float(exact[-2].abs().max()) <= 1e-6 * ROWS  # by the scale: a sum of gradients times elements that are 0
    assert float(fused[-2].abs().max()) <= 1e-2 * ROWS


def test_deviations_from_a_mean_are_not_summed_up() -> None:
    """The gradient of a norm by its operand takes two sums of each row."""
    backward = backward_of("float32", NORM)
    plan = backward.plan([without_memory((ROWS, COLUMNS), "float32")] * 2, (True, True))
    assert plan is not None
    assert sum(operation == "sum" for step in plan.steps for operation in step.fused) == 2


DIFFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "variance": lambda x: (x - x.mean(1, keepdim=True)).square().mean(1),
    "of columns": lambda x: (x - x.mean(0)).square().mean(0),
    "times numbers of rows": lambda x: (x - x.mean(1, keepdim=True)).square() * x.amax(1, keepdim=True),
    "times numbers of columns": lambda x: (x - x.mean(1, keepdim=True)).square() * torch.linspace(0, 1, 12).to(x),
    "and others": lambda x: (x - x.mean(1, keepdim=True)).square() + (x - x.mean(1, keepdim=True)).exp(),
    "along the other axis": lambda x: (x - x.mean(0)).square().mean(1),
    "of whole numbers": lambda x: (x.int().to(x.dtype) - x.mean(1, keepdim=True)).square().sum(1),
    "from whole numbers": lambda x: (x - x.int().to(x.dtype).mean(1, keepdim=True)).square().sum(1),
    "of constants": lambda x: (x.detach() - x.mean(1, keepdim=True)).square().sum(1),
    "from others": lambda x: (x - (2 * x).mean(1, keepdim=True)).square().sum(1),
    "rounded": lambda x: (x - x.float().mean(1, keepdim=True).to(x.dtype)).square().sum(1),
    "of one": lambda x: (x[:, :1] - x[:, :1].mean(1, keepdim=True)).square() + x[:, 1:2],
    "from the mean itself": lambda x: (x.mean(1, keepdim=True) - x).square().sum(1),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_gradients_of_differences_from_means(name: str) -> None:
    x = torch.linspace(-3, 5, 60, dtype=torch.float64).view(5, 12).mul(7).sin().mul(4)
    found = []
    for run in (DIFFERENCES[name], ct.fuse(Code(DIFFERENCES[name]), only_gains=False)):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(leaf).sin().sum(), leaf))
    tolerance = 1e-6 if name == "rounded" else 1e-11
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def test_gradients_of_gradients_of_a_variance(engine: None) -> None:
    """Terms that sum to zero are left out of gradients, not of what these depend on."""

    def penalty(module: Any, x: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        second = torch.autograd.grad(first.pow(3).sum(), [x, module.scale])
        return [t.double() for t in (first.detach(), *second)]

    module, x = Norms(written_out).double(), torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    fused = penalty(ct.fuse(copy.deepcopy(module), only_gains=False), x)
    for found, expected in zip(fused, penalty(module, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize(("dtype", "sums"), [("int32", True), ("bool", True), ("float32", False)])
def test_deviations_as_integers_are_not_left_out_of_a_mean_s_gradient(dtype: str, sums: bool) -> None:
    """Those as floats sum to zero, but for roundings; integers and bools are other numbers."""
    x, cotangent = g.argument(0, "x", (5, 7), "float64", 2), g.argument(1, "c", (5, 1), "float64", 2)
    deviations = g.pointwise("subtract", x, g.reduce("mean", x, 1))
    factors = g.cast(g.cast(deviations, dtype), "float64")
    energy = g.reduce("sum", g.pointwise("multiply", deviations, factors), 1)
    (found,) = gradients([energy], [cotangent], [x])
    assert any(n.op == "sum" for n in g.topological([found])) == sums


@pytest.mark.parametrize("grow", ["doubled", "many terms", "many factors"])
def test_gradients_of_many_terms_of_deviations_take_no_longer_than_others(grow: str) -> None:
    """Values that are added to themselves forty times, and sums and products longer than Python's stack is deep."""
    x, cotangent = g.argument(0, "x", (5, 7), "float64", 2), g.argument(1, "c", (5, 7), "float64", 2)
    deviations = h = g.pointwise("subtract", x, g.reduce("mean", x, 1))
    for k in range(40 if grow == "doubled" else 2000):
        term = h if grow == "doubled" else g.pointwise("multiply", deviations, g.const(k + 2.0))
        h = g.pointwise("multiply", h, g.const(0.9)) if grow == "many factors" else g.pointwise("add", h, term)
    (found,) = gradients([g.pointwise("multiply", h, deviations)], [cotangent], [x])
    assert any(n.op == "sum" for n in g.topological([found]))
