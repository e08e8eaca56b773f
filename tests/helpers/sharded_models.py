"""Modules on DTensors beside one process in float64: cases of `sharded_cases.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
import torch_models as models
from sharded_case import FEATURES, ROWS, Here, case, require_same_everywhere, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import cupyfuse.torch as ct
from cupyfuse.torch.backend import fuse_module
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.graphs import partition
from cupyfuse.torch.graphs.lowering import AsOperator

SPLIT_OUTPUT = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
LOSS_LABELS = torch.tensor([1, 2, -100, 9, 0, 3, 3])


class Loss(nn.Module):
    """A last layer and its loss."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 10)
        self.label_smoothing = label_smoothing

    def forward(self, x: Any, labels: Any) -> Any:
        return F.cross_entropy(self.linear(x), labels, label_smoothing=self.label_smoothing)


class LogSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 10)

    def forward(self, x: Any) -> Any:
        return F.log_softmax(self.linear(x), -1)


def compiled(module: Any) -> Any:
    """A module as `torch.compile(backend="cupyfuse")` has it, without Inductor and its compiler."""

    def ahead(graph: Any, inputs: Any) -> Any:
        found = fuse_module(graph, AsOperator(Options()), partition.judge_without_costs)
        chains.append(sum(len(parts.chains) for parts in found))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(module, backend=ahead)


chains: list[int] = []  # in graphs that `compiled` has exchanged


def distributed(module: Any, mesh: Any, vocabulary: bool) -> Any:
    """All parameters and buffers as DTensors, those of classes split."""

    def place(name: str, part: Any, mesh: Any) -> None:
        for tensors, wrap in ((part._parameters, nn.Parameter), (part._buffers, lambda t: t)):
            for key, t in tensors.items():
                split = vocabulary and t is not None and t.numel() > 1
                tensors[key] = (
                    None if t is None else wrap(distribute_tensor(t, mesh, [Shard(0) if split else Replicate()]))
                )

    return distribute_module(module, mesh, place)


def train(module: Any, arguments: Sequence[Any], steps: int = 2) -> list[Any]:
    """Results of a few steps, then all parameters and buffers."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    results = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = module(*arguments)
        results.append(whole(y))
        y = y.full_tensor() if isinstance(y, DTensor) else y
        (y * torch.linspace(-1.0, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
        optimizer.step()
    return [*results, *(whole(t) for t in (*module.parameters(), *module.buffers()))]


def check_training(here: Here, plain: Any, ours: Any, arguments: Any, placed: Any, fused: bool = True) -> None:
    """Compare a few steps with one process in float64: a few dozen roundings, of sums no larger than ten, a step."""
    exact = train(copy.deepcopy(plain).double(), [t.double() if t.is_floating_point() else t for t in arguments])
    found = train(ours, placed)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=2 * 36 * 10 * 2.0**-24)
    require_same_everywhere(*ours.parameters(), *ours.buffers())
    assert not here.left, here.left
    if fused:
        ran = [part for part in ct.explain(ours).fused if part.plans]
        assert ran or any(chains), str(ct.explain(ours))


def features() -> Any:
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))


FORMS: dict[str, Callable[[Any], Any]] = {"fuse": ct.fuse, "compile": compiled}
PARALLEL: dict[str, Callable[[], nn.Module]] = {
    "logsumexp head": lambda: models.HeadLogSumExp(FEATURES, 10),
    "sum head": lambda: models.HeadSum(FEATURES, 10),
    "log_softmax": LogSoftmax,
    "loss": lambda: Loss(0.1),
}


def _enter_parallel(name: str, form: str, *worlds: int) -> None:
    @case(f"ColwiseParallel, {name}, {form}", *worlds)
    def run(here: Here) -> None:
        chains.clear()
        plain = PARALLEL[name]()
        ours = FORMS[form](parallelize_module(copy.deepcopy(plain), here.mesh, {"linear": SPLIT_OUTPUT}))
        labels = [LOSS_LABELS] if name == "loss" else []
        placed = [distribute_tensor(t, here.mesh, [Replicate()]) for t in labels]
        check_training(here, plain, ours, [features(), *labels], [features(), *placed])


for _name in PARALLEL:
    _enter_parallel(_name, "fuse", 2)
_enter_parallel("loss", "fuse", 3)
_enter_parallel("logsumexp head", "compile", 2)
_enter_parallel("loss", "compile", 2)


class Probabilities(nn.Module):
    """Probabilities near their limits, of which a loss divides by the distance from these."""

    def __init__(self, softmax: bool) -> None:
        super().__init__()
        self.linear, self.softmax = nn.Linear(FEATURES, 10), softmax

    def forward(self, x: Any) -> Any:
        y = self.linear(x) * 16
        return y.softmax(-1) if self.softmax else y.sigmoid()


def _enter_probabilities(softmax: bool, **options: Any) -> None:
    @case(f"gradients of rounded results, {'softmax' if softmax else 'sigmoid'}, {options}", 2)
    def run(here: Here) -> None:
        plain = Probabilities(softmax).bfloat16()
        ours = ct.fuse(parallelize_module(copy.deepcopy(plain), here.mesh, {"linear": SPLIT_OUTPUT}), **options)
        for module in (plain, ours):
            y = module(features().bfloat16())
            y = y.full_tensor() if isinstance(y, DTensor) else y
            (-torch.log(1 - y + 1e-6).mean()).backward()
        torch.testing.assert_close(whole(ours.linear.bias.grad), plain.linear.bias.grad, rtol=0.1, atol=0.02)
        assert not here.left, here.left


for _softmax in (False, True):
    _enter_probabilities(_softmax)
    _enter_probabilities(_softmax, max_workspace=1)

DROP_INS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "logsumexp head": (lambda: ct.HeadLogSumExp(FEATURES, 10), lambda: models.HeadLogSumExp(FEATURES, 10)),
    "sum head": (lambda: ct.HeadSum(FEATURES, 10), lambda: models.HeadSum(FEATURES, 10)),
    "softmax head": (lambda: ct.HeadSoftmax(FEATURES, 10), lambda: models.HeadSoftmax(FEATURES, 10)),
}


def _enter_drop_in(name: str, how: str, *worlds: int) -> None:
    @case(f"drop-in, {name}, {how}", *worlds)
    def run(here: Here) -> None:
        ours, plain = (make() for make in DROP_INS[name])
        plain.load_state_dict(ours.state_dict())
        x = distribute_tensor(features(), here.mesh, [Shard(0) if how == "rows" else Replicate()])
        check_training(here, plain, distributed(ours, here.mesh, how == "vocabulary"), [features()], [x])


for _name in DROP_INS:
    # BatchNorm over rows that are split has the statistics of all of them.
    _enter_drop_in(_name, "rows", 2)
    _enter_drop_in(_name, "vocabulary", 3)


if torch.__version__ >= (2, 12):  # before, DTensors had no strategy for it in eager

    @case("BatchNorm over rows, fuse", 3)
    def _batch_norm(here: Here) -> None:
        plain = models.HeadSoftmax(FEATURES, 10)
        ours = ct.fuse(distributed(copy.deepcopy(plain), here.mesh, False))
        check_training(here, plain, ours, [features()], [distribute_tensor(features(), here.mesh, [Shard(0)])])


@case("loss_parallel", 2)
def _loss_parallel(here: Here) -> None:
    """As PyTorch's own, with its context or without."""
    plain = Loss()
    placed = [features(), distribute_tensor(LOSS_LABELS, here.mesh, [Replicate()])]
    for context in (loss_parallel, nullcontext):
        with context():
            ours = ct.fuse(parallelize_module(copy.deepcopy(plain), here.mesh, {"linear": SPLIT_OUTPUT}))
            check_training(here, plain, ours, [features(), LOSS_LABELS], placed)
    assert max(here.gathered) <= 5 * 4 * ROWS, here.gathered


