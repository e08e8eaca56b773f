"""Keep the state of PyTorch's distributed wrappers in copies of modules.

`fully_shard` and `replicate` keep their state in a table by module, and swap parameters in the modules' own
dictionaries, which copies share: a copy that is entered into the table is sharded as the original is.
`FullyShardedDataParallel` sets parameters as attributes of the modules that it wraps: these are not copied.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_fsdp(module: Any) -> bool:
    """Whether a module is a `FullyShardedDataParallel`."""
    wrappers = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return wrappers is not None and isinstance(module, wrappers.FullyShardedDataParallel)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` has put hooks on a part of a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in module.modules())


def share_state(original: Any, copy: Any) -> None:
    """Enter a copy of a module into the table of distributed states, with the state that the original has there."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    if states is None or isinstance(original, states._State):
        return
    state = states._get_module_state(original)
    if state is not None:
        states._insert_module_state(copy, state)
