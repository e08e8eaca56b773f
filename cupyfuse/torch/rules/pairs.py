"""The rule of pairs of neighbours that change places, as in rotary embeddings of interleaved halves.

PyTorch has no such function: `graphs/pairs.py` finds the calls that do it.
"""

from __future__ import annotations

import torch

from ...ir import graph as g
from ...ir import pairs
from ...trace import Axes
from .parts import by_rows
from .table import rule
from .values import Value, pointwise, refuse


def swap_pairs(input: torch.Tensor, negate_first: bool = False, negate_second: bool = False) -> torch.Tensor:
    """Return a tensor whose elements 2 k and 2 k + 1 along the last dimension change places.

    `negate_first` and `negate_second` say whether those that come first, or second, are negated.
    """
    first, second = input[..., 1::2], input[..., ::2]
    first = -first if negate_first else first
    second = -second if negate_second else second
    return torch.stack((first, second), -1).flatten(-2)


@rule(swap_pairs, name="swap_pairs", eager=swap_pairs)
def _traced(input: Value, negate_first: bool = False, negate_second: bool = False) -> Value:
    if not input.size or input.shape[-1] % 2:
        refuse("swap_pairs", f"a value of shape {input.shape}")
    x, cols = by_rows(input, "swap_pairs"), input.shape[-1]
    swapped = Value(x._trace.array(pairs.swap_pairs(x._node), Axes.by_rows(input.shape)))
    if negate_first == negate_second:
        return pointwise("negative", swapped) if negate_first else swapped
    parity = g.pointwise("bitwise_and", g.positions(cols, 1, g.label_dtype(cols)), g.const(1))
    odd = Value(x._trace.array(g.cast(parity, "bool"), (1,)))
    negated = pointwise("negative", swapped)
    return pointwise("where", odd, *((swapped, negated) if negate_first else (negated, swapped)))
