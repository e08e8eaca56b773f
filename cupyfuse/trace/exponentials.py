"""Exponentials relative to the largest element: what softmax and logsumexp are made of."""

from __future__ import annotations

from typing import Any

from ..ir import graph as g
from .axes import normalize_axes
from .operations import apply, reduce
from .tracer import Tracer


def stop_gradient(x: Tracer) -> Tracer:
    """Return the same values, treated as constants by differentiation."""
    return x._trace.array(g.stop_gradient(x._node), x._axes)


def relative_to_max(x: Tracer, axis: Any) -> tuple[Tracer, Tracer]:
    """Return max(x) and sum(exp(x - max(x))) along axes, which keep length one.

    The maximum is a constant for gradients: softmax and logsumexp do not depend on what is subtracted. Along a single
    axis the kernel finds it in the pass of the sum.
    """
    top = stop_gradient(reduce("max", x, axis, keepdims=True))
    if len(normalize_axes(axis, x.ndim)) == 1:
        return top, reduce("expsum", x, axis, keepdims=True)
    return top, reduce("sum", apply("exp", x - top), axis, keepdims=True)
