"""Chains as operators of PyTorch's, for compiled graphs to call.

`cupyfuse::chain` takes the chain as text, so that a graph which holds it can be stored and run by another process. It
returns the chain's outputs, the new values of its updates, and the values that its backward pass reads.

It is composite: tracing for a compiled graph goes through it and records `cupyfuse::chain_forward` and
`cupyfuse::chain_backward`, which have no autograd formula. PyTorch's dispatcher reaches these in 3 us; an operator with
an autograd formula takes 14, with or without gradients. Compiled chains are cached, prepacked weights are not: the
compiler owns the memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from ... import __version__
from ...errors import TraceError
from ...ir.graph import Node
from ...settings import Settings
from ...trace.saved import stored
from ..rules.symbols import references
from .backward import Backward
from .chain import Chain, TracedChain, metas_of
from .compiled import CompiledChain
from .eligibility import is_recording
from .options import Options
from .runtime import device_at
from .saving import SavedValues, saved_operand, unit_gradients
from .tensors import Tensors, as_base, concrete_sizes, layout_without_memory
from .uncaptured import uncaptured

_LIBRARY = torch.library.Library("cupyfuse", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_CONTIGUOUS = torch.contiguous_format
_DEFAULT_DTYPE = "default_dtype"
for _name in ("chain", "chain_forward"):
    _LIBRARY.define(
        f"{_name}(Tensor[] inputs, SymInt[] sizes, str chain, str saved, str options) -> Tensor[]", tags=_TAGS
    )
_LIBRARY.define(
    "chain_backward(Tensor[] inputs, Tensor[] saved, Tensor?[] gradients, SymInt[] sizes, str chain, str saves, "
    "bool[] needs, str options) -> Tensor[]",
    tags=_TAGS,
)


def options_text(options: Options) -> str:
    """Write options as the operators take them, with what compilers' caches then depend on, too.

    That is the version, and the dtype to which PyTorch converts integers, by which a chain's dtypes differ.
    """
    surroundings = {"version": __version__, _DEFAULT_DTYPE: str(torch.get_default_dtype())}
    return json.dumps({**surroundings, **asdict(options)}, sort_keys=True)


@lru_cache(maxsize=256)
def parse_options(text: str) -> Options:
    """Read options that `options_text` wrote."""
    options = json.loads(text)
    for name in ("version", _DEFAULT_DTYPE):
        options.pop(name, None)
    return Options(**options)


@lru_cache(maxsize=256)
def _default_dtype(options: str) -> str:
    """Return the default dtype of the graph that options are of."""
    return str(json.loads(options).get(_DEFAULT_DTYPE, torch.get_default_dtype()))


_MAX_COMPILED = 1024
_DEFAULT = Settings()
_compiled: dict[Hashable, CompiledChain] = {}
_backwards: dict[Hashable, Backward] = {}


def _compile(
    tensors: Tensors, sizes: Sequence[int], chain: str, saved: str, options: str, device: torch.device | None = None
) -> CompiledChain:
    """Return the compiled chain for an operator's arguments, from a cache; `device` is theirs, if not the tensors'."""
    chosen = parse_options(options)
    signature = tuple((t.shape, t.stride(), t.dtype, device or t.device) for t in tensors)
    sizes = tuple(sizes or ())  # some compilers pass None for none
    key = (chain, saved, options, chosen.current_precision(), sizes, signature)
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        traced = _trace(chain, sizes, metas_of(tensors), _default_dtype(options))
        settings = chosen.settings_on(device_at(device or tensors[0].device))
        compiled = CompiledChain(traced, tensors, settings, saving=_parse_saved(traced, saved), in_place=False)
        _compiled[key] = compiled
    return compiled


def _find_backward(
    tensors: Tensors,
    sizes: Sequence[int],
    chain: str,
    saved: str,
    options: str,
    needs: Sequence[bool],
    device: torch.device | None = None,
) -> Backward:
    """Return the backward pass for an operator's arguments, from a cache, whatever the strides of the inputs."""
    chosen = parse_options(options)
    signature = tuple((t.shape, t.dtype) for t in tensors)
    sizes, place = tuple(sizes or ()), device or tensors[0].device
    key = (chain, saved, options, chosen.current_precision(), sizes, signature, tuple(needs), place)
    backward = _backwards.get(key)
    if backward is None:
        if len(_backwards) >= _MAX_COMPILED:
            _backwards.clear()
        traced = _trace(chain, sizes, metas_of(tensors), _default_dtype(options))
        settings, saving = chosen.settings_on(device_at(place)), _parse_saved(traced, saved)
        backward = _backwards[key] = Backward(traced, needs, settings, saving, distinct=True)
    return backward


