"""Rules that index with labels along a dimension: gather, one_hot, and the losses over classes.

A label is compared with the positions along its dimension; the chosen element is the sum of those that match, the
others being replaced by zeros. So infinities and NaN elsewhere stay out, and the gradient goes to the chosen element
alone. A label out of range chooses NaN, where PyTorch raises an error or ends the CUDA context.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from ...dtypes import is_float
from ...ir import graph as g
from ...trace import Axes
from .activations import log_normalizer, log_softmax
from .axes import normalize_dims
from .linear import linear
from .reductions import reduce_dims
from .table import F, Refused, overload, rule
from .values import Value, pointwise, refuse, require_float, stop_gradient


def _positions(like: Value, n: int) -> Value:
    """Return 0, ..., n - 1 in the trace of another value."""
    return Value(like.tracer._trace.array(g.positions(n, 1, g.label_dtype(n)), (1,)))


def pick(value: Value, dim: int, index: Value) -> Value:
    """Select the element at each index along a dimension, which keeps length one; NaN for an index out of range."""
    n = value.shape[dim]
    chosen = pointwise("equal", _positions(value, n).per_dim(dim, value.ndim), index)
    found = reduce_dims("sum", pointwise("where", chosen, value, 0.0, dtype=value.dtype), dim, True)
    return pointwise("where", (index >= 0) & (index < n), found, math.nan, dtype=value.dtype)


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
    return pick(require_float(input, "gather"), p, index)


def index_rows_eager(x: Any, index: Any) -> Any:
    """Select one element of each row, counted from the end where an index is negative."""
    return x[torch.arange(x.shape[0], device=x.device), index]


@rule(index_rows_eager, eager=index_rows_eager, reduces=True)
def index_rows(input: Value, index: Value) -> Value:
    """Trace `index_rows_eager`."""
    rows, columns = input.shape
    from_start = pointwise("where", index >= 0, index, index + columns, dtype="int64")
    return pick(require_float(input, "index_rows"), 1, from_start.view((rows, 1))).view((rows,))


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
    chosen = pointwise("equal", _positions(input, num_classes), input.view((*input.shape, 1)))
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


def _with_class_dim(name: str, input: Value, target: Value, dim: int) -> Value:
    """Insert a dimension of length one into the labels, where the input has its classes."""
    if target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        refuse(name, f"labels of shape {target.shape} for an input of shape {input.shape}")
    if target.dtype != "int64":
        refuse(name, f"labels of {target.dtype}")
    index = target.view((*target.shape[:dim], 1, *target.shape[dim:]))
    return _as_vector_along(index, 0) if math.prod(index.shape[dim:]) == 1 else index


def _as_vector_along(value: Value, axis: int) -> Value:
    """Hold a vector as a column (axis 0), which is what reductions along rows give, or as a row (axis 1)."""
    node, axes = value.tracer._node, value.tracer._axes
    if node.shape[axis] != 1 or node.size == 1:
        return value
    return Value(value.tracer._trace.array(g.transpose(node), Axes(axes.shape, axes.cols, axes.rows)), value.shape)


class _Labels:
    """The labels of a loss with the weight of each; labels that are `ignore_index` do not count.

    `index`, `weight` and the values of its methods have a dimension of length one in the place of the classes.
    """

    def __init__(self, name: str, input: Value, target: Value, weight: Value | None, ignore_index: int, dim: int):
        self.dtype, self.shape, self.ignore_index = input.dtype, target.shape, ignore_index
        self.index = _with_class_dim(name, input, target, dim)
        self.weight: Value | None = None
        if weight is not None:
            # PyTorch's backward pass gives the weight no gradient.
            of_classes = stop_gradient(weight).per_dim(dim, input.ndim)
            of_classes = of_classes.view((*(1,) * (input.ndim - of_classes.ndim), *of_classes.shape))
            self.weight = self.mask(pick(of_classes, dim, self.index))

    def mask(self, values: Value) -> Value:
        """Replace the values of labels that do not count by zero."""
        counted = pointwise("not_equal", self.index, self.ignore_index)
        return pointwise("where", counted, values, 0.0, dtype=self.dtype)

    def negative_log_likelihood(self, logarithms: Value, reduction: str) -> Value:
        """Compute the loss from the logarithms of the probabilities at the labels."""
        values = -logarithms if self.weight is None else -logarithms * self.weight
        return self.reduce(self.mask(values), reduction)

    def reduce(self, values: Value, reduction: str) -> Value:
        """Reduce values of the labels; the mean is by weight, and NaN where nothing counts."""
        if reduction == "none":
            return values.view(self.shape)
        # As a row, so that a single step sums both the values and their weights.
        total = reduce_loss(_as_vector_along(values, 1), "sum")
        if reduction == "sum":
            return total
        counted = pointwise("not_equal", _as_vector_along(self.index, 1), self.ignore_index)
        weight = 1.0 if self.weight is None else _as_vector_along(self.weight, 1)
        return total / reduce_dims("sum", pointwise("where", counted, weight, 0.0, dtype=self.dtype), None)


@loss_rule(F.nll_loss)
def nll_loss(
    input: Value, target: Value, weight: Value | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> Value:
    dim = _class_dim("nll_loss", input, weight)
    labels = _Labels("nll_loss", input, target, weight, ignore_index, dim)
    return labels.negative_log_likelihood(pick(input, dim, labels.index), reduction)


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
    labels = _Labels("cross_entropy", input, target, weight, ignore_index, dim)
    if not label_smoothing:
        # From the row's maximum and sum alone, without the logarithms of all probabilities.
        top, total = log_normalizer(input, dim, "cross_entropy")
        return labels.negative_log_likelihood(pick(input, dim, labels.index) - top - total, reduction)
    logarithms = log_softmax(input, dim)
    likelihood = labels.negative_log_likelihood(pick(logarithms, dim, labels.index), reduction)
    terms = logarithms if of_classes is None else logarithms * of_classes
    smooth = labels.reduce(labels.mask(-reduce_dims("sum", terms, dim, True)), reduction)
    return likelihood * (1.0 - label_smoothing) + smooth * (label_smoothing / input.shape[dim])


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
        weights = torch.where(counted, 1.0 if weight is None else weight[torch.where(counted, target, 0)], 0.0)
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
    return _Labels("z_loss", input, target, weight, ignore_index, dim).negative_log_likelihood(-square, reduction)


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
