"""Labels: elements chosen by an index along a dimension, and the losses of classes.

A label is compared with the numbers of the elements along its dimension; what it chooses is added up among zeros, so
that infinities and NaN elsewhere stay out of it, and gradients go to the chosen element alone. Where PyTorch raises an
error for a label that is out of range, or ends the CUDA context, what is chosen is NaN.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch

from ...dtypes import is_float
from ...ir import graph as g
from .activations import log_normalizer, log_softmax
from .linear import linear
from .overloads import overload
from .promotion import constant, floats, pointwise
from .reductions import reduced
from .table import Refused, rule
from .values import Value, positions, refuse

F = torch.nn.functional
T = torch.Tensor


def chosen_at(value: Value, dim: int, index: Value) -> Value:
    """Whether each element is the one along a dimension that an index names; of length one there, it broadcasts."""
    n = value.shape[dim]
    return pointwise("equal", _numbers(value, n).viewed((n, *(1,) * (value.ndim - dim - 1))), index)


def _numbers(like: Value, n: int) -> Value:
    return Value(like.tracer._trace.array(g.positions(n, 1, "int64"), (1,)), (n,))


def picked(value: Value, dim: int, index: Value) -> Value:
    """The element along a dimension that an index names; NaN for one that is out of range."""
    there = pointwise("where", chosen_at(value, dim, index), value, 0.0, dtype=value.dtype)
    found = reduced("sum", there, dim, True)
    inside = pointwise("greater_equal", index, 0), pointwise("less", index, value.shape[dim])
    return pointwise("where", pointwise("logical_and", *inside), found, math.nan, dtype=value.dtype)


@rule("gather", torch.gather, reduces=True)
def gather(input: Value, dim: int, index: Value) -> Value:
    """One element along a dimension for each place along the others."""
    if index.ndim != input.ndim or not input.ndim:
        refuse("gather", f"an index of shape {index.shape} in an input of shape {input.shape}")
    (p,) = positions(dim, input.ndim, "gather")
    if index.dtype != "int64":
        refuse("gather", f"an index of {index.dtype}")
    if index.shape != (*input.shape[:p], 1, *input.shape[p + 1 :]):
        refuse("gather", f"an index of shape {index.shape}; one element of a row is fused, for every row")
    return picked(floats(input, "gather"), p, index)


overload("gather", "gather")
overload("gather", "take_along_dim", adapt=lambda input, indices, dim=None: _along_dim(input, indices, dim))


def _along_dim(input: Any, indices: Any, dim: Any) -> Any:
    return Refused("take_along_dim of a flattened input") if dim is None else (input, dim, indices)


@rule("one_hot", F.one_hot)
def one_hot(input: Value, num_classes: int = -1) -> Value:
    """A label that is out of range gives zeros."""
    if num_classes < 1:
        refuse("one_hot", "the number of classes depends on values")
    if input.dtype != "int64":
        refuse("one_hot", f"labels of {input.dtype}")
    same = pointwise("equal", _numbers(input, num_classes), input.viewed((*input.shape, 1)))
    return pointwise("where", same, 1, 0, dtype="int64")


overload("one_hot", "one_hot")

# Losses of classes --------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")


def loss(function: Any) -> Any:
    """An adapter for a loss of `torch.nn.functional`, whose older parameters stand for a reduction."""
    own = inspect.signature(function)

    def adapt(*args: Any, **kwargs: Any) -> Any:
        bound = own.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        older = given.pop("size_average", None), given.pop("reduce", None)
        if older != (None, None):
            if not all(flag is None or isinstance(flag, bool) for flag in older):
                return Refused("a reduction that is known only when it runs")
            average, reduces = (True if flag is None else flag for flag in older)
            given["reduction"] = ("mean" if average else "sum") if reduces else "none"
        if given["reduction"] not in (*REDUCTIONS, "batchmean"):
            return Refused(f"the reduction {given['reduction']!r}")
        return tuple(given.values())

    return adapt


def reduced_loss(values: Value, reduction: str) -> Value:
    """A loss element by element, or the sum or the mean of all elements."""
    if reduction == "none":
        return values
    if reduction not in REDUCTIONS:
        refuse("a loss", f"the reduction {reduction!r}")
    return reduced(reduction, values, None, False)


def _class_dim(name: str, input: Value, weight: Value | None) -> int:
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


def _indices(name: str, input: Value, target: Value, dim: int) -> Value:
    """The labels with a dimension of length one in the place of the classes."""
    if target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        refuse(name, f"labels of shape {target.shape} for an input of shape {input.shape}")
    if target.dtype != "int64":
        refuse(name, f"labels of {target.dtype}")
    index = target.viewed((*target.shape[:dim], 1, *target.shape[dim:]))
    return _turned(index, 0) if math.prod(index.shape[dim:]) == 1 else index


def _turned(value: Value, axis: int) -> Value:
    """A value of one dimension as a column (axis 0), which is what reductions along rows give, or as a row (axis 1)."""
    node = value.tracer._node
    if node.shape[axis] != 1 or node.size == 1:
        return value
    axes = tuple(None if a is None else 1 - a for a in value.tracer._axes)
    return Value(value.tracer._trace.array(g.transpose(node), axes), value.shape)


class _Labels:
    """Labels of one dimension, those that are ignored, and what each of the others weighs.

    Values keep a dimension of length one in the place of the classes: rows stay rows.
    """

    def __init__(self, name: str, input: Value, target: Value, weight: Value | None, ignore_index: int, dim: int):
        self.dtype, self.shape, self.ignore_index = input.dtype, target.shape, ignore_index
        self.index = _indices(name, input, target, dim)
        self.weight: Value | float = 1.0
        if weight is not None:
            # The loss's own backward pass has no gradient for it.
            places = constant(weight).viewed((*weight.shape, *(1,) * (input.ndim - dim - 1)))
            padded = places.viewed((*(1,) * (input.ndim - places.ndim), *places.shape))
            self.weight = self.masked(picked(padded, dim, self.index))

    def masked(self, values: Value) -> Value:
        """Values of the labels that count, zero for the others."""
        counted = pointwise("not_equal", self.index, self.ignore_index)
        return pointwise("where", counted, values, 0.0, dtype=self.dtype)

    def loss(self, logarithms: Value, reduction: str) -> Value:
        """The negative log likelihood from what the labels have picked."""
        values = pointwise("negative", logarithms)
        if isinstance(self.weight, Value):
            values = pointwise("multiply", values, self.weight)
        return self.reduced(self.masked(values), reduction)

    def reduced(self, values: Value, reduction: str) -> Value:
        """None, the sum, or the mean by weight, which is NaN where nothing counts."""
        if reduction == "none":
            return values.viewed(self.shape)
        # Rows that are reduced to numbers are one row of numbers: a single step adds up these, and what they weigh.
        total = reduced_loss(_turned(values, 1), "sum")
        if reduction == "sum":
            return total
        counted = pointwise("not_equal", _turned(self.index, 1), self.ignore_index)
        weight = _turned(self.weight, 1) if isinstance(self.weight, Value) else 1.0
        count = reduced("sum", pointwise("where", counted, weight, 0.0, dtype=self.dtype), None, False)
        return pointwise("divide", total, count)


def _nll_eager(x: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> Any:
    return F.nll_loss(x, target, weight, ignore_index=ignore_index, reduction=reduction)


@rule("nll_loss", _nll_eager, reduces=True)
def nll_loss(
    input: Value, target: Value, weight: Value | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Value:
    dim = _class_dim("nll_loss", input, weight)
    labels = _Labels("nll_loss", input, target, weight, ignore_index, dim)
    return labels.loss(picked(input, dim, labels.index), reduction)


def _cross_entropy_eager(
    x: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float
) -> Any:
    return F.cross_entropy(
        x, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )


@rule("cross_entropy", _cross_entropy_eager, reduces=True)
def cross_entropy(
    input: Value,
    target: Value,
    weight: Value | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Value:
    """Of labels, or of probabilities of the classes, which have the input's own shape."""
    dim = _class_dim("cross_entropy", input, weight)
    if not 0.0 <= label_smoothing <= 1.0:
        refuse("cross_entropy", f"a label_smoothing of {label_smoothing}")
    if target.shape == input.shape:
        return _of_probabilities(input, target, weight, ignore_index, reduction, label_smoothing, dim)
    labels = _Labels("cross_entropy", input, target, weight, ignore_index, dim)
    if not label_smoothing:
        # The logarithm of the one probability alone: what the row is reduced to is enough for it.
        top, total = log_normalizer(input, dim, "cross_entropy")
        at_label = pointwise("subtract", picked(input, dim, labels.index), top)
        return labels.loss(pointwise("subtract", at_label, total), reduction)
    logarithms = log_softmax(input, dim)
    likelihood = labels.loss(picked(logarithms, dim, labels.index), reduction)
    spread = pointwise("negative", reduced("sum", _weighed(logarithms, weight, dim), dim, True))
    smooth = labels.reduced(labels.masked(spread), reduction)
    scaled = pointwise("multiply", smooth, label_smoothing / input.shape[dim])
    return pointwise("add", pointwise("multiply", likelihood, 1.0 - label_smoothing), scaled)


