"""Train the heads on several GPUs: losses compared with PyTorch's own, and times per step.

    python -m benchmarks distributed                        # a process for each GPU; without any, two on the CPU
    torchrun --nproc-per-node 2 -m benchmarks distributed   # the same, in processes that are there
    python -m benchmarks distributed --vocabulary           # one vocabulary split over all GPUs, see `vocabulary.py`

Each case is a model under DistributedDataParallel or `fully_shard`; its rivals are the ways to fuse it, which are
trained one after the other and then timed in turns. One that fails says why; where the processes end with it, those
that `python -m benchmarks distributed` starts next go on without it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import environment, tables, vocabulary
from . import options as types
from .report import OUT_OF_TIME, Case, Report, Result, read_cases
from .tables import case_tables, explain
from .timing import describe, summarize
from .torch_heads import NAMES

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE_ON_CPU = (16, 64, 96)
BUDGET = 170.0  # seconds for all cases; those that are left then are not run
STUCK = timedelta(seconds=60)  # for one collective operation
STEPS = 5  # of which losses are compared
ROUNDS, TIMED_STEPS = 10, 5  # of the times: rounds in which every form takes a turn of so many steps

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
  AdamW: {TIMED_STEPS} steps in a row in the slowest process, the forms of a case in turns, in {ROUNDS} rounds.
- *error* is the largest difference of a step's loss to the same training in float64, relative to the loss; it is wrong
  where it is more than four times *{PLAIN_ERROR}*, that of the plain model in the same dtype, and a rounding.
- *{DIFFERENCE}* compares with that model's losses; *{PARAMETERS}* compares its parameters after the steps with ours,
  relative to how far they have moved."""


def report_lines(report: Report) -> list[str]:
    return [*explain(["wall_loop"], _HOW), *case_tables(report, PLAIN, ["wall_loop"])]


# One process --------------------------------------------------------------------------------------------------------


