"""What `cupyfuse.torch.fuse` returns is the same module: parameters, hooks, names, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch_models as models
from torch import nn
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct


def test_parameters_are_shared() -> None:
    plain = models.HeadSoftmax()
    fused = ct.fuse(plain)
    assert isinstance(fused, models.HeadSoftmax) and type(fused).__name__ == "HeadSoftmax"
    assert list(fused.state_dict()) == list(plain.state_dict())
    for (a, p), (b, q) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert a == b and p is q
    plain.scale = nn.Parameter(torch.full((1,), 3.0))
    assert fused.scale is plain.scale


def test_the_original_is_not_changed() -> None:
    plain = models.HeadSoftmax()
    fused = ct.fuse(plain)
    assert type(plain) is models.HeadSoftmax and "_cupyfuse" not in plain.__dict__
    fused.eval()
    assert plain.training


def test_modules_that_are_not_copied_are_not_changed() -> None:
    """A lazy module is shared, and keeps its references to the original's modules."""
    module = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))
    module[1].__dict__["others"] = [module[0]]
    fused = ct.fuse(module)
    assert fused[1] is module[1] and module[1].others[0] is module[0] and fused[0] is not module[0]


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deep", "pickle", "shallow"]
)
def test_copies(way: Any, device: str) -> None:
    plain, fused, x = pair(models.HeadSoftmax(), device)
    plain.eval(), fused.eval()
    fused(x)
    other = way(fused)
    close(other(x), plain(x))
    with torch.no_grad():
        other.gemm = nn.Linear(12, 7).to(device)
        close(other(x), models.HeadSoftmax.forward(other, x))
    if way is not copy.copy:  # which shares the dictionary of submodules
        close(fused(x), plain(x))


