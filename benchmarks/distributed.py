"""Train the heads on several GPUs: losses compared with PyTorch's own, and times per step.

    python -m benchmarks distributed                        # a process for each GPU; without any, two on the CPU
    torchrun --nproc-per-node 2 -m benchmarks distributed   # the same, in processes that are there

Each row is a model under DistributedDataParallel or `fully_shard`, fused in one of the ways. A row that fails says why;
where the processes end with it, those that `python -m benchmarks distributed` starts next go on behind it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import environment, tables
from . import options as types
from .report import OUT_OF_TIME, Case, Report, Result, read_cases
from .tables import case_tables, explain
from .timing import Summary, describe, summarize
from .torch_heads import NAMES

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE, SHAPE_ON_CPU = (1024, 8192, 8192), (16, 64, 96)
BUDGET = 170.0  # seconds for all rows; those that are left then are not run
STUCK = timedelta(seconds=60)  # for one collective operation
STEPS = 5  # of which losses are compared

PLAIN, BACKEND, DROP_IN = "PyTorch", "torch.compile(backend=cupyfuse)", "drop-in module"
INSIDE, OUTSIDE = "wrapped after fuse", "fused after wrapping"
FORMS = (PLAIN, OUTSIDE, INSIDE, DROP_IN, BACKEND)
WRAPPERS = ("DDP", "fully_shard")
DTYPES = ("float32", "bfloat16")
# A form is right where its error is at most so many times PyTorch's, and a rounding.
MARGIN, ROUNDING = 4.0, {"float32": 1e-5, "bfloat16": 2**-7}
ENDED = "the processes ended, or were stuck"
# Facts of a case, by form.
PLAIN_ERROR, DIFFERENCE, PARAMETERS, FUSED_CHAINS = "PyTorch's error", "to PyTorch", "parameters", "chains"

_HOW = f"""\
- Each head is trained for five steps of SGD with momentum, every process on data of its own, then timed with a fused
  AdamW: ten steps in a row in the slowest process, of three runs.
- *error* is the largest difference of a step's loss to the same training in float64, relative to the loss; it is wrong
  where it is more than four times *{PLAIN_ERROR}*, that of the plain model in the same dtype, and a rounding.
- *{DIFFERENCE}* compares with that model's losses; *{PARAMETERS}* compares its parameters after the steps with ours,
  relative to how far they have moved."""


def plan(cases: Sequence[Case], forms: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Yield cases and forms in the order in which they are run: what compiles for long is last."""
    for slow in (False, True):
        for case in cases:
            yield from ((case, form) for form in forms if (form == BACKEND) is slow)


def make_cases(given: argparse.Namespace, shape: tuple[int, int, int]) -> list[Case]:
    """Return the cases: a head under a wrapper in a dtype, whose results are by form."""
    grid = [(dtype, wrapper, head) for dtype in given.dtypes for wrapper in WRAPPERS for head in given.heads]
    return [Case(f"{dtype}, {wrapper}", head, shape, dtype) for dtype, wrapper, head in grid]


def report_lines(report: Report) -> list[str]:
    return [*explain(["wall_loop"], _HOW), *case_tables(report, PLAIN, ["wall_loop"])]


@functools.lru_cache(maxsize=1)
def load_models(head: str, shape: tuple[int, int, int], dtype: Any, device: Any) -> list[Any]:
    """Return the plain model and the drop-in one, with the same parameters in every process."""
    import torch

    from .pytorch import load

    source, built = load(head, shape), []
    for model in (source.Model, source.ModelNew):
        torch.manual_seed(0)
        built.append(model(*source.get_init_inputs()).to(device, dtype))
    return built


# One process --------------------------------------------------------------------------------------------------------


