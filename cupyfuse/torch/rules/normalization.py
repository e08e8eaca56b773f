"""Rules of normalisation: layer, RMS, group, instance and batch norm, and `normalize`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import trace
from ...dtypes import compute_dtype, is_float
from ...trace import NamedConstant
from .axes import fold_dims
from .reductions import refused_order, vector_norm
from .table import F, Refused, overload, rule
from .values import Operand, Value, pointwise, refuse, require_float

# Normalisation of rows ----------------------------------------------------------------------------------------------


def _standardize(value: Value, first: int, eps: float, name: str, centred: bool = True) -> Value:
    """Compute (x - mean) / sqrt(variance + eps) over the dimensions from `first` on; not centred, with a mean of 0."""
    x, dims = fold_dims(require_float(value, name), range(first, value.ndim), name)
    if centred:
        spread = trace.variance(x, dims, keepdims=True)
        x = x - trace.reduce("mean", x, dims, keepdims=True)
    else:
        spread = trace.reduce("mean", trace.apply("square", x), dims, keepdims=True)
    return Value(x * trace.apply("reciprocal", trace.apply("sqrt", spread + eps)), value.shape)


def _scale_and_shift(y: Value, weight: Value | None, bias: Value | None, dtype: str) -> Value:
    """Compute y * weight + bias, and cast it to a dtype."""
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).astype(dtype)


def _check_shapes(name: str, shape: tuple[int, ...], *parameters: Value | None) -> None:
    """Refuse parameters of another shape."""
    for value in parameters:
        if value is not None and value.shape != shape:
            refuse(name, f"a parameter of shape {value.shape} where {shape} is expected")


def _first_normalized_dim(name: str, input: Value, normalized_shape: tuple[int, ...], *parameters: Value | None) -> int:
    """Return the first of the last dimensions that `normalized_shape` covers; refuse shapes that do not fit."""
    first = input.ndim - len(normalized_shape)
    if input.shape[first:] != normalized_shape:
        refuse(name, f"the last dimensions of {input.shape} are not {normalized_shape}")
    _check_shapes(name, normalized_shape, *parameters)
    return first


@rule(F.layer_norm, reduces=True)
def layer_norm(
    input: Value,
    normalized_shape: tuple[int, ...],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:
    first = _first_normalized_dim("layer_norm", input, normalized_shape, weight, bias)
    return _scale_and_shift(_standardize(input, first, eps, "layer_norm"), weight, bias, input.dtype)


@rule(reduces=True)
def rms_norm(
    input: Value, normalized_shape: tuple[int, ...], weight: Value | None = None, eps: float | None = None
) -> Value:
    first = _first_normalized_dim("rms_norm", input, normalized_shape, weight)
    if eps is None:
        eps = torch.finfo(getattr(torch, compute_dtype(require_float(input, "rms_norm").dtype))).eps
    y = _standardize(input, first, eps, "rms_norm", centred=False)
    return _scale_and_shift(y, weight, None, input.dtype)


def _normalize_arguments(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Adapt `normalize`; refuse `out` and what is no order."""
    if out is not None:
        return Refused("out= writes to a tensor that was given")
    reason = refused_order(p)
    return Refused(reason) if reason else (input, p, dim, eps)


