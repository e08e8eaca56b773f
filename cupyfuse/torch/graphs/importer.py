"""Import a graph that Dynamo captured as a `CapturedGraph`.

Dynamo's graph holds the operations as the user wrote them, before autograd and decomposition. A symbolic size among the
arguments of an operation becomes a `Size`.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import source as sources
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..rules import PLACING, draws
from ..rules.symbols import Ref, Size, references
from .captured import CapturedGraph, Operation, is_in_a_format, keeps_placement, storage_of
from .inplace import RESHAPING, SYMBOLIC, argument_of, follows_naming, uses_autocast, writes
from .nodes import REORDERED

NO_TENSOR = "it returns no tensor"
WITHIN_TRANSFORM = "it is within a transform of torch.func or of forward-mode differentiation"
# Functions that update running statistics where a flag says so, and the parameters of Python's and built-in ones.
_KEEPS_STATISTICS = ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_PYTHON = ("input", "running_mean", "running_var", "weight", "bias", "flag")
_BUILT_IN = ("input", "weight", "bias", "running_mean", "running_var", "flag")


class ImportedGraph:
    """A captured graph with the nodes of Dynamo's graph that its values and operations stand for.

    Attributes
    ----------
    graph : Graph
    captured : CapturedGraph
    nodes : for each value, the node that holds it
    operators : for each operation, its node
    getters : for operations with several results, the nodes that get one each
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.captured = CapturedGraph(autocast=uses_autocast(graph))
        self.nodes: list[Any] = []
        self.operators: list[Node] = []
        self.getters: dict[int, list[Node]] = {}
        self._stand_ins: dict[Node, Any] = {}  # node -> Ref, Size or nested tuples of them
        self._producers: dict[Node, int] = {}  # for each node of a result, its operation
        self._input_memory: set[int] = set()  # storages of the inputs
        self._transforms = 0  # depth of torch.func transforms at the current node
        for node in graph.nodes:
            self._import(node)
        self._refuse_reshaped()

    def nodes_of(self, k: int) -> list[Node]:
        """List an operation's node and those that get its results."""
        return [self.operators[k], *self.getters.get(k, ())]

    def _import(self, node: Node) -> None:
        """Import the next node: an input, the output, the getter of one of several results, or an operation."""
        example = node.meta.get("example_value")
        if node.op in ("placeholder", "get_attr"):
            if isinstance(example, torch.Tensor):
                self._import_input(node, example)
            elif isinstance(example, torch.SymInt):
                self._stand_ins[node] = Size(node)
        elif node.op == "output":
            self.captured.result = self._with_refs(node.args)
        elif node.target is operator.getitem and isinstance(self._stand_ins.get(node.args[0]), (tuple, list)):
            source: Any = node.args[0]
            self._stand_ins[node] = self._stand_ins[source][node.args[1]]
            self._producers[node] = self._producers[source]
            self.getters.setdefault(self._producers[node], []).append(node)
            if isinstance(self._stand_ins[node], Ref):
                self.nodes[self._stand_ins[node].number] = node
            elif isinstance(node.meta.get("example_value"), torch.SymInt):
                self._stand_ins[node] = Size(node)
        else:
            self._import_operation(node, example)

    def _import_input(self, node: Node, example: Any) -> None:
        number = self._add_value(example, node)
        self._stand_ins[node] = Ref(number)
        self._input_memory.add(storage_of(example))
        if is_state(node) or isinstance(example, torch.nn.Parameter):
            self.captured.parameters[number] = _parameter_path(node) or node.name
        else:
            self.captured.arguments.append(number)

    def _import_operation(self, node: Node, example: Any) -> None:
        """Import a call: its operands, its results as new values, what it reads, writes and depends on."""
        args, kwargs = self._with_refs((node.args, node.kwargs))

        def stand_in(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return Ref(self._add_value(value, node))
            # Each of several sizes becomes a Size when a node gets it.
            return (Size(node) if value is example else node) if isinstance(value, torch.SymInt) else value

        results = pytree.tree_map(stand_in, example)
        target = node.target if node.op in ("call_function", "call_method") else None
        operation = Operation(target, args, kwargs, results, _module_path(node))
        operation.reordered = node.meta.get(REORDERED, "")
        operands = [self.captured.tensors[n] for n in operation.read]
        storages = {storage_of(t) for t in operands}
        operation.view = any(storage_of(self.captured.tensors[n]) in storages for n in operation.results)
        self._record_effects(operation, node, target, example)
        operation.refusal = self._find_refusal(operation, node, target)
        operation.depends_on = frozenset(self._producers[n] for n in node.all_input_nodes if n in self._producers)
        self._producers[node] = len(self.captured.operations)
        self._stand_ins[node] = results
        self.captured.operations.append(operation)
        self.operators.append(node)

    def _refuse_reshaped(self) -> None:
        """Leave to PyTorch what makes or reads values whose shape or strides are changed in place later."""
        tensors, changed = self.captured.tensors, set[int]()
        for operation in reversed(self.captured.operations):
            memory = {storage_of(tensors[n]) for n in (*operation.read, *operation.results)}
            if operation.name in RESHAPING:
                changed |= memory
            if not memory.isdisjoint(changed):
                operation.refusal = operation.refusal or "a shape or strides are changed in place"

    def _record_effects(self, operation: Operation, node: Node, target: Any, example: Any) -> None:
        """Set what an operation writes to, whether it draws random numbers, and how it may be reordered."""
        symbolic = isinstance(example, SYMBOLIC) or type(example) in (int, bool, torch.Size)
        if target is tag_activation_checkpoint:
            operation.written, operation.ordered = self._operands_written_in_region(node), True
        elif isinstance(target, HigherOrderOperator) or target is None:
            # It runs a graph of its own, which may write to any operand.
            operation.written, operation.ordered = frozenset(operation.read), True
        elif isinstance(target, (OpOverload, OpOverloadPacket)):
            operation.written = frozenset(_operands_written_by_schema(target, operation))
            operation.ordered = bool(operation.written)
        elif not follows_naming(target):
            operation.written, operation.ordered = frozenset(operation.read), bool(operation.read)
        elif writes(target, operation.args, operation.kwargs):
            operation.written, operation.ordered = _operand_written_by_name(target, operation), True
        if more := _operands_also_written(target, operation):
            operation.written, operation.ordered = operation.written | more, True
        if keeps_statistics(operation):
            operation.written = frozenset(_statistics_updated_by(operation))
        operation.random = target is not tag_activation_checkpoint and draws(target, operation.args, operation.kwargs)
        if (not operation.read and not symbolic) or operation.random:
            operation.ordered = True
        if operation.name in PLACING:  # all processes have to exchange in one order
            operation.ordered = not keeps_placement(operation, self.captured.tensors)
        operation.barrier = not operation.read and (example is None or _transform_nesting(operation) != 0)

    def _operands_written_in_region(self, node: Node) -> frozenset[int]:
        """Return the operands of a checkpointed region that the region writes to."""
        body, *operands = node.args
        assert isinstance(body, Node)
        module = self.graph.owning_module
        graph = getattr(getattr(module, str(body.target), None), "graph", None)
        if graph is None:
            return frozenset(references(self._with_refs(operands)))
        captured = ImportedGraph(graph).captured
        storages = {storage_of(captured.tensors[n]) for o in captured.operations for n in o.written}
        inner = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
        written = [
            operand
            for operand, example in zip(operands, inner, strict=True)
            if isinstance(example, torch.Tensor) and storage_of(example) in storages
        ]
        return frozenset(references(self._with_refs(written)))

    def _find_refusal(self, operation: Operation, node: Node, target: Any) -> str:
        """Say why an operation is left to PyTorch even if there is a rule for it; empty otherwise.

        Called once for each operation, in order: it counts the transforms that begin and end.
        """
        if target is tag_activation_checkpoint:
            return "a checkpointed region, whose operations count by themselves"
        if operation.name in PLACING and not keeps_placement(operation, self.captured.tensors):
            return "it places data on a mesh"
        nesting = _transform_nesting(operation)
        self._transforms += nesting
        if self._transforms or nesting:
            return WITHIN_TRANSFORM
        tensors = [self.captured.tensors[n] for n in (*operation.read, *operation.results)]
        if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors):
            return "its operands belong to a transform of torch.func"
        if not operation.results:
            return NO_TENSOR
        if len({t.device for t in tensors}) > 1:
            return f"its tensors are on different devices: {', '.join(sorted({str(t.device) for t in tensors}))}"
        if operation.random:
            return "it may draw random numbers"
        if operation.name == "batch_norm" and not is_in_a_format(tensors[-1]):
            return "its input is in no memory format, and PyTorch's result has other strides than the captured one"
        if operation.name == "clone" and storage_of(tensors[0]) in self._input_memory:
            return "it copies memory that may change before the backward pass"
        if any(free_unbacked_symbols(t) for t in tensors):
            return "its sizes depend on the values of a tensor"
        for leaf in pytree.tree_leaves((operation.args, operation.kwargs)):
            example = leaf.symbol.meta["example_value"] if isinstance(leaf, Size) else None
            if isinstance(leaf, (Node, *SYMBOLIC)):
                return "it takes a number that changes from call to call"
            if example is not None and free_unbacked_symbols(example):
                return "an argument depends on the values of a tensor"
        if len(operation.results) > 1 and any(user.target is not operator.getitem for user in node.users):
            return "its results are used as a tuple"
        return ""

    def _add_value(self, tensor: Any, node: Node) -> int:
        """Add a value, given as a fake tensor and its node; return its number."""
        self.captured.tensors.append(tensor)
        self.nodes.append(node)
        return len(self.captured.tensors) - 1

    def _with_refs(self, tree: Any) -> Any:
        """Replace the nodes in a nested structure by what stands for them."""

        def leaf(value: Any) -> Any:
            return self._stand_ins.get(value, value) if isinstance(value, Node) else value

        return torch.fx.node.map_aggregate(tree, leaf)


