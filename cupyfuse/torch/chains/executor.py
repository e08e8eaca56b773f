"""A chain ready for inputs of one kind: plans, what is prepared from fixed inputs, a node in the graph of autograd."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...plan.build import build
from ...settings import DEFAULT_WORKSPACE, Settings
from .backward import Backward
from .chain import Chain
from .options import matmul_precision
from .prepacked import Budget, capturing_now, preparing
from .runtime import device_of, dtype_name, layout_of, ready
from .tensors import as_matrix, owning
from .weight_changes import NEVER, Count, gradients_of, steps

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
    frozen : bool
        The user's promise that parameters and buffers change in no way that leaves their versions as they are: what is
        prepared from them is kept, on the CPU too, and not checked on a GPU.
    only_gains : bool
        Whether chains that the cost model expects to lose are left to PyTorch.
    max_prepared : int or None
        Bytes of what may be kept of weights from call to call; None for a share of the free memory.
    """

    precision: str | None = None
    max_workspace: int = DEFAULT_WORKSPACE
    keep_halves: bool = True
    frozen: bool = False
    only_gains: bool = True
    max_prepared: int | None = None

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


class _Made:
    """What entries of equal chains share: for the layers of a model that are alike, one plan and one executable.

    Attributes
    ----------
    backward : Backward or None
    plan : Plan
    execute : callable or None
        The plan made ready, once somebody has.
    saves : how many of the plan's results are for the backward pass
    shapes : those of the others
    """

    def __init__(
        self,
        chain: Chain,
        tensors: Tensors,
        matrices: Tensors,
        needs: Sequence[bool],
        settings: Settings,
        kept: frozenset[int],
    ):
        tracing = chain.trace([(tuple(t.shape), str(dtype_name(t.dtype))) for t in tensors])
        self.backward = Backward(tracing, needs, settings) if any(needs) else None
        differentiated = self.backward is not None and any(self.backward.differentiable)
        self.saves = len(self.backward.saved) if differentiated and self.backward else 0
        self.shapes = [v.shape for v in tracing.outputs]
        traced = tracing.as_traced(self.backward.saved if self.saves and self.backward else ())
        self.plan = build(traced, dict(enumerate(map(layout_of, matrices))), settings, kept)
        self.execute: Any = None


