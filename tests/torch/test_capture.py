"""What Dynamo's graphs hold beside plain operations: effects, aliases, transforms, draws."""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch_support import fused_chains
from torch_ways import WAYS, Code, graded, operators, plain, same, step, ways

import cupyfuse.torch as ct
from cupyfuse.torch.cost import decision
from cupyfuse.torch.explain import VIEW
from cupyfuse.torch.graphs.importer import WITHIN_TRANSFORM
from cupyfuse.torch.graphs.partition import Verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# Python around tensors ----------------------------------------------------------------------------------------------


def _written(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) * 2 + 1


_scripted = torch.jit.script(_written)


class Registry(OrderedDict[str, Any]):
    """As that of activations in transformers: entries are classes, what is looked up is an instance."""

    def __getitem__(self, key: str) -> Any:
        made, keywords = super().__getitem__(key)
        return made(**keywords)


REGISTRY = Registry({"gelu": (nn.GELU, {}), "leaky": (nn.LeakyReLU, {"negative_slope": 0.2})})


@functools.lru_cache
def _positions(length: int) -> Any:
    return torch.linspace(0, 1, length)


def _raising(m: Any, x: Any) -> Any:
    y = m.linear(x).softmax(-1)
    try:
        y = y.exp()
        raise ValueError("no")
    except Exception as error:
        return y * len(str(error))


def _batch(m: Any, x: Any) -> Any:
    batch = {"x": x}
    batch["x"] = torch.relu(m.linear(batch["x"]))
    return batch["x"].softmax(-1), batch


def _seeded(m: Any, x: Any) -> Any:
    torch.manual_seed(5)
    return (m.linear(x) + torch.randn(12)).softmax(-1).exp()


def _generator(m: Any, x: Any) -> Any:
    own = torch.Generator().manual_seed(5)
    return (m.linear(x) + torch.randn(12, generator=own)).softmax(-1).exp()


def _iterator(m: Any, x: Any) -> Any:
    numbers, y = iter([1.0, 2.0, 3.0]), m.linear(x)
    for k in numbers:
        y = (y * k).softmax(-1)
        next(numbers, None)
    return y


PYTHON: dict[str, Any] = {
    "a scripted function": lambda m, x: _scripted(m.linear(x)).softmax(-1),
    "a registry": lambda m, x: REGISTRY["gelu"](REGISTRY["leaky"](m.linear(x))).softmax(-1),
    "lru_cache": lambda m, x: (m.linear(x) + _positions(12)).softmax(-1).exp(),
    "except": _raising,
    "a dictionary": _batch,
    "manual_seed": _seeded,
    "a generator": _generator,
    "an iterator": _iterator,
    "settings": lambda m, x: (m.linear(x) * m.settings.inner.by["scale"][1]).softmax(-1),
}


@pytest.mark.rotates
@ways
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PYTHON)
def test_python_around_tensors(name: str, way: str) -> None:
    settings = types.SimpleNamespace(inner=types.SimpleNamespace(by={"scale": [1.0, 2.0]}))
    same(Code(PYTHON[name], settings=settings), graded, way)
    assert OrderedDict.__getitem__(REGISTRY, "gelu") == (nn.GELU, {})
    assert type(_positions(12)) is torch.Tensor


def test_an_argument_that_is_a_dictionary_is_changed() -> None:
    def code(m: Any, batch: Any) -> Any:
        batch["x"] = torch.relu(m.linear(batch["x"])).softmax(-1)
        return batch["x"] * 2

    given = {"x": torch.randn(5, 12)}
    want = dict(given)
    module = Code(code)
    torch.testing.assert_close(ct.fuse(module)(given), module(want))
    torch.testing.assert_close(given, want)


def captures(module: Any) -> int:
    return len(module._cupyfuse.partitions)


