"""What Dynamo's graphs hold beside plain operations: the effects of Python code around tensors."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_ways import WAYS, Code, graded, same, ways

import cupyfuse.torch as ct

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _written(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x) * 2 + 1


_scripted = torch.jit.script(_written)


class Registry(OrderedDict[str, Any]):
    """As that of activations in transformers: entries are classes, what is looked up is an instance."""

    def __getitem__(self, key: str) -> Any:
        made, keywords = super().__getitem__(key)
        return made(**keywords)


REGISTRY = Registry({"gelu": (nn.GELU, {}), "leaky": (nn.LeakyReLU, {"negative_slope": 0.2})})


@functools.lru_cache
def _positions(length: int) -> Any:
    return torch.linspace(0, 1, length)


def _raising(m: Any, x: Any) -> Any:
    y = m.linear(x).softmax(-1)
    try:
        y = y.exp()
        raise ValueError("no")
    except Exception as error:
        return y * len(str(error))


def _batch(m: Any, x: Any) -> Any:
    batch = {"x": x}
    batch["x"] = torch.relu(m.linear(batch["x"]))
    return batch["x"].softmax(-1), batch


def _seeded(m: Any, x: Any) -> Any:
    torch.manual_seed(5)
    return (m.linear(x) + torch.randn(12)).softmax(-1).exp()


def _generator(m: Any, x: Any) -> Any:
    own = torch.Generator().manual_seed(5)
    return (m.linear(x) + torch.randn(12, generator=own)).softmax(-1).exp()


def _iterator(m: Any, x: Any) -> Any:
    numbers, y = iter([1.0, 2.0, 3.0]), m.linear(x)
    for k in numbers:
        y = (y * k).softmax(-1)
        next(numbers, None)
    return y


PYTHON: dict[str, Any] = {
    "a scripted function": lambda m, x: _scripted(m.linear(x)).softmax(-1),
    "a registry": lambda m, x: REGISTRY["gelu"](REGISTRY["leaky"](m.linear(x))).softmax(-1),
    "lru_cache": lambda m, x: (m.linear(x) + _positions(12)).softmax(-1).exp(),
    "except": _raising,
    "a dictionary": _batch,
    "manual_seed": _seeded,
    "a generator": _generator,
    "an iterator": _iterator,
    "settings": lambda m, x: (m.linear(x) * m.settings.inner.by["scale"][1]).softmax(-1),
}


@pytest.mark.rotates
@ways
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", PYTHON)
def test_python_around_tensors(name: str, way: str) -> None:
    settings = types.SimpleNamespace(inner=types.SimpleNamespace(by={"scale": [1.0, 2.0]}))
    same(Code(PYTHON[name], settings=settings), graded, way)
    assert OrderedDict.__getitem__(REGISTRY, "gelu") == (nn.GELU, {})
    assert type(_positions(12)) is torch.Tensor


def test_an_argument_that_is_a_dictionary_is_changed() -> None:
    def code(m: Any, batch: Any) -> Any:
        batch["x"] = torch.relu(m.linear(batch["x"])).softmax(-1)
        return batch["x"] * 2

    given = {"x": torch.randn(5, 12)}
    want = dict(given)
    module = Code(code)
    torch.testing.assert_close(ct.fuse(module)(given), module(want))
    torch.testing.assert_close(given, want)


def captures(module: Any) -> int:
    return len(module._cupyfuse.partitions)


def test_how_often_modules_are_captured() -> None:
    """Once for the first size or number, once more for all others."""
    fused = ct.fuse(Code(lambda m, x, scale=1.0: (m.linear(x) * scale).softmax(-1)))
    for rows in (5, 6, 7, 9, 30, 2):
        fused(torch.randn(rows, 12))
    assert captures(fused) == 2
    fused = ct.fuse(Code(lambda m, x, scale: (m.linear(x) * scale).softmax(-1)))
    for scale in (1.5, 2.5, 3.5, 4.5):
        x = torch.randn(5, 12)
        torch.testing.assert_close(fused(x, scale), (fused.linear(x) * scale).softmax(-1))
    assert captures(fused) == 2
    fused = ct.fuse(Code(lambda m, x: (m.linear(x) * m.scale).softmax(-1), scale=1.0))
    for scale in (1.5, 2.5, 3.5, 4.5):
        fused.scale = scale
        torch.testing.assert_close(fused(x), (fused.linear(x) * scale).softmax(-1))
    assert captures(fused) == 2


@pytest.mark.parametrize(("way", "create_graph"), [("fuse", False), ("fuse", True), ("operators", False)])
def test_a_gradient_within_a_forward(way: str, create_graph: bool) -> None:
    """The graph breaks at the gradient; Dynamo would capture the Python code of the backward pass.

    Compiled graphs are differentiated once.
    """

    def code(m: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.gelu(m.linear(x)).logsumexp(-1).sum(), x, create_graph=create_graph)
        return grad.square().sum(-1)

    module, x = Code(code), torch.randn(5, 12)
    changed = WAYS[way](module)
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    torch.testing.assert_close(changed(x), module(x))
    # PyTorch 2.11 captures some code of its own around the backward pass.
    assert frames["total"] - before < (10 if torch.__version__ >= (2, 13) else 100)


def test_a_captured_call_records_nothing_for_profilers() -> None:
    """Dynamo's two calls around each graph, before PyTorch 2.15, take 6 us, a third of what it takes at all."""
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Softmax(-1)), torch.rand(3, 4)

    def called(run: Any) -> list[str]:
        names: list[str] = []
        run(x)
        sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
        try:
            run(x)
        finally:
            sys.setprofile(None)
        return [name for name in names if name.startswith("record_")]

    assert torch.__version__ >= (2, 15) or called(torch.compile(module, backend="eager"))
    assert not called(ct.fuse(module))


