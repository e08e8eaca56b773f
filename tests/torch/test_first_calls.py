"""First calls: all kernels of a step are planned and begun to compile before the first of them is needed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
import torch_models as models
from torch import nn
from torch.nn import functional as F
from torch_support import OnHost, close, pair

import cupyfuse.torch as ct
from cupyfuse.errors import EngineError
from cupyfuse.torch.backend import backend
from cupyfuse.torch.chains import backward as backward_pass
from cupyfuse.torch.chains import compiled as compiled_chain
from cupyfuse.torch.chains import custom_op, executor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

MODULES = (backward_pass, compiled_chain)


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chain that earlier tests have compiled is found again."""
    for module, name in ((custom_op, "_compiled"), (custom_op, "_backwards"), (executor, "_compiled")):
        monkeypatch.setattr(module, name, {})


class Events(list[str]):
    """What happens in a first call, in order: "plan", "compile" (by Inductor or of kernels), "call", "load"."""

    def before(self, name: str, patch: pytest.MonkeyPatch, module: Any, function: str) -> None:
        """Note the event before each call of a module's function."""
        called = getattr(module, function)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.append(name)
            return called(*args, **kwargs)

        patch.setattr(module, function, noted)


def train(module: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    outputs = module(x)
    outputs = list(outputs.values()) if isinstance(outputs, dict) else [outputs]
    sum(y.sin().sum() for y in outputs).backward()
    return [y.detach() for y in outputs]


@pytest.mark.parametrize("model", models.HEADS)
def test_the_backend_plans_both_passes_before_inductor_compiles(
    model: type[nn.Module], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, events = model().to(device), Events()
    for each in MODULES:
        events.before("plan", monkeypatch, each, "build")
    events.before("compile", monkeypatch, torch._inductor.compile_fx, "compile_fx")
    train(torch.compile(module, backend=backend, fullgraph=True), torch.randn(6, 12, device=device))
    assert events == ["plan", "plan", "compile"]


@pytest.mark.parametrize("symbols", [False, True])
def test_without_gradients_no_backward_pass_is_planned(symbols: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, events = models.HEADS[0](), Events()
    for each in MODULES:
        events.before("plan", monkeypatch, each, "build")
    events.before("compile", monkeypatch, torch._inductor.compile_fx, "compile_fx")
    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True, dynamic=symbols)(torch.randn(6, 12))
    assert events == ["plan", "compile"]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Events:
    """Chains of CPU tensors run by the kernels, as on a GPU.

    "compile" is the begin of a plan's kernels, "call" that of the first call of a chain.
    """
    runtime, events = OnHost(), Events()
    for module in MODULES:
        monkeypatch.setattr(module, "load", runtime.load)
        monkeypatch.setattr(module, "begin", runtime.begin)
        events.before("load", monkeypatch, module, "load")
        events.before("compile", monkeypatch, module, "begin")
    events.before("call", monkeypatch, executor.Executor, "__init__")
    return events


@pytest.mark.rotates
@pytest.mark.parametrize("model", models.HEADS)
def test_fused_modules_begin_both_passes_at_once(model: type[nn.Module], host: Events) -> None:
    plain, fused, _ = pair(model(), "cpu")
    for rows in (6, 9):
        x = torch.randn(rows, 12)
        close(train(fused, x), train(plain, x))
        assert host == ["compile", "compile", "call"], "a plan that was begun is not loaded anew"
        host.clear()
    close([p.grad for p in fused.parameters()], [p.grad for p in plain.parameters()])


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)).sum(1)


def test_other_layouts_than_begun_are_loaded_anew(host: Events) -> None:
    """The cotangent of a sum is an expanded number: its backward pass is planned for contiguous ones first."""
    plain, fused, _ = pair(Sums(), "cpu")
    x = torch.randn(6, 12)
    for module in (plain, fused):
        module(x).sum().backward()
    close([p.grad for p in fused.parameters()], [p.grad for p in plain.parameters()])
    assert host == ["compile", "compile", "call", "load"]


# What the engine raises where memory, a compiler or a driver is missing, in its own words or those of a library.
FAILURES = [EngineError("no GPU"), torch.OutOfMemoryError("out of memory"), MemoryError()]


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_what_cannot_be_begun_is_left_to_the_call(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch may compile, and export, without a GPU."""
    plain = models.HEADS[0]()
    for module in MODULES:
        monkeypatch.setattr(module, "begin", failing(error))
    compiled = torch.compile(copy.deepcopy(plain), backend=backend, fullgraph=True)
    fused = ct.fuse(copy.deepcopy(plain))
    x = torch.randn(6, 12)
    for module in (compiled, fused):
        close(train(module, x), train(plain, x))
    explained = ct.explain(fused)
    assert explained.fused[0].plans and not explained.left


class Counted(nn.Module):
    """Its chain takes a size as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x) * len(x), -1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_chain_that_cannot_be_loaded_is_left_to_pytorch(
    error: Exception, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again in later calls, for memory may be free then, but not in every one."""
    plain, fused, x = pair(Counted(), "cpu")
    events = Events()

    def check() -> None:
        for module in (plain, fused):
            module.zero_grad()
        with torch._dynamo.config.patch(assume_static_by_default=not dynamic):
            close(train(fused, x), train(plain, x))
        close([p.grad for p in fused.parameters()], [p.grad for p in plain.parameters()])

    with monkeypatch.context() as patch:
        patch.setattr(compiled_chain, "load", failing(error))
        with pytest.warns(RuntimeWarning, match=f"cupyfuse left linear .* to PyTorch: {type(error).__name__}"):
            check()
    (left,) = ct.explain(fused).left
    assert left.reason.startswith(type(error).__name__) and "linear" in left.operations
    check()
    assert ct.explain(fused).fused[0].plans
    x = torch.randn(7, 12)
    monkeypatch.setattr(compiled_chain, "load", failing(error))
    events.before("load", monkeypatch, compiled_chain, "load")
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    assert events == ["load"] * 3


class Heads(nn.Module):
    """Its chain's result has PyTorch's order in memory: that of the operand, whose dimensions are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).view(2, 3, 3, 4).transpose(1, 2)
        return F.silu(F.gelu(heads) * 2)


@pytest.mark.rotates
@pytest.mark.parametrize("model", [models.HEADS[0], Heads])
def test_another_process_finds_the_graph_in_inductors_caches(
    model: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, x, results = model(), torch.randn(6, 12), []
    for found in ("autograd_cache_saved", "autograd_cache_hit"):
        torch._dynamo.reset()  # all that this process knows
        counts = torch._dynamo.utils.counters["aot_autograd"]
        counts.clear()
        module.zero_grad()
        results.append(train(torch.compile(module, backend=backend, fullgraph=True), x))
        results[-1] += [p.grad for p in module.parameters()]
        assert counts[found] == 1 and not counts["autograd_cache_bypass"], counts
    close(*results)
    module.zero_grad()
    close(train(module, x), results[0][:-2])
