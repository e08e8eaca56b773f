"""Estimate the times of two schedules of a chain: the fused plan, and Inductor's kernels.

Inductor's schedule is taken to be that of the chain without rewrites, but for those of rows side by side, with every
product by cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...ir.kinds import is_product
from ...plan.build import build
from ...plan.schedule import Step, base_of, schedule
from ...plan.schedule.memory import stored_size
from ...plan.schedule.tiles import own_time, share_of_rows, split_epilogue_time
from ...plan.schedule.times import sum_time
from ...rewrite import compute_pieces
from ...settings import Settings
from ..chains.backward import Backward
from ..chains.chain import TracedChain
from ..chains.tensors import without_memory
from . import rates
from .machine import Machine, Time, total_time

Flags = tuple[bool, ...]


# Fused --------------------------------------------------------------------------------------------------------------


def fused_time(
    traced: TracedChain,
    requires_grad: Flags,
    machine: Machine,
    settings: Settings,
    frozen: bool,
    fixed: frozenset[int],
) -> Time:
    """Estimate the fused plan and, where gradients are wanted, the plan of its backward pass.

    Weights are prepacked from the inputs `fixed`.
    """
    times = [Time(0.0, rates.CALL)]
    saved: Sequence[Node] = ()
    if any(requires_grad):
        backward = Backward(traced, requires_grad, settings)
        saved = backward.saving.nodes
        inputs = [without_memory(v.shape, v.dtype) for v in traced.inputs]
        plan_back = backward.plan(inputs, requires_grad)
        if plan_back is not None:
            times.append(Time(0.0, rates.FUNCTION + rates.CALL))
            times += [_fused_step_time(step, machine) for step in plan_back.steps_of_call()]
    plan = build(traced.as_traced(saved), None, settings, fixed, checked=not frozen)
    times += [_fused_step_time(step, machine) for step in plan.steps_of_call()]
    if plan.prepare is not None:
        if any(requires_grad[n.argument] for n in plan.prepare.graph.inputs):
            # Trained weights change in each step, so prepacking runs in each.
            times += [_fused_step_time(step, machine) for step in plan.prepare.steps]
        elif not frozen:
            launches = 1 + plan.prepare.launches
            times.append(Time(rates.CHECK * launches, rates.OUR_LAUNCH * launches))
    return total_time(times)


def _fused_step_time(step: Step, machine: Machine) -> Time:
    """Estimate a step of a fused plan."""
    if step.kind != "Gemm":
        rereads = any(n.reduction for n in step.nodes) and step.writes > step.reads // 8
        # Blocks share longer rows than one holds, or read them again where they are written back.
        share = rates.SHARED if rereads and step.domain[1] > rates.HELD_COLUMNS else rates.STREAM
        if step.columns is not None:
            share = rates.SUMMED_ROWS[_itemsize(step)]
        return Time(_row_time(step, machine, step.reads + step.writes, share), rates.OUR_LAUNCH * step.launches)
    times = []
    if step.by_tiles:
        return Time(own_time(step, machine.device) - rates.QUEUED, rates.OUR_LAUNCH * step.launches)
    if step.epilogue is not None and not step.by_library:
        times.append(Time(split_epilogue_time(step, machine.device), 0.0))
    for node in (n for n in step.nodes if step.epilogue is None or n not in step.epilogue.nodes):
        if node.op == "split":
            gpu = machine.memory_time((4.0 + 2.0 * node.parts) * node.inputs[0].size)
            gpu *= rates.SPLIT_COLUMNS if node.inputs[0].op == "transpose" else 1.0
            times.append(Time(rates.LAUNCH + gpu, rates.OUR_LAUNCH))
        elif node.op in ("matmul", "accumulate"):
            product = gpu = machine.product_time(*_sizes(node), node.inputs[0].dtype)
            summed = node.op == "accumulate"
            gpu = max(gpu, sum_time(node, machine.device)) if summed else gpu + _widening_time(step, machine)
            times.append(Time(gpu, rates.OUR_PRODUCT, product))
        else:
            host = rates.OUR_LAUNCH + (rates.OUR_LAUNCH if node.parts == 2 else rates.OUR_PRODUCT)
            gpu = machine.split_product_time(*_sizes(node), node.parts, presplit=True)
            end = machine.memory_time(rates.SPLIT_END * node.size) if node.parts == 2 else 0.0
            times.append(Time(gpu + end, host))
    return total_time(times)


def _widening_time(step: Step, machine: Machine) -> float:
    """Return the GPU seconds that storing a 16-bit product in float32 adds."""
    return rates.WIDENED * machine.memory_time(max(0, step.writes - sum(n.nbytes for n in step.outputs)))


def _row_time(step: Step, machine: Machine, nbytes: float, share: float, launch: float = rates.LAUNCH) -> float:
    """Return the GPU seconds of a step that is no product and moves `nbytes` at a share of the bandwidth."""
    if not step.launches:
        return 0.0
    if step.kind in ("Split", "Copy"):
        return launch + machine.memory_time(nbytes, rates.STRIDED if step.kind == "Copy" else rates.STREAM)
    reductions = any(n.reduction for n in step.nodes)
    double = any(n.dtype == "float64" for n in step.nodes)
    peak = machine.device.simt64 if double else machine.device.simt
    peak *= rates.ALU_ROWS if reductions else rates.ALU
    fixed = launch * step.launches + (rates.REDUCTION if reductions else 0.0)
    share = _column_share(step) if step.kind == "ColumnStats" else share
    moving, computing = machine.memory_time(nbytes, share), step.flops / peak
    # Without reductions one hides the other in part alone: GELU of 4096 x 3072 in bfloat16 takes 18 us.
    return fixed + (max(moving, computing) if reductions else math.hypot(moving, computing))


def _column_share(step: Step) -> float:
    """Return the share of the bandwidth at which columns of the step's matrices are reduced."""
    return rates.COLUMNS[_itemsize(step)]


