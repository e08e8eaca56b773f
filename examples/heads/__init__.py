"""Three heads of networks as fused functions: examples, benchmarks and the command line run them.

Each shows another effect of fusing: `head_logsumexp` makes one pass over the matrix product's result, `head_sum` needs
no matrix product, and `head_softmax` normalises, scales and takes the softmax of a row in one pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import Fused, dtypes

# The benchmarks' shape.
ROWS, IN_FEATURES, OUT_FEATURES = 1024, 8192, 8192


@cf.fuse
def head_logsumexp(x: Any, weight: Any, bias: Any, negative_slope: float = 0.01, approximate: str = "none") -> Any:
    """Linear, logsumexp over the row, LeakyReLU twice, GELU twice.

    Parameters
    ----------
    x : array, (B, K)
    weight : array, (N, K)
    bias : array, (N,)
    negative_slope : float
        Of each LeakyReLU; applied twice, a negative value is scaled by its square.
    approximate : {"none", "tanh"}
        The form of GELU.

    Returns
    -------
    array, (B, 1)
    """
    s = cf.logsumexp(cf.linear(x, weight, bias), axis=1, keepdims=True)
    s = cf.leaky_relu(cf.leaky_relu(s, negative_slope), negative_slope)
    return cf.gelu(cf.gelu(s, approximate), approximate)


@cf.fuse
def head_sum(x: Any, weight: Any, bias: Any) -> Any:
    """Linear, then sum, max, mean, logsumexp and logsumexp over the row: all after the sum see one element.

    Parameters
    ----------
    x : array, (B, K)
    weight : array, (N, K)
    bias : array, (N,)

    Returns
    -------
    array, (B, 1)
    """
    s = cf.sum(cf.linear(x, weight, bias), axis=1, keepdims=True)
    s = cf.max(s, axis=1, keepdims=True)
    s = cf.mean(s, axis=1, keepdims=True)
    s = cf.logsumexp(s, axis=1, keepdims=True)
    return cf.logsumexp(s, axis=1, keepdims=True)


@cf.fuse
def head_softmax(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    gamma: Any,
    beta: Any,
    scale: Any,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Any = None,
) -> Any:
    """Linear, BatchNorm, a scale, softmax over the row.

    Parameters
    ----------
    x : array, (B, K)
    weight : array, (N, K)
    bias : array, (N,)
    running_mean, running_var : array, (N,)
        Statistics of the columns; training updates them in place and does not use them.
    gamma, beta : array, (N,)
        Scale and shift of the normalisation.
    scale : array, (1,) or (N,)
        Of the logits; may be negative.
    training : bool
        Normalise with this batch's statistics; needs at least two rows.
    momentum : float or None
        Weight of this batch in the running statistics; None averages over all batches, for which
        `num_batches_tracked` is needed.
    eps : float
        Added to the variance.
    num_batches_tracked : int64 array, (), optional
        Advanced by one in training.

    Returns
    -------
    array, (B, N)
    """
    y = cf.linear(x, weight, bias)
    y = cf.batch_norm(y, running_mean, running_var, gamma, beta, training, momentum, eps, num_batches_tracked)
    return cf.softmax(scale * y, axis=1)


HEADS: dict[str, Fused] = {
    "head_logsumexp": head_logsumexp,
    "head_sum": head_sum,
    "head_softmax": head_softmax,
}


def find(name: str) -> Fused:
    """Return the head of a name, with or without its prefix ('head_sum' or 'sum').

    Raises
    ------
    ValueError
        There is no such head.
    """
    head = HEADS.get(name) or HEADS.get(f"head_{name}")
    if head is None:
        raise ValueError(f"head: expected one of {', '.join(HEADS)}, got {name!r}")
    return head


def input_shapes(
    head: Fused | str, rows: int = ROWS, in_features: int = IN_FEATURES, out_features: int = OUT_FEATURES
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's array arguments, by name in the order of its signature."""
    head = find(head) if isinstance(head, str) else head
    shapes: dict[str, tuple[int, ...]] = {
        "x": (rows, in_features),
        "weight": (out_features, in_features),
        "bias": (out_features,),
    }
    if head is head_softmax:
        shapes |= dict.fromkeys(("running_mean", "running_var", "gamma", "beta"), (out_features,))
        shapes["scale"] = (1,)
    return shapes


def example_inputs(
    head: Fused | str,
    rows: int = ROWS,
    in_features: int = IN_FEATURES,
    out_features: int = OUT_FEATURES,
    dtype: Any = "float32",
    seed: int = 0,
) -> dict[str, np.ndarray[Any, Any]]:
    """Draw the reference data of a head: a batch in [0, 1), and the weights of a new linear layer.

    Parameters
    ----------
    head : Fused or str
        One of the heads, or its name.
    rows, in_features, out_features : int
        B, K and N.
    dtype : str or dtype
        "float16", "bfloat16", "float32" or "float64".
    seed : int
        The same seed gives the same x, weight and bias for every head; the 16-bit ones are the float32 ones rounded.

    Returns
    -------
    dict of str to numpy.ndarray
        Arguments by name: `head(**example_inputs(head))` runs. `x` is uniform in [0, 1), `weight` and `bias` in
        ±1/sqrt(in_features). Statistics and parameters of the normalisation are those of a trained layer: zeros and
        ones could hide mistakes.

    Raises
    ------
    ValueError
        There is no such head.
    """
    name = dtypes.name_of(dtype)
    if not dtypes.is_float(name):
        raise TypeError(f"dtype: expected one of {', '.join(dtypes.FLOATS)}, got {name!r}")
    limit = 1.0 / np.sqrt(in_features)
    ranges = {
        "x": (0.0, 1.0),
        "weight": (-limit, limit),
        "bias": (-limit, limit),
        "running_mean": (-0.5, 0.5),
        "running_var": (0.1, 1.0),
        "gamma": (0.5, 1.5),
        "beta": (-0.5, 0.5),
        "scale": (0.5, 1.5),
    }
    generator = np.random.default_rng(seed)
    drawn: type[np.float32 | np.float64] = np.float64 if name == "float64" else np.float32
    inputs = {}
    for argument, shape in input_shapes(head, rows, in_features, out_features).items():
        low, high = ranges[argument]
        values = generator.random(shape, dtype=drawn)
        # In place: a temporary of the benchmark's weight costs more than drawing it.
        values *= drawn(high - low)
        values += drawn(low)
        inputs[argument] = values.astype(dtypes.to_numpy(name), copy=False)
    return inputs
