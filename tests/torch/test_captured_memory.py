"""Layouts, aliases and writes in Dynamo's graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_support import fused_chains
from torch_ways import WAYS, Code, graded, operators, plain, same, step, ways

import cupyfuse.torch as ct
from cupyfuse.torch.cost import decision
from cupyfuse.torch.explain import VIEW
from cupyfuse.torch.graphs.partition import Verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _zeroed(m: Any, x: Any) -> Any:
    h = x * 1
    h[0].zero_()
    h += 1
    return h.exp().sum(-1), h


def _two_views(m: Any, x: Any) -> Any:
    h = F.silu(m.linear(x))
    a, b = h[:, :6], h[:, 6:]
    y = (a * 2).softmax(-1)
    h.mul_(2)
    return y + b.exp(), h


def _view_of_a_result(m: Any, x: Any) -> Any:
    y = F.silu(m.linear(x))
    v = y.view(-1)
    v.mul_(2)
    return (y + 1).softmax(-1), v


def _mixed(m: Any, x: Any) -> Any:
    y = F.gelu(m.linear(x)) * 1
    y *= x.double()
    y -= 1
    return y.softmax(1)


def _whole(m: Any, x: Any) -> Any:
    y = (m.linear(x) > 0).to(torch.int32)
    y += 1
    y *= 3
    return y, (y * m.linear(x)).softmax(-1)


def _set(m: Any, x: Any) -> Any:
    y = m.linear(x).softmax(-1) * 1
    y[:, 0] = x[:, 1].exp() * 2
    y[y > 0.5] = 0
    return y.exp().sum(-1)


def _written_after(m: Any, x: Any) -> Any:
    h = m.linear(x)
    y = h.softmax(-1).exp()
    h.add_(1)
    return y, h


def _copied(m: Any, x: Any) -> Any:
    y = torch.zeros_like(x)
    y.copy_(m.linear(x).exp() * 2)
    y[1:].add_(y[:-1].clone())
    return y.softmax(-1).exp()


def _by_weights(m: Any, x: Any) -> Any:
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
        m.linear.bias[0] = 0.5
    return m.linear(x).softmax(-1).exp()


def _buffer(m: Any, x: Any) -> Any:
    y = m.linear(x).softmax(-1)
    m.memory.mul_(0.9).add_(y.detach() * 0.1)
    m.memory[0] = 1
    return (y * m.memory).softmax(-1).exp(), m.memory * 2


def _by_method(m: Any, x: Any) -> Any:
    y, n = m.linear(x) * 1, (x > 0).long() + 1
    y.__iadd__(1)
    y.__setitem__(0, 0.0)
    n <<= 2
    return (n * y).softmax(-1), n


def _normed(m: Any, x: Any) -> Any:
    out = x.new_zeros(5)
    before = (out + 1).exp()
    torch.norm(x * 2, 2, 1, False, out)
    return (before * 2).softmax(0), (out + 1).exp()


def _by_leading_rows(m: Any, x: Any) -> Any:
    """No chain takes a mask along a leading dimension, and the product before it is saved for the backward pass."""
    y = m.linear(x).softmax(-1).view(5, 3, 4).permute(2, 0, 1) * 2
    return y.masked_fill_(x[:, :1] > 0, 0.5)


WRITES: dict[str, tuple[Any, Any]] = {
    "by method": (_by_method, graded),
    "transposed": (lambda m, x: m.linear(x).softmax(-1).t().contiguous(), graded),
    "views": (lambda m, x: (m.linear(x).softmax(-1).t(), m.linear(x).exp().t() * 2), graded),
    "transposed in place": (lambda m, x: (m.linear(x).t() * 2).masked_fill_(x.t() > 0, 0.5), graded),
    "transposed in place by PyTorch": (_by_leading_rows, graded),
    "expanded": (lambda m, x: m.linear(x).softmax(-1).sum(-1, keepdim=True).exp().expand(5, 3), graded),
    "overlapping": (lambda m, x: m.linear(x).softmax(-1).exp().unfold(1, 3, 1), plain),
    "a row": (_zeroed, graded),
    "the base of views": (_two_views, graded),
    "a view of a result": (_view_of_a_result, graded),
    "another dtype": (_mixed, graded),
    "whole numbers": (_whole, graded),
    "by position": (lambda m, x: F.relu(m.linear(x), True).softmax(-1), graded),
    "the argument by position": (lambda m, x: F.leaky_relu(x, 0.1, True).softmax(-1).exp() + x, plain),
    "out by position": (_normed, plain),
    "setitem": (_set, graded),
    "after a chain": (_written_after, graded),
    "copy_": (_copied, graded),
    "weights": (_by_weights, graded),
    "a buffer": (_buffer, graded),
    "of an argument": (lambda m, x: ((x * 2).exp(), x[0].mul_(3), x.t().add_(1), x.softmax(-1).exp())[::3], plain),
}


# Without chains, too, AOTAutograd has gradients of overlapping results and strides of operations in place wrong.
WRONG_IN_AOT = ("overlapping", "transposed in place by PyTorch")
WRITTEN = [(name, way) for name in WRITES for way in WAYS if way != "aot" or name not in WRONG_IN_AOT]


@pytest.mark.rotates
@pytest.mark.parametrize(("name", "way"), WRITTEN)
def test_writes_and_layouts(name: str, way: str) -> None:
    same(Code(WRITES[name][0]), WRITES[name][1], way)


def test_what_is_computed_in_place_is_no_view() -> None:
    fused = ct.fuse(nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU(inplace=True)))
    fused(torch.randn(2, 3, 4))
    assert all(part.reason != VIEW for part in ct.explain(fused).left)


def test_what_is_computed_in_place_is_the_result_of_the_chain() -> None:
    graphs: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return operators(module, inputs)

    module = Code(lambda m, x: F.relu(m.linear(x).softmax(-1), inplace=True))
    torch.compile(module, backend=keep)(torch.randn(5, 12))
    assert F.relu not in [node.target for node in graphs[0].graph.nodes]


def test_statistics_that_pytorch_updates() -> None:
    """Its kernels count no version of running statistics: nothing may be prepared from them."""
    module, x = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Softmax(-1)), torch.randn(5, 12)
    fused = ct.fuse(module)
    for k in range(3):
        module.train()(3 * torch.randn(50, 12) + k)
        torch.testing.assert_close(fused.eval()(x), module.eval()(x))


@ways
@pytest.mark.parametrize("norm", ["instance_norm", "torch.batch_norm"])
def test_statistics_that_are_updated_and_read(norm: str, way: str) -> None:
    def code(m: Any, x: Any) -> Any:
        y = (x - m.mean.exp()).exp()
        h = m.linear(x)
        if norm == "instance_norm":
            z = F.instance_norm(h.view(1, 12, 5), m.mean, m.var, use_input_stats=True).view(5, 12)
        else:
            z = torch.batch_norm(h, None, None, m.mean, m.var, True, 0.1, 1e-5, False)
        return (y * z).softmax(-1), (m.mean * 2).exp() + m.var

    module = Code(code)
    module.register_buffer("mean", torch.zeros(12))
    module.register_buffer("var", torch.ones(12))
    same(module, graded, way)


def _aligned(m: Any, x: Any) -> Any:
    h = m.linear(x)
    return F.relu(m.norm(h)).softmax(-1), (h.mean(0) - m.norm.running_mean).square().sum()


def _by_old_statistics(m: Any, x: Any) -> Any:
    h = m.linear(x)
    by_old = (h - m.norm.running_mean) / (m.norm.running_var + 1e-5).sqrt()
    return (m.norm(h) + by_old).softmax(-1)


def _by_old_deviation(m: Any, x: Any) -> Any:
    h = m.linear(x) * m.norm.running_var.sqrt().detach()
    return m.norm(h).exp().sum(-1), m.norm.running_mean * 2


def _by_views(m: Any, x: Any) -> Any:
    h = m.linear(x)
    mean, var = m.norm.running_mean, m.norm.running_var
    parts = (
        h[:, :6] - mean[:6],
        (h - mean[None]) / var.view(1, -1).sqrt(),
        h - var.chunk(2)[0].expand(5, 6).repeat(1, 2),
    )
    return [part.square().mean() for part in parts], m.norm(h).softmax(-1)


# PyTorch's own AOTAutograd reads the new ones in the last two, with `backend="aot_eager"`, too.
OLD_STATISTICS = [(code, way) for code in (_aligned, _by_old_deviation) for way in WAYS]
OLD_STATISTICS += [(code, way) for code in (_by_old_statistics, _by_views) for way in WAYS if way != "aot"]


@pytest.mark.parametrize(("code", "way"), OLD_STATISTICS)
def test_gradients_of_what_reads_statistics_before_they_are_updated(code: Any, way: str) -> None:
    """As losses that align features with a batch norm's running statistics: the backward pass needs the old ones."""
    module = Code(code, norm=nn.BatchNorm1d(12))
    module.norm.running_mean.normal_()
    same(module, graded, way)