@pytest.mark.parametrize("first", [False, True])
def test_hooks_of_all_modules_run(first: bool) -> None:
    """Whether they are registered before the first call or after it."""
    module, x = ct.fuse(nn.Sequential(nn.Linear(8, 16), nn.Softmax(dim=1)), only_gains=False), torch.randn(4, 8)
    seen: list[str] = []

    def register() -> Any:
        return nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))

    if not first:
        module(x)
    hook = register()
    result = module(x)
    assert [name for name in seen if name in ("Linear", "Softmax")] == ["Linear", "Softmax"]
    hook.remove()
    seen.clear()
    torch.testing.assert_close(module(x), result)
    assert not seen and any(part.plans for part in ct.explain(module).fused)


def test_explanations_of_what_dynamo_does_not_capture() -> None:
    for module, where in ((nn.GRU(12, 12), "its own code"), (Code(lambda m, x: m.inner(x), inner=nn.LSTM(12, 12)), "")):
        fused, x = ct.fuse(module), torch.randn(3, 5, 12)
        torch.testing.assert_close(fused(x), module(x))
        if torch.__version__ < (2, 15):
            told = str(ct.explain(fused))
            assert where in told and "not captured: Dynamo does not support RNN" in told


def test_a_mask_that_may_be_missing() -> None:
    module = Code(lambda m, x, mask=None: (m.linear(x) if mask is None else m.linear(x) + mask).softmax(-1))
    fused, x, mask = ct.fuse(module), torch.randn(5, 12), torch.randn(12)
    for arguments in ((x,), (x, mask), (x, None), (x, 2 * mask)):
        torch.testing.assert_close(fused(*arguments), module(*arguments))


class _Missing:
    """What a release of PyTorch lacks."""


