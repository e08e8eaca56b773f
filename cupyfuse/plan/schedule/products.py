"""Choice of matrix products: cuBLAS in the operands' dtype, or float32 operands as float16 ones on tensor cores.

At "highest", x = inverse (hi + 2**-11 lo), with float16 numbers hi and lo and a power of two for each row, keeps 22 of
24 bits. The product of two such matrices is three products of float16 matrices with float32 sums; the fourth, of both
low parts, is below the rounding of the result. It is no noise: x @ x.T without it has smaller eigenvalues, so what is
to be solved or decomposed is computed in float32. At "high", "medium" and "tf32", x = inverse hi keeps 11 bits, as TF32
does, and the product is one of float16 matrices: by our own kernel, which undoes the scales in its epilogue, or by
cuBLAS, whose product has still to be multiplied by factors. Elements too small for float16 beside the largest of their
row are repaired in float32 either way, and in two parts infinities and NaN.

Arguments of 16 bits whose rows do not begin at multiples of 16 bytes, as of an odd width, take cuBLAS several times as
long. Where it pays they are copied, to rows that our own kernel reads (`padding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import replace
from typing import NamedTuple

from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...ir.library import of_linear_algebra
from ...ir.products import split_matmul, strip_transposes, with_factors
from ...settings import Settings
from ..rounding import is_16_bit_product
from .memory import base_of
from .padding import may_be_padded, unaligned_operands
from .split_tiles import TILE_ROWS, tile_columns, tile_width
from .steps import step_of, with_bytes
from .tiles import (
    LAUNCH,
    START,
    library_share,
    library_time,
    own_time,
    product_time,
    share_of_rows,
    takes_epilogues,
    tile_finish,
    unaligned_finish,
)

# Shorter sums are so accurate in float32 that 22 bits of the operands would show.
LEAST_DEPTH = 512
# Seconds of more launches and of what cannot overlap at their ends: of hi/lo products, and of cuBLAS's of one part.
_OVERHEAD, _ROUNDED_OVERHEAD = 8e-6, 8e-6
_WORTH = 0.9  # of cuBLAS's time, what our kernel and the copies for it may take
# Of the peak rates, what cuBLAS reaches in large products, and of the bandwidth, what passes over operands reach.
_FLOAT32_SHARE, _TF32_SHARE, _HALF_SHARE, _PASS_SHARE = 0.76, 0.83, 0.77, 0.85
_EPILOGUE_FLOPS = 10  # of an element in our kernel: they undo its scales and compute a little more, not known yet
# Precisions that allow operands of 11 bits.
ROUNDED = ("high", "medium", "tf32")


def choose_products(graph: Graph, settings: Settings, fixed: set[Node], common: Set[Node] = frozenset()) -> Graph:
    """Replace each product by the form in which it will run, and say in its field `how` which that is, and why.

    `fixed` are the values that depend on bound arguments alone, so that their splits can be prepacked. What depends on
    the arguments in `common` alone is computed by another plan, as what all blocks share.
    """
    live = set(g.topological(graph.roots, g.eager_inputs))
    results = set(graph.roots)
    decomposed = _read_by_linear_algebra(graph)
    done: dict[Node, Node] = {}
    shared: _Shared = {}
    copies = _aligned_copies(graph, settings, fixed | common)
    for node in g.topological(graph.roots):
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if node.op == "matmul" and node in live:
            left_prepacked, right_prepacked = (settings.keep_halves and i in fixed for i in node.inputs)
            prepacked = _Prepacked(left_prepacked, right_prepacked)
            if is_16_bit_product(node):
                done[node] = g.with_inputs(done[node], [_with_copy(i, copies) for i in done[node].inputs])
            if node in decomposed and settings.precision not in ROUNDED and not _library_reason(node, settings):
                how = f"cuBLAS {node.dtype}: linear algebra amplifies what the hi/lo split leaves out"
                done[node] = replace(done[node], how=how)
            else:
                done[node] = _choose_product(done[node], settings, prepacked, node in results, shared)
    return graph.replace(done)


def _read_by_linear_algebra(graph: Graph) -> set[Node]:
    """Return the products that a matrix to be solved or decomposed is computed from, without another one in between."""
    calls = [n for n in g.topological(graph.roots) if n.call is not None and of_linear_algebra(n.call.function)]
    return {n for n in g.topological(calls, lambda n: () if n.op == "matmul" else n.inputs) if n.op == "matmul"}


# Transposes and splits that several products may share, by ("transposed" or "split", the original).
_Shared = dict[tuple[str, Node], Node]


class _Prepacked(NamedTuple):
    """Whether the split of each of a product's operands is prepacked."""

    left: bool = False
    right: bool = False


