"""Losses over classes along the second axis, with PyTorch's names and semantics.

They are traced from ordinary operations, so that what a function computes beside a loss (log-probabilities, entropies,
positions of maxima) shares its pass over the rows.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import dtypes
from ..trace import Tracer, apply, reduce
from ..trace.exponentials import relative_to_max
from ..trace.labels import Labels, constant_along
from .checks import as_operand, check_integer, check_number
from .eager import Arguments, copy_to, export, import_operand, promote_integers, traceable
from .fuse import Fused

__all__ = ["cross_entropy", "nll_loss"]

REDUCTIONS = ("none", "mean", "sum")


def _loss_eager(fused: Fused, arguments: Arguments, out: Any) -> Any:
    """Run a loss on arrays of any library; numbers and lists become NumPy arrays."""
    first = next(iter(arguments))
    imported = import_operand(arguments[first], first)
    arguments[first] = promote_integers(imported.array)
    for name in ("target", "weight", "pos_weight"):
        if arguments.get(name) is not None:
            arguments[name] = import_operand(arguments[name], name).array
    return copy_to(export(fused(**arguments), imported), out)


# Decorates losses on traced arrays, so that they can be called on arrays too.
loss = functools.partial(traceable, eager=_loss_eager)


def check_reduction(reduction: Any, names: tuple[str, ...] = REDUCTIONS) -> None:
    """Raise ValueError if `reduction` is none of the names."""
    if reduction not in names:
        raise ValueError(f"reduction: expected one of {', '.join(map(repr, names))}, got {reduction!r}")


def apply_reduction(values: Tracer, reduction: str) -> Tracer:
    """Return the mean or sum of a loss's values, or the values themselves for "none"."""
    return values if reduction == "none" else reduce(reduction, values, None)


def _class_axis(input: Any, weight: Any) -> int:
    """Return the axis of the classes, the second or the only one, and check the shapes of input and class weights."""
    if not input.ndim or not dtypes.is_float(input._node.dtype):
        raise ValueError(
            f"input: expected floats of shape (classes,) or (rows, classes, ...), got {input._node.dtype} of shape "
            f"{input.shape}; convert it with .astype"
        )
    axis = 0 if input.ndim == 1 else 1
    if not input.shape[axis]:
        raise ValueError(f"input: expected at least one class, got shape {input.shape}")
    if weight is not None and getattr(weight, "shape", None) != (input.shape[axis],):
        got = getattr(weight, "shape", weight)
        raise ValueError(f"weight: expected one for each class, shape {(input.shape[axis],)}, got {got}")
    return axis


def _labels(input: Tracer, target: Tracer, weight: Any, ignore_index: int, axis: int) -> Labels:
    """Return labels of the classes of `input`; raise ValueError if `target` has none of its shape."""
    expected = (*input.shape[:axis], *input.shape[axis + 1 :])
    if target.shape != expected or not dtypes.is_integer(target._node.dtype):
        raise ValueError(
            f"target: expected integers of shape {expected}, or probabilities of shape {input.shape}, got "
            f"{target._node.dtype} of shape {target.shape}"
        )
    check_integer("ignore_index", ignore_index)
    return Labels(input, target, weight, ignore_index, axis)


def _log_normalizer(x: Tracer, axis: int) -> tuple[Tracer, Tracer]:
    """Return max(x) and log(sum(exp(x - max(x)))) along an axis; their sum is logsumexp(x)."""
    top, total = relative_to_max(x, axis)
    return top, apply("log", total)


