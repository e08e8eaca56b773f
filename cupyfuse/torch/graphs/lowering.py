"""Lower fused chains into a captured graph: replace the operations of each by one call, and reorder the rest.

A `Lowering` makes the call: `Direct` of the chain's runner, for graphs that run as they are; `AsOperator` of
`cupyfuse::chain`, for graphs that a compiler takes further.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...errors import TraceError
from ..chains import custom_op
from ..chains.chain import metas_of
from ..chains.options import Options
from ..chains.prepacked import Budget
from ..chains.runner import Runner
from ..chains.runtime import device_of
from .captured import storage_of
from .importer import ImportedGraph
from .inplace import restore_in_place
from .partition import FusedChain, Partition

Add = Callable[..., Node]


class Direct:
    """Call the runner of each chain: an autograd node of its own, with prepacked weights and plans by shape.

    Attributes
    ----------
    runners : list of Runner
        Those of all chains so far.
    differentiates : bool
        Whether the call is differentiated by itself, and saves what its backward pass needs.
    """

    differentiates = True

    def __init__(self, options: Options):
        self.options = options
        self.budget = Budget(options.max_prepared)
        self.runners: list[Runner] = []

    def call(self, add: Add, fused: FusedChain, nodes: Sequence[Node], tensors: Sequence[Any], _: str) -> list[Node]:
        """Add the call by `add(target, arguments, example)`; return a node for each output of the chain."""
        runner = Runner(fused.chain, self.options, self.budget)
        self.runners.append(runner)
        result = add(runner.as_function(), (*nodes, *fused.sizes))
        count = len(fused.outputs)
        outputs = [result] if count == 1 else [add(operator.getitem, (result, k)) for k in range(count)]
        traced = fused.with_hints().trace(metas_of(tensors)).outputs
        # A transposed result is a view of the computed one.
        return [
            output if value.tracer._axes.labels == (0, 1) else add("contiguous", (output,))
            for output, value in zip(outputs, traced, strict=True)
        ]


class AsOperator:
    """Call the operator `cupyfuse::chain`, which autograd and compilers know."""

    differentiates = False

    def __init__(self, options: Options):
        self.options = options

    def call(
        self, add: Add, fused: FusedChain, nodes: Sequence[Node], tensors: Sequence[Any], saved: str
    ) -> list[Node]:
        """Add the call, which saves `saved` (see `custom_op.saves`); return a node for each output of the chain."""
        chain = fused.chain
        text, sizes = chain.to_json(), [n.meta["example_value"] for n in fused.sizes]
        mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        with mode or nullcontext():
            results = custom_op.fake(list(tensors), sizes, text, saved)
        options = custom_op.options_text(self.options)
        target = torch.ops.cupyfuse.chain.default
        call = add(target, (list(nodes), list(fused.sizes), text, saved, options), results)
        outputs = [add(operator.getitem, (call, k), results[k]) for k in range(len(fused.outputs))]
        for k, (number, _) in enumerate(chain.updates, len(outputs)):
            add("copy_", (nodes[number], add(operator.getitem, (call, k), results[k])))
        return outputs


Lowering = Direct | AsOperator


def lower(imported: ImportedGraph, partition: Partition, lowering: Lowering) -> None:
    """Replace the chains of a graph by calls, and put everything into the order of the partition."""
    _Lowerer(imported, lowering).run(partition)


class _Lowerer:
    def __init__(self, imported: ImportedGraph, lowering: Lowering):
        self.imported = imported
        self.graph: Graph = imported.graph
        self.captured = imported.captured
        self.lowering = lowering

    def run(self, partition: Partition) -> None:
        inserted: set[Node] = set()
        order = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        written = [(k, self._storages(o.written)) for k, o in enumerate(self.captured.operations) if o.written]
        for item in partition.items:
            if not isinstance(item, FusedChain):
                order += self.imported.nodes_of(item)
                continue
            begun, own = item.members[0], set(item.members)
            changed = {s for k, storages in written if k > begun and k not in own for s in storages}
            calls = self._replace(item, changed)
            order += calls
            inserted.update(calls)
            if not calls:
                partition.left.update(dict.fromkeys(item.members, "its results cannot be given PyTorch's strides"))
            # Views of results run again after the call, where the partition has them.
            order += [n for k in item.members if not calls or k not in item.views for n in self.imported.nodes_of(k)]
        remaining = set(self.graph.nodes)
        last: Node | None = None
        for node in dict.fromkeys(n for n in order if n in remaining):
            if last is not None:
                last.append(node)
            last = node
        restore_in_place(self.graph, inserted)

    def _storages(self, numbers: Iterable[int]) -> set[int]:
        return {storage_of(self.captured.tensors[n]) for n in numbers}

    def _replace(self, fused: FusedChain, changed: set[int]) -> list[Node]:
        """Replace a chain's operations by a call and getters of its results; return these, or none where it fails.

        `changed` are the memories that other operations change in place after the chain has begun.
        """
        tensors = [self.captured.tensors[n] for n in fused.inputs]
        examples = [self.captured.tensors[n] for n in fused.outputs]
        orders = [_order_in_memory(t) for t in examples]
        if None in orders:
            return []
        saved = self._saved(fused, tensors, any(t.requires_grad for t in examples), changed)
        if saved is None:
            return []
        new: list[Node] = []

        def add(target: Any, arguments: tuple[Any, ...], example: Any = None) -> Node:
            make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            with self.graph.inserting_after(new[-1] if new else self.imported.operators[fused.members[-1]]):
                new.append(make(target, arguments))
            if example is not None:
                new[-1].meta["example_value"] = example
            return new[-1]

        nodes = [self.imported.nodes[n] for n in fused.inputs]
        results = self.lowering.call(add, fused, nodes, tensors, saved)
        for number, result, order, example in zip(fused.outputs, results, orders, examples, strict=True):
            last = result
            if order:
                # PyTorch's result has its dimensions in another order in memory.
                add("permute", (last, order))
                add("contiguous", (new[-1],))
                last = add("permute", (new[-1], [order.index(k) for k in range(len(order))]))
            if any(t.requires_grad for t in tensors) and not example.requires_grad:
                # For autograd every result of the call depends on all of its operands.
                last = add("detach", (last,))
            last.meta["example_value"] = example
            self.imported.nodes[number].replace_all_uses_with(last, delete_user_cb=lambda user: user not in new)
            self.imported.nodes[number] = last
        for member in reversed(fused.members):
            for node in reversed(self.imported.nodes_of(member)):
                if not node.users:
                    self.graph.erase_node(node)
        return new

    def _saved(self, fused: FusedChain, tensors: Sequence[Any], grad: bool, changed: set[int]) -> str | None:
        """Choose what is saved for the backward pass, as text; None where others would change what that reads."""
        needs = [grad and bool(t.requires_grad) for t in tensors]
        if not any(needs) or (self.lowering.differentiates and not changed):
            return "[]"
        chain = fused.with_hints()
        try:
            settings = self.lowering.options.settings_on(device_of(tensors[0]))
            saved = custom_op.saves(chain, tensors, needs, settings)
        except TraceError:
            return None
        later = custom_op.backward_inputs(chain.to_json(), saved, tensors, needs)
        return None if changed & {storage_of(tensors[k]) for k in later} else saved


def _order_in_memory(tensor: Any) -> list[int] | None:
    """Order a dense tensor's dimensions by stride, outermost first; [] for C order, None for gaps or overlaps."""
    strides = [int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in tensor.stride()]
    order = sorted(range(tensor.dim()), key=lambda k: -strides[k])
    # Sizes may be symbolic: an order holds if each stride is provably the product of the sizes inside of it.
    for found in (list(range(tensor.dim())), order):
        expected: Any = 1
        for k in reversed(found):
            size, stride = tensor.shape[k], tensor.stride(k)
            if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
                break
            expected = expected * size
        else:
            return [] if found is not order or found == list(range(tensor.dim())) else found
    return None
