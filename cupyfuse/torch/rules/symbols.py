"""What stands for tensors and symbolic sizes in the arguments of captured operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Ref:
    """A value by number: of a record, or of a chain, whose inputs come first, then the results of its calls."""

    number: int


@dataclass(frozen=True)
class Size:
    """A symbolic size: by its node while a graph is cut into chains, by number among a chain's sizes afterwards."""

    of: Any


def references(tree: Any) -> Iterator[int]:
    """The numbers of all `Ref` in a nested structure."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Ref):
            yield leaf.number
        elif isinstance(leaf, slice):
            yield from references((leaf.start, leaf.stop, leaf.step))


def symbolic(tree: Any) -> Iterator[Size]:
    """Every `Size` in a nested structure."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Size):
            yield leaf


def hints(nodes: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that nodes with symbolic ones stood for when they were captured."""
    return tuple(int(n.meta["example_value"].node.hint) for n in nodes)