@lru_cache(maxsize=_MAX_COMPILED)
def _trace(chain: str, sizes: tuple[int, ...], metas: Any, default_dtype: str) -> TracedChain:
    """Trace a chain given as text, first while PyTorch's default dtype is this."""
    return Chain.from_json(chain).with_sizes(sizes).trace(metas)


def _parse_saved(traced: TracedChain, saved: str) -> SavedValues:
    """Find the nodes that a text of `describe_saved` names: gradients of inputs, or values of the forward pass."""
    found = json.loads(saved)
    wanted = {number for index, number, *_ in found if index < 0}
    if wanted:
        gradients = unit_gradients(traced, [k in wanted for k in range(len(traced.inputs))])
        return SavedValues([gradients[number] for _, number, *_ in found], gradients)
    computed = traced.computed()
    nodes = [computed[index][1] for index, *_ in found]
    operands = [n for n, (*_, is_operand) in zip(nodes, found, strict=True) if is_operand]
    return SavedValues(nodes, operands={n: saved_operand(n) for n in operands})


def prepare(
    tensors: Tensors, sizes: Sequence[Any], chain: str, saved: str, options: str, needs: Sequence[bool]
) -> None:
    """Plan the operator's first call with such arguments, and begin to compile its kernels, in other threads.

    The tensors may be fake. With `needs`, the inputs whose gradients are wanted, this includes the backward pass.
    """
    device = tensors[0].device
    metas = [layout_without_memory(t) for t in tensors]
    with torch.no_grad():
        compiled = _compile(metas, concrete_sizes(sizes), chain, saved, options, device)
        compiled.prepare(compiled.matrices(metas), device)
        if any(needs):
            backward = _find_backward(metas, concrete_sizes(sizes), chain, saved, options, needs, device)
            backward.prepare(metas, device, needs)


# Saved values -------------------------------------------------------------------------------------------------------


def describe_saved(chain: Chain, tensors: Tensors, needs: Sequence[bool], settings: Settings = _DEFAULT) -> str:
    """Describe the values that the forward pass saves, for tensors like these, as the text that the operators take.

    Each has an index in `TracedChain.computed` (-1 for the gradient of an input), the number of a value of the chain,
    the index in `_SAVED_SHAPES` of its shape beside that value's, so that its shape follows from symbolic sizes, its
    dtype, and whether products alone read it (`SavedValues.operands`).

    Raises
    ------
    TraceError
        The shape of a saved value does not follow from those of the chain's values.
    """
    return _describe_saved(chain, metas_of(tensors), tuple(needs), settings, torch.get_default_dtype())


@lru_cache(maxsize=_MAX_COMPILED)
def _describe_saved(
    chain: Chain, metas: Any, needs: tuple[bool, ...], settings: Settings, default_dtype: torch.dtype
) -> str:
    traced = chain.trace(metas)
    saving = Backward(traced, needs, settings).saving
    # The index of each saved value, its node, and the values of the chain that its shape may follow from.
    entries: list[tuple[int, Node, list[int]]] = []
    if saving.gradients:
        entries = [(-1, node, [k]) for k, node in saving.gradients.items()]
    else:
        wanted = set(saving.nodes)
        for index, (k, node) in enumerate(traced.computed()):
            if node in wanted:
                call = chain.calls[k]
                entries.append((index, node, [*(n for n in call.results if n >= 0), *references(call.arguments)]))
        if len(entries) < len(wanted):
            raise TraceError("what the backward pass saves is no product and no reduction")
    found = []
    for index, node, near in entries:
        forms = [(n, i) for n in near for i, of in enumerate(_SAVED_SHAPES) if of(traced.values[n].shape) == node.shape]
        if not forms:
            raise TraceError(f"what the backward pass saves is of shape {node.shape}, unlike its operands")
        found.append([index, *forms[0], stored(node).dtype, node in saving.operands])
    return json.dumps(found)


