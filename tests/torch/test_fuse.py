"""`cupyfuse.torch.fuse`: the same module, faster; on the CPU through NumPy, on a GPU through the kernels."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch_models as models
from torch import nn
from torch.nn import functional as F
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct
from cupyfuse.torch.chains.runner import Runner

# The same results ---------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("head", models.HEADS)
def test_the_heads(head: type[nn.Module], training: bool, dtype: torch.dtype, device: str) -> None:
    plain, fused, x = pair(head(), device, dtype)
    plain.train(training)
    fused.train(training)
    for _ in range(3):
        close(fused(x), plain(x), dtype)
    assert len(fused_chains(fused)) == 1
    assert {part.operations for part in ct.explain(fused).left} <= {("add_",)}  # the counter of batches
    for a, b in zip(fused.buffers(), plain.buffers(), strict=True):
        close(a, b, a.dtype if a.is_floating_point() and dtype != torch.bfloat16 else torch.bfloat16)


@pytest.mark.rotates
@pytest.mark.parametrize("name", models.TAILS)
def test_chains_in_many_spellings(name: str, device: str) -> None:
    plain, fused, x = pair(models.Written(models.TAILS[name]), device, torch.float64)
    close(fused(x), plain(x), torch.float64)
    assert len(fused_chains(fused)) == 1, str(ct.explain(fused))
    with torch.no_grad():
        close(fused(x), plain(x), torch.float64)


@pytest.mark.parametrize("model", [models.Products, models.InPlace, models.HeadLogSumExp])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
def test_any_number_of_rows(model: type[nn.Module], rows: int, device: str) -> None:
    plain, fused, _ = pair(model(), device)
    x = torch.randn(rows, 12, device=device)
    close(fused(x), plain(x))


def test_strided_and_shifted_inputs(device: str) -> None:
    plain, fused, _ = pair(models.HeadLogSumExp(), device)
    store = torch.randn(40, 40, device=device)
    for x in (store[::2, 1:13], store.T[3:9, 5:17], store[:7, 0:36:3], store[0].expand(6, 40)[:, 2:14]):
        close(fused(x), plain(x))


def test_more_dimensions(device: str) -> None:
    plain, fused, _ = pair(models.Written(lambda y: F.gelu(y).softmax(-1).logsumexp(-1)), device)
    for shape in [(12,), (3, 4, 12), (2, 3, 4, 12), (2, 0, 12)]:
        x = torch.randn(shape, device=device)
        close(fused(x), plain(x))
    assert len(set(fused_chains(fused))) == 1


def test_a_network(device: str) -> None:
    plain = models.Network().to(device)
    fused = ct.fuse(copy.deepcopy(plain))
    x = torch.randn(3, 2, 6, device=device)
    for got, wanted in zip(fused(x).items(), plain(x).items(), strict=True):
        assert got[0] == wanted[0]
        close(got[1], wanted[1])
    left = {name for part in ct.explain(fused).left for name in part.operations}
    assert "conv1d" in left or any("stem" in p.module or "stem" in str(p.operations) for p in ct.explain(fused).left)
    assert fused_chains(fused)


def test_operations_in_place_are_not_seen_outside(device: str) -> None:
    plain, fused, x = pair(models.InPlace(), device)
    before = x.clone()
    close(fused(x), plain(x))
    assert torch.equal(x, before)


def test_special_values(device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)
    exact = plain.double()  # PyTorch's vectorised float32 functions on CPUs make NaN of gelu(inf)
    for special in (float("inf"), float("-inf"), float("nan"), 1e38):
        x[1, 3] = special
        torch.testing.assert_close(fused(x).double(), exact(x.double()), rtol=2e-6, atol=2e-6, equal_nan=True)


# The same module ----------------------------------------------------------------------------------------------------


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


# Never stale --------------------------------------------------------------------------------------------------------


def _optimizer(module: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _in_place(module: Any) -> None:
    with torch.no_grad():
        module.linear.weight.add_(1)


def _loaded(module: Any) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def _replaced(module: Any) -> None:
    module.linear.weight = nn.Parameter(module.linear.weight.detach() + 1)


def _new_data(module: Any) -> None:
    module.linear.weight.data = module.linear.weight.data + 1


def _one_of_two(name: str) -> Any:
    def change(module: Any) -> None:
        with torch.no_grad():
            getattr(module.linear, name).mul_(-1.5)

    return change


def _new_layer(module: Any) -> None:
    layer = nn.Linear(12, 7).to(module.linear.weight.device)
    with torch.no_grad():
        layer.weight.fill_(0.25), layer.bias.fill_(1.0)
    module.linear = layer


@pytest.mark.parametrize(
    "change",
    [_optimizer, _in_place, _loaded, _replaced, _new_data, _new_layer, _one_of_two("weight"), _one_of_two("bias")],
)
@pytest.mark.parametrize("head", [models.HeadSum, models.HeadLogSumExp])
def test_changes_of_weights_are_seen(head: Any, change: Any, device: str) -> None:
    plain, fused, x = pair(head(), device)
    for _ in range(3):
        close(fused(x), plain(x))
        change(plain), change(fused)
        torch.testing.assert_close(fused(x), plain(x), rtol=2e-6, atol=1e-4)


def test_functional_call(device: str) -> None:
    plain, fused, x = pair(models.HeadSum(), device)
    fused(x)
    other = {k: 2 * v.detach() for k, v in plain.state_dict().items()}
    close(torch.func.functional_call(fused, other, x), torch.func.functional_call(plain, other, x))
    close(fused(x), plain(x))


def test_weights_made_in_inference_mode(device: str) -> None:
    with torch.inference_mode():
        fused = ct.fuse(models.HeadSum().to(device))
        x = torch.randn(5, 12, device=device)
        first = fused(x)
        fused.linear.weight.add_(1)
        close(fused(x), models.HeadSum.forward(fused, x))
        assert not torch.equal(first, fused(x))


# Around it ----------------------------------------------------------------------------------------------------------


def test_no_gradients_where_none_are_wanted(device: str) -> None:
    _, fused, x = pair(models.HeadLogSumExp(), device)
    assert fused(x).requires_grad
    with torch.no_grad():
        assert not fused(x).requires_grad
    with torch.inference_mode():
        assert fused(x).is_inference()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, device: str) -> None:
    plain, fused, x = pair(models.HeadSoftmax(), device)
    with torch.autocast(device, dtype):
        wanted, got = plain(x), fused(x)
    assert got.dtype == wanted.dtype
    close(got, wanted, torch.bfloat16)
    assert len(fused_chains(fused)) == 1
    close(fused(x), plain(x))


def test_transforms_of_functions(device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)
    close(torch.func.vmap(fused)(x[:, None]), torch.func.vmap(plain)(x[:, None]))
    close(torch.func.jacrev(fused)(x), torch.func.jacrev(plain)(x))
    tangent = torch.randn_like(x)
    for a, b in zip(torch.func.jvp(fused, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)), strict=True):
        close(a, b)


def test_tensors_that_are_more_than_that(device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)

    class Marked(torch.Tensor):
        pass

    assert type(fused(x.as_subclass(Marked))) is type(plain(x.as_subclass(Marked)))
    meta = copy.deepcopy(fused).to("meta")
    assert meta(x.to("meta")).shape == (5, 1)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert fused(torch.empty(5, 12, device=device)).shape == (5, 1)


@pytest.mark.parametrize("bad", [lambda x: x[:, :5], lambda x: x.long(), lambda x: "x", lambda x: x.to_sparse()])
def test_bad_input_gets_pytorchs_own_error(bad: Any, device: str) -> None:
    plain, fused, x = pair(models.HeadLogSumExp(), device)
    try:
        plain(bad(x))
        error: Any = None
    except Exception as raised:
        error = raised
    if error is None:
        close(fused(bad(x)), plain(bad(x)))
        return
    with pytest.raises(type(error)):
        fused(bad(x))


class Choosy(nn.Linear):
    """Raises an error of its own for what it does not take."""

    def forward(self, x: Any) -> Any:
        if x.dim() != 2:
            raise ValueError("rows and columns")
        return super().forward(x).softmax(-1)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The chains that ran, in their order."""
    ran: list[Any] = []
    call = Runner.__call__
    monkeypatch.setattr(Runner, "__call__", lambda self, *args: ran.append(self) or call(self, *args))
    return ran


