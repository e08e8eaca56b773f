"""Caches of prepacked weights: what a chain computes from its fixed inputs (parameters, buffers) alone.

On a GPU every call compares a fingerprint of the weights on the device, and the kernels that prepack return at once
where it is unchanged (`CheckedCache`). This finds writes that no version counts, needs no synchronisation, and works in
replays of CUDA graphs. The fingerprint samples the elements; changes that the host knows of enter it as a token. Where
every call comes after such a change, as in training, nothing is compared. `Options.frozen` omits the check
(`FrozenCache`); where neither is possible, every call prepacks (`Uncached`).
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ...cuda.fingerprint import CHANGED_AT, MOST_MATRICES, STATE_BYTES, Fingerprint
from ...engines.cuda import CudaExecutable
from ...plan.plan import Plan
from .runtime import begin, is_capturing, load, runtime_of
from .tensors import Tensors

_STATES = 32  # streams and captured graphs that one cache serves; further ones prepack in every call
_CALLS_BEFORE_RECORDING = 10  # recording takes the host as long as about ten calls
_FREE_SHARE = 0.25  # of the free memory, for one cache: the model allocates more later

# Buffers that captured graphs read, by the fixed inputs that the same graphs read.
_in_graphs = WeakIdKeyDictionary()


class Budget:
    """A limit on the bytes of prepacked weights that several caches hold together, as those of one fused module.

    Without a limit, each cache may take a share of the memory that is free when it is made.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._buffers: weakref.WeakSet[_Buffers] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Bytes that are cached at the moment."""
        return sum(buffers.nbytes for buffers in list(self._buffers))

    def allows(self, nbytes: int, device: int) -> bool:
        """Whether so many more bytes may be cached on a device; -1 is the CPU."""
        if self.limit is not None:
            return self.used + nbytes <= self.limit
        if device < 0:
            return True
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return nbytes <= _FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + reserved)

    def charge(self, buffers: _Buffers) -> None:
        """Count buffers for as long as they live."""
        self._buffers.add(buffers)


def weight_cache(plan: Plan, matrices: Tensors, frozen: bool, budget: Budget) -> Uncached:
    """Make the cache for a prepacking plan and inputs like these."""
    device = matrices[0].get_device()
    checked = device >= 0 and plan.conditional and len(plan.graph.inputs) <= MOST_MATRICES
    if not frozen and not checked:
        return Uncached(plan, matrices)
    if not budget.allows(sum(o.node.nbytes for o in plan.outputs), device):
        return Uncached(plan, matrices, "in every call, because {} are more than may be kept")
    return FrozenCache(plan, matrices, budget) if frozen else CheckedCache(plan, matrices, budget)


def begin_prepacking(plan: Plan, matrices: Tensors, device: torch.device, frozen: bool) -> None:
    """Begin to compile the kernels of a prepacking plan, as `weight_cache` most probably loads it."""
    begin(plan, [matrices[n.argument] for n in plan.graph.inputs], device, conditional=plan.conditional and not frozen)


class Uncached:
    """Weights prepacked in every call; the interface of the caches.

    Parameters
    ----------
    plan : the prepacking plan
    matrices : the inputs of the chain, of at most two dimensions; the plan takes some of them
    when : when the plan runs, for `Plan.prepare_note`

    Attributes
    ----------
    needed : the numbers of the inputs that the plan takes
    """

    def __init__(self, plan: Plan, matrices: Tensors, when: str = "in every call: {}"):
        self.when = when
        self.needed = [n.argument for n in plan.graph.inputs]
        self._device = matrices[0].get_device()
        self._buffers: Any = None
        self._execute: Any = self._load(plan, self._taken_by_plan(matrices))

    def _load(self, plan: Plan, arguments: Tensors) -> Any:
        return load(plan, arguments)

    def _taken_by_plan(self, tensors: Tensors) -> list[Any]:
        return [tensors[k] for k in self.needed]

    def __call__(self, matrices: Tensors, tensors: Tensors) -> list[Any]:
        """Return the prepacked weights, up to date on the current stream.

        `tensors` are the inputs as the chain's caller has them; captured graphs live no longer than these.
        """
        return self.compute(matrices)

    def compute(self, matrices: Tensors) -> list[Any]:
        """Prepack into new memory, which is not cached."""
        with torch.no_grad():
            return list(self._execute(self._taken_by_plan(matrices)))

    def invalidate(self, replaced: bool) -> None:
        """Invalidate the weights after a change that the host has seen; `replaced` if the inputs are other tensors."""
        self._buffers = None  # other streams may still read them

    def refresh(self) -> None:
        """Have the next call, and the next replay of each graph, prepack."""
        self._buffers = None

    def release(self) -> None:
        """Free the memory."""
        self._buffers = None


class FrozenCache(Uncached):
    """Weights prepacked once, and again when the host sees a change."""

    def __init__(self, plan: Plan, matrices: Tensors, budget: Budget):
        super().__init__(plan, matrices, "once for each version of the parameters (frozen): {} are kept")
        self._budget = budget

    def __call__(self, matrices: Tensors, tensors: Tensors) -> list[Any]:
        capturing = self._device >= 0 and is_capturing()
        if self._buffers is None:
            arrays = self.compute(matrices)
            if capturing:
                return arrays  # in the graph's memory: each replay prepacks
            self._buffers = _Buffers(arrays, self._device)
            self._budget.charge(self._buffers)
        elif capturing:
            self._buffers.hold(self._taken_by_plan(tensors))
        elif self._device >= 0:
            self._buffers.use_on(torch._C._cuda_getCurrentRawStream(self._device))
        arrays = self._buffers.arrays
        return arrays


class CheckedCache(Uncached):
    """Weights prepacked again when the device finds that the inputs have changed."""

    def __init__(self, plan: Plan, matrices: Tensors, budget: Budget):
        self._budget = budget
        self._runtime = runtime_of(matrices[0].get_device())
        self._token = 0  # grows with every change that the host sees
        self._seen = 0  # the token at the last call
        self._changes = 0  # how many calls in a row, up to the last, came after such a change
        self._all: weakref.WeakSet[_CheckedBuffers] = weakref.WeakSet()  # also those that only graphs still read
        when = "when the parameters have changed, which the device checks in every call: {} are kept"
        super().__init__(plan, matrices, when)

    def _load(self, plan: Plan, arguments: Tensors) -> Any:
        with self._runtime.made_current():
            self._fingerprint = Fingerprint(self._runtime, [_geometry(t) for t in arguments])
        return CudaExecutable(plan, arguments, self._runtime, conditional=True).load()

    def __call__(self, matrices: Tensors, tensors: Tensors) -> list[Any]:
        if not self._runtime.is_current():
            with self._runtime.made_current():
                return self(matrices, tensors)
        capturing = is_capturing()
        buffers: _CheckedBuffers | None = self._buffers
        if buffers is None:
            if capturing:
                return self.compute(matrices)
            with torch.inference_mode(False):
                buffers = self._buffers = _CheckedBuffers(self._execute.allocate(), self._device)
            self._all.add(buffers)
            self._budget.charge(buffers)
        stream = self._runtime.stream()
        if capturing:
            state = buffers.graph_state(stream)
            buffers.hold(self._taken_by_plan(tensors))
        else:
            state = buffers.stream_state(stream)
        if not state:
            return self.compute(matrices)
        addresses = [matrices[k].data_ptr() for k in self.needed]
        if not capturing and self._changes_in_every_call():
            buffers.expire()  # the hash is of earlier weights, which graphs or other streams may find again
            self._execute.run_if_changed(addresses, buffers.addresses, buffers.true, stream)
            return buffers.arrays
        buffers.expired = False
        check = functools.partial(self._check, addresses, self._token, state, buffers)
        if capturing:
            check(stream)
        else:
            # The state and the buffers are always the same ones for a stream.
            buffers.recordings[stream](self._runtime, check, (self._token, *addresses), stream)
        return buffers.arrays

    def _changes_in_every_call(self) -> bool:
        """Count a call; whether it and the one before it came after a change that the host has seen."""
        self._changes = self._changes + 1 if self._seen != self._token else 0
        self._seen = self._token
        return self._changes > 1

    def _check(self, addresses: list[int], token: int, state: int, buffers: _CheckedBuffers, stream: Any) -> Any:
        """Launch the fingerprint, and the kernels that prepack if it differs; return their workspace."""
        self._fingerprint(addresses, token, state, buffers.address, stream)
        return self._execute.run_if_changed(addresses, buffers.addresses, state + CHANGED_AT, stream)

    def compute(self, matrices: Tensors) -> list[Any]:
        with self._runtime.made_current():
            arrays: list[Any] = self._execute.allocate()
            flag = torch.ones(1, dtype=torch.int32, device=self._runtime.place)
            addresses, results = ([t.data_ptr() for t in each] for each in (self._taken_by_plan(matrices), arrays))
            self._execute.run_if_changed(addresses, results, flag.data_ptr(), self._runtime.stream())
        return arrays

    def invalidate(self, replaced: bool) -> None:
        if replaced:
            self._buffers = None  # other streams, and graphs, may still read them for the earlier tensors
        self._token += 1

    def refresh(self) -> None:
        """Compute again in the next call, on every stream and in every captured graph."""
        for buffers in list(self._all):
            buffers.expire()


def _geometry(tensor: Any) -> tuple[int, int, int, int, int]:
    """Return rows, columns, their strides and the itemsize, as the fingerprint takes them."""
    rows, cols = (1,) * (2 - tensor.dim()) + tuple(tensor.shape)
    row_stride, col_stride = (0,) * (2 - tensor.dim()) + tensor.stride()
    return rows, cols, row_stride, col_stride, tensor.element_size()


# Memory -------------------------------------------------------------------------------------------------------------


class _Buffers:
    """Cached arrays on a device (-1 is the CPU), and the streams that use them."""

    def __init__(self, arrays: list[Any], device: int):
        self.arrays = arrays
        self._memory = list(arrays)
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

    def use_on(self, stream: int) -> None:
        """Have the current stream wait for the one that allocated the memory, as it stood then."""
        if stream in self._streams:
            return
        self._streams.add(stream)
        if self._device < 0:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for array in self._memory:
            array.record_stream(current)

    def hold(self, inputs: Tensors) -> None:
        """Keep the memory for the graph that is being captured, as long as the inputs live.

        PyTorch does not tell when the graph is deleted, but it reads the inputs too, and is of no use without them.
        """
        for tensor in inputs:
            held = _in_graphs.setdefault(tensor, [])
            if not any(buffers is self for buffers in held):
                held.append(self)


class _CheckedBuffers(_Buffers):
    """Cached arrays, and a fingerprint state for each stream and each captured graph.

    Attributes
    ----------
    address : that of the state that all others are compared with
    addresses : those of the arrays
    true : that of a flag that is always set, to prepack without a check
    expired : whether every check finds a change, as none has run since the last `expire`
    recordings : of the checks, by stream
    """

    def __init__(self, arrays: list[Any], device: int):
        words = (_STATES + 1) * STATE_BYTES // 8  # of 8 bytes
        self._words = torch.zeros(words + 1, dtype=torch.int64, device=arrays[0].device)
        self._words[words:].fill_(1)
        self.address, self.true = self._words.data_ptr(), self._words[words:].data_ptr()
        self.addresses = [array.data_ptr() for array in arrays]
        self.expired, self._captured = False, False
        self.recordings: defaultdict[int, _Recording] = defaultdict(_Recording)
        self._free = list(range(self.address + STATE_BYTES, self.address + words * 8, STATE_BYTES))
        self._states: dict[Any, int] = {}
        super().__init__(arrays, device)
        self._memory.append(self._words)

    def stream_state(self, stream: int) -> int:
        """Return the address of a stream's fingerprint state; 0 where none is left."""
        state = self._states.get(stream)
        if state is None:
            self.use_on(stream)
            state = self._allocate_state(stream)
        return state

    def graph_state(self, stream: int) -> int:
        """Return the address of a stream's state in the graph that is being captured; 0 where none is left.

        No wait for the allocation is needed: a capture begins when the GPU has done what came before.
        """
        self._captured = True
        graph = _captured_graph()
        if graph is None:
            return self._allocate_state()
        return self._states.get((graph, stream)) or self._allocate_state((graph, stream))

    def _allocate_state(self, key: Any = None) -> int:
        """Return the address of a free state, 0 where none is left; a later call finds it by its key, if it has one."""
        if not self._free:
            return 0
        state = self._free.pop()
        if key is not None:
            self._states[key] = state
        return state

    def expire(self) -> None:
        """Make the next check of every stream and graph find a change."""
        if not self.expired:
            with torch.inference_mode(False), torch.no_grad():
                self._words[:1].zero_()
        self.expired = not self._captured  # replays of graphs check unseen


