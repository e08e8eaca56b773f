"""What a chain prepares from fixed inputs (parameters, buffers): when it is computed anew, and where it is kept.

On a GPU the device itself looks in every call whether the inputs have changed (`Checked`), and kernels that prepare do
nothing where they have not: neither the versions of tensors, which many ways of writing leave as they were, nor the
user's memory is relied on, the host waits for nothing, and replays of CUDA graphs check as calls do. The fingerprint is
of a sample of the elements; what the host knows to have changed is part of it, as a number. What `Options.frozen`
promises is not checked (`Frozen`). Where neither is possible everything is prepared in every call (`EveryCall`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...cuda.fingerprint import CHANGED_AT, MOST_MATRICES, STATE_BYTES, Fingerprint
from ...engines.cuda import CudaExecutable
from ...plan.plan import Plan
from .runtime import on_device, ready

Tensors = Sequence[Any]

_STATES = 32  # of streams and captured graphs, for each chain; beyond that, every call prepares

# Memory that captured graphs use, by the fixed inputs, whose memory the same graphs use.
_in_graphs = WeakIdKeyDictionary()


# Of the GPU's memory that is free when something is first kept, the share that it may take: enough is left for what a
# model allocates later.
_SHARE = 0.25


class Budget:
    """How many bytes of prepared values may be kept together, as by one fused module.

    Parameters
    ----------
    limit : int, optional
        Bytes; without it, a share of the memory that is free at the time, for each chain.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._kept: weakref.WeakSet[_Kept] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Bytes that are kept at the moment."""
        return sum(kept.nbytes for kept in list(self._kept))

    def allows(self, nbytes: int, device: int) -> bool:
        """Whether so many more bytes may be kept on a device; -1 is the CPU."""
        if self.limit is not None:
            return self.used + nbytes <= self.limit
        if device < 0:
            return True
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return nbytes <= _SHARE * (torch.cuda.mem_get_info(device)[0] + reserved)

    def enter(self, kept: _Kept) -> None:
        self._kept.add(kept)


def preparing(plan: Plan, matrices: Tensors, frozen: bool, budget: Budget | None = None) -> EveryCall:
    """What runs a preparing plan for inputs like these."""
    budget = budget or Budget()
    device = matrices[0].get_device()
    checked = device >= 0 and plan.conditional and len(plan.graph.inputs) <= MOST_MATRICES
    if not frozen and not checked:
        return EveryCall(plan, matrices)
    if not budget.allows(sum(o.node.nbytes for o in plan.outputs), device):
        return Unkept(plan, matrices)
    return Frozen(plan, matrices, budget) if frozen else Checked(plan, matrices, budget)


class EveryCall:
    """A preparing plan that runs in every call; nothing is kept.

    Parameters
    ----------
    plan : Plan
    matrices : sequence of Tensor
        The inputs of the chain, of at most two dimensions; the plan takes some of them.

    Attributes
    ----------
    needed : list of int
        The numbers of the inputs that the plan takes.
    when : str
        When it runs, as `Plan.prepare_note`.
    """

    when = "in every call: {}"

    def __init__(self, plan: Plan, matrices: Tensors):
        self.needed = [n.argument for n in plan.graph.inputs]
        self._none = [None] * len(plan.outputs)
        self._execute: Any = self._ready(plan, [matrices[k] for k in self.needed])

    def _ready(self, plan: Plan, needed: Tensors) -> Any:
        return ready(plan, needed)

    def __call__(self, matrices: Tensors, owners: Tensors) -> list[Any]:
        """The prepared values, up to date on the current stream.

        `owners` are the inputs as the chain's caller has them: graphs that are captured live no longer than these.
        """
        return self.anew(matrices)

    def anew(self, matrices: Tensors) -> list[Any]:
        """The prepared values in new memory, which is not kept."""
        with torch.no_grad():
            return list(self._execute([matrices[k] for k in self.needed], self._none))

    def changed(self, others: bool) -> None:
        """The host has seen that inputs changed; `others`: they are other tensors."""

    def refresh(self) -> None:
        """Inputs have changed in ways that may not be seen: the next call prepares, and the next replay of a graph."""

    def release(self) -> None:
        """Let go of the memory."""


class Unkept(EveryCall):
    """Prepared in every call, because the memory to keep it is not there."""

    when = "in every call, because keeping them would take more memory than they may: {}"


class Frozen(EveryCall):
    """Prepared once, and anew where the host sees that inputs changed."""

    when = "once, for as long as parameters are the same tensors of the same version (frozen): {} are kept"

    def __init__(self, plan: Plan, matrices: Tensors, budget: Budget):
        super().__init__(plan, matrices)
        self._device = matrices[0].get_device()
        self._budget = budget
        self._kept: _Kept | None = None

    def __call__(self, matrices: Tensors, owners: Tensors) -> list[Any]:
        capturing = self._device >= 0 and capturing_now()
        if self._kept is None:
            arrays = self.anew(matrices)
            if capturing:
                return arrays  # in the graph's memory: each replay prepares
            self._kept = _Kept(arrays, self._device)
            self._budget.enter(self._kept)
        elif capturing:
            self._kept.hold([owners[k] for k in self.needed])
        elif self._device >= 0:
            self._kept.enter(torch._C._cuda_getCurrentRawStream(self._device))
        return self._kept.arrays

    def changed(self, others: bool) -> None:
        self._kept = None  # other streams may still be reading

    def refresh(self) -> None:
        self._kept = None

    def release(self) -> None:
        self._kept = None


class Checked(EveryCall):
    """Prepared where the device finds, in every call, that the inputs differ from those that it was prepared from."""

    when = "when the parameters have changed, for which the device looks in every call: {} are kept"

    def __init__(self, plan: Plan, matrices: Tensors, budget: Budget):
        self._device = matrices[0].get_device()
        self._budget = budget
        self._runtime = on_device(self._device)
        super().__init__(plan, matrices)
        self._token = 0  # grows with every change that the host sees
        self._kept: _States | None = None
        self._all: weakref.WeakSet[_States] = weakref.WeakSet()  # also those that graphs alone still use

    def _ready(self, plan: Plan, needed: Tensors) -> Any:
        self._fingerprint = Fingerprint(self._runtime, [_shape_of(t) for t in needed])
        return CudaExecutable(plan, needed, self._runtime, conditional=True)

    def __call__(self, matrices: Tensors, owners: Tensors) -> list[Any]:
        if not self._runtime.is_current():
            with self._runtime.made_current():
                return self(matrices, owners)
        capturing = capturing_now()
        kept = self._kept
        if kept is None:
            if capturing:
                return self.anew(matrices)
            with torch.inference_mode(False):
                kept = self._kept = _States(self._execute.allocate(), self._device)
            self._all.add(kept)
            self._budget.enter(kept)
        stream = self._runtime.stream()
        if capturing:
            state = kept.of_graph(stream.ptr)
            kept.hold([owners[k] for k in self.needed])
        else:
            state = kept.of_stream(stream.ptr)
        if not state:
            return self.anew(matrices)
        tensors = [matrices[k] for k in self.needed]
        self._fingerprint([t.data_ptr() for t in tensors], self._token, state, kept.address, stream)
        self._execute.run_if_changed(tensors, kept.arrays, state + CHANGED_AT)
        return kept.arrays

    def anew(self, matrices: Tensors) -> list[Any]:
        with self._runtime.made_current():
            arrays: list[Any] = self._execute.allocate()
            flag = torch.ones(1, dtype=torch.int32, device=self._runtime.place)
            self._execute.run_if_changed([matrices[k] for k in self.needed], arrays, flag.data_ptr())
        return arrays

    def changed(self, others: bool) -> None:
        if others:
            self._kept = None  # other streams may still be at calls with the tensors of before, and graphs replay them
        self._token += 1

    def refresh(self) -> None:
        for kept in list(self._all):
            kept.forget()

    def release(self) -> None:
        self._kept = None


def _shape_of(tensor: Any) -> tuple[int, int, int, int, int]:
    rows, cols = (1,) * (2 - tensor.dim()) + tuple(tensor.shape)
    row_stride, col_stride = (0,) * (2 - tensor.dim()) + tensor.stride()
    return rows, cols, row_stride, col_stride, tensor.element_size()


def capturing_now() -> bool:
    """Whether the current stream captures a CUDA graph."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())