class Worker:
    """One process of those that train together, on a shape of (rows of a process, in_features, out_features)."""

    def __init__(self, shape: tuple[int, int, int]):
        import torch

        self.torch, self.dist, self.shape = torch, torch.distributed, shape
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        bound = {"device_id": self.device} if self.gpu else {}
        self.dist.init_process_group("nccl" if self.gpu else "gloo", timeout=STUCK, **bound)
        # By head, dtype and wrapper: `_train`'s results for PyTorch in float64, then in the dtype.
        self._references: dict[Any, tuple[tuple[list[float], list[Any]], ...]] = {}

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value."""
        held = [value]
        self.dist.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        found: list[Any] = [None] * self.count
        self.dist.all_gather_object(found, value)
        return found

    def environment(self) -> dict[str, Any]:
        if not self.gpu:
            found = environment.collect("cpu")
        else:
            import cupy

            found = environment.collect(self.torch.cuda.get_device_name(self.device), cupy)
        return {**found, "processes": self.count}

    def run(self, case: Case, result: Result) -> None:
        """Fill in a result."""
        failure = ""
        try:
            self._measure(case, result)
        except Exception as error:
            failure = describe(error)
        failures = self._gather(failure)
        result.failure = next((f"process {rank}: {text}" for rank, text in enumerate(failures) if text), "")
        if self.gpu:
            self.torch.cuda.empty_cache()

    def _train_references(self, case: Case, plain: Any, wrapper: str) -> tuple[tuple[list[float], list[Any]], ...]:
        """Train the plain model in float64 and in the case's dtype, once for the rivals of a case."""
        key = (case.group, case.name)
        if key not in self._references:
            self._references.clear()
            exact, same = copy.deepcopy(plain).double(), copy.deepcopy(plain)
            self._references[key] = (
                self._train(self._wrap(exact, wrapper), self.torch.float64),
                self._train(self._wrap(same, wrapper), getattr(self.torch, case.dtype)),
            )
        return self._references[key]

    def _measure(self, case: Case, result: Result) -> None:
        """Train a rival's model; enter its time, error and distance from the plain model, or raise if it is wrong."""
        torch, dtype, wrapper = self.torch, getattr(self.torch, case.dtype), case.group.rpartition(", ")[2]
        torch._dynamo.reset()
        plain, drop_in = load_models(case.name, self.shape, dtype, self.device)
        (exact_losses, _), (plain_losses, plain_state) = self._train_references(case, plain, wrapper)
        model = self._build(result.rival, wrapper, plain, drop_in)
        losses, state = self._train(model, dtype)
        if any(self._gather(len(set(plain_losses)) == 1)):  # in all processes or none: what follows waits for all
            raise RuntimeError(f"PyTorch's losses do not change, which would hide stale weights: {plain_losses}")
        first = [p.detach().double() for p in plain.parameters()]
        moved, between = _distance(plain_state, first), _distance(plain_state, state)
        error, plain_error = _difference(losses, exact_losses), _difference(plain_losses, exact_losses)
        facts = {PLAIN_ERROR: plain_error, DIFFERENCE: _difference(losses, plain_losses)}
        facts |= {PARAMETERS: between / moved} if moved else {}
        result.times["wall_loop"] = self._time(model, dtype)
        if result.rival in (INSIDE, OUTSIDE, DROP_IN):
            from cupyfuse.torch import explain

            facts[FUSED_CHAINS] = sum(bool(part.plans) for part in explain(model).fused)
        result.error = error if math.isfinite(error) else None
        case.facts |= {f"{name}, {result.rival}": v for name, v in facts.items() if math.isfinite(v)}
        if not error <= MARGIN * plain_error + ROUNDING[case.dtype]:
            raise RuntimeError(f"wrong result: losses err by {error:.2g}, PyTorch's by {plain_error:.2g}")

    def _build(self, form: str, wrapper: str, plain: Any, drop_in: Any) -> Any:
        from cupyfuse.torch import fuse

        # On a CPU no chain is worth it: there is only to see that they are right.
        fused = functools.partial(fuse, only_gains=self.gpu)
        module = copy.deepcopy(drop_in if form == DROP_IN else plain)
        if form == INSIDE:
            return self._wrap(fused(module), wrapper)
        # A drop-in module leaves what `fully_shard` has put hooks on to PyTorch.
        wrapped = self._wrap(module, wrapper, form != DROP_IN)
        if form == OUTSIDE:
            return fused(wrapped)
        if form == BACKEND:
            from cupyfuse.torch.backend import backend

            return self.torch.compile(wrapped, backend=backend, options={"cupyfuse.only_gains": self.gpu})
        return wrapped

    def _wrap(self, module: Any, wrapper: str, by_layer: bool = True) -> Any:
        if wrapper == "DDP":
            device_ids = [self.device] if self.gpu else None
            return self.torch.nn.parallel.DistributedDataParallel(module, device_ids=device_ids)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.count,))
        # The linear layer's parameters apart from the others', as a layer of a larger model would have them.
        for part in module.children() if by_layer else ():
            if isinstance(part, self.torch.nn.Linear):
                fully_shard(part, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def _batch(self, step: int, dtype: Any) -> Any:
        generator = self.torch.Generator().manual_seed(1000 * step + self.rank)
        return self.torch.randn(self.shape[:2], generator=generator).to(self.device, dtype)

    def _step(self, module: Any, optimizer: Any, x: Any) -> Any:
        """Take one training step towards row sums of 0.3, and return the loss (float32 or float64)."""
        optimizer.zero_grad()
        y = module(x)
        loss = (y.to(self.torch.promote_types(y.dtype, self.torch.float32)) * y.shape[1] - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def _train(self, module: Any, dtype: Any) -> tuple[list[float], list[Any]]:
        """Return the losses of the first steps, and the parameters afterwards."""
        optimizer = self.torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        losses = [float(self._step(module, optimizer, self._batch(k, dtype)).detach()) for k in range(STEPS)]
        state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        return losses, [p.detach().double() for p in state]

    def _time(self, module: Any, dtype: Any, runs: int = 3, steps: int = 10) -> Summary:
        """Measure the time of a step in the slowest process, in microseconds."""
        torch = self.torch
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
        x = self._batch(0, dtype)
        found = []
        for run in range(runs + 1):
            self.dist.barrier()
            self._synchronize()
            begun = time.perf_counter()
            for _ in range(steps if run else 2):
                self._step(module, optimizer, x)
            self._synchronize()
            found.append((time.perf_counter() - begun) * 1e6 / steps)
        slowest = torch.tensor(found[1:], device=self.device)
        self.dist.all_reduce(slowest, self.dist.ReduceOp.MAX)
        return summarize(slowest.tolist())

    def _synchronize(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()


def _distance(parameters: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the Euclidean distance of two sets of parameters."""
    return math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(parameters, others, strict=True)))


def _difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses; infinite where one is not finite."""
    found = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(f if f == f else float("inf") for f in found)


def work(given: argparse.Namespace) -> int:
    """Run the cases in this process, together with the others; the first one writes them."""
    begun = time.time() if given.begun is None else given.begun
    worker = Worker(given.shape or (SHAPE if _gpus() else SHAPE_ON_CPU))
    options = {"shape": "x".join(map(str, worker.shape)), "steps": STEPS}
    report = Report("distributed", worker.broadcast(worker.environment()), options)
    folder = given.output or RESULTS / f"{environment.slug(report.environment['gpu'])}-x{worker.count}"
    earlier = read_cases(folder / "distributed.json") if given.keep else []
    known = {(case.group, case.name): case for case in worker.broadcast(earlier)}
    report.cases = [known.get((case.group, case.name), case) for case in make_cases(given, worker.shape)]

    def save() -> None:
        if worker.rank == 0:
            tables.write(report, report_lines, folder, "distributed")

    for case, form in plan(report.cases, given.forms):
        if case.find(form):
            continue
        result = Result(form, failure=OUT_OF_TIME)
        case.results.append(result)
        if not worker.broadcast(time.time() - begun > given.budget):
            result.failure = ENDED  # unless it is told otherwise
            save()
            worker.run(case, result)
        save()
    worker.dist.destroy_process_group()
    if worker.rank == 0:
        print((folder / "distributed.md").read_text(encoding="utf-8"))
        print(f"written to {folder}/distributed.*", file=sys.stderr)
    return 0 if all(r.failure in ("", OUT_OF_TIME) for case in report.cases for r in case.results) else 1


# All processes ------------------------------------------------------------------------------------------------------


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def spawn(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the processes; start others for the rows that are left where they end early."""
    count = given.processes or _gpus() or 2
    begun, status = time.time(), 1
    for turn in range(len(given.forms) * len(make_cases(given, SHAPE))):
        command = [sys.executable, "-m", "benchmarks", *arguments, "--begun", str(begun)]
        command += ["--keep"] if turn or given.keep else []
        statuses = start(command, count, begun + given.budget + 60 - time.time())
        status = max(map(abs, statuses))
        if set(statuses) in ({0}, {1}) or time.time() > begun + given.budget:
            break
    return 1 if status else 0


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(command: Sequence[str], count: int, seconds: float) -> list[int]:
    """Run `count` processes at once and return their exit codes; where one fails, wait only briefly for the others."""
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common.setdefault("OMP_NUM_THREADS", "1")
    started = [subprocess.Popen(command, env={**common, "RANK": str(k), "LOCAL_RANK": str(k)}) for k in range(count)]
    deadline = time.time() + seconds
    try:
        while any(p.poll() is None for p in started) and time.time() < deadline:
            if any(p.poll() not in (None, 0) for p in started):
                deadline = min(deadline, time.time() + 10)
            time.sleep(0.1)
    finally:
        for process in started:
            process.kill()
    return [process.wait() for process in started]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, metavar="N", help="how many (default: one for each GPU)")
    parser.add_argument("--heads", type=types.names(NAMES), default=NAMES, metavar="NAME,...")
    parser.add_argument("--dtypes", type=types.names(DTYPES), default=DTYPES, metavar="DTYPE,...")
    parser.add_argument("--no-backend", dest="forms", action="store_const", const=FORMS[:-1], default=FORMS)
    parser.add_argument(
        "--shape", type=types.shape, metavar="BxKxN", help="rows of a process, in_features, out_features"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="(default: %(default).0f)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: benchmarks/results/<gpu>-x<processes>")
    parser.add_argument("--keep", action="store_true", help="go on behind the rows that are written already")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)


def main(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Be one of the processes that were started, or start them with these arguments of the command line."""
    return work(given) if "RANK" in os.environ else spawn(given, arguments)
