"""Ways to train a small model, for `torch/test_training.py`: each a function of a `Run` that yields losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_models as models
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import cupyfuse.torch as ct

STEPS = 50
ROWS = 9


class Net(nn.Module):
    """A layer with GELU, a normalisation, two heads; of PyTorch's modules or of drop-in ones, with the same state."""

    def __init__(self, drop_ins: bool = False):
        super().__init__()
        self.drop_ins = drop_ins
        self.up = (ct.LinearGELU if drop_ins else nn.Linear)(6, 8)
        self.norm = nn.LayerNorm(8)
        self.choice = ct.HeadSoftmax(8, 5) if drop_ins else models.HeadSoftmax(8, 5)
        self.energy = ct.HeadLogSumExp(8, 4) if drop_ins else models.HeadLogSumExp(8, 4)

    def forward(self, x: Any) -> Any:
        h = self.features(x)
        return self.choice(h), self.energy(h)

    def features(self, x: Any) -> Any:
        h = self.up(x)
        return self.norm(h if self.drop_ins else F.gelu(h))


class Run:
    """A model in training: plain, fused or of drop-in modules.

    Attributes
    ----------
    model : Module
    fused : callable
        What makes of a plain module one like `model`; the identity unless that is fused.
    """

    def __init__(self, model: Any, fused: Callable[[Any], Any], dtype: torch.dtype):
        self.model, self.fused, self.dtype = model, fused, dtype

    def data(self, step: int, rows: int = ROWS) -> Any:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(rows, 6, generator=generator, dtype=torch.float64).to(self.dtype)

    def loss(self, step: int = 0, rows: int = ROWS, model: Any = None) -> Any:
        return measured((self.model if model is None else model)(self.data(step, rows)))

    def step(self, optimizer: Any, step: int, rows: int = ROWS) -> float:
        optimizer.zero_grad()
        loss = self.loss(step, rows)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def evaluated(self, model: Any = None) -> float:
        """The loss of a model as it is applied; it stays in the mode in which it was."""
        model = self.model if model is None else model
        before = model.training
        model.eval()
        with torch.no_grad():
            found = float(self.loss(10**6, model=model))
        model.train(before)
        return found

    def sgd(self, lr: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)


def measured(outputs: Any) -> Any:
    choice, energy = outputs
    return (choice[:, 0] - 0.6).square().mean() + (energy - 1).square().mean()


Losses = Iterator[float]


# Weights that others follow -----------------------------------------------------------------------------------------


def averaged_by_data(run: Run) -> Losses:
    """An average beside the model, changed through `data`, in use from time to time."""
    optimizer, average = run.sgd(), run.fused(copy.deepcopy(run.model).requires_grad_(False))
    for step in range(STEPS):
        yield run.step(optimizer, step)
        for slow, fast in zip(average.parameters(), run.model.parameters(), strict=True):
            slow.data.copy_(0.9 * slow.data + 0.1 * fast.data)
        yield run.evaluated(average)


def averaged_by_lerp(run: Run) -> Losses:
    optimizer, average = run.sgd(), run.fused(copy.deepcopy(run.model))
    for step in range(STEPS):
        yield run.step(optimizer, step)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(run.model.parameters()), 0.1)
            for slow, fast in zip(average.buffers(), run.model.buffers(), strict=True):
                slow.copy_(fast)
        yield run.evaluated(average)


def averaged_by_state(run: Run) -> Losses:
    """The average's weights are swapped in to evaluate, and out again."""
    optimizer = run.sgd()
    average = {k: v.detach().clone() for k, v in run.model.state_dict().items()}
    for step in range(STEPS):
        yield run.step(optimizer, step)
        for name, value in run.model.state_dict().items():
            average[name] = value.detach().clone() if value.dtype is torch.int64 else average[name].lerp(value, 0.1)
        kept = copy.deepcopy(run.model.state_dict())
        run.model.load_state_dict(average)
        yield run.evaluated()
        run.model.load_state_dict(kept)


def stochastic_averaging(run: Run) -> Losses:
    optimizer = run.sgd()
    average = swa_utils.AveragedModel(run.model)
    schedule = swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)
    for step in range(STEPS):
        yield run.step(optimizer, step)
        if step >= 20 and step % 5 == 0:
            average.update_parameters(run.model)
            schedule.step()
            swa_utils.update_bn([run.data(k) for k in range(3)], average)
            yield run.evaluated(average)