def backward_inputs(chain: str, saved: str, tensors: Tensors, needs: Sequence[bool]) -> tuple[int, ...]:
    """Return the inputs, by number, that the backward pass reads beside saved values."""
    return tuple(_backward_pass(chain, saved, metas_of(tensors), tuple(needs), str(torch.get_default_dtype())).inputs)


@lru_cache(maxsize=_MAX_COMPILED)
def _backward_pass(chain: str, saved: str, metas: Any, needs: tuple[bool, ...], default_dtype: str) -> Backward:
    """Return the backward pass of a chain given as text, to ask what it reads and which gradients it has."""
    traced = _trace(chain, (), metas, default_dtype)
    return Backward(traced, needs, Settings(), _parse_saved(traced, saved))


def _columns(shape: Sequence[Any]) -> Any:
    return shape[-1] if len(shape) else 1


# Shapes that a saved value may have, given that of a value of the chain; lengths may be symbols.
_SAVED_SHAPES: tuple[Callable[[Sequence[Any]], tuple[Any, Any]], ...] = (
    lambda shape: (math.prod(shape[:-1]), _columns(shape)),
    lambda shape: (1, _columns(shape)),
    lambda shape: (math.prod(shape[:-1]), 1),
    lambda shape: (math.prod(shape), 1),
)


def _empty_saved(values: dict[int, Any], saved: str) -> list[Any]:
    """Allocate tensors for the saved values, given the values of the chain by number."""
    results = []
    for _, number, form, dtype, _ in json.loads(saved):
        shape = _SAVED_SHAPES[form](values[number].shape)
        results.append(values[number].new_empty(shape, dtype=getattr(torch, dtype)))
    return results


# The operators ------------------------------------------------------------------------------------------------------


def _forward(inputs: list[Any], sizes: list[int], chain: str, saved: str, options: str) -> list[Any]:
    with torch.no_grad():
        compiled = _compile(inputs, sizes, chain, saved, options)
        return [as_base(t.contiguous()) for t in compiled(compiled.arguments(inputs))]


def fake_forward(inputs: list[Any], sizes: Sequence[Any], chain: str, saved: str, options: str = "") -> list[Any]:
    """Return the results of `cupyfuse::chain` for fake tensors."""
    filled = Chain.from_json(chain).with_sizes(tuple(sizes))
    # Hooks of saved tensors, as those of checkpoints, are not for these; and sizes may be symbols.
    with torch.no_grad(), _above_autograd(), enable_python_dispatcher():
        values = filled.values(inputs)
        numbers = (*filled.outputs, *(number for _, number in filled.updates))
        fresh = [torch.empty_like(values[n], memory_format=_CONTIGUOUS) for n in numbers]
        return [*fresh, *_empty_saved(values, saved)]


