"""Transforms and random draws in Dynamo's graphs."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch_support import fused_chains
from torch_ways import Code, graded, plain, same, ways

import cupyfuse.torch as ct
from cupyfuse.torch.graphs.importer import WITHIN_TRANSFORM

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _by_rows(m: Any, x: Any) -> Any:
    h = m.linear(x)
    return torch.vmap(lambda r, w: torch.tanh(r @ w).softmax(-1), in_dims=(0, None))(h, m.linear.weight).exp().sum(-1)


def _slope(m: Any, x: Any) -> Any:
    slope = torch.func.grad(lambda r: (r * 2).softmax(-1).exp().sin().sum())(x.detach())
    return (slope * m.linear(x)).softmax(0)


@pytest.mark.rotates
@ways
@pytest.mark.parametrize("code", [_by_rows, _slope])
def test_transforms_within(code: Any, way: str, recwarn: pytest.WarningsRecorder) -> None:
    fused = same(Code(code), graded, way)
    assert not [w for w in recwarn if "cupyfuse" in str(w.message)]
    if way == "fuse":
        assert len(fused_chains(fused)) == 1
        assert WITHIN_TRANSFORM in {part.reason for part in ct.explain(fused).left}


def _tangent(m: Any, x: Any) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.detach(), x.detach() ** 2)
        y = F.layer_norm(F.gelu(m.linear(dual)), dual.shape[-1:]).logsumexp(-1)
        return forward_ad.unpack_dual(y).tangent


def test_tangents_within() -> None:
    """Levels that the forward method enters are seen in its graph; Python's count of them is not set yet."""
    module = Code(_tangent)
    module.linear = nn.Linear(8, 8)
    fused = ct.fuse(copy.deepcopy(module), only_gains=False)
    x = torch.randn(4, 8)
    for again in range(2):
        torch.testing.assert_close(fused(x), module(x), msg=f"call {again}")
    assert {part.reason for part in ct.explain(fused).left} == {WITHIN_TRANSFORM}


def _drawing(m: Any, x: Any) -> Any:
    y = m.linear(x).exp()
    n = torch.empty_like(y).normal_()
    b = torch.bernoulli(torch.full_like(y, 0.5))
    return (y * n).softmax(-1) + b, torch.rand_like(y), F.dropout(y).softmax(-1).exp(), F.dropout(y, 0.5, False).cos()


@ways
def test_draws_come_in_order(way: str) -> None:
    same(Code(_drawing), graded, way)


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: (m.linear(x) * m.own.random()).softmax(-1),
        lambda m, x: m.linear(x).exp().softmax(-1) * m.own.choice([1.0, 2.0, 3.0]),
        lambda m, x: (m.linear(x).exp() * hash(m.own.getstate())).softmax(-1) + m.own.randint(0, 9),
        lambda m, x: (m.linear(x) * random.Random(5).random()).softmax(-1) + random.uniform(0, 1),
    ],
    ids=["random", "choice", "getstate", "made within"],
)
def test_generators_of_python_go_on_from_call_to_call(code: Any) -> None:
    """Dynamo would draw what the captured call drew, in each call."""
    found = []
    for way in (ct.fuse, lambda m: m):
        torch.manual_seed(3)
        random.seed(3)
        module = way(Code(code, own=random.Random(3)))
        found.append([module(torch.ones(5, 12)) for _ in range(4)] + [module.own.random(), random.random()])
    torch.testing.assert_close(*found)


