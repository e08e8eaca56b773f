"""Attention whose queries share heads of keys and values (`enable_gqa=True`), in a captured graph.

PyTorch's kernels for float32 take as many heads of each. Else it repeats keys and values itself and computes products,
mask and softmax one after the other, with the scores in memory. Where they are repeated before, such a kernel serves.
On an H200, 64 to 256 elements a head, 128 to 2048 tokens: 1.25 to 3.4 times as fast, with gradients 1.02 to 2.1
times, but for 0.8 with more than 128 elements a head and no causal mask, which are left as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, Node
from torch.nn.attention import SDPBackend

from ..chains.tensors import concrete_sizes
from .nodes import example_of, insert

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_HEADS = -3  # the dimension
_MOST_WITH_GRADIENTS = 128  # elements a head; of more, the kernel's backward pass spills


def repeat_shared_heads(graph: Graph) -> bool:
    """Repeat keys and values before float32 attention that PyTorch has a kernel for then, in place.

    Returns whether the graph was changed.
    """
    calls = [n for n in graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
    changed = [_repeat(node) for node in calls]
    return any(changed)


def _repeat(node: Node) -> bool:
    """Repeat the heads of one call's keys and values, if it gains by that."""
    given = dict(zip(_PARAMETERS, node.args, strict=False)) | node.kwargs
    query, key, value = (example_of(given.get(name)) for name in _PARAMETERS[:3])
    result = example_of(node)
    if given.get("enable_gqa") is not True or given.get("dropout_p", 0) != 0:  # dropouts draw by kernel
        return False
    if any(t is None or t.dtype != torch.float32 or t.dim() != 4 for t in (query, key, value, result)):
        return False
    if torch.are_deterministic_algorithms_enabled() or not _gains(query, given.get("is_causal", False), result):
        return False
    times = [query.shape[_HEADS] // t.shape[_HEADS] for t in (key, value)]
    if not all(type(n) is int for n in times) or not _finds_kernel(given, times):
        return False
    for name, n in zip(("key", "value"), times, strict=True):
        given[name] = insert(node, "repeat_interleave", given[name], n, _HEADS) if n != 1 else given[name]
    operands = tuple(given.pop(name) for name in _PARAMETERS[:3])
    node.args, node.kwargs = operands, {**given, "enable_gqa": False}
    return True


def _gains(query: Any, causal: bool, result: Any) -> bool:
    return causal is True or not result.requires_grad or query.shape[-1] <= _MOST_WITH_GRADIENTS


def _finds_kernel(given: dict[str, Any], times: list[int]) -> bool:
    """Whether PyTorch would compute the call without a kernel of its own, and with repeated heads by one."""
    query, key, value, mask = (_stand_in(given.get(name)) for name in _PARAMETERS[:4])
    options = {"is_causal": given.get("is_causal", False), "scale": given.get("scale")}
    as_is = _choose(query, key, value, mask, **options, enable_gqa=True)
    return (
        as_is == SDPBackend.MATH.value != _choose(query, _more(key, times[0]), _more(value, times[1]), mask, **options)
    )


def _choose(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> int:
    return torch._fused_sdp_choice(query, key, value, attn_mask=mask, **options)


def _stand_in(node: Any) -> Any:
    """Return a tensor of the shape, dtype and device of a node's result, by which PyTorch chooses, in little memory."""
    example = example_of(node)
    if example is None:
        return None
    shape = concrete_sizes(example.shape)
    with unset_fake_temporarily():
        row = torch.empty(shape[-1], dtype=example.dtype, device=example.device)
        return row.expand(shape).requires_grad_(example.requires_grad)


def _more(tensor: Any, times: int) -> Any:
    heads = tensor.shape[_HEADS] * times
    return tensor[:, :1].expand(-1, heads, -1, -1)
