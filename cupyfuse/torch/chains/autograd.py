"""The autograd function that makes an executor one node of PyTorch's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .chain import Chain
from .tensors import Tensors, as_base
from .uncaptured import uncaptured


class _ChainFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, executor: Any, *tensors: Any) -> Any:
        outputs, saved = executor.run(tensors)
        backward, inputs, leaves = executor.backward, executor.backward.inputs, []
        ctx.set_materialize_grads(False)
        if executor.returns_views:
            outputs = [as_base(t) for t in outputs]
        if backward.constants:
            ctx.mark_non_differentiable(*[outputs[k] for k in backward.constants])
        if backward.second_order_inputs:
            # Leaves that only second derivatives read are not saved: as in PyTorch's own graph, changing one is an
            # error only once second derivatives are computed.
            second_order = [(k, tensors[k]) for k in backward.second_order_inputs]
            leaves = [(k, t, -1 if t.is_inference() else t._version) for k, t in second_order if t.is_leaf]
            inputs = [*inputs, *(k for k, t in second_order if not t.is_leaf)]
        ctx.call = executor, executor.gradients, inputs, leaves
        if executor.chain.copied:
            ctx.save_for_backward(*[executor.chain.saved_input(k, tensors[k]) for k in inputs], *saved)
        else:
            ctx.save_for_backward(*[tensors[k] for k in inputs], *saved)
        return tuple(outputs)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *cotangents: Any) -> Any:
        executor, gradients, numbers, leaves = ctx.call
        backward, wanted = executor.backward, ctx.needs_input_grad[1:]
        kept = ctx.saved_tensors
        inputs, saved = kept[: len(numbers)], kept[len(numbers) :]
        if torch.is_grad_enabled() or not backward.takes(cotangents):
            tensors = {**dict(zip(numbers, inputs, strict=True)), **_unmodified(leaves, executor.chain)}
            grads = backward.eager_gradients(tensors, cotangents, wanted)
        else:
            grads = backward([*inputs[: len(backward.inputs)], *saved], cotangents, wanted)
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


def _unmodified(leaves: Sequence[tuple[int, Any, int]], chain: Chain) -> dict[int, Any]:
    """Return the leaves that second derivatives read, by input; raise the error that PyTorch has for changed ones."""
    for k, t, version in leaves:
        if version >= 0 and t._version != version:
            raise RuntimeError(
                f"{chain.names[k]}, which derivatives of the gradient depend on, has been modified by an "
                f"inplace operation: it is at version {t._version}; expected version {version}"
            )
    return {k: t for k, t, _ in leaves}


# `Function.apply` without its check for function transforms: `eligibility.is_intercepted` has made it.
_apply = super(torch.autograd.Function, _ChainFunction).apply


def apply(executor: Any, tensors: Tensors) -> tuple[Any, ...]:
    """Run an executor as one node of autograd's graph."""
    outputs: tuple[Any, ...] = _apply(executor, *tensors)
    return outputs