class _Recording:
    """Launches on one stream, recorded as a CUDA graph once their arguments have been the same for some calls.

    The check of a few weights is four launches, which take the host longer than the rest of the call. Where arguments
    change soon after a recording, as in training with many small batches to a step, the next one waits twice as long.
    """

    def __init__(self) -> None:
        self._arguments: tuple[int, ...] = ()
        self._calls = 0  # with these arguments
        self._patience = _CALLS_BEFORE_RECORDING
        self._replay: Callable[[Any], None] | None = None

    def __call__(self, runtime: Any, launch: Callable[[Any], Any], arguments: tuple[int, ...], stream: Any) -> None:
        """Run `launch(stream)`, or its recording if it has one for the same arguments."""
        if arguments != self._arguments:
            if self._replay is not None and self._calls < 2 * self._patience:
                self._patience *= 2
            self._arguments, self._calls, self._replay = arguments, 0, None
        self._calls += 1
        if self._replay is None:
            if self._calls <= self._patience:
                launch(stream)
                return
            self._replay = runtime.record(launch)
        self._replay(stream)


def _captured_graph() -> int | None:
    """Identify the graph that is being captured; None if PyTorch cannot."""
    try:
        graph = torch.cuda.CUDAGraph.get_currently_capturing_graph()
    except (AttributeError, RuntimeError):  # older versions of PyTorch; captures that are not its own
        return None
    return id(graph) if isinstance(graph, torch.cuda.CUDAGraph) else None
