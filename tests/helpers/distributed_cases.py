"""Two processes train together: the cases of `torch/test_distributed.py`, and what runs them in one of the processes.

`python distributed_cases.py FOLDER [NAME ...]` with RANK and WORLD_SIZE set; a line of `FOLDER/RANK` tells how a case
went. With names, these cases alone run.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import distributed_models as small
import torch
import torch.distributed as dist
import torch_models as models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch_quick import be_quick

import cupyfuse.torch as ct
from cupyfuse.torch.backend import backend, fuse_module
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.cost import decision
from cupyfuse.torch.graphs import partition
from cupyfuse.torch.graphs.lowering import AsOperator

Wrap = Callable[[Any], Any]
LIMIT = timedelta(seconds=60)  # for one collective operation: where one process failed the other waits no longer

chains = 0  # in graphs that `compiled` has exchanged


def compiled(module: Any) -> Any:
    """A module as `torch.compile(backend="cupyfuse")` has it, without Inductor and its compiler."""

    def ahead(graph: Any, inputs: Any) -> Any:
        global chains
        found = fuse_module(graph, AsOperator(Options()), partition.judge_without_costs)
        chains += sum(len(parts.chains) for parts in found)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(module, backend=ahead)


# Wrappers -----------------------------------------------------------------------------------------------------------


def layers_sharded(module: Any) -> Any:
    """Layer by layer, inner ones first."""
    for part in module.modules():
        if isinstance(part, models.Block):
            fully_shard(part)
    for name in ("linear", "gemm", "qkv", "head"):
        if hasattr(module, name):
            fully_shard(getattr(module, name))
    return module


def each_sharded(module: Any) -> Any:
    return fully_shard(layers_sharded(module))


def group_sharded(module: Any) -> Any:
    """Several modules whose parameters are gathered together."""
    fully_shard([module.norm, module.qkv])
    fully_shard([module.mlp, module.head])
    return fully_shard(module)


narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
small_buckets = partial(DDP, bucket_cap_mb=0.0005)


def without_sync(module: Any, last: bool) -> Any:
    return small._nothing() if last else module.no_sync()


def without_reduction(module: Any, last: bool) -> Any:
    module.set_requires_gradient_sync(last)
    return small._nothing()


class Checkpointed(models.Block):
    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed(module: Any) -> Any:
    for part in module.modules():
        if type(part) is models.Block:
            part.__class__ = Checkpointed
    return module


# Cases --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model that is trained in two ways, in both processes.

    Attributes
    ----------
    model : makes it
    plain : how PyTorch alone trains it
    ours : how it is trained with us
    optimizer : name in `distributed_models.OPTIMIZERS`
    accumulate : see `distributed_models.trained`
    tolerance : of the losses, relative; ten times that of parameters, of which none is larger than a few
    fused : whether a chain has to run
    same_data : whether the processes get the same inputs
    """

    model: Callable[[], nn.Module]
    plain: Wrap
    ours: Wrap
    optimizer: str = "SGD"
    accumulate: Any = None
    # Sums of a few dozen float32 terms in another order, carried through five steps of a contracting iteration.
    tolerance: float = 1e-5
    fused: bool = True
    same_data: bool = False


HEADS: dict[str, Callable[[], nn.Module]] = {
    "logsumexp": models.HeadLogSumExp,
    "sum": models.HeadSum,
    "softmax": models.HeadSoftmax,
}
MODELS = {**HEADS, "mlp": small.MLP, "transformer": small.Transformer}
DROP_INS: dict[str, Callable[[], nn.Module]] = {
    "logsumexp": lambda: ct.HeadLogSumExp(12, 7),
    "sum": lambda: ct.HeadSum(12, 7),
    "softmax": lambda: ct.HeadSoftmax(12, 7),
}
FORMS: dict[str, tuple[Wrap, Wrap]] = {
    "DDP(fuse)": (DDP, lambda m: DDP(ct.fuse(m))),
    "fuse(DDP)": (DDP, lambda m: ct.fuse(DDP(m))),
    "compile(DDP)": (DDP, lambda m: compiled(DDP(m))),
    "fully_shard(fuse)": (fully_shard, lambda m: fully_shard(ct.fuse(m))),
    "fuse(fully_shard)": (fully_shard, lambda m: ct.fuse(fully_shard(m))),
    "compile(fully_shard)": (fully_shard, lambda m: compiled(fully_shard(m))),
    "each sharded, fuse": (each_sharded, lambda m: ct.fuse(each_sharded(m))),
    "fuse, each sharded": (each_sharded, lambda m: each_sharded(ct.fuse(m))),
}
# The plain modules that drop-in ones replace have their parameters' names and their draws.
AS_PLAIN: dict[str, Wrap] = {"DDP": DDP, "fully_shard": fully_shard}

