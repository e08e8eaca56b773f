"""Rules of elementwise losses and of similarities."""

from __future__ import annotations

import math

import numpy as np

from ...dtypes import is_float
from .labels import loss_rule, reduce_loss
from .pointwise import clamp
from .promotion import promote
from .reductions import reduce_dims, vector_norm
from .table import F, rule
from .values import (
    Value,
    broadcast_shapes,
    expand_to,
    pointwise,
    refuse,
    require_float,
    stop_gradient,
    with_slopes,
)

# Regression ---------------------------------------------------------------------------------------------------------


def _error(name: str, input: Value, target: Value) -> Value:
    """Subtract the target from the input, which must have the dtype of the result."""
    # Beside a wider target PyTorch's result has one dtype or the other, depending on the reduction.
    if not is_float(input.dtype) or promote(input, target) != input.dtype:
        refuse(name, f"operands of {input.dtype} and {target.dtype}")
    return input - target


def _reduce_weighted(
    name: str, values: Value, weight: Value | None, input: Value, reduction: str, by_weight: bool = True
) -> Value:
    """Reduce a weighted loss; the mean divides by the sum of the weights, or else by their number."""
    if weight is None:
        return reduce_loss(values, reduction)
    if weight.shape != input.shape:
        refuse(name, f"a weight of shape {weight.shape} for an input of shape {input.shape}")
    values = values * weight
    if reduction != "mean" or not by_weight:
        return reduce_loss(values, reduction)
    return reduce_dims("sum", values, None) / reduce_dims("sum", require_float(weight, name), None)


@loss_rule(F.mse_loss)
def mse_loss(input: Value, target: Value, reduction: str = "mean", weight: Value | None = None) -> Value:
    values = pointwise("square", _error("mse_loss", input, target))
    return _reduce_weighted("mse_loss", values, weight, input, reduction)


@loss_rule(F.l1_loss)
def l1_loss(input: Value, target: Value, reduction: str = "mean", weight: Value | None = None) -> Value:
    values = abs(_error("l1_loss", input, target))
    return _reduce_weighted("l1_loss", values, weight, input, reduction)


def _piecewise(error: Value, limit: float, near: Value, far: Value, slope: Value, steepest: float) -> Value:
    """Join a loss that is `near` within a limit of the error, with `slope`, and `far` beyond it, with ±`steepest`."""
    slopes = pointwise("where", error >= limit, steepest, slope)
    slopes = pointwise("where", error <= -limit, -steepest, slopes)
    return with_slopes(pointwise("where", abs(error) >= limit, far, near), (error, slopes))


@loss_rule(F.huber_loss)
def huber_loss(
    input: Value, target: Value, reduction: str = "mean", delta: float = 1.0, weight: Value | None = None
) -> Value:
    if not delta > 0:
        refuse("huber_loss", f"a delta of {delta}")
    error = _error("huber_loss", input, target)
    near, far = error * 0.5 * error, (abs(error) - 0.5 * delta) * delta
    values = _piecewise(error, delta, near, far, error, delta)
    return _reduce_weighted("huber_loss", values, weight, input, reduction, by_weight=False)


@loss_rule(F.smooth_l1_loss)
def smooth_l1_loss(input: Value, target: Value, reduction: str = "mean", beta: float = 1.0) -> Value:
    if beta < 0:
        refuse("smooth_l1_loss", f"a beta of {beta}")
    if beta == 0:
        return l1_loss(input, target, reduction)
    error = _error("smooth_l1_loss", input, target)
    near, far = error * 0.5 * error / beta, abs(error) - 0.5 * beta
    return reduce_loss(_piecewise(error, beta, near, far, error / beta, 1.0), reduction)


# Probabilities ------------------------------------------------------------------------------------------------------

# The least denominator of the slope of `binary_cross_entropy` in PyTorch: float32's 1e-12, in float64 too.
_LEAST_SPREAD = float(np.float32(1e-12))


def _require_alike(name: str, input: Value, other: Value) -> None:
    """Refuse operands of different shapes or dtypes, and of integers."""
    if other.shape != input.shape or other.dtype != input.dtype:
        refuse(name, f"operands of {input.shape}, {input.dtype} and {other.shape}, {other.dtype}")
    require_float(input, name)


@rule()
def xlogy(input: Value, other: Value) -> Value:
    """Trace x log(y), which is zero where x is, and NaN where y is."""
    logarithm = pointwise("log", other)
    product = input * logarithm
    dtype, is_zero = product.dtype, pointwise("equal", input, 0.0)
    value = pointwise("where", is_zero, 0.0, product, dtype=dtype)
    value = pointwise("where", pointwise("isnan", other), math.nan, value, dtype=dtype)
    slope = pointwise("where", is_zero & (other <= 0.0), 0.0, logarithm, dtype=dtype)
    return with_slopes(value, (input, slope), (other, input / other))


@loss_rule(F.kl_div)
def kl_div(input: Value, target: Value, reduction: str = "mean", log_target: bool = False) -> Value:
    require_float(input, "kl_div"), require_float(target, "kl_div")
    values = pointwise("exp", target) * (target - input) if log_target else xlogy(target, target) - target * input
    if reduction != "batchmean":
        return reduce_loss(values, reduction)
    total = reduce_loss(values, "sum")
    return total / float(input.shape[0]) if input.ndim else total


