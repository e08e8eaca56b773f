"""Logsumexp and cross entropy over a vocabulary that several GPUs share.

    python -m benchmarks distributed --vocabulary

Every process has all rows and some of the classes. Rivals: the same with all classes on each GPU, and DTensor's own
operations, `loss_parallel` for the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import environment, tables
from .report import OUT_OF_TIME, Case, Report, Result
from .tables import case_tables, explain
from .timing import clamp, summarize

SPLIT, ALONE, DTENSOR = "cupyfuse, split", "cupyfuse, one GPU", "DTensor"
RIVALS = (SPLIT, ALONE, DTENSOR)
LOGSUMEXP, LOSS = "logsumexp", "linear_cross_entropy"
MODES = ("forward", "forward and backward")
SHAPES = ((8192, 4096, 131072), (8192, 4096, 262144))
SHAPES_ON_CPU = ((32, 16, 48), (32, 16, 51))
DTYPES = ("bfloat16", "float32")
BUDGET = 115.0  # seconds for all cases
SECONDS, FEWEST, MOST = 1.5, 2, 7  # of the timed rounds of a case; how many of them
CALLS = 3  # in a row, in a round
WIDTH = 8192  # classes at a time in the float64 reference
# Of results, beside float64; of gradients, beside those of one GPU: sums of many roundings, as large as the terms.
WRONG = {"float32": 1e-5, "bfloat16": 2.0**-6}
PEAK, GRADIENTS = "peak GB", "gradients to one GPU"

_HOW = f"""\
- The time of a call in the slowest process. *{PEAK}* is memory beside the operands, with what is
  kept from call to call, in the process that takes the most.
- *{GRADIENTS}* is ‖gradient − gradient‖ / ‖gradient‖, of features and weight, the larger one.
{tables.ERROR}. DTensor's loss is under `loss_parallel`."""


def report_lines(report: Report) -> list[str]:
    return [
        *explain(["wall_loop"], _HOW, "milliseconds"),
        *case_tables(report, DTENSOR, ["wall_loop"], milliseconds=True),
    ]