CASES: dict[str, Case] = {}
for number, (form, (plain, ours)) in enumerate(FORMS.items()):
    heads_left = [head for k, head in enumerate(HEADS) if (k + number) % len(HEADS)]  # each form trains one of them
    for which, (model_name, make) in enumerate(MODELS.items()):
        if model_name in heads_left:
            continue
        name = list(small.OPTIMIZERS)[(number + which) % 2]
        CASES[f"{form}, {model_name}, {name}"] = Case(make, plain, ours, name)


def _options() -> dict[str, Case]:
    """List the cases of wrappers with options of their own, of wrappers within a model, and of checkpoints."""
    tf, mlp, block = small.Transformer, small.MLP, lambda: nn.Sequential(models.Block(small.WIDTH), nn.Softmax(-1))
    shard_narrow: Wrap = lambda m: fully_shard(m, mp_policy=narrow)  # noqa: E731
    kept: Wrap = lambda m: fully_shard(m, reshard_after_forward=False)  # noqa: E731
    return {
        "DDP, static graph": Case(tf, DDP, lambda m: ct.fuse(DDP(m, static_graph=True))),
        "DDP, static graph, inside": Case(mlp, DDP, lambda m: DDP(ct.fuse(m), static_graph=True)),
        "DDP, unused parameters": Case(mlp, DDP, lambda m: ct.fuse(DDP(m, find_unused_parameters=True))),
        "DDP, small buckets": Case(mlp, DDP, lambda m: ct.fuse(small_buckets(m, gradient_as_bucket_view=True))),
        "DDP, small buckets, inside": Case(mlp, DDP, lambda m: small_buckets(ct.fuse(m))),
        "DDP, accumulated": Case(mlp, DDP, lambda m: ct.fuse(DDP(m)), accumulate=without_sync),
        "DDP, accumulated, inside": Case(mlp, DDP, lambda m: DDP(ct.fuse(m)), accumulate=without_sync),
        "DDP, tied": Case(small.Tied, DDP, lambda m: ct.fuse(DDP(m)), "AdamW"),
        "DDP within": Case(block, lambda m: nn.Sequential(DDP(m)), lambda m: ct.fuse(nn.Sequential(DDP(m)))),
        "DDP, checkpointed": Case(mlp, DDP, lambda m: ct.fuse(DDP(checkpointed(m)))),
        "fused twice": Case(mlp, fully_shard, lambda m: ct.fuse(fully_shard(ct.fuse(m)))),
        "sharded before and after": Case(mlp, each_sharded, lambda m: fully_shard(ct.fuse(layers_sharded(m)))),
        "sharded, groups": Case(tf, group_sharded, lambda m: ct.fuse(group_sharded(m))),
        "sharded, groups, inside": Case(tf, group_sharded, lambda m: group_sharded(ct.fuse(m)), "AdamW"),
        "sharded, kept": Case(mlp, fully_shard, lambda m: ct.fuse(kept(m))),
        "sharded, moved": Case(mlp, fully_shard, lambda m: ct.fuse(fully_shard(m)).float()),
        "sharded, accumulated": Case(
            mlp, fully_shard, lambda m: ct.fuse(each_sharded(m)), accumulate=without_reduction
        ),
        "sharded, checkpointed": Case(mlp, fully_shard, lambda m: ct.fuse(each_sharded(checkpointed(m))), fused=False),
        "sharded, tied": Case(small.Tied, fully_shard, lambda m: ct.fuse(fully_shard(m))),
        # Of bfloat16 the eighth binary digit is rounded; results of eager are, after every operation.
        "sharded, bfloat16": Case(tf, shard_narrow, lambda m: ct.fuse(shard_narrow(m)), tolerance=2**-8),
        "sharded, bfloat16, inside": Case(tf, shard_narrow, lambda m: shard_narrow(ct.fuse(m)), tolerance=2**-8),
        "Inductor": Case(models.HeadLogSumExp, DDP, lambda m: torch.compile(DDP(m), backend=backend), fused=False),
    }


