"""Chains on DTensors in several processes: the cases of `torch/test_sharded.py`, and what runs them.

`python sharded_cases.py FOLDER [NAME ...]` forks 2, 3 and 4 processes, one number after the other: what they import is
imported once. A line of `FOLDER/WORLD-RANK` tells how a case went. With names, these cases alone run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import sharded_functions  # noqa: F401
import sharded_models  # noqa: F401
import torch
import torch._dynamo
import torch.distributed as dist
from sharded_case import CASES, Here, case
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_quick import be_quick

import cupyfuse.torch as ct
from cupyfuse.torch.chains import runner
from cupyfuse.torch.cost import decision
from cupyfuse.torch.graphs import partition
from cupyfuse.torch.sharded.exchange import Group

WORLDS = (2, 3, 4)
LIMIT = timedelta(seconds=60)  # for one collective operation: where one process failed the others wait no longer


def _watch(here: Here) -> None:
    """Note what is left to PyTorch, and what is exchanged."""
    find, gather = runner.Runner._executor_for, Group._gather

    def found(self: Any, tensors: Any) -> Any:
        executor = find(self, tensors)
        if isinstance(executor, str):
            here.left.append(f"{self.chain.name}: {executor}")
        return executor

    def watched(self: Any, parts: Sequence[Any]) -> Any:
        here.gathered.append(sum(p.nbytes for p in parts))
        return gather(self, parts)

    runner.Runner._executor_for = found  # type: ignore[method-assign]
    Group._gather = watched  # type: ignore[method-assign]


@case("a process dies", 2, 3)  # the last case, since no other can follow
def a_process_dies(here: Here) -> None:
    """The others get the error of PyTorch's collective operation, at once: nothing of ours waits or hides it."""
    x = distribute_tensor(torch.randn(4, 8), here.mesh, [Replicate()])
    w = distribute_tensor(torch.randn(10, 8), here.mesh, [Shard(0)]).requires_grad_()
    ct.linear_logsumexp(x, w).sum().backward()
    if here.rank == here.count - 1:
        here.ends = True
        return
    start = time.monotonic()
    try:
        for _ in range(3):
            ct.linear_logsumexp(x, w)
    except RuntimeError as error:
        assert "onnection" in str(error) or "peer" in str(error), error
    else:
        raise AssertionError("a state of a process that is dead was merged")
    assert time.monotonic() - start < LIMIT.total_seconds() / 2


def work(folder: Path, rank: int, count: int, names: Sequence[str]) -> None:
    """Run the cases as one process of several, and write each error, empty where there is none."""
    place = f"file://{folder / f'store{count}'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=LIMIT)
    here = Here(rank, count, init_device_mesh("cpu", (count,)))
    _watch(here)
    with open(folder / f"{count}-{rank}", "w", buffering=1) as file:
        for name, (worlds, run) in CASES.items():
            if count not in worlds or (names and name not in names):
                continue
            here.left.clear(), here.gathered.clear()
            torch._dynamo.reset()
            torch.manual_seed(0)
            try:
                run(here)
                error = ""
            except Exception:
                error = "".join([*here.left, traceback.format_exc()])
            file.write(json.dumps([name, error]) + "\n")
            if here.ends:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def main(folder: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    be_quick()
    vars(decision)["judge_for"] = lambda *args, **kwargs: partition.judge_without_costs
    for count in WORLDS:
        children = []
        for rank in range(count):
            child = os.fork()
            if not child:
                try:
                    work(folder, rank, count, names)
                finally:
                    sys.stdout.flush(), sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