@pytest.mark.rotates
@pytest.mark.parametrize("bad", [lambda x: x[:, :5], lambda x: x[None]], ids=["PyTorch's error", "its own error"])
def test_a_bad_call_changes_nothing_for_later_ones(bad: Any, device: str, runs: list[Any], fresh_dynamo: None) -> None:
    plain, fused, x = pair(Choosy(12, 7), device)

    def fail(times: int) -> None:
        for _ in range(times):
            with pytest.raises((RuntimeError, ValueError)):
                fused(bad(x))

    fail(1)
    for each in (x, x[:3], x[:2]):  # the second one is captured anew
        close(fused(each), plain(each))
        fail(1)
    assert len(runs) == 3
    fail(8)  # now it is given up, but what is captured stays
    close(fused(x), plain(x))
    assert len(runs) == 4


def test_what_dynamo_does_not_know_changes_nothing_for_later_calls(
    device: str, runs: list[Any], fresh_dynamo: None
) -> None:
    plain, fused, x = pair(Choosy(12, 7), device)
    for each in (x, x.to_sparse(), x, x[:3]):
        close(fused(each), plain(each))
    assert len(runs) == 3


class Trying(nn.Linear):
    """An operation that fails, caught: Dynamo knows no results for it before PyTorch 2.14, which follows the error."""

    def forward(self, x: Any) -> Any:
        try:
            return x @ self.weight
        except RuntimeError:
            return super().forward(x).softmax(-1)