@rule(F.normalize, adapt=_normalize_arguments, reduces=True)
def normalize(input: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    return input / pointwise("maximum", vector_norm(input, p, dim, True), eps)


@rule(F.group_norm, reduces=True)
def group_norm(
    input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    """Trace `group_norm`: each group of channels of each element of the batch is a row."""
    if input.ndim < 2 or input.shape[1] % num_groups:
        refuse("group_norm", f"{num_groups} groups in an input of shape {input.shape}")
    rows, channels, *rest = input.shape
    _check_shapes("group_norm", (channels,), weight, bias)
    grouped = input.view((rows, num_groups, channels // num_groups, *rest))
    return _per_channel(_standardize(grouped, 2, eps, "group_norm").view(input.shape), weight, bias, input.dtype)


def _instance_norm_arguments(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Adapt `instance_norm`; refuse running statistics."""
    if running_mean is not None or running_var is not None or not use_input_stats:
        return Refused("instance_norm with running statistics")
    return input, weight, bias, eps


@rule(F.instance_norm, adapt=_instance_norm_arguments, reduces=True)
def instance_norm(input: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5) -> Value:
    if input.ndim < 3:
        refuse("instance_norm", f"an input of shape {input.shape}")
    _check_shapes("instance_norm", input.shape[1:2], weight, bias)
    return _per_channel(_standardize(input, 2, eps, "instance_norm"), weight, bias, input.dtype)


def _per_channel(y: Value, weight: Value | None, bias: Value | None, dtype: str) -> Value:
    """Scale and shift by a weight and a bias for each channel, the second dimension."""
    weight, bias = (None if p is None else p.per_dim(1, y.ndim) for p in (weight, bias))
    return _scale_and_shift(y, weight, bias, dtype)


overload(
    "layer_norm", torch.layer_norm, adapt=lambda x, s, w=None, b=None, eps=1e-5, cudnn_enable=True: (x, s, w, b, eps)
)
overload(
    "group_norm", torch.group_norm, adapt=lambda x, n, w=None, b=None, eps=1e-5, cudnn_enabled=True: (x, n, w, b, eps)
)
overload(
    "instance_norm",
    torch.instance_norm,
    adapt=lambda x, w, b, mean, var, own, momentum, eps, _: _instance_norm_arguments(x, mean, var, w, b, own, eps=eps),
)

# Batch norm ---------------------------------------------------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var")
Statistics = tuple[Value, Value | None, Value | None]


def _batch_norm_eager(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    """Compute `F.batch_norm` and the new running statistics, None in inference, without updating in place."""
    if not training:
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps), None, None
    mean, var = (None if r is None else r.clone() for r in (mean, var))
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


@rule(F.batch_norm, eager=_batch_norm_eager, reduces=True, updates=_STATISTICS)
def batch_norm(
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: Operand = 0.1,
    eps: float = 1e-5,
) -> Statistics:
    """Trace `batch_norm`; return the normalised input and, in training, the new running statistics.

    Images, (N, C, ...), are normalised in inference alone: their statistics would be of two dimensions that are apart.
    """
    images = math.prod(input.shape[2:]) != 1
    if input.ndim < 2 or (images and training):
        refuse("batch_norm", f"an input of shape {input.shape}{' in training' * training}; (rows, columns) is fused")
    value = require_float(input, "batch_norm").view(input.shape if images else input.shape[:2])
    rows, channels = value.shape[:2]
    _check_shapes("batch_norm", (channels,), running_mean, running_var, weight, bias)
    if training:
        if rows < 2:
            refuse("batch_norm", f"a training batch of {rows} rows")
        mean, var = Value(trace.reduce("mean", value.settled, 0)), Value(trace.variance(value.settled, 0))
        unbiased = Value(var.settled * NamedConstant(rows / (rows - 1), "unbiased"))
    elif running_mean is None or running_var is None:
        refuse("batch_norm", "running statistics are missing")
    else:
        mean, var = running_mean, running_var
    y = value - mean.per_dim(1, value.ndim)
    y = y * pointwise("reciprocal", pointwise("sqrt", var + eps)).per_dim(1, value.ndim)
    y = _per_channel(y, weight, bias, input.dtype).view(input.shape)
    if not training:
        return y, None, None
    return y, _move_average(running_mean, mean, momentum), _move_average(running_var, unbiased, momentum)


def _move_average(running: Value | None, batch: Value, momentum: Operand) -> Value | None:
    """Move a running statistic towards the batch's, whose weight is `momentum`."""
    return None if running is None else (running * (1.0 - momentum) + batch * momentum).astype(running.dtype)


def _batch_norm_module_eager(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, count: Any, training: bool, momentum: float | None, eps: float
) -> tuple[Any, Any, Any, Any]:
    """Compute `BatchNorm1d.forward` and the new values of its buffers, without synchronising for the batch count."""
    new_count = count + 1 if training and count is not None else None
    by_batch = training or (mean is None and var is None)
    if not training or momentum is not None or mean is None or var is None:
        factor = 0.0 if momentum is None else momentum
        y, mean, var = _batch_norm_eager(x, mean, var, weight, bias, by_batch, factor, eps)
        return y, mean, var, new_count
    y, *batch = _batch_norm_eager(x, torch.zeros_like(mean), torch.zeros_like(var), weight, bias, True, 1.0, eps)
    factor = 0.0 if new_count is None else 1.0 / new_count.double()
    moved = (running * (1.0 - factor) + new * factor for running, new in zip((mean, var), batch, strict=True))
    return (y, *(m.to(r.dtype) for m, r in zip(moved, (mean, var), strict=True)), new_count)


@rule(eager=_batch_norm_module_eager, reduces=True, updates=(*_STATISTICS, "num_batches_tracked"))
def batch_norm_module(
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    num_batches_tracked: Value | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> tuple[Value, Value | None, Value | None, Value | None]:
    """Trace `torch.nn.BatchNorm1d`, its counter included; a momentum of None keeps a cumulative average.

    Returns the result and the new values of `updates`.
    """
    new_count = num_batches_tracked + 1 if training and num_batches_tracked is not None else None
    factor: Operand = 0.0 if momentum is None else momentum
    if momentum is None and new_count is not None:
        floats = [r.dtype for r in (running_mean, running_var) if r is not None and is_float(r.dtype)]
        factor = pointwise("reciprocal", new_count.astype("float64" if "float64" in floats else "float32"))
    if not training and running_mean is None and running_var is None:
        # Without running statistics the module normalises by the batch's, in inference as well.
        y, *_ = batch_norm(input, None, None, weight, bias, True, 0.0, eps)
        return y, None, None, None
    y, mean, var = batch_norm(input, running_mean, running_var, weight, bias, training, factor, eps)
    return y, mean, var, new_count


overload(
    "batch_norm",
    torch.batch_norm,
    adapt=lambda x, w, b, mean, var, training, momentum, eps, _=True: (x, mean, var, w, b, training, momentum, eps),
)
