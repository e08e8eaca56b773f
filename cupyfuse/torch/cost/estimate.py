"""Estimate the time of a chain on the GPU and on the host, fused and left to PyTorch.

GPU times are rooflines: bytes over the bandwidth that is reached, FLOPs over the rate that is reached, and a floor for
each launch. Host times count launches and calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ... import devices
from ...devices import Device
from ...errors import first_line
from ...ir import graph as g
from ...ir.graph import Node
from ...settings import DEFAULT_WORKSPACE, Settings
from ..chains.chain import Chain, Meta, TracedChain
from .eager import copies_permuted, eager_time, reads_of_two_orders
from .machine import Machine, Time, total_time
from .rates import GPU_WORTH, MARGIN, PRODUCT_ERROR, US
from .schedules import fused_time, inductor_time


@dataclass(frozen=True)
class Estimate:
    """The time of a chain.

    Attributes
    ----------
    fused, pytorch : Time
        As cupyfuse runs it, and as PyTorch eager or Inductor does.
    reason : why there is no estimate; empty where there is one
    product : bytes of the largest product that all results together are smaller than: PyTorch stores it
    multiplies : whether the chain has products, whose estimates are less certain
    """

    fused: Time
    pytorch: Time
    reason: str = ""
    product: int = 0
    multiplies: bool = False

    def gains(self, cudagraph: bool = False, max_workspace: float = math.inf) -> bool:
        """Whether the chain is worth fusing.

        It is in three cases: neither host nor GPU takes longer; the GPU saves more than the host loses and is the
        bottleneck (PyTorch's work on the GPU takes longer than the fused chain's on the host); the host saves several
        times what the GPU loses and is the bottleneck (the fused chain takes longer on the host than on the GPU). In
        each case the gain has to exceed `MARGIN` of PyTorch's time that counts in it; `shared` does not count, since
        both sides take it, whatever it is. Of what the host loses counts what `host_saved` says; where that leaves
        some out, the gain has to exceed `doubt`, too. Where PyTorch stores a product that does not fit in
        `max_workspace`, such as the logits of a large vocabulary, the chain saves that memory: a loss of up to `MARGIN`
        is accepted. A chain without an estimate, or without elements, does not gain.

        With `cudagraph` the chain is part of a CUDA graph: GPU time alone decides.
        """
        fused, pytorch = self.fused, self.pytorch
        if self.reason or not (math.isfinite(fused.gpu + fused.host) and fused.gpu):
            return False
        if cudagraph:
            return fused.gpu < pytorch.gpu
        saves_memory = self.product > max_workspace
        margin, differing = (-MARGIN, pytorch.gpu) if saves_memory else (MARGIN, pytorch.gpu - self.shared)
        gpu_saved, host_saved = pytorch.gpu - fused.gpu, pytorch.host - fused.host
        if saves_memory and pytorch.gpu > fused.host:
            return gpu_saved + host_saved > margin * differing
        least = margin * max(differing, pytorch.host)
        if gpu_saved >= 0 and host_saved >= 0:
            return gpu_saved + host_saved > least
        if host_saved > 0:  # and the GPU loses
            return fused.gpu < fused.host and host_saved + GPU_WORTH * gpu_saved > margin * pytorch.host
        # The GPU saves, and the host loses.
        left_out = self.host_saved - host_saved  # of its loss
        return pytorch.gpu > fused.host and gpu_saved + self.host_saved > max(least, min(left_out, self.doubt))

    @property
    def host_saved(self) -> float:
        """Host seconds that the chain saves; where it loses some, those by which its host time exceeds its GPU time.

        Until then the host is ahead of the GPU, and nothing waits for it.
        """
        saved = self.pytorch.host - self.fused.host
        return saved if saved >= 0 else min(0.0, max(self.pytorch.host, self.fused.gpu) - self.fused.host)

    @property
    def shared(self) -> float:
        """GPU seconds of products that cuBLAS computes either way: the smaller of what it has in the two."""
        return min(self.fused.products, self.pytorch.products)

    @property
    def doubt(self) -> float:
        """By how many GPU seconds the saving may be wrong: `PRODUCT_ERROR` of PyTorch's, 0 without products."""
        return PRODUCT_ERROR * self.pytorch.gpu if self.multiplies else 0.0

    def on_host(self, scale: float, added: float = 0.0) -> Estimate:
        """Return the estimate for a host that takes `scale` times as long; the chain takes `added` more before that."""
        fused = replace(self.fused, host=(self.fused.host + added) * scale)
        return replace(self, fused=fused, pytorch=replace(self.pytorch, host=self.pytorch.host * scale))

    def saved(self, cudagraph: bool = False) -> float:
        """Return the seconds that the chain saves, on the GPU and on the host alike; in a CUDA graph on the GPU alone.

        The partition compares it with what parts without products save, whose estimates are more certain: `doubt` is
        taken off. GPU and host count alike, as either may be the model's bottleneck.
        """
        if self.reason:
            return 0.0
        gpu = self.pytorch.gpu - self.fused.gpu - self.doubt
        return gpu if cudagraph else gpu + self.host_saved

    def summary(self) -> str:
        """Describe both times in one line, fused first."""
        if self.reason:
            return f"no estimate: {self.reason}"
        host = f"{_microseconds(self.fused.host)} us of host against {_microseconds(self.pytorch.host)}"
        gpu = f"{_microseconds(self.fused.gpu)} us of GPU against {_microseconds(self.pytorch.gpu)}"
        return f"{host}, {gpu}"

    __str__ = summary