def _weighed(values: Value, weight: Value | None, dim: int) -> Value:
    if weight is None:
        return values
    return pointwise("multiply", values, weight.viewed((*weight.shape, *(1,) * (values.ndim - dim - 1))))


def _of_probabilities(
    input: Value,
    target: Value,
    weight: Value | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    dim: int,
) -> Value:
    if ignore_index >= 0:
        refuse("cross_entropy", "an ignore_index beside probabilities")
    floats(target, "cross_entropy with probabilities")
    if label_smoothing:
        scaled = pointwise("multiply", target, 1.0 - label_smoothing)
        target = pointwise("add", scaled, label_smoothing / input.shape[dim])
    terms = _weighed(pointwise("multiply", log_softmax(input, dim), target), weight, dim)
    total = pointwise("negative", reduced("sum", terms, dim if reduction == "none" else None, False))
    if reduction != "mean":
        return total
    return pointwise("divide", total, float(input.size // input.shape[dim]))


overload("nll_loss", F.nll_loss, adapt=loss(F.nll_loss))
overload("cross_entropy", F.cross_entropy, adapt=loss(F.cross_entropy))


# `linear` and `cross_entropy` in one, in versions of PyTorch that have it.
def _linear_cross_entropy_eager(
    x: Any, linear_weight: Any, target: Any, bias: Any, weight: Any, ignore_index: int, reduction: str, smoothing: float
) -> Any:
    return _cross_entropy_eager(F.linear(x, linear_weight, bias), target, weight, ignore_index, reduction, smoothing)


@rule("linear_cross_entropy", _linear_cross_entropy_eager, product=True, reduces=True)
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


def _linear_cross_entropy(
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
    if options is not None:
        return Refused("linear_cross_entropy in chunks")
    ignored = -100 if ignore_index is None else ignore_index
    return input, linear_weight, target, linear_bias, weight, ignored, reduction, label_smoothing


if hasattr(F, "linear_cross_entropy"):
    overload("linear_cross_entropy", F.linear_cross_entropy, adapt=_linear_cross_entropy)