class Data:
    """The operands of one shape and dtype: all of them, and as DTensors."""

    def __init__(self, worker: Any, shape: tuple[int, int, int], dtype: str):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        self._worker, self._torch = worker, worker.torch
        torch = worker.torch
        rows, features, classes = shape
        generator = torch.Generator(worker.device).manual_seed(0)  # the same numbers in all processes
        made = functools.partial(torch.randn, generator=generator, device=worker.device)
        self.x = made(rows, features).to(getattr(torch, dtype)).requires_grad_()
        self.w = (made(classes, features) / math.sqrt(features)).to(self.x.dtype).requires_grad_()
        self.labels = torch.randint(classes, (rows,), generator=generator, device=worker.device)
        mesh = init_device_mesh(worker.device.type, (worker.count,))
        width = -(-classes // worker.count)
        self.own = slice(min(classes, worker.rank * width), min(classes, (worker.rank + 1) * width))

        def place(t: Any, placement: Any, shape: Any) -> Any:
            stride = (shape[1], 1) if len(shape) == 2 else (1,)
            return DTensor.from_local(t, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride)

        self.sharded_x = place(self.x.detach(), Replicate(), (rows, features)).requires_grad_()
        part = self.w.detach()[self.own].clone()
        self.sharded_w = place(part, Shard(0), (classes, features)).requires_grad_()
        self.sharded_labels = place(self.labels, Replicate(), (rows,))
        self._replicate = Replicate()
        self.exact = self._reference()

    def _reference(self) -> dict[str, Any]:
        """Compute both functions in float64, some classes at a time."""
        torch = self._torch
        with torch.no_grad():
            x, total = self.x.double(), None
            for first in range(0, len(self.w), WIDTH):
                part = (x @ self.w[first : first + WIDTH].double().t()).logsumexp(1)
                total = part if total is None else torch.logaddexp(total, part)
            chosen = (x * self.w[self.labels].double()).sum(1)
        return {LOGSUMEXP: total, LOSS: (total - chosen).mean()}

    def call(self, function: str, rival: str, backward: bool) -> list[Any]:
        """Return the result of a function, then the gradients of features and weight, whole or this process's part."""
        import cupyfuse.torch as ct

        torch, F = self._torch, self._torch.nn.functional
        x, w, labels = (self.x, self.w, self.labels) if rival == ALONE else self._sharded()
        context: Any = contextlib.nullcontext()
        if rival == DTENSOR and function == LOSS:
            context = torch.distributed.tensor.parallel.loss_parallel()
        with context, torch.set_grad_enabled(backward):
            if rival == DTENSOR:
                logits = F.linear(x, w)
                y = logits.logsumexp(1) if function == LOGSUMEXP else F.cross_entropy(logits, labels)
            elif function == LOGSUMEXP:
                y = ct.linear_logsumexp(x, w)
            else:
                y = ct.linear_cross_entropy(x, w, labels)
            if not backward:
                return [self._local(y)]
            grads = torch.autograd.grad(y, (x, w), torch.ones_like(y))
        return [self._local(y.detach()), self._local(grads[0]), self._local(grads[1], whole=False)]

    def _sharded(self) -> tuple[Any, Any, Any]:
        return self.sharded_x, self.sharded_w, self.sharded_labels

    def _local(self, tensor: Any, whole: bool = True) -> Any:
        """Return a tensor's memory in this process, of a replicated one or of the classes that it has."""
        if not hasattr(tensor, "to_local"):
            return tensor
        if whole and not tensor.placements[0].is_replicate():
            tensor = tensor.redistribute(placements=[self._replicate])
        local = tensor.detach().to_local()
        return local.wait() if hasattr(local, "wait") else local


def measure(worker: Any, data: Data, case: Case, function: str, backward: bool, save: Callable[[], None]) -> None:
    """Check and time the rivals of a case, in turns; enter what fails."""
    kept: dict[str, list[Any]] = {}
    taken: dict[str, float] = {}
    for result in case.results:
        worker.attempt([result], save, functools.partial(_check, worker, data, case, result, function, backward, kept))
    right = [result for result in case.results if not result.failure]
    kept.clear()

    def warm_up(result: Result) -> None:
        taken[result.rival] = _seconds(worker, lambda: data.call(function, result.rival, backward))

    def time_in_turns() -> None:
        for result in right:
            warm_up(result)
        rounds = worker.broadcast(clamp(SECONDS / (CALLS * sum(taken.values())), FEWEST, MOST))
        times: list[list[float]] = [[] for _ in right]
        for _ in range(rounds):
            for result, found in zip(right, times, strict=True):
                found.append(_seconds(worker, lambda rival=result.rival: data.call(function, rival, backward)) * 1e6)
        slowest = worker.torch.tensor(times, device=worker.device)
        worker.dist.all_reduce(slowest, worker.dist.ReduceOp.MAX)
        for result, found in zip(right, slowest.tolist(), strict=True):
            result.times["wall_loop"] = summarize(found)

    if right:
        worker.attempt(right, save, time_in_turns)


def _check(
    worker: Any, data: Data, case: Case, result: Result, function: str, backward: bool, kept: dict[str, list[Any]]
) -> None:
    """Call a rival twice, note its error and its peak memory, and compare its gradients; raise if it is wrong."""
    torch, cuda = worker.torch, worker.torch.cuda
    gc.collect()  # what earlier calls left would count
    before = cuda.memory_allocated() if worker.gpu else 0
    data.call(function, result.rival, backward)  # compiles, and prepacks weights
    worker.synchronize()
    gc.collect()
    if worker.gpu:
        cuda.reset_peak_memory_stats()
    found = data.call(function, result.rival, backward)
    worker.synchronize()
    if worker.gpu:
        peaks = worker.gather((cuda.max_memory_allocated() - before) / 1e9)
        case.facts[f"{PEAK}, {result.rival}"] = max(peaks)
    exact = data.exact[function]
    errors = worker.gather(float((found[0].double() - exact).norm() / exact.norm()))
    result.error = max(errors) if all(map(math.isfinite, errors)) else None
    if result.error is None or result.error > WRONG[case.dtype]:
        raise RuntimeError(f"wrong result: its error is {max(errors):.2g}")
    if not backward:
        return
    grads = [found[1], found[2][data.own] if result.rival == ALONE else found[2]]
    if result.rival != ALONE:
        kept[result.rival] = grads
        return
    for rival, others in kept.items():
        pairs = list(zip(grads, others, strict=True))
        apart = [
            float((a.float() - b.float()).norm() / torch.linalg.vector_norm(a.float())) for a, b in pairs if a.numel()
        ]
        case.facts[f"{GRADIENTS}, {rival}"] = max(worker.gather(max(apart)))
        if not case.facts[f"{GRADIENTS}, {rival}"] <= WRONG[case.dtype]:
            case.find(rival).failure = "wrong gradients"  # type: ignore[union-attr]


def _seconds(worker: Any, call: Callable[[], Any]) -> float:
    """Return the time of a call, of `CALLS` in a row."""
    worker.dist.barrier()
    worker.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    worker.synchronize()
    return (time.perf_counter() - begun) / CALLS


def work(given: argparse.Namespace, worker: Any, results: Path) -> int:
    """Run all cases in this process, together with the others; the first one writes them."""
    begun = time.time() if given.begun is None else given.begun
    shapes: Sequence[Any] = (given.shape,) if given.shape else SHAPES if worker.gpu else SHAPES_ON_CPU
    options = {"shapes": " ".join("x".join(map(str, shape)) for shape in shapes)}
    report = Report("distributed --vocabulary", worker.broadcast(worker.environment()), options)
    folder = given.output or results / f"{environment.slug(report.environment['gpu'])}-x{worker.count}"

    def save() -> None:
        if worker.rank == 0:
            tables.write(report, report_lines, folder, "vocabulary")

    for shape in shapes:
        for dtype in [name for name in DTYPES if name in given.dtypes]:
            data = None
            for function in (LOGSUMEXP, LOSS):
                for mode in MODES:
                    late = worker.broadcast(time.time() - begun > min(given.budget, BUDGET))
                    failures = OUT_OF_TIME if late else ""
                    case = Case(f"{function}, {mode}", f"{dtype}, {shape[2]} classes", shape, dtype)
                    # Gradients are compared with those of one GPU, which therefore comes last.
                    case.results = [Result(rival, failure=failures) for rival in (SPLIT, DTENSOR, ALONE)]
                    report.cases.append(case)
                    if not late:
                        data = data or Data(worker, shape, dtype)
                        measure(worker, data, case, function, mode != MODES[0], save)
                        gc.collect()
                    case.results.sort(key=lambda r: RIVALS.index(r.rival))
            del data
            gc.collect()
            if worker.gpu:
                worker.torch.cuda.empty_cache()
    report.cases.sort(key=lambda c: c.group)
    save()
    worker.dist.destroy_process_group()
    if worker.rank == 0:
        print((folder / "vocabulary.md").read_text(encoding="utf-8"))
        print(f"written to {folder}/vocabulary.*", file=sys.stderr)
    return 1 if report.failed() else 0
