"""What the rules share: PyTorch's promotion of dtypes, and pointwise operators on values of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import trace
from ...dtypes import is_float
from ...ir import graph as g
from ...ir.operators import POINTWISE
from ...trace import Tracer
from ...trace.broadcasting import align
from .values import Shape, Value, aligned, lengthwise, positions, reduced_shape, refuse

_COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")
_LOGICAL = ("logical_and", "logical_or", "logical_not")
# What works in whole numbers too, as far as a count of batches needs it.
_OF_COUNTS = ("add", "subtract", "multiply", "negative", "where")


def default_float() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def promoted(*operands: Any) -> str:
    """PyTorch's promotion: tensors with dimensions first, then those without, then Python numbers, by category."""
    with_dimensions = _promoted(v.dtype for v in operands if isinstance(v, Value) and v.ndim)
    without = _promoted(v.dtype for v in operands if isinstance(v, Value) and not v.ndim)
    numbers = _promoted(_number_dtype(v) for v in operands if not isinstance(v, Value))
    return _outranked(_outranked(with_dimensions, without), numbers) or "bool"


def _number_dtype(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else default_float()


def _category(dtype: str) -> int:
    return ("bool", "int64").index(dtype) if not is_float(dtype) else 2


def _outranked(first: str, second: str) -> str:
    """The dtype of operands of which the first ones decide, unless the second ones are of a higher category."""
    if not first or not second:
        return first or second
    return second if _category(second) > _category(first) else first


def _promoted(names: Any) -> str:
    result = ""
    for name in names:
        if not result or _category(name) > _category(result):
            result = name
        elif _category(name) == _category(result) and name != result:
            result = "float64" if "float64" in (name, result) else "float32"
    return result


def pointwise(op: str, *operands: Any, dtype: str = "") -> Value:
    """An operator of the table on values and numbers, with PyTorch's broadcasting and promotion."""
    promoting = operands[1:] if op == "where" else operands
    dtype = dtype or promoted(*promoting)
    if op not in _COMPARISONS and op not in _LOGICAL:
        if not is_float(dtype) and POINTWISE[op].result == "float":
            dtype = default_float()
        if dtype == "bool" and op != "where":
            refuse(op, "arithmetic on masks")
        if dtype == "int64" and op not in _OF_COUNTS:
            refuse(op, "arithmetic on integers")
    cast = [
        o.astype(dtype) if isinstance(o, Value) and not (op == "where" and k == 0) else o
        for k, o in enumerate(operands)
    ]
    values = [o for o in cast if isinstance(o, Value)]
    tracers, shape, _ = aligned(values, op)
    given = iter(tracers)
    result = trace.apply(op, *(next(given) if isinstance(o, Value) else _number(o, dtype) for o in cast))
    if POINTWISE[op].result != "bool" and result._node.dtype != dtype:
        result = result.astype(dtype)  # of numbers alone, as where(mask, 1.0, 0.0) chooses
    return Value(result, shape)


def _number(value: Any, dtype: str) -> Any:
    """A Python number as the operand's category has it: PyTorch takes 1 beside floats as 1.0, True as 1."""
    return float(value) if is_float(dtype) else int(value) if dtype == "int64" else value


def as_mask(value: Any) -> Any:
    """Whether each element differs from zero."""
    if isinstance(value, Value) and value.dtype != "bool":
        return pointwise("not_equal", value, 0)
    return value if isinstance(value, Value) else bool(value)


def floats(value: Value, operation: str) -> Value:
    if not is_float(value.dtype):
        refuse(operation, f"an operand of {value.dtype}")
    return value


def cast_to(value: Value, dtype: str | None) -> Value:
    return value if dtype is None else value.astype(dtype)


def constant(value: Value) -> Value:
    """The same values, as numbers that gradients do not flow through."""
    tracer = value.tracer
    return Value(tracer._trace.array(g.stop_gradient(tracer._node), tracer._axes), value.shape)


def sloped(value: Value, *pairs: tuple[Value, Value | float]) -> Value:
    """The value with partial derivatives of its own: by each x of the pairs (x, slope), of which all broadcast to it.

    For what PyTorch differentiates by a formula other than that of the operations which give the value.
    """
    parts = [part for pair in pairs for part in pair]
    given = [part for part in (value, *parts) if isinstance(part, Value)]
    tracers, shape, _ = aligned(given, "sloped", value.shape)
    nodes, axes = align(tracers, "sloped")
    known = iter(nodes)
    first = next(known)
    inner = [next(known) if isinstance(part, Value) else g.const(part) for part in parts]
    node = g.sloped(first, *zip(inner[::2], inner[1::2], strict=True))
    return Value(tracers[0]._trace.array(node, axes), shape)


def sloped_reduction(result: Tracer, x: Tracer, slope: Tracer) -> Tracer:
    """The result of a reduction of x with partial derivatives of its own, by each element of x."""
    return x._trace.array(g.sloped(result._node, (x._node, slope._node)), result._axes)


def along(value: Value, dim: Any, operation: str) -> tuple[Tracer, int | None, tuple[int, ...]]:
    """A matrix of the value, the axis that the dimensions of `dim` are, and those dimensions."""
    dims = positions(dim, value.ndim, operation)
    tracer, axis = lengthwise(value, dims, operation)
    return tracer, axis, dims


def like_rows(result: Tracer, value: Value, dims: Sequence[int], keepdim: bool) -> Value:
    return Value(result, reduced_shape(value.shape, tuple(dims), keepdim))


def count(shape: Shape, dims: Sequence[int]) -> int:
    total = 1
    for p in dims:
        total *= shape[p]
    return total


def safe_sqrt(total: Value, masked: bool = False) -> Value:
    """The square root, with a slope of zero, not infinity, where it is zero: PyTorch's for norms and deviations.

    That of norms is left to the slope of what is added up, a factor. With `masked`, as for deviations, there is no
    gradient, whatever the cotangent is.
    """
    zero = pointwise("equal", total, 0.0)
    return pointwise("where", zero, 0.0 if masked else total, pointwise("sqrt", pointwise("where", zero, 1.0, total)))
