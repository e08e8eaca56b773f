"""Losses element by element, and similarities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...dtypes import is_float
from .labels import loss, reduced_loss
from .overloads import overload
from .promotion import constant, floats, pointwise, promoted, sloped
from .reductions import reduced, vector_norm
from .table import rule
from .values import Value, refuse

F = torch.nn.functional
T = torch.Tensor


def _error(name: str, input: Value, target: Value) -> Value:
    # Beside a wider target PyTorch's result has one dtype or the other, depending on the reduction.
    if not is_float(input.dtype) or promoted(input, target) != input.dtype:
        refuse(name, f"operands of {input.dtype} and {target.dtype}")
    return pointwise("subtract", input, target)


def _alike(name: str, input: Value, *others: Value | None) -> None:
    """Operands of one shape and one floating-point dtype; what is left out is alike."""
    for other in others:
        if other is not None and (other.shape != input.shape or other.dtype != input.dtype):
            refuse(name, f"operands of {input.shape}, {input.dtype} and {other.shape}, {other.dtype}")
    floats(input, name)


# Of errors ----------------------------------------------------------------------------------------------------------


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function with its weight, which older versions of some do not take, given where there is one."""

    def call(x: Any, target: Any, reduction: str, weight: Any, *parameters: Any) -> Any:
        more = {} if weight is None else {"weight": weight}
        names = ("delta",) if function is F.huber_loss else ()
        return function(x, target, reduction=reduction, **dict(zip(names, parameters, strict=True)), **more)

    return call


def _weighted(name: str, values: Value, weight: Value | None, input: Value, reduction: str, by_weight: bool) -> Value:
    """The reduced loss; the mean of weighted values is by their number, or by the sum of the weights."""
    if weight is None:
        return reduced_loss(values, reduction)
    if weight.shape != input.shape:
        refuse(name, f"a weight of shape {weight.shape} for an input of shape {input.shape}")
    values = pointwise("multiply", values, weight)
    if reduction != "mean" or not by_weight:
        return reduced_loss(values, reduction)
    total = (reduced("sum", v, None, False) for v in (values, floats(weight, name)))
    return pointwise("divide", *total)


@rule("mse_loss", _eager(F.mse_loss), reduces=True)
def mse_loss(input: Value, target: Value, reduction: str = "mean", weight: Value | None = None) -> Value:
    values = pointwise("square", _error("mse_loss", input, target))
    return _weighted("mse_loss", values, weight, input, reduction, True)


@rule("l1_loss", _eager(F.l1_loss), reduces=True)
def l1_loss(input: Value, target: Value, reduction: str = "mean", weight: Value | None = None) -> Value:
    values = pointwise("absolute", _error("l1_loss", input, target))
    return _weighted("l1_loss", values, weight, input, reduction, True)


def _piecewise(error: Value, limit: float, near: Value, far: Value, slope: Value, steepest: float) -> Value:
    """A loss that is `near` within a limit and `far` from it on, with the slope of each."""
    distant = pointwise("greater_equal", pointwise("absolute", error), limit)
    below, above = pointwise("less_equal", error, -limit), pointwise("greater_equal", error, limit)
    slopes = pointwise("where", above, steepest, slope)
    return sloped(pointwise("where", distant, far, near), (error, pointwise("where", below, -steepest, slopes)))


@rule("huber_loss", _eager(F.huber_loss), reduces=True)
def huber_loss(
    input: Value, target: Value, reduction: str = "mean", weight: Value | None = None, delta: float = 1.0
) -> Value:
    if not delta > 0:
        refuse("huber_loss", f"a delta of {delta}")
    error = _error("huber_loss", input, target)
    near = pointwise("multiply", pointwise("multiply", error, 0.5), error)
    size = pointwise("absolute", error)
    far = pointwise("multiply", pointwise("subtract", size, 0.5 * delta), delta)
    return _weighted("huber_loss", _piecewise(error, delta, near, far, error, delta), weight, input, reduction, False)


@rule(
    "smooth_l1_loss", lambda x, y, reduction, beta: F.smooth_l1_loss(x, y, reduction=reduction, beta=beta), reduces=True
)
def smooth_l1_loss(input: Value, target: Value, reduction: str = "mean", beta: float = 1.0) -> Value:
    if beta < 0:
        refuse("smooth_l1_loss", f"a beta of {beta}")
    if beta == 0:
        return l1_loss(input, target, reduction)
    error = _error("smooth_l1_loss", input, target)
    near = pointwise("divide", pointwise("multiply", pointwise("multiply", error, 0.5), error), beta)
    far = pointwise("subtract", pointwise("absolute", error), 0.5 * beta)
    slope = pointwise("divide", error, beta)
    return reduced_loss(_piecewise(error, beta, near, far, slope, 1.0), reduction)


overload("mse_loss", F.mse_loss, adapt=loss(F.mse_loss))
overload("l1_loss", F.l1_loss, adapt=loss(F.l1_loss))
overload("smooth_l1_loss", F.smooth_l1_loss, adapt=loss(F.smooth_l1_loss))


