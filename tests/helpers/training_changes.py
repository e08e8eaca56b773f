"""More ways to train, in which rates, modes, sizes or the model itself change on the way; see `training`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from training import STEPS, Losses, Run

# Schedules and modes ------------------------------------------------------------------------------------------------


def scheduled(run: Run) -> Losses:
    optimizer = run.sgd()
    schedules: list[Any] = [
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=7),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
    ]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for step in range(STEPS):
        loss = run.step(optimizer, step)
        schedules[step % len(schedules)].step()
        if step % 5 == 0:
            plateau.step(round(loss, 4))
        yield loss


def frozen_and_thawed(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        if step % 10 == 5:
            run.model.up.requires_grad_(False)
            run.model.energy.linear.bias.requires_grad_(False)
        if step % 10 == 0:
            run.model.requires_grad_()
        yield run.step(optimizer, step)


def loaded_midway(run: Run) -> Losses:
    optimizer = run.sgd()
    kept: list[Any] = []
    for step in range(STEPS):
        if step == 10:
            kept = copy.deepcopy([run.model.state_dict(), optimizer.state_dict()])
        if step == 25:
            run.model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        if step == 40:
            run.model.load_state_dict(copy.deepcopy(kept[0]), assign=True)
            optimizer = run.sgd()
        yield run.step(optimizer, step)


def sizes_change(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        yield run.step(optimizer, step, rows=(9, 4, 17, 2, 9, 30)[step % 6])


def evaluated_between(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        yield run.step(optimizer, step)
        yield run.evaluated()
        with torch.inference_mode():
            yield float(run.loss(step))
        if step % 10 == 9:  # statistics stay, gradients go on
            run.model.choice.bn.eval()
        if step % 10 == 4:
            run.model.choice.bn.train()


def groups_added(run: Run) -> Losses:
    run.model.up.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
    for step in range(STEPS):
        if step == 20:
            run.model.up.requires_grad_()
            optimizer.add_param_group({"params": list(run.model.up.parameters()), "lr": 3e-2})
        yield run.step(optimizer, step)


# Changes of the model -----------------------------------------------------------------------------------------------


def tied(run: Run) -> Losses:
    """One weight in two heads, in the optimizer once."""
    run.model.energy.linear.weight.data = run.model.energy.linear.weight.data.clone()
    run.model.choice.gemm.weight = nn.Parameter(run.model.choice.gemm.weight.detach()[:4].clone())
    run.model.choice.gemm.bias = nn.Parameter(run.model.choice.gemm.bias.detach()[:4].clone())
    run.model.choice.bn = nn.BatchNorm1d(4, dtype=run.dtype)
    run.model.energy.linear.weight = run.model.choice.gemm.weight
    optimizer = run.sgd()
    for step in range(STEPS):
        yield run.step(optimizer, step)
        assert run.model.energy.linear.weight is run.model.choice.gemm.weight


def replaced(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        if step % 10 == 5:
            run.model.up.weight = nn.Parameter(run.model.up.weight.detach() * 0.9)
            optimizer = run.sgd()
        if step % 10 == 9:
            with torch.no_grad():
                run.model.energy.linear.weight[0].zero_()
        yield run.step(optimizer, step)


def copied_midway(run: Run) -> Losses:
    optimizer = run.sgd()
    for step in range(STEPS):
        if step in (10, 30):
            run.model = copy.deepcopy(run.model)
            optimizer = run.sgd()
        yield run.step(optimizer, step)


def widened_midway(run: Run) -> Losses:
    """Another dtype for a while."""
    before = run.dtype
    for step in range(30):
        if step in (10, 20):
            run.dtype = torch.float64 if step == 10 else before
            run.model.to(torch.float32 if run.dtype is before and before is torch.float64 else run.dtype).to(run.dtype)
        if step % 10 == 0:
            optimizer = run.sgd()
        yield run.step(optimizer, step)


def normalised_weights(run: Run) -> Losses:
    """Weights that are computed from parameters in each call."""
    parametrizations.weight_norm(run.model.energy.linear, "weight")
    parametrizations.orthogonal(run.model.up, "weight")
    optimizer = run.sgd()
    for step in range(30):
        yield run.step(optimizer, step)
    torch.nn.utils.parametrize.remove_parametrizations(run.model.up, "weight")
    optimizer = run.sgd()
    for step in range(10):
        yield run.step(optimizer, step)


def pruned(run: Run) -> Losses:
    prune.l1_unstructured(run.model.energy.linear, "weight", 0.3)
    optimizer = run.sgd()
    for step in range(20):
        yield run.step(optimizer, step)
    prune.remove(run.model.energy.linear, "weight")
    yield run.evaluated()


WAYS: list[Callable[[Run], Losses]] = [
    scheduled,
    frozen_and_thawed,
    loaded_midway,
    sizes_change,
    evaluated_between,
    groups_added,
    tied,
    replaced,
    copied_midway,
    widened_midway,
    normalised_weights,
    pruned,
]
