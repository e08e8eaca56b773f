"""Estimate the time of a chain in PyTorch eager, by a table of the kernels of each operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import dtypes
from ..chains.chain import Call, TracedChain
from ..rules import RULES, takes_part
from ..rules.symbols import references
from . import rates
from .machine import Machine, Time, total_time


@dataclass(frozen=True)
class Kernels:
    """How PyTorch computes an operation.

    Attributes
    ----------
    full : kernels over whole operands
    small : kernels over results of reductions
    reads, writes : how often the operands, and the result, pass through memory
    rate : bandwidth, as a share of a copy's
    backward : kernels of the gradient
    moved : how often operands, result and gradients pass through memory for that
    host : further host time of the forward pass, in kernels of `rates.EAGER`
    """

    full: int = 1
    small: int = 0
    reads: float = 1.0
    writes: float = 1.0
    rate: float = 1.0
    backward: int = 1
    moved: float = 1.0
    host: int = 0


_POINTWISE = Kernels()

# By rule; pointwise where it is not here. Sources: PyTorch 2.11's kernels; rates of logsumexp and batch_norm from the
# reports "rows" and "heads" (see `rates`), other rates estimated. Within models batch norms in inference take the
# host 17 us, layer and RMS norms 10 to 12, for 6 of an operation on elements.
_TABLE: dict[str, Kernels] = {
    "cat": Kernels(backward=0, moved=0),
    "swap_pairs": Kernels(full=2, reads=1.5, writes=1.5, backward=6, moved=3),
    "softmin": Kernels(full=2, reads=2, writes=2, rate=0.6, backward=2),
    "gelu": Kernels(rate=0.7),
    **dict.fromkeys(("add", "sub", "clone"), Kernels(backward=0, moved=0)),
    **dict.fromkeys(("mul", "where"), Kernels(backward=2)),
    **dict.fromkeys(("div", "pow"), Kernels(backward=3, moved=1.5)),
    "masked_fill": Kernels(full=2, reads=2, writes=2),
    "softsign": Kernels(full=3, reads=3, writes=3, backward=4, moved=3),
    "tanhshrink": Kernels(full=2, reads=2, writes=2, backward=2, moved=2),
    "isinf": Kernels(full=2, reads=2, writes=2, backward=0),
    "isfinite": Kernels(full=4, reads=3, writes=3, backward=0),
    "sum": Kernels(rate=0.85),
    "mean": Kernels(rate=0.85, backward=2),
    **dict.fromkeys(("amax", "amin"), Kernels(rate=0.85, backward=4, moved=3)),
    **dict.fromkeys(("max", "min"), Kernels(rate=0.6, backward=2)),
    **dict.fromkeys(("max_dim", "min_dim"), Kernels(rate=0.5, backward=2)),
    **dict.fromkeys(("argmax", "argmin"), Kernels(rate=0.5, backward=0, moved=0)),
    "prod": Kernels(rate=0.6, backward=6, moved=6),
    "var": Kernels(rate=0.5, backward=3, moved=3),
    "std": Kernels(rate=0.5, backward=4, moved=3),
    "var_mean": Kernels(rate=0.5, backward=6, moved=5),
    "std_mean": Kernels(rate=0.5, backward=7, moved=5),
    "vector_norm": Kernels(rate=0.85, backward=3, moved=2),
    "group_norm": Kernels(full=2, small=1, reads=2, rate=0.7, backward=3, moved=2),
    "normalize": Kernels(full=2, small=1, reads=2, rate=0.85, backward=5, moved=3),
    "instance_norm": Kernels(small=1, reads=2, rate=0.5, moved=1.5),
    "batch_norm": Kernels(rate=0.4, moved=1.5, host=2),
    "batch_norm_module": Kernels(small=1, rate=0.4, moved=1.5, host=2),
    **dict.fromkeys(("avg_pool1d", "max_pool1d", "adaptive_avg_pool1d"), Kernels(rate=0.6)),
}


# Rules, beside those of products, whose operands PyTorch copies where their dimensions are permuted.
_CONTIGUOUS = {"softmax", "log_softmax", "softmin", "cross_entropy", "layer_norm", "rms_norm", "group_norm"}
_CONTIGUOUS |= {"instance_norm", "linear_cross_entropy"}


def copies_permuted(traced: TracedChain) -> bool:
    """Whether an operation of a chain copies permuted dimensions; those before it keep them in their results."""
    return any(RULES[call.rule].product or call.rule in _CONTIGUOUS for call in traced.chain.calls)


def reads_of_two_orders(traced: TracedChain, permuted: Sequence[bool]) -> list[Any]:
    """List the results of operations that read a permuted matrix beside one in C order.

    Each takes as long as a copy more: the sum of 8 x 1500 x 512 bfloat16 takes an H200 44 us so, 6 else, and a copy 36.
    All permuted inputs are taken to have one order, which results keep but for those of products and `_CONTIGUOUS`.
    """
    kept = {k for k, each in enumerate(permuted) if each}  # values in that order
    found = []
    for call in traced.chain.calls:
        results = [n for n in call.results if n >= 0]
        read = set(references(call.arguments))
        if RULES[call.rule].product or call.rule in _CONTIGUOUS or kept.isdisjoint(read):
            continue
        kept.update(results)
        shapes = {traced.values[n].shape for n in read & kept}
        if any(traced.values[n].shape in shapes for n in read - kept):
            found += [traced.values[n] for n in results[:1]]
    return found


def _softmax(value: Any) -> Kernels:
    """Return the kernels of PyTorch's softmax, at rates from the report "rows".

    Up to 1024 columns a warp holds a row; beyond that a block reads it several times.
    """
    is_16_bit = dtypes.ITEMSIZE[value.dtype] == 2
    columns = value.shape[-1] if value.shape else 1
    if columns <= 1024:
        return Kernels(rate=0.62 if is_16_bit else 0.98)
    if columns <= 8192:
        return Kernels(rate=0.28 if is_16_bit else 0.53)
    return Kernels(rate=0.53 if is_16_bit else 0.6)


def _logsumexp(value: Any) -> Kernels:
    """Return the kernels of PyTorch's logsumexp, which is composed.

    These are amax, a test for infinity, subtract, exp, sum, log, add; six passes over the operand.
    """
    rate = 0.62 if dtypes.ITEMSIZE[value.dtype] == 2 else 0.85
    return Kernels(full=4, small=6, reads=6, rate=rate, backward=3, moved=3)


def _norm(value: Any) -> Kernels:
    """Return the kernels of PyTorch's layer norm and RMS norm, as "costs" has them for 768 and 2048 columns."""
    is_16_bit = dtypes.ITEMSIZE[value.dtype] == 2
    if value.shape and value.shape[-1] <= 1024:
        rate, moved = (0.36, 2.0) if is_16_bit else (0.55, 1.7)
    else:
        rate, moved = (0.55, 1.6) if is_16_bit else (0.77, 1.85)
    return Kernels(rate=rate, backward=2, moved=moved, host=1)


