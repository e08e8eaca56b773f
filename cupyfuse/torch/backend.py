"""Chains in the graphs of `torch.compile`: a backend, and the pass that it is made of.

Dynamo's graph still has the operations as the user wrote them, and autograd is still ahead of it. The pass exchanges
each chain for one call of `cupyfuse::chain`; the rest is the inductor's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from ..errors import TraceError
from . import library
from .chain import Ref
from .partition import Fused, Partition, partition
from .record import Operation, Record, Source, draws, storage_of


def backend(module: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend "cupyfuse" of `torch.compile`: chains run through cupyfuse, the inductor compiles the rest.

    Parameters
    ----------
    module, example_inputs
        As `torch.compile` gives them.
    **options
        `mode` and `options` of `torch.compile`, for the inductor.
    """
    from torch._inductor import compile_fx, list_mode_options

    fuse_graph(module.graph)
    module.recompile()
    patches = dict(options.get("options") or {})
    if options.get("mode"):
        patches = {**list_mode_options(options["mode"]), **patches}
    compiled: Callable[..., Any] = compile_fx.compile_fx(module, list(example_inputs), config_patches=patches or None)
    return compiled


def fuse_graph(graph: Graph) -> None:
    """Exchange the chains of a graph of Dynamo's for calls of `cupyfuse::chain`, in place.

    Serves as `torch._inductor.config.pre_grad_custom_pass` too.
    """
    _out_of_place(graph)
    imported = _Imported(graph)
    imported.arrange(partition(imported.record))
    graph.lint()


_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _out_of_place(graph: Graph) -> None:
    """Let operations that change a value in place that nobody else sees make a new one."""
    sharing: dict[int, list[Node]] = {}
    for node in graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor):
            sharing.setdefault(example.untyped_storage()._cdata, []).append(node)
    for owner, *others in list(sharing.values()):
        if owner.op in ("call_function", "call_method") and others and all(_changes(n, owner, others) for n in others):
            for node in others:
                _made_new(node)


def _changes(node: Node, owner: Node, others: Sequence[Node]) -> bool:
    """Whether all that a node does to the memory is to change it."""
    first = node.args[0] if node.args else None
    if first is not owner and first not in others:
        return False
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name[:-1])
    return node.target in _IN_PLACE or (node.op == "call_function" and node.kwargs.get("inplace") is True)


def _made_new(node: Node) -> None:
    """Make an operation return what it changed its first operand to, and let everything after it read that."""
    source = node.args[0]
    assert isinstance(source, Node)
    before = True
    later = set()
    for other in node.graph.nodes:
        if other is node:
            before = False
        elif not before:
            later.add(other)
    source.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
    if node.op == "call_method":
        node.target = str(node.target)[:-1]
    elif node.target in _IN_PLACE:
        node.target = _IN_PLACE[node.target]
    else:
        node.kwargs = {**node.kwargs, "inplace": False}