@case("linear_cross_entropy of a module", 2)
def _module(here: Here) -> None:
    ours = ct.LinearCrossEntropy(FEATURES, 10, label_smoothing=0.1)
    plain = Loss(0.1)
    plain.linear.load_state_dict({k: v for k, v in ours.state_dict().items() if k != "class_weight"})
    placed = [distribute_tensor(t, here.mesh, [Replicate()]) for t in (features(), LOSS_LABELS)]
    ours = distributed(ours, here.mesh, True)
    check_training(here, plain, ours, [features(), LOSS_LABELS], placed, fused=False)


@case("placements are PyTorch's", 2)
def _placements(here: Here) -> None:
    """A fused module returns what the plain one returns, placed alike, so that `to_local` of it is the same."""
    plain = parallelize_module(LogSoftmax(), here.mesh, {"linear": SPLIT_OUTPUT})
    wanted, got = plain(features()), ct.fuse(plain)(features())
    assert got.placements == wanted.placements, (got.placements, wanted.placements)
    torch.testing.assert_close(got.to_local(), wanted.to_local())


@case("fully_shard", 4)
def _fully_shard(here: Here) -> None:
    """Parameters sharded over one dimension of a mesh, the vocabulary over the other; each half has its own rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    plain = models.HeadLogSumExp(FEATURES, 10)
    module = parallelize_module(copy.deepcopy(plain), mesh["model"], {"linear": SPLIT_OUTPUT})
    ours = ct.fuse(fully_shard(module, mesh=mesh["data"]))
    x = torch.randn(2, ROWS, FEATURES, generator=torch.Generator().manual_seed(0))
    ours(x[mesh.get_local_rank("data")]).full_tensor().sum().backward()
    exact = copy.deepcopy(plain).double()
    exact(x.double().flatten(0, 1)).sum().backward()
    for p, q in zip(ours.parameters(), exact.parameters(), strict=True):
        # `fully_shard` averages.
        torch.testing.assert_close(p.grad.full_tensor().double(), q.grad / 2, rtol=0, atol=36 * 10 * 2.0**-24)
    assert not here.left and any(part.plans for part in ct.explain(ours).fused), (here.left, str(ct.explain(ours)))