def _glu(value: Any) -> Kernels:
    """Return the kernels of PyTorch's glu.

    For 4096 x 6144 elements it takes an H200 42 us in bfloat16 and 62 in float32, the gradient 54 and 80.
    """
    return Kernels(rate=0.42, moved=0.72) if dtypes.ITEMSIZE[value.dtype] == 2 else Kernels(rate=0.58, moved=0.75)


def _kernels_of(call: Call, traced: TracedChain) -> Kernels | None:
    """Look up the kernels of a call; None for a view, also of a part."""
    rule = RULES[call.rule]
    operands = list(references(call.arguments))
    if rule.no_op or (rule.view and operands and _size(traced, operands[0]) == _size(traced, call.results[0])):
        return None
    if call.rule in ("softmax", "log_softmax"):
        return _softmax(traced.values[operands[0]])
    if call.rule in ("layer_norm", "rms_norm"):
        return _norm(traced.values[operands[0]])
    if call.rule == "logsumexp":
        return _logsumexp(traced.values[operands[0]])
    if call.rule == "glu":
        return _glu(traced.values[operands[0]])
    found = _TABLE.get(call.rule, _POINTWISE)
    if call.rule.startswith("batch_norm") and sum(n >= 0 for n in call.results) > 1:
        found = replace(found, small=found.small + 1, reads=2.0)  # in training: statistics first
    return found


def eager_time(traced: TracedChain, requires_grad: tuple[bool, ...], machine: Machine) -> Time:
    """Estimate the forward pass of a chain in eager, and the backward pass if gradients are wanted."""
    dependent = {k for k, wanted in enumerate(requires_grad) if wanted}
    times: list[Time] = []
    uses: dict[int, int] = {}
    for call in traced.chain.calls:
        flows = [n for n in references(call.arguments) if n in dependent]
        if flows:
            dependent.update(n for n in call.results if n >= 0)
        for n in flows:
            uses[n] = uses.get(n, 0) + 1
        time = _product_time if RULES[call.rule].product else _kernel_time
        times.append(time(call, flows, traced, machine))
    # A value that several operations read gets the sum of their gradients.
    for n, count in uses.items():
        times += [Time(rates.EAGER_LAUNCH + machine.memory_time(3.0 * _size(traced, n)), rates.EAGER)] * (count - 1)
    return total_time(times)


