"""Memory that a module changes, or that its caller changes later: what writes, what shares it, what is saved of it."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode
from torch_ways import WAYS, Code, plain, same, ways

import cupyfuse.torch as ct
from cupyfuse.torch import codes
from cupyfuse.torch.functions import Step, build_chain
from cupyfuse.torch.rules.symbols import Ref

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# Writes that names do not show ----------------------------------------------------------------------------------------


def _foreach(m: Any, x: Any) -> Any:
    a, b = m.linear(x), m.linear(x + 1)
    torch._foreach_mul_([a, b], 3.0)
    return a.sigmoid(), b.softmax(-1)


def _foreach_by_name(m: Any, x: Any) -> Any:
    a, b = m.linear(x), m.linear(x + 1)
    torch._foreach_add_(self=[a, b], scalar=3.0)
    return a.sigmoid(), b.softmax(-1)


def _embedding(m: Any, x: Any) -> Any:
    before = m.table.square().sum(1)
    found = F.embedding(torch.tensor([0, 3, 3]), m.table, max_norm=0.5)
    return before.sqrt(), (found + x[:3]).logsumexp(-1)


def _embedding_bag(m: Any, x: Any) -> Any:
    before = m.table.square().sum(1)
    found = F.embedding_bag(torch.tensor([[0, 3], [3, 1]]), m.table, max_norm=0.5)
    return before.sqrt(), (found + x[:2]).logsumexp(-1)


def _observed(m: Any, x: Any) -> Any:
    before = x * m.low
    ranges = m.low, m.high, m.scale, m.zero
    y = torch.fused_moving_avg_obs_fake_quant(x, m.on, m.on, *ranges, 0.1, 0, 255, -1, False, False)
    return (before + y).tanh(), m.scale * 2


def _numpy(m: Any, x: Any) -> Any:
    h = m.linear(x).detach()
    a, n = h.tanh(), h.numpy()
    n.fill(0.5)
    n[1:] += 3
    return (h + a).softmax(-1)


def _keyword(m: Any, x: Any) -> Any:
    y = m.linear(x) * 1.5
    z = y * 2
    F.relu(inplace=True, input=y)
    torch.clamp_(max=0.4, input=y)
    return (z + y).tanh()


@torch.compiler.allow_in_graph
def _double(h: Any) -> Any:
    return h.mul_(2)


def _allowed(m: Any, x: Any) -> Any:
    h = m.linear(x)
    a = (h * 1.5).tanh()
    _double(h)
    return (h + a).softmax(-1)


def _overload(m: Any, x: Any) -> Any:
    before = m.low * 3 + 1
    y = torch.ops.aten.batch_norm.default(m.linear(x), None, None, m.mean, m.variance, True, 0.1, 1e-5, False)
    return y.softmax(-1) * before, m.mean * 2 + m.variance


def _dropped(m: Any, x: Any) -> Any:
    h = F.dropout(m.linear(x).tanh(), 0.1, training=False)
    h[:, :4].mul_(100)
    return h.softmax(-1)


def _dropped_in_parts(m: Any, x: Any) -> Any:
    q, k = F.dropout(m.linear(x)[1:], 0.1, training=False).chunk(2, 1)
    q.mul_(3)
    k[:, 0].copy_(q[:, 1])
    return (q * k).logsumexp(-1)


WRITES = {
    "foreach": _foreach,
    "foreach, by name": _foreach_by_name,
    "embedding": _embedding,
    "embedding_bag": _embedding_bag,
    "observed": _observed,
    "NumPy": _numpy,
    "keyword": _keyword,
    "allowed": _allowed,
    "overload": _overload,
    "dropped": _dropped,
    "dropped, in parts": _dropped_in_parts,
}


@pytest.mark.rotates
@ways
@pytest.mark.parametrize("name", WRITES)
def test_writes_that_names_do_not_show(name: str, way: str) -> None:
    one = torch.ones(1)
    module = Code(WRITES[name], table=nn.Parameter(torch.randn(7, 12)), low=-one, high=one.clone(), scale=one.clone())
    module.mean, module.variance = torch.zeros(12), torch.ones(12)
    module.zero, module.on = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64)
    with torch.no_grad():
        same(module, plain, way)


def test_a_diagonal_is_filled() -> None:
    """The result was a view to PyTorch's compiler, which refuses such a write to one."""

    def code(m: Any, x: Any) -> Any:
        z = F.normalize(m.linear(x), dim=1)
        similar = (z @ z.t()).exp()
        similar.fill_diagonal_(0)
        return similar.cumsum(0)

    with torch.no_grad():
        same(Code(code), plain, "aot")


