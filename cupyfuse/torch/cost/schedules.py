"""Estimate times of schedules: of the plan that this library would run, and of the kernels that Inductor would.

Inductor's schedule is that of the chain as it is written, nothing rewritten, with every product by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.schedule import Step, base_of, schedule
from ...plan.schedule.tiles import own_time
from ...settings import Settings
from ..chains.chain import TracedChain
from . import rates
from .machine import Machine, Time, total

Flags = tuple[bool, ...]


@dataclass(frozen=True)
class _Executor:
    """What runs a schedule: host seconds of a launch and of a product, and how much slower its backward passes are."""

    launch: float
    product: float
    backward_rows: float = 1.0
    backward_product: float = 1.0
    splits: bool = False  # float32 operands into hi and lo


_OURS = _Executor(rates.OUR_LAUNCH, rates.OUR_PRODUCT, rates.BACKWARD_ROWS, rates.BACKWARD_PRODUCT, splits=True)
_INDUCTOR = _Executor(rates.INDUCTOR_LAUNCH, rates.INDUCTOR_PRODUCT)


# Ours ---------------------------------------------------------------------------------------------------------------


def our_time(traced: TracedChain, requires_grad: Flags, machine: Machine, frozen: bool) -> Time:
    """Estimate the plan that would run, without blocks of rows, which cost little beside their work."""
    fixed = traced.chain.fixed
    settings = Settings(machine.precision, machine.device, max_workspace=1 << 62)
    plan = build(traced.as_traced(), None, settings, fixed)
    times = [Time(0.0, rates.CALL), *(_our_step(step, machine) for step in plan.steps)]
    if plan.prepare is not None:
        if any(requires_grad[n.argument] for n in plan.prepare.graph.inputs):  # a training step has them prepacked once
            times += [_our_step(step, machine) for step in plan.prepare.steps]
        elif not frozen:
            launches = 1 + plan.prepare.launches
            times.append(Time(rates.CHECK * launches, rates.OUR_LAUNCH * launches))
    if any(requires_grad):
        # The backward pass of an epilogue is a row program's.
        steps = [s for step in plan.steps for s in (step, step.epilogue) if s is not None]
        times += [Time(0.0, rates.FUNCTION + rates.CALL), _backward(steps, traced, requires_grad, machine, _OURS)]
    return total(times)


def _our_step(step: Step, machine: Machine) -> Time:
    if step.kind != "Gemm":
        rereads = any(n.reduction for n in step.nodes) and step.writes > step.reads // 8
        share = rates.REREAD if rereads and step.domain[1] > rates.HELD_COLUMNS else rates.STREAM
        return Time(_row_time(step, machine, step.reads + step.writes, share), rates.OUR_LAUNCH * step.launches)
    if step.epilogue is not None:
        return Time(own_time(step, machine.device), rates.OUR_LAUNCH * step.launches)
    times = []
    for node in step.nodes:
        if node.op == "split":
            times.append(Time(machine.memory((4.0 + 2.0 * node.parts) * node.inputs[0].size), rates.OUR_LAUNCH))
        elif node.op == "matmul":
            times.append(Time(machine.product(*_sizes(node), node.inputs[0].dtype), rates.OUR_PRODUCT))
        else:
            host = rates.OUR_LAUNCH + (rates.OUR_LAUNCH if node.parts == 2 else rates.OUR_PRODUCT)
            times.append(Time(machine.split_product(*_sizes(node), node.parts, presplit=True), host))
    return total(times)


def _row_time(step: Step, machine: Machine, nbytes: float, share: float) -> float:
    """Seconds of a step that is no product."""
    if not step.launches:
        return 0.0
    if step.kind in ("Split", "Copy"):
        return rates.LAUNCH + machine.memory(nbytes, rates.TRANSPOSED if step.kind == "Copy" else rates.STREAM)
    reductions = any(n.reduction for n in step.nodes)
    double = any(n.dtype == "float64" for n in step.nodes)
    peak = machine.device.simt64 if double else machine.device.simt
    peak *= rates.ALU_ROWS if reductions else rates.ALU
    fixed = rates.LAUNCH * step.launches + (rates.REDUCTION if reductions else 0.0)
    share = rates.COLUMNS if step.kind == "ColumnStats" else share
    return fixed + max(machine.memory(nbytes, share), step.flops / peak)


# Inductor's ---------------------------------------------------------------------------------------------------------


def inductor_time(traced: TracedChain, requires_grad: Flags, machine: Machine) -> Time:
    """Estimate Inductor's kernels: the same grouping of row work, products and their biases by cuBLAS."""
    steps = schedule(traced.as_traced().graph, {}).steps
    products = {n for s in steps if s.kind == "Gemm" for n in s.outputs}
    steps = [s for s in steps if not _is_bias(s, products)]
    forward = [_inductor_step(step, machine) for step in steps]
    return total(
        [total(forward), *([_backward(steps, traced, requires_grad, machine, _INDUCTOR)] if any(requires_grad) else [])]
    )


