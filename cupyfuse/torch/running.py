"""Running chains: find what is ready for inputs like these, keep what weights alone decide, and differentiate.

A `Runner` belongs to one chain. For each combination of shapes, strides, dtypes and wanted gradients it keeps an
`Entry`: the plan, made ready to run. What an entry has prepared from fixed inputs (parameters, buffers) is used only as
long as these are the same tensors, of the same version, in the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import TraceError
from ..planning import build
from ..settings import DEFAULT_WORKSPACE, Settings
from .chain import Chain
from .differentiate import Backward
from .runtime import device_of, dtype_name, layout_of, ready

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_MOST_ENTRIES = 256
Tensors = Sequence[Any]


@dataclass(frozen=True)
class Options:
    """What the user chose for a fused module.

    Attributes
    ----------
    precision : str or None
        Of float32 products; None follows `torch.get_float32_matmul_precision`.
    max_workspace : int
        Bytes that a call may take beside its arguments and results, where it can run in blocks of rows.
    keep_halves : bool
        Whether the fp16 halves of weights are kept from call to call.
    """

    precision: str | None = None
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True

    def current_precision(self) -> str:
        return self.precision or matmul_precision()


_newer = getattr(torch._C, "_get_fp32_precision_getter", None)


def matmul_precision() -> str:
    """PyTorch's precision of float32 products: of `set_float32_matmul_precision`, or of the switches by backend."""
    switch = _newer("cuda", "matmul") if _newer is not None else "none"
    if switch == "ieee":
        return "highest"
    try:
        precision = str(torch._C._get_float32_matmul_precision())
    except RuntimeError:  # where both were used
        precision = "highest"
    return "high" if switch == "tf32" and precision == "highest" else precision


_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_forward_mode = torch.autograd.forward_ad


def elsewhere() -> bool:
    """Whether tensors may be more than they look: transforms of functions, modes that watch operations, tracing."""
    return bool(_transforms() or _dispatch_modes() or _tracing() is not None or _forward_mode._current_level >= 0)


@dataclass
class Cell:
    """Where a caller whose inputs are always of one kind keeps what is ready for them."""

    entry: Entry | None = None