def test_how_often_modules_are_captured() -> None:
    """Once for the first size or number, once more for all others."""
    fused = ct.fuse(Code(lambda m, x, scale=1.0: (m.linear(x) * scale).softmax(-1)))
    for rows in (5, 6, 7, 9, 30, 2):
        fused(torch.randn(rows, 12))
    assert captures(fused) == 2
    fused = ct.fuse(Code(lambda m, x, scale: (m.linear(x) * scale).softmax(-1)))
    for scale in (1.5, 2.5, 3.5, 4.5):
        x = torch.randn(5, 12)
        torch.testing.assert_close(fused(x, scale), (fused.linear(x) * scale).softmax(-1))
    assert captures(fused) == 2
    fused = ct.fuse(Code(lambda m, x: (m.linear(x) * m.scale).softmax(-1), scale=1.0))
    for scale in (1.5, 2.5, 3.5, 4.5):
        fused.scale = scale
        torch.testing.assert_close(fused(x), (fused.linear(x) * scale).softmax(-1))
    assert captures(fused) == 2


@pytest.mark.parametrize(("way", "create_graph"), [("fuse", False), ("fuse", True), ("operators", False)])
def test_a_gradient_within_a_forward(way: str, create_graph: bool) -> None:
    """The graph breaks at the gradient; Dynamo would capture the Python code of the backward pass.

    Compiled graphs are differentiated once.
    """

    def code(m: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.gelu(m.linear(x)).logsumexp(-1).sum(), x, create_graph=create_graph)
        return grad.square().sum(-1)

    module, x = Code(code), torch.randn(5, 12)
    changed = WAYS[way](module)
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    torch.testing.assert_close(changed(x), module(x))
    # PyTorch 2.11 captures some code of its own around the backward pass.
    assert frames["total"] - before < (10 if torch.__version__ >= (2, 13) else 60)


def test_a_captured_call_records_nothing_for_profilers() -> None:
    """Dynamo's two calls around each graph, before PyTorch 2.15, take 6 us, a third of what it takes at all."""
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1)), torch.rand(3, 4)

    def called(run: Any) -> list[str]:
        names: list[str] = []
        run(x)
        sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
        try:
            run(x)
        finally:
            sys.setprofile(None)
        return [name for name in names if name.startswith("record_")]

    assert torch.__version__ >= (2, 15) or called(torch.compile(module, backend="eager"))
    assert not called(ct.fuse(module))


@pytest.mark.parametrize("first", [False, True])
def test_hooks_of_all_modules_run(first: bool) -> None:
    """Whether they are registered before the first call or after it."""
    module, x = ct.fuse(nn.Sequential(nn.Linear(8, 16), nn.Softmax(dim=1)), only_gains=False), torch.randn(4, 8)
    seen: list[str] = []

    def register() -> Any:
        return nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))

    if not first:
        module(x)
    hook = register()
    result = module(x)
    assert [name for name in seen if name in ("Linear", "Softmax")] == ["Linear", "Softmax"]
    hook.remove()
    seen.clear()
    torch.testing.assert_close(module(x), result)
    assert not seen and any(part.plans for part in ct.explain(module).fused)


def test_explanations_of_what_dynamo_does_not_capture() -> None:
    for module, where in ((nn.GRU(12, 12), "its own code"), (Code(lambda m, x: m.inner(x), inner=nn.LSTM(12, 12)), "")):
        fused, x = ct.fuse(module), torch.randn(3, 5, 12)
        torch.testing.assert_close(fused(x), module(x))
        if torch.__version__ < (2, 15):
            told = str(ct.explain(fused))
            assert where in told and "not captured: Dynamo does not support RNN" in told


def test_a_mask_that_may_be_missing() -> None:
    module = Code(lambda m, x, mask=None: (m.linear(x) if mask is None else m.linear(x) + mask).softmax(-1))
    fused, x, mask = ct.fuse(module), torch.randn(5, 12), torch.randn(12)
    for arguments in ((x,), (x, mask), (x, None), (x, 2 * mask)):
        torch.testing.assert_close(fused(*arguments), module(*arguments))


# Layouts and writes -------------------------------------------------------------------------------------------------


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


# Transforms, draws --------------------------------------------------------------------------------------------------


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