CASES |= _options()
for wrapper_name, wrapper in AS_PLAIN.items():
    for head, make in DROP_INS.items():
        CASES[f"{wrapper_name}, drop-in {head}"] = Case(make, wrapper, wrapper)


# Tensor parallel ----------------------------------------------------------------------------------------------------


def parallel(plan: Callable[[], dict[str, Any]]) -> Wrap:
    return lambda module: parallelize_module(module, init_device_mesh("cpu", (dist.get_world_size(),)), plan())


columns_rows = parallel(lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()})
gathered = parallel(lambda: {"linear": ColwiseParallel(output_layouts=Replicate())})
sharded_output = parallel(lambda: {"linear": ColwiseParallel(use_local_output=False)})
sequence = parallel(
    lambda: {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
)


def fully_and_parallel(module: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    parallelize_module(module, mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(module, mesh=mesh["data"])


def _block() -> nn.Module:
    return models.Block(small.WIDTH)


def _wide_head() -> nn.Module:
    return models.HeadLogSumExp(small.WIDTH, 8)


PARALLEL: dict[str, tuple[Callable[[], nn.Module], Wrap, bool]] = {
    "columns and rows": (_block, columns_rows, True),
    "gathered": (_wide_head, gathered, True),
    "sharded output": (_wide_head, sharded_output, False),
    "sequence": (_block, sequence, False),
    "with fully_shard": (_block, fully_and_parallel, True),
}
for plan_name, (make, wrap, fused) in PARALLEL.items():
    forms: dict[str, Wrap] = {
        "fuse": lambda m, wrap=wrap: ct.fuse(wrap(m)),  # type: ignore[misc]
        "fused before": lambda m, wrap=wrap: wrap(ct.fuse(m)),  # type: ignore[misc]
        "compile": lambda m, wrap=wrap: compiled(wrap(m)),  # type: ignore[misc]
    }
    for form, ours in forms.items():
        CASES[f"tensor parallel, {plan_name}, {form}"] = Case(
            make, wrap, ours, fused=fused, same_data=wrap is not fully_and_parallel
        )


# Running ------------------------------------------------------------------------------------------------------------


def counterpart(module: Any) -> Any:
    """A plain module with a drop-in one's parameters."""
    kinds = {ct.HeadLogSumExp: models.HeadLogSumExp, ct.HeadSum: models.HeadSum, ct.HeadSoftmax: models.HeadSoftmax}
    kind = kinds.get(type(module))
    if kind is None:
        return copy.deepcopy(module)
    made = kind()
    made.load_state_dict(module.state_dict())
    return made


def check(case: Case, rank: int) -> None:
    """Train a case's model plain and fused, and compare losses, states, and parameters among processes."""
    global chains
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = case.model()
    chains = 0
    source = 0 if case.same_data else rank
    run = partial(small.trained, optimizer=case.optimizer, rank=source, accumulate=case.accumulate)
    losses, state = run(case.plain(counterpart(start)))
    module = case.ours(copy.deepcopy(start))
    got_losses, got = run(module)
    assert len(set(losses)) == len(losses), f"losses repeat: {losses}"
    torch.testing.assert_close(got_losses, losses, rtol=case.tolerance, atol=case.tolerance)
    for ours, plain in zip(got, state, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=10 * case.tolerance, check_dtype=True)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [float(t.double().sum()) for t in got[: len(list(module.parameters()))]])
    assert all(sums == everywhere[0] for sums in everywhere), f"the processes' parameters differ: {everywhere}"
    if case.fused:
        ran = sum(bool(part.plans) for part in ct.explain(module).fused)
        assert ran or chains, str(ct.explain(module))


def main(folder: Path, names: Sequence[str]) -> None:
    """Run cases, all without names, as one process of several, and write each error, empty where there is none."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    be_quick()
    vars(decision)["judge_for"] = lambda *args, **kwargs: partition.judge_without_costs
    place = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=LIMIT)
    with open(folder / str(rank), "w", buffering=1) as file:
        for name, case in CASES.items():
            if names and name not in names:
                continue
            try:
                check(case, rank)
                error = ""
            except Exception:
                error = traceback.format_exc()
            file.write(json.dumps([name, error]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