def _choose_product(node: Node, settings: Settings, prepacked: _Prepacked, is_result: bool, shared: _Shared) -> Node:
    """Return a product in the form in which it will run: from splits of one part or two, or as cuBLAS computes it."""
    rounded = settings.precision in ROUNDED
    reason = _library_reason(node, settings)
    own = False
    if not reason and rounded:
        reason, own = _choose_rounded(node, settings, prepacked, is_result)
    elif not reason:
        reason = _reason_against_splitting(node, settings, prepacked)
    if reason:
        return replace(node, how=reason)
    left, right = node.inputs
    right = shared.setdefault(("transposed", right), g.transpose(right))
    product = split_matmul(left, right, 1 if rounded else 2)
    splits = [shared.setdefault(("split", i.inputs[0]), i) for i in product.inputs[:2]]
    how = "fp16 hi/lo split on tensor cores: 3 products with float32 sums, special values repaired"
    if rounded:
        kernel = "own fp16 product" if own else "cuBLAS float16"
        how = (
            f"{kernel}: operands rounded to 11 bits with a scale for each row, as the precision "
            f"{settings.precision!r} allows, float32 sums, small elements repaired"
        )
    product = replace(product, inputs=(*splits, left, right), how=how)
    return with_factors(product) if rounded and not own else product


def _aligned_copies(graph: Graph, settings: Settings, elsewhere: Set[Node]) -> dict[Node, Node]:
    """Choose the arguments that are worth copying for 16-bit products, and return the copies.

    What depends on the arguments in `elsewhere` alone is computed by another plan, whose results have no padded rows.
    """
    device = settings.device
    if device is None or not takes_epilogues(settings):
        return {}
    gains: dict[frozenset[Node], float] = {}  # in seconds, of the products that read these arguments
    for node in filter(is_16_bit_product, g.topological(graph.roots)):
        unaligned = unaligned_operands(node)
        arguments = frozenset(m for m in unaligned if m.op == "input")
        others = [m for m in unaligned if m.op != "input"]
        sliced = any(strip_transposes(i)[0].op == "slice" for i in node.inputs)
        empty = 0 in (*node.shape, node.inputs[0].shape[1])
        if not arguments or not elsewhere.isdisjoint(arguments) or empty or sliced:
            continue
        if all(map(may_be_padded, others)):
            storage = {base_of(n): n.dtype for n in (*node.inputs, node)}
            step = with_bytes(step_of("Gemm", node.shape, [node], list(node.inputs), [node], []), storage)
            gain = max(0.0, _WORTH * library_time(step, device) - own_time(step, device))
            gains[arguments] = gains.get(arguments, 0.0) + gain
    found: dict[Node, Node] = {}
    for arguments, gain in gains.items():
        copied = [m for m in arguments if m not in found]
        # Read and written, two bytes each.
        copying = sum(4 * m.size / (_PASS_SHARE * device.bandwidth) + LAUNCH for m in copied)
        if settings.epilogues == "always" or gain > copying:
            found.update((m, Node("cast", (m,), m.shape, m.dtype)) for m in copied)
    return found


def _with_copy(operand: Node, copies: dict[Node, Node]) -> Node:
    """Return an operand with the argument that it is, or is a transpose of, replaced by its copy, if there is one."""
    matrix, transposed = strip_transposes(operand)
    if matrix not in copies:
        return operand
    return g.transpose(copies[matrix]) if transposed else copies[matrix]


def _library_reason(node: Node, settings: Settings) -> str:
    """Explain why cuBLAS computes a product whatever its size; empty if there is a choice."""
    library = f"cuBLAS {node.dtype}"
    if node.dtype != "float32":
        return f"{library} with {'float64' if node.dtype == 'float64' else 'float32'} sums"
    if settings.precision == "ieee":
        return f"{library}, as the precision 'ieee' asks"
    return library if settings.device is None else ""


def _reason_against_splitting(node: Node, settings: Settings, prepacked: _Prepacked) -> str:
    """Explain why the hi/lo split is not faster, or not as accurate; empty if it is both."""
    device, library = settings.device, f"cuBLAS {node.dtype}"
    assert device is not None
    if not device.split:
        return f"{library}: the hi/lo split is not faster on {device.with_article}"
    if node.inputs[0].shape[1] < LEAST_DEPTH:
        return f"{library}: sums of fewer than {LEAST_DEPTH} products are more accurate so"
    fast, plain = split_time(node, device, *prepacked), float32_time(node, device)
    if fast >= plain:
        return f"{library}: {plain * 1e6:.3g} us, where the hi/lo split would take {fast * 1e6:.3g} us"
    return ""


