"""Fused GEMM -> row-operation chains on NVIDIA GPUs, written as plain NumPy code.

>>> import cupyfuse as cf
>>> @cf.fuse
... def head(x, weight, bias):
...     return cf.softmax(cf.linear(x, weight, bias), axis=1)
"""

from collections.abc import Sequence as _Sequence
from pathlib import Path as _Path
from typing import Any as _Any

from .api.arrays import Spec, spec
from .api.elementwise_losses import (
    binary_cross_entropy_with_logits,
    hinge_loss,
    huber_loss,
    kl_div,
    mse_loss,
    sigmoid_focal_loss,
)
from .api.functions import (
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
from .api.fuse import Bound, Fused, fuse
from .api.lazy import set_frontend as _set_frontend
from .api.losses import cross_entropy, nll_loss
from .api.partial import Partial, partial
from .api.registry import register
from .errors import EngineError, TraceError
from .plan.plan import Plan, set_emitter
from .plan.schedule import Step
from .settings import precision

__version__ = "0.1.0"


def _emit(plan: Plan, inline: bool) -> _Sequence[str]:
    """Return the CUDA source of each step; imports the emitter only when somebody asks for source."""
    from .cuda.sources import plan_sources

    return plan_sources(plan, inline)


set_emitter(_emit)


def _call_on_dask(*arguments: _Any) -> _Any:
    """Call a function on Dask arrays; imports the frontend only when one arrives."""
    from .dask import call

    return call(*arguments)


_set_frontend(_call_on_dask)

# `cupyfuse.heads` is a folder of the package where it is installed, and `examples/heads` in a checkout.
_EXAMPLES = _Path(__file__).resolve().parent.parent / "examples"
if (_EXAMPLES / "heads").is_dir():
    __path__.append(str(_EXAMPLES))

__all__ = [
    "Bound",
    "EngineError",
    "Fused",
    "Partial",
    "Plan",
    "Spec",
    "Step",
    "TraceError",
    "avg_pool1d",
    "batch_norm",
    "binary_cross_entropy_with_logits",
    "celu",
    "clip",
    "cross_entropy",
    "elu",
    "erf",
    "fuse",
    "gelu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "hinge_loss",
    "huber_loss",
    "kl_div",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "max",
    "mean",
    "min",
    "mish",
    "mse_loss",
    "nll_loss",
    "partial",
    "precision",
    "prod",
    "register",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "sigmoid_focal_loss",
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
