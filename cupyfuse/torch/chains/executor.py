"""The executor of a chain for one signature: a compiled chain, its prepacked weights, its node in autograd's graph."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from . import autograd
from .chain import Chain, metas_of
from .compiled import CompiledChain
from .matching import matcher
from .options import Options
from .prepacked import Budget, begin_prepacking, weight_cache
from .runtime import device_at, is_capturing
from .tensors import Tensors, layout_without_memory, without_memory
from .weight_changes import FixedInputs

_MAX_COMPILED = 256
# Compiled chains by signature: layers of a model that are alike share one.
_compiled: dict[Any, CompiledChain] = {}
_compiling = threading.RLock()


class Executor:
    """A chain for inputs of fixed shapes, dtypes and strides on one device.

    Parameters
    ----------
    tensors : inputs like those that it will be called with
    needs : for each input, whether its gradient is wanted
    budget : limits the cache of prepacked weights

    Attributes
    ----------
    prepacks : whether weights are prepacked, and the inputs that they depend on kept
    """

    def __init__(self, chain: Chain, options: Options, tensors: Tensors, needs: Sequence[bool], budget: Budget):
        self.chain = chain
        with torch.no_grad(), _compiling:
            compiled = _begin(chain, options, tensors, tensors, needs)
            self._compiled, self.plan = compiled, compiled.plan
            matrices = compiled.matrices(tensors)
            self._weights = None
            self.backward = compiled.backward(needs) if any(needs) else None
            if self.plan.prepare is not None:
                self._weights = weight_cache(self.plan.prepare, matrices, options.frozen, budget)
                self.plan.prepare_note = self._weights.when
            if not compiled.is_loaded:
                compiled.load([*matrices, *(self._weights.compute(matrices) if self._weights is not None else ())])
        self.returns_views = compiled.returns_views
        self._differentiable = self.backward is not None and any(self.backward.differentiable)
        self._outputs = len(chain.outputs)
        # Runs the plan on the inputs as they are, where nothing is prepacked; it returns the saved values, too.
        is_direct = self._weights is None and compiled.takes_tensors
        self._execute = (getattr(compiled.execute, "quick", None) or compiled.execute) if is_direct else None
        needed = sorted(self._weights.needed) if self._weights is not None else []
        # Recorded weights are told by identity.
        self._apart = frozenset() if self.backward is None else self.backward.unreached.difference(needed)
        trained = [] if options.frozen else [k for k in needed if tensors[k].requires_grad]
        fixed = sorted(chain.fixed)
        self.prepacks = self._weights is not None
        # Whether `bind` has nothing to do. Where nothing is prepacked, no fixed inputs are kept, and any like these do.
        self._inputs = FixedInputs(fixed if self.prepacks else [], needed, trained)
        self.is_current = self._inputs.unchanged if self.prepacks else matcher(tensors, fixed, fixed=fixed)
        self._lock = threading.RLock()

    @property
    def gradients(self) -> Any:
        """The inputs whose gradients are counted, with their counters."""
        return self._inputs.gradients

    @property
    def has_products(self) -> bool:
        """Whether the plan depends on the precision of products."""
        return self._compiled.has_products

    def bind(self, tensors: Tensors) -> None:
        """Record the fixed inputs of a call; weights prepacked from others, or before a change, become invalid."""
        if self._weights is None or (self._inputs.recorded and self.is_current(tensors)):
            return
        with self._lock:
            if self._inputs.recorded:
                replaced = self._inputs.replaced(tensors)
                if replaced and tensors[0].is_cuda and is_capturing():
                    # Their memory may be the graph's own, and gone with it: `run` caches nothing.
                    self._inputs.forget()
                    return
                self._weights.invalidate(replaced)
            self._inputs.record(tensors)

    def bind_changed(self, tensors: Tensors) -> bool:
        """Record that the recorded tensors have new values; False, and nothing is done, for others, which need `bind`.

        Weights change between most calls of training: these need no key of all inputs. Another thread that finds the
        tensors current waits in `run` until the weights are invalid.
        """
        with self._lock:
            found = self._inputs.recorded and self._inputs.record_changes(tensors)
            if found and self._weights is not None:
                self._weights.invalidate(replaced=False)
        return found

    def refresh(self) -> None:
        """Have the next call, and the next replay of each graph, prepack all weights."""
        with self._lock:
            self._inputs.expire()
            if self._weights is not None:
                self._weights.refresh()

    def release(self) -> None:
        """Free the prepacked weights, and drop references to the tensors that they were computed from."""
        with self._lock:
            self._inputs.forget()
            if self._weights is not None:
                self._weights.release()

    def __call__(self, tensors: Tensors) -> Sequence[Any]:
        """Return the outputs, part of autograd's graph where gradients are wanted."""
        if self._differentiable:
            if self._apart:
                # Autograd would call what comes before them, and custom functions there make zeros of no gradient.
                tensors = [t.detach() if k in self._apart else t for k, t in enumerate(tensors)]
            return autograd.apply(self, tensors)
        return self._execute(tensors) if self._execute is not None else self.run(tensors)[0]

    def run(self, tensors: Tensors) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and what is saved for the backward pass."""
        if self._execute is not None:
            results = self._execute(tensors)
        elif self._weights is None:
            results = self._compiled(self._compiled.arguments(tensors))
        else:
            arguments = self._compiled.arguments(tensors)
            # Until the launches that read the prepacked weights are enqueued, no other thread may prepack.
            with self._lock:
                cached = self._inputs.same_tensors(tensors)
                weights = self._weights(arguments, tensors) if cached else self._weights.compute(arguments)
                results = self._compiled([*arguments, *weights])
        return results[: self._outputs], results[self._outputs :]


def begin(chain: Chain, options: Options, tensors: Tensors, needs: Sequence[bool]) -> None:
    """Plan the first call of a chain, and begin to compile its kernels, in other threads.

    Parameters
    ----------
    tensors : inputs like those of the call; they may be fake
    needs : for each input, whether its gradient is wanted
    """
    with torch.no_grad(), _compiling:
        _begin(chain, options, tensors, [layout_without_memory(t) for t in tensors], needs)


def _begin(chain: Chain, options: Options, tensors: Tensors, layouts: Tensors, needs: Sequence[bool]) -> CompiledChain:
    """Find the compiled chain for inputs like these, or make it: all its kernels compile at once, of both passes.

    `layouts` are the inputs, or tensors of the device "meta" with their shapes, dtypes and strides.
    """
    device = tensors[0].device
    settings = options.settings_on(device_at(device))
    prepacked = frozenset(k for k in chain.fixed if options.frozen or _is_cacheable(tensors[k]))
    metas = metas_of(layouts)
    signature = tuple((meta, t.stride()) for meta, t in zip(metas, layouts, strict=True))
    checked = not options.frozen
    key = (chain, signature, tuple(needs), settings, prepacked, checked, device, torch.get_default_dtype())
    compiled = _compiled.get(key)
    if compiled is not None:
        return compiled
    compiled = CompiledChain(chain.trace(metas), layouts, settings, needs, prepacked=prepacked, checked=checked)
    plan = compiled.plan
    while len(_compiled) >= _MAX_COMPILED:
        del _compiled[next(iter(_compiled))]
    _compiled[key] = compiled  # only once there is a plan
    matrices = compiled.matrices(layouts)
    weights: list[Any] = []
    if plan.prepare is not None:
        weights = [without_memory(o.shape, o.dtype) for o in plan.prepare.outputs]
        begin_prepacking(plan.prepare, matrices, device, options.frozen)
    compiled.prepare([*matrices, *weights], device)
    if any(needs):
        compiled.backward(needs).prepare(layouts, device, needs)
    return compiled


def _is_cacheable(tensor: Any) -> bool:
    """Whether weights prepacked from a fixed input may be cached.

    Nothing detects changes on the CPU; tensors of inference mode count no versions; numerical differentiation
    (`torch.autograd.gradcheck`) changes single elements of float64 tensors unseen; parameters flattened by
    FullyShardedDataParallel live for one call.
    """
    return (
        tensor.is_cuda
        and not tensor.is_inference()
        and not (tensor.dtype is torch.float64 and tensor.requires_grad)
        and not getattr(tensor, "_fsdp_flattened", False)
    )
