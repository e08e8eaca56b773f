"""Code as people write it around fused modules, with effects and with classes of all kinds."""

from __future__ import annotations

import copy
import inspect
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch_steps import DOUBLE, Code, near, same_steps
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct

# Code with effects --------------------------------------------------------------------------------------------------

SEEN: list[Any] = []


def _counted(m: Any, y: Any) -> Any:
    m.box.n += 1
    m.box.y = y.exp().softmax(-1)
    return m.box.y


def _nested(m: Any, y: Any) -> Any:
    m.nested["a"].append(y.exp().softmax(-1))
    return m.nested["a"][-1]


def _logged(m: Any, y: Any) -> Any:
    SEEN.append(y.exp().softmax(-1))
    return SEEN[-1]


@pytest.mark.parametrize("code", [_counted, _nested, _logged])
def test_effects_happen_at_every_call(code: Any) -> None:
    results = []
    for fuse in (lambda m: m, ct.fuse):
        SEEN.clear()
        torch.manual_seed(0)
        module = fuse(Code(code, box=types.SimpleNamespace(n=0), nested={"a": []}))
        for _ in range(3):
            module(torch.ones(5, 12))
        results.append((module.box.n, getattr(module.box, "y", None), list(module.nested["a"]), list(SEEN)))
    close(results[1], results[0])


@dataclass
class Output:
    y: Any


@pytest.mark.parametrize("pack", [Output, lambda y: {y}, lambda y: types.SimpleNamespace(y=y)])
def test_results_of_any_type(pack: Any) -> None:
    fused = ct.fuse(Code(lambda m, y: (pack(y.exp().softmax(1)), y.sum(1).exp(), [])))
    for _ in range(2):
        packed, _, empty = fused(torch.randn(5, 12))
        (inner,) = packed if isinstance(packed, set) else [packed.y]
        assert type(inner) is torch.Tensor and empty == []
        empty.append(1)


def test_function_modes_see_every_call(device: str) -> None:
    """A mode that replaces GELU by ReLU does so in a fused module too, also in one captured before."""

    class Exchanging(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return torch.relu(*args) if func is F.gelu else func(*args, **(kwargs or {}))

    plain, fused, x = pair(Code(lambda m, y: F.gelu(y).exp()), device, DOUBLE)
    near(fused(x), plain(x))
    with Exchanging():
        near(fused(x), plain(x))
    near(fused(x), plain(x))


def test_a_wrong_shape_gets_pytorchs_own_error() -> None:
    plain = nn.Sequential(nn.Linear(12, 7), nn.GELU())
    errors = []
    for module in (plain, ct.fuse(plain)):
        with pytest.raises(RuntimeError) as caught:
            module(torch.randn(3, 11))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_assertions_about_values_are_pythons() -> None:
    source = 'def code(module, y):\n    assert (y < 9).all(), "large"\n    return y.exp().logsumexp(-1)'
    names: dict[str, Any] = {}
    exec(source, names)  # pytest rewrites the assertions of this file
    plain, fused, x = pair(Code(names["code"]), "cpu", DOUBLE)
    for offset in (0.0, 1000.0, 0.0):
        for module in (plain, fused):
            with torch.no_grad():
                module.linear.bias.fill_(offset)
        if offset:
            for module in (plain, fused):
                with pytest.raises(AssertionError, match=r"^large$"):
                    module(x)
        else:
            near(fused(x), plain(x))
    assert fused_chains(fused)


# Classes of all kinds -----------------------------------------------------------------------------------------------


def test_names_that_are_the_users() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.refresh, self.explain = nn.Linear(12, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: Any) -> Any:
            return (self.refresh(x) * self.explain).exp().softmax(-1)

    same_steps(Named())


def test_classes_with_slots() -> None:
    class Slotted(nn.Module):
        __slots__ = ("k",)

        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "k", 2.0)

        def forward(self, x: Any) -> Any:
            return (x * self.k).exp().softmax(-1)

    x = torch.randn(5, 12)
    close(ct.fuse(Slotted())(x), Slotted()(x))


def test_classes_that_are_made_in_their_own_ways() -> None:
    registered: dict[str, Any] = {}

    class Registered(nn.Module):
        def __init_subclass__(cls, *, name: str) -> None:
            super().__init_subclass__()
            registered[name] = cls

    class Made(Registered, name="made"):
        def __new__(cls, size: int) -> Any:
            return super().__new__(cls)

        def __init__(self, size: int):
            super().__init__()
            self.linear = nn.Linear(12, size)

        def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0) -> Any:
            return self.linear(x).exp().softmax(-1)

    fused, x = ct.fuse(Made(6)), torch.randn(5, 12)
    close(fused(x), Made.forward(fused, x))
    assert registered == {"made": Made}
    assert inspect.signature(fused.forward) == inspect.signature(Made(6).forward)


def test_methods_and_modules_in_attributes_are_the_fused_ones() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(12, 12), self._act

        def _act(self, y: Any) -> Any:
            return y.exp().softmax(1) if self.training else y.softmax(0)

        def forward(self, x: Any) -> Any:
            return self.act(self.linear(x))

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()
            self.order, self.by_name = [self.a, self.b], {"a": self.a}

        def forward(self, x: Any) -> Any:
            for part in self.order:
                x = part(x)
            return self.by_name["a"](x)

    plain = Ordered()
    fused, x = ct.fuse(plain).eval(), torch.randn(5, 12)
    got = fused(x)
    close(got, copy.deepcopy(plain).eval()(x))