def test_releases_that_no_test_has_seen_warn_of_missing_corrections(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyfuse.torch import corrections

    monkeypatch.setattr(corrections, "_CORRECTIONS", (lambda: mock.patch.object(_Missing, "method"),))
    corrections._warn_of_release.cache_clear()
    plain, x = Code(lambda m, x: m.linear(x).softmax(-1)), torch.randn(5, 12)
    with pytest.raises(AttributeError, match="does not have the attribute"):
        ct.fuse(plain)(x)
    monkeypatch.setattr(corrections, "_UNTESTED", (2, 0))
    with pytest.warns(UserWarning, match="tested with PyTorch 2.11 to 2.15(.|\n)*_Missing(.|\n)*may stay wrong"):
        torch.testing.assert_close(ct.fuse(plain)(x), plain(x))


# Errors that are caught, and the order of keyword arguments ----------------------------------------------------------


def _of_the_module(m: Any) -> Any:
    return m.factor


def _of_a_dictionary(m: Any) -> Any:
    return m.entries["factor"]


def _of_a_submodule(m: Any) -> Any:
    return m.linear.factor


def _of_a_class(m: Any) -> Any:
    return _Missing.factor  # type: ignore[attr-defined]


def _set_factor(m: Any) -> None:
    m.factor = m.linear.factor = m.entries["factor"] = _Missing.factor = 5.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("read", [_of_the_module, _of_a_dictionary, _of_a_submodule, _of_a_class])
def test_what_is_missing_is_found_once_it_is_there(read: Any) -> None:
    """Dynamo follows the error that is caught, and has no guard on what is missing."""

    def code(m: Any, x: Any) -> Any:
        try:
            factor = read(m)
        except (AttributeError, KeyError):
            factor = 1.0
        return m.linear(x).softmax(-1) * factor

    plain, x = Code(code, entries={}), torch.randn(5, 12)
    fused = ct.fuse(copy.deepcopy(plain))
    try:
        for change in (None, _set_factor, None):
            if change is not None:
                change(plain)
                change(fused)
            torch.testing.assert_close(fused(x), plain(x))
    finally:
        if hasattr(_Missing, "factor"):
            del _Missing.factor


class _Registry(Mapping[str, float]):
    def __init__(self) -> None:
        self.entries: dict[str, float] = {}

    def __getitem__(self, key: str) -> float:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class _Numbers(Sequence[float]):
    """The end of which an IndexError tells, in the code of `collections.abc`."""

    def __init__(self) -> None:
        self.entries = [1.0]

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]

    def __len__(self) -> int:
        return len(self.entries)


def test_missing_keys_and_ends_of_sequences_are_captured_with_guards() -> None:
    def code(m: Any, x: Any) -> Any:
        try:
            factor = m.registry["factor"]
        except KeyError:
            factor = 2.0
        return m.linear(x).softmax(-1) * factor * m.registry.get("other", 3.0) * sum(m.numbers)

    plain, x = Code(code), torch.randn(5, 12)
    plain.registry, plain.numbers = _Registry(), _Numbers()
    fused = ct.fuse(copy.deepcopy(plain))
    for change in (
        lambda m: None,
        lambda m: m.registry.entries.update(factor=5.0),
        lambda m: m.registry.entries.update(other=7.0),
        lambda m: m.numbers.entries.append(4.0),
        lambda m: m.registry.entries.clear(),
    ):
        for module in (plain, fused):
            change(module)
        torch.testing.assert_close(fused(x), plain(x))
    assert not [part for part in fused.explain().left if "not captured" in part.reason]


@pytest.mark.parametrize("caught", [ValueError, Exception])
def test_errors_of_operations_that_are_caught(caught: type[Exception]) -> None:
    """From PyTorch 2.14 on Dynamo follows them as RuntimeErrors, whatever the operation raises."""

    def code(m: Any, x: Any, p: float) -> Any:
        y = m.linear(x).softmax(-1)
        try:
            y = F.dropout(y, p)
        except caught as error:
            y = y * len(str(error))
        return y.exp()

    plain, x = Code(code), torch.randn(5, 12)
    fused = ct.fuse(copy.deepcopy(plain))
    for p in (2.0, 0.0, 2.0):
        torch.testing.assert_close(fused(x, p), plain(x, p))


def test_the_order_of_keyword_arguments() -> None:
    def code(m: Any, **given: Any) -> Any:
        first, *others = given.values()
        return {name: (m.linear(first) * other).softmax(-1) for name, other in zip(given, [*others, 2.0], strict=True)}

    plain = Code(code)
    fused = ct.fuse(copy.deepcopy(plain))
    a, b, order = torch.randn(5, 12), torch.randn(5, 12), torch.randn(5, 12)
    for given in ({"module": a, "order": order, "b": b}, {"order": order, "module": a, "b": b}, {"b": b, "order": a}):
        expected = plain(**given)
        found = fused(**given)
        assert list(found) == list(expected)
        torch.testing.assert_close(found, expected)
