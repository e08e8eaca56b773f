"""Lower fused chains into a captured graph: replace the operations of each by one call, and reorder the rest.

A `CallMaker` makes the call: `Direct` of the chain's runner, for graphs that run as they are; `AsOperator` of
`cupyfuse::chain`, for graphs that a compiler takes further.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from ...errors import TraceError
from ..chains import custom_op, executor
from ..chains.chain import Chain, metas_of
from ..chains.eligibility import is_sharded
from ..chains.options import Options
from ..chains.prepacked import Budget
from ..chains.runner import Activity, Runner
from ..chains.runtime import device_of
from ..rules.shapes import DATA_GETTERS
from .captured import order_in_memory, storage_of
from .importer import ImportedGraph
from .inplace import SWITCHES, restore_in_place
from .partition import FusedChain, Partition
from .written_memory import written_storages

AddNode = Callable[..., Node]


class Direct:
    """Call the runner of each chain: an autograd node of its own, with prepacked weights and plans by shape.

    Attributes
    ----------
    runners : list of Runner
        Those of all chains so far.
    activity : Activity
        Counts their calls.
    differentiates : bool
        Whether the call is differentiated by itself, and saves what its backward pass needs.
    """

    differentiates = True

    def __init__(self, options: Options):
        self.options = options
        self.budget = Budget(options.max_prepared)
        self.runners: list[Runner] = []
        self.activity = Activity()

    def make_call(
        self, add: AddNode, fused: FusedChain, nodes: Sequence[Node], tensors: Sequence[Any], _: str, needs: list[bool]
    ) -> list[Node]:
        """Add the call by `add(target, arguments, example)`; return a node for each output of the chain.

        `needs` says for each input whether its gradient is wanted.
        """
        runner = Runner(fused.chain, self.options, self.budget, self.activity)
        runner.saved = fused.saved
        self.runners.append(runner)
        result = add(runner.as_function(), (*nodes, *fused.sizes))
        count = len(fused.outputs)
        outputs = [result] if count == 1 else [add(operator.getitem, (result, k)) for k in range(count)]
        chain = fused.with_hints()
        if not any(map(is_sharded, tensors)):
            with suppress(Exception):  # the call plans again, and leaves the chain to PyTorch if that fails
                executor.begin(chain, self.options, tensors, needs)
        traced = chain.trace(metas_of(tensors)).outputs
        # A transposed result is a view of the computed one.
        return [
            output if value.tracer._axes.in_order else add("contiguous", (output,))
            for output, value in zip(outputs, traced, strict=True)
        ]


class AsOperator:
    """Call the operator `cupyfuse::chain`, which autograd and compilers know."""

    differentiates = False

    def __init__(self, options: Options):
        self.options = options

    def make_call(
        self,
        add: AddNode,
        fused: FusedChain,
        nodes: Sequence[Node],
        tensors: Sequence[Any],
        saved: str,
        needs: list[bool],
    ) -> list[Node]:
        """Add the call, which saves `saved` (see `describe_saved`); return a node for each output of the chain.

        The compiler takes the graph further while the kernels of the first call compile.
        """
        chain = fused.chain
        if any(map(is_sharded, tensors)):
            from ..sharded.operator import as_function  # DTensor's import takes a while

            call = add(as_function(chain, self.options), (*nodes, *fused.sizes))
            return [add(operator.getitem, (call, k)) for k in range(len(fused.outputs))]
        text, sizes = chain.to_json(), [n.meta["example_value"] for n in fused.sizes]
        mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        with mode or nullcontext():
            results = custom_op.fake_forward(list(tensors), sizes, text, saved)
        options = custom_op.options_text(self.options)
        with suppress(Exception):  # that the call raises, if it meets it too: it may run later, or elsewhere
            custom_op.prepare(tensors, sizes, text, saved, options, needs)
        target = torch.ops.cupyfuse.chain.default
        call = add(target, (list(nodes), list(fused.sizes), text, saved, options), results)
        outputs = [add(operator.getitem, (call, k), results[k]) for k in range(len(fused.outputs))]
        for k, (number, _) in enumerate(chain.updates, len(outputs)):
            add("copy_", (nodes[number], add(operator.getitem, (call, k), results[k])))
        return outputs


CallMaker = Direct | AsOperator


def lower(imported: ImportedGraph, partition: Partition, call_maker: CallMaker) -> None:
    """Replace the chains of a graph by calls, and put everything into the order of the partition."""
    _Lowerer(imported, call_maker).run(partition)


class _Prepared(NamedTuple):
    """What the call of a chain depends on, beside the chain.

    Attributes
    ----------
    orders : the order of each output's dimensions in memory
    saved : the values saved for the backward pass, as text
    needs : for each input, whether its gradient is wanted
    """

    orders: list[list[int]]
    saved: str
    needs: list[bool]


class _Lowerer:
    """The state of `lower` for one graph."""

    def __init__(self, imported: ImportedGraph, call_maker: CallMaker):
        self.imported = imported
        self.graph: Graph = imported.graph
        self.captured = imported.captured
        self.call_maker = call_maker
        # By number, a value that PyTorch keeps in another order in memory, in C order for the calls that read it: the
        # result of a call as it is, or a copy of an input.
        self._in_c_order: dict[int, Node] = {}
        self._copied: set[int] = set()  # those that were copied
        # For each of these results the nodes that copy it into PyTorch's order, for all other readers; the last first.
        self._laid_out: list[tuple[Node, ...]] = []
        # What is changed in place is not read from a copy, nor from before the copy.
        self._written = written_storages(self.captured)
        computed = [self.captured.tensors[n] for o in self.captured.operations for n in o.results]
        # What may be written to through `x.data`, of which PyTorch's version counters do not know.
        data = [n for o in self.captured.operations if o.target in DATA_GETTERS for n in o.results]
        self._read_as_data = {storage_of(self.captured.tensors[n]) for n in data}
        # Under `no_grad`, fake views of parameters have gradients, though PyTorch's have none.
        given = {storage_of(self.captured.tensors[n]) for n in self.captured.inputs}
        recorded = any(t.requires_grad and storage_of(t) not in given for t in computed)
        self._records_gradients = torch.is_grad_enabled() or recorded

    def run(self, partition: Partition) -> None:
        """Replace each chain by a call; those that cannot be replaced become operations left to PyTorch."""
        inserted: set[Node] = set()
        order = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        items: list[FusedChain | int] = []
        for position, item in enumerate(partition.items):
            if not isinstance(item, FusedChain):
                order += self._nodes_of(item)
                items.append(item)
                if self.captured.operations[item].target in SWITCHES:
                    # A copy has a gradient, and is of inference mode, as the operations next to it.
                    for number in self._copied:
                        del self._in_c_order[number]
                    self._copied.clear()
                continue
            # Views of results are items of their own: they run again after the call, as do those whose chain stays. Of
            # the others only nodes that something else reads are left, which follow the call.
            computed = [k for k in item.members if k not in item.views]
            try:
                prepared = self._prepare(item, self._changed_by(partition.items[position + 1 :]))
            except TraceError as reason:
                partition.unfused.update(dict.fromkeys(item.members, str(reason)))
                order += self._nodes_of(*item.members)
                items += computed
                continue
            calls = self._replace(item, prepared)
            inserted.update(calls)
            order += [*calls, *self._nodes_of(*computed)]
            items.append(item)
        partition.items = items
        self._drop_unread(inserted)
        self._reorder(order)
        restore_in_place(self.graph, inserted)

    def _drop_unread(self, inserted: set[Node]) -> None:
        """Drop the results in PyTorch's order that nothing reads, as calls read them in C order."""
        for nodes in self._laid_out:
            if not nodes[0].users:
                inserted.difference_update(nodes)
                for node in nodes:
                    self.graph.erase_node(node)

    def _nodes_of(self, *operations: int) -> list[Node]:
        return [node for k in operations for node in self.imported.nodes_of(k)]

    def _reorder(self, order: Iterable[Node]) -> None:
        """Put those nodes that are still in the graph into this order."""
        remaining = set(self.graph.nodes)
        for before, node in pairwise(dict.fromkeys(n for n in order if n in remaining)):
            before.append(node)

    def _prepare(self, fused: FusedChain, changed: set[int]) -> _Prepared:
        """Find what a chain's call depends on; `changed` are the memories that are written to after it.

        Raises
        ------
        TraceError
            The chain cannot be replaced: the message is why.
        """
        tensors = [self.captured.tensors[n] for n in fused.inputs]
        examples = [self.captured.tensors[n] for n in fused.outputs]
        orders = [order for order in map(order_in_memory, examples) if order is not None]
        if len(orders) < len(examples):
            raise TraceError("its results cannot be given PyTorch's strides")
        sharded = any(map(is_sharded, tensors))
        if sharded and any(p.is_partial() for e in examples for p in getattr(e, "placements", ())):
            raise TraceError("PyTorch leaves its results as addends of several processes")
        if sharded and fused.chain.updates and not self.call_maker.differentiates:
            raise TraceError("it updates DTensors in place")
        needs = [bool(t.requires_grad) and any(e.requires_grad for e in examples) for t in tensors]
        if sharded and any(needs) and changed & set(map(storage_of, tensors)):
            raise TraceError("what its backward pass may read is changed in place later")
        if any(needs) and self._read_as_data & changed & set(map(storage_of, [*tensors, *examples])):
            raise TraceError("what PyTorch's backward pass may read is changed later, through `.data`")
        if sharded or not any(needs) or (self.call_maker.differentiates and not changed):
            return _Prepared(orders, "[]", needs)
        chain = fused.with_hints()
        settings = self.call_maker.options.settings_on(device_of(tensors[0]))
        saved = custom_op.describe_saved(chain, tensors, needs, settings)
        read = custom_op.backward_inputs(chain.to_json(), saved, tensors, needs)
        if not self.call_maker.differentiates:  # `fuse` copies what its chains overwrite; compilers drop such copies
            changed = changed | {storage_of(tensors[k]) for k, _ in chain.updates}
        if changed & {storage_of(tensors[k]) for k in read}:
            raise TraceError("what its backward pass reads is changed in place later")
        return _Prepared(orders, saved, needs)

    def _changed_by(self, items: Iterable[FusedChain | int]) -> set[int]:
        """Find the memories that chains and operations write to."""
        operations = (k for item in items for k in (item.members if isinstance(item, FusedChain) else (item,)))
        written = (n for k in operations for n in self.captured.operations[k].written)
        return {storage_of(self.captured.tensors[n]) for n in written}

    def _replace(self, fused: FusedChain, prepared: _Prepared) -> list[Node]:
        """Replace a chain's operations by a call and getters of its results; return the new nodes."""
        examples = [self.captured.tensors[n] for n in fused.outputs]
        new: list[Node] = []

        def add(target: Any, arguments: tuple[Any, ...], example: Any = None) -> Node:
            """Insert a call, of a method where `target` is a string, behind the chain's last operation."""
            make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            with self.graph.inserting_after(new[-1] if new else self.imported.operators[fused.members[-1]]):
                new.append(make(target, arguments))
            if example is not None:
                new[-1].meta["example_value"] = example
            return new[-1]

        nodes, tensors = [], []
        for place, number in enumerate(fused.inputs):
            node, example = self._read_in_c_order(number, fused.chain, place, add)
            nodes.append(node)
            tensors.append(example)
        results = self.call_maker.make_call(add, fused, nodes, tensors, prepared.saved, prepared.needs)
        differentiated = self._records_gradients and any(t.requires_grad for t in tensors)
        for number, node, order, example in zip(fused.outputs, results, prepared.orders, examples, strict=True):
            if is_sharded(example):
                from ..sharded.placements import placer

                node = add(placer(example.placements), (node,))
            if differentiated and not example.requires_grad:
                # For autograd every result of the call depends on all of its operands.
                node = add("detach", (node,))
            if order:
                # PyTorch's result has its dimensions in another order in memory.
                node.meta["example_value"] = in_c_order = self._like_in_c_order(example)
                with torch.no_grad():
                    transposed, laid_out = in_c_order.permute(order), example.permute(order)
                if storage_of(example) not in self._written:
                    self._in_c_order[number] = node
                transpose = add("permute", (node, order), transposed)
                copy = add("contiguous", (transpose,), laid_out)
                node = add("permute", (copy, [order.index(k) for k in range(len(order))]))
                self._laid_out.append((node, copy, transpose))
            node.meta["example_value"] = example
            self.imported.nodes[number].replace_all_uses_with(node, delete_user_cb=lambda user: user not in new)
            self.imported.nodes[number] = node
        for member in reversed(fused.members):
            for node in reversed(self.imported.nodes_of(member)):
                if not node.users:
                    self.graph.erase_node(node)
        return new

    def _read_in_c_order(self, number: int, chain: Chain, place: int, add: AddNode) -> tuple[Node, Any]:
        """Return the node and the fake tensor of a chain's input, in C order where the call would copy it.

        So do other calls, and backward passes: all read one copy. Parameters keep their identity, by which weights that
        are prepacked from them are known.
        """
        example = self.captured.tensors[number]
        node = self._in_c_order.get(number)
        stays = number in self.captured.parameters or is_sharded(example) or storage_of(example) in self._written
        if node is None and not stays and chain.copies(place, example):
            node = add("contiguous", (self.imported.nodes[number],), self._like_in_c_order(example))
            self._in_c_order[number] = node
            self._copied.add(number)
        return (self.imported.nodes[number], example) if node is None else (node, node.meta["example_value"])

    @staticmethod
    def _like_in_c_order(example: Any) -> Any:
        """Return a fake tensor like another one, in C order."""
        with torch.no_grad():
            like = torch.empty_like(example, memory_format=torch.contiguous_format)
        return like.requires_grad_(example.requires_grad)