class Runner:
    """A chain, ready for every combination of shapes that it has met.

    Called with the chain's inputs; returns its outputs as a list. Inputs that cannot be fused (subclasses of tensors,
    other devices, shapes that an operation refuses) run as PyTorch runs them, and `refusals` says why.
    """

    def __init__(self, chain: Chain, options: Options = Options()):
        self.chain = chain
        self.options = options
        self.refusals: dict[str, int] = {}
        self._moving = [k for k in range(len(chain.names)) if k not in chain.fixed]
        self._fast: dict[Hashable, Entry] = {}
        self._entries: dict[Hashable, Entry | str] = {}
        self._lock = threading.RLock()

    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        entry = self.choose(tensors)
        return self.left(entry, tensors) if isinstance(entry, str) else entry(tensors)

    def again(self, cell: Cell, tensors: Tensors) -> Sequence[Any]:
        """A call with inputs of the shapes, strides and dtypes, and in the modes, of the others with the same cell."""
        entry = cell.entry
        precision = self.options.precision or matmul_precision()
        if entry is None or precision != entry.precision or not entry.is_for(tensors):
            found = self.choose(tensors)
            if isinstance(found, str):
                return self.left(found, tensors)
            entry = cell.entry = found
        return entry(tensors)

    def choose(self, tensors: Tensors) -> Entry | str:
        """What is ready for these inputs, made ready if need be; or why they are left to PyTorch."""
        if elsewhere():
            return "a transform or a mode of PyTorch's is active"
        graded = torch.is_grad_enabled()
        key: list[Any] = [graded, self.options.precision or matmul_precision()]
        try:
            for k in self._moving:
                t = tensors[k]
                if type(t) not in PLAIN:
                    return f"{self.chain.names[k]} is a {type(t).__name__}"
                key += (t.shape, t.stride(), t.dtype, t.requires_grad, t.layout, t.is_neg(), t.device)
        except RuntimeError:
            return f"{self.chain.names[k]} has no strides"
        fast = tuple(key)
        entry = self._fast.get(fast)
        return entry if entry is not None and entry.is_for(tensors) else self._find(fast, tensors, graded)

    def left(self, reason: str, tensors: Tensors) -> list[Any]:
        """Run as PyTorch does, and remember why."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        return eagerly(self.chain, tensors)

    @property
    def entries(self) -> list[Entry]:
        return [e for e in list(self._entries.values()) if isinstance(e, Entry)]

    def refresh(self) -> None:
        """Have everything prepared anew."""
        for entry in self.entries:
            entry.forget()

    def release(self) -> None:
        """Let go of all memory that is held for fixed inputs, until the next call."""
        for entry in self.entries:
            entry.release()

    def _find(self, fast: Hashable, tensors: Tensors, graded: bool) -> Entry | str:
        """The entry for these inputs, made if need be; or why there can be none."""
        for k in self.chain.fixed:
            if type(tensors[k]) not in PLAIN:
                return f"{self.chain.names[k]} is a {type(tensors[k]).__name__}"
        try:
            fixed = tuple(
                (t.shape, t.stride(), t.dtype, t.requires_grad, t.layout, t.is_neg(), t.device, t.is_inference())
                for t in (tensors[k] for k in sorted(self.chain.fixed))
            )
        except RuntimeError:
            return "a parameter has no strides"
        key = (fast, fixed)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._make(tensors, graded)
                if len(self._entries) >= _MOST_ENTRIES:
                    self._entries.clear()
                    self._fast.clear()
                self._entries[key] = entry
            if isinstance(entry, Entry):
                entry.mark(tensors)
                self._fast[fast] = entry
        return entry

    def _make(self, tensors: Tensors, graded: bool) -> Entry | str:
        unfit = _unfit(self.chain, tensors)
        if unfit:
            return unfit
        needs = tuple(graded and t.requires_grad for t in tensors)
        try:
            return Entry(self.chain, self.options, tensors, needs)
        except (TraceError, ValueError, TypeError) as error:
            return str(error).splitlines()[0]


def eagerly(chain: Chain, tensors: Tensors) -> list[Any]:
    """Run a chain with PyTorch's own operations, updates included."""
    results = chain.eager(tensors)
    outputs, updates = results[: len(chain.outputs)], results[len(chain.outputs) :]
    with torch.no_grad():
        for (k, _), value in zip(chain.updates, updates, strict=True):
            tensors[k].copy_(value)
    return outputs


_UNFIT = (
    "Negative",
    "Conjugate",
    "Sparse",
    "Quantized",
    "ZeroTensor",
    "Nested",
    "Mkldnn",
    "Meta",
    "FuncTorch",
    "Python",
)


def _unfit(chain: Chain, tensors: Tensors) -> str:
    """Why these tensors cannot be given to an engine; empty if they can."""
    places = {t.device for t in tensors}
    if len(places) > 1:
        return f"its tensors are on different devices: {', '.join(sorted(map(str, places)))}"
    if places and next(iter(places)).type not in ("cpu", "cuda"):
        return f"its tensors are on the device {next(iter(places))}"
    for name, t in zip(chain.names, tensors, strict=True):
        keys = str(torch._C._dispatch_keys(t))
        if t.layout is not torch.strided or any(word in keys for word in _UNFIT):
            return f"{name} is not a plain strided tensor"
        if dtype_name(t.dtype) is None:
            return f"{name} is of dtype {t.dtype}"
    return ""


def _keeps(tensor: Any) -> bool:
    """Whether something may be prepared from a fixed input: whether its changes can be seen.

    Tensors made in inference mode count no versions. Numerical differentiation (`torch.autograd.gradcheck`) changes
    float64 tensors behind their backs.
    """
    return not tensor.is_inference() and not (tensor.dtype is torch.float64 and tensor.requires_grad)


