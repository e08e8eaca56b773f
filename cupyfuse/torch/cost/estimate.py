"""The cost model: what a chain takes of the GPU and of the host, through this library and without it.

A chain runs through this library only where that gains. GPU times are rooflines: bytes over the bandwidth that is
reached, FLOPs over the rate that is reached, and a floor for each launch. Host times count launches and calls. Ours are
those of the plan that would run; those of PyTorch eager come from a table of its kernels, operation by operation; those
of Inductor from the schedule of the chain as it is written, nothing rewritten, every product by cuBLAS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ... import devices, dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.schedule import Step, resolve, schedule
from ...settings import Settings
from ..chains.chain import Chain, Meta, Tracing
from .eager import eager
from .rates import (
    ALU,
    ALU_ROWS,
    BACKWARD_HALVES,
    BACKWARD_PRODUCT,
    BACKWARD_ROWS,
    CALL,
    CHECK,
    COLUMNS,
    FUNCTION,
    HELD_COLUMNS,
    INDUCTOR_HELD,
    INDUCTOR_LAUNCH,
    INDUCTOR_PRODUCT,
    INDUCTOR_WIDE,
    LAUNCH,
    MARGIN,
    OUR_LAUNCH,
    OUR_PRODUCT,
    REDUCTION,
    REREAD,
    STREAM,
    TRANSPOSED,
    US,
    Machine,
    Time,
    total,
)

__all__ = ["Estimate", "Time", "estimate"]


# How many times as much host time has to be saved for GPU time that is lost: elsewhere in a model the GPU may be what
# is waited for.
_WORTH = 4.0


@dataclass(frozen=True)
class Estimate:
    """What a chain takes through this library and without it.

    Attributes
    ----------
    ours, theirs : Time
    reason : why there is no estimate; empty where there is one
    """

    ours: Time
    theirs: Time
    reason: str = ""

    def gains(self) -> bool:
        """Whether the chain is to run through this library.

        It is where neither the host nor the GPU takes longer; where the GPU saves more than the host loses, if the GPU
        is what is waited for: if the work that PyTorch gives it takes longer than our host does; and where the host
        saves several times what the GPU loses, if our work for the GPU is done before the host is. In each case the
        gain has to be more than `MARGIN` of what PyTorch takes. Without an estimate it is not.
        """
        if self.reason or not math.isfinite(self.ours.gpu + self.ours.host):
            return False
        gpu, host = self.theirs.gpu - self.ours.gpu, self.theirs.host - self.ours.host
        if gpu >= 0 and host >= 0:
            return gpu + host > MARGIN * (self.theirs.gpu + self.theirs.host)
        if host > 0:
            return self.ours.gpu < self.ours.host and host + _WORTH * gpu > MARGIN * self.theirs.host
        return self.theirs.gpu > self.ours.host and gpu + min(host, 0.0) > MARGIN * self.theirs.gpu

    def summary(self) -> str:
        """Both estimates, ours first, in one line."""
        if self.reason:
            return f"no estimate: {self.reason}"
        (a, b), (c, d) = (map(_microseconds, (t.host, t.gpu)) for t in (self.ours, self.theirs))
        return f"{a} us of host against {c}, {b} us of GPU against {d}"

    __str__ = summary


def _microseconds(seconds: float) -> str:
    value = seconds / US
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")


def estimate(
    chain: Chain,
    metas: Sequence[Meta],
    *,
    graded: Sequence[bool] = (),
    precision: str = "highest",
    device: Device | None = None,
    compiled: bool = False,
    frozen: bool = False,
) -> Estimate:
    """Estimate what a chain takes through this library, and what it takes without.

    It never raises: what cannot be estimated is left to PyTorch, and the estimate has the reason. Equal questions are
    answered from a cache, whatever the chain's inputs are called.

    Parameters
    ----------
    chain : Chain
    metas : sequence of (shape, dtype)
        Of its inputs.
    graded : sequence of bool
        For each input, whether its gradient is wanted; then forward and backward are estimated. Empty for inference.
    precision : str
        Of float32 products.
    device : Device or None
        None, for CPUs and for GPUs that are not in the table, stands for the default one (`devices.DEFAULT`): the
        decision is then the same as there, though the plan that runs may not be.
    compiled : bool
        What runs otherwise: Inductor, or PyTorch eager.
    frozen : bool
        Whether fixed inputs never change, so that what is prepared from them is not checked.
    """
    try:
        wanted = tuple(map(bool, graded)) or (False,) * len(chain.names)
        anonymous = replace(chain, names=tuple(f"input{k}" for k in range(len(chain.names))))
        known = tuple((tuple(shape), dtype) for shape, dtype in metas)
        place = device or devices.DEVICES[devices.DEFAULT]
        question = (anonymous, known, wanted, precision, place, compiled, frozen)
        try:
            return _cached(*question)
        except TypeError:  # an argument of the chain cannot be hashed
            return _computed(*question)
    except Exception as error:  # whatever the reason: a chain that cannot be judged is left
        unknown = Time(math.inf, math.inf)
        return Estimate(unknown, unknown, (str(error).splitlines() or [type(error).__name__])[0])


def _computed(
    chain: Chain,
    metas: Sequence[Meta],
    graded: tuple[bool, ...],
    precision: str,
    device: Device,
    compiled: bool,
    frozen: bool,
) -> Estimate:
    tracing = chain.trace(metas)
    machine = Machine(device, precision)
    theirs = _inductor if compiled else eager
    return Estimate(_ours(tracing, graded, machine, frozen), theirs(tracing, graded, machine))


_cached = lru_cache(maxsize=4096)(_computed)


# Ours ---------------------------------------------------------------------------------------------------------------


def _ours(tracing: Tracing, graded: tuple[bool, ...], machine: Machine, frozen: bool) -> Time:
    """What the plan takes that would run; blocks of rows are left out, which cost little beside their work."""
    chain = tracing.chain
    settings = Settings(machine.precision, machine.device, max_workspace=1 << 62)
    plan = build(tracing.as_traced(), None, settings, chain.fixed)
    times = [Time(0.0, CALL), *(_our_step(step, machine) for step in plan.steps)]
    if plan.prepare is not None:
        needed = {n.argument for n in plan.prepare.graph.inputs}
        launches = plan.prepare.launches
        if any(graded[k] for k in needed):  # a step of training changes them, and has them prepared once
            times += [_our_step(step, machine) for step in plan.prepare.steps]
        elif not frozen:
            times.append(Time(CHECK * (1 + launches), OUR_LAUNCH * (1 + launches)))
    if any(graded):
        times += [Time(0.0, FUNCTION + CALL), _backward(plan.steps, tracing, graded, machine, ours=True)]
    return total(times)


def _our_step(step: Step, machine: Machine) -> Time:
    if step.kind != "Gemm":
        return Time(_row_time(step, machine, step.reads + step.writes, _our_share(step)), OUR_LAUNCH * step.launches)
    gpu, host = 0.0, 0.0
    for node in step.nodes:
        if node.op == "split":
            gpu += machine.memory(8.0 * node.inputs[0].size)
            host += OUR_LAUNCH
        elif node.op == "matmul":
            gpu += machine.product(*_sizes(node), node.inputs[0].dtype)
            host += OUR_PRODUCT
        else:
            gpu += machine.halves(*_sizes(node), kept=(True, True))
            host += 2 * OUR_LAUNCH
    return Time(gpu, host)


def _our_share(step: Step) -> float:
    rereads = any(n.reduction for n in step.nodes) and step.writes > step.reads // 8
    return REREAD if rereads and step.domain[1] > HELD_COLUMNS else STREAM


def _row_time(step: Step, machine: Machine, nbytes: float, share: float) -> float:
    """Seconds of a step that is no product."""
    if not step.launches:
        return 0.0
    if step.kind in ("Split", "Copy"):
        return LAUNCH + machine.memory(nbytes, TRANSPOSED if step.kind == "Copy" else STREAM)
    reductions = any(n.reduction for n in step.nodes)
    double = any(n.dtype == "float64" for n in step.nodes)
    peak = (machine.device.simt64 if double else machine.device.simt) * (ALU_ROWS if reductions else ALU)
    fixed = LAUNCH * step.launches + (REDUCTION if reductions else 0.0)
    share = COLUMNS if step.kind == "ColumnStats" else share
    return fixed + max(machine.memory(nbytes, share), step.flops / peak)


# Inductor's ---------------------------------------------------------------------------------------------------------


def _inductor(tracing: Tracing, graded: tuple[bool, ...], machine: Machine) -> Time:
    """What Inductor takes: the same grouping of row work, nothing rewritten, products and their biases by cuBLAS."""
    whole = schedule(tracing.as_traced().graph, {}).steps
    products = {n for s in whole if s.kind == "Gemm" for n in s.outputs}
    steps = [s for s in whole if not _is_bias(s, products)]
    forward = total(_inductor_step(step, machine) for step in steps)
    return forward + _backward(steps, tracing, graded, machine, ours=False) if any(graded) else forward


def _is_bias(step: Step, products: set[Node]) -> bool:
    """Whether all that a step does is to add a bias to a product, which cuBLAS does as it stores it."""
    work = [n for n in step.nodes if n.op not in (*g.PASS_THROUGH, "transpose", "reshape")]
    sources = [resolve(n) for n in step.inputs]
    return (
        [n.op for n in work] == ["add"]
        and any(n in products for n in sources)
        and all(n in products or n.shape[0] == 1 for n in sources)
    )


def _inductor_step(step: Step, machine: Machine) -> Time:
    if step.kind == "Gemm":
        products = [n for n in step.nodes if g.is_product(n)]
        gpu = sum(machine.product(*_sizes(n), n.inputs[0].dtype) for n in products)
        return Time(gpu, INDUCTOR_PRODUCT * len(products))
    reads, writes = _bytes(step.inputs), _bytes(step.outputs)
    share = STREAM
    if any(n.reduction for n in step.nodes) and step.domain[1] > INDUCTOR_HELD:
        widest = max((i for i in step.inputs), key=lambda n: n.size)
        wide = INDUCTOR_WIDE[2 if dtypes.ITEMSIZE[widest.dtype] == 2 else 4]
        share = wide[0] if writes > reads // 8 else wide[1]
    return Time(_row_time(step, machine, reads + writes, share), INDUCTOR_LAUNCH * step.launches)


# Backward -----------------------------------------------------------------------------------------------------------


def _backward(steps: Sequence[Step], tracing: Tracing, graded: tuple[bool, ...], machine: Machine, ours: bool) -> Time:
    """What the backward pass of a forward schedule takes.

    Two products for one, and row work from its inputs anew. Gradients that neither writes, as those of weights that
    algebra has taken out of a product, are written at least.
    """
    launch, library = (OUR_LAUNCH, OUR_PRODUCT) if ours else (INDUCTOR_LAUNCH, INDUCTOR_PRODUCT)
    flowing = _flowing(steps, tracing.chain, graded)
    times: list[Time] = []
    written: set[Node] = set()
    for step in steps:
        reads = [n for n in dict.fromkeys(step.inputs) if n in flowing]
        if step.kind == "Gemm":
            for node in filter(g.is_product, step.nodes):
                m, k, n = _sizes(node)
                for operand, sizes in zip(_operands(node), ((m, n, k), (k, m, n)), strict=True):
                    if operand not in flowing:
                        continue
                    written.add(resolve(operand))
                    by_halves = machine.halves_instead(*sizes, operand.dtype) if ours else None
                    times.append(
                        Time(machine.product(*sizes, operand.dtype) * (BACKWARD_PRODUCT if ours else 1.0), library)
                        if by_halves is None
                        else Time(by_halves * BACKWARD_HALVES, 4 * launch)
                    )
        elif reads and step.launches:
            whole = [n for n in reads if n.shape[0] > 1]
            moved = _bytes(step.inputs) + _bytes(step.outputs) + _bytes(whole)
            rows = _row_time(step, machine, moved, STREAM) * (BACKWARD_ROWS if ours else 1.0)
            times.append(Time(rows, launch * step.launches))
            if len(whole) < len(reads) and step.domain[0] > 1:  # biases, scales: sums down the columns
                moved = _bytes(n for n in step.inputs if n.shape[0] > 1) + _bytes(step.outputs)
                times.append(Time(2 * LAUNCH + machine.memory(moved, COLUMNS), 2 * launch))
            written.update(map(resolve, reads))
    wants = [v.tracer._node for v, wanted in zip(tracing.inputs, graded, strict=True) if wanted]
    rest = _bytes(n for n in map(resolve, wants) if n not in written and n.shape[0] > 1)
    if rest:
        times.append(Time(LAUNCH + machine.memory(rest), launch))
    return total(times)


def _flowing(steps: Iterable[Step], chain: Chain, graded: tuple[bool, ...]) -> set[Node]:
    """The values of a schedule that depend on inputs whose gradient is wanted."""
    numbers = {k for k, wanted in enumerate(graded) if wanted}
    if any(graded[k] for k in chain.fixed):
        numbers |= set(range(len(graded), 2 * len(graded) + 64))  # what is prepared from them
    found: set[Node] = set()
    for node in g.topological([n for step in steps for n in step.outputs]):
        if node.argument in numbers if node.op == "input" else any(i in found for i in node.inputs):
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