@loss
def cross_entropy(
    input: Any,
    target: Any,
    *,
    weight: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    temperature: float | None = None,
    reduction: str = "mean",
) -> Any:
    """Cross entropy of logits and labels, with `torch.nn.functional.cross_entropy`'s semantics.

    Parameters
    ----------
    input : array, (N, C), (N, C, d1, ...) or (C,)
        Logits of C classes.
    target : array
        Integer labels, of the shape of `input` without C; or probabilities of the classes, of the shape of `input`.
    weight : array, (C,), optional
        Of each class. The mean over labels is by their weights. It has no gradient.
    ignore_index : int
        Labels that do not count, for the mean neither.
    label_smoothing : float
        Share of the target that is spread evenly over the classes; from 0 to 1.
    z_loss : float
        Adds ``z_loss * logsumexp(logits) ** 2`` for each label, times its weight (Chowdhery et al. 2022), which keeps
        logits from drifting.
    soft_cap : float, optional
        Limits logits to ``soft_cap * tanh(logits / soft_cap)`` first.
    temperature : float, optional
        Divides the logits, once they are limited.
    reduction : {"mean", "sum", "none"}

    Returns
    -------
    array
        A number; with "none", one for each label, 0 for those ignored.

    Raises
    ------
    ValueError
        Shapes or dtypes do not fit, or an option is out of its range.

    Notes
    -----
    A label that is out of range gives NaN. So do rows of -inf alone and rows with +inf, as in PyTorch, and the mean
    over no labels.

    Examples
    --------
    >>> import numpy as np, cupyfuse as cf
    >>> cf.cross_entropy(np.array([[0.0, 0.0], [3.0, 3.0]]), np.array([0, 1])).round(4)
    0.6931
    """
    check_reduction(reduction)
    axis = _class_axis(input, weight)
    _check_options(label_smoothing, soft_cap, temperature)
    if soft_cap is not None:
        input = apply("tanh", input / soft_cap) * soft_cap
    if temperature is not None:
        input = input / temperature
    target = as_operand("target", target, input._trace)
    if target.shape == input.shape:
        if ignore_index >= 0:
            raise ValueError(f"ignore_index: labels are needed, but target has probabilities; got {ignore_index}")
        return _cross_entropy_of_probabilities(input, target, weight, label_smoothing, z_loss, reduction, axis)
    labels = _labels(input, target, weight, ignore_index, axis)
    top, log_total = _log_normalizer(input, axis)
    values = labels.weighted(-(labels.pick(input) - top - log_total))
    if label_smoothing:
        terms = input - top - log_total
        terms = terms if weight is None else terms * constant_along(weight, axis, input.ndim)
        smooth = labels.masked(-reduce("sum", terms, axis, keepdims=True))
        values = values * (1.0 - label_smoothing) + smooth * (label_smoothing / input.shape[axis])
    if z_loss:
        check_number("z_loss", z_loss)
        values = values + labels.weighted(apply("square", top + log_total)) * z_loss
    return labels.reduced(values, reduction)


def _check_options(label_smoothing: float, soft_cap: float | None, temperature: float | None) -> None:
    """Raise ValueError if an option of `cross_entropy` is out of its range."""
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: expected a share from 0 to 1, got {float(label_smoothing)}")
    for name, value in (("soft_cap", soft_cap), ("temperature", temperature)):
        if value is not None:
            check_number(name, value)
            if not value > 0:
                raise ValueError(f"{name}: expected a positive number or None, got {float(value)}")


def _cross_entropy_of_probabilities(
    input: Tracer, target: Tracer, weight: Any, label_smoothing: float, z_loss: float, reduction: str, axis: int
) -> Tracer:
    """Compute the cross entropy of logits with target probabilities of the classes along `axis`."""
    if not dtypes.is_float(target._node.dtype):
        raise ValueError(f"target: expected probabilities as floats, got {target._node.dtype}; convert it with .astype")
    if label_smoothing:
        target = target * (1.0 - label_smoothing) + label_smoothing / input.shape[axis]
    top, log_total = _log_normalizer(input, axis)
    terms = (input - top - log_total) * target
    terms = terms if weight is None else terms * constant_along(weight, axis, input.ndim)
    values = -reduce("sum", terms, axis)
    if z_loss:
        check_number("z_loss", z_loss)
        values = values + apply("square", top + log_total).squeeze(axis) * z_loss
    return apply_reduction(values, reduction)


@loss
def nll_loss(input: Any, target: Any, *, weight: Any = None, ignore_index: int = -100, reduction: str = "mean") -> Any:
    """Negative log likelihood of labels, with `torch.nn.functional.nll_loss`'s semantics.

    Parameters
    ----------
    input : array, (N, C), (N, C, d1, ...) or (C,)
        Log-probabilities of C classes.
    target, weight, ignore_index, reduction
        As for `cross_entropy`, with labels alone.

    Returns
    -------
    array
    """
    check_reduction(reduction)
    axis = _class_axis(input, weight)
    labels = _labels(input, as_operand("target", target, input._trace), weight, ignore_index, axis)
    return labels.reduced(labels.weighted(-labels.pick(input)), reduction)
