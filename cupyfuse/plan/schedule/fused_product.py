"""One way to compute a product and what reads it: steps in the place of others, and estimates of their time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ...devices import Device
from ...ir.graph import Node
from .host import CALL, LAUNCH, PRODUCT
from .memory import base_of
from .steps import Step, last_stage, step_of, with_bytes
from .tiles import library_time, own_time, quick_flops, split_epilogue_time
from .times import stream_time

GAIN = 0.985  # of the time of the usual way, what another may take at most to be preferred
# Of what the host takes longer than the GPU, what counts: a call by itself takes all of it, one that is part of a CUDA
# graph, or behind long ones, nothing.
_HOST_SHARE = 0.5
_MOST_COLUMNS = 2  # vectors of columns that the epilogue of a split product reads, where that was measured to gain


@dataclass(frozen=True)
class FusedProduct:
    """A product with its epilogue.

    Attributes
    ----------
    plain : the step of the product alone
    gemm : the step of the product, with its epilogue if it has one
    tail : the row program behind the product, in whose place `columns`, `gemm` and `rest` are; None if it stays
    rest : what the epilogue leaves of the tail, which may be all; None if it leaves nothing
    columns : the step of the tail's values of columns; None if it computes none
    storage : dtypes of the values that the cuts store
    """

    plain: Step
    gemm: Step
    tail: Step | None
    rest: Step | None
    columns: Step | None
    storage: dict[Node, str]

    def replace_in(self, steps: list[Step]) -> list[Step]:
        """Replace the plain product and the tail by the fused steps, in the place of the later one.

        Where steps in between read what the product's step writes beside the product, such as the split of an operand
        that several products share, that is the place of the product (`is_needed_before`).
        """
        last = self.plain if self.tail is None or is_needed_before(self.tail, self.plain, steps) else self.tail
        result = []
        for step in steps:
            if step is last:
                result += [s for s in (self.columns, self.gemm, self.rest) if s is not None]
            elif step not in (self.plain, self.tail):
                result.append(step)
        return result

    def library_seconds(self, device: Device) -> float:
        """Estimate the time of the plain product, as a rule by the library, and of the tail."""
        return call_seconds(self.plain, [self.tail], device)

    def seconds(self, device: Device) -> float:
        """Estimate the time of the product, by our kernel or the library, and of what is left of the tail."""
        return call_seconds(self.gemm, [self.columns, self.rest], device)

    def reason_for_library(self, device: Device) -> str:
        """Explain that the library is no slower, by both estimates of `call_seconds`; empty if it is slower."""
        plain, own = self.library_seconds(device), self.seconds(device)
        if own < GAIN * plain:
            return ""
        return f"{plain * 1e6:.3g} us, where that would take {own * 1e6:.3g} us"

    def is_worth_splitting(self, device: Device) -> bool:
        """Whether the epilogue of a split product takes less than its row program would, which reads the product.

        Guards, and more vectors of columns, take so many registers that some are spilled: BatchNorm behind
        4096 x 4096 x 4096 took 143 us on an H100, and its row program 52.
        """
        assert self.tail is not None and self.gemm.epilogue is not None
        epilogue = self.gemm.epilogue
        columns = sum(1 == n.shape[0] < n.shape[1] for n in epilogue.inputs)
        if columns > _MOST_COLUMNS or any(n.op == "guard" for n in epilogue.nodes):
            return False
        own = split_epilogue_time(self.gemm, device)
        if self.columns is not None:
            own += stream_time(self.columns, device, 1)
        return own < stream_time(self.tail, device, 1)


def call_seconds(gemm: Step, others: Iterable[Step | None], device: Device) -> float:
    """Estimate the time of a product's step, by our kernel or by the library, and of row programs, as one call.

    That is the GPU's time, and of what the host takes longer a share.
    """
    launched = [s for s in others if s is not None]
    gpu = (own_time if gemm.by_tiles else library_time)(gemm, device) + stream_seconds(launched, device)
    host = CALL + (LAUNCH * gemm.launches if gemm.by_tiles else PRODUCT)
    host += LAUNCH * sum(s.launches for s in launched)
    return gpu + _HOST_SHARE * max(0.0, host - gpu)


def stream_seconds(steps: Iterable[Step | None], device: Device) -> float:
    """Estimate the time of row programs: that of their bytes, and of their arithmetic at the peak rate.

    That is what it takes at least where it is not hidden: what a product has just written is read from the L2 cache.
    Behind 4096 x 768 x 3072 in bfloat16 the row program of a ReLU takes 21 us on an H200, that of Mish 30.
    """
    found = [s for s in steps if s is not None]
    return sum(stream_time(s, device, last_stage(s) + 1) + quick_flops(s) / device.simt for s in found)


def between(tail: Step, step: Step, steps: list[Step]) -> list[Step]:
    """Return the steps between that of a product and its tail."""
    return steps[steps.index(step) + 1 : steps.index(tail)]


def is_needed_before(tail: Step, step: Step, steps: list[Step]) -> bool:
    """Whether a step before the tail of a product reads something that the product's step writes."""
    return any(base_of(i) in step.outputs for s in between(tail, step, steps) for i in (*s.inputs, *s.repair_inputs))


def with_epilogue(step: Step, epilogue: Step, stored: bool, storage: dict[Node, str], how: str) -> Step:
    """Return the step of a product with an epilogue, which also writes the product itself if that is `stored`."""
    product = step.product
    epilogue = replace(epilogue, outputs=(*epilogue.outputs, *([product] if stored else ())))
    others = [i for i in epilogue.inputs if i is not product and i not in step.inputs]
    nodes, inputs = [*step.nodes, *epilogue.nodes], [*step.inputs, *others]
    outputs = [*(n for n in step.outputs if n is not product), *epilogue.outputs]
    repairs = [i for i in dict.fromkeys((*step.repair_inputs, *epilogue.repair_inputs)) if i not in inputs]
    gemm = step_of("Gemm", product.shape, nodes, inputs, outputs, repairs)
    launches = step.launches + any(n.reduction for n in epilogue.nodes)
    return with_bytes(replace(gemm, launches=launches, epilogue=epilogue, choice=how), storage)
