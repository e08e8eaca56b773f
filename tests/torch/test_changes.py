"""Modules, classes and globals that change between calls: nothing that was captured stays behind."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch_steps import DOUBLE, Code, near, same_steps
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct
from cupyfuse.torch import capture


def _each(modules: Any) -> Callable[..., Any]:
    def code(m: Any, y: Any) -> Any:
        for part in modules(m):
            y = F.gelu(y @ part if isinstance(part, torch.Tensor) else part(y)).softmax(-1)
        return y

    return code


def _append(m: Any) -> None:
    m.parts.append(nn.Linear(12, 12).double())


def _exchange(m: Any) -> None:
    m.parts[0] = nn.Linear(12, 12).double()


@pytest.mark.parametrize("change", [_append, _exchange])
def test_lists_of_modules(change: Any) -> None:
    parts = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])
    same_steps(Code(_each(lambda m: m.parts), parts=parts), change)


def test_lists_of_parameters() -> None:
    parts = nn.ParameterList([nn.Parameter(torch.randn(12, 12)) for _ in range(2)])
    change = lambda m: m.parts.append(nn.Parameter(torch.randn(12, 12).double()))  # noqa: E731
    same_steps(Code(_each(lambda m: m.parts), parts=parts), change)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = 2.0, nn.Linear(12, 12)

    def forward(self, x: Any) -> Any:
        return x * self.scale

    def encode(self, x: Any) -> Any:
        return (x * self.scale).exp()


@pytest.mark.parametrize(
    "code",
    [
        lambda m, y: m.part.encode(y).softmax(-1),
        lambda m, y: m.part.forward(y).softmax(-1),
        lambda m, y: (y * m.part.scale).softmax(-1),
        lambda m, y: (y @ m.part.inner.weight).softmax(-1),
    ],
    ids=["method", "forward", "attribute", "weight"],
)
def test_submodules_that_are_not_called(code: Any) -> None:
    def change(m: Any) -> None:
        m.part.scale, m.part.inner = 5.0, nn.Linear(12, 12).double()

    same_steps(Code(code, part=Part()), change)


@dataclass
class Settings:
    s: float = 2.0


@pytest.mark.parametrize(
    ("value", "read", "change"),
    [
        ({"a": {"s": 2.0}}, lambda v: v["a"]["s"], lambda v: v["a"].update(s=5.0)),
        (types.SimpleNamespace(s=2.0), lambda v: v.s, lambda v: setattr(v, "s", 5.0)),
        (Settings(), lambda v: v.s, lambda v: setattr(v, "s", 5.0)),
        ([torch.tensor(2.0)], lambda v: v[0], lambda v: v.__setitem__(0, torch.tensor(5.0))),
        ({"a": torch.tensor(2.0)}, lambda v: v["a"], lambda v: v.update(a=torch.tensor(5.0))),
        (np.array([2.0]), lambda v: float(v[0]), lambda v: v.__setitem__(0, 5.0)),
        (deque([2.0]), lambda v: v[0], lambda v: v.__setitem__(0, 5.0)),
    ],
    ids=["dicts", "namespace", "dataclass", "list of tensors", "dict of tensors", "array", "deque"],
)
def test_attributes_of_every_kind(value: Any, read: Any, change: Any) -> None:
    same_steps(Code(lambda m, y: (y * read(m.value)).softmax(-1), value=value), lambda m: change(m.value))


def test_whole_numbers_and_floats_are_different_attributes() -> None:
    class Scaled(nn.Module):
        factors: Any = (1, 2)

        def forward(self, x: Any) -> Any:
            return (x * self.factors[0] + self.factors[1]).sum(0)

    fused, x = ct.fuse(Scaled()), torch.arange(12).view(3, 4)
    for factors in ([1, 2], [1.0, 2.0]):
        fused.factors = factors
        assert fused(x).dtype == Scaled.forward(fused, x).dtype


def test_classes_change() -> None:
    class Own(nn.Module):
        scale = 2.0

        def forward(self, x: Any) -> Any:
            return (x * self.scale).exp().softmax(-1)

    plain, fused, x = pair(Own(), "cpu", DOUBLE)
    near(fused(x), plain(x))
    Own.scale = 3.0
    near(fused(x), plain(x))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def rule(self, x: Any) -> Any:
        return F.gelu(x)

    def forward(self, x: Any) -> Any:
        return self.rule(self.linear(x))


class _Derived(_Block):
    pass


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = _Derived()

    def forward(self, x: Any) -> Any:
        return self.block(x).softmax(-1)


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("cls", "name", "method"),
    [
        (_Blocks, "forward", lambda self, x: self.block(x).log_softmax(-1)),
        (_Block, "forward", lambda self, x: self.linear(x).exp()),
        (_Derived, "forward", lambda self, x: self.linear(x).exp()),
        (_Block, "rule", lambda self, x: x.sin()),
        (_Derived, "rule", lambda self, x: x.sin()),
        (nn.Linear, "forward", lambda self, x: x @ self.weight),
    ],
)
def test_methods_change(cls: Any, name: str, method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class, not of an instance, which Dynamo does not see; `__code__` alone is what reloading changes."""
    plain, fused, x = pair(_Blocks(), "cpu", DOUBLE)
    near(fused(x), plain(x))
    first = fused._cupyfuse
    near(fused(x * 2), plain(x * 2))
    assert fused._cupyfuse is first
    with monkeypatch.context() as patch:
        patch.setattr(cls, name, method, raising=False)
        for _ in range(2):
            near(fused(x), plain(x))
        assert len(fused_chains(fused)) == 1
    near(fused(x), plain(x))
    with monkeypatch.context() as patch:
        patch.setattr(getattr(cls, name), "__code__", method.__code__)
        near(fused(x), plain(x))
    near(fused(x), plain(x))


