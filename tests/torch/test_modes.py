"""Modes that captured code enters are left where it raises, as `with` leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch_ways import WAYS, Code, ways

import cupyfuse.torch as ct
from cupyfuse.torch import backend
from cupyfuse.torch.graphs import lowering

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "without autocast": lambda: torch.autocast("cpu", enabled=False),
    "sdpa_kernel": lambda: sdpa_kernel(SDPBackend.MATH),
}


def state() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), depth
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.backends.cuda.flash_sdp_enabled()


def outer(m: Any, x: Any, rows: Any, mode: Mode) -> Any:
    with mode():
        chosen = torch.softmax(m.linear(x) * 2, -1)[rows]
    return torch.softmax(m.linear(x) * 2, -1), chosen


def nested(m: Any, x: Any, rows: Any, mode: Mode) -> Any:
    with torch.no_grad(), mode(), torch.autocast("cpu", torch.float16):
        chosen = torch.softmax(m.linear(x) * 2, -1)[rows]
    return torch.softmax(m.linear(x) * 2, -1), chosen


def in_a_region(m: Any, x: Any, rows: Any, mode: Mode) -> Any:
    return checkpoint(lambda z: outer(m, z, rows, mode), x, use_reentrant=False)


def behind_a_graph_break(m: Any, x: Any, rows: Any, mode: Mode) -> Any:
    with mode():
        torch._dynamo.graph_break()
        chosen = torch.softmax(m.linear(x) * 2, -1)[rows]
    return torch.softmax(m.linear(x) * 2, -1), chosen


@pytest.mark.rotates
@pytest.mark.parametrize("code", (outer, nested, in_a_region, behind_a_graph_break))
@pytest.mark.parametrize("mode", MODES)
def test_modes_are_left_where_an_operation_raises(code: Any, mode: str) -> None:
    fused, before = ct.fuse(Code(lambda m, x, rows: code(m, x, rows, MODES[mode])), only_gains=False), state()
    x = torch.randn(3, 12)
    for row in (1, 9, 1):
        if row == 1:
            fused(x, torch.tensor([row]))
        else:
            with pytest.raises(IndexError) as error:
                fused(x, torch.tensor([row]))
            assert error.tb is not None  # and holds the variables of its frames
        assert state() == before
    assert ct.explain(fused).fused


def test_gradients_that_are_switched_for_good_stay_so_where_an_operation_raises() -> None:
    def code(m: Any, x: Any, rows: Any) -> Any:
        torch.set_grad_enabled(False)
        return torch.softmax(m.linear(x) * 2, -1)[rows]

    fused = ct.fuse(Code(code), only_gains=False)
    for _ in range(2):
        with torch.enable_grad():
            with pytest.raises(IndexError):
                fused(torch.randn(3, 12), torch.tensor([9]))
            assert not torch.is_grad_enabled()


def test_recomputations_that_stop_early_leave_their_modes() -> None:
    """An autocast that is never left keeps its copies of weights after these have changed."""

    def region(m: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            return torch.exp(m.linear(x))

    fused = ct.fuse(Code(lambda m, x: checkpoint(lambda z: region(m, z) * 1, x, use_reentrant=False)))
    before = state()
    for _ in range(2):
        fused(torch.randn(3, 12)).float().sum().backward()
        assert state() == before


def enabled(m: Any, x: Any) -> Any:
    with torch.enable_grad():
        y = F.gelu(m.linear(x)).softmax(-1)
    return (y * 2).exp().sum(-1)


@ways
def test_gradients_that_are_enabled_in_inference_mode_are_not_recorded(way: str) -> None:
    module, x = Code(enabled), torch.randn(5, 12)
    called = WAYS[way](module)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            found, expected = called(x), module(x)
        assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recording", [False, True])
def test_views_of_parameters_under_no_grad_have_no_gradients(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake ones have; results of chains were detached for that, one by one, in each call."""
    detached: list[int] = []

    def lower(imported: Any, *given: Any) -> None:
        lowering.lower(imported, *given)
        detached.append(sum(node.target == "detach" for node in imported.graph.nodes))

    monkeypatch.setattr(backend, "lower", lower)

    def code(m: Any, x: Any) -> Any:
        y = (m.linear.bias.expand(5, -1) + x).softmax(-1)
        with torch.set_grad_enabled(recording):
            z = m.linear(x).softmax(-1)
        return y, z

    module, x = Code(code), torch.randn(5, 12)
    fused = ct.fuse(copy.deepcopy(module))
    with torch.no_grad():
        for actual, expected in zip(fused(x), module(x), strict=True):
            torch.testing.assert_close(actual, expected)
            assert actual.requires_grad == expected.requires_grad
    assert detached == [0] or recording