@loss_rule(F.binary_cross_entropy)
def binary_cross_entropy(input: Value, target: Value, weight: Value | None = None, reduction: str = "mean") -> Value:
    """Trace `binary_cross_entropy`; NaN for what is no probability, where PyTorch raises an error."""
    _require_alike("binary_cross_entropy", input, target)
    yes, no = pointwise("log", input), pointwise("log1p", -input)
    values = (target - 1.0) * pointwise("maximum", no, -100.0) - target * pointwise("maximum", yes, -100.0)
    slope = (input - target) / pointwise("maximum", (1.0 - input) * input, _LEAST_SPREAD)
    return _reduce_constant_weighted(with_slopes(values, (input, slope), (target, no - yes)), weight, reduction)


def _reduce_constant_weighted(values: Value, weight: Value | None, reduction: str) -> Value:
    """Reduce a loss with a weight that PyTorch's backward pass gives no gradient."""
    if weight is not None:
        if weight.dtype != values.dtype:
            refuse("a loss", f"a weight of {weight.dtype} beside operands of {values.dtype}")
        values = values * stop_gradient(weight)
    return reduce_loss(values, reduction)


@loss_rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Value, target: Value, weight: Value | None = None, reduction: str = "mean", pos_weight: Value | None = None
) -> Value:
    name = "binary_cross_entropy_with_logits"
    _require_alike(name, input, target)
    log_yes, probability = pointwise("log_sigmoid", input), pointwise("sigmoid", input)
    linear = (1.0 - target) * input
    if pos_weight is None:
        values, slope, by_target = linear - log_yes, probability - target, -input
    else:
        if pos_weight.dtype != input.dtype:
            refuse(name, f"a pos_weight of {pos_weight.dtype} beside an input of {input.dtype}")
        positive = stop_gradient(pos_weight)
        values = linear - ((positive - 1.0) * target + 1.0) * log_yes
        part = positive * target
        slope = (part + 1.0 - target) * probability - part
        by_target = pointwise("log_sigmoid", -input) - positive * log_yes
    if values.shape != input.shape:
        refuse(name, "a pos_weight of more elements than the input")
    return _reduce_constant_weighted(with_slopes(values, (input, slope), (target, by_target)), weight, reduction)


@loss_rule(F.poisson_nll_loss)
def poisson_nll_loss(
    input: Value, target: Value, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Value:
    require_float(input, "poisson_nll_loss"), require_float(target, "poisson_nll_loss")
    if log_input:
        values = pointwise("exp", input) - target * input
    else:
        values = input - target * pointwise("log", input + eps)
    if full:
        stirling = target * pointwise("log", target) - target + pointwise("log", target * (2 * math.pi)) * 0.5
        values = values + pointwise("where", target <= 1.0, 0.0, stirling, dtype=stirling.dtype)
    return reduce_loss(values, reduction)


# Margins ------------------------------------------------------------------------------------------------------------


@loss_rule(F.soft_margin_loss)
def soft_margin_loss(input: Value, target: Value, reduction: str = "mean") -> Value:
    _require_alike("soft_margin_loss", input, target)
    sign = -stop_gradient(target)
    power = pointwise("exp", sign * input)
    slope = sign * power / (power + 1.0)
    return reduce_loss(with_slopes(pointwise("log1p", power), (input, slope)), reduction)


@loss_rule(F.hinge_embedding_loss)
def hinge_embedding_loss(input: Value, target: Value, margin: float = 1.0, reduction: str = "mean") -> Value:
    missing = clamp(margin - require_float(input, "hinge_embedding_loss"), 0.0)
    negative = pointwise("where", pointwise("not_equal", target, 1), missing, 0.0, dtype=input.dtype)
    positive = pointwise("where", pointwise("not_equal", target, -1), input, 0.0, dtype=input.dtype)
    return reduce_loss(negative + positive, reduction)


@loss_rule(F.margin_ranking_loss)
def margin_ranking_loss(
    input1: Value, input2: Value, target: Value, margin: float = 0.0, reduction: str = "mean"
) -> Value:
    if not input1.ndim == input2.ndim == target.ndim:
        refuse("margin_ranking_loss", f"shapes {input1.shape}, {input2.shape} and {target.shape}")
    ahead = require_float(input1, "margin_ranking_loss") - require_float(input2, "margin_ranking_loss")
    return reduce_loss(clamp(-target * ahead + margin, 0.0), reduction)


# Similarity ---------------------------------------------------------------------------------------------------------


@rule(reduces=True)
def cosine_similarity(x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """Trace `cosine_similarity`; norms are at least eps, which their gradients do not see."""
    if x1.dtype != x2.dtype:
        refuse("cosine_similarity", f"operands of {x1.dtype} and {x2.dtype}")
    if x1.ndim != x2.ndim:
        refuse("cosine_similarity", f"operands of shapes {x1.shape} and {x2.shape}")
    shape = broadcast_shapes([x1.shape, x2.shape], "cosine_similarity")
    directions = []
    for x in (expand_to(x1, shape), expand_to(x2, shape)):  # norms are of what the products are of
        size = vector_norm(x, 2, dim, True)
        directions.append(x / with_slopes(pointwise("maximum", size, eps), (size, 1.0)))
    return reduce_dims("sum", directions[0] * directions[1], dim)
