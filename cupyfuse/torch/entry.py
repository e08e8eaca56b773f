"""A chain ready for inputs of one kind: plans, what is prepared from fixed inputs, a node in the graph of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..planning import build
from ..settings import DEFAULT_WORKSPACE, Settings
from .chain import Chain
from .differentiate import Backward
from .modes import matmul_precision
from .prepared import Prepared
from .runtime import device_of, dtype_name, layout_of, ready
from .tensors import as_matrix, owning

Tensors = Sequence[Any]

# Fixed inputs of calls that were captured in CUDA graphs: a replay may change them and counts no version.
_captured = WeakIdKeyDictionary()
_captures = 0  # how many were added to it


def _note_captured(tensors: Tensors) -> None:
    global _captures
    for t in tensors:
        if t not in _captured:
            _captured[t] = None
            _captures += 1


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
    frozen : bool
        The caller's promise that no weight changes.
    only_gains : bool
        Whether chains that the cost model expects to lose are left to PyTorch.
    """

    precision: str | None = None
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    frozen: bool = False
    only_gains: bool = True

    def current_precision(self) -> str:
        return self.precision or matmul_precision()


def _keeps(tensor: Any) -> bool:
    """Whether something that is prepared from a fixed input may be kept.

    On the CPU nothing tells of its changes. Tensors made in inference mode count no versions. Numerical differentiation
    (`torch.autograd.gradcheck`) changes single elements of float64 tensors behind their backs. Parameters that
    FullyShardedDataParallel flattens are there for the time of a call only; those of `fully_shard` look like any other,
    and are checked like any other.
    """
    return (
        tensor.is_cuda
        and not tensor.is_inference()
        and not (tensor.dtype is torch.float64 and tensor.requires_grad)
        and not getattr(tensor, "_fsdp_flattened", False)
    )


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
        self.beneath = self.backward.beneath if self.backward is not None else []
        self.saves = len(self.backward.saved) if self.differentiated and self.backward else 0
        self._shapes = [v.shape for v in tracing.outputs]
        self._folded = [k for k, t in enumerate(tensors) if t.dim() > 2]
        matrices = self._matrices(tensors)
        traced = tracing.as_traced(self.backward.saved if self.saves and self.backward else ())
        kept = frozenset(k for k in chain.fixed if options.frozen or _keeps(tensors[k]))
        with torch.no_grad():
            self.plan = build(traced, dict(enumerate(map(layout_of, matrices))), self.settings, kept)
            self._prepared = Prepared(self.plan.prepare, matrices) if self.plan.prepare is not None else None
            arrays = [*matrices, *self._prepared.arrays] if self._prepared is not None else matrices
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
        self._captures = _captures

    def _matrices(self, tensors: Tensors) -> list[Any]:
        """The inputs with leading dimensions folded into rows."""
        matrices = list(tensors)
        for k in self._folded:
            matrices[k] = as_matrix(matrices[k])
        return matrices

    # Fixed inputs
    def is_for(self, tensors: Tensors) -> bool:
        """Whether the fixed inputs are those, unchanged, that the entry was last marked for."""
        if self._captures != _captures:
            return False
        # Written out, because every call asks.
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

    def _changed(self, tensors: Tensors) -> set[int]:
        """The fixed inputs whose values may be others than those that the entry was last marked for."""
        if self._captures != _captures:
            return {k for k, *_ in self._marks}
        return {
            k
            for k, seen, alias, _, _, version in self._marks
            if tensors[k] is not seen
            or not tensors[k].is_set_to(alias)
            or (version >= 0 and tensors[k]._version != version)
        }

    def mark(self, tensors: Tensors) -> None:
        """Take these fixed inputs, of the shapes that the entry is for; prepare anew what depends on them."""
        if self._marks and self.is_for(tensors):
            return
        prepared = self._prepared
        if prepared is not None and self._on_gpu and _capturing():
            # Nothing that is prepared now is there before a replay; `run` prepares within the graph.
            self.forget()
            return
        if prepared is not None and self._marks:
            prepared.again(self._matrices(tensors), self._changed(tensors))
        marks = []
        for k in sorted(self.chain.fixed):
            t = tensors[k]
            # An alias keeps the memory from being given to another tensor, at the same address, unnoticed.
            version = t._version if prepared is not None and k in prepared.needed else -1
            replayed = version >= 0 and t in _captured
            marks.append((k, None if replayed else t, t.detach(), t.dtype, t.requires_grad, version))
        self._marks, self._captures = marks, _captures

    def forget(self) -> None:
        """Have everything prepared anew at the next call."""
        self._marks = [(k, None, *rest) for k, _, *rest in self._marks]

    def release(self) -> None:
        """Let go of all memory that is held for fixed inputs."""
        self._marks = [(k, None, None, *rest) for k, _, _, *rest in self._marks]
        if self._prepared is not None:
            self._prepared.release()

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
        prepared = self._prepared
        if prepared is not None:
            arrays = prepared.arrays
            if self._on_gpu:
                if _capturing():
                    # A replay has to see the weights of its own time.
                    _note_captured([tensors[k] for k in prepared.needed])
                    arrays = prepared.run(matrices)
                else:
                    prepared.enter_stream()
            matrices = [*matrices, *arrays]
        results = self._execute(matrices, self._none)
        if self.saves:
            results, saved = results[: -self.saves], results[-self.saves :]
        else:
            saved = []
        if not self._plain:
            for k, shape in enumerate(self._views):
                if shape is not None:
                    results[k] = results[k].reshape(shape)
        return results, saved


