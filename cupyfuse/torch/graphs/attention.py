"""Calls of attention that PyTorch has a kernel for, once their operands lie in memory as it takes them.

Its kernels take a mask, or a bias, whose last dimension is contiguous, which T5's is not; those for float32 take as
many heads of keys and values as of queries (`enable_gqa=False`). Else PyTorch computes products, mask and softmax one
by one, in float32 also for 16 bits, with the scores in memory. Here such a mask is copied, and such heads are repeated.
On an H200, 64 to 256 elements a head and 128 to 2048 tokens, that is faster than in eager by these factors:

| | forward | with gradients |
|---|---:|---:|
| bfloat16, mask | 10 to 13 | 3.4 to 8.7 |
| float32, mask | 2.0 to 2.9 | 1.1 to 1.5 |
| float32, shared heads, causal | 2.0 to 3.4 | 1.2 to 2.1 |
| float32, shared heads, not causal | 1.25 to 2.0 | 0.8 (256 elements a head) to 1.4 |

Than Inductor, which fuses what is not a product: bfloat16 7 and 2.2 to 5.6, float32 1.2 to 2.3 and, causal, 1.3 to 1.5;
not causal and with gradients 0.85 to 0.99.

Queries, keys and values may have any strides but the last. Copies that code makes for attention alone, as the
`.contiguous()` of Whisper and BART, are left out.

PyTorch's products give a result in C order; its kernels, one whose heads are inside of tokens, or in the order of the
queries, and their backward passes read it. It is copied to C order where that shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend

from ..chains.tensors import concrete_sizes
from .captured import is_dense, storage_of
from .inplace import SWITCHES
from .nodes import example_of, find_rule, insert, results_of
from .written_memory import WrittenMemory

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_OPERANDS = _PARAMETERS[:4]
_HEADS = -3  # the dimension
_ALIGNMENT = 8  # elements, of strides: 16 bytes of 16 bits
_MOST_WITH_GRADIENTS = 128  # elements of a float32 head; of more, the kernel's backward pass is slow


def prepare_attention(graph: Graph, compiled: bool) -> bool:
    """Copy masks and repeat heads for calls of attention that gain by it, and leave out needless copies, in place.

    `compiled` says that Inductor compiles the graph; else PyTorch's eager kernels run it. Returns whether anything was
    changed.
    """
    calls = [n for n in graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
    operands = _Operands(graph)
    changed = [_prepare(node, compiled, operands) for node in calls]
    return any(changed)


class _Operands:
    """What calls of attention in a graph may read in the place of their operands."""

    def __init__(self, graph: Graph):
        self._graph, self._memory, self._copies = graph, WrittenMemory(graph), dict[Node, Node]()
        self._switches = any(node.target in SWITCHES for node in graph.nodes)

    @cached_property
    def _shared(self) -> set[int]:
        """The storages of the graph's inputs and outputs."""
        ends = [node for node in self._graph.nodes if node.op in ("placeholder", "get_attr")]
        ends += self._graph.output_node().all_input_nodes
        return {storage_of(t) for node in ends for t in results_of(node)}

    def copy(self, operand: Node, place: Node) -> Node:
        """Return a contiguous copy of an operand, one for all calls if it is the same for them."""
        if operand not in self._copies or not self._is_one_for_all(operand):
            self._copies[operand] = insert(place, "contiguous", operand)
        return self._copies[operand]

    def original(self, operand: Node, saved: bool) -> Node | None:
        """Return what an operand is a needless copy of, if kernels of attention take that.

        Not if it is `saved` for a backward pass, before which callers may change their arguments and results.
        """
        made = operand.op == "call_method" and operand.target == "contiguous" and operand.all_input_nodes
        if not made or len(operand.args) != 1 or operand.kwargs or len(operand.users) != 1:
            return None
        (source,) = made
        example = example_of(source)
        *others, last = concrete_sizes(example.stride()) if example is not None else (0,)
        aligned = last == 1 and all(stride % _ALIGNMENT == 0 for stride in others)
        if not aligned or not self._is_one_for_all(source) or (saved and storage_of(example) in self._shared):
            return None
        return source

    def hides_order(self, node: Node, query: Any) -> bool:
        """Whether a result of attention is read through copies alone, which are the same whatever its order is.

        That is C order, or one that its kernel chooses, or takes from the `query`.
        """
        return all(self._hides_order(user, node, query) for user in node.users)

    def _hides_order(self, user: Node, result: Node, query: Any) -> bool:
        found, example, source = find_rule(user), example_of(user), example_of(result)
        if found is None or example is None or found.arguments[0] is not result:
            return False
        if found.rule.name in ("transpose", "permute"):
            return all(self._hides_order(each, user, query) for each in user.users)
        copied = storage_of(example) != storage_of(source) and storage_of(example) not in self._shared
        if not copied or not is_dense(example, range(example.dim())) or self._memory.is_written_to(user):
            return False  # what is no copy of another order is the result itself, which the backward pass reads
        return found.rule.name == "contiguous" or (
            found.rule.name in ("reshape", "flatten") and _has_tokens_outside(source) and _has_rows(query)
        )

    def _is_one_for_all(self, operand: Node) -> bool:
        """Whether an operand has the same values, and is of the same modes, in the whole graph."""
        return not self._switches and not self._memory.is_written_to(operand)


@dataclass(frozen=True)
class _Changes:
    """How a call gets a kernel: operands that are copied, and how many times the heads of others are repeated."""

    copied: tuple[str, ...] = ()
    times: dict[str, int] = field(default_factory=dict)


