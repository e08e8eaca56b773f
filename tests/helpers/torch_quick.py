"""Leaves out what PyTorch does beside its work: no test looks at it, and it takes a good part of their time."""

from __future__ import annotations

from typing import Any

import torch._dynamo.guards


def be_quick() -> None:
    """For the rest of the process."""
    # Dynamo times the guards of every capture, for a log, once it has emptied the processor's caches; and collects
    # garbage.
    _exchange(torch._dynamo.guards, "profile_guard_manager", lambda *args: 0.0)
    torch._dynamo.config.run_gc_after_compile = False
    if not torch.accelerator.is_available():
        # Every seed waits for devices that there are not, with the stack as text.
        for devices in (torch.cuda, torch.xpu, torch.mtia):
            _exchange(devices, "manual_seed_all", lambda seed: None)


def _exchange(module: Any, name: str, function: Any) -> None:
    assert hasattr(module, name), f"{module.__name__}.{name} has another name in this version"
    setattr(module, name, function)
