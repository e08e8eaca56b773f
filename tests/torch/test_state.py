"""What modules keep, draw and count from call to call, and what is written in place, is as in eager."""

from __future__ import annotations

import copy
import enum
import fractions
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_steps import DOUBLE, Code, near, same_steps, step
from torch_support import close, fused_chains, pair

import cupyfuse.torch as ct

# State --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [False, True])
def test_submodules_that_are_left_run_once(hook: bool) -> None:
    module = Code(lambda m, y: (m.norm(m.drop(y)), y.exp().softmax(-1)), drop=nn.Dropout(0.5), norm=nn.BatchNorm1d(12))
    plain, fused, x = pair(module, "cpu", DOUBLE)
    for part in (plain.drop, plain.norm, fused.drop, fused.norm) if hook else ():
        part.register_forward_hook(lambda *a: None)
    for _ in range(2):
        torch.manual_seed(3)
        wanted = plain(x)
        torch.manual_seed(3)
        near(fused(x), wanted)
    near(list(fused.buffers()), list(plain.buffers()))
    assert fused_chains(fused)


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x.mul_(-0.5)


def test_a_submodule_that_is_left_may_change_its_argument() -> None:
    def code(m: Any, y: Any) -> Any:
        y = F.gelu(y).mul(3)
        z = y.exp()
        return (m.act(y) + y).softmax(1) + z

    fused = same_steps(Code(code, act=Counting()))
    assert fused_chains(fused) and fused.act.calls == 2


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1)], ids=str)
@pytest.mark.parametrize("module", [True, False])
def test_running_statistics_of_any_shape(module: bool, shape: tuple[int, ...]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Any) -> Any:
            n = self.norm
            x = n(x) if module else F.batch_norm(x, n.running_mean, n.running_var, n.weight, n.bias, True, 0.3)
            return x.exp().softmax(1)

    plain = Normed().double()
    fused = ct.fuse(copy.deepcopy(plain))
    for _ in range(2):
        x = torch.randn(shape, dtype=DOUBLE)
        near(fused(x), plain(x))
    near(list(fused.buffers()), list(plain.buffers()))


def test_normalisation_of_images_wants_images() -> None:
    fused = ct.fuse(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm2d(8), nn.ReLU()))
    with pytest.raises(ValueError, match="expected 4D input"):
        fused(torch.randn(5, 12))


@pytest.mark.parametrize(
    "draw",
    [lambda y: F.gumbel_softmax(y, dim=-1), lambda y: F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)],
    ids=["gumbel_softmax", "attention"],
)
def test_random_numbers_come_in_order(draw: Any) -> None:
    class Drawing(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x.exp() + 1
            a, b = draw(y), F.dropout(x, 0.5, True)
            return a, b, (y * 2).softmax(-1)

    x = torch.randn(2, 5, 12, dtype=DOUBLE)
    torch.manual_seed(3)
    wanted = Drawing()(x)
    torch.manual_seed(3)
    near(ct.fuse(Drawing())(x), wanted)


def test_lazy_parameters_are_random_numbers_that_come_once() -> None:
    def run(wrap: Callable[[nn.Module], Any]) -> tuple[Any, list[Any]]:
        torch.manual_seed(3)
        module = wrap(nn.Sequential(nn.LazyLinear(12), nn.GELU(), nn.LazyLinear(12), nn.Softmax(-1)))
        return module, [(module(torch.randn(5, 12)), torch.randn(3)) for _ in range(3)]

    fused, found = run(ct.fuse)
    torch.testing.assert_close(found, run(lambda m: m)[1])
    assert fused_chains(fused)


def test_the_original_keeps_its_mode() -> None:
    plain = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.5), nn.BatchNorm1d(12))
    ct.fuse(plain).eval()
    assert all(part.training for part in plain.modules())


def test_grad_mode_is_left_as_it_was() -> None:
    def code(m: Any, y: Any) -> Any:
        with torch.no_grad():
            z = F.gelu(m.linear(y)).softmax(-1)
        return (y * z).exp().softmax(-1)

    same_steps(Code(code))
    assert torch.is_grad_enabled()


def test_powers_of_negative_numbers() -> None:
    """In what is left to PyTorch, too, whose `torch.fx` would write `-2.0 ** x`."""

    def powers(y: Any) -> tuple[Any, ...]:
        return (-2.0) ** y.detach().round(), (-2) ** y.detach().round().long(), ((-0.5) ** y.detach().round()).cumsum(1)

    same_steps(Code(lambda m, y: (*powers(y), y.exp().softmax(-1))))
    recomputed = torch.utils.checkpoint.checkpoint
    same_steps(Code(lambda m, y: (*recomputed(powers, y, use_reentrant=False), y.exp().softmax(-1))))