def _choose_rounded(node: Node, settings: Settings, prepacked: _Prepacked, is_result: bool) -> tuple[str, bool]:
    """Return why float16 operands with scales are not faster than TF32, empty if they are; and by whose kernel.

    That is whether our own multiplies them, rather than cuBLAS.
    """
    device = settings.device
    assert device is not None
    own_possible = takes_epilogues(settings) and 0 not in (*node.shape, node.inputs[0].shape[1])
    if own_possible and settings.epilogues == "always":
        return "", True
    # Most of what follows our kernel is its epilogue; cuBLAS's product is read again.
    read = 0.0 if is_result else 4 * node.size / (_PASS_SHARE * device.bandwidth) + LAUNCH
    plain = tf32_time(node, device) + read
    by_library = rounded_time(node, device, *prepacked, is_result=is_result) + read
    own = own_rounded_time(node, device, *prepacked, is_result=is_result) if own_possible else math.inf
    fast = min(by_library, own)
    if fast < 0.95 * plain:
        return "", own <= by_library
    kind = "TF32" if device.tf32 > device.simt else "float32"
    reason = f"cuBLAS {kind}: {plain * 1e6:.3g} us, where fp16 operands with scales would take {fast * 1e6:.3g} us"
    return reason, False


def float32_time(node: Node, device: Device) -> float:
    """Estimate the seconds of cuBLAS for a float32 product, at the rate measured for large ones."""
    return _library_time(node, _FLOAT32_SHARE * device.simt, device)


def tf32_time(node: Node, device: Device) -> float:
    """Estimate the seconds of cuBLAS for a float32 product that may round operands to TF32."""
    share = _TF32_SHARE * library_share(node, 4)
    return _library_time(node, max(share * device.tf32, _FLOAT32_SHARE * device.simt), device)


def _library_time(node: Node, rate: float, device: Device) -> float:
    return max(2 * node.size * node.inputs[0].shape[1] / rate, _float32_bytes(node) / device.bandwidth) + 2e-6


def rounded_time(
    node: Node, device: Device, left_prepacked: bool = False, right_prepacked: bool = False, is_result: bool = False
) -> float:
    """Estimate the seconds of cuBLAS for float16 operands with scales, with the splits of those not prepacked.

    The step that reads the product multiplies it by its factors; a result takes a pass for them. Rows of splits are
    aligned, those of the product need not be.
    """
    passes = _rounding_bytes(node, left_prepacked, right_prepacked) + 8 * node.size * is_result
    compute = 2 * node.size * node.inputs[0].shape[1] / (_HALF_SHARE * share_of_rows(2, node.shape[1]) * device.half)
    moving = _float32_bytes(node) / 2 / device.bandwidth
    return max(compute, moving) + passes / (_PASS_SHARE * device.bandwidth) + _ROUNDED_OVERHEAD


def own_rounded_time(
    node: Node, device: Device, left_prepacked: bool = False, right_prepacked: bool = False, is_result: bool = False
) -> float:
    """Estimate the seconds of our kernel for float16 operands with scales, with the splits of those not prepacked.

    Its epilogue has a few FLOPs, and writes the product only if that is a result. Once there is a step, `own_time`
    estimates it with the epilogue that it has.
    """
    depth = node.inputs[0].shape[1]
    written = 4.0 if is_result else 0.0
    finish = tile_finish(_EPILOGUE_FLOPS, written) + is_result * unaligned_finish(node.shape, 4)
    multiply = product_time(node.shape, depth, finish, device)
    moving = (2 * depth * (node.shape[0] + node.shape[1]) + written * node.size) / (_PASS_SHARE * device.bandwidth)
    split = _rounding_bytes(node, left_prepacked, right_prepacked) / (_PASS_SHARE * device.bandwidth)
    launches = 1 + (not left_prepacked) + (not right_prepacked)
    return max(multiply, moving) + split + START + LAUNCH * launches


def _rounding_bytes(node: Node, left_prepacked: bool, right_prepacked: bool) -> float:
    """Return the bytes that the splits of operands in one part move: four are read and two written."""
    (rows, depth), cols = node.inputs[0].shape, node.shape[1]
    return 6.0 * depth * (rows * (not left_prepacked) + cols * (not right_prepacked))


def split_time(node: Node, device: Device, left_prepacked: bool = False, right_prepacked: bool = False) -> float:
    """Estimate the seconds of a hi/lo split product, with the splits of operands that are not prepacked."""
    (rows, depth), cols = node.inputs[0].shape, node.shape[1]
    columns = tile_columns(rows, cols, tile_width(rows, cols, device.processors), device.processors)
    # As if all multiprocessors had as much to do as the busiest one: three products of parts, K in stages of 64.
    flops = 3 * 2 * TILE_ROWS * columns * (-(-depth // 64) * 64) * device.processors
    compute = max(flops / device.split, _float32_bytes(node) / device.bandwidth)
    # A split reads an element of four bytes and writes two of two bytes.
    split = 8 * depth * (rows * (not left_prepacked) + cols * (not right_prepacked)) / (_PASS_SHARE * device.bandwidth)
    return compute + split + _OVERHEAD


def _float32_bytes(node: Node) -> float:
    """Return the bytes of a product's operands and of its result in float32."""
    (rows, depth), cols = node.inputs[0].shape, node.shape[1]
    return 4.0 * (rows * depth + cols * depth + rows * cols)