def test_numpy_draws_from_its_own_generator() -> None:
    def code(m: Any, x: Any) -> Any:
        noise = np.random.rand(12).astype(np.float32)  # noqa: NPY002
        return (m.linear(x) / np.sqrt(12.0) + torch.from_numpy(noise)).softmax(-1), random.random()

    fused = ct.fuse(module := Code(code))
    found = []
    for each in (module, fused, module, fused):
        np.random.seed(len(found) // 2)  # noqa: NPY002
        random.seed(5)
        torch.manual_seed(5)
        found.append((*each(plain()[0]), np.random.rand(), random.random(), torch.rand(3)))  # noqa: NPY002
    for k in (0, 2):
        torch.testing.assert_close(found[k + 1], found[k])
    drawing = [p.code for p in ct.explain(fused).left if "random" in p.reason]
    assert not drawing


def test_arrays_of_numpy_in_attributes() -> None:
    """Dynamo guards the tensor that it makes from an array, another one each time that it makes guards."""

    def code(m: Any, x: Any) -> Any:
        y = m.linear(x) + torch.from_numpy(m.offset)
        m.calls += 1
        return y.softmax(-1) * m.calls

    values = np.linspace(0, 1, 12, dtype=np.float32)
    module, other = (Code(code, offset=values.copy(), calls=0) for _ in range(2))
    other.load_state_dict(module.state_dict())
    fused, (x,) = ct.fuse(other), plain()
    for _ in range(3):
        torch.testing.assert_close(fused(x), module(x))
        for each in (module, fused):
            each.offset[3] += 1  # the array itself
        torch.testing.assert_close(fused(x), module(x))
        for each in (module, fused):
            each.offset = each.offset * 2
    assert fused_chains(fused)
    assert not any("not captured" in part.reason for part in ct.explain(fused).left)


def test_captures_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo advises settings of its own where a number breaks a graph, here the momentum of a cumulative average."""
    from torch._dynamo.variables.tensor import TensorVariable

    TensorVariable._warn_capture_scalar_outputs.cache_clear()  # it advises once
    module = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=None), nn.Softmax(-1))
    fused, (x,) = ct.fuse(copy.deepcopy(module)), plain()
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    logger.addHandler(caplog.handler)
    try:
        torch.testing.assert_close(fused(x), module(x))
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_code_runs_as_in_eager_and_others_do_not() -> None:
    """Code that asks whether it is compiled finds that it is not, under `fuse` alone."""

    class Asking(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.softmax(x, -1) * (3.0 if torch.compiler.is_compiling() else 2.0)

    x = torch.randn(3, 5)
    torch.testing.assert_close(ct.fuse(Asking())(x), torch.softmax(x, -1) * 2)
    compiled = torch.compile(Asking(), backend="eager")
    torch.testing.assert_close(compiled(x), torch.softmax(x, -1) * 3)


def test_a_module_learns_no_sizes_from_another() -> None:
    """Sizes that differ between two modules are numbers in both: with symbols a capture takes twice as long."""
    for rows in (3, 5, 7):
        fused = ct.fuse(nn.Sequential(nn.Linear(rows, 4), nn.Softmax(-1)), only_gains=False)
        fused(torch.randn(2 * rows, rows))
        (partition,) = fused.__dict__["_cupyfuse"].partitions
        assert not any(type(n) is torch.SymInt for t in partition.captured.tensors for n in t.shape)


PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "whole numbers": (lambda x: (x * 2 + 1) * 3, lambda x: (x * 2.0 + 1.0) * 3.0, torch.arange(6).view(2, 3)),
    "signs of zero": (lambda x: (x + 1) / 0.0, lambda x: (x + 1) / -0.0, torch.ones(2, 3)),
    "numbers and masks": (
        lambda x: torch.where(x > 0, 1.0, 0.0).sum(-1),
        lambda x: torch.where(x > 0, True, False).sum(-1),
        torch.randn(2, 3),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("swapped", [False, True])
def test_constants_that_python_holds_equal(name: str, swapped: bool) -> None:
    """Modules of equal form share plans; those whose constants differ in type or sign are of other forms."""
    first, second, x = PAIRS[name]
    for function in (second, first) if swapped else (first, second):
        wanted, got = function(x), ct.fuse(Code(lambda m, y, f=function: f(y)))(x)
        assert got.dtype is wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)


def _added_to(x: Any) -> Any:
    d = F.dropout(x, 0.5, False)
    d += 1
    return d * 2


def _scaled(x: Any) -> Any:
    z = torch.relu(x * 2)
    d = F.dropout(z, 0.0, True)
    d.mul_(3)
    return z * 1, d + 0


@pytest.mark.parametrize("function", [_added_to, _scaled])
@pytest.mark.parametrize("only_gains", [False, True])
def test_dropout_that_drops_nothing_returns_its_argument(function: Any, only_gains: bool) -> None:
    given = torch.randn(3, 5)
    results = []
    for module in (Code(lambda m, y: function(y)), ct.fuse(Code(lambda m, y: function(y)), only_gains=only_gains)):
        x = given.clone()
        results.append((x, module(x)))
    torch.testing.assert_close(*results)


def test_shapes_that_are_passed_whole() -> None:
    module = Code(lambda m, y: F.layer_norm((y * 2).reshape(y.shape), y.shape[-1:]).exp())
    fused = ct.fuse(module)
    for x in (torch.randn(5, 7), torch.randn(5, 3), torch.randn(4, 6)):
        torch.testing.assert_close(fused(x), module(x), rtol=1e-4, atol=1e-5)


def test_drop_in_modules_under_autocast() -> None:
    layer, x = ct.LinearGELU(4, 5), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is ct.linear_gelu(x, layer.weight, layer.bias).dtype is torch.bfloat16
    assert layer(x).dtype is torch.float32


def test_distributions_validate_their_arguments_outside_of_captured_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Policy(nn.Module):
        def __init__(self, validate: bool | None):
            super().__init__()
            self.linear = nn.Linear(12, 7)
            self.validate = validate

        def forward(self, x: Any, action: Any) -> Any:
            return Categorical(logits=self.linear(x), validate_args=self.validate).log_prob(action)

    Categorical = torch.distributions.Categorical
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    patch = torch._dynamo.eval_frame.TorchPatcher.patch
    patch.cache_clear()  # as before Dynamo's first use
    policy, outside = Policy(None), torch.tensor([0, 6, 7])
    fused, x = ct.fuse(policy), torch.randn(3, 12)
    for action in (torch.tensor([0, 6, 1]), torch.tensor([5, 5, 5])):
        torch.testing.assert_close(fused(x, action), policy(x, action))
        with pytest.raises(ValueError, match="Expected value argument"):
            policy(x, outside)
    assert fused(x, outside)[2].isnan()
    (chain,) = ct.explain(fused).fused
    assert len(chain.plans) == 1
    with pytest.raises(ValueError, match="Expected value argument"):
        ct.fuse(Policy(True))(x, outside)
    torch.compile(policy, backend="eager", fullgraph=True)(x, outside % 7)  # PyTorch's own ends it for the process
    assert not torch.distributions.Distribution._validate_args
    patch.cache_clear()