@pytest.mark.rotates
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_all_modules(kind: str) -> None:
    """Registered and removed between calls, which Dynamo does not see."""
    hooks: dict[str, Any] = {
        "forward": lambda module, args, result: result * 2,
        "forward_pre": lambda module, args: (args[0] * 2,),
        "full_backward": lambda module, received, returned: tuple(None if g is None else g * 2 for g in received),
        "full_backward_pre": lambda module, returned: tuple(g * 2 for g in returned),
    }
    plain, fused, x = pair(_Blocks(), "cpu", DOUBLE)
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    handles: list[Any] = []
    try:
        for count in (0, 1, 2, 0, 1):
            while len(handles) < count:
                handles.append(register(hooks[kind]))
            while len(handles) > count:
                handles.pop().remove()
            found = []
            for module in (plain, fused):
                argument = x.clone().requires_grad_()
                result = module(argument)
                found.append((result, *torch.autograd.grad(result.sin().sum(), [argument, *module.parameters()])))
            near(found[1], found[0])
    finally:
        for handle in handles:
            handle.remove()


def test_methods_that_never_stay_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_MOST_RENEWALS", 3)
    plain, fused, x = pair(_Blocks(), "cpu", DOUBLE)
    for scale in range(6):
        namespace: dict[str, Any] = {}
        exec(f"def rule(self, x): return x.exp() * {scale}", namespace)
        monkeypatch.setattr(_Block, "rule", namespace["rule"])
        near(fused(x), plain(x))
    assert "hooks of all modules, changed 3 times" in str(ct.explain(fused))


SCALE: Any = 2.0
TENSOR: Any = torch.tensor(2.0)


def test_globals_and_closures(monkeypatch: pytest.MonkeyPatch) -> None:
    factor: Any = 2.0
    plain, fused, x = pair(Code(lambda m, y: (y * SCALE * TENSOR * factor).softmax(-1)), "cpu", DOUBLE)
    near(fused(x), plain(x))
    for name, value in (("SCALE", 5.0), ("TENSOR", torch.tensor(7.0))):
        monkeypatch.setattr(sys.modules[__name__], name, value)
        near(fused(x), plain(x))
    factor = 0.5
    near(fused(x), plain(x))


def _untied(m: Any) -> None:
    m.other.weight = nn.Parameter(torch.randn(12, 12).double())


def test_weights_are_untied() -> None:
    module = Code(lambda m, y: m.other(y.exp().softmax(-1)).softmax(-1), other=nn.Linear(12, 12))
    module.other.weight = module.linear.weight
    same_steps(module, _untied)


def test_what_code_reads_of_parameters() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 6))

        def forward(self, x: Any) -> Any:
            scale = 2 if self.w.requires_grad else 3
            return (x.to(self.w.dtype) @ self.w * scale / self.w.shape[1]).exp().softmax(-1)

    plain, fused = Reading(), ct.fuse(Reading())
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(5, 12)
    close(fused(x), plain(x))
    wide = torch.randn(12, 9)
    for change in (
        lambda m: setattr(m, "w", nn.Parameter(wide)),
        lambda m: m.requires_grad_(False),
        lambda m: setattr(m.w, "data", m.w.data.double()),
    ):
        change(plain), change(fused)
        close(fused(x), plain(x))


def test_the_default_dtype() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.where(x > 0, 1.0, 0.0).softmax(-1).exp()

    fused, x = ct.fuse(Choosing()), torch.randn(5, 12)
    fused(x)
    torch.set_default_dtype(DOUBLE)
    try:
        near(fused(x), Choosing()(x))
    finally:
        torch.set_default_dtype(torch.float32)


def test_parametrizations_come_and_go() -> None:
    module = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Softmax(-1))
    plain, fused, x = pair(module, "cpu", DOUBLE)
    near(fused(x), plain(x))
    for change in (
        lambda m: parametrizations.weight_norm(m[0]),
        lambda m: nn.utils.parametrize.remove_parametrizations(m[0], "weight"),
    ):
        change(plain), change(fused)
        near(fused(x), plain(x))


def test_sequences_grow_and_shrink() -> None:
    plain, fused, x = pair(nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Softmax(1)), "cpu", DOUBLE)
    near(fused(x), plain(x))
    for change in (
        lambda m: m.append(nn.LogSoftmax(1)),
        lambda m: m.__delitem__(1),
        lambda m: m.insert(1, nn.Tanh()),
        lambda m: m.__setitem__(1, nn.Sigmoid()),
    ):
        change(plain), change(fused)
        near(fused(x), plain(x))


def test_hooks_may_change_shapes() -> None:
    plain, fused, x = pair(Code(lambda m, y: (y / y.shape[1]).exp().softmax(-1)), "cpu", DOUBLE)
    near(fused(x), plain(x))
    for module in (plain, fused):
        module.linear.register_forward_hook(lambda m, a, out: out[:, :4])
    near(fused(x), plain(x))