# Memory that changes before the backward pass ------------------------------------------------------------------------


def both_backward(module: nn.Module, way: str, *inputs: torch.Tensor) -> None:
    """Gradients of two calls that are differentiated together are eager's."""
    found = []
    for called in (copy.deepcopy(module), WAYS[way](copy.deepcopy(module))):
        torch.manual_seed(1)
        sum(called(x).mean() for x in inputs).backward()
        found.append([p.grad for p in called.parameters()] + list(called.buffers()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@ways
def test_statistics_of_a_modules_own(way: str) -> None:
    """A second call changes them before the first one's backward pass, which eager lets happen."""

    def code(m: Any, x: Any) -> Any:
        y = m.linear(x)
        with torch.no_grad():
            m.memory.lerp_(y, 0.1)
        return (y / (m.memory + 1e-5).sqrt()).relu().logsumexp(-1)

    both_backward(Code(code), way, torch.rand(5, 12), torch.rand(5, 12))


@pytest.mark.parametrize("way", ["fuse", "operators"])
def test_spectral_norm_of_two_calls(way: str) -> None:
    """It copies its vectors, so that they may change before the backward pass."""
    layers = spectral_norm(nn.Linear(6, 8)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(8, 1))
    both_backward(nn.Sequential(*layers), way, torch.randn(5, 6), torch.randn(5, 6))


@ways
def test_a_queue_that_is_copied_and_then_extended(way: str) -> None:
    def code(m: Any, x: Any) -> Any:
        q = F.normalize(m.linear(x), dim=1)
        loss = (q @ m.memory.clone().detach().t() / 0.07).logsumexp(1)
        with torch.no_grad():
            m.memory[:2] = q[:2].detach()
        return loss

    both_backward(Code(code), way, torch.randn(5, 12), torch.randn(5, 12))


@pytest.mark.parametrize("way", ["fuse", "operators"])
def test_a_copied_argument_whose_memory_is_used_again(way: str) -> None:
    """As an environment does with its observations; PyTorch counts no change that NumPy makes."""

    def code(m: Any, x: Any) -> Any:
        return m.linear(x.clone()).log_softmax(-1)

    module, memory, gradients = Code(code), np.zeros((5, 12), np.float32), []
    for called in (copy.deepcopy(module), WAYS[way](copy.deepcopy(module))):
        losses = []
        for k in range(3):
            memory[:] = k + np.arange(12)
            losses.append(called(torch.from_numpy(memory))[:, 0].sum())
        sum(losses).backward()
        gradients.append(called.linear.weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)


# What changes in each call -------------------------------------------------------------------------------------------


def test_a_code_that_each_call_captures_anew_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "_MOST_IN_A_ROW", 4)

    def code(m: Any, x: Any) -> Any:
        z = m.linear(x)
        m.norms.append(z.detach().mean())
        return z.softmax(-1)

    module, x = Code(code, norms=[]), torch.randn(5, 12)
    fused: Any = ct.fuse(module)
    captured = []
    for _ in range(30):
        torch.testing.assert_close(fused(x), module.linear(x).softmax(-1))
        captured.append(len(fused._cupyfuse.partitions))
    assert captured[:4] == [1, 2, 3, 4] and len(set(captured[-10:])) == 1
    assert len(fused.norms) == 30
    assert "4 calls in a row captured it anew" in str(fused.explain().details())


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_that_drops_nothing_stops_no_gradient(training: bool) -> None:
    """It returns its argument in eager, which `no_grad` does not change."""

    def forward(m: Any, x: Any) -> Any:
        h = F.gelu(m.linear(x))
        with torch.no_grad():
            z = F.dropout(h, 0.0 if training else 0.3, training)
            frozen = F.dropout(h.exp(), 0.3, False)
        return F.silu(z * 2), z.sum(), h.softmax(-1), (frozen * 2).sum(-1)

    module, x = Code(forward), torch.randn(5, 12)
    fused: Any = ct.fuse(copy.deepcopy(module), only_gains=False)
    with pytest.warns(RuntimeWarning, match="dropout that drops nothing"):
        actual = fused(x)
    expected = module(x)
    assert [t.requires_grad for t in actual] == [t.requires_grad for t in expected] == [True, True, True, False]
    for result in (actual, expected):
        sum(t.square().sum() for t in result).backward()
    torch.testing.assert_close(fused.linear.weight.grad, module.linear.weight.grad)


def test_a_dropout_within_a_transform_leaves_the_chains() -> None:
    """Views of its result have no example that could be made; the whole graph ran in eager."""

    def code(m: Any, x: Any) -> Any:
        rows = torch.func.vmap(lambda r: F.dropout(r, 0.1, False)[1:].exp())(m.linear(x).relu())
        return rows.softmax(-1)

    module, x = Code(code), torch.randn(5, 12)
    fused: Any = ct.fuse(module)
    torch.testing.assert_close(fused(x), module(x))
    assert sum(len(p.chains) for p in fused._cupyfuse.partitions) == 2


# What outlives a module -----------------------------------------------------------------------------------------------


def _breaking(m: Any, x: Any) -> Any:
    y = m.linear(x).softmax(-1)
    return y.exp() if y.sum() > 0 else y


@pytest.mark.parametrize("code", [lambda m, x: m.linear(x).softmax(-1), _breaking], ids=["one graph", "a graph break"])
@pytest.mark.parametrize("change", [False, True], ids=["", "another method"])
def test_modules_that_are_no_more_leave_nothing(code: Any, change: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: Any = ct.fuse(Code(code))

    def use() -> list[weakref.ref[Any]]:
        fused: Any = ct.fuse(Code(code))
        for rows in (3, 4, 5):
            fused(torch.randn(rows, 12)).sum().backward()
        if change:
            monkeypatch.setattr(Code, "forward", lambda m, x: m.code(m, x) * 2)
        found = [fused, fused._cupyfuse, fused.linear, fused.linear.weight, fused(torch.randn(3, 12))]
        return list(map(weakref.ref, found))

    kept(torch.randn(3, 12))
    captured = len(kept._cupyfuse.partitions)
    gone = [use() for _ in range(3)]
    for _ in range(3):  # what finalizers release may be cycles
        gc.collect()
    assert [[ref() for ref in refs] for refs in gone] == [[None] * 5] * 3
    monkeypatch.undo()
    kept(torch.randn(3, 12))
    assert change or len(kept._cupyfuse.partitions) == captured  # others may share code with it


# Chains that run by PyTorch's operations ------------------------------------------------------------------------------


class _Alive(TorchFunctionMode):
    """Counts, before each operation, the earlier ones' results that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Any]] = []
        self.counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.append(sum(ref() is not None for ref in self.results))
        result = func(*args, **(kwargs or {}))
        self.results.append(weakref.ref(result))
        return result


def test_values_live_as_long_as_they_are_read() -> None:
    steps = (Step("exp"), Step("tanh"), Step("mul", (Ref(1),)), Step("sum"))
    chain = build_chain(steps, ("x", "y"))
    x, y = torch.rand(3, 4), torch.rand(4)
    with _Alive() as alive:
        (found,) = chain.eager((x, y))
    assert alive.counts == [0, 1, 1, 1]
    assert torch.equal(found, (x.exp().tanh() * y).sum())
