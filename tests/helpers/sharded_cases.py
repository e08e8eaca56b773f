"""Chains on DTensors in several processes: the cases of `torch/test_sharded.py`, and what runs them.

`python sharded_cases.py FOLDER [WORD ...]` forks 2, 3 and 4 processes, one number after the other: what they import is
imported once. A line of `FOLDER/WORLD-RANK` tells how a case went. With words, only cases whose names hold one run.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch_models as models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F
from torch_quick import be_quick

import cupyfuse.torch as ct
from cupyfuse.torch.backend import fuse_module
from cupyfuse.torch.chains import runner
from cupyfuse.torch.chains.options import Options
from cupyfuse.torch.cost import decision
from cupyfuse.torch.graphs import partition
from cupyfuse.torch.graphs.lowering import AsOperator
from cupyfuse.torch.sharded.exchange import Group

WORLDS = (2, 3, 4)
LIMIT = timedelta(seconds=60)  # for one collective operation: where one process failed the others wait no longer
ROWS, FEATURES = 7, 8


@dataclass
class Here:
    """One process of a case.

    Attributes
    ----------
    left : names of chains that ran by PyTorch's own operations in this case, and why
    gathered : bytes that this process gave to each exchange of states
    """

    rank: int
    count: int
    mesh: Any
    left: list[str] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)


CASES: dict[str, tuple[tuple[int, ...], Callable[[Here], None]]] = {}


def case(name: str, *worlds: int) -> Callable[[Callable[[Here], None]], Callable[[Here], None]]:
    """Enter a function as a case, in so many processes."""

    def enter(function: Callable[[Here], None]) -> Callable[[Here], None]:
        for world in worlds:
            CASES[f"{name}, {world}"] = (world,), function
        return function

    return enter


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def require_same_everywhere(*tensors: Any) -> None:
    """Replicated results have the same bits in all processes."""
    for t in tensors:
        if isinstance(t, DTensor) and all(p.is_replicate() for p in t.placements):
            bits = t._local_tensor.detach().reshape(-1).view(torch.uint8).tolist()
            everywhere: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, bits)
            assert all(other == bits for other in everywhere), "the processes' results differ"


# Functions ----------------------------------------------------------------------------------------------------------

LABELS = torch.tensor([1, 0, -100, 1, 0, 1, 0])
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.5, 1.0, 3.0, 0.5, 1.0, 2.0])
Function = Callable[[Any, Any, Any, Callable[[Any], Any]], Any]  # of x, weight, bias, and what places further tensors


def _loss(**options: Any) -> tuple[Function, Function]:
    """The fused loss, and PyTorch's."""
    weighted = options.pop("weighted", False)
    labels = options.pop("labels", LABELS)

    def ours(x: Any, w: Any, b: Any, place: Callable[[Any], Any]) -> Any:
        classes = place(CLASS_WEIGHTS[: w.shape[0]].to(w.dtype)) if weighted else None
        return ct.linear_cross_entropy(x, w, place(labels), b, class_weight=classes, **options)

    def plain(x: Any, w: Any, b: Any, place: Callable[[Any], Any]) -> Any:
        classes = CLASS_WEIGHTS[: w.shape[0]].to(w.dtype) if weighted else None
        logits = F.linear(x, w, b)
        known = {k: v for k, v in options.items() if k not in ("soft_cap", "max_workspace")}
        if "soft_cap" in options:
            logits = torch.tanh(logits / options["soft_cap"]) * options["soft_cap"]
        return F.cross_entropy(logits.double(), labels, None if classes is None else classes.double(), **known)

    return ours, plain


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "logsumexp": (lambda x, w, b, _: ct.linear_logsumexp(x, w, b), lambda x, w, b, _: F.linear(x, w, b).logsumexp(-1)),
    "softmax": (lambda x, w, b, _: ct.linear_softmax(x, w, b), lambda x, w, b, _: F.linear(x, w, b).softmax(-1)),
    "log_softmax": (
        lambda x, w, b, _: ct.linear_log_softmax(x, w, b),
        lambda x, w, b, _: F.linear(x, w, b).log_softmax(-1),
    ),
    "gelu": (lambda x, w, b, _: ct.linear_gelu(x, w, b), lambda x, w, b, _: F.gelu(F.linear(x, w, b))),
    "loss": _loss(),
    "loss by row": _loss(reduction="none"),
    "weighted loss": _loss(weighted=True, label_smoothing=0.1, ignore_index=1, labels=LABELS.clamp(0)),
    "loss without logits": _loss(max_workspace=16, soft_cap=3.0),
}
# Of x, weight and bias.
VOCABULARY = (Replicate(), Shard(0), Shard(0))
ACROSS = (Shard(0), Replicate(), Replicate())
WHOLE_BIAS = (Replicate(), Shard(0), Replicate())


