"""Chains as operators of PyTorch's: what a compiled graph calls.

`cupyfuse::chain` takes the chain as text, so that a graph which holds it can be stored and run by another process. It
returns the chain's outputs, the new values of its updates, and what its backward pass, `cupyfuse::chain_backward`, is
to find saved. Nothing is kept from call to call but plans: memory of a compiled graph is the compiler's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import torch

from ...errors import TraceError
from ...ir.graph import Node
from ...plan.build import build
from ...settings import Settings
from ...trace.autodiff import stored
from ..rules.symbols import references
from .backward import Backward
from .chain import Chain, Tracing, sizes
from .runner import Options
from .runtime import device_of, dtype_name, layout_of, ready
from .tensors import as_matrix, owning

_LIBRARY = torch.library.Library("cupyfuse", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_CONTIGUOUS = torch.contiguous_format
_LIBRARY.define(
    "chain(Tensor[] inputs, SymInt[] sizes, str chain, str saved, str options) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    "chain_backward(Tensor[] inputs, Tensor[] saved, Tensor?[] gradients, SymInt[] sizes, str chain, str saves, "
    "bool[] needs, str options) -> Tensor[]",
    tags=_TAGS,
)


def options_text(options: Options) -> str:
    """Options as operators take them."""
    return json.dumps(asdict(options), sort_keys=True)


@lru_cache(maxsize=256)
def _options(text: str) -> Options:
    return Options(**json.loads(text))


class Call:
    """What runs for one chain and inputs of fixed shapes, dtypes and strides."""

    def __init__(self, chain: Chain, saves: Sequence[Sequence[int]], options: Options, tensors: Sequence[Any]):
        self.chain = chain
        device = device_of(tensors[0])
        self.settings = Settings(options.current_precision(), device, options.max_workspace, options.keep_halves)
        self.tracing = _traced(chain, tensors)
        self.saved = _saved_nodes(chain, self.tracing, saves)
        self._layouts = dict(enumerate(map(layout_of, map(as_matrix, tensors))))
        self._execute: Any = None
        self._shapes = [v.shape for v in self.tracing.outputs] + [
            self.tracing.inputs[k].shape for k, _ in self.tracing.updated()
        ]
        self._backward: dict[tuple[bool, ...], Backward] = {}

    def __call__(self, tensors: Sequence[Any]) -> list[Any]:
        matrices = list(map(as_matrix, tensors))
        if self._execute is None:  # a backward pass may ask for no more than its own
            traced = self.tracing.as_traced(self.saved, in_place=False)
            self._plan = build(traced, self._layouts, self.settings)
            self._execute = ready(self._plan, matrices)
        results = self._execute(matrices, [None] * len(self._plan.outputs))
        for k, shape in enumerate(self._shapes):
            results[k] = results[k].reshape(shape)
        return [owning(t.contiguous()) for t in results]

    def backward(self, needs: Sequence[bool]) -> Backward:
        key = tuple(needs)
        if key not in self._backward:
            self._backward[key] = Backward(self.tracing, key, self.settings, self.saved)
        return self._backward[key]


def _saved_nodes(chain: Chain, tracing: Tracing, saves: Sequence[Sequence[int]]) -> list[Node]:
    marks = chain.landmarks(tracing)
    return [marks[place][1] for place, *_ in saves]


def _traced(chain: Chain, tensors: Sequence[Any]) -> Tracing:
    return chain.trace([(sizes(t), str(dtype_name(t.dtype))) for t in tensors])


_MOST_CALLS = 1024
_calls: dict[Hashable, Call] = {}


def _ready_call(tensors: Sequence[Any], sizes: Sequence[int], chain: str, saved: str, options: str) -> Call:
    chosen = _options(options)
    kinds = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    key = (chain, saved, options, chosen.current_precision(), tuple(sizes), kinds)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MOST_CALLS:
            _calls.clear()
        described = Chain.from_json(chain).with_sizes(tuple(sizes))
        call = _calls[key] = Call(described, json.loads(saved), chosen, tensors)
    return call


# What is saved ------------------------------------------------------------------------------------------------------


def saves(chain: Chain, tensors: Sequence[Any], needs: Sequence[bool]) -> str:
    """What the backward pass wants saved of tensors like these, as text.

    For each, its place among the chain's landmarks, a value of the chain, what its shape is beside that value's
    (`_SHAPES`), and its dtype: enough to tell its shape where lengths are symbols.

    Raises
    ------
    TraceError
        Shapes of saved values do not follow from those of the chain's values.
    """
    tracing = _traced(chain, tensors)
    wanted = Backward(tracing, needs, Settings()).saved
    marks = chain.landmarks(tracing)
    if not set(wanted) <= {node for _, node in marks}:
        raise TraceError("what the backward pass saves is no product and no reduction")
    found = []
    for place, (call, node) in enumerate(marks):
        if node not in wanted:
            continue
        near = [*(n for n in chain.calls[call].results if n >= 0), *references(chain.calls[call].arguments)]
        alike = [(n, k) for n in near for k, of in enumerate(_SHAPES) if of(tracing.values[n].shape) == node.shape]
        if not alike:
            raise TraceError(f"what {chain.calls[call].rule} saves is of shape {node.shape}, unlike its operands")
        found.append([place, *alike[0], stored(node).dtype])
    return json.dumps(found)


def read_later(chain: str, saved: str, tensors: Sequence[Any], needs: Sequence[bool]) -> tuple[int, ...]:
    """The inputs, by number, that the backward pass reads beside what is saved."""
    kinds = tuple((sizes(t), str(dtype_name(t.dtype))) for t in tensors)
    return _read_later(chain, saved, kinds, tuple(needs))


@lru_cache(maxsize=_MOST_CALLS)
def _read_later(chain: str, saved: str, kinds: Any, needs: tuple[bool, ...]) -> tuple[int, ...]:
    described = Chain.from_json(chain)
    tracing = described.trace(list(kinds))
    return tuple(Backward(tracing, needs, Settings(), _saved_nodes(described, tracing, json.loads(saved))).inputs)


def _columns(shape: Sequence[Any]) -> Any:
    return shape[-1] if len(shape) else 1


# Shapes of a saved value, given that of another one; lengths may be symbols.
_SHAPES: tuple[Callable[[Sequence[Any]], tuple[Any, Any]], ...] = (
    lambda shape: (math.prod(shape[:-1]), _columns(shape)),
    lambda shape: (1, _columns(shape)),
    lambda shape: (math.prod(shape[:-1]), 1),
    lambda shape: (math.prod(shape), 1),
)


def _saved_like(values: dict[int, Any], saved: str) -> list[Any]:
    results = []
    for _, number, kind, dtype in json.loads(saved):
        shape = _SHAPES[kind](values[number].shape)
        results.append(values[number].new_empty(shape, dtype=getattr(torch, dtype)))
    return results


# The operators ------------------------------------------------------------------------------------------------------


def _run(inputs: list[Any], sizes: list[int], chain: str, saved: str, options: str) -> list[Any]:
    with torch.no_grad():
        return _ready_call(inputs, sizes, chain, saved, options)(inputs)


def fake(inputs: list[Any], sizes: Sequence[Any], chain: str, saved: str, options: str = "") -> list[Any]:
    """Tensors without data in the places of the results of `cupyfuse::chain`."""
    described = Chain.from_json(chain).filled(sizes)
    values = described.values(inputs)
    numbers = (*described.outputs, *(number for _, number in described.updates))
    fresh = [torch.empty_like(values[n], memory_format=_CONTIGUOUS) for n in numbers]
    return [*fresh, *_saved_like(values, saved)]


def _run_backward(
    inputs: list[Any],
    saved: list[Any],
    gradients: list[Any],
    sizes: list[int],
    chain: str,
    saves: str,
    needs: list[bool],
    options: str,
) -> list[Any]:
    with torch.no_grad():
        backward = _ready_call(inputs, sizes, chain, saves, options).backward(needs)
        found = backward([*(inputs[k] for k in backward.inputs), *saved], gradients, needs)
    wanted = [(t, like) for t, like, need in zip(found, inputs, needs, strict=True) if need]
    return [torch.zeros_like(like, memory_format=_CONTIGUOUS) if t is None else t for t, like in wanted]


def _fake_backward(
    inputs: list[Any], saved: Any, gradients: Any, sizes: Any, chain: Any, saves: Any, needs: list[bool], options: Any
) -> Any:
    return [torch.empty_like(t, memory_format=_CONTIGUOUS) for t, need in zip(inputs, needs, strict=True) if need]


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, sizes, text, ctx.saves, ctx.options = inputs
    ctx.text, ctx.sizes, ctx.count = text, list(sizes), len(tensors)
    chain = Chain.from_json(text)
    ctx.outputs = len(chain.outputs)
    ctx.mark_non_differentiable(*output[ctx.outputs :])
    ctx.set_materialize_grads(False)
    described = chain.with_sizes(_plain_sizes(sizes)).to_json()
    later = read_later(described, ctx.saves, tensors, _needs(ctx, tensors))
    # Of the others, only what kind of tensors they are: their memory may be given back or overwritten.
    kept = [t if k in later else t.detach().new_empty(()).expand(t.shape) for k, t in enumerate(tensors)]
    ctx.save_for_backward(*kept, *output[len(output) - len(json.loads(ctx.saves)) :])


def _needs(ctx: Any, tensors: Sequence[Any]) -> list[bool]:
    """For each of the inputs, whether its gradient is wanted."""
    needs = ctx.needs_input_grad[0]
    return list(needs) if isinstance(needs, (list, tuple)) else [t.requires_grad for t in tensors]


def _plain_sizes(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Sizes as numbers; symbols as what they stand for at the moment."""
    return tuple(int(n.node.hint) if isinstance(n, torch.SymInt) else int(n) for n in sizes)


def _differentiate(ctx: Any, gradients: list[Any]) -> Any:
    tensors = ctx.saved_tensors
    inputs, saved = list(tensors[: ctx.count]), list(tensors[ctx.count :])
    needs = _needs(ctx, inputs)
    given = [None if g is None else g.contiguous() for g in gradients[: ctx.outputs]]
    arguments = (inputs, saved, given, ctx.sizes, ctx.text, ctx.saves, needs, ctx.options)
    found = iter(torch.ops.cupyfuse.chain_backward(*arguments))
    # A list of numbers counts as one argument, an empty one as a list of tensors.
    return [next(found) if need else None for need in needs], None if ctx.sizes else [], None, None, None


_LIBRARY.impl("chain", _run, "CPU")
_LIBRARY.impl("chain", _run, "CUDA")
_LIBRARY.impl("chain_backward", _run_backward, "CPU")
_LIBRARY.impl("chain_backward", _run_backward, "CUDA")
torch.library.register_fake("cupyfuse::chain", fake, lib=_LIBRARY)
torch.library.register_fake("cupyfuse::chain_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("cupyfuse::chain", _differentiate, setup_context=_set_up, lib=_LIBRARY)
