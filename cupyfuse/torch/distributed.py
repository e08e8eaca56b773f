"""Copies of modules that PyTorch's distributed wrappers manage.

`fully_shard` and `replicate` keep their state in a table by module, and exchange parameters in the modules' own
dictionaries, which copies share: a copy that the table knows takes part as the original does.
`FullyShardedDataParallel` sets parameters as attributes of the modules that it was made with: these are not copied.
"""

from __future__ import annotations

import sys
from typing import Any


def flattens(module: Any) -> bool:
    """Whether a module is a `FullyShardedDataParallel`."""
    wrappers = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return wrappers is not None and isinstance(module, wrappers.FullyShardedDataParallel)


def adopt(original: Any, made: Any) -> None:
    """Let what manages a module's parameters, if anything does, manage those of its copy."""
    states: Any = sys.modules.get("torch.distributed._composable_state")
    if states is None or isinstance(original, states._State):
        return
    state = states._get_module_state(original)
    if state is not None:
        states._insert_module_state(made, state)
