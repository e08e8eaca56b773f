"""The operator that runs one process's part of a graph in compiled code: `cupyfuse::shard`.

It takes the graph as text, so that a compiled graph which holds it can be stored and run by another process. Between
its calls, states are exchanged by PyTorch's own collective operators, which compilers know.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch

from ...errors import TraceError, first_line
from ...ir.flat import flatten, unflatten
from ...ir.graph import Graph, Node
from ..chains.chain import Chain
from ..chains.custom_op import options_text, parse_options
from ..chains.eligibility import is_recording
from ..chains.options import Options
from ..chains.runtime import device_of
from ..chains.tensors import as_base
from .executor import ShardedExecutor
from .leaf import Leaf
from .program import Local

_LIBRARY = torch.library.Library("cupyfuse", "FRAGMENT")
_LIBRARY.define(
    "shard(Tensor[] operands, str graph, str name, str options) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_FIELDS = [f for f in fields(Node) if f.name != "inputs"]
_OPTIONAL = {f.name: f.default for f in _FIELDS if f.name not in ("op", "shape", "dtype")}


def to_text(graph: Graph) -> str:
    """Write a graph as text, which `from_text` reads."""
    nodes, inputs, outputs = flatten(graph)
    found = []
    for node, operands in nodes:
        values = {f.name: getattr(node, f.name) for f in _FIELDS}
        found.append([{k: v for k, v in values.items() if not _same(v, _OPTIONAL.get(k))}, operands])
    return json.dumps([found, inputs, outputs])


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and repr(value) == repr(default)


@lru_cache(maxsize=1024)
def from_text(text: str) -> Graph:
    """Read a graph that `to_text` wrote."""
    listed, inputs, outputs = json.loads(text)
    nodes = []
    for values, operands in listed:
        for name in ("shape", "dims"):
            if name in values:
                values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in values[name])
        nodes.append((Node(inputs=(), **values), operands))
    return unflatten(nodes, inputs, outputs)


class OperatorLeaf(Leaf):
    """A graph of matrices that compiled code runs, as a call of `cupyfuse::shard`."""

    def __init__(self, name: str, graph: Graph, options: Options):
        super().__init__(name, graph, options.settings_on(None))
        self._text = "" if self._traced is None else to_text(self._traced.graph)
        self._name, self._options = name, options_text(options)

    def _run(self, operands: list[Any]) -> list[Any]:
        results: list[Any] = torch.ops.cupyfuse.shard(operands, self._text, self._name, self._options)
        return results


@lru_cache(maxsize=1024)
def _leaf(text: str, name: str, options: str, precision: str, index: int) -> Leaf:
    """Return what runs a graph given as text, from a cache; settings depend on the `precision` of products."""
    place = torch.empty(0, device=torch.device("cuda", index) if index >= 0 else "cpu")
    return Leaf(name, from_text(text), parse_options(options).settings_on(device_of(place)))


def _shard(operands: list[Any], graph: str, name: str, options: str) -> list[Any]:
    leaf = _leaf(graph, name, options, parse_options(options).current_precision(), operands[0].get_device())
    return [as_base(t.contiguous()) for t in leaf(operands)]


def _fake_shard(operands: list[Any], graph: str, name: str, options: str) -> list[Any]:
    return [operands[0].new_empty(n.shape, dtype=getattr(torch, n.dtype)) for n in from_text(graph).outputs]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("shard", _shard, _key)
torch.library.register_fake("cupyfuse::shard", _fake_shard, lib=_LIBRARY)


def as_function(chain: Chain, options: Options) -> Callable[..., Any]:
    """Return a function of a chain's inputs and sizes for a compiler to trace; it returns a list of the outputs."""
    count = len(chain.names)

    def sharded_chain(*arguments: Any) -> Sequence[Any]:
        filled = chain.with_sizes(tuple(int(n) for n in arguments[count:]))
        tensors = arguments[:count]
        for t in tensors:
            tuple(map(int, t.shape))  # symbolic sizes become numbers: shards have widths
        grad = is_recording()
        local = Local(lambda name, graph: OperatorLeaf(name, graph, options), options.max_workspace, False)
        try:
            executor = ShardedExecutor(filled, options, tensors, [grad and t.requires_grad for t in tensors], local)
        except (TraceError, ValueError, TypeError) as error:
            reason = first_line(error)
            warnings.warn(f"cupyfuse left {chain.name} on DTensors to PyTorch: {reason}", RuntimeWarning, stacklevel=2)
            return filled.eager(tensors)
        return list(executor(tensors))

    return sharded_chain
