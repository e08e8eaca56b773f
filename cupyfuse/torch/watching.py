"""What functions of PyTorch do beside returning tensors, where fake tensors do not tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

# Where running statistics are among the arguments, and whether they are used or updated: fake tensors do not tell.
STATISTICS: dict[Any, tuple[int, int, int, str, bool]] = {
    F.batch_norm: (1, 2, 5, "training", False),
    F.instance_norm: (1, 2, 5, "use_input_stats", True),
    torch.batch_norm: (3, 4, 5, "training", False),
    torch.instance_norm: (3, 4, 5, "use_input_stats", True),
    torch.native_batch_norm: (3, 4, 5, "training", False),
    torch._native_batch_norm_legit: (3, 4, 5, "training", False),
}
# What does more than compute.
BEYOND = dict.fromkeys(
    ("register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_", "backward"),
    "autograd is told about a tensor within it",
) | {"__set__": "an attribute of a tensor is set"}


# What is known of a tensor and is no part of a kind of arguments: code that asks for it runs as it is.
ASKED = {
    getattr(torch.Tensor, name).__get__: f"it asks for {name} of a tensor"
    for name in ("is_leaf", "grad", "grad_fn", "_version", "_base", "retains_grad", "output_nr", "_backward_hooks")
} | {
    getattr(torch.Tensor, name): f"it asks for {name} of a tensor"
    for name in ("storage_offset", "data_ptr", "storage", "untyped_storage", "is_shared", "is_pinned", "is_set_to")
}


class Noting(TorchDispatchMode):
    """Notes whether random numbers are drawn, by whatever function."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def statistics(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Running statistics that a function updates."""
    if func not in STATISTICS:
        return []
    mean, var, flag, name, default = STATISTICS[func]
    if not (args[flag] if len(args) > flag else kwargs.get(name, default)):
        return []
    found = [
        args[at] if len(args) > at else kwargs.get(key) for at, key in ((mean, "running_mean"), (var, "running_var"))
    ]
    return [t for t in found if t is not None]


def reason(error: Exception) -> str:
    text = str(error).strip().splitlines()
    name = type(error).__name__
    if "DataDependent" in name or "data-dependent" in str(error) or "GuardOnDataDependent" in name:
        return "it needs a tensor's values while it runs"
    return f"{name}: {text[0] if text else ''}"[:300]


def state() -> tuple[Any, ...]:
    """What changes the meaning of operations."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda")),
    )