def test_code_that_dynamo_cannot_capture_is_explained(fresh_dynamo: None) -> None:
    plain, fused, x = pair(Trying(12, 7), "cpu")
    for _ in range(2):
        close(fused(x), plain(x))
    if torch.__version__ >= (2, 14):
        assert len(fused_chains(fused)) == 1
        return
    (reason,) = {part.reason for part in ct.explain(fused).left if "forward" in part.code}
    assert reason.startswith("not captured: RuntimeError(") and "same reduction dim" in reason


def test_threads(device: str) -> None:
    plain, fused, _ = pair(models.HeadLogSumExp(), device)
    inputs = [torch.randn(3 + k % 4, 12, device=device) for k in range(16)]
    wanted = [plain(x).detach() for x in inputs]
    failures: list[Any] = []

    def work(k: int) -> None:
        try:
            for _ in range(5):
                close(fused(inputs[k]).detach(), wanted[k])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 12), (0, 3, 12)])
def test_layouts_without_elements(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    plain, fused, _ = pair(nn.Sequential(nn.Linear(12, 5), nn.GELU(), nn.Softmax(-1)), device, dtype)
    x = torch.randn(shape, device=device, dtype=dtype)
    assert fused(x).stride() == plain(x).stride() and fused(x).shape == plain(x).shape
    assert ct.softmax(x, -1).stride() == x.softmax(-1).stride()


def test_submodules_as_keys() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
            self.scale = {self.a: 2.0, self.b: 3.0}

        def forward(self, x: Any) -> Any:
            for layer in (self.a, self.b):
                x = layer(x) * self.scale.get(layer, 1.0)
            return x

    model, x = Scaled(), torch.randn(2, 6)
    torch.testing.assert_close(ct.fuse(model, only_gains=False)(x), model(x))
