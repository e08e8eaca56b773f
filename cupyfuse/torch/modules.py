"""Drop-in modules: the three heads, and common tails of networks, each one chain.

They have the constructor, the random draws and the parameter names of the modules that they replace, so that seeds and
checkpoints carry over. A call goes straight to the chain's runner, without a capture and what guards it: the path of
the lowest latency. The same operations run in eager where the chain may not be what a call computes: with hooks on a
submodule, a submodule of another class, a compiler at work.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as hooks

from .chains.runner import Runner
from .explain import Part, explain, refusals
from .functions import Step, apply_steps, build_chain, log_softmax, softmax
from .module import FallbackMethod, refresh
from .rules.symbols import Ref

Tensor: TypeAlias = torch.Tensor
_WEIGHT, _BIAS = Ref(1), Ref(2)
_PLAIN = (nn.Linear, nn.BatchNorm1d)  # whose attributes are what their tables have
_FORWARDS = {cls: cls.forward for cls in _PLAIN}  # which libraries may replace


class _Runners:
    """The runners of one drop-in module, by configuration; copies of the module do not share them."""

    def __init__(self) -> None:
        self.by_steps: dict[Any, Runner] = {}
        self.latest: dict[bool, tuple[Any, Runner]] = {}  # steps after a linear layer, by whether that has a bias
        self.by_form: dict[Any, Runner] = {}  # by what the steps of `HeadSoftmax` depend on

    @property
    def runners(self) -> list[Runner]:
        return list(self.by_steps.values())

    @property
    def kept(self) -> int:
        """Bytes of prepacked weights."""
        return sum(runner.budget.used for runner in self.runners)

    def parts(self, path: str) -> list[Part]:
        """List what was fused, for `explain`."""
        fused = [(r.chain.operations, tuple(r.plans)) for r in self.runners]
        return [*(Part(path, names, plans) for names, plans in fused if plans), *refusals(path, self.runners)]


class _DropIn(nn.Module):
    """Base of drop-in modules: runners, `explain` and `refresh`."""

    explain = FallbackMethod(explain)
    refresh = FallbackMethod(refresh)

    def _runners(self) -> _Runners:
        return self.__dict__.get("_cupyfuse") or self.__dict__.setdefault("_cupyfuse", _Runners())

    def _runner(self, steps: tuple[Step, ...], names: tuple[str, ...], slope_sign: float = 1.0) -> Runner:
        """Return the runner of steps as one chain, whose inputs after the first are the module's parameters.

        `slope_sign`, the sign of a slope among the constants of `steps`, is a part of the cache's key: steps with 0.0
        and with -0.0 compare equal, and compute different zeros.
        """
        by_steps, key = self._runners().by_steps, (steps, slope_sign)
        runner = by_steps.get(key)
        if runner is None:
            fixed = frozenset(range(1, len(names)))
            runner = by_steps.setdefault(key, Runner(build_chain(steps, names, fixed)))
        return runner

    def _run_linear_chain(
        self, x: Tensor, layer: nn.Linear, steps: tuple[Step, ...], slope_sign: float = 1.0
    ) -> Tensor:
        """Run a linear layer, the submodule `linear` or the module itself, and the steps that follow it.

        Looking up the runner is fast where `steps` is the same object as in the last call. `slope_sign` is that of
        `_runner`.
        """
        if _is_watched(x) or (layer is not self and not _is_plain(layer, nn.Linear)):
            return apply_steps(steps, (layer(x) if layer is not self else nn.Linear.forward(layer, x),))
        weight, bias = _member(layer, "_parameters", "weight"), _member(layer, "_parameters", "bias")
        biased = bias is not None
        latest = self._runners().latest
        known, runner = latest.get(biased) or (None, None)
        if known is not steps or runner is None:
            prefix = "linear." if layer is not self else ""
            names = ("input", f"{prefix}weight", f"{prefix}bias")[: 2 + biased]
            linear = Step("linear", (_WEIGHT, _BIAS) if biased else (_WEIGHT,))
            runner = self._runner((linear, *steps), names, slope_sign)
            latest[biased] = steps, runner
        result: Tensor = runner((x, weight, bias) if biased else (x, weight))[0]
        return result

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # Tensors move to another device or dtype: weights prepacked from the old ones should not keep memory.
        self.__dict__.pop("_cupyfuse", None)
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {k: v for k, v in state.items() if k != "_cupyfuse"}


def _member(module: nn.Module, table: str, name: str) -> Any:
    """Read a parameter, buffer or submodule: three times as fast from its table, unless a class may redefine it."""
    cls, own = type(module), module.__dict__
    if (cls in _PLAIN or cls.__module__ == __name__) and name in own[table] and name not in own:
        return own[table][name]
    return getattr(module, name)


def _is_watched(x: Any) -> bool:
    """Whether a compiler, a global hook or autocast observes or changes the operations on `x`."""
    return (
        torch.compiler.is_dynamo_compiling()
        or not isinstance(x, torch.Tensor)
        or hooks._has_any_global_hook()
        or torch._C._is_any_autocast_enabled()  # PyTorch chooses the dtypes
    )


def _is_plain(layer: nn.Module, expected: type[nn.Module]) -> bool:
    """Whether a submodule is exactly of a class that is PyTorch's still, without hooks or a forward of its own."""
    own = layer.__dict__
    return (
        type(layer) is expected
        and expected.forward is _FORWARDS[expected]
        and not (
            "forward" in own
            or own.get("_forward_hooks")
            or own.get("_forward_pre_hooks")
            or own.get("_backward_hooks")
            or own.get("_backward_pre_hooks")
        )
    )


