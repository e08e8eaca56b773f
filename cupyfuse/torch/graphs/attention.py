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
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend

from ..chains.tensors import concrete_sizes
from .inplace import SWITCHES
from .nodes import example_of, insert
from .written_memory import WrittenMemory

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_OPERANDS = _PARAMETERS[:4]
_HEADS = -3  # the dimension
_MOST_WITH_GRADIENTS = 128  # elements of a float32 head; of more, the kernel's backward pass is slow


def prepare_attention(graph: Graph, compiled: bool) -> bool:
    """Copy masks and repeat heads for calls of attention that gain by it, in place.

    `compiled` says that Inductor compiles the graph; else PyTorch's eager kernels run it. Returns whether anything was
    changed.
    """
    calls = [n for n in graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
    copies = _Copies(graph)
    changed = [_prepare(node, compiled, copies) for node in calls]
    return any(changed)


class _Copies:
    """Contiguous copies of operands, for all calls that read them."""

    def __init__(self, graph: Graph):
        self._memory, self._made = WrittenMemory(graph), dict[Node, Node]()
        self._switches = any(node.target in SWITCHES for node in graph.nodes)

    def of(self, operand: Node, place: Node) -> Node:
        """Return the copy of an operand, made before `place` where an earlier one may be of other values or modes."""
        if operand not in self._made or self._switches or self._memory.is_written_to(operand):
            self._made[operand] = insert(place, "contiguous", operand)
        return self._made[operand]


def _prepare(node: Node, compiled: bool, copies: _Copies) -> bool:
    """Prepare the operands of one call, if it gains by that."""
    given = dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
    examples: dict[str, Any] = {name: example_of(given[name]) for name in _OPERANDS if given.get(name) is not None}
    result, query = example_of(node), examples["query"]
    if result is None or any(t is None for t in examples.values()) or query.dtype != result.dtype:
        return False  # tensors of other kinds; the conversions of autocast
    if given.get("dropout_p", 0) != 0 or torch.are_deterministic_algorithms_enabled():  # dropouts draw by kernel
        return False
    if not _gains(query, result, given.get("is_causal") is True, compiled):
        return False
    options = {"is_causal": given.get("is_causal", False), "scale": given.get("scale")}
    shares = given.get("enable_gqa", False)
    operands = {name: _stand_in(t) for name, t in examples.items()}
    if not _is_decomposed(operands, **options, enable_gqa=shares):
        return False
    copied = [name for name, t in operands.items() if t.stride(-1) != 1]
    operands |= {name: _stand_in(operands[name], contiguous=True) for name in copied}
    times: dict[str, int] = {}
    if _is_decomposed(operands, **options, enable_gqa=shares):
        heads = query.shape[_HEADS] if shares is True else None
        times = {name: heads // examples[name].shape[_HEADS] for name in ("key", "value") if type(heads) is int}
        operands |= {name: _repeat_stand_in(operands[name], n) for name, n in times.items()}
        if not times or _is_decomposed(operands, **options):
            return False
        given["enable_gqa"] = False
    for name in copied:
        given[name] = copies.of(given[name], node)
    for name in (name for name, n in times.items() if n != 1):
        given[name] = insert(node, "repeat_interleave", given[name], times[name], _HEADS)
    node.args = tuple(given.pop(name) for name in _OPERANDS[:3])
    node.kwargs = given
    return True


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
