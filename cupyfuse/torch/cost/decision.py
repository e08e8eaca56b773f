"""Decide by the cost model which chains of a captured graph run fused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..chains.chain import Chain, metas_of
from ..chains.options import Options
from ..chains.runtime import device_of, require_engine
from ..chains.tensors import folds
from ..graphs.captured import order_in_memory
from ..graphs.partition import Judge, Verdict, judge_without_costs
from .estimate import estimate
from .host import host_scale
from .rates import EAGER_VIEW, HOOKED_GRAPH, PART_OF_CALL, US


def on_gpu(values: Iterable[Any]) -> bool:
    """Whether any of these values is a tensor on a GPU."""
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in values)


def cost_of_part(values: Iterable[Any]) -> float:
    """Return the seconds that the host takes for a graph of these inputs that is one of several in a call."""
    places = {value.device for value in values if isinstance(value, torch.Tensor)}
    return PART_OF_CALL * max(map(host_scale, places), default=1.0)


def judge_for(
    options: Options, compiled: bool, cudagraph: bool = False, hooked: bool = False, beside_gpu: bool = False
) -> Judge:
    """Make the judge of the chains of a captured graph, as `partition` takes it.

    Parameters
    ----------
    compiled : whether Inductor would run the chains, not PyTorch eager
    cudagraph : whether the graph runs as a CUDA graph
    hooked : whether the graph is one of several between hooks that Dynamo leaves to Python
    beside_gpu : whether the model has tensors on a GPU: chains of CPU tensors, which NumPy would run, do not gain then
    """
    if not options.only_gains:
        return judge_without_costs

    def judge(chain: Chain, inputs: Sequence[Any], outputs: Sequence[Any], views: int = 0) -> Verdict:
        if beside_gpu and inputs[0].device.type == "cpu":
            return Verdict(False, "on the CPU, beside tensors on a GPU: NumPy is no faster than PyTorch")
        trained = any(t.requires_grad for t in outputs)
        found = estimate(
            chain,
            metas_of(inputs),
            requires_grad=tuple(bool(t.requires_grad) for t in inputs) if trained else (),
            permuted=tuple(not folds(t) for t in inputs),
            copied=tuple(chain.copies(k, t) for k, t in enumerate(inputs)),
            laid_out=tuple(bool(order_in_memory(t)) for t in outputs),  # with gaps no chain runs
            precision=options.current_precision(),
            device=device_of(inputs[0]),
            compiled=compiled,
            frozen=options.frozen,
            max_workspace=options.max_workspace,
        )
        scale = host_scale(inputs[0].device)
        # Inductor's views take the host nothing.
        added = (HOOKED_GRAPH if hooked else 0.0) + (0.0 if compiled else EAGER_VIEW * views)
        found = found.on_host(scale, added)
        between = f"; {scale * HOOKED_GRAPH / US:.0f} us of host for a graph between hooks" if hooked else ""
        gains = found.gains(cudagraph, options.max_workspace)
        if gains:
            require_engine(inputs[0])  # raises now rather than in the first call
        whole = gains and found.product > options.max_workspace
        return Verdict(gains, found.summary() + between, found.saved(cudagraph), whole)

    return judge