def _capturing() -> bool:
    return bool(torch._C._cuda_isCurrentStreamCapturing())


class _Differentiable(torch.autograd.Function):
    """An entry as one node of PyTorch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Any) -> Any:
        outputs, saved = entry.run(tensors)
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if entry.reshaped:
            outputs = [owning(t) for t in outputs]
        if entry.constant:
            ctx.mark_non_differentiable(*[outputs[k] for k in entry.constant])
        ctx.kept, later = [], []
        for k in entry.beneath:
            t = tensors[k]
            if t.is_leaf:
                # Only second derivatives read it: until they are asked for it may change, as it may in PyTorch's graph.
                ctx.kept.append((k, t, -1 if t.is_inference() else t._version))
            else:
                later.append(t)
        ctx.save_for_backward(*[tensors[k] for k in entry.read_later], *saved, *later)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        entry, saved, wanted = ctx.entry, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            grads = entry.backward.eagerly(_known(ctx, saved), cotangents, wanted)
        else:
            grads = entry.backward(saved[: len(entry.read_later) + entry.saves], cotangents, wanted)
        for k, (grad, want) in enumerate(zip(grads, wanted, strict=True)):
            if want and grad is None:
                # PyTorch shows None to a leaf's hooks, which expect a tensor.
                leaf = getattr(ctx.next_functions[k][0], "variable", None)
                if leaf is not None and leaf._backward_hooks:
                    grads[k] = torch.zeros_like(leaf)
        return None, *grads


def _known(ctx: Any, saved: Tensors) -> dict[int, Any]:
    """The inputs that a backward pass, or a derivative of it, depends on."""
    known = dict(zip(ctx.entry.read_later, saved, strict=False))
    for k, t, version in ctx.kept:
        if version >= 0 and t._version != version:
            raise RuntimeError(
                f"{ctx.entry.chain.names[k]}, which derivatives of the gradient depend on, has been modified by an "
                f"inplace operation: it is at version {t._version}; expected version {version}"
            )
        known[k] = t
    kept = {k for k, *_ in ctx.kept}
    later = [k for k in ctx.entry.beneath if k not in kept]
    known.update(zip(later, saved[len(saved) - len(later) :], strict=True))
    return known


# `Function.apply` without its look for transforms of functions, which `elsewhere` has made.
_apply = super(torch.autograd.Function, _Differentiable).apply
