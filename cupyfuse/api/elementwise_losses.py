"""Elementwise losses, with the names and semantics of PyTorch, torchvision and optax."""

from __future__ import annotations

import math
from typing import Any

from .. import dtypes
from ..trace import Tracer, apply, reduce
from ..trace.exponentials import stop_gradient
from .checks import as_operand, check_number
from .losses import REDUCTIONS, apply_reduction, check_reduction, loss

__all__ = [
    "binary_cross_entropy_with_logits",
    "hinge_loss",
    "huber_loss",
    "kl_div",
    "mse_loss",
    "sigmoid_focal_loss",
]


def _check_pair(input: Any, target: Any) -> tuple[Tracer, Tracer]:
    """Return input and target as traced arrays, or raise ValueError if shapes or dtypes do not fit."""
    target = as_operand("target", target, input._trace)
    if not dtypes.is_float(input._node.dtype):
        raise ValueError(f"input: expected floats, got {input._node.dtype}; convert it with .astype")
    if dtypes.is_complex(target._node.dtype):
        raise ValueError(f"target: expected real numbers, got {target._node.dtype}; take .real or np.abs first")
    if target.shape != input.shape:
        raise ValueError(f"target: expected the shape of input, {input.shape}, got {target.shape}; broadcast it first")
    return input, target


@loss
def kl_div(input: Any, target: Any, *, reduction: str = "mean", log_target: bool = False) -> Any:
    """Kullback-Leibler divergence, with `torch.nn.functional.kl_div`'s semantics.

    Parameters
    ----------
    input : array
        Log-probabilities.
    target : array
        Probabilities; their logarithms with `log_target`.
    reduction : {"mean", "sum", "none", "batchmean"}
        "batchmean" divides the sum by the first axis's length, and is the divergence proper.
    log_target : bool

    Returns
    -------
    array
    """
    check_reduction(reduction, (*REDUCTIONS, "batchmean"))
    input, target = _check_pair(input, target)
    if log_target:
        values = apply("exp", target) * (target - input)
    else:
        own = apply("where", apply("equal", target, 0.0), 0.0, target * apply("log", target))
        values = own - target * input
    if reduction != "batchmean":
        return apply_reduction(values, reduction)
    return reduce("sum", values, None) / float(input.shape[0] if input.ndim else 1)


@loss
def binary_cross_entropy_with_logits(
    input: Any, target: Any, *, weight: Any = None, pos_weight: Any = None, reduction: str = "mean"
) -> Any:
    """Binary cross entropy of logits, with `torch.nn.functional.binary_cross_entropy_with_logits`'s semantics.

    Parameters
    ----------
    input : array
        Logits.
    target : array
        Probabilities of the positive class.
    weight, pos_weight : array, optional
        Of each element, and of the positive class; they broadcast with `input` and have no gradient.
    reduction : {"mean", "sum", "none"}

    Returns
    -------
    array
    """
    check_reduction(reduction)
    input, target = _check_pair(input, target)
    weight, pos_weight = (
        w if w is None else stop_gradient(as_operand(name, w, input._trace))
        for name, w in (("weight", weight), ("pos_weight", pos_weight))
    )
    positive = 1.0 if pos_weight is None else (pos_weight - 1.0) * target + 1.0
    values = (1.0 - target) * input - positive * apply("log_sigmoid", input)
    return apply_reduction(values if weight is None else values * weight, reduction)


@loss
def sigmoid_focal_loss(
    input: Any, target: Any, *, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none"
) -> Any:
    """Focal loss of logits (Lin et al. 2017), with `torchvision.ops.sigmoid_focal_loss`'s semantics.

    Parameters
    ----------
    input : array
        Logits.
    target : array
        0 or 1.
    alpha : float
        Weight of the positive class, 1 - alpha that of the other; negative for none.
    gamma : float
        Power of ``1 - p`` for the probability ``p`` of the target.
    reduction : {"none", "mean", "sum"}

    Returns
    -------
    array
    """
    check_reduction(reduction)
    check_number("alpha", alpha)
    check_number("gamma", gamma)
    input, target = _check_pair(input, target)
    values = (1.0 - target) * input - apply("log_sigmoid", input)
    probability = apply("sigmoid", input)
    missed = probability * (1.0 - target) + (1.0 - probability) * target
    values = values * (apply("square", missed) if gamma == 2.0 else apply("power", missed, gamma))
    if alpha >= 0:
        values = values * (target * alpha + (1.0 - target) * (1.0 - alpha))
    return apply_reduction(values, reduction)


@loss
def mse_loss(input: Any, target: Any, *, reduction: str = "mean") -> Any:
    """Squared error, as `torch.nn.functional.mse_loss` of operands of one shape."""
    check_reduction(reduction)
    input, target = _check_pair(input, target)
    return apply_reduction(apply("square", input - target), reduction)


@loss
def huber_loss(input: Any, target: Any, *, delta: float = 1.0, reduction: str = "mean") -> Any:
    """Error squared and halved up to `delta`, linear beyond, as `torch.nn.functional.huber_loss`."""
    check_reduction(reduction)
    check_number("delta", delta)
    if not delta > 0:
        raise ValueError(f"delta: expected a positive number, got {float(delta)}")
    input, target = _check_pair(input, target)
    error = apply("absolute", input - target)
    near, far = apply("square", error) * 0.5, (error - 0.5 * delta) * delta
    return apply_reduction(apply("where", error < delta, near, far), reduction)


@loss
def hinge_loss(input: Any, target: Any, *, reduction: str = "none") -> Any:
    """``max(0, 1 - input * target)`` for targets -1 and 1, as `optax.losses.hinge_loss`."""
    check_reduction(reduction)
    input, target = _check_pair(input, target)
    return apply_reduction(apply("clip", 1.0 - input * target, 0.0, math.inf), reduction)
