"""Random programs of calls, training, captured graphs and changes of weights: nothing is computed from stale ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_models as models
from changing_weights import Launching, entries, layer, pair
from support import HOST

from cupyfuse.cuda import fingerprint
from cupyfuse.torch.chains import executor, prepacked

OPERATIONS = 60  # of a program


class Program:
    """A module and its fused form, to which the same happens.

    Where graphs are captured, whole weights change: a replay need not notice a single element that nothing counts.
    """

    def __init__(self, host: Launching, monkeypatch: pytest.MonkeyPatch, seed: int):
        self.host, self.random = host, random.Random(seed)
        self.whole = seed % 2 == 0
        self.plain, self.fused, x = pair(models.HeadSum, "cpu")
        self.inputs = [x, x[:3]]
        self.optimizers = [torch.optim.SGD(module.parameters(), lr=1e-2) for module in (self.plain, self.fused)]
        self.first = layer(self.plain).weight.detach().clone()
        self.capturing, self.graph = False, 0
        self.replays: list[tuple[Any, ...]] = []
        self.unchecked = 0
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let captures record the checks that they launch, which do not run then; count calls that check nothing."""
        monkeypatch.setattr(fingerprint, "_RUNS_A_ROW", 1)
        monkeypatch.setattr(fingerprint, "_RUNS", 1)
        monkeypatch.setattr(prepacked, "_CALLS_BEFORE_RECORDING", 1)
        monkeypatch.setattr(prepacked, "_STATES", self.random.choice([3, 32]))
        monkeypatch.setattr(prepacked, "_captured_graph", lambda: self.graph)
        for module in (prepacked, executor):
            monkeypatch.setattr(module, "is_capturing", lambda: self.capturing)
        self._check, unchecked = prepacked.CheckedCache._check, prepacked.CheckedCache._changes_in_every_call

        def check(*call: Any) -> Any:
            if not self.capturing:
                return self._check(*call)
            self.replays.append(call)
            return None

        def changes_in_every_call(cache: Any) -> bool:
            found = unchecked(cache)
            self.unchecked += found
            return found

        monkeypatch.setattr(prepacked.CheckedCache, "_check", check)
        monkeypatch.setattr(prepacked.CheckedCache, "_changes_in_every_call", changes_in_every_call)

    # Changes of the weight
    def both(self, change: Callable[[Any], Any]) -> None:
        for module in (self.plain, self.fused):
            change(layer(module).weight)

    def silently(self) -> None:
        """Change the weight unseen by PyTorch."""
        factor = self.random.choice([-1.0, 0.5, 2.0])
        self.both(lambda weight: weight.data.mul_(factor))

    def counted(self) -> None:
        """Change the weight, or one element, as PyTorch counts."""
        row, col, number = self.random.randrange(9), self.random.randrange(40), self.random.choice([-2.0, 3.0])

        def change(weight: Any) -> None:
            with torch.no_grad():
                weight.mul_(-0.875) if self.whole else weight[row, col].add_(number)

        self.both(change)

    def back(self) -> None:
        """Make the weight what it was at first, unseen: where single elements may have changed, the module is told."""
        self.both(lambda weight: weight.data.copy_(self.first))
        if not self.whole:
            self.fused.refresh()

    # What happens
    def call(self) -> None:
        x = self.random.choice(self.inputs)
        with torch.no_grad():
            self._agree(x)

    def train(self) -> None:
        """One or more backward passes, mostly with a step of an optimizer, else with an unseen one by hand."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for _ in range(self.random.choice([1, 1, 3])):
            for result in self._agree(self.random.choice(self.inputs)):
                result.square().mean().backward()
        if self.random.random() < 0.8:
            for optimizer in self.optimizers:
                optimizer.step()
        else:
            self.silently()

    def change_and_call(self) -> None:
        self.counted()
        self.call()

    def call_after_a_silent_change(self) -> None:
        self.silently()
        self.call()

    def go_back_and_call(self) -> None:
        self.back()
        self.call()

    def change_stream(self) -> None:
        self.host.current = self.random.randrange(4)

    def refresh_after_a_silent_change(self) -> None:
        """Of one element, which no sample need show, or of all."""
        row, col = self.random.randrange(9), self.random.randrange(40)
        self.silently() if self.whole else self.both(lambda weight: weight.data[row, col].add_(3))
        self.fused.refresh()
        self.call()

    def other_memory(self) -> None:
        self.both(lambda weight: setattr(weight, "data", weight.data * 1.0))
        self.call()

    def capture(self) -> None:
        """Capture a call in a graph: nothing runs."""
        self.graph += 1
        self.capturing = True
        with torch.no_grad():
            self.fused(self.inputs[0])
        self.capturing = False

    def replay(self) -> None:
        """Replay what a graph checks: it leaves what is prepacked from the weights as they are."""
        if not self.whole or not self.replays:
            return
        cache, addresses, token, state, buffers, _ = self.random.choice(self.replays)
        if set(addresses) <= {p.data_ptr() for p in self.fused.parameters()}:
            self._check(cache, addresses, token, state, buffers, self.host.current)
            fresh, always = cache._execute.allocate(), torch.ones(1, dtype=torch.int32)
            cache._execute.run_if_changed(addresses, [a.data_ptr() for a in fresh], always.data_ptr(), 0)
            assert all(map(torch.equal, buffers.arrays, fresh)), "stale"

    def replay_after_a_silent_change(self) -> None:
        self.silently()
        self.replay()

    def change_often_go_back_and_replay(self) -> None:
        """The weight is as a replay saw it last, but other calls have packed others meanwhile."""
        self.back()
        self.replay()
        for _ in range(self.random.randrange(4)):
            self.change_and_call()
        self.back()
        self.replay()

    def _agree(self, x: Any) -> tuple[Any, Any]:
        want, got = self.plain(x), self.fused(x)
        size = float(want.detach().abs().max().clamp(min=1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5 * size)
        return want, got


LIKELY = [Program.train, Program.change_and_call] * 4
OTHERS = [
    *(Program.call, Program.call_after_a_silent_change, Program.go_back_and_call, Program.change_stream),
    *(Program.refresh_after_a_silent_change, Program.other_memory, Program.capture, Program.capture, Program.replay),
    *(Program.replay_after_a_silent_change, Program.change_often_go_back_and_replay),
]


@pytest.mark.parametrize("seed", [*range(6), 44, 58])  # the last two see that a check follows what has expired
def test_nothing_is_computed_from_stale_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    HOST.require()
    torch.manual_seed(seed)
    program = Program(Launching.in_place_of_gpu(monkeypatch), monkeypatch, seed)
    program.call()
    done = []
    for _ in range(OPERATIONS):
        operation = program.random.choice(LIKELY + OTHERS)
        done.append(operation.__name__)
        try:
            operation(program)
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(done[-12:])}: {error}") from error
        if float(layer(program.plain).weight.detach().abs().max()) > 100:
            program.back()
    assert program.unchecked and len(entries(program.fused)) >= 1