def operands(classes: int, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(classes)
    shapes = ((ROWS, FEATURES), (classes, FEATURES), (classes,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def bounds(values: Sequence[Any], exact: Any, grads: Sequence[Any], cotangent: Any, classes: int) -> list[float]:
    """Bounds of float32 errors, of the result and of the three gradients.

    A logit has FEATURES + 1 roundings of the sum of its terms' sizes. Results move by at most twice as much, and have a
    rounding for each class and ten for functions of them. So do cotangents of logits, which softmax's backward pass
    sums over the classes; gradients are sums of these times an operand.
    """
    x, w, b = (t.double().abs() for t in values)
    u = 2.0**-24
    size = float((x @ w.T + b).max())
    logit = (FEATURES + 1) * u * size
    result = 2 * logit + (classes + 10) * u * (1 + size)
    slope = classes * float(cotangent.abs().max()) * (4 * logit + (classes + 10) * u * (1 + size))
    terms = [classes * float(w.max()), ROWS * float(x.max()), float(ROWS)]
    found = [n * slope + n * u * float(g.abs().max()) for n, g in zip(terms, grads, strict=True)]
    return [result + u * float(exact.abs().max()), *found]


def check(here: Here, name: str, placements: Any, classes: int, dtype: torch.dtype, mesh: Any = None) -> None:
    """Compare a function and its gradients with one process in float64."""
    mesh = mesh or here.mesh
    ours, plain = FUNCTIONS[name]
    values = operands(classes, dtype)
    exact = [t.double().requires_grad_() for t in values]
    y = plain(*exact, lambda t: t)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [y.detach(), *torch.autograd.grad(y, exact, cotangent)]

    def place(t: Any, by: Any = None) -> Any:
        listed = by if isinstance(by, list) else [by or Replicate()] * mesh.ndim
        return distribute_tensor(t, mesh, listed)

    sharded = [place(t, p).requires_grad_() for t, p in zip(values, placements, strict=True)]
    z = ours(*sharded, place)
    grads = torch.autograd.grad(z, sharded, place(cotangent.to(z.dtype)))
    assert not here.left, here.left
    require_same_everywhere(z, *grads)
    for grad, t in zip(grads, sharded, strict=True):
        assert grad.placements == t.placements and grad.dtype == dtype, (grad.placements, grad.dtype)
    errors = [float((whole(a).double() - b).abs().max()) for a, b in zip([z, *grads], wanted, strict=True)]
    if dtype is torch.float32:
        limits = bounds(values, y.detach(), wanted[1:], cotangent, classes)
    else:
        # As far as PyTorch's own operations in one process are, doubled, and a rounding of the result.
        narrow = [t.clone().requires_grad_() for t in values]
        r = plain(*narrow, lambda t: t)
        found = [r.detach(), *torch.autograd.grad(r, narrow, cotangent.to(r.dtype))]
        limits = [
            2 * float((a.double() - b).abs().max()) + 2.0**-8 * float(b.abs().max())
            for a, b in zip(found, wanted, strict=True)
        ]
    assert all(e <= most for e, most in zip(errors, limits, strict=True)), (errors, limits)


def _enter(name: str, how: str, placements: Any, classes: int, dtype: torch.dtype, *worlds: int) -> None:
    label = f"{name}, {how}, {classes} classes, {str(dtype).removeprefix('torch.')}"
    case(label, *worlds)(lambda here: check(here, name, placements, classes, dtype))


for function in FUNCTIONS:
    _enter(function, "vocabulary", VOCABULARY, 10, torch.float32, 2, 3)
    _enter(function, "vocabulary", VOCABULARY, 2, torch.float32, 3)  # one process has no class
for function in ("logsumexp", "softmax", "loss", "loss without logits"):
    _enter(function, "vocabulary", VOCABULARY, 10, torch.bfloat16, 2)
    _enter(function, "whole bias", WHOLE_BIAS, 10, torch.float32, 2)
    _enter(function, "rows", ACROSS, 10, torch.float32, 3)  # 3, 3 and 1 of them


@case("float64", 2)
def _float64(here: Here) -> None:
    x, w, b = operands(10, torch.float64)
    placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), VOCABULARY, strict=True)]
    error = (whole(ct.linear_logsumexp(*placed)) - F.linear(x, w, b).logsumexp(-1)).abs().max()
    assert error < 1e-14 and not here.left, error


