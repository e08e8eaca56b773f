"""Rules that index with labels along a dimension (`trace.labels`): gather, one_hot, and the losses over classes.

A label out of range chooses NaN, where PyTorch raises an error or ends the CUDA context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from ...ir import graph as g
from ...trace.labels import Labels, choose, pick, positions
from .activations import log_normalizer, log_softmax
from .axes import normalize_dims
from .linear import linear
from .reductions import reduce_dims
from .table import F, Refused, overload, rule
from .values import Value, pointwise, refuse, require_float


@rule(reduces=True)
def gather(input: Value, dim: int, index: Value) -> Value:
    """Trace `gather` of one element along a dimension for each index of the other dimensions."""
    if index.ndim != input.ndim or not input.ndim:
        refuse("gather", f"an index of shape {index.shape} in an input of shape {input.shape}")
    (p,) = normalize_dims(dim, input.ndim, "gather")
    if index.dtype != "int64":
        refuse("gather", f"an index of {index.dtype}")
    if index.shape != (*input.shape[:p], 1, *input.shape[p + 1 :]):
        refuse("gather", f"an index of shape {index.shape}; one element of a row is fused, for every row")
    return Value(choose(require_float(input, "gather").settled, index.settled, p))


def index_rows_eager(x: Any, index: Any) -> Any:
    """Select one element of each row, counted from the end where an index is negative."""
    return x[torch.arange(x.shape[0], device=x.device), index]


@rule(index_rows_eager, eager=index_rows_eager, reduces=True)
def index_rows(input: Value, index: Value) -> Value:
    """Trace `index_rows_eager`."""
    found = pick(require_float(input, "index_rows").settled, index.view((*index.shape, 1)).settled, 1)
    return Value(found, index.shape)


def _take_along_dim_arguments(input: Any, indices: Any, dim: Any = None) -> Any:
    """Adapt `take_along_dim`; refuse a flattened input."""
    return Refused("take_along_dim of a flattened input") if dim is None else (input, dim, indices)


overload("gather", "take_along_dim", adapt=_take_along_dim_arguments)


@rule()
def one_hot(input: Value, num_classes: int = -1) -> Value:
    """Trace `one_hot`; a label that is out of range gives zeros, where PyTorch raises an error."""
    if num_classes < 1:
        refuse("one_hot", "the number of classes depends on values")
    if input.dtype != "int64":
        refuse("one_hot", f"labels of {input.dtype}")
    classes = positions(input.tracer._trace, 1, 0, num_classes, g.label_dtype(num_classes))
    chosen = pointwise("equal", Value(classes), input.view((*input.shape, 1)))
    return pointwise("where", chosen, 1, 0, dtype="int64")


# Losses of classes --------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")


def loss_rule(function: Callable[..., Any], **properties: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the rule of a loss of `torch.nn.functional`; deprecated options become `reduction`."""
    own = inspect.signature(function)

    def adapt(*args: Any, **kwargs: Any) -> Any:
        bound = own.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        deprecated = given.pop("size_average", None), given.pop("reduce", None)
        if deprecated != (None, None):
            if not all(flag is None or isinstance(flag, bool) for flag in deprecated):
                return Refused("its reduction depends on the values of a tensor")
            average, reduces = (True if flag is None else flag for flag in deprecated)
            given["reduction"] = ("mean" if average else "sum") if reduces else "none"
        if given["reduction"] not in (*REDUCTIONS, "batchmean"):
            return Refused(f"the reduction {given['reduction']!r}")
        return tuple(given.values())

    return rule(function, adapt=adapt, reduces=True, **properties)


def reduce_loss(values: Value, reduction: str) -> Value:
    """Reduce a loss by element to its sum or its mean; "none" returns it as it is."""
    if reduction == "none":
        return values
    if reduction not in REDUCTIONS:
        refuse("a loss", f"the reduction {reduction!r}")
    return reduce_dims(reduction, values, None)


def _class_dim(name: str, input: Value, weight: Value | None) -> int:
    """Return the dimension of the classes, 0 for a vector and else 1; refuse operands that do not fit it."""
    if not input.ndim or not is_float(input.dtype):
        refuse(name, f"an input of shape {input.shape}, {input.dtype}")
    dim = 0 if input.ndim == 1 else 1
    if not input.shape[dim]:
        refuse(name, "there are no classes")
    if weight is not None and (weight.shape != (input.shape[dim],) or weight.dtype != input.dtype):
        refuse(
            name, f"a weight of shape {weight.shape}, {weight.dtype} beside an input of {input.shape}, {input.dtype}"
        )
    return dim


def _labels(name: str, input: Value, target: Value, weight: Value | None, ignore_index: int, dim: int) -> Labels:
    """Return the labels of a loss; refuse those that do not fit the input."""
    if target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        refuse(name, f"labels of shape {target.shape} for an input of shape {input.shape}")
    if target.dtype != "int64":
        refuse(name, f"labels of {target.dtype}")
    return Labels(input.settled, target.settled, None if weight is None else weight.settled, ignore_index, dim)