class Entry:
    """A chain made ready for inputs of fixed shapes, dtypes and strides on one device.

    Parameters
    ----------
    chain : Chain
    options : Options
    tensors : sequence of Tensor
        Like those that it will be called with.
    needs : sequence of bool
        For each input, whether its gradient is wanted.
    """

    def __init__(self, chain: Chain, options: Options, tensors: Tensors, needs: Sequence[bool]):
        self.chain = chain
        metas = [(tuple(t.shape), str(dtype_name(t.dtype))) for t in tensors]
        self.precision = options.current_precision()
        self.settings = Settings(self.precision, device_of(tensors[0]), options.max_workspace, options.keep_halves)
        tracing = chain.trace(metas)
        self.backward = Backward(tracing, needs, self.settings) if any(needs) else None
        self.differentiated = self.backward is not None and any(self.backward.differentiable)
        differentiable = self.backward.differentiable if self.backward is not None else []
        self.constant = [k for k, depends in enumerate(differentiable) if not depends]
        self.read_later = self.backward.inputs if self.backward is not None else []
        self._saved = len(self.backward.saved) if self.differentiated and self.backward else 0
        self._shapes = [v.shape for v in tracing.outputs]
        self._folded = [k for k, t in enumerate(tensors) if t.dim() > 2]
        matrices = self._matrices(tensors)
        traced = tracing.as_traced(self.backward.saved if self._saved and self.backward else ())
        versioned = frozenset(k for k in chain.fixed if _keeps(tensors[k]))
        with torch.no_grad():
            self.plan = build(traced, dict(enumerate(map(layout_of, matrices))), self.settings, versioned)
            self._prepare: Callable[..., Any] | None = None
            self._needed: list[int] = []
            if self.plan.prepare is not None:
                self._needed = [int(n.attrs["arg"]) for n in self.plan.prepare.graph.inputs]
                self._prepare = ready(self.plan.prepare, [matrices[k] for k in self._needed])
                self._prepared = _Prepared(self._run_prepare(matrices), tensors[0])
            arrays = [*matrices, *self._prepared.arrays] if self._prepare else matrices
            self._execute = ready(self.plan, arrays)
        self._none = [None] * len(self.plan.outputs)
        self._views = [
            tuple(shape) if tuple(shape) != output.shape else None
            for shape, output in zip(self._shapes, self.plan.outputs, strict=False)
        ]
        self._plain = not any(self._views)
        self.reshaped = not self._plain or not all(o.direct for o in self.plan.outputs)
        self._on_gpu = tensors[0].is_cuda
        # For each fixed input: its number, tensor, alias of its memory, dtype, requires_grad, version or -1 for any.
        self._marks: list[tuple[Any, ...]] = []

    def _matrices(self, tensors: Tensors) -> list[Any]:
        """The inputs with leading dimensions folded into rows."""
        matrices = list(tensors)
        for k in self._folded:
            t = matrices[k]
            matrices[k] = t.detach().reshape(t.shape[:-1].numel(), t.shape[-1])
        return matrices

    # Fixed inputs
    def is_for(self, tensors: Tensors) -> bool:
        """Whether the fixed inputs are those, unchanged, that the entry was last marked for."""
        for k, seen, alias, dtype, needs, version in self._marks:
            t = tensors[k]
            if (
                t is not seen
                or not t.is_set_to(alias)
                or t.dtype is not dtype
                or t.requires_grad is not needs
                or (version >= 0 and t._version != version)
            ):
                return False
        return True

    def mark(self, tensors: Tensors) -> None:
        """Take these fixed inputs, of the shapes that the entry is for; prepare anew what depends on them."""
        if self._marks and self.is_for(tensors):
            return
        if self._prepare is not None and self._marks:
            self._prepared.again(self._run_prepare, self._matrices(tensors))
        marks = []
        for k in sorted(self.chain.fixed):
            t = tensors[k]
            # An alias keeps the memory from being given to another tensor, at the same address, unnoticed.
            version = t._version if k in self._needed else -1
            marks.append((k, t, t.detach(), t.dtype, t.requires_grad, version))
        self._marks = marks

    def forget(self) -> None:
        """Have everything prepared anew at the next call."""
        self._marks = [(k, None, *rest) for k, _, *rest in self._marks]

    def release(self) -> None:
        """Let go of all memory that is held for fixed inputs."""
        self._marks = [(k, None, None, *rest) for k, _, _, *rest in self._marks]
        if self._prepare is not None:
            self._prepared.arrays = []

    def _run_prepare(self, matrices: Tensors, outs: Sequence[Any] | None = None) -> list[Any]:
        assert self._prepare is not None and self.plan.prepare is not None
        needed = [matrices[k] for k in self._needed]
        with torch.no_grad():
            return list(self._prepare(needed, outs or [None] * len(self.plan.prepare.outputs)))

    # Running
    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        """The outputs, part of PyTorch's autograd graph where gradients are wanted."""
        if self.differentiated:
            outputs: tuple[Any, ...] = _apply(self, *tensors)
            return outputs
        return self.run(tensors)[0]

    def run(self, tensors: Tensors) -> tuple[list[Any], list[Any]]:
        """Outputs, and what is saved for the backward pass."""
        matrices = tensors if not self._folded else self._matrices(tensors)
        if self._prepare is not None:
            prepared = self._prepared
            arrays = prepared.arrays
            if self._on_gpu:
                if _capturing():
                    # A replay has to see the weights of its own time.
                    arrays = self._run_prepare(matrices)
                else:
                    prepared.enter_stream()
            matrices = [*matrices, *arrays]
        results = self._execute(matrices, self._none)
        if self._saved:
            results, saved = results[: -self._saved], results[-self._saved :]
        else:
            saved = []
        if not self._plain:
            for k, shape in enumerate(self._views):
                if shape is not None:
                    results[k] = results[k].reshape(shape)
        return results, saved