def test_numbers_that_change_are_found_in_lists() -> None:
    """Dynamo makes them symbols, which equal no constant: `torch.compile` skips no layer from the second call on."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(5))

        def forward(self, x: Any, skipped: Any, pairs: Any) -> Any:
            for k, layer in enumerate(self.layers):
                if k not in skipped and (k, 5) not in [(n, 5) for n in pairs]:
                    x = x + F.silu(layer(x))
            return x.softmax(-1)

    plain, fused, x = pair(Skipping(), "cpu")
    for skipped in ([1], [2], (3,), [3, 4], [0, 1], (2,), {4: 0}, [], [1]):
        close(fused(x, skipped, ()), plain(x, skipped, ()))
        close(fused(x, (), list(skipped)), plain(x, (), list(skipped)))
    assert fused_chains(fused)


def _rolling(m: Any, y: Any) -> Any:
    m.memory.append(y.detach() * 2)
    return torch.stack(list(m.memory)).sum(0).tanh() * y / m.memory.maxlen


def _extended(m: Any, y: Any) -> Any:
    m.memory.extendleft([y.exp().detach(), y.tanh().detach()])
    return (sum(m.memory) * y).softmax(-1) * len(m.memory * 2)


def _copied(m: Any, y: Any) -> Any:
    memory = m.memory.copy()
    memory.append(y.detach())
    memory.append(y.detach() * 2)
    m.memory = memory
    return (sum(memory) * y).softmax(-1) * len(memory + deque([1]))


def _kept_twice(m: Any, y: Any) -> Any:
    memory = m.memory
    memory.append(y.detach())
    m.other = memory
    return (sum(m.memory) * y).softmax(-1) * (1 if m.other is m.memory else 2)


@pytest.mark.parametrize("code", [_rolling, _extended, _copied, _kept_twice])
def test_deques_keep_their_length(code: Any) -> None:
    """Dynamo takes the `maxlen` of a deque that exists before the call for None."""
    plain, fused, _ = pair(Code(code, memory=deque(maxlen=3)), "cpu", DOUBLE)
    for _ in range(6):
        x = torch.randn(5, 12, dtype=DOUBLE)
        near(step(fused, x), step(plain, x))
        near(list(fused.memory), list(plain.memory))
    assert fused.memory.maxlen == 3
    assert fused_chains(fused) or (torch.__version__ < (2, 13) and code in (_extended, _copied))  # graphs break there


def _recent(m: Any, y: Any) -> Any:
    m.memory.move_to_end(next(iter(m.memory)))
    return y.softmax(-1)


def _recent_and_new(m: Any, y: Any) -> Any:
    m.memory.move_to_end("b", last=False)
    m.memory[str(len(m.memory))] = 1
    return y.softmax(-1) * m.memory["b"]


@pytest.mark.parametrize("code", [_recent, _recent_and_new])
def test_dictionaries_keep_the_order_of_their_items(code: Any) -> None:
    """Dynamo stores items that are new or changed alone."""
    plain, fused, _ = pair(Code(code, memory=OrderedDict(a=1, b=2, c=3)), "cpu", DOUBLE)
    for _ in range(4):
        x = torch.randn(5, 12, dtype=DOUBLE)
        near(step(fused, x), step(plain, x))
        assert list(fused.memory.items()) == list(plain.memory.items())


def test_another_length_of_a_deque() -> None:
    plain, fused, x = pair(Code(_rolling, memory=deque(maxlen=3)), "cpu", DOUBLE)
    for length in (2, 3, 2, 4):
        for module in (plain, fused):
            module.memory = deque([x, x], length)
        near(step(fused, x), step(plain, x))


class Level(enum.IntEnum):
    LOW = 3
    HIGH = 5


class Whole(int):
    """A subclass of a number's type."""


@dataclass
class Kept:
    """An object that compares by a value of its own."""

    value: int

    def __eq__(self, other: Any) -> bool:
        return bool(self.value == other)