@case("special values", 2)
def _special(here: Here) -> None:
    """-inf in all of one process's columns, in all columns; NaN in one."""
    for where in (slice(0, 5), slice(0, 10), slice(7, 8)):
        y = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
        y[1, where] = -torch.inf
        y[2, where] = torch.nan
        y[3, where] = torch.inf
        sharded = distribute_tensor(y, here.mesh, [Shard(1)])
        for ours, plain in ((ct.logsumexp, torch.logsumexp), (ct.softmax, torch.softmax)):
            torch.testing.assert_close(whole(ours(sharded, 1)), plain(y, 1), equal_nan=True)
    assert not here.left


@case("what is exchanged", 2, 3)
def _exchanged(here: Here) -> None:
    """One gather of two float32 numbers for each row, and of no logits; a third one for the label's."""
    x, w, b = operands(300, torch.float32)
    placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), VOCABULARY, strict=True)]
    ct.linear_logsumexp(*placed)
    assert here.gathered == [8 * ROWS], here.gathered
    ct.linear_softmax(*placed)
    assert here.gathered == [8 * ROWS] * 2, here.gathered
    ct.linear_cross_entropy(placed[0], placed[1], distribute_tensor(LABELS, here.mesh, [Replicate()]), placed[2])
    assert here.gathered == [8 * ROWS] * 2 + [12 * ROWS], here.gathered


@case("second derivatives", 2)
def _twice(here: Here) -> None:
    x, w, b = operands(10, torch.float64)

    def second(x: Any, w: Any, b: Any, function: Callable[..., Any]) -> Any:
        (grad,) = torch.autograd.grad(function(x, w, b).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), w)[0]

    exact = second(*(t.clone().requires_grad_() for t in (x, w, b)), lambda x, w, b: F.linear(x, w, b).logsumexp(-1))
    pairs = zip((x, w, b), VOCABULARY, strict=True)
    placed = [distribute_tensor(t, here.mesh, [p]).requires_grad_() for t, p in pairs]
    torch.testing.assert_close(whole(second(*placed, ct.linear_logsumexp)), exact)


# What is left to PyTorch --------------------------------------------------------------------------------------------


@case("left to PyTorch", 2)
def _left(here: Here) -> None:
    """A product that sums over the split dimension, rows and columns split by one dimension, plain tensors."""
    x, w, b = operands(10, torch.float32)
    exact = F.gelu(F.linear(x, w, b))
    for placements, reason in (
        ((Shard(1), Shard(1), Replicate()), "addends"),
        ((Shard(0), Shard(0), Shard(0)), "split to different widths"),
    ):
        here.left.clear()
        placed = [distribute_tensor(t, here.mesh, [p]) for t, p in zip((x, w, b), placements, strict=True)]
        torch.testing.assert_close(whole(ct.linear_gelu(*placed)), exact)
        assert len(here.left) == 1 and reason in here.left[0], here.left
    here.left.clear()
    sharded = distribute_tensor(w, here.mesh, [Shard(0)])
    try:
        ct.linear_gelu(x, sharded, b)
    except RuntimeError as error:
        assert "mixed torch.Tensor and DTensor" in str(error), error
    else:
        raise AssertionError("PyTorch refuses plain tensors beside DTensors")
    assert "is no DTensor" in here.left[0], here.left


# Modules ------------------------------------------------------------------------------------------------------------

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


# Two dimensions of a mesh -------------------------------------------------------------------------------------------


@case("rows and vocabulary", 4)
def _rows_and_vocabulary(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    placements = ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Replicate(), Shard(0)])
    for name in ("softmax", "weighted loss", "loss by row"):
        check(here, name, placements, 3, torch.float32, mesh)
    turned = tuple(list(reversed(p)) for p in placements)
    for name in ("softmax", "loss"):
        check(here, name, turned, 10, torch.float32, mesh)


# Running ------------------------------------------------------------------------------------------------------------


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


def work(folder: Path, rank: int, count: int, chosen: Sequence[str]) -> None:
    """Run the cases as one process of several, and write each error, empty where there is none."""
    place = f"file://{folder / f'store{count}'}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=LIMIT)
    here = Here(rank, count, init_device_mesh("cpu", (count,)))
    _watch(here)
    with open(folder / f"{count}-{rank}", "w", buffering=1) as file:
        for name, (worlds, run) in CASES.items():
            if count not in worlds or (chosen and not any(word in name for word in chosen)):
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
    dist.destroy_process_group()


def main(folder: Path, chosen: Sequence[str]) -> None:
    torch.set_num_threads(1)
    be_quick()
    vars(decision)["judge_for"] = lambda *args, **kwargs: partition.judge_without_costs
    for count in WORLDS:
        children = []
        for rank in range(count):
            child = os.fork()
            if not child:
                try:
                    work(folder, rank, count, chosen)
                finally:
                    sys.stdout.flush(), sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