@loss_rule(F.nll_loss)
def nll_loss(
    input: Value, target: Value, weight: Value | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Value:
    dim = _class_dim("nll_loss", input, weight)
    labels = _labels("nll_loss", input, target, weight, ignore_index, dim)
    return Value(labels.reduced(labels.weighted(-labels.pick(input.settled)), reduction))


@loss_rule(F.cross_entropy)
def cross_entropy(
    input: Value,
    target: Value,
    weight: Value | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Value:
    """Trace `cross_entropy` of labels, or of class probabilities, which have the input's shape."""
    dim = _class_dim("cross_entropy", input, weight)
    if not 0.0 <= label_smoothing <= 1.0:
        refuse("cross_entropy", f"a label_smoothing of {label_smoothing}")
    of_classes = None if weight is None else weight.per_dim(dim, input.ndim)
    if target.shape == input.shape:
        if ignore_index >= 0:
            refuse("cross_entropy", "an ignore_index beside probabilities")
        return _cross_entropy_of_probabilities(input, target, of_classes, reduction, label_smoothing, dim)
    labels = _labels("cross_entropy", input, target, weight, ignore_index, dim)
    if not label_smoothing:
        # From the row's maximum and sum alone, without the logarithms of all probabilities.
        top, total = (each.settled for each in log_normalizer(input, dim, "cross_entropy"))
        return Value(labels.reduced(labels.weighted(-(labels.pick(input.settled) - top - total)), reduction))
    logarithms = log_softmax(input, dim)
    likelihood = labels.reduced(labels.weighted(-labels.pick(logarithms.settled)), reduction)
    terms = logarithms if of_classes is None else logarithms * of_classes
    smooth = labels.reduced(labels.masked(-reduce_dims("sum", terms, dim, True).settled), reduction)
    return Value(likelihood * (1.0 - label_smoothing) + smooth * (label_smoothing / input.shape[dim]))


def _cross_entropy_of_probabilities(
    input: Value, target: Value, weight: Value | None, reduction: str, label_smoothing: float, dim: int
) -> Value:
    """Trace `cross_entropy` of probabilities of the classes along `dim`."""
    require_float(target, "cross_entropy with probabilities")
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / input.shape[dim]
    terms = log_softmax(input, dim) * target
    terms = terms if weight is None else terms * weight
    total = -reduce_dims("sum", terms, dim if reduction == "none" else None)
    return total / float(input.size // input.shape[dim]) if reduction == "mean" else total


def z_loss_eager(x: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    """Compute the square of logsumexp for each label, reduced as `cross_entropy` of the same labels."""
    classes = min(x.dim() - 1, 1)  # the dimension: 0 of a vector, else 1
    values = x.logsumexp(classes).square()
    weights = torch.ones_like(values)
    if target.shape != x.shape:
        counted = target != ignore_index
        labels = torch.where(counted, target, 0).long()  # of uint8 an index would be a mask
        weights = torch.where(counted, 1.0 if weight is None else weight[labels], 0.0)
        values = torch.where(counted, values * weights, 0.0)
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / weights.sum()


@rule(eager=z_loss_eager, reduces=True)
def z_loss(
    input: Value, target: Value, weight: Value | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Value:
    """Trace `z_loss_eager`."""
    dim = _class_dim("z_loss", input, weight)
    top, total = log_normalizer(input, dim, "z_loss")
    square = pointwise("square", top + total)
    if target.shape == input.shape:
        return reduce_loss(square.view((*input.shape[:dim], *input.shape[dim + 1 :])), reduction)
    labels = _labels("z_loss", input, target, weight, ignore_index, dim)
    return Value(labels.reduced(labels.weighted(square.settled), reduction))


# A function of newer versions of PyTorch: `linear` and `cross_entropy` in one.
def _linear_cross_entropy_eager(x: Any, linear_weight: Any, target: Any, bias: Any, *options: Any) -> Any:
    names = ("weight", "ignore_index", "reduction", "label_smoothing")
    return F.cross_entropy(F.linear(x, linear_weight, bias), target, **dict(zip(names, options, strict=True)))


def _linear_cross_entropy_arguments(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Any:
    """Adapt PyTorch's `linear_cross_entropy`; refuse chunks."""
    if options is not None:
        return Refused("linear_cross_entropy in chunks")
    ignored = -100 if ignore_index is None else ignore_index
    return input, linear_weight, target, linear_bias, weight, ignored, reduction, label_smoothing


@rule(eager=_linear_cross_entropy_eager, adapt=_linear_cross_entropy_arguments, product=True, reduces=True)
def linear_cross_entropy(
    input: Value,
    linear_weight: Value,
    target: Value,
    linear_bias: Value | None = None,
    weight: Value | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Value:
    if input.ndim not in (1, 2) or linear_weight.ndim != 2:
        refuse("linear_cross_entropy", f"operands of shapes {input.shape} and {linear_weight.shape}")
    logits = linear(input, linear_weight, linear_bias)
    return cross_entropy(logits, target, weight, ignore_index, reduction, label_smoothing)
