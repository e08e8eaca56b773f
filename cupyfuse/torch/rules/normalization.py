"""Normalisation by the moments of rows or columns."""

from __future__ import annotations

import math
from typing import Any

import torch

from ... import trace
from ...dtypes import compute, is_float
from ...trace import ScalarArgument
from .overloads import Call, overload
from .promotion import floats, pointwise
from .reductions import vector_norm
from .table import Refused, rule
from .values import Value, lengthwise, refuse

F = torch.nn.functional


def _standardized(value: Value, first: int, eps: float, name: str, centred: bool = True) -> Value:
    """(x - mean) / sqrt(variance + eps) over the dimensions from `first` on; about zero unless `centred`."""
    x, axis = lengthwise(value, tuple(range(first, value.ndim)), name)
    if centred:
        spread = trace.variance(x, axis, keepdims=True)
        x = x - trace.reduce("mean", x, axis, keepdims=True)
    else:
        spread = trace.reduce("mean", trace.apply("square", x), axis, keepdims=True)
    return Value(x * trace.apply("reciprocal", trace.apply("sqrt", spread + eps)), value.shape)


def _affine(y: Value, weight: Value | None, bias: Value | None, dtype: str) -> Value:
    if weight is not None:
        y = pointwise("multiply", y, weight)
    if bias is not None:
        y = pointwise("add", y, bias)
    return y.astype(dtype)


def _fits(name: str, shape: tuple[int, ...], *parameters: Value | None) -> None:
    for value in parameters:
        if value is not None and value.shape != shape:
            refuse(name, f"a parameter of shape {value.shape} where {shape} is expected")


# Along the last dimensions ------------------------------------------------------------------------------------------