def _prepare(node: Node, compiled: bool, operands: _Operands) -> bool:
    """Prepare the operands of one call, if it gains by that."""
    given = dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
    examples: dict[str, Any] = {name: example_of(given[name]) for name in _OPERANDS if given.get(name) is not None}
    result, query = example_of(node), examples["query"]
    if result is None or any(t is None for t in examples.values()) or query.dtype != result.dtype:
        return False  # tensors of other kinds; the conversions of autocast
    if given.get("dropout_p", 0) != 0 or torch.are_deterministic_algorithms_enabled():  # dropouts draw by kernel
        return False
    changes = _find_kernel(given, examples)
    if changes is None:
        return False
    has_kernel = changes == _Changes()
    if not has_kernel and not _gains(query, result, given.get("is_causal") is True, compiled):
        return False
    needless = {given[name]: operands.original(given[name], result.requires_grad) for name in _OPERANDS[:3]}
    needless = {operand: source for operand, source in needless.items() if source is not None}
    read = needless.get(given["query"])
    hidden = operands.hides_order(node, query if read is None else example_of(read))
    if has_kernel and not hidden:
        needless.pop(given["query"], None)  # the result is in the order of the query
    if has_kernel and not needless:
        return False
    given = {name: needless.get(value, value) if isinstance(value, Node) else value for name, value in given.items()}
    for name in changes.copied:
        given[name] = operands.copy(given[name], node)
    for name, times in changes.times.items():
        if times > 1:
            given[name] = insert(node, "repeat_interleave", given[name], times, _HEADS)
        given["enable_gqa"] = False
    node.args, node.kwargs = tuple(given.pop(name) for name in _OPERANDS[:3]), given
    for operand in needless:
        node.graph.erase_node(operand)
    if not has_kernel and not hidden and is_dense(result, range(result.dim())):
        _copy_result(node)
    return True


def _copy_result(node: Node) -> None:
    """Have what reads a result of attention read a copy in C order, with the example value that views share."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_method("clone", (node,), {"memory_format": torch.contiguous_format})
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    copy.meta = {**node.meta}
    example = example_of(node)
    with example.fake_mode, torch.no_grad():
        other = torch.empty_like(example.detach().transpose(1, 2), memory_format=torch.contiguous_format)
        node.meta["example_value"] = other.transpose(1, 2).requires_grad_(example.requires_grad)


def _has_tokens_outside(tensor: Any) -> bool:
    """Whether a transposed result has a row of all heads for each token, if memory has heads outside of tokens."""
    return bool(is_dense(tensor, (0, 2, 1, 3)))


def _has_rows(tensor: Any) -> bool:
    """Whether a query has images, then heads and tokens or tokens and heads, then elements in memory."""
    images, heads, tokens, elements = concrete_sizes(tensor.stride())
    return images >= max(heads, tokens) and min(heads, tokens) >= elements


def _find_kernel(given: dict[str, Any], examples: dict[str, Any]) -> _Changes | None:
    """Find how PyTorch has a kernel for a call; None if it has none. It has one for each scale, or for none."""
    causal, shares = given.get("is_causal", False), given.get("enable_gqa", False)
    if any(0 in concrete_sizes(t.shape) for t in examples.values()):
        return None  # PyTorch computes nothing, and divides by a number of heads if it is asked for a kernel
    operands = {name: _stand_in(t) for name, t in examples.items()}
    if not _is_decomposed(operands, is_causal=causal, enable_gqa=shares):
        return _Changes()
    copied = tuple(name for name, t in operands.items() if t.stride(-1) != 1)
    operands |= {name: _stand_in(operands[name], contiguous=True) for name in copied}
    if copied and not _is_decomposed(operands, is_causal=causal, enable_gqa=shares):
        return _Changes(copied)
    if shares is not True:
        return None
    heads = [examples[name].shape[_HEADS] for name in _OPERANDS[:3]]
    if not all(type(n) is int for n in heads):
        return None
    times = {name: heads[0] // n for name, n in zip(("key", "value"), heads[1:], strict=True)}
    operands |= {name: _repeat_stand_in(operands[name], n) for name, n in times.items()}
    return None if _is_decomposed(operands, is_causal=causal) else _Changes(copied, times)


def _gains(query: Any, result: Any, causal: bool, compiled: bool) -> bool:
    """Whether PyTorch's kernel is faster than what it does without; see the head of the file."""
    if query.dtype != torch.float32 or causal or not result.requires_grad:
        return True
    return not compiled and query.shape[-1] <= _MOST_WITH_GRADIENTS


def _is_decomposed(operands: dict[str, Any], **options: Any) -> bool:
    """Whether PyTorch has no kernel for a call."""
    query, key, value = (operands[name] for name in _OPERANDS[:3])
    return _choose(query, key, value, operands.get("attn_mask"), **options) == SDPBackend.MATH.value


def _choose(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> int:
    return torch._fused_sdp_choice(query, key, value, attn_mask=mask, **options)


def _stand_in(tensor: Any, contiguous: bool = False) -> Any:
    """Return a tensor of the shape, dtype and device of another, by which PyTorch chooses, in little memory.

    Its last dimension is contiguous where that of the other is, or if `contiguous` says so.
    """
    shape = concrete_sizes(tensor.shape)
    step = 1 if contiguous or concrete_sizes(tensor.stride()[-1:]) == (1,) else 2
    with unset_fake_temporarily():
        row = torch.empty(shape[-1] * step, dtype=tensor.dtype, device=tensor.device)[::step]
        return row.expand(shape).requires_grad_(tensor.requires_grad)


def _repeat_stand_in(tensor: Any, times: int) -> Any:
    shape = list(tensor.shape)
    shape[_HEADS] *= times
    return tensor.narrow(_HEADS, 0, 1).expand(shape)
