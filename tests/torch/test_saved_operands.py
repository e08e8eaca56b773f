"""Operands of 16-bit products that are saved for the backward pass, since the forward pass stores them anyway."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_ways import operators

import cupyfuse.torch as ct
from cupyfuse import devices
from cupyfuse.settings import Settings
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.rules import RULES
from cupyfuse.torch.rules.symbols import Ref

WAYS: dict[str, Callable[[Any], Any]] = {"fuse": ct.fuse, "operator": lambda m: torch.compile(m, backend=operators)}
ROWS, FEATURES, HIDDEN = 48, 24, 40
H200 = Settings("highest", devices.find("H200"))


def chain_of(*steps: tuple[Any, ...], inputs: int) -> Chain:
    """A chain of (rule, arguments ...) on numbers of values; the last step's result is its output."""
    calls = []
    for k, (rule, *arguments) in enumerate(steps):
        bound = RULES[rule].signature.bind(*arguments)
        bound.apply_defaults()
        calls.append(Call(rule, bound.args, (inputs + k,)))
    last = inputs + len(steps) - 1
    return Chain(tuple(f"x{k}" for k in range(inputs)), tuple(calls), (last,), (), frozenset())


def backward_of(chain: Chain, metas: Any, settings: Settings = H200) -> Backward:
    return Backward(chain.trace(metas), (True,) * len(metas), settings)


def two_layers(dtype: str, *tail: tuple[Any, ...], hidden: int = HIDDEN) -> tuple[Chain, Any]:
    """Linear, GELU, Linear, and what follows, which reads value 6."""
    steps = (("linear", Ref(0), Ref(1), Ref(2)), ("gelu", Ref(4)), ("linear", Ref(5), Ref(3)), *tail)
    metas = (((ROWS, FEATURES), dtype), ((hidden, FEATURES), dtype), ((hidden,), dtype), ((FEATURES, hidden), dtype))
    return chain_of(*steps, inputs=4), metas


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_operand_behind_an_activation_is_saved(dtype: str) -> None:
    saving = backward_of(*two_layers(dtype)).saving
    assert [n.op for n in saving.operands] == ["gelu"]
    assert [n.op for n in saving.nodes if n in saving.values] == ["add"]


def test_operands_of_float32_are_computed_again() -> None:
    """Products of splits store these, and not the operand."""
    assert not backward_of(*two_layers("float32")).saving.operands


def test_an_operand_that_the_forward_pass_does_not_store_is_not_saved() -> None:
    """The sum of all columns collapses the second layer to a product with a vector, which reads no stored matrix."""
    chain, metas = two_layers("bfloat16", ("sum", Ref(6), 1), hidden=1024)
    backward = backward_of(chain, metas)
    assert not backward.saving.operands


def test_operands_are_not_saved_beyond_the_workspace() -> None:
    chain, metas = two_layers("bfloat16")
    most = 2 * ROWS * HIDDEN  # bytes of the sum, and of the activation
    assert backward_of(chain, metas, Settings("highest", H200.device, max_workspace=most - 1)).saving.operands == {}
    assert backward_of(chain, metas, Settings("highest", H200.device, max_workspace=most)).saving.operands


class Block(nn.Module):
    """Norms without parameters, whose results are operands: their own gradients have to be of unrounded rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, (FEATURES,))
        return F.layer_norm(x + self.down(F.silu(self.up(y))), (FEATURES,))


def gradients(module: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = module(x)
    weights = torch.arange(1.0, y.numel() + 1).sin().view(y.shape).to(y)
    return [y.detach().double(), *(t.double() for t in torch.autograd.grad(y, [x, *module.parameters()], weights))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_are_no_larger_than_eager_s(dtype: torch.dtype, way: str) -> None:
    module, x = Block().to(dtype), torch.randn(ROWS, FEATURES).to(dtype)
    exact = gradients(copy.deepcopy(module).double(), x.double())
    eager, fused = gradients(module, x), gradients(WAYS[way](copy.deepcopy(module)), x)
    unit = torch.finfo(dtype).eps / 2
    for found, expected, truth in zip(fused, eager, exact, strict=True):
        assert float((found - truth).norm()) <= 1.05 * max(float((expected - truth).norm()), unit * float(truth.norm()))


def test_gradients_of_gradients() -> None:
    """These are of operations of PyTorch's, from the inputs alone."""

    def second(module: Any, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found.double()

    module, x = Block().to(torch.bfloat16), torch.randn(ROWS, FEATURES).to(torch.bfloat16)
    exact = second(copy.deepcopy(module).double(), x.double())
    expected, found = second(module, x), second(ct.fuse(copy.deepcopy(module)), x)
    assert float((found - exact).norm()) <= 1.5 * float((expected - exact).norm())