def _itemsize(step: Step) -> int:
    """Return the bytes of an element of the largest array that a step reads: 2, or 4 for all others."""
    largest = max(step.inputs, key=lambda n: n.nbytes, default=None)
    return 2 if largest is not None and dtypes.ITEMSIZE[largest.dtype] == 2 else 4


# Inductor's ---------------------------------------------------------------------------------------------------------


def inductor_time(traced: TracedChain, requires_grad: Flags, machine: Machine) -> Time:
    """Estimate Inductor's kernels: the same grouping of row work, products and their biases by cuBLAS."""
    graph = traced.as_traced().graph
    if any(node.op == "concat" for node in graph.order):  # Inductor, too, computes what is side by side in one kernel
        graph = compute_pieces(graph)
    steps = schedule(graph, {}).steps
    products = {n for s in steps if s.kind == "Gemm" for n in s.outputs}
    steps = [s for s in steps if not _adds_bias(s, products)]
    times = [_inductor_step_time(step, machine) for step in steps]
    if any(requires_grad):
        times.append(_inductor_backward_time(steps, traced, requires_grad, machine))
    return total_time(times)


def _adds_bias(step: Step, products: set[Node]) -> bool:
    """Whether all that a step does is to add a bias to a product, which cuBLAS does as it stores it."""
    work = [n for n in step.nodes if n.op not in (*g.PASS_THROUGH, "transpose", "reshape")]
    sources = [base_of(n) for n in step.inputs]
    return (
        [n.op for n in work] == ["add"]
        and any(n in products for n in sources)
        and all(n in products or n.shape[0] == 1 for n in sources)
    )


def _inductor_step_time(step: Step, machine: Machine) -> Time:
    """Estimate a step as Inductor's kernels."""
    if step.kind == "Gemm":
        products = [n for n in step.nodes if is_product(n)]
        gpu = sum(machine.product_time(*_sizes(n), n.inputs[0].dtype, padded=True) for n in products)
        return Time(gpu, rates.INDUCTOR_PRODUCT * len(products), gpu)
    reads, writes = _bytes(step.inputs), _bytes(step.outputs)
    share = rates.STREAM
    if any(n.reduction for n in step.nodes) and step.domain[1] > rates.INDUCTOR_HELD:
        # Longer rows than Inductor holds: one bandwidth where they are written back, another where only reduced.
        widest = max(step.inputs, key=lambda n: n.size)
        written, reduced = rates.INDUCTOR_WIDE[2 if dtypes.ITEMSIZE[widest.dtype] == 2 else 4]
        share = written if writes > reads // 8 else reduced
    gpu = _row_time(step, machine, reads + writes, share, rates.INDUCTOR_GAP)
    return Time(gpu, rates.INDUCTOR_LAUNCH * step.launches)


def _inductor_backward_time(steps: Sequence[Step], traced: TracedChain, requires_grad: Flags, machine: Machine) -> Time:
    """Estimate the backward pass of a forward schedule: two products for each, and row work recomputed from its inputs.

    Wanted gradients that no step here writes, as of weights whose product was rewritten, are a write each. Rows of a
    product's gradient are padded for the products that read it, if they are not aligned: Inductor pads where it finds
    that faster, mostly in large products.
    """
    dependent = _dependent_nodes(steps, traced, requires_grad)
    times: list[Time] = []
    written: set[Node] = set()
    for step in steps:
        reads = [n for n in dict.fromkeys(step.inputs) if n in dependent]
        if step.kind == "Gemm":
            for node in filter(is_product, step.nodes):
                m, k, n = _sizes(node)  # of C = A B: the gradients are dC Bᵀ and Aᵀ dC
                for operand, sizes in zip(_operands(node), ((m, n, k), (k, m, n)), strict=True):
                    if operand in dependent:
                        written.add(base_of(operand))
                        gpu = machine.product_time(*sizes, operand.dtype, True, (k, n))
                        times.append(Time(gpu, rates.INDUCTOR_PRODUCT, gpu))
                if dependent.intersection(_operands(node)):
                    times += [_padding_time(m, length, node.dtype, machine) for length in (k, n)]
        elif reads and step.launches:
            times += _backward_row_times(step, reads, machine)
            written.update(map(base_of, reads))
    wanted = [base_of(v.tracer._node) for v, want in zip(traced.inputs, requires_grad, strict=True) if want]
    rest = _bytes(n for n in wanted if n not in written and n.shape[0] > 1)
    if rest:
        times.append(Time(rates.INDUCTOR_GAP + machine.memory_time(rest), rates.INDUCTOR_LAUNCH))
    return total_time(times)


