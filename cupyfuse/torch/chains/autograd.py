"""The autograd function that makes an executor one node of PyTorch's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .chain import Chain
from .tensors import Tensors, as_base
from .uncaptured import uncaptured

# Saves one tensor, with the hooks of `torch.autograd.graph.saved_tensors_hooks`; None in PyTorch 2.11.
_save = getattr(torch._C._autograd, "_make_saved_tensor", None)
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class _ChainFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, executor: Any, *tensors: Any) -> Any:
        backward, given = executor.backward, tensors
        if backward.may_be_overwritten:
            tensors = backward.before_updates(given)  # what is saved; the chain runs on the originals
        outputs, others = executor.run(given)
        ctx.set_materialize_grads(False)
        if executor.returns_views:
            outputs = [as_base(t) for t in outputs]
        saved = backward.saved(outputs, others)
        if backward.constants:
            ctx.mark_non_differentiable(*[outputs[k] for k in backward.constants])
        numbers = backward.second_order_inputs
        # Without `_save` these are saved like all others: changing one is an error in the backward pass.
        together = [k for k in numbers if _save is None and not tensors[k].is_leaf]
        apart = _SecondOrder([k for k in numbers if k not in together], tensors) if numbers else None
        ctx.call = executor, executor.gradients, together, apart
        kept = [tensors[k] for k in backward.inputs]
        if executor.chain.copied or True in [t.is_inference() for t in kept]:
            kept = [executor.chain.saved_input(k, tensors[k]) for k in backward.inputs]
        ctx.save_for_backward(*kept, *saved, *[tensors[k] for k in together])
        return tuple(outputs)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *cotangents: Any) -> Any:
        executor, gradients, together, second_order = ctx.call
        backward, wanted = executor.backward, ctx.needs_input_grad[1:]
        kept, others = ctx.saved_tensors, ()
        if together:
            kept, others = kept[: -len(together)], kept[-len(together) :]
        if torch.is_grad_enabled() or not backward.takes(cotangents):
            inputs = {**dict(zip(backward.inputs, kept, strict=False)), **dict(zip(together, others, strict=True))}
            if second_order is not None:
                inputs |= second_order.unpack(executor.chain)
            grads = backward.eager_gradients(inputs, cotangents, wanted)
        else:
            grads = backward(kept, cotangents, wanted)
        if second_order is not None and not _keeps_graph():
            second_order.release()
        for k, counter in gradients:
            if grads[k] is not None:
                counter.value += 1
        for k, (grad, want) in enumerate(zip(grads, wanted, strict=True)):
            if want and grad is None:
                # PyTorch shows None to a leaf's hooks, which expect a tensor.
                leaf = getattr(ctx.next_functions[k][0], "variable", None)
                if leaf is not None and leaf._backward_hooks:
                    grads[k] = torch.zeros_like(leaf)
        return None, *grads


class _SecondOrder:
    """The inputs that only derivatives of the gradients read.

    They are not among `ctx.saved_tensors`: as in PyTorch's own graph, changing one is an error only once second
    derivatives are computed.
    """

    __slots__ = ("_leaves", "_others")

    def __init__(self, numbers: Sequence[int], tensors: Tensors):
        self._leaves: list[tuple[int, Any, int]] = []
        self._others: list[tuple[int, Any]] = []
        for k in numbers:
            t = tensors[k]
            if t.is_leaf:
                self._leaves.append((k, t, -1 if t.is_inference() else t._version))
            else:
                assert _save is not None
                self._others.append((k, _save(t, False)))

    def unpack(self, chain: Chain) -> dict[int, Any]:
        """Return them by number; raise the error that PyTorch has for changed ones."""
        for k, t, version in self._leaves:
            if version >= 0 and t._version != version:
                raise RuntimeError(
                    f"{chain.names[k]}, which derivatives of the gradient depend on, has been modified by an "
                    f"inplace operation: it is at version {t._version}; expected version {version}"
                )
        return {**{k: t for k, t, _ in self._leaves}, **{k: saved.unpack() for k, saved in self._others}}

    def release(self) -> None:
        """Free what no parameter or argument keeps, as PyTorch does with saved tensors."""
        self._others = []


# `Function.apply` without its check for function transforms: `eligibility.is_intercepted` has made it.
_apply = super(torch.autograd.Function, _ChainFunction).apply


def apply(executor: Any, tensors: Tensors) -> tuple[Any, ...]:
    """Run an executor as one node of autograd's graph."""
    outputs: tuple[Any, ...] = _apply(executor, *tensors)
    return outputs
