"""Public functions: linear maps, normalisation, reductions as SciPy's and activations as PyTorch's.

Inside a fused function they become part of its graph. Called on arrays they run eagerly: one launch each on a GPU, two
for `linear`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes, trace
from ..ir.slices import average_pool
from ..trace import NamedConstant, Tracer, apply, fail, reduce
from . import lazy
from .checks import as_operand, check_integer, check_number, check_operand, check_rank, is_known_number
from .eager import Arguments, as_matrix, by_rows, traceable
from .fuse import Fused
from .row_functions import log_softmax, logsumexp, max, mean, min, prod, softmax, std, sum, var

# fmt: off
__all__ = [
    "avg_pool1d", "batch_norm", "celu", "clip", "elu", "erf", "gelu", "hardsigmoid", "hardswish", "hardtanh",
    "leaky_relu", "linear", "log_sigmoid", "log_softmax", "logsumexp", "max", "mean", "min", "mish", "prod", "relu",
    "relu6", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "std", "sum", "tanh", "var",
]
# fmt: on

# Linear -------------------------------------------------------------------------------------------------------------


@functools.partial(traceable, eager=by_rows)
def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Apply a linear map: ``x @ weight.T + bias``.

    Parameters
    ----------
    x : array, (B, K) or (K,)
        Rows of features.
    weight : array, (N, K)
        One row for each output, as in `torch.nn.functional.linear`. Lists have NumPy's dtype, float64 of floats.
    bias : array, (N,), optional

    Returns
    -------
    array, (B, N) or (N,)
        In the promoted dtype of the arguments.

    Raises
    ------
    TypeError
        An argument is neither an array nor a list of numbers.
    ValueError
        Shapes do not match.
    """
    weight = as_operand("weight", weight, x._trace)
    check_rank("weight", weight, 2, "(out_features, in_features)")
    if not x.ndim:
        check_rank("x", x, 1, "(in_features,) or (rows, in_features)")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: expected {weight.shape[1]} columns, as weight of shape {tuple(weight.shape)} has, got shape "
            f"{tuple(x.shape)}"
        )
    y = x @ weight.T
    if bias is None:
        return y
    bias = as_operand("bias", bias, x._trace)
    check_rank("bias", bias, 1, "(out_features,)")
    if bias.shape[0] != weight.shape[0]:
        raise ValueError(f"bias: expected shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    return y + bias


@functools.partial(traceable, eager=as_matrix)
def batch_norm(
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Any = None,
) -> Any:
    """Normalise each column, as `torch.nn.BatchNorm1d` does for (B, N).

    ``(x - mean) / sqrt(var + eps) * weight + bias``; Ioffe and Szegedy 2015, algorithms 1 and 2.

    Parameters
    ----------
    x : array, (B, N)
    running_mean, running_var : array, (N,), optional
        Statistics used in inference. Training updates them in place to ``(1 - m) * running + m * batch``, for momentum
        ``m`` and the unbiased variance.
    weight, bias : array, (N,), optional
        Scale and shift of each column.
    training : bool
        Normalise with this batch's mean and biased variance instead of the running statistics.
    momentum : float or None
        None keeps a cumulative average, for which `num_batches_tracked` is needed.
    eps : float
    num_batches_tracked : int64 array, (), optional
        Advanced by one in training.

    Returns
    -------
    array, (B, N)

    Raises
    ------
    ValueError
        A shape does not match, one of the running statistics is missing or, in training, no array of floats, a training
        batch has a single row, or `eps` is negative.
    """
    check_rank("x", x, 2, "(rows, columns)")
    columns = x.shape[1]
    vectors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    for name, value in vectors.items():
        if value is not None and getattr(value, "shape", None) != (columns,):
            raise ValueError(f"{name}: expected shape ({columns},), got {getattr(value, 'shape', value)}")
    check_number("eps", eps)
    if is_known_number(eps) and not eps >= 0:
        raise ValueError(f"eps: expected a number of at least 0, got {float(eps)}")
    if momentum is not None:
        check_number("momentum", momentum)
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean, running_var: give both or neither")
    if training or running_mean is None or running_var is None:
        if x.shape[0] == 1:
            raise ValueError(f"x: expected more than 1 row when training, got shape {tuple(x.shape)}")
        mean = reduce("mean", x, 0)
        var = trace.variance(x, 0)
        if training:
            _update_statistics(x, mean, var, running_mean, running_var, momentum, num_batches_tracked)
    else:
        mean, var = running_mean, trace.as_tracer(running_var, x._trace)
    y = (x - mean) / apply("sqrt", var + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _update_statistics(
    x: Tracer, mean: Tracer, var: Tracer, running_mean: Any, running_var: Any, momentum: float | None, batches: Any
) -> None:
    """Record the in-place updates of the running statistics and of the batch count."""
    if batches is not None:
        if isinstance(batches, np.generic):  # whose caller would not see it advance
            raise ValueError("num_batches_tracked: expected an array of shape (), which training updates, got a number")
        check_rank("num_batches_tracked", batches, 0, "()")
        batches += 1
    if running_mean is None:
        return
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if not dtypes.is_float(dtypes.name_of(value.dtype)):
            raise ValueError(f"{name}: expected floats, which training updates, got {value.dtype}")
    if x.shape[0] == 0:
        return
    if momentum is None:
        if batches is None:
            raise ValueError(
                "num_batches_tracked: expected an int64 array, since momentum=None averages over all batches"
            )
        is_wide = any(str(r.dtype) == "float64" for r in (running_mean, running_var))
        factor = 1.0 / batches.astype("float64" if is_wide else "float32")
    else:
        factor = momentum
    unbiased = NamedConstant(x.shape[0] / (x.shape[0] - 1), "unbiased")
    for running, batch in ((running_mean, mean), (running_var, var * unbiased)):
        running[...] = (running * (1.0 - factor) + batch * factor).astype(running.dtype)


def _pool_eager(fused: Fused, arguments: Arguments, out: Any) -> Any:
    """Pool the rows of an array of any rank; of a Dask array as means along an axis, which leaves its chunks alone."""
    x, size = arguments["x"], arguments["kernel_size"]
    if lazy.is_lazy(x) and x.ndim and size >= 1 and x.shape[-1] % size == 0:
        return mean(x.reshape(*x.shape[:-1], x.shape[-1] // size, size), axis=-1)
    return by_rows(fused, arguments, out)


@functools.partial(traceable, eager=_pool_eager)
def avg_pool1d(x: Any, kernel_size: int) -> Any:
    """Average groups of neighbouring columns, as `torch.nn.functional.avg_pool1d` with its default stride.

    Parameters
    ----------
    x : array, (B, N)
    kernel_size : int
        Columns in a group; has to divide N.

    Returns
    -------
    array, (B, N / kernel_size)

    Raises
    ------
    ValueError
        `x` is not a matrix, or `kernel_size` does not divide its columns.
    """
    check_rank("x", x, 2, "(rows, columns)")
    columns, size = x.shape[1], check_integer("kernel_size", kernel_size)
    if size < 1 or columns % size:
        raise ValueError(f"kernel_size: expected a divisor of {columns}, the number of columns, got {size}")
    return x._trace.array(average_pool(trace.matrix_node(x), size), (0, 1))


# Activations --------------------------------------------------------------------------------------------------------


def _activation(op: str, summary: str) -> Callable[..., Any]:
    """Return the public function of an activation without parameters, with its docstring."""

    def function(x: Any) -> Any:
        return apply(op, x)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"""{summary}

    Parameters
    ----------
    x : array, any shape

    Returns
    -------
    array
        Of the shape and dtype of `x`.
    """
    return traceable(function)


relu = _activation("relu", "Rectified linear unit, max(x, 0); NaN stays NaN.")
relu6 = _activation("relu6", "Limit x to [0, 6].")
silu = _activation("silu", "x * sigmoid(x), also called swish.")
sigmoid = _activation("sigmoid", "Logistic function, 1 / (1 + exp(-x)).")
log_sigmoid = _activation("log_sigmoid", "Logarithm of the logistic function.")
tanh = _activation("tanh", "Hyperbolic tangent.")
mish = _activation("mish", "x * tanh(softplus(x)); Misra 2019.")
selu = _activation("selu", "Self-normalising exponential linear unit; Klambauer et al. 2017.")
hardsigmoid = _activation("hardsigmoid", "relu6(x + 3) / 6.")
hardswish = _activation("hardswish", "x * relu6(x + 3) / 6.")
softsign = _activation("softsign", "x / (1 + |x|).")
erf = _activation("erf", "Error function.")


@traceable
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """Leaky rectified linear unit: x where it is positive, else ``negative_slope * x``; any shape, dtype kept."""
    check_operand("negative_slope", negative_slope)
    return apply("leaky_relu", x, negative_slope)


@traceable
def gelu(x: Any, approximate: str = "none") -> Any:
    """Gaussian error linear unit, ``x * Phi(x)``; Hendrycks and Gimpel 2016.

    Parameters
    ----------
    x : array, any shape
    approximate : {"none", "tanh"}
        "none" uses the error function, "tanh" the approximation by a hyperbolic tangent.

    Raises
    ------
    ValueError
        `approximate` is neither.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return apply("gelu" if approximate == "none" else "gelu_tanh", x)


@traceable
def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Smooth relu: ``log(1 + exp(beta * x)) / beta``, or x where ``beta * x > threshold``; any shape, dtype kept."""
    check_operand("beta", beta)
    check_operand("threshold", threshold)
    return apply("softplus", x, beta, threshold)


@traceable
def elu(x: Any, alpha: float = 1.0) -> Any:
    """Exponential linear unit: x where positive, else ``alpha * (exp(x) - 1)``; Clevert et al. 2015; any shape."""
    check_operand("alpha", alpha)
    return apply("elu", x, alpha)


@traceable
def celu(x: Any, alpha: float = 1.0) -> Any:
    """Continuous elu: x where positive, else ``alpha * (exp(x / alpha) - 1)``; Barron 2017; any shape.

    Raises ValueError where `alpha` is the number 0.
    """
    check_operand("alpha", alpha)
    if is_known_number(alpha) and alpha == 0:
        raise ValueError(f"alpha: expected a number other than 0, got {float(alpha)}; relu(x) is the limit")
    return apply("celu", x, alpha)


@traceable
def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """Limit x to [min_val, max_val]; any shape, dtype kept.

    Raises ValueError where `min_val` is a number above `max_val`.
    """
    check_operand("min_val", min_val)
    check_operand("max_val", max_val)
    if is_known_number(min_val) and is_known_number(max_val) and min_val > max_val:
        raise ValueError(f"min_val: expected at most max_val, {float(max_val)}, got {float(min_val)}")
    return apply("hardtanh", x, min_val, max_val)


@functools.partial(traceable, keeps_integers=True)
def clip(x: Any, min: Any = None, max: Any = None) -> Any:
    """Limit x to [min, max], either of which may be None; NaN stays NaN."""
    if min is None and max is None:
        fail("clip", "give min, max or both")
    for name, limit in (("min", min), ("max", max)):
        if limit is not None:
            check_operand(name, limit)
    return trace.clip(x, min, max)