_MOST_MADE = 256
_made: dict[Any, _Made] = {}
_planning = threading.RLock()


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
    budget : Budget, optional
        Of the memory for what is prepared from weights.
    """

    def __init__(
        self,
        chain: Chain,
        options: Options,
        tensors: Tensors,
        needs: Sequence[bool],
        budget: Budget | None = None,
    ):
        self.chain = chain
        self.precision = options.current_precision()
        self.settings = Settings(self.precision, device_of(tensors[0]), options.max_workspace, options.keep_halves)
        self._folded = [k for k, t in enumerate(tensors) if t.dim() > 2]
        matrices = self._matrices(tensors)
        kept = frozenset(k for k in chain.fixed if options.frozen or _keeps(tensors[k]))
        layout = tuple((tuple(t.shape), t.stride(), str(dtype_name(t.dtype))) for t in tensors)
        place = tensors[0].get_device(), torch.get_default_dtype()
        question = (chain, layout, tuple(needs), self.settings, kept, *place)
        with torch.no_grad(), _planning:
            made = _made.get(question)
            if made is None:
                while len(_made) >= _MOST_MADE:
                    del _made[next(iter(_made))]
                made = _made[question] = _Made(chain, tensors, matrices, needs, self.settings, kept)
            self.backward, self.plan, self._execute = made.backward, made.plan, made.execute
            self._prepared = None
            if self.plan.prepare is not None:
                self._prepared = preparing(self.plan.prepare, matrices, options.frozen, budget)
                self.plan.prepare_note = self._prepared.when
            if self._execute is None:
                arrays = matrices if self._prepared is None else [*matrices, *self._prepared.anew(matrices)]
                self._execute = made.execute = ready(self.plan, arrays)
        self.differentiated = self.backward is not None and any(self.backward.differentiable)
        differentiable = self.backward.differentiable if self.backward is not None else []
        self.constant = [k for k, depends in enumerate(differentiable) if not depends]
        self.read_later = self.backward.inputs if self.backward is not None else []
        self.beneath = self.backward.beneath if self.backward is not None else []
        self.saves = made.saves
        self._shapes = made.shapes
        self._none = [None] * len(self.plan.outputs)
        self._views = [
            tuple(shape) if tuple(shape) != output.shape else None
            for shape, output in zip(self._shapes, self.plan.outputs, strict=False)
        ]
        self._plain = not any(self._views)
        self.reshaped = not self._plain or not all(o.direct for o in self.plan.outputs)
        # For each fixed input: its number, tensor, alias of its memory, dtype, requires_grad, version or -1 for any,
        # the count of its gradients, and what that was.
        self._marks: list[tuple[Any, ...]] = []
        needed = self._prepared.needed if self._prepared is not None else []
        self._needed = sorted(needed)
        # Changes of these inputs are also told from optimizers' steps and from gradients.
        self._trained = [] if options.frozen else [k for k in self._needed if tensors[k].requires_grad]
        self._owners: list[tuple[int, Any]] = []  # the inputs that are prepared from, as they were marked
        self.gradients: list[tuple[int, Count]] = []  # of `_trained`
        self._steps = 0
        self._lock = threading.RLock()

    def _matrices(self, tensors: Tensors) -> list[Any]:
        """The inputs with leading dimensions folded into rows."""
        matrices = list(tensors)
        for k in self._folded:
            matrices[k] = as_matrix(matrices[k])
        return matrices

    # Fixed inputs
    def is_for(self, tensors: Tensors) -> bool:
        """Whether the fixed inputs are those that the entry was last marked for, with no sign of a change."""
        if self._trained and self._steps != steps.value:
            return False
        # Written out, because every call asks.
        for k, seen, alias, dtype, needs, version, gradients, count in self._marks:
            t = tensors[k]
            if (
                t is not seen
                or not t.is_set_to(alias)
                or t.dtype is not dtype
                or t.requires_grad is not needs
                or (version >= 0 and t._version != version)
                or gradients.value != count
            ):
                return False
        return True

    def mark(self, tensors: Tensors) -> None:
        """Take these fixed inputs, of the shapes that the entry is for; prepare anew what depends on them."""
        if self._marks and self.is_for(tensors):
            return
        with self._lock:
            prepared = self._prepared
            if prepared is not None:
                others = any(
                    tensors[k] is not seen or not tensors[k].is_set_to(alias)
                    for k, seen, alias, *_ in self._marks
                    if k in self._needed
                )
                if others and tensors[0].is_cuda and capturing_now():
                    # Their memory may be the graph's own, and gone with it: `run` keeps nothing.
                    self._unmark()
                    return
                if self._marks:
                    prepared.changed(others)
            marks = []
            self._steps = steps.value
            self.gradients = [(k, gradients_of(tensors[k])) for k in self._trained]
            counts = dict(self.gradients)
            for k in sorted(self.chain.fixed):
                t, count = tensors[k], counts.get(k, NEVER)
                # An alias keeps the memory from being given to another tensor, at the same address, unnoticed.
                version = t._version if k in self._needed and not t.is_inference() else -1
                marks.append((k, t, t.detach(), t.dtype, t.requires_grad, version, count, count.value))
            self._owners = [(k, tensors[k]) for k in self._needed]
            self._marks = marks

    def forget(self) -> None:
        """Have everything prepared anew at the next call, and the next replay of a graph."""
        with self._lock:
            self._marks = [(k, seen, alias, None, *rest) for k, seen, alias, _, *rest in self._marks]
            if self._prepared is not None:
                self._prepared.refresh()

    def release(self) -> None:
        """Let go of all memory that is held for fixed inputs."""
        with self._lock:
            self._unmark()
            if self._prepared is not None:
                self._prepared.release()

    def _unmark(self) -> None:
        self._marks = [(k, None, None, *rest) for k, _, _, *rest in self._marks]
        self._owners = [(k, None) for k in self._needed]

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
        if prepared is None:
            results = self._execute(matrices, self._none)
        else:
            # Between the check of other inputs and the launches that read what is prepared, nobody else prepares.
            with self._lock:
                marked = all(tensors[k] is owner for k, owner in self._owners)
                arrays = prepared(matrices, tensors) if marked else prepared.anew(matrices)
                results = self._execute([*matrices, *arrays], self._none)
        if self.saves:
            results, saved = results[: -self.saves], results[-self.saves :]
        else:
            saved = []
        if not self._plain:
            for k, shape in enumerate(self._views):
                if shape is not None:
                    results[k] = results[k].reshape(shape)
        return results, saved


class _Differentiable(torch.autograd.Function):
    """An entry as one node of PyTorch's autograd graph."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, *tensors: Any) -> Any:
        outputs, saved = entry.run(tensors)
        ctx.entry, ctx.gradients = entry, entry.gradients
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
        for k, count in ctx.gradients:
            if grads[k] is not None:
                count.value += 1
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
