"""Check whether an engine can take tensors; chains on others are left to PyTorch."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch

from .chain import Chain
from .tensors import Tensors, dtype_name

PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))

# Dispatch keys of tensors that are more than strided memory.
_UNSUPPORTED_KEYS = re.compile(
    "Negative|Conjugate|Sparse|Quantized|ZeroTensor|Nested|Mkldnn|Meta|Batched|FuncTorch|Python"
)

_is_plain_by_keys: dict[int, bool] = {}

_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
_forward_mode = torch.autograd.forward_ad


def is_intercepted() -> bool:
    """Whether a function transform, a dispatch or function mode, a tracer or forward-mode AD watches operations."""
    return bool(
        _transforms()
        or _dispatch_modes()
        or _function_modes()
        or _tracing() is not None
        or _forward_mode._current_level >= 0
    )


def is_recording() -> bool:
    """Whether autograd records operations: not in inference mode, where gradients may be enabled all the same."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def signature_of(chain: Chain, tensors: Tensors, numbers: Iterable[int]) -> tuple[Any, ...] | str:
    """Return a hashable key of what plans depend on in these inputs; text, the reason, if one is no plain tensor."""
    signature: list[Any] = []
    for k in numbers:
        t = tensors[k]
        if type(t) not in PLAIN_TYPES:
            return f"{chain.names[k]} is a {type(t).__name__}"
        try:
            signature += (t.shape, t.stride(), t.dtype, t.requires_grad, t.layout, t.is_neg(), t.device)
            signature.append(t._is_zerotensor())
        except RuntimeError:
            return f"{chain.names[k]} has no strides"
    return tuple(signature)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; asking imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is strided memory and no more: not batched by a transform, not to be negated when it is read."""
    keys = torch._C._dispatch_keys(tensor)
    number = keys.raw_repr()
    if number not in _is_plain_by_keys:
        _is_plain_by_keys[number] = not _UNSUPPORTED_KEYS.search(str(keys))
    return _is_plain_by_keys[number]


def unsupported(chain: Chain, tensors: Tensors) -> str:
    """Say why no engine takes these tensors; empty if one does."""
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        return f"its tensors are on different devices: {', '.join(sorted(map(str, devices)))}"
    if devices and next(iter(devices)).type not in ("cpu", "cuda"):
        return f"its tensors are on the device {next(iter(devices))}"
    for name, t in zip(chain.names, tensors, strict=True):
        if t.layout is not torch.strided or not is_plain(t):
            return f"{name} is not a plain strided tensor"
        if dtype_name(t.dtype) is None:
            return f"{name} is of dtype {t.dtype}"
    return ""