COMPARED: dict[str, Callable[..., Any]] = {
    "a member": lambda k: k == Level.HIGH,
    "a member before it": lambda k: Level.HIGH == k,  # noqa: SIM300
    "no member": lambda k: k != Level.HIGH,
    "the member of a pair": lambda k: (k, 1) == (Level.HIGH, 1),
    "one of members": lambda k: k in (Level.LOW, Level.HIGH),
    "a member among numbers": lambda k: Level.HIGH in (k, 9),
    "a derived number": lambda k: Whole(5) == k,
    "a fraction": lambda k: k / 2 == fractions.Fraction(5, 2),
    "an object": lambda k: k == Kept(5),
    "an object before it": lambda k: Kept(5) == k,
    "a pair": lambda k: k == (5,),
    "nothing": lambda k: k is None or k == None,  # noqa: E711
    "a string": lambda k: f"{k}" == "5",
    "a string among others": lambda k: f"{k}" in {"5", "7"},
    "a formatted string": lambda k: f"{k:03d}" == "005",
    "a string of an expression": lambda k: f"{2 * k}" == "10",
    "a formatted number": lambda k: format(k, "03d") == "005",
    "a number that is formatted without more": lambda k: format(k) == "5",
    "a filled string": lambda k: "layer{:02d}".format(k) == "layer05",  # noqa: UP032
    "a key of a filled string": lambda k: {"k5": True}.get("k{value}".format(value=k), False),  # noqa: UP032
    "a string that is filled with an expression": lambda k: "{0}{0:>3}".format(k + 1) == "6  6",
}


@pytest.mark.parametrize("source", ["shape", "attribute", "argument"])
@pytest.mark.parametrize("name", COMPARED)
def test_numbers_that_change_compare_as_numbers(name: str, source: str) -> None:
    """Dynamo makes them symbols, equal to nothing but plain numbers, and loads them in the place of their strings."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.count = nn.Linear(12, 12), 0

        def forward(self, x: Any, count: int) -> Any:
            k = {"shape": x.shape[0], "attribute": self.count, "argument": count}[source]
            y = torch.tanh(self.linear(x)) * 2
            return y.softmax(-1) if COMPARED[name](k) else y.sin()

    plain = Counted().double()
    fused = ct.fuse(copy.deepcopy(plain))
    for rows in (3, 4, 5, 6, 5, 7):
        plain.count = fused.count = rows
        x = torch.randn(rows, 12, dtype=DOUBLE)
        near(fused(x, rows), plain(x, rows))
    assert fused_chains(fused)


RANGES: dict[str, Callable[..., Any]] = {
    "numbers": lambda m, y: (lambda a, b, c: y * (100 * a + 10 * b + c))(*range(3)),
    "backwards": lambda m, y: y.unsqueeze(0).permute(*range(2, -1, -1)).exp(),
    "of the module": lambda m, y: y.softmax(-1) * len((lambda *given: given)(*m.positions)),
    "one of them": lambda m, y: y.softmax(-1) * (2 if (y.shape[0] in m.positions) is (y.shape[0] < 5) else 3),
    "a method": lambda m, y: y.exp() + y.new_full([*range(1, 2)], 0).sum() + max(*range(4, 9, 2)),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_have_their_numbers(name: str) -> None:
    """Dynamo passes start, stop and step as arguments, and counts numbers where it is asked for one."""
    plain, fused, x = pair(Code(RANGES[name], positions=range(5)), "cpu", DOUBLE)
    near(step(fused, x), step(plain, x))
    assert fused_chains(fused)


# In place -----------------------------------------------------------------------------------------------------------


def test_in_place_keeps_the_dtype() -> None:
    class Adding(nn.Module):
        def forward(self, x: Any, z: Any) -> Any:
            y = F.gelu(x).exp()
            y += z
            return y.softmax(1)

    x, z = torch.randn(5, 8), torch.randn(5, 8, dtype=DOUBLE)
    assert ct.fuse(Adding())(x, z).dtype == Adding()(x, z).dtype == torch.float32
    close(ct.fuse(Adding())(x, z), Adding()(x, z))


def test_arguments_that_share_memory() -> None:
    class Changing(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            z = y.exp() + 1
            x.mul_(2)
            return z, y.exp().softmax(-1) * z

    plain, fused = Changing(), ct.fuse(Changing())
    for share in (False, True, False):
        found = []
        for module in (plain, fused):
            torch.manual_seed(0)
            x = torch.randn(5, 12)
            found.append(module(x, x.view(5, 12) if share else x.clone()))
        close(found[1], found[0])


def test_strides_are_pytorchs() -> None:
    class Reading(nn.Module):
        def forward(self, x: Any) -> Any:
            y = (x.t() * 2).exp()
            return y, y.as_strided((3,), (1,))

    x = torch.randn(5, 12)
    close(ct.fuse(Reading())(x), Reading()(x))