# Memory -------------------------------------------------------------------------------------------------------------


class _Kept:
    """Prepared values in PyTorch's memory, and the streams that use them.

    Parameters
    ----------
    arrays : list of Tensor
    device : int
        Of the GPU; -1 for the CPU.
    """

    def __init__(self, arrays: list[Any], device: int):
        self.arrays = arrays
        self._device = device
        self._streams: set[int] = set()
        if device >= 0:
            stream = torch.cuda.current_stream(device)
            self._streams.add(stream.cuda_stream)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    @property
    def nbytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays)

    def enter(self, stream: int) -> None:
        """Have the current stream wait for what the one that allocated the memory has done until then."""
        if stream in self._streams:
            return
        self._streams.add(stream)
        if self._device < 0:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for array in self._memory():
            array.record_stream(current)

    def _memory(self) -> list[Any]:
        return self.arrays

    def hold(self, owners: Tensors) -> None:
        """Keep the memory for a graph that is being captured.

        Nothing tells when the graph is gone. It reads the inputs' own memory as well, so it is of no use without them.
        """
        for tensor in owners:
            held = _in_graphs.setdefault(tensor, [])
            if not any(kept is self for kept in held):
                held.append(self)


class _States(_Kept):
    """Prepared values with what tells whether they are up to date: a state for each stream and each captured graph."""

    def __init__(self, arrays: list[Any], device: int):
        words = (_STATES + 1) * STATE_BYTES // 8
        self._words = torch.zeros(words, dtype=torch.int64, device=arrays[0].device)
        self.address = self._words.data_ptr()
        self._free = list(range(self.address + STATE_BYTES, self.address + words * 8, STATE_BYTES))
        self._states: dict[Any, int] = {}
        super().__init__(arrays, device)

    def of_stream(self, stream: int) -> int:
        """The address of a stream's state; 0 where there is none left."""
        state = self._states.get(stream)
        if state is None:
            self.enter(stream)
            state = self._taken(stream)
        return state

    def of_graph(self, stream: int) -> int:
        """The address of the state of what one stream adds to the graph that is being captured; 0 if none is left.

        Graphs are captured when the GPU has done what came before: nothing is waited for.
        """
        graph = _graph_in_capture()
        return self._taken() if graph is None else self._states.get((graph, stream)) or self._taken((graph, stream))

    def _taken(self, key: Any = None) -> int:
        if not self._free:
            return 0
        state = self._free.pop()
        if key is not None:
            self._states[key] = state
        return state

    def forget(self) -> None:
        """Have the device find every input changed."""
        with torch.inference_mode(False), torch.no_grad():
            self._words[:1].zero_()

    def _memory(self) -> list[Any]:
        return [*self.arrays, self._words]


def _graph_in_capture() -> int | None:
    """What tells the graph that is being captured from others; None if nothing does."""
    try:
        graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    except (AttributeError, RuntimeError):  # in older versions of PyTorch; in captures that are not its own
        return None
    return id(graph) if isinstance(graph, torch.cuda.CUDAGraph) else None