def exponential_averaging(run: Run) -> Losses:
    optimizer = run.sgd()
    average = swa_utils.AveragedModel(run.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True)
    for step in range(STEPS):
        yield run.step(optimizer, step)
        average.update_parameters(run.model)
        yield run.evaluated(average)


def looking_ahead(run: Run) -> Losses:
    """Slow weights that the fast ones return to every few steps."""
    optimizer = run.sgd()
    slow = [p.detach().clone() for p in run.model.parameters()]
    for step in range(STEPS):
        yield run.step(optimizer, step)
        if step % 5 == 4:
            for kept, p in zip(slow, run.model.parameters(), strict=True):
                kept += 0.5 * (p.detach() - kept)
                p.data = kept.clone()


# Updates by hand ----------------------------------------------------------------------------------------------------


def by_data(run: Run) -> Losses:
    for step in range(STEPS):
        run.model.zero_grad()
        loss = run.loss(step)
        loss.backward()
        for p in run.model.parameters():
            p.data += -0.05 * p.grad
        yield float(loss.detach())


def perturbed(run: Run) -> Losses:
    """Sharpness-aware: the gradient is that at a point nearby, the step is taken where the model was."""
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        moves = [0.05 * p.grad for p in run.model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(run.model.parameters()), moves)
        optimizer.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(run.model.parameters()), moves)
        optimizer.step()
        yield float(loss.detach())


def functional(run: Run) -> Losses:
    """Weights that are no parameters, new ones in each step."""
    weights = {k: v.detach().clone().requires_grad_() for k, v in run.model.named_parameters()}
    for step in range(STEPS):
        loss = measured(torch.func.functional_call(run.model, weights, (run.data(step),)))
        gradients = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            k: (v - 0.05 * g).detach().requires_grad_() for (k, v), g in zip(weights.items(), gradients, strict=True)
        }
        yield float(loss.detach())
    yield run.evaluated()


def transformed(run: Run) -> Losses:
    """By `torch.func.grad`, in evaluation mode, since that refuses changes of buffers."""
    run.model.eval()
    weights = {k: v.detach().clone() for k, v in run.model.named_parameters()}

    def loss(weights: Any, x: Any) -> Any:
        return measured(torch.func.functional_call(run.model, weights, (x,)))

    for step in range(10):
        gradients, value = torch.func.grad_and_value(loss)(weights, run.data(step))
        weights = {k: v - 0.05 * gradients[k] for k, v in weights.items()}
        yield float(value)
    run.model.train()


def in_the_backward_pass(run: Run) -> Losses:
    """Each parameter moves as soon as its gradient is there, which is then dropped."""
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in run.model.parameters()}

    def move(p: Any) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(move) for p in run.model.parameters()]
    for step in range(STEPS):
        loss = run.loss(step)
        loss.backward()
        yield float(loss.detach())
    for handle in handles:
        handle.remove()


# Gradients ----------------------------------------------------------------------------------------------------------


def accumulated(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        loss = run.loss(step) / 3
        loss.backward()
        yield float(loss.detach())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def clipped(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        yield float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.2))
        torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.05)
        optimizer.step()
        yield float(loss.detach())


def scaled(run: Run) -> Losses:
    """Losses scaled up; steps with infinite gradients are left out."""
    optimizer = run.sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.loss(step)
        scaler.scale(loss * (float("inf") if step % 7 == 3 else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield float(loss.detach())
        yield scaler.get_scale()


def checkpointed(run: Run, reentrant: bool = False) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        x = run.data(step).requires_grad_()
        loss = measured(checkpoint(run.model, x, use_reentrant=reentrant))
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def checkpointed_reentrant(run: Run) -> Losses:
    yield from checkpointed(run, True)


def gradient_penalty(run: Run) -> Losses:
    """A loss with a gradient in it."""
    optimizer = run.sgd(0.02)
    for step in range(10):
        optimizer.zero_grad()
        x = run.data(step).requires_grad_()
        loss = measured(run.model(x))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def two_passes_of_one_graph(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
        yield float(loss.detach())


WAYS: list[Callable[[Run], Losses]] = [
    averaged_by_data,
    averaged_by_lerp,
    averaged_by_state,
    stochastic_averaging,
    exponential_averaging,
    looking_ahead,
    by_data,
    perturbed,
    functional,
    transformed,
    in_the_backward_pass,
    accumulated,
    clipped,
    scaled,
    checkpointed,
    checkpointed_reentrant,
    gradient_penalty,
    two_passes_of_one_graph,
]