def _operand_written_by_name(target: Any, operation: Operation) -> frozenset[int]:
    """Return the operand that a function or method writes to whose name or arguments tell that it writes to one."""
    changed = argument_of(target, "out", operation.args, operation.kwargs)
    if changed is None:
        named = (operation.kwargs.get(name) for name in ("input", "self", "tensor"))
        changed = operation.args[0] if operation.args else next((v for v in named if v is not None), None)
    return frozenset(references(changed)) or frozenset(operation.read)


def keeps_statistics(operation: Operation) -> bool:
    """Whether an operation may update running statistics."""
    return operation.name.partition(".")[0] in _KEEPS_STATISTICS


def _statistics_updated_by(operation: Operation) -> set[int]:
    """Return the running statistics that a normalisation updates, which its name and schema do not show."""
    python = isinstance(operation.target, types.FunctionType)
    flag = "use_input_stats" if operation.name.startswith("instance_norm") else "training"
    named = {**dict(zip(_PYTHON if python else _BUILT_IN, operation.args, strict=False)), **operation.kwargs}
    if named.get(flag, named.get("flag", flag == "use_input_stats")) is False:
        return set()
    return set(references([named.get("running_mean"), named.get("running_var")]))


def _transform_nesting(operation: Operation) -> int:
    """Return the change in the depth of transforms: 1 if an operation begins one, -1 if it ends one.

    They are those of `torch.func`, and levels of forward-mode differentiation (`torch.autograd.forward_ad`).
    """
    begins = operation.name.endswith(("_increment_nesting", "_enter_dual_level"))
    return begins - operation.name.endswith(("_decrement_nesting", "_exit_dual_level"))


