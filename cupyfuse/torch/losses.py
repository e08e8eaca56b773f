"""Linear layer and cross entropy as one chain, without the logits in memory: the loss of a language model."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from ..settings import DEFAULT_WORKSPACE, check_workspace
from .chains.chain import Call, Chain
from .chains.options import Options
from .chains.runner import Runner
from .rules.labels import REDUCTIONS
from .rules.symbols import Ref

Tensor: TypeAlias = torch.Tensor
F = torch.nn.functional
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float | None = None,
    max_workspace: int = DEFAULT_WORKSPACE,
) -> Tensor:
    """`torch.nn.functional.linear`, then `cross_entropy` over the last dimension, without the logits in memory.

    Parameters
    ----------
    input : Tensor, (..., in_features)
    weight : Tensor, (classes, in_features)
    target : Tensor
        Labels (...) of int64, or probabilities (..., classes).
    bias : Tensor, (classes,), optional
    class_weight : Tensor, (classes,), optional
        The `weight` of PyTorch's `cross_entropy`, which has no gradient beside labels.
    ignore_index, reduction, label_smoothing
        As in PyTorch's `cross_entropy`.
    z_loss : float
        Adds ``z_loss * logsumexp(logits) ** 2`` for each label, times its weight.
    soft_cap : float, optional
        Limits logits to ``soft_cap * tanh(logits / soft_cap)`` first.
    temperature : float, optional
        Divides the logits, once they are limited.
    max_workspace : int
        Bytes that logits may take, and as many again their gradient. Larger ones exist for a block of rows or of
        classes at a time: in training the backward pass computes the logits again, or the forward pass makes the
        gradients.

    Returns
    -------
    Tensor
        A number, or (...) for the reduction "none"; float32 for 16-bit operands. Logits are in float32, but those that
        fit in `max_workspace` and are kept for a backward pass are rounded to the operands' dtype, as PyTorch's are.

    Raises
    ------
    TypeError
        An argument is of another type.
    ValueError
        An option is out of its range.
    RuntimeError
        Shapes or dtypes do not fit.
    """
    tensors = {"input": input, "weight": weight, "target": target, "bias": bias, "class_weight": class_weight}
    given = {name: t for name, t in tensors.items() if t is not None or name not in ("bias", "class_weight")}
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            proxies = [t for t in given.values() if isinstance(t, torch.fx.Proxy)]
            if proxies:  # `torch.fx` records this function, whose operations depend on dtypes
                return _record(
                    proxies,
                    input,
                    weight,
                    target,
                    bias,
                    class_weight=class_weight,
                    ignore_index=ignore_index,
                    reduction=reduction,
                    label_smoothing=label_smoothing,
                    z_loss=z_loss,
                    soft_cap=soft_cap,
                    temperature=temperature,
                    max_workspace=max_workspace,
                )
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, REDUCTIONS))}, got {reduction!r}")
    numbers = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    limits = {"soft_cap": soft_cap, "temperature": temperature}
    if not torch.compiler.is_dynamo_compiling():  # which may know them as symbols, that have no attributes
        _check_numbers(ignore_index, numbers, limits)
    labelled = not target.is_floating_point()
    shape = _require_fit(input, weight, target, labelled)
    if labelled and class_weight is not None and class_weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("class_weight: has no gradient beside labels, as in PyTorch; pass class_weight.detach()")
    rows = math.prod(shape)  # -1 would not do for rows without elements
    flat = {"input": input.reshape(rows, input.shape[-1])}
    flat["target"] = target.reshape(rows) if labelled else target.reshape(rows, target.shape[-1])
    values = tuple(flat.get(name, t) for name, t in given.items())
    bounds = (None if value is None else float(value) for value in limits.values())
    options = _Options(int(ignore_index), reduction, *map(float, numbers.values()), *bounds)
    chosen = tuple(given), input.dtype in _SIXTEEN_BITS, options
    if torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled():
        result = _chain(*chosen).eager(values)[0]
    else:
        result = _runner(*chosen, check_workspace(max_workspace))(values)[0]
    return result.reshape(shape) if reduction == "none" else result


def _record(proxies: list[Any], *arguments: Any, **options: Any) -> Any:
    """Record a call of `linear_cross_entropy` in the graph that `torch.fx` traces."""
    return torch.overrides.handle_torch_function(linear_cross_entropy, proxies, *arguments, **options)


def _check_numbers(ignore_index: Any, numbers: dict[str, Any], limits: dict[str, Any]) -> None:
    """Raise an error that names the option which is no number, or a limit that is not positive; those may be None."""
    if not hasattr(ignore_index, "__index__"):
        raise TypeError(f"ignore_index: expected an int, got {type(ignore_index).__name__}")
    for name, value in (*numbers.items(), *limits.items()):
        if not hasattr(value, "__float__") and (value is not None or name in numbers):
            raise TypeError(f"{name}: expected a number{' or None' * (name in limits)}, got {type(value).__name__}")
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}: expected a positive number or None, got {value}")


def _require_fit(input: Tensor, weight: Tensor, target: Tensor, labelled: bool) -> tuple[int, ...]:
    """Return the shape of the labels; raise RuntimeError if that of `target` does not fit the operands."""
    if input.dim() == 0 or weight.dim() != 2:
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(
            f"input, weight: expected shapes (..., in_features) and (classes, in_features), got {shapes}"
        )
    shape = tuple(input.shape[:-1])
    expected = shape if labelled else (*shape, weight.shape[0])
    if tuple(target.shape) != expected:
        kind = "labels" if labelled else "probabilities"
        raise RuntimeError(f"target: expected {kind} of shape {expected}, got {target.dtype} of {tuple(target.shape)}")
    return shape


class _Options(NamedTuple):
    """The options of `linear_cross_entropy`, in one form for equal ones."""

    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    temperature: float | None


@functools.lru_cache(maxsize=256)
def _runner(names: tuple[str, ...], is_16_bit: bool, options: _Options, max_workspace: int) -> Runner:
    """Return the runner of the loss of inputs with these names, from a cache."""
    return Runner(_chain(names, is_16_bit, options), Options(max_workspace=max_workspace))


def _chain(names: tuple[str, ...], is_16_bit: bool, options: _Options) -> Chain:
    """Return the chain of the loss of inputs with these names."""
    o = options
    refs: dict[str, Ref | None] = {name: Ref(k) for k, name in enumerate(names)}
    target, class_weight = refs["target"], refs.get("class_weight")
    calls: list[Call] = []

    def add(rule: str, *arguments: Any) -> Ref:
        result = Ref(len(names) + len(calls))
        calls.append(Call(rule, arguments, (result.number,)))
        return result

    logits = add("linear", refs["input"], refs["weight"], refs.get("bias"))
    if is_16_bit:
        logits = add("to", logits, "float32")
        if class_weight is not None:
            class_weight = add("to", class_weight, "float32")
    if o.soft_cap is not None:
        logits = add("mul", add("tanh", add("div", logits, o.soft_cap)), o.soft_cap)
    if o.temperature is not None:
        logits = add("div", logits, o.temperature)
    loss = add("cross_entropy", logits, target, class_weight, o.ignore_index, o.reduction, o.label_smoothing)
    if o.z_loss:
        penalty = add("z_loss", logits, target, class_weight, o.ignore_index, o.reduction)
        loss = add("add", loss, add("mul", penalty, o.z_loss), 1)
    return Chain(names, tuple(calls), outputs=(loss.number,), fixed=frozenset({names.index("weight")}))


class LinearCrossEntropy(nn.Linear):
    """`torch.nn.Linear` and `linear_cross_entropy`: from features and labels to the loss.

    Takes the arguments of `torch.nn.Linear`, has its parameters, and takes those of `linear_cross_entropy` by keyword.
    The layer's `weight` is often that of an embedding: ``loss.weight = embedding.weight``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        class_weight: Tensor | None = None,
        **options: Any,
    ):
        super().__init__(in_features, out_features, bias, device, dtype)
        unknown = options.keys() - (linear_cross_entropy.__kwdefaults__ or {}).keys()
        if unknown:
            raise TypeError(f"{', '.join(sorted(unknown))}: no such option of linear_cross_entropy")
        self.register_buffer("class_weight", class_weight)
        self.options = options

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        class_weight = self.class_weight
        assert class_weight is None or isinstance(class_weight, torch.Tensor)
        return linear_cross_entropy(input, self.weight, target, self.bias, class_weight=class_weight, **self.options)
