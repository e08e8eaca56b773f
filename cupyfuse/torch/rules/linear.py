"""Matrix products, and pools along the last dimension."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ... import trace
from ...ir import graph as g
from ...trace import Axes, Tracer, matrix_node
from .overloads import leave_unfused, overload, two
from .promotion import floats, pointwise
from .table import Refused, rule
from .values import Value, broadcast_shapes, refuse

F = torch.nn.functional
T = torch.Tensor


def product(a: Value, b: Value, operation: str) -> Value:
    """`torch.matmul` with a second operand of at most two dimensions."""
    if a.dtype != b.dtype:
        refuse(operation, f"operands of {a.dtype} and {b.dtype}")
    floats(a, operation)
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[0 if b.ndim < 3 else -2]:
        refuse(operation, f"shapes {a.shape} and {b.shape} do not fit")
    if b.ndim > 2:
        refuse(operation, "batched products are left to torch")
    left = a.matrix() if a.ndim <= 2 else a.folded((math.prod(a.shape[:-1]), a.shape[-1]))
    return Value(trace.matmul(left, b.matrix()), a.shape[:-1] + b.shape[1:])


@rule("linear", F.linear, product=True)
def linear(input: Value, weight: Value, bias: Value | None = None) -> Value:
    y = product(input, Value(weight.matrix().transpose(), weight.shape[::-1]), "linear")
    if bias is not None and bias.dtype != y.dtype:
        refuse("linear", f"a bias of {bias.dtype} beside operands of {y.dtype}")
    if bias is not None and (weight.ndim != 2 or bias.shape != weight.shape[:1]):
        refuse("linear", f"a bias of shape {bias.shape} beside a weight of shape {weight.shape}")
    return y if bias is None else pointwise("add", y, bias)


@rule("matmul", torch.matmul, product=True)
def matmul(input: Value, other: Value) -> Value:
    return product(input, other, "matmul")


@rule("addmm", lambda x, a, b, beta, alpha: torch.addmm(x, a, b, beta=beta, alpha=alpha), product=True)
def addmm(input: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1) -> Value:
    """A beta of 0 leaves the first operand out, NaN and all."""
    if mat1.ndim != 2 or mat2.ndim != 2:
        refuse("addmm", f"shapes {mat1.shape} and {mat2.shape} do not fit")
    y = product(mat1, mat2, "addmm")
    if input.dtype != y.dtype:
        refuse("addmm", f"operands of {input.dtype} and {y.dtype}")
    if broadcast_shapes([input.shape, y.shape], "addmm") != y.shape:
        refuse("addmm", f"a summand of shape {input.shape} beside a product of shape {y.shape}")
    if alpha != 1:
        y = pointwise("multiply", y, alpha)
    if beta == 0:
        return y
    return pointwise("add", y, input if beta == 1 else pointwise("multiply", input, beta))


overload("linear", "linear")
overload("matmul", operator.matmul, torch.matmul, T.matmul, T.__matmul__, torch.linalg.matmul, adapt=two)
overload("matmul", "mm", "mv", "dot", adapt=lambda input, mat2: (input, mat2))
overload("matmul", T.__rmatmul__, adapt=lambda self, other: (other, self))
overload("addmm", "addmm")
leave_unfused("attention is left whole to PyTorch", "scaled_dot_product_attention", "multi_head_attention_forward")
leave_unfused("batched products are left to torch", "bmm", "baddbmm", "addbmm", "einsum", "tensordot", "bilinear")

# Pools --------------------------------------------------------------------------------------------------------------


def _pooled(op: str, input: Value, width: int, name: str) -> Value:
    if input.ndim not in (2, 3):
        refuse(name, f"an input of shape {input.shape}")
    columns = input.shape[-1]
    if width < 1 or columns % width or not columns:
        refuse(name, f"windows of {width} do not divide {columns} columns")
    rows = math.prod(input.shape[:-1])
    node = matrix_node(floats(input, name).folded((rows, columns)))
    axes: Axes = (0, 1)
    if op == "mean":
        pooled = g.average_pool(node, width)
    else:
        # The gradient is that of one element: the first, or the last NaN.
        groups = g.reduce(op, g.reshape(node, (rows * columns // width, width)), 1, gradient="last")
        pooled = g.reshape(groups, (rows, columns // width))
    return Value(Tracer(input.tracer._trace, pooled, axes), (*input.shape[:-1], columns // width))


@rule("avg_pool1d", F.avg_pool1d, reduces=True)
def avg_pool1d(input: Value, kernel_size: int) -> Value:
    return _pooled("mean", input, kernel_size, "avg_pool1d")


@rule("max_pool1d", F.max_pool1d, reduces=True)
def max_pool1d(input: Value, kernel_size: int) -> Value:
    return _pooled("max", input, kernel_size, "max_pool1d")


@rule("adaptive_avg_pool1d", F.adaptive_avg_pool1d, reduces=True)
def adaptive_avg_pool1d(input: Value, output_size: int) -> Value:
    if output_size < 1 or input.ndim < 2 or input.shape[-1] % output_size:
        refuse("adaptive_avg_pool1d", f"{output_size} windows of different widths")
    return _pooled("mean", input, input.shape[-1] // output_size, "adaptive_avg_pool1d")


def _one(size: Any) -> Any:
    return size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size


def _apart(width: Any, stride: Any, padding: Any) -> str:
    """Why windows are not neighbours that share nothing."""
    if stride not in (None, [], (), width):
        return f"windows of {width} every {stride}; a stride that is the width is fused"
    return "padded windows" if padding else ""


def _avg_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    width = _one(kernel_size)
    reason = _apart(width, _one(stride), _one(padding))
    return Refused(reason) if reason else (input, width)


def _max_pool1d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    width = _one(kernel_size)
    reason = _apart(width, _one(stride), _one(padding))
    if return_indices:
        reason = "it looks for positions"
    if _one(dilation) != 1:
        reason = "windows with holes"
    return Refused(reason) if reason else (input, width)


overload("avg_pool1d", "avg_pool1d", adapt=_avg_pool1d)
overload("max_pool1d", torch.max_pool1d, F.max_pool1d, F._max_pool1d, adapt=_max_pool1d)
overload("adaptive_avg_pool1d", "adaptive_avg_pool1d", adapt=lambda input, output_size: (input, _one(output_size)))