def _huber(input: Any, target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None) -> Any:
    return input, target, reduction, weight, delta


overload("huber_loss", F.huber_loss, adapt=_huber)

# What PyTorch divides the slope of `binary_cross_entropy` by is at least float32's 1e-12, in float64 too.
_LEAST_SPREAD = float(np.float32(1e-12))

# Of probabilities ---------------------------------------------------------------------------------------------------


@rule("xlogy", torch.xlogy)
def xlogy(input: Value, other: Value) -> Value:
    """x log(y), zero where x is, NaN where y is."""
    product = pointwise("multiply", input, pointwise("log", other))
    dtype = product.dtype
    nothing = pointwise("equal", input, 0.0)
    value = pointwise("where", nothing, 0.0, product, dtype=dtype)
    value = pointwise("where", pointwise("isnan", other), math.nan, value, dtype=dtype)
    none = pointwise("logical_and", nothing, pointwise("less_equal", other, 0.0))
    logarithm = pointwise("where", none, 0.0, pointwise("log", other), dtype=dtype)
    return sloped(value, (input, logarithm), (other, pointwise("divide", input, other)))


@rule("kl_div", lambda x, y, r, log_target: F.kl_div(x, y, reduction=r, log_target=log_target), reduces=True)
def kl_div(input: Value, target: Value, reduction: str = "mean", log_target: bool = False) -> Value:
    floats(input, "kl_div"), floats(target, "kl_div")
    if log_target:
        values = pointwise("multiply", pointwise("exp", target), pointwise("subtract", target, input))
    else:
        values = pointwise("subtract", xlogy(target, target), pointwise("multiply", target, input))
    if reduction != "batchmean":
        return reduced_loss(values, reduction)
    total = reduced_loss(values, "sum")
    return pointwise("divide", total, float(input.shape[0])) if input.ndim else total


@rule("binary_cross_entropy", lambda x, y, w, r: F.binary_cross_entropy(x, y, w, reduction=r), reduces=True)
def binary_cross_entropy(input: Value, target: Value, weight: Value | None = None, reduction: str = "mean") -> Value:
    """NaN for what is no probability, which PyTorch raises an error for."""
    _alike("binary_cross_entropy", input, target)
    rest = pointwise("subtract", 1.0, input)
    no = pointwise("maximum", pointwise("log1p", pointwise("negative", input)), -100.0)
    yes = pointwise("maximum", pointwise("log", input), -100.0)
    against = pointwise("multiply", pointwise("subtract", target, 1.0), no)
    values = pointwise("subtract", against, pointwise("multiply", target, yes))
    spread = pointwise("maximum", pointwise("multiply", rest, input), _LEAST_SPREAD)
    slope = pointwise("divide", pointwise("subtract", input, target), spread)
    by_target = pointwise("subtract", pointwise("log1p", pointwise("negative", input)), pointwise("log", input))
    values = sloped(values, (input, slope), (target, by_target))
    return _weighed(values, weight, reduction)


def _weighed(values: Value, weight: Value | None, reduction: str) -> Value:
    if weight is not None:
        if weight.dtype != values.dtype:
            refuse("a loss", f"a weight of {weight.dtype} beside operands of {values.dtype}")
        # The loss's own backward pass has no gradient for it.
        values = pointwise("multiply", values, constant(weight))
    return reduced_loss(values, reduction)


@rule(
    "binary_cross_entropy_with_logits",
    lambda x, y, w, r, p: F.binary_cross_entropy_with_logits(x, y, w, reduction=r, pos_weight=p),
    reduces=True,
)
def binary_cross_entropy_with_logits(
    input: Value,
    target: Value,
    weight: Value | None = None,
    reduction: str = "mean",
    pos_weight: Value | None = None,
) -> Value:
    name = "binary_cross_entropy_with_logits"
    _alike(name, input, target)
    rest, logarithm = pointwise("subtract", 1.0, target), pointwise("log_sigmoid", input)
    probability = pointwise("sigmoid", input)
    linear = pointwise("multiply", rest, input)
    if pos_weight is None:
        values = pointwise("subtract", linear, logarithm)
        slope, by_target = pointwise("subtract", probability, target), pointwise("negative", input)
    else:
        if pos_weight.dtype != input.dtype:
            refuse(name, f"a pos_weight of {pos_weight.dtype} beside an input of {input.dtype}")
        positive = constant(pos_weight)
        both = pointwise("add", pointwise("multiply", pointwise("subtract", positive, 1.0), target), 1.0)
        values = pointwise("subtract", linear, pointwise("multiply", both, logarithm))
        part = pointwise("multiply", positive, target)
        whole = pointwise("subtract", pointwise("add", part, 1.0), target)
        slope = pointwise("subtract", pointwise("multiply", whole, probability), part)
        other = pointwise("log_sigmoid", pointwise("negative", input))
        by_target = pointwise("subtract", other, pointwise("multiply", positive, logarithm))
    if values.shape != input.shape:
        refuse(name, "a pos_weight of more elements than the input")
    return _weighed(sloped(values, (input, slope), (target, by_target)), weight, reduction)