class _Imported:
    """A graph of Dynamo's as a record."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.record = Record(rebinds=False)
        self.nodes: list[Any] = []  # by number: the node that holds the value
        self.numbers: dict[Node, Any] = {}  # a number, or a nested structure of them
        self.operators: list[Node] = []
        self.makers: dict[Node, int] = {}  # the operation that a node is a result of
        self.parts: dict[int, list[Node]] = {}  # of an operation's results, in nodes of their own
        for node in graph.nodes:
            self._take(node)

    def _take(self, node: Node) -> None:
        example = node.meta.get("example_value")
        if node.op in ("placeholder", "get_attr"):
            if isinstance(example, torch.Tensor):
                number = self._add(example, node)
                self.numbers[node] = Ref(number)
                if isinstance(example, torch.nn.Parameter) or node.op == "get_attr":
                    self.record.sources[number] = Source({}, "", node.name, True)
                else:
                    self.record.arguments.append(number)
        elif node.op == "output":
            self.record.result = self._referred(node.args)
        elif node.target is operator.getitem and isinstance(self.numbers.get(node.args[0]), (tuple, list)):
            self.numbers[node] = self.numbers[node.args[0]][node.args[1]]
            self.makers[node] = self.makers[node.args[0]]
            self.parts.setdefault(self.makers[node], []).append(node)
            if isinstance(self.numbers[node], Ref):
                self.nodes[self.numbers[node].number] = node
        else:
            self._operation(node, example)

    def _operation(self, node: Node, example: Any) -> None:
        args, kwargs = self._referred((node.args, node.kwargs))
        known = pytree.tree_map(lambda v: Ref(self._add(v, node)) if isinstance(v, torch.Tensor) else v, example)
        operands = [self.record.tensors[r.number] for r in pytree.tree_leaves((args, kwargs)) if isinstance(r, Ref)]
        storages = {t.untyped_storage()._cdata for t in operands}
        target = node.target if node.op in ("call_function", "call_method") else None
        operation = Operation(target, args, kwargs, known, "")
        results = [self.record.tensors[n] for n in operation.results]
        operation.view = any(t.untyped_storage()._cdata in storages for t in results)
        name = str(getattr(target, "__name__", target))
        if _in_place(name, kwargs) or target is None:
            operation.written = frozenset(operation.read[:1])
            operation.ordered = True
        if name == "batch_norm" and operation.args[5:6] == (True,):
            operation.written = frozenset(r.number for r in operation.args[1:3] if isinstance(r, Ref))
        if not operands or draws(name):
            operation.ordered = True
        operation.barrier = not operands and example is None
        operation.after = frozenset(self.makers[n] for n in node.all_input_nodes if n in self.makers)
        self.makers[node] = len(self.record.operations)
        self.numbers[node] = known
        self.record.operations.append(operation)
        self.operators.append(node)

    def _add(self, tensor: Any, node: Node) -> int:
        self.record.tensors.append(tensor)
        self.nodes.append(node)
        return len(self.record.tensors) - 1

    def _referred(self, tree: Any) -> Any:
        def leaf(value: Any) -> Any:
            return self.numbers.get(value, value) if isinstance(value, Node) else value

        return torch.fx.node.map_aggregate(tree, leaf)

    # Back to a graph
    def arrange(self, parts: Partition) -> None:
        """Exchange the chains for calls, and put everything into the order of the parts."""
        order = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        written = [(k, self._storages(o.written)) for k, o in enumerate(self.record.operations) if o.written]
        for item in parts.items:
            if isinstance(item, Fused):
                begun, own = item.members[0], set(item.members)
                changed = {s for k, storages in written if k > begun and k not in own for s in storages}
                calls = self._exchange(item, changed)
                order += calls
                # Views of results are made anew after the call, where the parts have them.
                order += [n for k in item.members if not calls or k not in item.views for n in self._nodes(k)]
            else:
                order += self._nodes(item)
        there = set(self.graph.nodes)
        at: Node | None = None
        for node in dict.fromkeys(n for n in order if n in there):
            if at is not None:
                at.append(node)
            at = node

    def _nodes(self, k: int) -> list[Node]:
        return [self.operators[k], *self.parts.get(k, ())]

    def _storages(self, numbers: Iterable[int]) -> set[int]:
        return {storage_of(self.record.tensors[n]) for n in numbers}

    def _exchange(self, fused: Fused, changed: set[int]) -> list[Node]:
        """One call in the place of a chain's operations, with what takes its results apart; empty where there is none.

        `changed` are the memories that other operations change in place after the chain has begun.
        """
        chain, tensors = fused.chain, [self.record.tensors[n] for n in fused.inputs]
        graded = any(self.record.tensors[n].requires_grad for n in fused.outputs)
        needs = [graded and bool(t.requires_grad) for t in tensors]
        turns = [_turn(self.record.tensors[n]) for n in fused.outputs]
        if None in turns:
            return []
        saved = "[]"
        if any(needs):
            try:
                saved = library.saves(chain, tensors, needs)
            except TraceError:
                return []
            later = library.read_later(chain.to_json(), saved, tensors, needs)
            if changed & self._storages(fused.inputs[k] for k in later):
                return []  # the backward pass would not find what the forward pass read
        new: list[Node] = []

        def add(target: Any, arguments: tuple[Any, ...], example: Any = None) -> Node:
            make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            with self.graph.inserting_after(new[-1] if new else self.operators[fused.members[-1]]):
                new.append(make(target, arguments))
            if example is not None:
                new[-1].meta["example_value"] = example
            return new[-1]

        mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
        with mode or nullcontext():
            results = library.fake(tensors, chain.to_json(), saved)
        arguments = ([self.nodes[n] for n in fused.inputs], chain.to_json(), saved, None)
        call = add(torch.ops.cupyfuse.chain.default, arguments, results)
        for position, (number, turn) in enumerate(zip(fused.outputs, turns, strict=True)):
            example = self.record.tensors[number]
            result = add(operator.getitem, (call, position), results[position] if turn else example)
            if turn:
                # PyTorch's result lies in memory with its dimensions in another order.
                add("permute", (result, turn))
                add("contiguous", (new[-1],))
                add("permute", (new[-1], [turn.index(k) for k in range(len(turn))]), example)
            if any(t.requires_grad for t in tensors) and not example.requires_grad:
                # Every result of the call counts as depending on all of its operands.
                add("detach", (new[-1],), example)
            last = new[-1]
            self.nodes[number].replace_all_uses_with(last, delete_user_cb=lambda user: user not in new)
            self.nodes[number] = last
        for position, (target, _) in enumerate(chain.updates):
            value = add(operator.getitem, (call, len(fused.outputs) + position))
            add("copy_", (self.nodes[fused.inputs[target]], value))
        for member in reversed(fused.members):
            for node in reversed(self._nodes(member)):
                if not node.users:
                    self.graph.erase_node(node)
        return new


def _turn(tensor: Any) -> list[int] | None:
    """The order in which a tensor's dimensions lie in memory, empty for C order; None if it leaves gaps or overlaps."""
    strides = [int(s.node.hint) if isinstance(s, torch.SymInt) else s for s in tensor.stride()]
    order = sorted(range(tensor.dim()), key=lambda k: -strides[k])
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


def _in_place(name: str, kwargs: dict[str, Any]) -> bool:
    operators = ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
    return (name.endswith("_") and not name.endswith("__")) or name in operators or bool(kwargs.get("inplace"))