class Worker:
    """One process of those that train together."""

    def __init__(self) -> None:
        import torch

        self.torch, self.dist = torch, torch.distributed
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        bound = {"device_id": self.device} if self.gpu else {}
        self.dist.init_process_group("nccl" if self.gpu else "gloo", timeout=STUCK, **bound)

    def broadcast(self, value: Any) -> Any:
        """Return the first process's value."""
        held = [value]
        self.dist.broadcast_object_list(held, src=0, device=self.device)
        return held[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        found: list[Any] = [None] * self.count
        self.dist.all_gather_object(found, value)
        return found

    def synchronize(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def environment(self) -> dict[str, Any]:
        name = self.torch.cuda.get_device_name(self.device) if self.gpu else "cpu"
        cupy = importlib.import_module("cupy") if self.gpu else None
        return {**environment.collect(name, cupy), "processes": self.count}

    def attempt(self, results: Sequence[Result], save: Callable[[], None], work: Callable[[], None]) -> None:
        """Do some work in all processes; enter what fails in one of them, or that they end with it, into results."""
        for result in results:
            result.failure = ENDED
        save()
        failure = ""
        try:
            work()
        except Exception as error:
            failure = describe(error)
        failures = [f"process {rank}: {text}" for rank, text in enumerate(self.gather(failure)) if text]
        for result in results:
            result.failure = failures[0] if failures else ""
        save()


class Trial:
    """A case: the plain model trained in float64 and in the case's dtype, then other forms of it, then times of all."""

    def __init__(self, worker: Worker, case: Case):
        self._worker, self._case = worker, case
        self._torch = torch = worker.torch
        self._dtype, self._wrapper = getattr(torch, case.dtype), case.group.rpartition(", ")[2]
        self._models: dict[str, Any] = {}  # by form, wrapped

    def train_references(self) -> None:
        """Train the plain model in float64 and in the case's dtype; the other forms start where it did."""
        from .pytorch import load

        source, self._sources = load(self._case.name, self._case.shape), []
        self._torch._dynamo.reset()
        for model in (source.Model, source.ModelNew):
            self._torch.manual_seed(0)  # the same parameters in both, and in every process
            self._sources.append(model(*source.get_init_inputs()).to(self._worker.device, self._dtype))
        plain = self._sources[0]
        self._exact, _ = self._train(self._wrap(copy.deepcopy(plain).double()), self._torch.float64)
        self._losses, self._state = self._train(self._wrap(copy.deepcopy(plain)), self._dtype)
        if any(self._worker.gather(len(set(self._losses)) == 1)):  # in all processes: what follows waits for all
            raise RuntimeError(f"PyTorch's losses do not change, which would hide stale weights: {self._losses}")
        self._moved = _distance(self._state, [p.detach().double() for p in plain.parameters()])

    def train(self, result: Result) -> None:
        """Train a form; enter its error and distance from the plain model, or raise if it is wrong."""
        form = result.rival
        model = self._models[form] = self._build(form)
        losses, state = self._train(model, self._dtype)
        error, plain_error = _difference(losses, self._exact), _difference(self._losses, self._exact)
        facts = {PLAIN_ERROR: plain_error, DIFFERENCE: _difference(losses, self._losses)}
        facts |= {PARAMETERS: _distance(self._state, state) / self._moved} if self._moved else {}
        if form in (INSIDE, OUTSIDE, DROP_IN):
            from cupyfuse.torch import explain

            facts[FUSED_CHAINS] = sum(bool(part.plans) for part in explain(model).fused)
        result.error = error if math.isfinite(error) else None
        self._case.facts |= {f"{name}, {form}": value for name, value in facts.items() if math.isfinite(value)}
        if not error <= MARGIN * plain_error + ROUNDING[self._case.dtype]:
            raise RuntimeError(f"wrong result: losses err by {error:.2g}, PyTorch's by {plain_error:.2g}")

    def time(self, results: Sequence[Result]) -> None:
        """Enter the time of a step in the slowest process, in microseconds; forms take turns, who is first rotates."""
        torch, worker = self._torch, self._worker
        x = self._batch(0, self._dtype)
        models = [self._models[result.rival] for result in results]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) for model in models]
        times: list[list[float]] = [[] for _ in results]
        for turn in range(len(results) * (ROUNDS + 1)):  # the first round warms up
            place = (turn + turn // len(results)) % len(results)
            worker.dist.barrier()
            worker.synchronize()
            begun = time.perf_counter()
            for _ in range(TIMED_STEPS):
                self._step(models[place], optimizers[place], x)
            worker.synchronize()
            times[place].append((time.perf_counter() - begun) * 1e6 / TIMED_STEPS)
        slowest = torch.tensor(times, device=worker.device)
        worker.dist.all_reduce(slowest, worker.dist.ReduceOp.MAX)
        for result, found in zip(results, slowest.tolist(), strict=True):
            result.times["wall_loop"] = summarize(found[1:])

    def _build(self, form: str) -> Any:
        """Return the model in a form, wrapped and fused in its order."""
        from cupyfuse.torch import fuse

        # On a CPU no chain is worth it: there is only to see that they are right.
        fused = functools.partial(fuse, only_gains=self._worker.gpu)
        module = copy.deepcopy(self._sources[form == DROP_IN])
        if form == INSIDE:
            return self._wrap(fused(module))
        # A drop-in module leaves what `fully_shard` has put hooks on to PyTorch.
        wrapped = self._wrap(module, by_layer=form != DROP_IN)
        if form == OUTSIDE:
            return fused(wrapped)
        if form == BACKEND:
            from cupyfuse.torch.backend import backend

            return self._torch.compile(wrapped, backend=backend, options={"cupyfuse.only_gains": self._worker.gpu})
        return wrapped

    def _wrap(self, module: Any, by_layer: bool = True) -> Any:
        """Wrap a module by the case's wrapper."""
        if self._wrapper == "DDP":
            device_ids = [self._worker.device] if self._worker.gpu else None
            return self._torch.nn.parallel.DistributedDataParallel(module, device_ids=device_ids)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._worker.device.type, (self._worker.count,))
        # The linear layer's parameters apart from the others', as a layer of a larger model would have them.
        for part in module.children() if by_layer else ():
            if isinstance(part, self._torch.nn.Linear):
                fully_shard(part, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def _batch(self, step: int, dtype: Any) -> Any:
        generator = self._torch.Generator().manual_seed(1000 * step + self._worker.rank)
        return self._torch.randn(self._case.shape[:2], generator=generator).to(self._worker.device, dtype)

    def _step(self, module: Any, optimizer: Any, x: Any) -> Any:
        """Take one training step towards row sums of 0.3, and return the loss (float32 or float64)."""
        optimizer.zero_grad()
        y = module(x)
        loss = (y.to(self._torch.promote_types(y.dtype, self._torch.float32)) * y.shape[1] - 0.3).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def _train(self, module: Any, dtype: Any) -> tuple[list[float], list[Any]]:
        """Return the losses of the first steps, and the parameters afterwards."""
        optimizer = self._torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        losses = [float(self._step(module, optimizer, self._batch(k, dtype)).detach()) for k in range(STEPS)]
        state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        return losses, [p.detach().double() for p in state]


def _distance(parameters: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the Euclidean distance of two sets of parameters."""
    return math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(parameters, others, strict=True)))


def _difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses; infinite where one is not finite."""
    found = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(f if f == f else float("inf") for f in found)


def make_cases(given: argparse.Namespace, shape: tuple[int, int, int]) -> list[Case]:
    """Return the cases: a head under a wrapper in a dtype, whose results are by form."""
    grid = [(dtype, wrapper, head) for dtype in given.dtypes for wrapper in WRAPPERS for head in given.heads]
    return [Case(f"{dtype}, {wrapper}", head, shape, dtype) for dtype, wrapper, head in grid]


def measure(worker: Worker, case: Case, forms: Sequence[str], late: bool, save: Callable[[], None]) -> None:
    """Train and time the forms of a case; those that failed in earlier processes are left out."""
    earlier = {result.rival: result for result in case.results if result.failure}
    if all(form in earlier or case.value(form, "wall_loop") for form in forms):
        return
    case.results = [earlier.get(form) or Result(form, failure=OUT_OF_TIME if late else "") for form in forms]
    gc.collect()  # the models of the last case
    if worker.gpu:
        worker.torch.cuda.empty_cache()
    trial = Trial(worker, case)
    left = [result for result in case.results if not result.failure]
    if left:
        worker.attempt(left, save, trial.train_references)
    for result in left:
        if not result.failure:
            worker.attempt([result], save, functools.partial(trial.train, result))
    right = [result for result in left if not result.failure]
    if right:
        worker.attempt(right, save, functools.partial(trial.time, right))
    save()


def work(given: argparse.Namespace) -> int:
    """Run the cases in this process, together with the others; the first one writes them."""
    begun = time.time() if given.begun is None else given.begun
    worker = Worker()
    if given.vocabulary:
        return vocabulary.work(given, worker, RESULTS)
    shape = given.shape or (types.SHAPE if worker.gpu else SHAPE_ON_CPU)
    options = {"shape": "x".join(map(str, shape)), "steps": STEPS}
    report = Report("distributed", worker.broadcast(worker.environment()), options)
    folder = given.output or RESULTS / f"{environment.slug(report.environment['gpu'])}-x{worker.count}"
    earlier = read_cases(folder / "distributed.json") if given.keep else []
    known = {(case.group, case.name): case for case in worker.broadcast(earlier)}
    report.cases = [known.get((case.group, case.name), case) for case in make_cases(given, shape)]

    def save() -> None:
        if worker.rank == 0:
            tables.write(report, report_lines, folder, "distributed")

    for case in report.cases:
        measure(worker, case, given.forms, worker.broadcast(time.time() - begun > given.budget), save)
    worker.dist.destroy_process_group()
    if worker.rank == 0:
        print((folder / "distributed.md").read_text(encoding="utf-8"))
        print(f"written to {folder}/distributed.*", file=sys.stderr)
    return 0 if all(r.failure in ("", OUT_OF_TIME) for case in report.cases for r in case.results) else 1


# All processes ------------------------------------------------------------------------------------------------------


def spawn(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the processes; start others for what is left where they end early."""
    import torch

    count = given.processes or (torch.cuda.device_count() if torch.cuda.is_available() else 0) or 2
    begun, status = time.time(), 1
    turns = 1 if given.vocabulary else len(given.forms) * len(make_cases(given, types.SHAPE))
    for turn in range(turns):
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
    types.add_several(parser, "--heads", NAMES)
    types.add_several(parser, "--dtypes", DTYPES)
    parser.add_argument("--vocabulary", action="store_true", help="logsumexp and loss over a vocabulary that is split")
    parser.add_argument("--no-backend", dest="forms", action="store_const", const=FORMS[:-1], default=FORMS)
    types.add_shape(parser, None, "rows of a process, in_features, out_features")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="(default: %(default).0f)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: benchmarks/results/<gpu>-x<processes>")
    parser.add_argument("--keep", action="store_true", help="go on behind the rows that are written already")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)


def main(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Be one of the processes that were started, or start them with these arguments of the command line."""
    return work(given) if "RANK" in os.environ else spawn(given, arguments)
