"""What of PyTorch's state a call depends on."""

from __future__ import annotations

import torch

# Tensors that are no more than that.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))

_newer = getattr(torch._C, "_get_fp32_precision_getter", None)


def matmul_precision() -> str:
    """PyTorch's precision of float32 products: of `set_float32_matmul_precision`, or of the switches by backend."""
    switch = _newer("cuda", "matmul") if _newer is not None else "none"
    if switch == "ieee":
        return "highest"
    try:
        precision = str(torch._C._get_float32_matmul_precision())
    except RuntimeError:  # where both were used
        precision = "highest"
    return "high" if switch == "tf32" and precision == "highest" else precision


_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_tracing = torch._C._get_tracing_state
_forward_mode = torch.autograd.forward_ad


def elsewhere() -> bool:
    """Whether tensors may be more than they look: transforms of functions, modes that watch operations, tracing."""
    return bool(
        _transforms()
        or _dispatch_modes()
        or _function_modes()
        or _tracing() is not None
        or _forward_mode._current_level >= 0
    )