@pytest.mark.parametrize("view", [lambda r: r, lambda r: r[:6].repeat(2)[None], lambda r: r.expand(5, 12), torch.clone])
def test_arguments_that_are_views_of_statistics(view: Any) -> None:
    """Seen in each call anew: the second one's argument is of its own memory, or of the statistics."""

    def code(m: Any, x: Any, statistics: Any) -> Any:
        h = m.linear(x)
        return (h - statistics).square().mean() + m.norm(h).tanh().sum()

    module = Code(code, norm=nn.BatchNorm1d(12)).double()
    fused = ct.fuse(copy.deepcopy(module))
    for k in range(4):
        found = []
        for m in (fused, module):
            statistics = view(m.norm.running_mean)
            m.zero_grad()
            m(torch.linspace(k, 2, 60).double().view(5, 12), statistics.clone() if k % 2 else statistics).backward()
            found.append([p.grad.clone() for p in m.parameters()])
        torch.testing.assert_close(found[0], found[1])


def test_second_derivatives_read_statistics_as_they_were_before_an_update() -> None:
    module = Code(_by_old_statistics, norm=nn.BatchNorm1d(12)).double()
    found = []
    for called in (copy.deepcopy(module), ct.fuse(copy.deepcopy(module))):
        x = torch.linspace(-1, 2, 60, dtype=torch.float64).view(5, 12).requires_grad_()
        (first,) = torch.autograd.grad(called(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(found[1], found[0])


@ways
@pytest.mark.parametrize("reads", [True, False])
def test_statistics_that_the_chain_computes_itself(reads: bool, way: str) -> None:
    def code(m: Any, x: Any) -> Any:
        mean, var = m.memory[0] * 0, m.memory[1] + 0
        y = F.batch_norm(m.linear(x), mean, var, training=True).relu()
        return (y, mean.exp()) if reads else y

    same(Code(code), graded, way)


@ways
def test_out(way: str) -> None:
    def code(m: Any, x: Any, given: Any) -> Any:
        y = m.linear(x).softmax(-1).exp().detach()
        torch.add(y, 1, out=given)
        return (given * y).softmax(-1)

    same(Code(code), lambda: (torch.randn(5, 12), torch.randn(5, 12)), way)


def test_a_chain_whose_operands_change_before_its_backward_pass_is_left() -> None:
    """A buffer that the backward pass reads is changed after the chain."""

    def code(m: Any, x: Any) -> Any:
        y = (m.linear(x) * m.scale.exp()).softmax(-1) * (m.scale * 2)
        m.scale.add_(1)
        return y

    module = Code(code)
    module.register_buffer("scale", torch.zeros(12))
    fused = ct.fuse(module, only_gains=False)
    fused(torch.randn(5, 12, requires_grad=True))
    explained = ct.explain(fused)
    assert not explained.fused
    reasons = {name: part.reason for part in explained.left for name in part.operations}
    assert reasons["linear"] == reasons["mul"] == "what its backward pass reads is changed in place later"


@ways
def test_a_chain_reads_what_is_drawn_after_its_first_operation(way: str) -> None:
    """The sample of a distribution is drawn in place: before the chain, whose deviation is computed before it."""

    def code(m: Any, x: Any) -> Any:
        mean, deviation = m.linear(x), (m.linear(x) * 0.1).exp()
        return torch.distributions.Normal(mean, deviation).rsample().tanh().log_softmax(-1)

    same(Code(code), plain, way)


def test_one_chain_around_what_is_drawn_in_place() -> None:
    fused = ct.fuse(Code(lambda m, x: m.linear(x).tanh() * torch.empty(5, 12).normal_() + 1), only_gains=False)
    fused(torch.randn(5, 12, requires_grad=True))
    assert fused_chains(fused) == [("linear", "tanh", "mul", "add")]


# AOTAutograd does not look for inputs that overlap once it has compiled for others.
SHARED = [(share, way) for share in ("nothing", "all", "a part") for way in WAYS if share == "nothing" or way != "aot"]


@pytest.mark.parametrize(("share", "way"), SHARED)
def test_inputs_that_share_memory(share: str, way: str) -> None:
    def code(m: Any, x: Any, y: Any) -> Any:
        z = y.exp() + 1
        x.mul_(2)
        return z, y.exp().softmax(-1) * z

    def arguments() -> tuple[Any, Any]:
        base = torch.randn(9, 12)
        whole, part = base[:5], base[3:8]
        return {"nothing": (whole, whole.clone()), "all": (whole, whole.view(5, 12)), "a part": (whole, part)}[share]

    module = Code(code)
    fused = WAYS[way](copy.deepcopy(module))
    fused(torch.randn(5, 12), torch.randn(5, 12))  # captured for tensors that share nothing
    torch.testing.assert_close(step(fused, arguments), step(module, arguments))


def test_arguments_that_are_a_view_of_a_buffer() -> None:
    def code(m: Any, x: Any) -> Any:
        y = m.linear(m.memory).exp()
        x.add_(1)
        return (y * m.memory).softmax(-1)

    module = Code(code)
    fused = ct.fuse(copy.deepcopy(module))
    for own in (False, True, False):
        torch.testing.assert_close(*(m(m.memory[:] if own else torch.ones(5, 12)) for m in (fused, module)))


@torch.library.custom_op("cupyfuse_tests::bump", mutates_args=("x",))
def _bump(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return y * 2


@_bump.register_fake
def _(x: Any, y: Any) -> Any:
    return torch.empty_like(y)


@ways
def test_operators_that_say_what_they_write(way: str) -> None:
    def code(m: Any, x: Any) -> Any:
        h = x.softmax(-1)
        y = h.exp() + 1
        return _bump(h, y) + (h * 2).softmax(-1) * y

    same(Code(code), plain, way)


def test_what_no_chain_takes_is_changed_in_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "judge_for", lambda *a, **k: lambda *b: Verdict(False, "left"))
    graphs: list[Any] = []

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return operators(module, inputs)

    torch.compile(lambda x: F.relu(x * 2, inplace=True).add_(1).exp(), backend=keep)(torch.ones(3))
    nodes = [n for n in graphs[0].graph.nodes if n.op.startswith("call")]
    assert [n.kwargs.get("inplace") for n in nodes if n.target is F.relu] == [True]
    assert "add_" in [n.target for n in nodes]


@ways
def test_operands_of_changes_in_place_are_what_a_chain_returns(way: str, recwarn: pytest.WarningsRecorder) -> None:
    def code(m: Any, x: Any) -> Any:
        heads = m.memory.view(5, 2, 2, 3)
        scores = heads @ heads.transpose(2, 3) * 0.5  # left to PyTorch, as is what adds a mask for all heads
        scores += (1 - x) * -100  # the mask is a chain
        return scores @ heads

    same(Code(code), lambda: (torch.randn(5, 1, 1, 2),), way)
    assert not [w for w in recwarn if "cupyfuse" in str(w.message)]


def _scaled_without_gradients(m: Any, x: Any) -> Any:
    h = F.normalize(m.linear(x), dim=-1)
    with torch.no_grad():
        h.mul_(0.5)
    return h


def _scaled_in_inference_mode(m: Any, x: Any) -> Any:
    h = F.normalize(m.linear(x), dim=-1)
    with torch.inference_mode():
        h.mul_(0.5)
    return h.tanh() * 2, h


def _scaled_where_all_has_none(m: Any, x: Any) -> Any:
    with torch.no_grad():
        h = m.linear(x).softmax(-1)
        h.mul_(0.5)
        h = h.exp()
    return m.linear(x).softmax(-1) * h


@pytest.mark.parametrize("way", ["fuse", "operators"])  # PyTorch's tracing for compilers refuses inference mode
@pytest.mark.parametrize("code", [_scaled_without_gradients, _scaled_in_inference_mode, _scaled_where_all_has_none])
def test_what_is_changed_without_gradients_keeps_its_own(code: Any, way: str) -> None:
    fused = same(Code(code), graded, way)
    results = fused(*graded())
    assert all(not t.is_inference() for t in torch.utils._pytree.tree_leaves(results))
    if way == "fuse" and code is _scaled_where_all_has_none:
        assert [c for c in fused_chains(fused) if {"softmax", "mul", "exp"} <= set(c)]


def _transposed_in_place(m: Any, x: Any) -> Any:
    h = -m.linear(x)
    y = h.transpose_(0, 1)
    return h.exp() * 2, y, m.linear(x).unsqueeze_(0).softmax(-1).exp()


@ways
def test_shapes_are_changed_in_place(way: str) -> None:
    """Also as a result, and where the lengths are equal, so that only strides differ."""
    fused = same(Code(_transposed_in_place), lambda: (torch.randn(6, 6, 12, requires_grad=True),), way)
    if way == "fuse":
        assert any({"softmax", "exp"} <= set(c) for c in fused_chains(fused))


def test_autocast_leaves_the_dtype_of_what_is_changed() -> None:
    """Out of place it would choose that of `addmm`. A number that changes keeps `addmm_` out of chains."""

    def code(m: Any, x: Any, scale: float) -> Any:
        h = F.normalize(x * m.memory, dim=-1)
        h.addmm_(x, m.linear.weight, beta=scale)
        return h

    fused = ct.fuse(module := Code(code), only_gains=False)
    for scale in (0.5, 0.7, 0.9):
        x = torch.randn(5, 12)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(fused(x, scale), module(x, scale))
