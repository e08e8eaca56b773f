"""Stand-ins for tensors and symbolic sizes in the arguments of captured operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Ref:
    """A value by number: of a captured graph, or of a chain, whose inputs come first, then the results of its calls."""

    number: int


@dataclass(frozen=True)
class Size:
    """A symbolic size: its node in a captured graph, its number among the sizes of a chain."""

    symbol: Any


def references(tree: Any) -> Iterator[int]:
    """Yield the number of every `Ref` in a nested structure."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Ref):
            yield leaf.number
        elif isinstance(leaf, slice):
            yield from references((leaf.start, leaf.stop, leaf.step))


def symbolic(tree: Any) -> Iterator[Size]:
    """Yield every `Size` in a nested structure."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Size):
            yield leaf


def substitute(argument: Any, ref: Callable[[Ref], Any], size: Callable[[Size], Any]) -> Any:
    """Replace every `Ref` and `Size` in an argument by what `ref` and `size` return for it."""
    if isinstance(argument, Ref):
        return ref(argument)
    if isinstance(argument, Size):
        return size(argument)
    return tuple(substitute(a, ref, size) for a in argument) if isinstance(argument, tuple) else argument


def size_hint(node: Any) -> int:
    """Return what a symbolic size was when its node was captured."""
    return int(node.meta["example_value"].node.hint)