def _kernel_time(call: Call, graded: list[int], traced: TracedChain, machine: Machine) -> Time:
    """Estimate an operation bound by memory, and its gradients with respect to the operands `graded`."""
    kernels = _kernels_of(call, traced)
    if kernels is None:
        return _view_time(call, graded, traced, machine)
    numbers = list(references(call.arguments))
    operands = sum(_size(traced, n) for n in numbers)
    result = sum(_size(traced, n) for n in call.results)
    launches = kernels.full + kernels.small
    rate = rates.STREAM * kernels.rate
    moved = kernels.reads * operands + kernels.writes * result
    results = [traced.values[n] for n in call.results if n >= 0]
    elements = max((value.size for value in results), default=0)
    itemsize = max((dtypes.ITEMSIZE[value.dtype] for value in results), default=4)
    # Norms read their vectors as they do the rest.
    counts = [] if RULES[call.rule].reduces else [traced.values[n].size for n in numbers]
    is_broadcast = len(counts) == 2 and min(counts) < elements == max(counts)
    forward = rate * rates.EAGER_BROADCAST[2 if itemsize <= 2 else 4] if is_broadcast else rate
    host = rates.EAGER * (launches + kernels.host)
    times = [Time(rates.EAGER_LAUNCH * launches + machine.memory_time(moved, forward), host)]
    if graded:
        grads = sum(_size(traced, n) for n in graded)
        gpu = rates.EAGER_LAUNCH * kernels.backward + machine.memory_time(
            kernels.moved * (operands + result + grads), rate
        )
        times.append(Time(gpu, 2 * rates.EAGER_GRADED + rates.EAGER * kernels.backward))
        if not RULES[call.rule].reduces and call.rule != "cat":
            # Gradients of operands that were broadcast are summed; those of `cat` are smaller without that.
            broadcast = sum(traced.values[n].size < elements for n in graded)
            times += [_column_sum(result, itemsize, machine)] * broadcast
    return total_time(times)


def _view_time(call: Call, graded: list[int], traced: TracedChain, machine: Machine) -> Time:
    """Estimate a view, and its gradient.

    That of one part is copied among zeros; those of several, as of `chunk`, are put side by side by one kernel.
    """
    host = rates.EAGER_VIEW * (2 if graded else 1)
    if not graded or not takes_part(call.rule, call.arguments):
        return Time(0.0, host)
    whole, shown = _size(traced, graded[0]), sum(_size(traced, n) for n in call.results if n >= 0)
    kernels, moved = (1, 2 * whole) if RULES[call.rule].several else (2, whole + 2 * shown)
    return Time(rates.EAGER_LAUNCH * kernels + machine.memory_time(moved), host + rates.EAGER * kernels)


def _product_time(call: Call, flows: list[int], traced: TracedChain, machine: Machine) -> Time:
    """Estimate a matrix product and its gradients; cuBLAS adds the bias as it stores the result."""
    numbers = list(references(call.arguments))
    if call.rule == "addmm":
        numbers = [*numbers[1:3], numbers[0]]
    left, right = traced.values[numbers[0]], traced.values[numbers[1]]
    depth = max(left.shape[-1], 1)
    m, n = max(left.size // depth, 1), max(right.size // depth, 1)
    gpu = machine.product_time(m, depth, n, left.dtype)
    times = [Time(gpu, rates.EAGER_PRODUCT, gpu)]
    for number, sizes in ((numbers[0], (m, n, depth)), (numbers[1], (depth, m, n))):
        if number in flows:
            gpu = machine.product_time(*sizes, left.dtype, lengths=(depth, n))
            times.append(Time(gpu, rates.EAGER_PRODUCT, gpu))
    if flows:
        times.append(Time(0.0, 2 * rates.EAGER_GRADED))
    if any(number in flows for number in numbers[2:]):
        itemsize = dtypes.ITEMSIZE[left.dtype]
        times.append(_column_sum(float(m * n * itemsize), itemsize, machine))
    return total_time(times)


def _column_sum(nbytes: float, itemsize: int, machine: Machine) -> Time:
    """Estimate the sums of a matrix down its columns, as for the gradient of a bias."""
    share = rates.EAGER_COLUMNS[2 if itemsize <= 2 else 4]
    return Time(rates.EAGER_LAUNCH + machine.memory_time(nbytes, share), rates.EAGER)


def _size(traced: TracedChain, number: int) -> float:
    """Return the bytes of a value of the chain; 0 for an unused result."""
    value = traced.values.get(number)
    return float(value.size * dtypes.ITEMSIZE[value.dtype]) if value is not None else 0.0
