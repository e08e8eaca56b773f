"""Calls of a fused module in which no chain runs: they are PyTorch's own, without Dynamo's guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import islice
from typing import Any

import torch

from .chains.eligibility import is_intercepted

# Every so many calls one is captured's after all: what the module reads may have changed. A prime, so that among calls
# that take turns each has its own.
_LOOK_AGAIN = 61
_MISTAKES = 4  # times that a chain ran in a call taken for one without, until such calls are captured's for good
_MOST = 256
DEPTH = 4  # of nested arguments
WIDTH = 16  # elements of a list that are looked at


class IdleCalls:
    """The signatures of calls in which no chain ran.

    Only time depends on them: such a call computes the same with and without Dynamo. Calls of one signature may differ
    in what it does not describe, so that a chain runs in some of them only.

    Attributes
    ----------
    signatures : dict
        How many calls of each were left to PyTorch.
    """

    def __init__(self) -> None:
        self.signatures: dict[Hashable, int] = {}
        self._mistakes: Counter[Hashable] = Counter()

    def includes(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether calls like this one ran no chain; False once in a while, to have the module looked at again."""
        signature = _signature(module, args, kwargs)
        count = self.signatures.get(signature)
        if count is None:
            return False
        self.signatures[signature] = count + 1
        return (count + 1) % _LOOK_AGAIN != 0

    def note(self, ran: bool, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call has run a chain, or none."""
        if ran:
            if self.signatures:
                signature = _signature(module, args, kwargs)
                if self.signatures.pop(signature, None) is not None:
                    self._mistakes[signature] += 1
            return
        if is_intercepted():
            return  # no chain runs then, but may as soon as the transform or the mode ends
        signature = _signature(module, args, kwargs)
        if self._mistakes[signature] >= _MISTAKES:
            return
        if len(self.signatures) + len(self._mistakes) >= _MOST:
            self.forget()
        self.signatures.setdefault(signature, 0)

    def forget(self) -> None:
        """Forget all calls."""
        self.signatures.clear()
        self._mistakes.clear()


def _signature(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Describe a call by what most often decides whether chains gain: shapes, dtypes and modes."""
    autocast = torch.is_autocast_enabled("cuda")
    return module.training, torch.is_grad_enabled(), autocast, _describe(args), *kwargs, _describe(kwargs)


def _describe(value: Any, depth: int = 0) -> Hashable:
    """Describe an argument, and keep nothing of it; types that are not known, such as caches, by their names."""
    kind: type = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        try:
            return value.shape, value.dtype, value.device
        except RuntimeError:
            return "nested"  # its rows differ in their sizes
    if kind in (tuple, list, dict) and depth < DEPTH:
        values = value.values() if kind is dict else value
        return (len(value), *[_describe(each, depth + 1) for each in islice(values, WIDTH)])
    if kind is bool:
        return value
    return hash(value) if kind is str else kind.__qualname__
