"""Random programs of operations on elements, slices and concatenations of tensors with permuted dimensions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Step = Callable[[list[Any]], list[Any]]
UNARY: tuple[Callable[..., Any], ...] = (
    *(torch.neg, torch.sin, torch.sigmoid, torch.nn.functional.silu),
    *(lambda x: x * 0.5, lambda x: 1 - x, lambda x: x.clone(), lambda x: x.masked_fill(x > 0, 0.25)),
)
BINARY: tuple[Callable[..., Any], ...] = (
    *(torch.add, torch.mul, torch.maximum, lambda a, b: torch.add(a, b, alpha=2), lambda a, b: b - a),
    *(lambda a, b: torch.where(a > b, a, 2 * b), lambda a, b: torch.addcmul(a, a, b, value=0.5)),
)


@dataclass
class Program:
    """Some inputs, and steps that each add a value computed of the ones before, of which some are returned."""

    inputs: list[Any]
    steps: list[Step]
    returned: list[int]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        values = list(inputs)
        for step in self.steps:
            values += step(values)
        return tuple(values[k] for k in self.returned)


def random_program(seed: int) -> Program:
    """Make a program whose first values are permuted in memory, and which may write in place and switch gradients."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rank = choose.choice((3, 4, 4, 4, 5))
    shape = tuple(choose.choice((1, 2, 3, 3, 4)) for _ in range(rank - 1)) + (choose.choice((1, 4, 4, 6)),)
    order = _order(choose, rank)
    memory = tuple(shape[k] for k in order)

    def make(*sizes: int) -> Any:
        return torch.randn(sizes, generator=generator)

    restored = tuple(sorted(range(rank), key=order.__getitem__))
    inputs = [make(*memory), make(*memory).permute(restored)]
    inputs += [_broadcast(choose, make, shape, restored) for _ in range(3)]
    program = Program([v.clone() for v in inputs], [lambda values: [values[0].permute(restored)]], [])
    values, first = [*inputs, *program.steps[0](inputs)], len(inputs)
    for _ in range(choose.randint(2, 9)):
        step = _step(choose, values, first, tuple(order))
        program.steps.append(_without_gradients(step) if choose.random() < 0.05 else step)
        values += step(values)
    candidates = range(first, len(values))
    program.returned = sorted({len(values) - 1, *(k for k in candidates if choose.random() < 0.15)})
    return program


def _order(choose: random.Random, rank: int) -> list[int]:
    """Choose the dimensions in the order of memory: mostly with the last one last."""
    if choose.random() < 0.15:
        return choose.sample(range(rank), rank)
    return [*choose.sample(range(rank - 1), rank - 1), rank - 1]


def _broadcast(choose: random.Random, make: Any, shape: tuple[int, ...], restored: tuple[int, ...]) -> Any:
    """Make an operand of fewer elements, or of all in C order, of fewer dimensions at times."""
    if choose.random() < 0.15:
        return make(*shape)
    sizes = [n if choose.random() < 0.5 else 1 for n in shape[:-1]]
    operand = make(*sizes, choose.choice((1, shape[-1], shape[-1])))
    return operand[(0,) * choose.randint(0, len(shape))] if choose.random() < 0.4 else operand


def _step(choose: random.Random, values: list[Any], first: int, order: tuple[int, ...]) -> Step:
    """Choose the next operation on one of the last values, and what else it reads."""
    k = choose.choice([len(values) - 1, len(values) - 1, choose.randrange(first, len(values))])
    value, kind = values[k], choose.random()
    if kind < 0.2:
        function = choose.choice(UNARY)
        return lambda v: [function(v[k])]
    if kind < 0.5:
        other = choose.choice([j for j in range(len(values)) if _broadcasts(values[j], value)])
        both = choose.choice(BINARY)
        return (lambda v: [both(v[other], v[k])]) if choose.random() < 0.3 else (lambda v: [both(v[k], v[other])])
    half = value.shape[-1] // 2
    if kind < 0.75 and half and value.dim() > 2:
        return _rotation(choose, k, half, value.dim())
    if kind < 0.8:
        return lambda v: [v[k].double()] if v[k].dtype is torch.float32 else [v[k].float()]
    if kind < 0.86:
        other = choose.choice([j for j in range(len(values)) if _broadcasts(values[j], value)])
        number = choose.random() < 0.5
        return lambda v: [v[k].mul_(0.5 if number or k <= first else v[other].clone())]
    if kind < 0.93:
        return lambda v: [v[k].permute(order) if v[k].dim() == len(order) else v[k]]
    return lambda v: [v[k].sum(-1, keepdim=True)]


def _rotation(choose: random.Random, k: int, half: int, rank: int) -> Step:
    """Choose what is computed of the halves of each row, and along which dimension they are put side by side."""
    last = choose.choice((-1, rank - 1))
    ways: list[Callable[[Any], Any]] = [
        lambda x: torch.cat((-x[..., half:], x[..., :half]), dim=-1),
        lambda x: torch.cat((-x.narrow(last, half, half), x.narrow(last, 0, half).cos()), last),
        lambda x: torch.concat([part * 2 for part in x.split(half, dim=last)], last),
        lambda x: x[..., ::2] * x[..., : 2 * half : 2] if x.shape[-1] % 2 == 0 else x,
        lambda x: torch.cat((x, x[..., :1]), dim=last),
        lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
        lambda x: torch.cat((x[:, :1], x), dim=1),
        lambda x: x[:, 1:] * 2 if x.shape[1] > 1 else x,
        lambda x: x.chunk(2, -1)[0].sin() + x.chunk(2, -1)[0],
    ]
    way = choose.choice(ways)
    return lambda v: [way(v[k])]


def _without_gradients(step: Step) -> Step:
    def switched(values: list[Any]) -> list[Any]:
        with torch.no_grad():
            return step(values)

    return switched


def _broadcasts(operand: Any, value: Any) -> bool:
    """Whether an operand broadcasts to the shape of a value."""
    try:
        return bool(torch.broadcast_shapes(operand.shape, value.shape) == value.shape)
    except RuntimeError:
        return False
