"""`cupyfuse.torch.fuse`: the same results, also after changes; on the CPU through NumPy, on a GPU through kernels."""

from __future__ import annotations

import copy
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