def _backward_row_times(step: Step, reads: Sequence[Node], machine: Machine) -> list[Time]:
    """Estimate the gradients of row work by `reads`: along rows, and down columns for biases and scales.

    Of rows that are reduced one kernel makes both. Of matrices that are only added to each other, the sum is what the
    forward pass saves.
    """

    def is_vector(n: Node) -> bool:
        return n.shape[0] == 1 < step.domain[0]

    matrices = _with_own_gradients(step, [n for n in reads if not is_vector(n)])
    constants = [n for n in step.inputs if not is_vector(n) and n not in reads]
    read = _bytes(matrices) + _bytes(constants) + _bytes(step.outputs)
    together = any(map(is_vector, reads)) and any(n.reduction and n.axis == 1 for n in step.nodes)
    share = rates.INDUCTOR_SUMMED_ROWS[_itemsize(step)] if together else rates.STREAM
    rows = _row_time(step, machine, read + _bytes(matrices), share, rates.INDUCTOR_GAP)
    times = [Time(rows, rates.INDUCTOR_LAUNCH * step.launches)]
    if together:
        times.append(Time(2 * rates.INDUCTOR_GAP, 2 * rates.INDUCTOR_LAUNCH))  # the merge of what blocks leave
    elif any(map(is_vector, reads)):
        gpu = 2 * rates.INDUCTOR_GAP + machine.memory_time(read, _column_share(step))
        times.append(Time(gpu, 2 * rates.INDUCTOR_LAUNCH))
    return times


def _with_own_gradients(step: Step, matrices: Sequence[Node]) -> list[Node]:
    """Leave one of two operands that a step only adds to each other: their gradients are one tensor."""
    readers = {n: [m for m in step.nodes if n in m.inputs] for n in matrices}

    def sum_of(n: Node) -> Node:
        (first, *others) = readers[n] or [n]
        return first if not others and first.op == "add" and (first.shape, first.dtype) == (n.shape, n.dtype) else n

    return list({sum_of(n): n for n in matrices}.values())


def _padding_time(rows: int, length: int, dtype: str, machine: Machine) -> Time:
    """Estimate the copy of a 16-bit matrix to padded rows; nothing where they are aligned, as a single one is."""
    itemsize = dtypes.ITEMSIZE[dtype]
    if rows == 1 or itemsize != 2 or share_of_rows(itemsize, length) == 1:
        return Time(0.0, 0.0)
    return Time(rates.INDUCTOR_GAP + machine.memory_time(2.0 * itemsize * rows * length), rates.INDUCTOR_LAUNCH)


def _dependent_nodes(steps: Iterable[Step], traced: TracedChain, requires_grad: Flags) -> set[Node]:
    """Find the values of a schedule that depend on inputs whose gradient is wanted."""
    wanted = {k for k, want in enumerate(requires_grad) if want}
    fixed = any(requires_grad[k] for k in traced.chain.fixed)

    def is_wanted(number: int) -> bool:
        # Numbers beyond the inputs are those of prepacked weights.
        return number in wanted or (fixed and number >= len(requires_grad))

    found: set[Node] = set()
    for node in g.topological([n for step in steps for n in step.outputs]):
        depends = is_wanted(node.argument) if node.op == "input" else any(i in found for i in node.inputs)
        if depends:
            found.add(node)
    return found


# Sizes --------------------------------------------------------------------------------------------------------------


def _operands(node: Node) -> tuple[Node, Node]:
    """Return the operands of a product, before any splitting."""
    return (node.inputs[2], node.inputs[3]) if node.op == "split_matmul" else (node.inputs[0], node.inputs[1])


def _sizes(node: Node) -> tuple[int, int, int]:
    """Return m, k and n of a product of (m, k) by (k, n)."""
    return node.shape[0], _operands(node)[0].shape[1], node.shape[1]


def _bytes(nodes: Iterable[Node]) -> float:
    """Add up the bytes of values in memory, each counted once."""
    return float(sum(stored_size(n) * dtypes.ITEMSIZE[n.dtype] for n in dict.fromkeys(nodes)))
