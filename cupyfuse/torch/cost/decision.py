"""Whether a chain of a captured graph is worth running, by the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..chains.chain import Chain, sizes
from ..chains.runner import Options
from ..chains.runtime import device_of, dtype_name
from ..graphs.partition import Judge, Verdict, anything
from .estimate import estimate


def judge_for(options: Options, compiled: bool, replayed: bool = False) -> Judge:
    """The judge for chains that would else run eagerly, or be compiled by Inductor.

    Parameters
    ----------
    options : Options
    compiled : bool
        Whether Inductor would compile them.
    replayed : bool
        Whether they run in CUDA graphs, where the host's time does not count.
    """
    if not options.only_gains:
        return anything

    def judge(chain: Chain, inputs: Sequence[Any], outputs: Sequence[Any]) -> Verdict:
        metas = [(sizes(t), str(dtype_name(t.dtype))) for t in inputs]
        graded = any(t.requires_grad for t in outputs)
        found = estimate(
            chain,
            metas,
            graded=tuple(bool(t.requires_grad) for t in inputs) if graded else (),
            precision=options.current_precision(),
            device=device_of(inputs[0]),
            compiled=compiled,
            frozen=options.frozen,
        )
        gains = found.ours.gpu < found.theirs.gpu if replayed and not found.reason else found.gains()
        return Verdict(gains, found.summary())

    return judge
