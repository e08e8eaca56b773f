"""Reductions along an axis.

Accuracy is that of sums in any order: at most n roundings for n elements, relative to the sum of absolute values. The
`_scale_of` functions give the magnitudes that these errors are relative to.
"""

from __future__ import annotations

import numpy as np

from .elementary import plus_log
from .table import Array, Reduction


def _expsum(x: Array, axis: int) -> Array:
    return np.exp(x - x.max(axis=axis, keepdims=True)).sum(axis=axis, keepdims=True)


def _sum_of_distances(x: Array, axis: int) -> Array:
    return (x - x.max(axis=axis, keepdims=True)).sum(axis=axis, keepdims=True)


def _sum_of_expdistances(x: Array, axis: int) -> Array:
    distance = x - x.max(axis=axis, keepdims=True)
    return (distance * np.exp(distance)).sum(axis=axis, keepdims=True)


def _logsumexp(x: Array, axis: int) -> Array:
    top = x.max(axis=axis, keepdims=True)
    return plus_log(top, _expsum(x, axis))


def _variance(x: Array, axis: int) -> Array:
    # Relative to the first element, as in the kernels: that of equal elements is 0, however their sum is rounded.
    n = x.dtype.type(x.shape[axis])
    distance = x - x.swapaxes(0, axis)[:1].swapaxes(0, axis)
    mean = distance.sum(axis=axis, keepdims=True) / n
    return np.square(distance - mean).sum(axis=axis, keepdims=True) / n


def _scale_of_sum(x: Array, axis: int) -> Array:
    return np.abs(x).sum(axis=axis, keepdims=True)


def _scale_of_expsum(x: Array, axis: int) -> Array:
    # The relative error of an exponential grows with its rounded argument.
    distance = x.max(axis=axis, keepdims=True) - x
    return (np.exp(-distance) * (1 + np.where(distance < np.inf, distance, 0))).sum(axis=axis, keepdims=True)


def _scale_of_distances(x: Array, axis: int) -> Array:
    return np.abs(_sum_of_distances(x, axis))


def _scale_of_expdistances(x: Array, axis: int) -> Array:
    # The error of an exponential, as in a sum of these, and one rounding of the distance that it is multiplied by.
    distance = x.max(axis=axis, keepdims=True) - x
    finite = np.where(distance < np.inf, distance, 0)
    return (np.exp(-distance) * finite * (2 + finite)).sum(axis=axis, keepdims=True)


def _scale_of_position(x: Array, axis: int) -> Array:
    return np.full_like(x.max(axis=axis, keepdims=True), x.shape[axis])


def _scale_of_moment2(x: Array, axis: int) -> Array:
    # The error of the mean, n roundings, enters squared.
    n, unit = x.shape[axis], float(np.finfo(x.dtype).eps)
    return _variance(x, axis) + n * unit * np.square(np.abs(x).mean(axis=axis, keepdims=True))


def _scale_of_logsumexp(x: Array, axis: int) -> Array:
    # The maximum, and a logarithm with the relative error of its argument.
    top = x.max(axis=axis, keepdims=True)
    return 1 + np.abs(top) + np.abs(_logsumexp(x, axis) - top)


ROWS = (
    Reduction(
        "sum",
        lambda x, axis: x.sum(axis=axis, keepdims=True),
        "Sum",
        "total()",
        lambda o, y, x: 1.0,
        "Sum.",
        scale=_scale_of_sum,
    ),
    Reduction(
        "prod",
        lambda x, axis: x.prod(axis=axis, keepdims=True),
        "Product",
        "total()",
        lambda o, y, x: y / x,
        "Product.",
        scale=lambda x, axis: np.abs(x.prod(axis=axis, keepdims=True)),
    ),
    Reduction(
        "max",
        lambda x, axis: x.max(axis=axis, keepdims=True),
        "Max",
        "extreme()",
        lambda o, y, x: o.where(x == y, 1.0, 0.0),
        "Largest element; NaN if one is.",
        scale=_scale_of_sum,
        ulps=0.0,
        base="Top",
    ),
    Reduction(
        "min",
        lambda x, axis: x.min(axis=axis, keepdims=True),
        "Min",
        "extreme()",
        lambda o, y, x: o.where(x == y, 1.0, 0.0),
        "Smallest element; NaN if one is.",
        scale=_scale_of_sum,
        ulps=0.0,
        base="Bottom",
    ),
    Reduction(
        "expsum",
        _expsum,
        "ExpSum",
        "total()",
        lambda o, top, x: o.exp(x - top),
        "Sum of exp(x - max x).",
        scale=_scale_of_expsum,
        flops=10,
        identity_on_one=False,
        about="max",
    ),
    # Two that extend an expsum of the same elements, whose distances and exponentials they add up.
    Reduction(
        "distances",
        _sum_of_distances,
        "Distances",
        "distances()",
        lambda o, top, x: 1.0,
        "Sum of x - max x.",
        scale=_scale_of_distances,
        identity_on_one=False,
        about="max",
        words=2,
        extends="expsum",
    ),
    Reduction(
        "expdistances",
        _sum_of_expdistances,
        "ExpDistances",
        "exp_distances()",
        lambda o, top, x: o.exp(x - top) * (1.0 + (x - top)),
        "Sum of (x - max x) exp(x - max x).",
        scale=_scale_of_expdistances,
        identity_on_one=False,
        about="max",
        extends="expsum",
    ),
    Reduction(
        "argmax",
        lambda x, axis: np.argmax(x, axis=axis, keepdims=True),
        "FirstPlace",
        "place()",
        lambda o, top, x: None,
        "First position of the largest element, or of a NaN.",
        scale=_scale_of_position,
        ulps=0.0,
        flops=3,
        identity_on_one=False,
        about="max",
        gives_position=True,
    ),
    Reduction(
        "argmin",
        lambda x, axis: np.argmin(x, axis=axis, keepdims=True),
        "FirstPlace",
        "place()",
        lambda o, bottom, x: None,
        "First position of the smallest element, or of a NaN.",
        scale=_scale_of_position,
        ulps=0.0,
        flops=3,
        identity_on_one=False,
        about="min",
        gives_position=True,
    ),
    Reduction(
        "moment2",
        _variance,
        "Moments",
        "variance()",
        lambda o, mean, x: 2.0 * (x - mean),
        "Biased variance, in one pass by Welford's and Chan's updates.",
        scale=_scale_of_moment2,
        flops=5,
        identity_on_one=False,
        about="mean",
        words=4,
    ),
    Reduction(
        "mean",
        lambda x, axis: x.mean(axis=axis, keepdims=True),
        None,
        "",
        lambda o, y, x: 1.0,
        "Arithmetic mean.",
        scale=lambda x, axis: np.abs(x).mean(axis=axis, keepdims=True),
    ),
    Reduction(
        "logsumexp",
        _logsumexp,
        None,
        "",
        lambda o, y, x: o.exp(x - y),
        "Logarithm of the sum of exponentials, without overflow.",
        scale=_scale_of_logsumexp,
        flops=10,
    ),
)
