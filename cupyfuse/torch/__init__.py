"""The frontend for PyTorch: modules and functions whose chains of operations run fused.

>>> import cupyfuse.torch
>>> model = cupyfuse.torch.fuse(model)                     # the same parameters, names, hooks, gradients
>>> print(model.explain())                                 # what was fused, and why the rest was not
>>> compiled = torch.compile(model, backend="cupyfuse")    # the same in graphs of `torch.compile`
"""

from .chains import custom_op as custom_op  # the operators of compiled graphs
from .explain import Explanation, Part, explain
from .functions import (
    linear_gelu,
    linear_log_softmax,
    linear_logsumexp,
    linear_softmax,
    log_softmax,
    logsumexp,
    softmax,
)
from .losses import LinearCrossEntropy, linear_cross_entropy
from .module import fuse, refresh
from .modules import (
    HeadLogSumExp,
    HeadSoftmax,
    HeadSum,
    LinearGELU,
    LinearLogSoftmax,
    LinearLogSumExp,
    LinearReLU,
    LinearSiLU,
    LinearSoftmax,
    LogSoftmax,
    Softmax,
)
from .registration import register

register()

__all__ = [
    "Explanation",
    "HeadLogSumExp",
    "HeadSoftmax",
    "HeadSum",
    "LinearCrossEntropy",
    "LinearGELU",
    "LinearLogSoftmax",
    "LinearLogSumExp",
    "LinearReLU",
    "LinearSiLU",
    "LinearSoftmax",
    "LogSoftmax",
    "Part",
    "Softmax",
    "explain",
    "fuse",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_log_softmax",
    "linear_logsumexp",
    "linear_softmax",
    "log_softmax",
    "logsumexp",
    "refresh",
    "softmax",
]
