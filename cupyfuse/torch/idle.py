"""Calls of a fused module in which no chain runs: they are PyTorch's own, without Dynamo's guards."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch

_LOOK_AGAIN = 64  # every so many calls one is captured's after all: what the module reads may have changed
_MOST = 256
_DEPTH = 4  # of nested arguments


class IdleCalls:
    """The signatures of calls in which no chain ran.

    Only time depends on them: such a call computes the same with and without Dynamo.

    Attributes
    ----------
    signatures : set
    """

    def __init__(self) -> None:
        self.signatures: set[Hashable] = set()
        self._numbers = itertools.count(1)

    def includes(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether calls like this one ran no chain; False once in a while, to have the module looked at again."""
        return _signature(module, args, kwargs) in self.signatures and next(self._numbers) % _LOOK_AGAIN != 0

    def note(self, ran: bool, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call has run a chain, or none."""
        if ran:
            if self.signatures:
                self.signatures.discard(_signature(module, args, kwargs))
            return
        if len(self.signatures) >= _MOST:
            self.signatures.clear()
        self.signatures.add(_signature(module, args, kwargs))


def _signature(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Describe a call by what most often decides whether chains gain: shapes, dtypes and modes."""
    autocast = torch.is_autocast_enabled("cuda")
    return module.training, torch.is_grad_enabled(), autocast, _describe(args), _describe(kwargs)


def _describe(value: Any, depth: int = 0) -> Hashable:
    """Describe an argument, by its type where it is none that is known, such as a cache or a subclass of tensors."""
    kind: type = type(value)
    if kind is torch.Tensor:
        return value.shape, value.dtype, value.device
    if kind in (tuple, list, dict) and depth < _DEPTH:
        values = tuple(value.values()) if kind is dict else value
        return (kind, *[_describe(each, depth + 1) for each in values])
    return value if kind in (bool, int, float, str) else kind
