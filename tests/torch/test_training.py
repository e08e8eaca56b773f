"""Training as people train, through `fuse` and through drop-in modules: losses are those of PyTorch alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import training
import training_changes
from training import STEPS, Losses, Net, Run

import cupyfuse.torch as ct

FORMS = ("fuse", "drop-ins")
WAYS = [*training.WAYS, *training_changes.WAYS]


def runs(form: str, dtype: torch.dtype) -> tuple[Run, Run]:
    """A plain model in training, and one with the same parameters that runs through us."""
    torch.manual_seed(0)
    plain = Net().to(dtype)
    if form == "fuse":
        ours, fused = ct.fuse(copy.deepcopy(plain), only_gains=False), lambda m: ct.fuse(m, only_gains=False)
    else:
        ours, fused = Net(drop_ins=True).to(dtype), lambda m: m
        ours.load_state_dict(plain.state_dict())
    return Run(plain, lambda m: m, dtype), Run(ours, fused, dtype)


def ran(run: Run) -> bool:
    """Whether a chain ran."""
    return any(part.plans for part in ct.explain(run.model).fused)


def found(way: Callable[[Run], Losses], run: Run) -> list[float]:
    torch.manual_seed(1)
    return list(way(run))


# No transform of functions is ours, and some regions of checkpoints are PyTorch's.
ELSEWHERE = ("transformed", "checkpointed", "checkpointed_reentrant")


@pytest.mark.rotates
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_float64(way: Callable[[Run], Losses], form: str) -> None:
    """Rounding of 1e-16 in each of fifty steps, none of which magnifies it much."""
    plain, ours = runs(form, torch.float64)
    want, got = found(way, plain), found(way, ours)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ours.model.state_dict(), plain.model.state_dict(), rtol=1e-8, atol=1e-9)
    assert len(set(want)) > 5 and (ran(ours) or way.__name__ in ELSEWHERE)


@pytest.mark.rotates
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS[::4], ids=lambda way: way.__name__)
def test_float32(way: Callable[[Run], Losses], form: str) -> None:
    """As far from training in float64 as PyTorch's own float32 is, within a few times."""
    exact, _ = runs(form, torch.float64)
    plain, ours = runs(form, torch.float32)
    want = torch.tensor(found(way, exact), dtype=torch.float64)
    eager, got = (torch.tensor(found(way, run), dtype=torch.float64) for run in (plain, ours))
    # A floor for errors that happen to cancel: one rounding of the largest loss in each step.
    floor = float(want.abs().max()) * 2**-24 * STEPS
    assert float((got - want).abs().max()) <= 4 * float((eager - want).abs().max()) + floor


# Optimizers ---------------------------------------------------------------------------------------------------------


def optimizers() -> Iterator[Any]:
    """Every optimizer of PyTorch's for dense gradients, in each of its forms, with what it is asked for beside."""
    extra: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        "Adam": {"amsgrad": True, "eps": 1e-4},
        "AdamW": {"maximize": False, "eps": 1e-4},
        "RMSprop": {"centered": True, "momentum": 0.5, "eps": 1e-2},
        "LBFGS": {"line_search_fn": "strong_wolfe", "max_iter": 4},
    }
    for name, kind in vars(torch.optim).items():
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)) or kind is torch.optim.Optimizer:
            continue
        if name == "SparseAdam":
            continue
        known = inspect.signature(kind).parameters
        forms: list[dict[str, bool]] = [{form: True} for form in ("fused", "foreach") if form in known] or [{}]
        for form in forms:
            options = {**extra.get(name, {}), **form}
            if "eps" in known and "eps" not in options and name != "Adafactor":
                options["eps"] = 1e-4
            yield pytest.param(kind, options, id="-".join([name, *form]))


@pytest.mark.rotates
@pytest.mark.parametrize(("kind", "options"), list(optimizers()))
def test_optimizers(kind: Any, options: dict[str, Any]) -> None:
    """With a closure, and of matrices alone where an optimizer takes no others.

    The bias before BatchNorm has no gradient but rounding, which optimizers that divide by its size would magnify.
    """

    def way(run: Run) -> Losses:
        chosen = {n: p for n, p in run.model.named_parameters() if n != "choice.gemm.bias"}
        if kind.__name__ == "Muon":
            chosen = {n: p for n, p in chosen.items() if p.dim() == 2}
        optimizer = kind(list(chosen.values()), lr=1e-2, **options)
        for step in range(STEPS):

            def closure(step: int = step) -> Any:
                optimizer.zero_grad()
                loss = run.loss(step)
                loss.backward()
                return loss

            yield float(optimizer.step(closure).detach())
            yield run.evaluated()

    plain, ours = runs("fuse" if options.get("foreach") else "drop-ins", torch.float64)
    want, got = found(way, plain), found(way, ours)
    # Muon's iteration is in bfloat16: a rounding may fall on either side there. LBFGS divides by small differences.
    tolerance = {"Muon": 1e-2, "LBFGS": 1e-6}.get(kind.__name__, 1e-9)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance / 100)
    assert len(set(want)) > STEPS and ran(ours)


def test_sparse_gradients() -> None:
    class Bag(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
            self.net = Net()

        def forward(self, tokens: Any) -> Any:
            return self.net(self.embedding(tokens))

    torch.manual_seed(0)
    plain = Bag().double()
    ours = ct.fuse(copy.deepcopy(plain), only_gains=False)
    losses = []
    for model in (plain, ours):
        sparse = torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-2)
        dense = torch.optim.Adagrad(model.net.parameters(), lr=1e-2, eps=1e-4)
        found = []
        for step in range(STEPS):
            tokens = torch.randint(0, 20, (7, 4), generator=torch.Generator().manual_seed(step))
            choice, energy = model(tokens)
            loss = choice[:, 0].square().mean() + energy.square().mean()
            sparse.zero_grad(), dense.zero_grad()
            loss.backward()
            sparse.step(), dense.step()
            found.append(float(loss.detach()))
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)


def test_autocast() -> None:
    """A forward pass in bfloat16 of parameters in float32, in training; losses to its eighth binary digit."""
    plain, ours = runs("fuse", torch.float32)

    def way(run: Run) -> Losses:
        optimizer = run.sgd(0.02)
        for step in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                choice, energy = run.model(run.data(step))
            loss = (choice.float()[:, 0] - 0.6).square().mean() + (energy.float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            yield float(loss.detach())

    torch.testing.assert_close(found(way, ours), found(way, plain), rtol=2**-6, atol=2**-7)


def test_two_models_take_turns() -> None:
    """One's output is the other's input, each is trained while the other stands still."""
    losses = []
    for made in (lambda m: m, lambda m: ct.fuse(m, only_gains=False)):
        torch.manual_seed(0)
        first, second = (made(Net().double()) for _ in range(2))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (first, second)]
        found = []
        for step in range(STEPS):
            x = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            first.requires_grad_(step % 2 == 0), second.requires_grad_(step % 2 == 1)
            choice, energy = second(torch.cat([first(x)[0], first(x)[1]], 1))
            loss = (1 - step % 2 * 2) * choice[:, 0].mean() + energy.square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            optimizers[step % 2].step()
            found.append(float(loss.detach()))
        losses.append(found)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