class _WithState(nn.Module):
    """Pickled and copied in a way of its own: its function cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.function, self.own = nn.Linear(12, 7), lambda y: y.softmax(-1), self.tail

    def tail(self, y: Any) -> Any:
        return self.function(y)

    def forward(self, x: Any) -> Any:
        return self.own(self.linear(x))

    def __getstate__(self) -> Any:
        state = super().__getstate__()  # type: ignore[misc]
        del state["function"]
        return state

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = {**state, "function": torch.nn.Softmax(-1), "restored": True}


class _Reduced(_WithState):
    def __reduce__(self) -> Any:
        return _Reduced, (), {**self.__dict__, "function": None}


class _Copied(_WithState):
    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> Any:
        other = _Copied()
        other.load_state_dict(self.state_dict())
        other.restored = True
        return other


class _CopiedByDictionary(_WithState):
    def __deepcopy__(self, memo: Any) -> Any:
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy({**self.__dict__, "restored": True}, memo)
        return other


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deep", "pickle", "shallow"]
)
@pytest.mark.parametrize("kind", [_WithState, _Reduced, _Copied, _CopiedByDictionary])
def test_copies_in_ways_of_their_own(kind: type[nn.Module], way: Any) -> None:
    fused, x = ct.fuse(kind()), torch.randn(5, 12)
    want = fused(x)
    other = way(fused)
    assert type(other) is type(fused) and other.restored
    close(other(x), want)
    assert len(fused_chains(other)) == 1
    if way is not copy.copy:
        assert other.own.__self__ is other
        torch.nn.init.zeros_(other.linear.weight)
        torch.nn.init.zeros_(other.linear.bias)
        close(other(x), torch.full((5, 7), 1 / 7))


class MadeAgain(nn.Linear):
    """A copy is another instance of whatever class this one has, moved and filled."""

    def __deepcopy__(self, memo: Any) -> Any:
        other = type(self)(self.in_features, self.out_features).to(self.weight.device)
        other.load_state_dict(self.state_dict())
        return other


class Shared(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        return self


class WithoutCopy(nn.Linear):
    __deepcopy__ = None  # type: ignore[assignment]


def test_deep_copies_by_the_class() -> None:
    x = torch.randn(3, 4)
    for cls, is_itself in ((MadeAgain, False), (Shared, True), (WithoutCopy, False)):
        fused = ct.fuse(cls(4, 4))
        want, captured = fused(x), fused._cupyfuse
        other = copy.deepcopy(fused)
        assert (other is fused) == is_itself and (other._cupyfuse is captured) == is_itself
        torch.testing.assert_close(other(x), want)


def test_copies_of_traced_modules() -> None:
    """Each has a class of its own, which makes another class for a copy."""
    module, x = nn.Sequential(nn.Linear(12, 7), nn.Softmax(-1)), torch.randn(3, 12)
    fused = ct.fuse(torch.fx.symbolic_trace(module))
    fused.meta["itself"] = fused
    for way in (copy.deepcopy, copy.copy, lambda m: copy.deepcopy(copy.deepcopy(m))):
        other = way(fused)
        close(other(x), module(x))
        assert len(fused_chains(other)) == 1
        if way is not copy.copy:
            assert other.meta["itself"] is other
            torch.nn.init.zeros_(other.get_parameter("0.weight"))
            torch.nn.init.zeros_(other.get_parameter("0.bias"))
            close(other(x), torch.full((3, 7), 1 / 7))
    other = pickle.loads(pickle.dumps(ct.fuse(torch.fx.symbolic_trace(module))))
    close(other(x), module(x))
    assert len(fused_chains(other)) == 1


def test_traced_modules_get_new_code() -> None:
    module, x = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Softmax(-1)), torch.randn(3, 12)
    traced = torch.fx.symbolic_trace(module)
    fused = ct.fuse(traced)
    for function in (torch.sin, torch.exp):
        close(fused(x), traced(x))
        (node,) = (n for n in fused.graph.nodes if n.name in ("_1", "new"))
        with fused.graph.inserting_after(node):
            new = fused.graph.call_function(function, node.args[:1])
        node.replace_all_uses_with(new)
        fused.graph.erase_node(node)
        new.name = "new"
        fused.recompile()
        close(fused(x), function(module[0](x)).softmax(-1))
        assert fused_chains(fused) == [("linear", function.__name__, "softmax")]
        traced.recompile()


def test_instances_of_a_fused_class_that_were_not_fused() -> None:
    """Its own code may make them; they are modules like any other."""
    made = type(ct.fuse(MadeAgain(4, 4)))(4, 4).double().float()
    for other in (copy.copy(made), pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        torch.testing.assert_close(other(torch.ones(2, 4)), made(torch.ones(2, 4)))


def test_conversions(device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)
    fused(x)
    close(fused.double()(x.double()), plain.double()(x.double()), torch.float64)
    close(fused.half()(x.half()), plain.half()(x.half()), torch.float16)
    assert fused.linear.weight.dtype == torch.float16


def test_replicas_run_on_their_own_tensors(device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)
    fused(x)
    replica, inner = fused._replicate_for_data_parallel(), fused.linear._replicate_for_data_parallel()
    inner.weight, inner.bias = 2 * fused.linear.weight.detach(), fused.linear.bias.detach()
    replica._modules["linear"] = inner
    wanted = copy.deepcopy(plain)
    with torch.no_grad():
        wanted.linear.weight *= 2
    close(replica(x), wanted(x))
    close(fused(x), plain(x))


def test_hooks_run(device: str) -> None:
    plain, fused, x = pair(models.HeadSoftmax(), device)
    seen = []
    fused(x)
    handles = [
        fused.register_forward_hook(lambda m, a, out: seen.append("root")),
        fused.gemm.register_forward_hook(lambda m, a, out: seen.append("gemm") or out * 2),
    ]
    plain.gemm.register_forward_hook(lambda m, a, out: out * 2)
    plain(x)
    close(fused(x), plain(x))
    assert seen == ["gemm", "root"]
    assert fused_chains(fused)
    for handle in handles:
        handle.remove()
    fused(x)
    assert len(seen) == 2


def test_attributes_are_followed(device: str) -> None:
    plain, fused, x = pair(nn.Sequential(nn.Linear(12, 8), nn.LeakyReLU(0.1), nn.Softmax(1)), device)
    close(fused(x), plain(x))
    for module in (plain, fused):
        module[1].negative_slope = -0.5
    close(fused(x), plain(x))
    for module in (plain, fused):
        module[2] = nn.LogSoftmax(1)
    close(fused(x), plain(x))
    close(fused[:2](x), plain[:2](x))


def test_training_and_evaluation(device: str) -> None:
    plain, fused, x = pair(nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.5), nn.GELU(), nn.Softmax(1)), device)
    for training in (True, False, True):
        plain.train(training), fused.train(training)
        torch.manual_seed(1)
        wanted = plain(x)
        torch.manual_seed(1)
        close(fused(x), wanted)
    reasons = [part.reason for part in ct.explain(fused).left]
    assert any("random" in reason for reason in reasons)


def test_code_that_needs_values_runs_as_it_is(device: str) -> None:
    plain, fused, x = pair(models.Branching(), device)
    for sign in (1, -1):
        close(fused(sign * x.abs()), plain(sign * x.abs()))
    assert ("linear", "gelu", "logsumexp") in fused_chains(fused)


@pytest.mark.parametrize("model", [models.Counting, models.Listing])
def test_code_with_a_memory_runs_as_it_is(model: Any, device: str) -> None:
    plain, fused, x = pair(model(), device)
    for _ in range(3):
        close(fused(x), plain(x))
    assert fused.calls == plain.calls
    assert getattr(fused, "history", None) == getattr(plain, "history", None)
    assert set(fused_chains(fused)) == {("linear", "gelu", "sum")}


def test_nothing_is_told_before_the_first_call() -> None:
    assert "has run yet" in str(ct.explain(ct.fuse(models.HeadSum())))


def test_the_explanation_has_plans(device: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp(), device)
    fused(x)
    text = str(fused.explain())
    assert "linear -> logsumexp -> leaky_relu -> leaky_relu -> gelu -> gelu" in text and "launch" in text


@pytest.mark.parametrize(
    ("value", "words"), [(lambda x: x, "torch.nn.Module.*function"), (torch.jit.script(nn.ReLU()), "TorchScript")]
)
def test_what_cannot_be_fused(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        ct.fuse(value)


def test_a_wrong_precision() -> None:
    with pytest.raises(ValueError, match="precision"):
        ct.fuse(models.HeadSum(), precision="fast")


@pytest.mark.parametrize("name", ["keep_halves", "frozen", "only_gains", "graphs"])
def test_flags_are_bools(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected a bool, got str"):
        ct.fuse(models.HeadSum(), **{name: "no"})


def test_explanations_are_of_modules() -> None:
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got function"):
        ct.explain(lambda x: x)