def _capturing() -> bool:
    return bool(torch._C._cuda_isCurrentStreamCapturing())


class _Prepared:
    """Arrays prepared from fixed inputs, and the streams on which they are known to be there."""

    def __init__(self, arrays: list[Any], like: Any):
        self.arrays = arrays
        self._device = like.get_device()
        self._note()

    def _note(self) -> None:
        if self._device < 0:
            return
        self._stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._others: set[int] = set()
        self._event: Any = None
        if not torch.cuda.is_current_stream_capturing():
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def enter_stream(self) -> None:
        """Have the current stream wait for the arrays, if they were written on another."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream == self._stream or stream in self._others:
            return
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._event)
        for array in self.arrays:
            array.record_stream(current)
        self._others.add(stream)

    def again(self, run: Callable[..., list[Any]], matrices: Tensors) -> None:
        """Prepare once more: in place, unless another stream may still be reading."""
        here = self._device < 0 or torch._C._cuda_getCurrentRawStream(self._device) == self._stream
        if self.arrays and here and (self._device < 0 or not self._others):
            run(matrices, self.arrays)
        else:
            self.arrays = run(matrices)
        self._note()


def _owning(view: Any) -> Any:
    """The memory of a view as a tensor that is none."""
    return view.new_empty(0).set_(view)


class _Differentiable(torch.autograd.Function):
    """An entry as one node of PyTorch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Any) -> Any:
        outputs, saved = entry.run(tensors)
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if entry.reshaped:
            # A result that is a view could not be changed in place later on.
            outputs = [_owning(t) if t._is_view() else t for t in outputs]
        if entry.constant:
            ctx.mark_non_differentiable(*[outputs[k] for k in entry.constant])
        ctx.save_for_backward(*[tensors[k] for k in entry.read_later], *saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        backward = ctx.entry.backward
        run = backward.eagerly if torch.is_grad_enabled() else backward
        return None, *run(ctx.saved_tensors, cotangents, ctx.needs_input_grad[1:])


# `Function.apply` without its look for transforms of functions, which `elsewhere` has made.
_apply = super(torch.autograd.Function, _Differentiable).apply
