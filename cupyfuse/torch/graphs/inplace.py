"""Functionalise a captured graph: recognise operations in place, and make them return new values.

`functionalise` does so where nothing else aliases the operand, so that chains can grow over them; `restore_in_place`
undoes it for those that no chain took.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd import grad_mode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from ...errors import TraceError
from ..rules import NUMPY_FUNCTIONS, draws
from ..rules.table import OVERLOADS
from .captured import is_dense, storage_of
from .nodes import IN_PLACE, results_of

F = torch.nn.functional
_OUT_OF_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_WRITING_OPERATORS = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift"),
    "setitem",
)
_UNDERSCORED = ("and_", "or_", "not_", "is_")  # functions of `operator` named after keywords
# Methods that change their operand's own shape or strides, and so the example value of what made it.
RESHAPING = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_", "resize_", "set_")
_ENTER, _EXIT = grad_mode._enter_inference_mode, grad_mode._exit_inference_mode
SWITCHES = (torch._C._set_grad_enabled, _ENTER, _EXIT)  # of gradients


def writes(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a function or method of PyTorch's changes an operand: by its naming rule, `inplace=` or `out=`."""
    name = str(getattr(target, "__name__", target))
    in_place = name.endswith("_") and not name.endswith("__") and name not in _UNDERSCORED
    by_operator = name.strip("_") in _WRITING_OPERATORS
    requested = argument_of(target, "inplace", args, kwargs) or argument_of(target, "out", args, kwargs) is not None
    return in_place or by_operator or requested


def follows_naming(target: Any) -> bool:
    """Whether a function or method is PyTorch's or Python's own, whose names tell what they write to.

    Those of NumPy, which run on the memory of tensors, and those that users allow in graphs may write to any operand.
    """
    if isinstance(target, str):
        return True
    if type(target).__name__ in NUMPY_FUNCTIONS:
        return False
    module = getattr(target, "__module__", None) or "torch"  # methods and built-in functions may have none
    return module.partition(".")[0] in ("torch", "_operator", "builtins", "math", "einops", "cupyfuse")


