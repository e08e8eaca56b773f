"""Chains in the graphs of `torch.compile`: a backend, and the pass that it is made of.

Dynamo's graph still has the operations as the user wrote them, and autograd is still ahead of it. The pass exchanges
each chain for one call of `cupyfuse::chain`; the rest is the inductor's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from ..errors import TraceError
from . import library
from .chain import Ref
from .partition import Fused, partition
from .record import Operation, Record, Source, draws


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
    gradients = torch.is_grad_enabled()
    parts = partition(imported.record)
    for fused in parts.chains:
        imported.exchange(fused, gradients)
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
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

    def exchange(self, fused: Fused, gradients: bool) -> None:
        """Put one call in the place of a chain's operations."""
        tensors = [self.record.tensors[n] for n in fused.inputs]
        needs = [gradients and bool(t.requires_grad) for t in tensors]
        chain = fused.chain
        try:
            saved = library.saves(chain, tensors, needs) if any(needs) else "[]"
        except TraceError:
            return
        last = self.operators[fused.members[-1]]
        with self.graph.inserting_after(last):
            arguments = ([self.nodes[n] for n in fused.inputs], chain.to_json(), saved, None)
            call = self.graph.call_function(torch.ops.cupyfuse.chain.default, arguments)
            mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
            with mode or nullcontext():
                call.meta["example_value"] = library.fake(tensors, chain.to_json(), saved)
        at = call
        for position, number in enumerate(fused.outputs):
            with self.graph.inserting_after(at):
                at = self.graph.call_function(operator.getitem, (call, position))
                at.meta["example_value"] = self.record.tensors[number]
            if any(needs) and not self.record.tensors[number].requires_grad:
                # Every result of the call counts as depending on all of its operands.
                with self.graph.inserting_after(at):
                    at = self.graph.call_method("detach", (at,))
                    at.meta["example_value"] = self.record.tensors[number]
            self.nodes[number].replace_all_uses_with(at, delete_user_cb=lambda user, new=at: user is not new)
            self.nodes[number] = at
        for position, (target, _) in enumerate(chain.updates):
            with self.graph.inserting_after(at):
                value = self.graph.call_function(operator.getitem, (call, len(fused.outputs) + position))
            with self.graph.inserting_after(value):
                at = self.graph.call_method("copy_", (self.nodes[fused.inputs[target]], value))
        for member in reversed(fused.members):
            if not self.operators[member].users:
                self.graph.erase_node(self.operators[member])


def _in_place(name: str, kwargs: dict[str, Any]) -> bool:
    operators = ("iadd", "isub", "imul", "itruediv", "ipow", "setitem")
    return (name.endswith("_") and not name.endswith("__")) or name in operators or bool(kwargs.get("inplace"))
