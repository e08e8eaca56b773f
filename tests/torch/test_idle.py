"""Calls in which no chain runs are PyTorch's own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch_ways import Code

import cupyfuse.torch as ct
from cupyfuse.torch import idle
from cupyfuse.torch.cost import decision

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def captured_calls(fused: Any) -> int:
    calls: int = fused.__dict__["_cupyfuse"]._callback.calls
    return calls


def test_calls_without_chains_do_without_dynamo() -> None:
    fused = ct.fuse(module := Code(lambda m, x: torch.sort(x).values))
    for rows in (2, 5):
        x = torch.randn(rows, 4)
        for _ in range(2):
            fused(x)
        before = captured_calls(fused)
        torch.testing.assert_close(fused(x), module(x), rtol=0, atol=0)
        assert captured_calls(fused) == before
    fused.eval()
    fused(x)
    assert captured_calls(fused) == before + 1
    assert [part.code for part in ct.explain(fused).left]


@pytest.mark.choice
@pytest.mark.parametrize("cost", [1e-9, 1.0], ids=["cheap", "dear"])
def test_graphs_that_cost_more_than_their_chains_save(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph break makes two: calls are PyTorch's own where entering both takes longer than their chains save."""
    monkeypatch.setattr(decision, "cost_of_part", lambda values: cost)

    def code(m: Any, x: Any) -> Any:
        y = (x * 2 + 1).softmax(-1)
        torch._dynamo.graph_break()
        return (y * 3 - 1).log_softmax(-1)

    fused, x = ct.fuse(module := Code(code)), torch.randn(256, 4096)
    for _ in range(3):
        torch.testing.assert_close(fused(x), module(x))
    before = captured_calls(fused)
    fused(x)
    assert captured_calls(fused) - before == (cost < 1)
    assert ("2 graphs, between graph breaks" in str(ct.explain(fused))) == (cost == 1)
    whole = ct.fuse(Code(lambda m, x: (x * 2 + 1).softmax(-1)))  # one graph costs what eager does
    for _ in range(3):
        whole(x)
    assert captured_calls(whole) == 3


def test_modules_that_change_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_LOOK_AGAIN", 3)

    def code(m: Any, x: Any) -> Any:
        return torch.softmax(x * 2, -1).exp() if m.ready else torch.sort(x).values

    fused, x = ct.fuse(module := Code(code), only_gains=False), torch.randn(3, 5)
    for ready in (False, True):
        module.ready = fused.ready = ready
        for _ in range(4):
            torch.testing.assert_close(fused(x), module(x))
    assert ct.explain(fused).fused
    before = captured_calls(fused)
    for _ in range(4):
        fused(x)
    assert captured_calls(fused) == before + 4  # chains run in every call


def test_any_arguments_are_described() -> None:
    """Those that hold themselves, cannot be hashed or have sizes of their own too."""
    fused = ct.fuse(Code(lambda m, x, *more, **options: x * 1))
    x, endless = torch.randn(3), [1]
    endless.append(endless)  # type: ignore[arg-type]
    for argument in (endless, {"a": [x, {"b": (x, 2.0)}]}, {1, 2}, slice(1, 2), nn.Parameter(x), object()):
        for _ in range(3):
            torch.testing.assert_close(fused(x, argument, option=argument), x)


HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "itself": (lambda x: x, lambda given: given),
    "parameter": (nn.Parameter, lambda given: given),
    "list": (lambda x: [x], lambda given: given[0]),
    "tuples": (lambda x: ((0, x),), lambda given: given[0][1]),
    "dict": (lambda x: {"a": x}, lambda given: given["a"]),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("how", HELD)
def test_nested_tensors_are_left_to_pytorch(how: str, named: bool) -> None:
    """Guards that were made for other tensors end the process at their strides."""
    hold, take = HELD[how]
    fused, x = ct.fuse(module := Code(lambda m, given: m.linear(take(given)).relu())), torch.randn(5, 12)
    nested = torch.nested.nested_tensor([torch.randn(2, 12), torch.randn(3, 12)])
    for given in map(hold, (x, nested, x, nested)):
        found = fused(given=given) if named else fused(given)
        for got, expected in zip(found.unbind(), module(given).unbind(), strict=True):
            torch.testing.assert_close(got, expected)
    assert "called with nested tensors" in str(fused.explain())


def test_descriptions_keep_nothing_of_the_arguments() -> None:
    class Batch:
        pass

    fused = ct.fuse(Code(lambda m, x, *more: torch.sort(x).values))
    for _ in range(2):
        fused(torch.randn(3, 4), Batch(), "text" * 100)
    kind = weakref.ref(Batch)
    del Batch
    torch._dynamo.reset()
    gc.collect()
    assert kind() is None
    assert len(str(idle._describe([*range(1000)]))) < 500


def test_arguments_of_other_names_are_other_calls() -> None:
    def code(m: Any, x: Any, **more: Any) -> Any:
        return torch.softmax(x * 2, -1).exp() if "scores" in more else torch.sort(x).values

    fused, x = ct.fuse(Code(code), only_gains=False), torch.randn(3, 5)
    for name in ("positions", "scores"):
        for _ in range(2):
            fused(x, **{name: True})
    assert ct.explain(fused).fused


def test_each_kind_of_call_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_LOOK_AGAIN", 4)
    fused = ct.fuse(Code(lambda m, x: torch.sort(x).values))
    calls = dict.fromkeys((2, 3), 0)
    for number in range(10):
        for rows in calls:
            before = captured_calls(fused)
            fused(torch.randn(rows, 4))
            calls[rows] += captured_calls(fused) - before if number > 1 else 0
    assert calls == {2: 2, 3: 2}


def test_calls_that_look_alike_are_captured_once_chains_run_in_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_LOOK_AGAIN", 3)

    class Batch:
        def __init__(self, large: bool):
            self.large = large

    def code(m: Any, x: Any, batch: Any) -> Any:
        return torch.softmax(x * 2, -1).exp() if batch.large else torch.sort(x).values

    fused, x = ct.fuse(Code(code), only_gains=False), torch.randn(3, 5)
    for large in (False, True) * 16:
        fused(x, Batch(large))
    before = captured_calls(fused)
    for large in (False, True) * 4:
        fused(x, Batch(large))
    assert captured_calls(fused) == before + 8


def within_vmap(module: Any, x: Any) -> Any:
    return torch.func.vmap(module)(x)


def within_grad(module: Any, x: Any) -> Any:
    return torch.func.grad(lambda z: module(z).sum())(x)


def within_a_mode(module: Any, x: Any) -> Any:
    with FlopCounterMode(display=False):
        return module(x)


@pytest.mark.parametrize("within", (within_vmap, within_grad, within_a_mode))
def test_chains_run_after_calls_within_transforms_and_modes(within: Any) -> None:
    fused = ct.fuse(module := Code(lambda m, x: torch.softmax(m.linear(x) * 2, -1)), only_gains=False)
    x = torch.randn(3, 12)
    for _ in range(2):
        torch.testing.assert_close(within(fused, x), within(module, x))
    assert "called within" in str(ct.explain(fused))
    fused(x)
    assert ct.explain(fused).fused
