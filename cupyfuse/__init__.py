"""Fused GEMM -> row-operation chains on NVIDIA GPUs, written as plain NumPy code.

>>> import cupyfuse as cf
>>> @cf.fuse
... def head(x, weight, bias):
...     return cf.softmax(cf.linear(x, weight, bias), axis=1)
"""

from .arrays import Spec, spec
from .errors import EngineError, TraceError
from .functions import (
    avg_pool1d,
    batch_norm,
    celu,
    clip,
    elu,
    erf,
    gelu,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    linear,
    log_sigmoid,
    log_softmax,
    logsumexp,
    max,
    mean,
    min,
    mish,
    prod,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    softmax,
    softplus,
    softsign,
    std,
    sum,
    tanh,
    var,
)
from .fuse import Bound, Fused, fuse
from .options import precision
from .plan import Plan
from .schedule import Step

__version__ = "0.1.0"

__all__ = [
    "Bound",
    "EngineError",
    "Fused",
    "Plan",
    "Spec",
    "Step",
    "TraceError",
    "avg_pool1d",
    "batch_norm",
    "celu",
    "clip",
    "elu",
    "erf",
    "fuse",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "mish",
    "precision",
    "prod",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "softsign",
    "spec",
    "std",
    "sum",
    "tanh",
    "var",
]
