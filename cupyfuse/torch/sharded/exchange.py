"""Exchange the states of reductions among the processes along one dimension of a mesh, and merge them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ...ir.graph import Graph
from ...plan.shards import Round, merge
from ..chains.tensors import dtype_name

MakeLeaf = Callable[[str, Graph], Any]  # takes the name of plans, and a graph
_AT_ONCE = 16  # states that one launch merges
_LARGE = 1 << 20  # bytes of a sum, from which a reduction moves less than a gather of all addends


class Group:
    """The processes along one dimension of a mesh.

    Attributes
    ----------
    count : int
        How many they are.
    rank : int
        The place of this process among them.
    """

    def __init__(self, mesh: Any, dim: int):
        self.count, self.rank = int(mesh.size(dim)), int(mesh.get_local_rank(dim))
        self._name = mesh.get_group(dim).group_name
        self._merges: dict[Hashable, Any] = {}

    def merge(
        self, round: Round, states: Sequence[Any], make: MakeLeaf, shared: Sequence[Any] | None = None
    ) -> list[Any]:
        """Return the merged parts of a round's states: the same bits in all processes.

        Contractions, and large sums, are all-reduced. All others are sent in one all-gather, and merged in the order of
        the processes.

        Parameters
        ----------
        shared : sequence, optional
            Tensors whose memory has to stay as it is: states that have memory of their own are all-reduced in place.
        """
        if self.count == 1:
            return list(states)
        merged: list[Any] = [None] * len(states)
        rules: list[str] = []
        small: list[int] = []
        place = 0
        for _, rule in round.reductions:
            places = range(place, place + len(rule.names))
            place += len(rule.names)
            if rule.name == "contraction" or (rule.name == "sum" and states[places[0]].nbytes > _LARGE):
                part = states[places[0]]
                merged[places[0]] = self._reduce(part, shared is not None and _is_own(part, [*states, *shared]))
            else:
                rules.append(rule.name)
                small += places
        if small:
            found = self._merge(rules, self._gather([states[k] for k in small]), make)
            for k, part in zip(small, found, strict=True):
                merged[k] = part
        return merged

    def _reduce(self, part: Any, in_place: bool) -> Any:
        collectives = torch.ops._c10d_functional
        reduce = collectives.all_reduce_ if in_place else collectives.all_reduce
        return collectives.wait_tensor(reduce(part.contiguous(), "sum", self._name))

    def _gather(self, parts: Sequence[Any]) -> list[list[Any]]:
        """Gather the parts of a state from all processes, in one collective operation."""
        if not sum(p.numel() for p in parts):
            return [list(parts)] * self.count
        # Those of the widest dtype first, so that each begins where its dtype can.
        order = sorted(range(len(parts)), key=lambda k: -parts[k].element_size())
        flat = [parts[k].reshape(-1) for k in order]
        if len({p.dtype for p in flat}) > 1:
            flat = [p.view(torch.uint8) for p in flat]
            widest = parts[order[0]].element_size()
            padding = -sum(p.numel() for p in flat) % widest  # so that the next process's begin alike
            flat += [flat[0].new_zeros(padding)] if padding else []
        packed = torch.cat(flat) if len(flat) > 1 else flat[0]
        collectives = torch.ops._c10d_functional
        gathered = collectives.wait_tensor(collectives.all_gather_into_tensor(packed, self.count, self._name))
        ends = list(pairwise(accumulate((p.numel() for p in flat), initial=0)))
        states = []
        for own in gathered.view(self.count, -1):
            found: dict[int, Any] = {}
            for k, (first, last) in zip(order, ends, strict=False):  # the padding may follow
                part = own[first:last]
                found[k] = (part if part.dtype == parts[k].dtype else part.view(parts[k].dtype)).view(parts[k].shape)
            states.append([found[k] for k in range(len(parts))])
        return states

    def _merge(self, rules: Sequence[str], states: list[list[Any]], make: MakeLeaf) -> list[Any]:
        while len(states) > 1:
            states = [self._merge_few(rules, states[k : k + _AT_ONCE], make) for k in range(0, len(states), _AT_ONCE)]
        return states[0]

    def _merge_few(self, rules: Sequence[str], states: list[list[Any]], make: MakeLeaf) -> list[Any]:
        if len(states) == 1 or not sum(p.numel() for p in states[0]):
            return states[0]
        parts = tuple((tuple(p.shape), str(dtype_name(p.dtype))) for p in states[0])
        key = tuple(rules), parts, len(states)
        leaf = self._merges.get(key)
        if leaf is None:
            graph = merge(rules, parts, len(states))
            leaf = self._merges[key] = make(f"merge of {len(states)}", graph)
        return leaf([part for state in states for part in state])


def _is_own(tensor: Any, others: Sequence[Any]) -> bool:
    """Whether a tensor is contiguous, and the only one among these, of which it is one, that uses its memory."""
    used = [t.untyped_storage()._cdata for t in others if t is not None]
    return bool(tensor.is_contiguous()) and used.count(tensor.untyped_storage()._cdata) == 1
