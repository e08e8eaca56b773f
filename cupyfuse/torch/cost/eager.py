"""What PyTorch eager takes for a chain, operation by operation: how many kernels, what they move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import dtypes
from ..chains.chain import Call, TracedChain
from ..rules import RULES
from ..rules.symbols import references
from .rates import COLUMNS, EAGER, EAGER_GRADED, EAGER_PRODUCT, EAGER_VIEW, LAUNCH, STREAM, Machine, Time, total


@dataclass(frozen=True)
class Kernels:
    """How PyTorch computes an operation.

    Attributes
    ----------
    full : kernels over whole operands
    small : kernels over what a reduction leaves
    reads, writes : how often the operands, and the result, pass through memory
    rate : share of the bandwidth that a copy reaches
    backward : kernels of its gradient
    again : how often operands, result and gradients pass through memory for it
    """

    full: int = 1
    small: int = 0
    reads: float = 1.0
    writes: float = 1.0
    rate: float = 1.0
    backward: int = 1
    again: float = 1.0


_POINTWISE = Kernels()
_NORM = Kernels(rate=0.85, backward=2, again=1.5)
_STATISTICS = Kernels(small=1, reads=2, rate=0.5, backward=1, again=1.5)
_POOL = Kernels(rate=0.6, again=1.0)

# By rule; pointwise where it is not here. Sources: PyTorch 2.11's kernels; rates of logsumexp and batch_norm from the
# reports "rows" and "heads" (see `rates`), other rates estimated.
_TABLE: dict[str, Kernels] = {
    # As composed: amax, a test for infinity, subtract, exp, sum, log, add; six passes over the operand.
    "logsumexp": Kernels(full=4, small=6, reads=6, rate=0.85, backward=3, again=3),
    "softmin": Kernels(full=2, reads=2, writes=2, rate=0.6, backward=2),
    "add": Kernels(backward=0, again=0),
    "sub": Kernels(backward=0, again=0),
    "mul": Kernels(backward=2),
    "div": Kernels(backward=3, again=1.5),
    "pow": Kernels(backward=3, again=1.5),
    "clone": Kernels(backward=0, again=0),
    "masked_fill": Kernels(full=2, reads=2, writes=2),
    "softsign": Kernels(full=3, reads=3, writes=3, backward=4, again=3),
    "tanhshrink": Kernels(full=2, reads=2, writes=2, backward=2, again=2),
    "where": Kernels(backward=2),
    "isinf": Kernels(full=2, reads=2, writes=2, backward=0),
    "isfinite": Kernels(full=4, reads=3, writes=3, backward=0),
    "sum": Kernels(rate=0.85),
    "mean": Kernels(rate=0.85, backward=2),
    "amax": Kernels(rate=0.85, backward=4, again=3),
    "amin": Kernels(rate=0.85, backward=4, again=3),
    "max": Kernels(rate=0.6, backward=2),
    "min": Kernels(rate=0.6, backward=2),
    "max_dim": Kernels(rate=0.5, backward=2),
    "min_dim": Kernels(rate=0.5, backward=2),
    "prod": Kernels(rate=0.6, backward=6, again=6),
    "var": Kernels(rate=0.5, backward=3, again=3),
    "std": Kernels(rate=0.5, backward=4, again=3),
    "vector_norm": Kernels(rate=0.85, backward=3, again=2),
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "group_norm": Kernels(full=2, small=1, reads=2, rate=0.7, backward=3, again=2),
    "normalize": Kernels(full=2, small=1, reads=2, rate=0.85, backward=5, again=3),
    "instance_norm": _STATISTICS,
    "batch_norm": Kernels(rate=0.4, backward=1, again=1.5),
    "batch_norm_module": Kernels(small=1, rate=0.4, backward=1, again=1.5),
    "avg_pool1d": _POOL,
    "max_pool1d": _POOL,
    "adaptive_avg_pool1d": _POOL,
}


def _softmax(value: Any) -> Kernels:
    """By the rates of "rows": up to 1024 columns a warp holds a row, beyond that a block reads it several times."""
    wide = dtypes.ITEMSIZE[value.dtype] >= 4
    columns = value.shape[-1] if value.shape else 1
    if columns <= 1024:
        rate = 0.98 if wide else 0.62
    elif columns <= 8192:
        rate = 0.53 if wide else 0.28
    else:
        rate = 0.6 if wide else 0.53
    return Kernels(rate=rate)


def _kernels(call: Call, tracing: TracedChain) -> Kernels | None:
    """How a call is computed; None where it is a view."""
    rule = RULES[call.rule]
    operands = list(references(call.arguments))
    if rule.idle or (rule.view and operands and _size(tracing, operands[0]) == _size(tracing, call.results[0])):
        return None
    if call.rule in ("softmax", "log_softmax"):
        return _softmax(tracing.values[operands[0]])
    found = _TABLE.get(call.rule, _POINTWISE)
    if call.rule.startswith("batch_norm") and sum(n >= 0 for n in call.results) > 1:
        found = replace(found, small=found.small + 1, reads=2.0)  # in training: statistics first
    return found


def eager_time(tracing: TracedChain, graded: tuple[bool, ...], machine: Machine) -> Time:
    """What PyTorch eager takes for a chain; forward and backward where gradients are wanted."""
    flowing = {k for k, wanted in enumerate(graded) if wanted}
    times: list[Time] = []
    uses: dict[int, int] = {}
    for call in tracing.chain.calls:
        flows = [n for n in references(call.arguments) if n in flowing]
        if flows:
            flowing.update(n for n in call.results if n >= 0)
        for n in flows:
            uses[n] = uses.get(n, 0) + 1
        times.append((_product if RULES[call.rule].product else _operation)(call, flows, tracing, machine))
    # A value that several operations read gets the sum of their gradients.
    for n, count in uses.items():
        times += [Time(LAUNCH + machine.memory(3.0 * _size(tracing, n)), EAGER)] * (count - 1)
    return total(times)


def _operation(call: Call, flows: list[int], tracing: TracedChain, machine: Machine) -> Time:
    kernels = _kernels(call, tracing)
    if kernels is None:
        return Time(0.0, EAGER_VIEW * (2 if flows else 1))
    operands = sum(_size(tracing, n) for n in references(call.arguments))
    result = sum(_size(tracing, n) for n in call.results)
    launches = kernels.full + kernels.small
    moved = kernels.reads * operands + kernels.writes * result
    gpu = LAUNCH * launches + machine.memory(moved, STREAM * kernels.rate)
    host = EAGER * launches
    if flows:
        grads = sum(_size(tracing, n) for n in flows)
        gpu += LAUNCH * kernels.backward
        gpu += machine.memory(kernels.again * (operands + result + grads), STREAM * kernels.rate)
        host += 2 * EAGER_GRADED + EAGER * kernels.backward
        if not RULES[call.rule].reduces:
            # Gradients of operands that were broadcast are summed.
            small = sum(_size(tracing, n) < result for n in flows)
            gpu += small * (LAUNCH + machine.memory(result, STREAM * COLUMNS))
            host += small * EAGER
    return Time(gpu, host)


def _product(call: Call, flows: list[int], tracing: TracedChain, machine: Machine) -> Time:
    """A product, to which cuBLAS adds the bias as it stores the result."""
    numbers = list(references(call.arguments))
    if call.rule == "addmm":
        numbers = [*numbers[1:3], numbers[0]]
    left, right = tracing.values[numbers[0]], tracing.values[numbers[1]]
    depth = max(left.shape[-1], 1)
    m, n = max(left.size // depth, 1), max(right.size // depth, 1)
    times = [Time(machine.product(m, depth, n, left.dtype), EAGER_PRODUCT)]
    for number, sizes in ((numbers[0], (m, n, depth)), (numbers[1], (depth, m, n))):
        if number in flows:
            times.append(Time(machine.product(*sizes, left.dtype), EAGER_PRODUCT))
    if flows:
        times.append(Time(0.0, 2 * EAGER_GRADED))
    if any(number in flows for number in numbers[2:]):
        times.append(Time(LAUNCH + machine.memory(float(m * n * dtypes.ITEMSIZE[left.dtype]), COLUMNS), EAGER))
    return total(times)


def _size(tracing: TracedChain, number: int) -> float:
    """Bytes of a value of the chain; 0 of a result that nobody needs."""
    value = tracing.values.get(number)
    return float(value.size * dtypes.ITEMSIZE[value.dtype]) if value is not None else 0.0