def argument_of(target: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument that a call passes by name, or by position to a Python function; None if it passes none."""
    position = _position(target, name) if callable(target) else -1
    return args[position] if 0 <= position < len(args) else kwargs.get(name)


@functools.lru_cache(maxsize=4096)
def _position(function: Any, name: str) -> int:
    """Return the position of a Python function's parameter; -1 if it has none of that name."""
    if not isinstance(function, types.FunctionType):
        return -1
    names = list(inspect.signature(function).parameters)
    return names.index(name) if name in names else -1


_DROPOUTS = (
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
)


def remove_inactive_dropouts(graph: Graph) -> None:
    """Remove dropouts that drop nothing: PyTorch's return their very argument, while fake tensors show a new value.

    Raises
    ------
    TraceError
        Only the argument has a gradient, as under `torch.no_grad`: what follows has one too, unlike its examples.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _DROPOUTS and not draws(node.target, node.args, node.kwargs):
            source = node.args[0] if node.args else node.kwargs.get("input")
            if not isinstance(source, Node):
                continue
            if len({getattr(n.meta.get("example_value"), "requires_grad", False) for n in (node, source)}) > 1:
                raise TraceError("a dropout that drops nothing, under no_grad, of a tensor that has a gradient")
            if _rebase_views(graph, node, source):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


# Methods that return their very argument where nothing changes.
_CONVERSIONS = (
    *("to", "type", "type_as", "contiguous", "cpu", "cuda"),
    *("float", "double", "half", "bfloat16", "long", "int", "short", "bool"),
)


def remove_conversions_to_the_same(graph: Graph) -> None:
    """Remove conversions that return their very argument, such as `float` of a float32 tensor.

    A chain that reads argument and result would have two inputs, and as many gradients to add up. Their example is one.
    """
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _CONVERSIONS and isinstance(node.args[0], Node):
            example = node.meta.get("example_value")
            if example is not None and example is node.args[0].meta.get("example_value"):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)


def _rebase_views(graph: Graph, node: Node, source: Node) -> bool:
    """Have Dynamo's example values that are views of a node's result be views of `source`, as at run time.

    Returns whether that could be done: examples of transforms of `torch.func` and DTensors cannot be made.
    """
    old, new = node.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return True
    memory, shift = storage_of(old), new.storage_offset() - old.storage_offset()
    views = [n for n in graph.nodes if n is not node and any(storage_of(t) == memory for t in results_of(n))]
    if not views or not hasattr(new, "fake_mode"):
        return not views

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or storage_of(value) != memory:
            return value
        with new.fake_mode, torch.no_grad():
            view = new.detach().as_strided(value.shape, value.stride(), value.storage_offset() + shift)
        return view.requires_grad_(value.requires_grad)

    for view in views:
        view.meta["example_value"] = pytree.tree_map(moved, view.meta["example_value"])
    return True


def functionalise(graph: Graph) -> None:
    """Make operations in place return new values, where nothing else aliases what they change.

    Not where gradients are off: what is changed keeps its gradient, which a new value would not have.
    """
    modes = _grad_modes(graph)
    sharing: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for each in results_of(node):
            if not torch._C._functorch.is_functorch_wrapped_tensor(each):
                sharing.setdefault(storage_of(each), []).append(node)
    for owner, *others in list(sharing.values()):
        computed = owner.op in ("call_function", "call_method")
        if computed and all(_can_return_new(n, owner, others) and _keeps_gradient(n, owner, modes) for n in others):
            for node in others:
                _return_new(node)


_GradModes = dict[Node, tuple[bool, tuple[Any, ...]]]


def _grad_modes(graph: Graph) -> _GradModes:
    """Tell for each node whether gradients have been switched off, and the inference modes that it is in."""
    found: _GradModes = {}
    off, entered = False, tuple[Any, ...]()
    for node in graph.nodes:
        found[node] = off, entered
        if node.target is torch._C._set_grad_enabled:
            off = not node.args[0]
        elif node.target is _ENTER:
            entered = (*entered, node)
        elif node.target is _EXIT:
            entered = tuple(each for each in entered if each is not node.args[0])
    return found


def _keeps_gradient(node: Node, owner: Node, modes: _GradModes) -> bool:
    """Whether a new value would have a gradient, and be of inference mode, as what `owner` has allocated."""
    off, entered = modes[node]
    return entered == modes[owner][1] and not (off and node.args[0].meta["example_value"].requires_grad)


def functionalised(graph: Graph) -> list[Any]:
    """List what the calls wrote to that `functionalise` made return new values, as fake tensors."""
    calls = (node for node in graph.nodes if IN_PLACE in node.meta)
    return [node.args[0].meta["example_value"] for node in calls]


def is_switched(first: Node, last: Node) -> bool:
    """Whether anything between two nodes switches gradients: views and what is computed may be recorded or not."""
    node = first
    while node is not last:
        node = node.next
        if node.target in SWITCHES:
            return True
    return False


def is_in_place(node: Node) -> bool:
    """Whether a node writes to an operand, or did before `functionalise`, and will again where no chain takes it."""
    return IN_PLACE in node.meta or writes(node.target, node.args, node.kwargs)


def _can_return_new(node: Node, owner: Node, others: Sequence[Node]) -> bool:
    """Whether a node writes in place what it could return as a new value.

    `owner` is the node that allocates the memory, `others` are the nodes of all other tensors in it.
    """
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or (first is not owner and first not in others) or node.target in RESHAPING:
        return False
    if node.op == "call_method":
        overload = OVERLOADS.get(getattr(torch.Tensor, str(node.target), None))
        in_place = overload is not None and overload.inplace and hasattr(torch.Tensor, str(node.target)[:-1])
    else:
        in_place = node.target in _OUT_OF_PLACE or bool(argument_of(node.target, "inplace", node.args, node.kwargs))
    return in_place and _dtype_out_of_place(node) is not None


def _dtype_out_of_place(node: Node) -> torch.dtype | None:
    """Return the dtype that an in-place operation would have out of place; None if that cannot be told."""
    values = [n.meta.get("example_value") if isinstance(n, Node) else n for n in node.args]
    if any(isinstance(v, SYMBOLIC) for v in values):
        return None
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    first = tensors[0]
    if any(tuple(t.shape) != tuple(first.shape) and t.dim() > first.dim() for t in tensors):
        return None
    numbers = any(isinstance(v, (int, float, complex)) and not isinstance(v, bool) for v in values)
    alike = all(t.dtype in (first.dtype, torch.bool) for t in tensors)
    if alike and (first.dtype.is_floating_point or not numbers):
        return first.dtype
    if node.target in _OUT_OF_PLACE and len(values) == 2 and node.target is not operator.itruediv:
        return torch.result_type(*values)
    return None


def _return_new(node: Node) -> None:
    """Make an operation return what it wrote to its first operand, and have the nodes after it read that."""
    source = node.args[0]
    assert isinstance(source, Node)
    dtype, computed_in = source.meta["example_value"].dtype, _dtype_out_of_place(node)
    assert computed_in is not None
    result = node
    if computed_in is dtype:
        node.meta[IN_PLACE] = node.target  # for `restore_in_place`, if no chain takes the new call
        _call_out_of_place(node)
        example = node.meta["example_value"]
        strides, needs = example.stride(), example.requires_grad
        node.meta["example_value"] = example.detach().new_empty_strided(example.shape, strides, requires_grad=needs)
    else:
        _call_out_of_place(node)
        result = _cast_result(node, computed_in, dtype)
    source.replace_all_uses_with(result, delete_user_cb=lambda user: user > node)


def _call_out_of_place(node: Node) -> None:
    """Change a call in place to the same operation out of place: by its name, its operator or its `inplace` flag."""
    if node.op == "call_method":
        node.target = str(node.target)[:-1]
    elif node.target in _OUT_OF_PLACE:
        node.target = _OUT_OF_PLACE[node.target]
    else:
        _pass_inplace(node, False)


def _call_in_place(node: Node, target: Any) -> None:
    """Undo `_call_out_of_place`; the operands stay, which may be others than they were."""
    if node.target is target:
        _pass_inplace(node, True)
    node.target = target


def _pass_inplace(node: Node, value: bool) -> None:
    """Change the `inplace` flag of a call that passes one, by name or by position."""
    if "inplace" in node.kwargs:
        node.kwargs = {**node.kwargs, "inplace": value}
    else:
        position = _position(node.target, "inplace")
        node.args = (*node.args[:position], value, *node.args[position + 1 :])


def _cast_result(node: Node, computed_in: torch.dtype, dtype: torch.dtype) -> Node:
    """Cast the result of a call that is now out of place to the dtype it was written in, and return the cast.

    Out of place it computes in the operands' common dtype; in place it rounded once to that of the first operand.
    """
    with node.graph.inserting_after(node):
        cast = node.graph.call_method("to", (node, dtype))
    cast.meta = {**node.meta}
    example = node.meta["example_value"]
    with example.fake_mode:
        node.meta["example_value"] = example.detach().to(computed_in).requires_grad_(example.requires_grad)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def uses_autocast(graph: Graph) -> bool:
    """Whether autocast is on anywhere in a graph."""
    if torch._C._is_any_autocast_enabled():
        return True
    return any(getattr(n.target, "__name__", "") == "_enter_autocast" for n in graph.nodes)


def restore_in_place(graph: Graph, chains: Collection[Node]) -> None:
    """Restore the operations in place that `functionalise` replaced and no chain took.

    Where the operand has to stay as it is, operations on a transposed one change a copy: out of place, some return
    another memory layout. So they do under autocast, which may choose another dtype for them.

    Parameters
    ----------
    graph : Graph
    chains : nodes of chains, whose operands and results may be saved for a backward pass
    """
    autocast, sharing = uses_autocast(graph), defaultdict[int, list[Node]](list)
    for node in graph.nodes:
        for storage in {storage_of(t) for t in results_of(node)}:
            sharing[storage].append(node)
    for node in graph.nodes:
        if IN_PLACE not in node.meta:
            continue
        target = node.meta.pop(IN_PLACE)
        source = node.args[0]
        views = sharing[storage_of(source.meta["example_value"])]  # with the operand; rewrites make views of it
        others = [user for view in views for user in view.users if user is not node]
        saved = any(n in chains for n in (*views, *others))
        used_later = any(n > node for n in others)
        if saved or used_later:
            if not autocast and is_dense(source.meta["example_value"], range(source.meta["example_value"].dim())):
                continue
            with graph.inserting_before(node):
                node.args = (graph.call_method("clone", (source,)), *node.args[1:])
        _call_in_place(node, target)