def _above_autograd() -> Any:
    """Return a context in which operations reach autograd first, which takes composite ones apart, also beneath it.

    There PyTorch 2.13 takes `nll_loss(..., reduction="none")` of rows in a symbolic number for a scalar.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.AutogradFunctionality):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _backward(
    inputs: Any, saved: Any, gradients: Any, sizes: Any, chain: str, saves: str, needs: list[bool], options: str
) -> list[Any]:
    with torch.no_grad():
        backward = _find_backward(inputs, sizes, chain, saves, options, needs)
        found = backward([*(inputs[k] for k in backward.inputs), *saved], gradients, tuple(needs))
    wanted = [(t, like) for t, like, need in zip(found, inputs, needs, strict=True) if need]
    return [torch.zeros_like(like, memory_format=_CONTIGUOUS) if t is None else t for t, like in wanted]


def _fake_backward(
    inputs: Any, saved: Any, gradients: Any, sizes: Any, chain: str, saves: str, needs: list[bool], options: str
) -> list[Any]:
    return [torch.empty_like(t, memory_format=_CONTIGUOUS) for t, need in zip(inputs, needs, strict=True) if need]


def _without_memory(tensor: Any) -> Any:
    """Return a tensor of the same shape and dtype whose elements are all the same one in memory."""
    return tensor.detach().new_empty(()).expand(tensor.shape)


_DIFFERENTIABLE_ONCE = (
    b"cupyfuse::chain can be differentiated once; modules made by cupyfuse.torch.fuse can be differentiated twice"
)


class _ChainOperator(torch.autograd.Function):
    """The operators as one node of autograd's graph; `saves` says what the backward pass reads."""

    @staticmethod
    def forward(ctx: Any, sizes: Any, text: str, saves: str, options: str, *tensors: Any) -> Any:
        results = torch.ops.cupyfuse.chain_forward(list(tensors), sizes, text, saves, options)
        chain = Chain.from_json(text)
        ctx.text, ctx.sizes, ctx.saves, ctx.options = text, sizes, saves, options
        ctx.outputs = len(chain.outputs)
        ctx.mark_non_differentiable(*results[ctx.outputs :])
        ctx.set_materialize_grads(False)
        concrete = chain.with_sizes(concrete_sizes(sizes)).to_json()
        needs = tuple(ctx.needs_input_grad[4:])
        ctx.backward_pass = _backward_pass(concrete, saves, metas_of(tensors), needs, _default_dtype(options))
        read = ctx.backward_pass.inputs
        # Of the others only shape and dtype are kept: their memory may be freed or overwritten.
        kept = [chain.saved_input(k, t) if k in read else _without_memory(t) for k, t in enumerate(tensors)]
        ctx.save_for_backward(*kept, *results[len(results) - len(json.loads(saves)) :])
        return tuple(results)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Any) -> Any:
        needs = ctx.needs_input_grad[4:]
        kept = ctx.saved_tensors  # checkpointing allows one read
        inputs, saved = list(kept[: len(needs)]), list(kept[len(needs) :])
        given = [None if g is None else g.contiguous() for g in gradients[: ctx.outputs]]
        arguments = (inputs, saved, given, ctx.sizes, ctx.text, ctx.saves, list(needs), ctx.options)
        with torch.no_grad():
            results = torch.ops.cupyfuse.chain_backward(*arguments)
        if torch.is_grad_enabled():
            # To autograd the gradients are constants: asking for second derivatives has to be an error, not zero.
            results = torch._C._functions.DelayedError(_DIFFERENTIABLE_ONCE, len(results))(
                *(t.requires_grad_() for t in results)
            )
        found = iter(results if isinstance(results, (list, tuple)) else (results,))
        wanted = [next(found) if need else None for need in needs]
        # None, not zero, where nothing depends on an input: optimizers leave such parameters as they are.
        known = ctx.backward_pass.inputs_with_gradients([g is not None for g in given], needs)
        return None, None, None, None, *(t if k in known else None for k, t in enumerate(wanted))


def _differentiable(inputs: list[Any], sizes: list[Any], chain: str, saved: str, options: str) -> list[Any]:
    if is_recording() and any(t.requires_grad for t in inputs):
        return list(_ChainOperator.apply(sizes, chain, saved, options, *inputs))
    results: list[Any] = torch.ops.cupyfuse.chain_forward(inputs, sizes, chain, saved, options)
    return results


_LIBRARY.impl("chain", _differentiable, "CompositeImplicitAutograd")
for _name, _implementation in (("chain_forward", _forward), ("chain_backward", _backward)):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _implementation, _key)
torch.library.register_fake("cupyfuse::chain_forward", fake_forward, lib=_LIBRARY)
torch.library.register_fake("cupyfuse::chain_backward", _fake_backward, lib=_LIBRARY)
