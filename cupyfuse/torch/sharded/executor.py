"""The executor of a chain on DTensors: rounds on each process's shards, and its backward pass, split likewise."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from ...plan.plan import Plan
from ...plan.shards import SplitError
from ...settings import Settings
from ..chains import autograd
from ..chains.backward import Backward, Flags
from ..chains.chain import Chain, TracedChain, metas_of
from ..chains.options import Options
from ..chains.runtime import device_of
from ..chains.tensors import Tensors, as_matrix
from .leaf import Leaf
from .placements import Arrangement, local_of
from .program import Level, Local, Split, program

_MORE_WORKSPACE = 48 << 20  # bytes that a shard's plans may take beside their part of `max_workspace`


def signature_of(tensors: Tensors) -> tuple[Hashable, ...]:
    """Return a hashable key of what the split of a chain depends on in these inputs."""
    found: list[Any] = []
    for t in tensors:
        found += (t.shape, t.dtype, t.requires_grad, t.device, type(t))
        if isinstance(t, DTensor):
            found += (t.device_mesh, t.placements)
    return tuple(found)


class ShardedExecutor:
    """A chain for DTensors of fixed shapes, dtypes and placements on one mesh.

    Parameters
    ----------
    tensors : inputs like those that it will be called with
    needs : for each input, whether its gradient is wanted
    local : how this process runs its part; by plans of its own unless given

    Raises
    ------
    SplitError
        The chain cannot be split so. All processes come to the same result.
    TraceError
        An operation cannot be fused.
    """

    gradients: tuple[Any, ...] = ()  # counters of weights, which nothing is prepacked from
    returns_views = False

    def __init__(
        self, chain: Chain, options: Options, tensors: Tensors, needs: Sequence[bool], local: Local | None = None
    ):
        self.chain = chain
        settings = options.settings_on(device_of(local_of(tensors[0])))
        traced = chain.trace(metas_of(tensors))
        self._arrangement = Arrangement.of(traced, tensors)
        if local is None:
            shares = _divided(settings, self._arrangement.count)
            local = Local(lambda name, graph: Leaf(name, graph, shares), settings.max_workspace, True)
        self.backward = ShardedBackward(traced, needs, settings, self._arrangement, local) if any(needs) else None
        self._differentiable = self.backward is not None and any(self.backward.differentiable)
        saved = self.backward.saving.nodes if self.backward is not None and self._differentiable else []
        graph = traced.as_traced(saved, in_place=False).graph
        self._program = program(chain.name, graph, self._arrangement.levels, local)
        _refuse_contractions(self._program)
        targets = [traced.inputs[k] for k, _ in chain.updates]
        values = [*traced.outputs, *targets]
        modes = self._program.result_modes
        self._places = [self._arrangement.placed(v, m) for v, m in zip(values, modes, strict=False)]
        self._inputs = [self._arrangement.placed(v, self._arrangement.modes_of(k)) for k, v in enumerate(traced.inputs)]
        if self.backward is not None:
            self.backward.outputs = self._places[: len(traced.outputs)]
            self.backward.sources = self._inputs
            self.backward.saved_modes = modes[len(values) :]

    @property
    def plans(self) -> list[Plan]:
        """The plans of all rounds, of both passes."""
        return [*self._program.plans, *(self.backward.plans if self.backward is not None else ())]

    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        """Return the outputs, part of autograd's graph where gradients are wanted."""
        tensors = [_without_partial(t) for t in tensors]
        return autograd.apply(self, tensors) if self._differentiable else self.run(tensors)[0]

    def run(self, tensors: Tensors) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and what is saved for the backward pass."""
        with torch.no_grad():
            results = self._program(self._matrices(tensors))
            placed = [place.wrap(m) for place, m in zip(self._places, results, strict=False)]
            outputs, updates = placed[: len(self.chain.outputs)], placed[len(self.chain.outputs) :]
            for (k, _), value in zip(self.chain.updates, updates, strict=True):
                tensors[k].copy_(value if isinstance(tensors[k], DTensor) else local_of(value))
        return outputs, results[len(placed) :]

    def _matrices(self, tensors: Tensors) -> list[Any]:
        """Return this process's parts of the inputs."""
        found = []
        for name, t, place in zip(self.chain.names, tensors, self._inputs, strict=True):
            local = local_of(t)
            if tuple(local.shape) != place.shape:
                raise RuntimeError(
                    f"{name}: expected a part of shape {place.shape} of a DTensor of shape {tuple(t.shape)} placed by "
                    f"{place.placements}, got {tuple(local.shape)}; make it by distribute_tensor, which splits evenly"
                )
            found.append(as_matrix(local.detach()))
        return found


