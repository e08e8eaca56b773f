"""Matrix products, and pools along the last dimension."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ... import trace
from ...ir import graph as g
from ...ir.slices import average_pool
from ...trace import matrix_node
from .table import F, Refused, binary_operands, leave_unfused, overload, rule, swapped_operands
from .values import Value, broadcast_shapes, refuse, require_float

T = torch.Tensor


def multiply_matrices(a: Value, b: Value, operation: str) -> Value:
    """Trace `torch.matmul` with a second operand of at most binary_operands dimensions."""
    if a.dtype != b.dtype:
        refuse(operation, f"operands of {a.dtype} and {b.dtype}")
    require_float(a, operation)
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[0 if b.ndim < 3 else -2]:
        refuse(operation, f"shapes {a.shape} and {b.shape} do not fit")
    if b.ndim > 2:
        refuse(operation, "batched products are left to torch")
    return Value(trace.matmul(a.settled, b.settled))


@rule(eager=F.linear, product=True)
def linear(input: Value, weight: Value, bias: Value | None = None) -> Value:
    y = multiply_matrices(input, Value(weight.settled.transpose()), "linear")
    if bias is None:
        return y
    if bias.dtype != y.dtype:
        refuse("linear", f"a bias of {bias.dtype} beside operands of {y.dtype}")
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        refuse("linear", f"a bias of shape {bias.shape} beside a weight of shape {weight.shape}")
    return y + bias


@rule(operator.matmul, torch.matmul, T.matmul, T.__matmul__, torch.linalg.matmul, adapt=binary_operands, product=True)
def matmul(input: Value, other: Value) -> Value:
    return multiply_matrices(input, other, "matmul")


overload("matmul", "mm", "mv", "dot", adapt=lambda input, mat2: (input, mat2))
overload("matmul", T.__rmatmul__, adapt=swapped_operands)


@rule(product=True)
def addmm(input: Value, mat1: Value, mat2: Value, beta: float = 1, alpha: float = 1) -> Value:
    """Trace beta * input + alpha * mat1 @ mat2; a beta of 0 ignores `input`, NaN included."""
    if mat1.ndim != 2 or mat2.ndim != 2:
        refuse("addmm", f"shapes {mat1.shape} and {mat2.shape} do not fit")
    y = multiply_matrices(mat1, mat2, "addmm")
    if input.dtype != y.dtype:
        refuse("addmm", f"operands of {input.dtype} and {y.dtype}")
    if broadcast_shapes([input.shape, y.shape], "addmm") != y.shape:
        refuse("addmm", f"a summand of shape {input.shape} beside a product of shape {y.shape}")
    y = y if alpha == 1 else y * alpha
    if beta == 0:
        return y
    return y + (input if beta == 1 else input * beta)


leave_unfused("attention is left whole to PyTorch", "scaled_dot_product_attention", "multi_head_attention_forward")
leave_unfused("batched products are left to torch", "bmm", "baddbmm", "addbmm", "einsum", "tensordot", "bilinear")

# Pools --------------------------------------------------------------------------------------------------------------


def _pool(op: str, input: Value, width: int, name: str) -> Value:
    """Reduce windows of `width` columns, which partition the last dimension, by "mean" or "max"."""
    if input.ndim not in (2, 3):
        refuse(name, f"an input of shape {input.shape}")
    columns = input.shape[-1]
    if width < 1 or columns % width or not columns:
        refuse(name, f"windows of {width} do not divide {columns} columns")
    rows = math.prod(input.shape[:-1])
    node = matrix_node(require_float(input, name).view((rows, columns)).settled)
    if op == "mean":
        pooled = average_pool(node, width)
    else:
        # The gradient is that of one element: the first, or the last NaN.
        groups = g.reduce(op, g.reshape(node, (rows * columns // width, width)), 1, gradient="last")
        pooled = g.reshape(groups, (rows, columns // width))
    return Value(input.tracer._trace.array(pooled, (0, 1)), (*input.shape[:-1], columns // width))


def _unwrap_single(size: Any) -> Any:
    """Return the element of a sequence of one, and anything else as it is."""
    return size[0] if isinstance(size, (tuple, list)) and len(size) == 1 else size


def _pool_arguments(input: Any, kernel_size: Any, stride: Any, padding: Any) -> Any:
    """Return the canonical arguments of a pool whose windows partition the input; refuse other windows."""
    width, step = _unwrap_single(kernel_size), _unwrap_single(stride)
    if step not in (None, [], (), width):
        return Refused(f"windows of {width} every {step}; a stride that is the width is fused")
    return Refused("padded windows") if _unwrap_single(padding) else (input, width)


def _avg_pool_arguments(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Any:
    """Adapt `avg_pool1d`."""
    return _pool_arguments(input, kernel_size, stride, padding)


def _max_pool_arguments(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Adapt `max_pool1d`."""
    if _unwrap_single(dilation) != 1:
        return Refused("windows with holes")
    return Refused("it looks for positions") if return_indices else _pool_arguments(input, kernel_size, stride, padding)


@rule(adapt=_avg_pool_arguments, reduces=True)
def avg_pool1d(input: Value, kernel_size: int) -> Value:
    return _pool("mean", input, kernel_size, "avg_pool1d")


@rule(torch.max_pool1d, F.max_pool1d, F._max_pool1d, adapt=_max_pool_arguments, reduces=True)
def max_pool1d(input: Value, kernel_size: int) -> Value:
    return _pool("max", input, kernel_size, "max_pool1d")


@rule(adapt=lambda input, output_size: (input, _unwrap_single(output_size)), reduces=True)
def adaptive_avg_pool1d(input: Value, output_size: int) -> Value:
    if output_size < 1 or input.ndim < 2 or input.shape[-1] % output_size:
        refuse("adaptive_avg_pool1d", f"{output_size} windows of different widths")
    return _pool("mean", input, input.shape[-1] // output_size, "adaptive_avg_pool1d")