class HeadLogSumExp(_DropIn):
    """Linear, logsumexp over the row, LeakyReLU twice, GELU twice.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    negative_slope : float
        Of each LeakyReLU.
    approximate : {"none", "tanh"}
        The form of GELU.

    Notes
    -----
    Takes (B, in_features), returns (B, 1). Parameters are those of `linear`, a `torch.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        negative_slope: float = 0.01,
        approximate: str = "none",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.negative_slope, self.approximate = negative_slope, approximate

    def forward(self, x: Tensor) -> Tensor:
        slope_sign = math.copysign(1.0, self.negative_slope)
        steps_of = _logsumexp_steps if torch.compiler.is_dynamo_compiling() else _cached_logsumexp_steps
        steps = steps_of(float(self.negative_slope), slope_sign, self.approximate)
        return self._run_linear_chain(x, _member(self, "_modules", "linear"), steps, slope_sign)


def _logsumexp_steps(negative_slope: float, slope_sign: float, approximate: str) -> tuple[Step, ...]:
    """Return the steps of `HeadLogSumExp`; its cache tells slopes of 0.0 and -0.0 apart by `slope_sign`."""
    leaky = Step("leaky_relu", (negative_slope,))
    gelu = Step("gelu", options=(("approximate", approximate),))
    return (Step("logsumexp", (1, True)), leaky, leaky, gelu, gelu)


_cached_logsumexp_steps = functools.lru_cache(maxsize=256)(_logsumexp_steps)


class HeadSum(_DropIn):
    """Linear, then sum, max, mean, logsumexp and logsumexp over the row, of which all but the sum see one element.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool

    Notes
    -----
    Takes (B, in_features), returns (B, 1). Parameters are those of `linear`, a `torch.nn.Linear`.
    """

    _STEPS: ClassVar[tuple[Step, ...]] = (
        Step("sum", (1, True)),
        Step("amax", (1, True)),
        Step("mean", (1, True)),
        Step("logsumexp", (1, True)),
        Step("logsumexp", (1, True)),
    )

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self._run_linear_chain(x, _member(self, "_modules", "linear"), self._STEPS)


class HeadSoftmax(_DropIn):
    """Linear, BatchNorm1d, a scale, softmax over the row.

    Parameters
    ----------
    in_features, out_features : int
    bn_eps : float
    bn_momentum : float or None
    scale_shape : tuple of int
        (1,) for one scale, (out_features,) for one a column; ones at first.
    bias : bool

    Notes
    -----
    Takes (B, in_features), returns (B, out_features). Parameters are those of `gemm`, a `torch.nn.Linear`, and of `bn`,
    a `torch.nn.BatchNorm1d`, and `scale`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bn_eps: float = 1e-5,
        bn_momentum: float | None = 0.1,
        scale_shape: tuple[int, ...] = (1,),
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.bn = nn.BatchNorm1d(out_features, eps=bn_eps, momentum=bn_momentum, device=device, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(scale_shape, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        gemm, bn = _member(self, "_modules", "gemm"), _member(self, "_modules", "bn")
        plain = _is_plain(gemm, nn.Linear) and _is_plain(bn, nn.BatchNorm1d)
        if _is_watched(x) or not plain or x.dim() != 2:
            return torch.softmax(self.scale * bn(gemm(x)), dim=1)
        tracks = bn.track_running_stats
        has_statistics = tracks or not bn.training  # else PyTorch neither reads nor updates them
        parameters = (  # as `_SOFTMAX_PARAMETERS` names them
            _member(gemm, "_parameters", "weight"),
            _member(gemm, "_parameters", "bias"),
            _member(bn, "_buffers", "running_mean") if has_statistics else None,
            _member(bn, "_buffers", "running_var") if has_statistics else None,
            _member(bn, "_parameters", "weight"),
            _member(bn, "_parameters", "bias"),
            _member(bn, "_buffers", "num_batches_tracked") if bn.training and tracks else None,
            _member(self, "_parameters", "scale"),
        )
        given = [t for t in parameters if t is not None]
        form = (bn.training, bn.momentum, bn.eps, *[t is not None for t in parameters])
        by_form = self._runners().by_form
        runner = by_form.get(form)
        if runner is None:
            runner = by_form[form] = self._runner(*_softmax_steps(*form))
        result: Tensor = runner((x, *given))[0]
        return result


_SOFTMAX_PARAMETERS = (
    *("gemm.weight", "gemm.bias", "bn.running_mean", "bn.running_var", "bn.weight", "bn.bias"),
    *("bn.num_batches_tracked", "scale"),
)


def _softmax_steps(
    training: bool, momentum: float | None, eps: float, *given: bool
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Return the steps of `HeadSoftmax`, and the names of its inputs: `given` says which parameters there are."""
    names = ["input", *(name for name, present in zip(_SOFTMAX_PARAMETERS, given, strict=True) if present)]
    weight, bias, *of_norm, scale = (Ref(names.index(n)) if n in names else None for n in _SOFTMAX_PARAMETERS)
    steps = (
        Step("linear", (weight,) if bias is None else (weight, bias)),
        Step("batch_norm_module", (*of_norm, training, momentum, eps)),
        Step("mul", (scale,)),
        Step("softmax", (1,)),
    )
    return steps, tuple(names)


# Linear layers and the operation after them -------------------------------------------------------------------------


class _LinearChain(_DropIn, nn.Linear):
    """A linear layer and the steps that follow it."""

    _STEPS: ClassVar[tuple[Step, ...]]

    def forward(self, input: Tensor) -> Tensor:
        return self._run_linear_chain(input, self, self._STEPS)


class LinearLogSumExp(_LinearChain):
    """`torch.nn.Linear`, then logsumexp over the last dimension, (..., in_features) to (...).

    Takes the arguments of `torch.nn.Linear`, and has its parameters.
    """

    _STEPS = (Step("logsumexp", (-1, False)),)


class LinearSoftmax(_LinearChain):
    """`torch.nn.Linear`, then softmax over the last dimension; arguments and parameters of `torch.nn.Linear`."""

    _STEPS = (Step("softmax", (-1,)),)


class LinearLogSoftmax(_LinearChain):
    """`torch.nn.Linear`, then log-softmax over the last dimension; arguments and parameters of `torch.nn.Linear`."""

    _STEPS = (Step("log_softmax", (-1,)),)


class LinearGELU(_LinearChain):
    """`torch.nn.Linear`, then GELU in its exact form; arguments and parameters of `torch.nn.Linear`."""

    _STEPS = (Step("gelu"),)


class LinearSiLU(_LinearChain):
    """`torch.nn.Linear`, then SiLU; arguments and parameters of `torch.nn.Linear`."""

    _STEPS = (Step("silu"),)


class LinearReLU(_LinearChain):
    """`torch.nn.Linear`, then ReLU; arguments and parameters of `torch.nn.Linear`."""

    _STEPS = (Step("relu"),)


# Reductions ---------------------------------------------------------------------------------------------------------


class Softmax(nn.Softmax):
    """`torch.nn.Softmax`, fused."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.dim is None or _is_watched(input) else softmax(input, self.dim)


class LogSoftmax(nn.LogSoftmax):
    """`torch.nn.LogSoftmax`, fused."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.dim is None or _is_watched(input) else log_softmax(input, self.dim)
