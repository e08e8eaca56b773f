"""Where the tensors of a chain are: which dimensions of a mesh split which of their dimensions, and to which widths."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ...plan.schedule.cut import WHOLE
from ...plan.shards import SplitError
from ..chains.chain import TracedChain
from ..rules.values import Value
from .exchange import Group
from .program import Level


def chunks(length: int, count: int) -> tuple[int, ...]:
    """Return how many of some elements each of several processes has, as DTensor shards them."""
    most = -(-length // count)
    return tuple(max(0, min(most, length - k * most)) for k in range(count))


def split_dims(value: Value) -> dict[int, tuple[int, int]]:
    """Return which dimension of a tensor is the outermost along each axis of its matrix.

    Returns
    -------
    dict
        By axis (0: rows, 1: columns): the dimension, and how many elements of the axis each of its elements has.
    """
    tracer = value.tracer
    found: dict[int, tuple[int, int]] = {}
    for axis, along in enumerate(tracer._axes.long):
        if not along:
            continue
        before, length = math.prod(tracer.shape[: along[0]]), tracer._axes.length(along)
        for dim, n in enumerate(value.shape):
            if math.prod(value.shape[:dim]) == before and n > 1:
                if length % n == 0:
                    found[axis] = dim, length // n
                break
    return found


@dataclass(frozen=True)
class Arrangement:
    """The mesh of a chain's tensors, and the dimensions of it that split something.

    Attributes
    ----------
    mesh : DeviceMesh
    levels : tuple of Level
        Of the chain's inputs.
    dims : tuple of int
        The dimension of the mesh of each level.
    """

    mesh: Any
    levels: tuple[Level, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, traced: TracedChain, tensors: Sequence[Any]) -> Arrangement:
        """Find the arrangement of a chain's inputs.

        Raises
        ------
        SplitError
            They are left to PyTorch: the message says why.
        """
        mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
        names = traced.chain.names
        for name, t in zip(names, tensors, strict=True):
            if not isinstance(t, DTensor):
                if t.numel() != 1:
                    raise SplitError(f"{name} is no DTensor, unlike others")
            elif t.device_mesh != mesh:
                raise SplitError(f"{name} is on another mesh than others")
            for p in getattr(t, "placements", ()):
                if type(p) not in (Shard, Replicate, Partial):
                    raise SplitError(f"{name} is placed by {p}")
        levels, dims = [], []
        for dim in range(mesh.ndim):
            split: dict[int, int] = {}
            widths: dict[str, tuple[int, ...]] = {}
            for k, (name, t) in enumerate(zip(names, tensors, strict=True)):
                p = t.placements[dim] if isinstance(t, DTensor) else None
                if not isinstance(p, Shard):
                    continue
                if sum(isinstance(q, Shard) and q.dim % t.ndim == p.dim % t.ndim for q in t.placements) > 1:
                    raise SplitError(f"two dimensions of the mesh split dimension {p.dim} of {name}")
                axes = {d: (axis, inner) for axis, (d, inner) in split_dims(traced.inputs[k]).items()}
                if p.dim % t.ndim not in axes:
                    raise SplitError(f"{name} is split along dimension {p.dim}, which is not the outermost of its rows")
                split[k], inner = axes[p.dim % t.ndim]
                widths[name] = tuple(inner * n for n in chunks(t.shape[p.dim], mesh.size(dim)))
            if len(set(widths.values())) > 1:
                raise SplitError(f"{' and '.join(widths)} are split to different widths by one dimension of the mesh")
            if split:
                levels.append(Level(Group(mesh, dim), next(iter(widths.values())), split))
                dims.append(dim)
        return cls(mesh, tuple(levels), tuple(dims))

    @property
    def count(self) -> int:
        """How many shards there are."""
        return math.prod(level.group.count for level in self.levels)

    def modes_of(self, number: int) -> tuple[int, ...]:
        """Return how the levels split an input."""
        return tuple(level.split.get(number, WHOLE) for level in self.levels)

    def matrix_shape(self, value: Value, modes: Sequence[int]) -> tuple[int, int]:
        """Return the shape of this process's part of a value's matrix."""
        shape = list(value.tracer._node.shape)
        for level, mode in zip(self.levels, modes, strict=True):
            if mode != WHOLE:
                shape[mode] = level.width
        return shape[0], shape[1]

    def placed(self, value: Value, modes: Sequence[int]) -> Place:
        """Return where a value is whose matrix the levels split in this way.

        Raises
        ------
        SplitError
            DTensor has no such placement.
        """
        placements: list[Any] = [Replicate()] * self.mesh.ndim
        shape = list(value.shape)
        for level, dim, mode in zip(self.levels, self.dims, modes, strict=True):
            if mode == WHOLE:
                continue
            along, inner = split_dims(value).get(mode, (-1, 0))
            if along < 0 or tuple(inner * n for n in chunks(value.shape[along], level.group.count)) != level.widths:
                raise SplitError(
                    f"a result of shape {tuple(value.shape)} would be split between elements of a dimension"
                )
            placements[dim] = Shard(along)
            shape[along] = level.width // inner
        return Place(self, value, tuple(modes), tuple(placements), tuple(shape))


@dataclass(frozen=True, eq=False)
class Place:
    """Where a value of a chain is, and the shape of this process's part of it."""

    arrangement: Arrangement
    value: Value
    modes: tuple[int, ...]
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    @cached_property
    def _transposed(self) -> bool:
        return not self.value.tracer._axes.in_order

    def wrap(self, matrix: Any) -> DTensor:
        """Make the DTensor of this process's part of the value's matrix."""
        local = (matrix.t() if self._transposed else matrix).reshape(self.shape)
        # `from_local` takes twenty times as long; specs may be changed by what PyTorch does with a tensor.
        return DTensor(local.contiguous(), copy.copy(self._spec), requires_grad=False)

    @cached_property
    def _spec(self) -> DTensorSpec:
        shape = self.value.shape
        stride = tuple(math.prod(max(n, 1) for n in shape[k + 1 :]) for k in range(len(shape)))
        meta = TensorMeta(torch.Size(shape), stride, getattr(torch, self.value.dtype))
        return DTensorSpec(self.arrangement.mesh, self.placements, tensor_meta=meta)

    def unwrap(self, tensor: DTensor) -> Any:
        """Return this process's part of a value's matrix, from a DTensor of any placements."""
        if tuple(tensor.placements) != self.placements:
            tensor = tensor.redistribute(self.arrangement.mesh, self.placements)
        rows, columns = self.arrangement.matrix_shape(self.value, self.modes)
        local = local_of(tensor)
        return local.reshape(columns, rows).t() if self._transposed else local.reshape(rows, columns)


def local_of(tensor: Any) -> Any:
    """Return this process's part of a DTensor; other tensors as they are."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if hasattr(local, "wait") else local


def placer(placements: Sequence[Any]) -> Callable[[Any], Any]:
    """Return a function that distributes a DTensor by these placements, for captured graphs to call."""
    wanted = tuple(placements)

    def placed(tensor: Any) -> Any:
        return tensor if tensor.placements == wanted else tensor.redistribute(placements=wanted)

    return placed