def _is_bias(step: Step, products: set[Node]) -> bool:
    """Whether all that a step does is to add a bias to a product, which cuBLAS does as it stores it."""
    work = [n for n in step.nodes if n.op not in (*g.PASS_THROUGH, "transpose", "reshape")]
    sources = [base_of(n) for n in step.inputs]
    return (
        [n.op for n in work] == ["add"]
        and any(n in products for n in sources)
        and all(n in products or n.shape[0] == 1 for n in sources)
    )


def _inductor_step(step: Step, machine: Machine) -> Time:
    if step.kind == "Gemm":
        products = [n for n in step.nodes if g.is_product(n)]
        gpu = sum(machine.product(*_sizes(n), n.inputs[0].dtype) for n in products)
        return Time(gpu, rates.INDUCTOR_PRODUCT * len(products))
    reads, writes = _bytes(step.inputs), _bytes(step.outputs)
    share = rates.STREAM
    if any(n.reduction for n in step.nodes) and step.domain[1] > rates.INDUCTOR_HELD:
        widest = max(step.inputs, key=lambda n: n.size)
        written, reduced = rates.INDUCTOR_WIDE[2 if dtypes.ITEMSIZE[widest.dtype] == 2 else 4]
        share = written if writes > reads // 8 else reduced
    return Time(_row_time(step, machine, reads + writes, share), rates.INDUCTOR_LAUNCH * step.launches)


# Backward -----------------------------------------------------------------------------------------------------------


def _backward(
    steps: Sequence[Step], traced: TracedChain, requires_grad: Flags, machine: Machine, executor: _Executor
) -> Time:
    """Estimate the backward pass of a forward schedule: two products for one, and row work from its inputs anew.

    Gradients that neither writes, as those of weights that algebra has taken out of a product, are written at least.
    """
    dependent = _dependent(steps, traced, requires_grad)
    launch = executor.launch
    times: list[Time] = []
    written: set[Node] = set()
    for step in steps:
        reads = [n for n in dict.fromkeys(step.inputs) if n in dependent]
        if step.kind == "Gemm":
            for node in filter(g.is_product, step.nodes):
                m, k, n = _sizes(node)
                for operand, sizes in zip(_operands(node), ((m, n, k), (k, m, n)), strict=True):
                    if operand in dependent:
                        written.add(base_of(operand))
                        times.append(_backward_product(sizes, operand.dtype, machine, executor))
        elif reads and step.launches:
            whole = [n for n in reads if n.shape[0] > 1]
            moved = _bytes(step.inputs) + _bytes(step.outputs) + _bytes(whole)
            rows = _row_time(step, machine, moved, rates.STREAM) * executor.backward_rows
            times.append(Time(rows, launch * step.launches))
            if len(whole) < len(reads) and step.domain[0] > 1:  # biases, scales: sums down the columns
                moved = _bytes(n for n in step.inputs if n.shape[0] > 1) + _bytes(step.outputs)
                times.append(Time(2 * rates.LAUNCH + machine.memory(moved, rates.COLUMNS), 2 * launch))
            written.update(map(base_of, reads))
    wanted = [base_of(v.tracer._node) for v, want in zip(traced.inputs, requires_grad, strict=True) if want]
    rest = _bytes(n for n in wanted if n not in written and n.shape[0] > 1)
    if rest:
        times.append(Time(rates.LAUNCH + machine.memory(rest), launch))
    return total(times)


def _backward_product(sizes: tuple[int, int, int], dtype: str, machine: Machine, executor: _Executor) -> Time:
    split = machine.best_split_product(*sizes, dtype) if executor.splits else None
    if split is not None:
        return Time(split * rates.BACKWARD_SPLIT, 4 * executor.launch)
    return Time(machine.product(*sizes, dtype) * executor.backward_product, executor.product)


def _dependent(steps: Iterable[Step], traced: TracedChain, requires_grad: Flags) -> set[Node]:
    """Find the values of a schedule that depend on inputs whose gradient is wanted."""
    wanted = {k for k, want in enumerate(requires_grad) if want}
    fixed = any(requires_grad[k] for k in traced.chain.fixed)

    def is_wanted(number: int) -> bool:
        # Prepacked weights are numbered after the inputs.
        return number in wanted or (fixed and number >= len(requires_grad))

    found: set[Node] = set()
    for node in g.topological([n for step in steps for n in step.outputs]):
        if is_wanted(node.argument) if node.op == "input" else any(i in found for i in node.inputs):
            found.add(node)
    return found


# Sizes --------------------------------------------------------------------------------------------------------------


def _operands(node: Node) -> tuple[Node, Node]:
    """The operands of a product, before any splitting."""
    return (node.inputs[2], node.inputs[3]) if node.op == "split_matmul" else (node.inputs[0], node.inputs[1])


def _sizes(node: Node) -> tuple[int, int, int]:
    """Rows, depth and columns of a product."""
    return node.shape[0], _operands(node)[0].shape[1], node.shape[1]


def _bytes(nodes: Iterable[Node]) -> float:
    """Bytes of values in their own dtypes, each counted once."""
    return float(sum(n.nbytes for n in dict.fromkeys(nodes)))