def _poisson_eager(x: Any, target: Any, log_input: bool, full: bool, eps: float, reduction: str) -> Any:
    return F.poisson_nll_loss(x, target, log_input=log_input, full=full, eps=eps, reduction=reduction)


@rule("poisson_nll_loss", _poisson_eager, reduces=True)
def poisson_nll_loss(
    input: Value, target: Value, log_input: bool = True, full: bool = False, eps: float = 1e-8, reduction: str = "mean"
) -> Value:
    floats(input, "poisson_nll_loss"), floats(target, "poisson_nll_loss")
    if log_input:
        values = pointwise("subtract", pointwise("exp", input), pointwise("multiply", target, input))
    else:
        logarithm = pointwise("log", pointwise("add", input, eps))
        values = pointwise("subtract", input, pointwise("multiply", target, logarithm))
    if full:
        logarithm = pointwise("subtract", pointwise("multiply", target, pointwise("log", target)), target)
        half = pointwise("multiply", pointwise("log", pointwise("multiply", target, 2 * math.pi)), 0.5)
        stirling = pointwise("add", logarithm, half)
        few = pointwise("less_equal", target, 1.0)
        values = pointwise("add", values, pointwise("where", few, 0.0, stirling, dtype=stirling.dtype))
    return reduced_loss(values, reduction)


overload("xlogy", "xlogy")
for _name in ("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"):
    overload(_name, getattr(F, _name), adapt=loss(getattr(F, _name)))

# Of margins ---------------------------------------------------------------------------------------------------------


@rule("soft_margin_loss", lambda x, y, r: F.soft_margin_loss(x, y, reduction=r), reduces=True)
def soft_margin_loss(input: Value, target: Value, reduction: str = "mean") -> Value:
    _alike("soft_margin_loss", input, target)
    sign = pointwise("negative", constant(target))
    power = pointwise("exp", pointwise("multiply", sign, input))
    slope = pointwise("divide", pointwise("multiply", sign, power), pointwise("add", power, 1.0))
    return reduced_loss(sloped(pointwise("log1p", power), (input, slope)), reduction)


def _at_least_zero(value: Value) -> Value:
    return pointwise("clip", value, 0.0, math.inf)


@rule("hinge_embedding_loss", lambda x, y, m, r: F.hinge_embedding_loss(x, y, margin=m, reduction=r), reduces=True)
def hinge_embedding_loss(input: Value, target: Value, margin: float = 1.0, reduction: str = "mean") -> Value:
    floats(input, "hinge_embedding_loss")
    apart = _at_least_zero(pointwise("subtract", margin, input))
    negative = pointwise("where", pointwise("not_equal", target, 1), apart, 0.0, dtype=input.dtype)
    positive = pointwise("where", pointwise("not_equal", target, -1), input, 0.0, dtype=input.dtype)
    return reduced_loss(pointwise("add", negative, positive), reduction)


def _ranking_eager(a: Any, b: Any, target: Any, margin: float, reduction: str) -> Any:
    return F.margin_ranking_loss(a, b, target, margin=margin, reduction=reduction)


@rule("margin_ranking_loss", _ranking_eager, reduces=True)
def margin_ranking_loss(
    input1: Value, input2: Value, target: Value, margin: float = 0.0, reduction: str = "mean"
) -> Value:
    if not input1.ndim == input2.ndim == target.ndim:
        refuse("margin_ranking_loss", f"shapes {input1.shape}, {input2.shape} and {target.shape}")
    ahead = pointwise("subtract", floats(input1, "margin_ranking_loss"), floats(input2, "margin_ranking_loss"))
    behind = pointwise("multiply", pointwise("negative", target), ahead)
    return reduced_loss(_at_least_zero(pointwise("add", behind, margin)), reduction)


for _name in ("soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss"):
    overload(_name, getattr(F, _name), adapt=loss(getattr(F, _name)))

# Similarity ---------------------------------------------------------------------------------------------------------


@rule("cosine_similarity", lambda a, b, dim, eps: F.cosine_similarity(a, b, dim=dim, eps=eps), reduces=True)
def cosine_similarity(x1: Value, x2: Value, dim: int = 1, eps: float = 1e-8) -> Value:
    """Norms are at least eps, which their gradients do not see."""
    if x1.dtype != x2.dtype:
        refuse("cosine_similarity", f"operands of {x1.dtype} and {x2.dtype}")
    if x1.ndim != x2.ndim:
        refuse("cosine_similarity", f"operands of shapes {x1.shape} and {x2.shape}")
    directions = []
    for x in (x1, x2):
        size = vector_norm(x, 2, dim, True)
        size = sloped(pointwise("maximum", size, eps), (size, 1.0))
        directions.append(pointwise("divide", x, size))
    return reduced("sum", pointwise("multiply", *directions), dim, False)


overload("cosine_similarity", "cosine_similarity")