class ShardedBackward(Backward):
    """The backward pass of a chain on DTensors.

    Attributes
    ----------
    outputs, sources : places of the chain's outputs and inputs
    saved_modes : how the levels split each saved value
    """

    def __init__(
        self, traced: TracedChain, needs: Sequence[bool], settings: Settings, arrangement: Arrangement, local: Local
    ):
        super().__init__(traced, needs, settings, shards=max(1, arrangement.count))
        self._arrangement, self._local = arrangement, local
        self._programs: dict[Hashable, tuple[list[int], Any, list[Any]]] = {}
        self.outputs: list[Any] = []
        self.sources: list[Any] = []
        self.saved_modes: Any = ()

    @property
    def plans(self) -> list[Plan]:
        return [plan for _, run, _ in self._programs.values() for plan in run.plans]

    @staticmethod
    def takes(cotangents: Tensors) -> bool:
        return all(c is None or isinstance(c, DTensor) for c in cotangents)

    def _run(self, tensors: Tensors, pairs: Sequence[Any], given: Flags, wanted: Flags) -> list[tuple[int, Any]]:
        inputs = [as_matrix(local_of(t)) for t in tensors]
        places = [place for place, present in zip(self.outputs, given, strict=True) if present]
        cotangents = [place.unwrap(c) for place, (_, c) in zip(places, pairs, strict=True)]
        key = given, wanted
        if key not in self._programs:
            self._programs[key] = self._split(given, wanted)
        roots, run, targets = self._programs[key]
        found = run([*inputs, *cotangents])
        grads = []
        for k, place, matrix in zip(roots, targets, found, strict=True):
            grad = place.wrap(matrix)
            want = self.sources[k].placements
            grads.append((k, grad if grad.placements == want else grad.redistribute(self._arrangement.mesh, want)))
        return grads

    def _split(self, given: Flags, wanted: Flags) -> tuple[list[int], Any, list[Any]]:
        """Split the backward graph; return the inputs it has gradients of, its program, and the gradients' places."""
        roots, traced = self.graph(given, wanted)
        arrangement = self._arrangement
        modes = [arrangement.modes_of(k) for k in self.inputs]
        modes += self.saved_modes
        modes += [place.modes for place, present in zip(self.outputs, given, strict=True) if present]
        levels = []
        for i, level in enumerate(arrangement.levels):
            split = {k: m[i] for k, m in enumerate(modes) if m[i] >= 0}
            levels.append(Level(level.group, level.widths, split))
        run = program(traced.name, traced.graph, levels, self._local)
        places = [arrangement.placed(self.traced.inputs[k], m) for k, m in zip(roots, run.result_modes, strict=True)]
        return list(roots), run, places

    def _zeros(self, number: int, device: torch.device) -> torch.Tensor:
        value, place = self.traced.inputs[number], self.sources[number]
        mesh = self._arrangement.mesh
        return zeros(*value.shape, dtype=getattr(torch, value.dtype), device_mesh=mesh, placements=place.placements)


def _divided(settings: Settings, shards: int) -> Settings:
    """Return the settings of one shard's plans: its part of `max_workspace`, and `_MORE_WORKSPACE`.

    With its part alone, blocks have so few rows that a tenth of the tensor cores' time was lost.
    """
    part = settings.max_workspace // shards + _MORE_WORKSPACE
    return replace(settings, max_workspace=min(settings.max_workspace, part))


def _without_partial(tensor: Any) -> Any:
    """Redistribute the `Partial` placements of a DTensor to `Replicate`; other tensors as they are."""
    if not isinstance(tensor, DTensor) or all(isinstance(p, (Shard, Replicate)) for p in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[p if isinstance(p, Shard) else Replicate() for p in tensor.placements])


def _refuse_contractions(run: Any) -> None:
    """Refuse products that sum over the split dimension: DTensor leaves them `Partial`, to be summed later."""
    if not isinstance(run, Split):
        return
    for part, r, _ in run._rounds:
        if any(rule.name == "contraction" for _, rule in r.reductions):
            raise SplitError("a product sums over the split dimension, and its addends are as large as the result")
        _refuse_contractions(part)
    _refuse_contractions(run._finish)
