"""What a record of a forward depends on beside shapes: memory, types, facts about tensors, defaults, classes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cupyfuse.torch as ct

SCALES = [1.0]
ROWS, COLUMNS = 3, 4


class Settings:
    scale = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Code(nn.Module):
    """A forward made of a function, with a parameter, a buffer and attributes for it to read."""

    def __init__(self, code: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.code = code
        self.state = nn.Parameter(torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS))
        self.register_buffer("memory", torch.ones(ROWS, COLUMNS))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.code(self, *args)


@pytest.fixture
def x() -> Any:
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS)


def near(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def by(asked: Callable[..., bool]) -> Callable[..., Any]:
    """Code that takes another way where something holds."""
    return lambda self, x: (x * 2).softmax(-1) if asked(self, x) else (x * 9).log_softmax(-1)


# Arguments that are the module's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state", "memory"])
def test_a_call_with_a_tensor_of_the_modules_own(name: str, x: Any) -> None:
    plain = Code(lambda self, h: (getattr(self, name) * 2 + h).softmax(-1))
    fused = ct.fuse(copy.deepcopy(plain))
    for own in (True, False, True, False):
        outcomes = []
        for module in (plain, fused):
            module.zero_grad()
            h = getattr(module, name) if own else x.clone().requires_grad_()
            y = module(h)
            if y.requires_grad:
                y[:, 0].sum().backward()
            outcomes.append([y.detach(), *(t.grad for t in (h, module.state) if t.grad is not None)])
        near(*outcomes)


@pytest.mark.parametrize("own", [True, False])
def test_arguments_that_are_changed_and_may_be_the_modules_own(own: bool, x: Any) -> None:
    def code(self: Any, h: Any) -> Any:
        base = self.memory + 1
        h.add_(1)
        return (base * h * self.memory).softmax(-1)

    plain = Code(code)
    fused = ct.fuse(copy.deepcopy(plain))
    for first in (own, not own, own):
        results = [module(module.memory if first else x.clone()) for module in (plain, fused)]
        near(*results)
        near(fused.memory, plain.memory)


# Types and facts ----------------------------------------------------------------------------------------------------


FACTS: dict[str, Any] = {
    "type": (lambda self, x: type(x) is torch.Tensor, [lambda x: x, nn.Parameter]),
    "class": (lambda self, x: x.__class__ is torch.Tensor, [lambda x: x, nn.Parameter]),
    "parameter": (lambda self, x: isinstance(x, nn.Parameter), [lambda x: x.requires_grad_(), nn.Parameter]),
    "gradient": (lambda self, x: x.grad is None, [lambda x: x, lambda x: _with_gradient(x)]),
    "offset": (lambda self, x: x.storage_offset() == 0, [lambda x: x, lambda x: torch.cat([x, x])[ROWS:]]),
    "version": (lambda self, x: x._version == 0, [lambda x: x, lambda x: x.add_(0)]),
    "attribute": (lambda self, x: hasattr(x, "tag"), [lambda x: x, lambda x: _tagged(x)]),
}


def _with_gradient(x: Any) -> Any:
    x.requires_grad_().sum().backward()
    return x.requires_grad_(False)


def _tagged(x: Any) -> Any:
    x.tag = 1
    return x


@pytest.mark.rotates
@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0, 1)])
@pytest.mark.parametrize("fact", FACTS)
def test_facts_about_an_argument(fact: str, order: tuple[int, ...], x: Any) -> None:
    asked, kinds = FACTS[fact]
    plain = Code(by(asked))
    fused = ct.fuse(copy.deepcopy(plain))
    for k in order:
        argument = kinds[k](x.clone())
        near(fused(argument), plain(argument))


def test_whether_a_parameter_has_a_gradient(x: Any) -> None:
    plain = Code(by(lambda self, x: self.state.grad is None))
    fused = ct.fuse(plain)
    for gradient in (None, torch.ones(ROWS, COLUMNS), None):
        plain.state.grad = gradient
        near(fused(x), plain(x))


def test_what_is_written_on_a_parameter(x: Any) -> None:
    plain = Code(by(lambda self, x: getattr(self.state, "tag", 0) == 7))
    plain.state.tag = 7
    near(ct.fuse(plain)(x), plain(x))


def test_asking_for_ones_own_type_is_no_reason() -> None:
    class Own(Code):
        factor = 2.0

        def forward(self, x: Any) -> Any:
            return (x * type(self).factor * isinstance(x, torch.Tensor)).softmax(-1)

        def reset(self) -> None:
            self.kind = type(self.state)

    fused = ct.fuse(Own(by))
    near(fused(torch.ones(ROWS, COLUMNS)), torch.full((ROWS, COLUMNS), 1 / COLUMNS))
    assert [part.operations for part in fused.explain().fused] == [("mul", "mul", "softmax")]


# What is no tensor --------------------------------------------------------------------------------------------------


def _helper(x: Any, scales: Any = (1.0,), *, more: float = 1.0) -> Any:
    return x * scales[0] * more


def _set_default(value: Any) -> Any:
    _helper.__defaults__ = ((value,),)


def _set_keyword(value: Any) -> Any:
    _helper.__kwdefaults__["more"] = value


def _within(self: Any, x: Any, scales: Any = SCALES) -> Any:
    return (x * scales[0]).softmax(-1)


def _set_within(value: Any) -> Any:
    SCALES[0] = value


def _set_class(value: Any) -> Any:
    Settings.scale = value


PLACES = {
    "a default of a helper": (lambda self, x: _helper(x).softmax(-1), _set_default),
    "a keyword's default": (lambda self, x: _helper(x).softmax(-1), _set_keyword),
    "a default's contents": (_within, _set_within),
    "a class of an attribute": (lambda self, x: (x * self.settings.scale).softmax(-1), _set_class),
    "a class": (lambda self, x: (x * Settings.scale).softmax(-1), _set_class),
}


@pytest.mark.parametrize("place", PLACES)
def test_values_that_are_read_from(place: str, x: Any) -> None:
    code, change = PLACES[place]
    plain = Code(code, settings=Settings())
    fused = ct.fuse(plain)
    try:
        for value in (1.0, 5.0, 2.0):
            change(value)
            near(fused(x), plain(x))
    finally:
        change(1.0)


def test_attributes_in_slots(x: Any) -> None:
    slotted = Slotted()
    plain = Code(lambda self, x: (x * self.settings.scale).softmax(-1), settings=slotted)
    fused = ct.fuse(plain)
    for slotted.scale in (1.0, 5.0, 2.0):
        near(fused(x), plain(x))
