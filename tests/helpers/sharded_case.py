"""What the cases of `sharded_cases.py` share: the table of them, and what one process of a case knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.tensor import DTensor

ROWS, FEATURES = 7, 8


@dataclass
class Here:
    """One process of a case.

    Attributes
    ----------
    left : names of chains that ran by PyTorch's own operations in this case, and why
    gathered : bytes that this process gave to each exchange of states
    ends : whether this process dies after the case
    """

    rank: int
    count: int
    mesh: Any
    left: list[str] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    ends: bool = False


CASES: dict[str, tuple[tuple[int, ...], Callable[[Here], None]]] = {}


def case(name: str, *worlds: int) -> Callable[[Callable[[Here], None]], Callable[[Here], None]]:
    """Enter a function as a case, in so many processes."""

    def enter(function: Callable[[Here], None]) -> Callable[[Here], None]:
        for world in worlds:
            CASES[f"{name}, {world}"] = (world,), function
        return function

    return enter


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def require_same_everywhere(*tensors: Any) -> None:
    """Replicated results have the same bits in all processes."""
    for t in tensors:
        if isinstance(t, DTensor) and all(p.is_replicate() for p in t.placements):
            bits = t._local_tensor.detach().reshape(-1).view(torch.uint8).tolist()
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, bits)
            assert all(other == bits for other in everywhere), "the processes' results differ"