def _operands_also_written(target: Any, operation: Operation) -> frozenset[int]:
    """Return the operands that a function writes to beside the one that its name tells of.

    The schemas of PyTorch's own operators say them: the ranges of `fused_moving_avg_obs_fake_quant`, the moments of
    `_fused_adam_`. `max_norm=` renormalises rows of a look-up's weight; all of its operands are taken.
    """
    if argument_of(target, "max_norm", operation.args, operation.kwargs) is not None:
        return frozenset(operation.read)
    if isinstance(target, types.BuiltinFunctionType):
        packet = getattr(torch.ops.aten, operation.name, None)
        if isinstance(packet, OpOverloadPacket):
            overloads = (getattr(packet, name) for name in packet.overloads())
            return frozenset().union(*(_operands_written_by_schema(o, operation) for o in overloads))
    return frozenset()


def _operands_written_by_schema(
    target: OpOverload[Any, Any] | OpOverloadPacket[Any, Any], operation: Operation
) -> set[int]:
    """Return the operands that an operator's schema lets it write to; all of them if one of several schemas does."""
    if isinstance(target, OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]
        if len(overloads) != 1:
            writes = any(_is_written(a) for o in overloads for a in o._schema.arguments)
            return set(operation.read) if writes else set()
        (target,) = overloads
    found: set[int] = set()
    for position, argument in enumerate(target._schema.arguments):
        if not _is_written(argument):
            continue
        value = operation.kwargs.get(argument.name)
        if position < len(operation.args) and not argument.kwarg_only:
            value = operation.args[position]
        found.update(leaf.number for leaf in pytree.tree_leaves(value) if isinstance(leaf, Ref))
    return found


def _is_written(argument: Any) -> bool:
    """Whether a schema lets its operator write to an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


# Where inputs come from ---------------------------------------------------------------------------------------------


def _sources(node: Node) -> Iterator[Any]:
    """Yield Dynamo's source of an input, then that source's base, and so on."""
    source = getattr(node, "_dynamo_source", None)
    if source is None and node.meta.get("grapharg") is not None:
        source = node.meta["grapharg"].source
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def is_state(node: Node) -> bool:
    """Whether an input of a graph is a parameter or buffer of a module."""
    kinds = (sources.UnspecializedParamBufferSource, sources.ParamBufferSource)
    return any(isinstance(source, kinds) for source in _sources(node))


def _parameter_path(node: Node) -> str:
    """Return the dotted name of a parameter or buffer, as in `named_parameters`."""
    parts = [str(source.index) for source in _sources(node) if isinstance(source, sources.DictGetItemSource)]
    return ".".join(reversed(parts))


def _module_path(node: Node) -> str:
    """Return the dotted name of the module in whose forward a node was captured."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])  # of the innermost module; L['self'].layers.0 for a local variable
    return path.partition("].")[2] if path.startswith("L[") else path