@rule("layer_norm", F.layer_norm, reduces=True)
def layer_norm(
    input: Value,
    normalized_shape: tuple[int, ...],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Value:
    first = input.ndim - len(normalized_shape)
    if input.shape[first:] != normalized_shape:
        refuse("layer_norm", f"the last dimensions of {input.shape} are not {normalized_shape}")
    _fits("layer_norm", normalized_shape, weight, bias)
    return _affine(_standardized(floats(input, "layer_norm"), first, eps, "layer_norm"), weight, bias, input.dtype)


@rule("rms_norm", F.rms_norm, reduces=True)
def rms_norm(
    input: Value, normalized_shape: tuple[int, ...], weight: Value | None = None, eps: float | None = None
) -> Value:
    first = input.ndim - len(normalized_shape)
    if input.shape[first:] != normalized_shape:
        refuse("rms_norm", f"the last dimensions of {input.shape} are not {normalized_shape}")
    _fits("rms_norm", normalized_shape, weight)
    if eps is None:
        eps = torch.finfo(getattr(torch, compute(floats(input, "rms_norm").dtype))).eps
    return _affine(_standardized(input, first, eps, "rms_norm", centred=False), weight, None, input.dtype)


@rule("normalize", F.normalize, reduces=True)
def normalize(input: Value, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Value:
    size = vector_norm(input, p, dim, True)
    return pointwise("divide", input, pointwise("maximum", size, eps))


def _normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Any:
    if out is not None:
        return Refused("out= writes to a tensor that was given")
    if p not in (1, 2, math.inf):
        return Refused(f"a norm of order {p}; orders 1, 2 and inf are fused")
    return input, p, dim, eps


@rule("group_norm", F.group_norm, reduces=True)
def group_norm(
    input: Value, num_groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Value:
    """Each group of channels of each element of the batch is a row."""
    if input.ndim < 2 or input.shape[1] % num_groups:
        refuse("group_norm", f"{num_groups} groups in an input of shape {input.shape}")
    rows, channels, *rest = input.shape
    _fits("group_norm", (channels,), weight, bias)
    grouped = floats(input, "group_norm").viewed((rows, num_groups, channels // num_groups, *rest))
    y = _standardized(grouped, 2, eps, "group_norm").viewed(input.shape)
    return _affine(y, _per_channel(weight, len(rest)), _per_channel(bias, len(rest)), input.dtype)


def _per_channel(value: Value | None, after: int) -> Value | None:
    return None if value is None else value.viewed((*value.shape, *(1,) * after))


@rule("instance_norm", lambda x, weight, bias, eps: F.instance_norm(x, weight=weight, bias=bias, eps=eps), reduces=True)
def instance_norm(input: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5) -> Value:
    if input.ndim < 3:
        refuse("instance_norm", f"an input of shape {input.shape}")
    _fits("instance_norm", input.shape[1:2], weight, bias)
    y = _standardized(floats(input, "instance_norm"), 2, eps, "instance_norm")
    after = input.ndim - 2
    return _affine(y, _per_channel(weight, after), _per_channel(bias, after), input.dtype)


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None or running_var is not None or not use_input_stats:
        return Refused("instance_norm with running statistics")
    return input, weight, bias, eps


def _instance_norm_of_aten(
    input: Any, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, _: Any
) -> Any:
    return _instance_norm(input, mean, var, weight, bias, use_input_stats, momentum, eps)


overload("layer_norm", F.layer_norm)
overload(
    "layer_norm", torch.layer_norm, adapt=lambda x, s, w=None, b=None, eps=1e-5, cudnn_enable=True: (x, s, w, b, eps)
)
overload("rms_norm", "rms_norm")
overload("normalize", F.normalize, adapt=_normalize)
overload("group_norm", F.group_norm)
overload(
    "group_norm", torch.group_norm, adapt=lambda x, n, w=None, b=None, eps=1e-5, cudnn_enabled=True: (x, n, w, b, eps)
)
overload("instance_norm", F.instance_norm, adapt=_instance_norm)
overload("instance_norm", torch.instance_norm, adapt=_instance_norm_of_aten)

# Down the columns ---------------------------------------------------------------------------------------------------

_STATISTICS = ("running_mean", "running_var")


def _batch_norm_eager(
    x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, Any, Any]:
    if not training:
        return F.batch_norm(x, mean, var, weight, bias, False, momentum, eps), None, None
    mean, var = (None if r is None else r.clone() for r in (mean, var))
    return F.batch_norm(x, mean, var, weight, bias, True, momentum, eps), mean, var


@rule("batch_norm", _batch_norm_eager, reduces=True, updates=_STATISTICS)
def batch_norm(
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Value, Value | None, Value | None]:
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _batch_norm(
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None,
    bias: Value | None,
    training: bool,
    factor: float | Value,
    eps: float,
) -> tuple[Value, Value | None, Value | None]:
    """The normalised columns, and the running statistics after them where they are kept.

    `factor` is the share that this batch has in the new running statistics.
    """
    if input.ndim < 2 or math.prod(input.shape[2:]) != 1:
        refuse("batch_norm", f"an input of shape {input.shape}; (rows, columns) is fused")
    value = floats(input, "batch_norm").viewed(input.shape[:2])
    rows, columns = value.shape
    _fits("batch_norm", (columns,), running_mean, running_var, weight, bias)
    if not training:
        if running_mean is None or running_var is None:
            refuse("batch_norm", "running statistics are missing")
        y = _about(value, running_mean, running_var, eps)
        return _affine(y, weight, bias, input.dtype).viewed(input.shape), None, None
    if rows < 2:
        refuse("batch_norm", f"a training batch of {rows} rows")
    x = value.matrix()
    mean, var = (Value(t, (columns,)) for t in (trace.reduce("mean", x, 0), trace.variance(x, 0)))
    unbiased = Value(var.tracer * ScalarArgument(rows / (rows - 1), "unbiased"), var.shape)
    y = _affine(_about(value, mean, var, eps), weight, bias, input.dtype).viewed(input.shape)
    return y, _moved(running_mean, mean, factor), _moved(running_var, unbiased, factor)


def _about(x: Value, mean: Value, var: Value, eps: float) -> Value:
    return pointwise("divide", pointwise("subtract", x, mean), pointwise("sqrt", pointwise("add", var, eps)))


def _moved(running: Value | None, batch: Value, factor: float | Value) -> Value | None:
    """The running statistic, moved towards the batch's."""
    if running is None:
        return None
    rest = pointwise("subtract", 1.0, factor) if isinstance(factor, Value) else 1.0 - factor
    kept, added = pointwise("multiply", running, rest), pointwise("multiply", batch, factor)
    return pointwise("add", kept, added).astype(running.dtype)


def _module_eager(
    x: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    count: Any,
    training: bool,
    momentum: float | None,
    eps: float,
) -> tuple[Any, Any, Any, Any]:
    """`BatchNorm1d.forward` without changing anything, and without waiting for the number of batches."""
    new_count = count + 1 if training and count is not None else None
    own = training or (mean is None and var is None)
    if not training or momentum is not None or mean is None or var is None:
        factor = 0.0 if momentum is None else momentum
        y, mean, var = _batch_norm_eager(x, mean, var, weight, bias, own, factor, eps)
        return y, mean, var, new_count
    y, *batch = _batch_norm_eager(x, torch.zeros_like(mean), torch.zeros_like(var), weight, bias, True, 1.0, eps)
    factor = 0.0 if new_count is None else 1.0 / new_count.double()
    moved = (running * (1.0 - factor) + new * factor for running, new in zip((mean, var), batch, strict=True))
    return (y, *(m.to(r.dtype) for m, r in zip(moved, (mean, var), strict=True)), new_count)


@rule("batch_norm_module", _module_eager, reduces=True, updates=(*_STATISTICS, "num_batches_tracked"))
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
    """`torch.nn.BatchNorm1d` as a whole; a momentum of None keeps a cumulative average."""
    new_count = None
    if training and num_batches_tracked is not None:
        new_count = pointwise("add", num_batches_tracked, 1)
    factor: float | Value = 0.0 if momentum is None else momentum
    if momentum is None and new_count is not None:
        given = [r.dtype for r in (running_mean, running_var) if r is not None and is_float(r.dtype)]
        factor = pointwise("reciprocal", new_count.astype("float64" if "float64" in given else "float32"))
    if not training and running_mean is None and running_var is None:
        y, *_ = _batch_norm(input, None, None, weight, bias, True, 0.0, eps)
        return y, None, None, None
    y, mean, var = _batch_norm(input, running_mean, running_var, weight, bias, training, factor, eps)
    return y, mean, var, new_count


def _batch_norm_of_aten(
    x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, _: bool = True
) -> Any:
    return Call((x, mean, var, w, b, training, momentum, eps))


overload("batch_norm", F.batch_norm)
overload("batch_norm", torch.batch_norm, adapt=_batch_norm_of_aten)