def _microseconds(seconds: float) -> str:
    value = seconds / US
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}".removesuffix(".0")


def estimate(
    chain: Chain,
    metas: Sequence[Meta],
    *,
    requires_grad: Sequence[bool] = (),
    permuted: Sequence[bool] = (),
    copied: Sequence[bool] | None = None,
    laid_out: Sequence[bool] = (),
    precision: str = "highest",
    device: Device | None = None,
    compiled: bool = False,
    frozen: bool = False,
    max_workspace: int = DEFAULT_WORKSPACE,
) -> Estimate:
    """Estimate the time of a chain, fused and left to PyTorch.

    It never raises: an estimate that fails has the reason. Estimates are cached; names of inputs do not matter.

    Parameters
    ----------
    metas : shapes and dtypes of the inputs
    requires_grad : for each input, whether its gradient is wanted; if one is, the backward pass counts too. Empty for
        inference
    permuted : for each input, whether its rows have several strides (`chains.tensors.folds`). Empty for none
    copied : for each of these, whether it is copied for the chain; the backward pass reads the copy. None for all
    laid_out : for each output, whether it is copied from C order to another order of its dimensions, which PyTorch's
        result has in memory. Empty for none
    precision : of float32 products
    device : None, for CPUs and for GPUs that are not in the table, stands for `devices.DEFAULT`: the decision is the
        same as there, though the plan that runs may not be
    compiled : whether Inductor would run the chain, not PyTorch eager
    frozen : whether fixed inputs never change, so that prepacked weights are not checked
    max_workspace : beyond which plans run in blocks
    """
    try:
        wanted = tuple(map(bool, requires_grad)) or (False,) * len(chain.names)
        anonymous = replace(chain, names=tuple(f"input{k}" for k in range(len(chain.names))))
        signature = tuple((tuple(shape), dtype) for shape, dtype in metas)
        machine = Machine(device or devices.DEVICES[devices.DEFAULT], precision)
        orders, copies = tuple(map(bool, permuted)), tuple(map(bool, permuted if copied is None else copied))
        layouts = orders, copies, tuple(map(bool, laid_out))
        return _estimate(_Run(anonymous, signature, wanted, *layouts, machine, compiled, frozen, max_workspace))
    except Exception as error:  # whatever the reason: a chain without an estimate is left to PyTorch
        unknown = Time(math.inf, math.inf)
        return Estimate(unknown, unknown, first_line(error))


@dataclass(frozen=True)
class _Run:
    """A chain and what its times depend on, as `estimate` describes it."""

    chain: Chain
    metas: tuple[Meta, ...]
    requires_grad: tuple[bool, ...]
    permuted: tuple[bool, ...]
    copied: tuple[bool, ...]
    laid_out: tuple[bool, ...]
    machine: Machine
    compiled: bool
    frozen: bool
    max_workspace: int

    @property
    def settings(self) -> Settings:
        return Settings(self.machine.precision, self.machine.device, self.max_workspace)


@lru_cache(maxsize=4096)
def _estimate(run: _Run) -> Estimate:
    traced = run.chain.trace(run.metas)
    pytorch_time = inductor_time if run.compiled else eager_time
    fixed = frozenset() if run.compiled else run.chain.fixed  # compiled graphs keep nothing from call to call
    fused = fused_time(traced, run.requires_grad, run.machine, run.settings, run.frozen, fixed)
    pytorch = pytorch_time(traced, run.requires_grad, run.machine)
    results = [v.tracer._node for v in traced.outputs]
    products = [n for n in g.topological(results) if n.op == "matmul"]
    if any(run.permuted + run.laid_out):
        ours, theirs = _copy_times(run, traced, products)
        fused, pytorch = total_time([fused, *ours]), total_time([pytorch, *theirs])
    product = max((n.nbytes for n in products), default=0)
    is_large = product > sum(n.nbytes for n in results)
    return Estimate(fused, pytorch, product=product if is_large else 0, multiplies=bool(products))


def _copy_times(run: _Run, traced: TracedChain, products: Sequence[Node]) -> tuple[list[Time], list[Time]]:
    """Return the times of the copies that are made for the chain, and of those that PyTorch makes of permuted inputs.

    Inductor copies what a product reads. Eager copies what else needs C order, and takes as long where an operation
    reads two orders.
    """
    machine = run.machine
    permuted, copied = (
        [v.tracer._node for v, given in zip(traced.inputs, flags, strict=False) if given]
        for flags in (run.permuted, run.copied)
    )
    results = [v.tracer._node for v, is_copied in zip(traced.outputs, run.laid_out, strict=False) if is_copied]
    ours = [machine.copy_time(node) for node in (*copied, *results)]
    if run.compiled:
        return ours, [machine.copy_time(node) for node in permuted if any(node in n.inputs for n in products)]
    mixed = [Time(machine.copy_time(v.tracer._node).gpu, 0.0) for v in reads_of_two_orders(traced, run.permuted)]
    theirs = [machine.copy_time(node) for node in permuted] if copies_permuted(traced) else []
    return ours, [*mixed, *theirs]
