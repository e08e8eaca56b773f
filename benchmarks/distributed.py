"""Train the heads on several GPUs: losses compared with PyTorch's own, and times per step.

    python -m benchmarks distributed                        # a process for each GPU; without any, two on the CPU
    torchrun --nproc-per-node 2 -m benchmarks.distributed   # the same, in processes that are there

Each row is a model under DistributedDataParallel or `fully_shard`, fused in one of the ways. A row that fails says why;
where the processes end with it, those that `python -m benchmarks distributed` starts next go on behind it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import environment
from . import options as types
from .report import Column, scientific, table, write_json
from .timing import describe
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
# A row is right where its error is at most so many times PyTorch's, and a rounding.
MARGIN, ROUNDING = 4.0, {"float32": 1e-5, "bfloat16": 2**-7}
NOT_RUN = "not run: its time was up"
ENDED = "the processes ended, or were stuck"

_HOW = """\
Each row trains a head for five steps of SGD with momentum, every process on data of its own, then is timed with a fused
AdamW. *error* is the largest difference of a step's loss to the same training in float64, relative to the loss;
*PyTorch's* is that of the plain model in the same dtype. *to PyTorch* compares with that model's losses; *parameters*
compares its parameters after the steps with ours, relative to how far they have moved. *ms* is the time of a step in
the slowest process. A row is *right* where its error is at most four times PyTorch's, or a rounding."""


@dataclass
class Row:
    """What one form of a model did. Fields that were not measured are None."""

    head: str
    dtype: str
    wrapper: str
    form: str
    failure: str = ""  # why there are no figures
    error: float | None = None  # the largest difference of a step's loss to training in float64, relative to that loss
    plain_error: float | None = None  # PyTorch's
    difference: float | None = None  # of the losses to those of PyTorch in the same dtype
    parameters: float | None = None  # ||parameters - PyTorch's|| / ||those - the first ones||, after the steps
    milliseconds: float | None = None  # of a step in the slowest process, the median of three runs
    chains: int | None = None  # how many ran

    @property
    def key(self) -> tuple[str, ...]:
        return self.head, self.dtype, self.wrapper, self.form

    @property
    def right(self) -> bool:
        """Whether its error is within `MARGIN` times PyTorch's, and a rounding."""
        if self.failure or self.error is None or self.plain_error is None:
            return False
        return self.error <= MARGIN * self.plain_error + ROUNDING[self.dtype]


@dataclass
class Table:
    """All rows, and what they were measured with."""

    environment: dict[str, Any]
    options: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def write(self, folder: Path, begun: Row | None = None) -> None:
        """Write the report; the row begun counts as failed until it has ended."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [*self.rows, *([Row(*begun.key, failure=ENDED)] if begun else [])]
        written = Table(self.environment, self.options, rows)
        write_json(folder / "distributed.json", asdict(written))
        (folder / "distributed.md").write_text(written.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Write a table a dtype and wrapper."""
        about = ", ".join(f"{name} {value}" for name, value in self.environment.items() if value is not None)
        stated = ", ".join(f"{name} {value}" for name, value in self.options.items())
        lines = ["# Training on several GPUs", "", f"{about}.", "", f"{stated}.", "", *_HOW.splitlines(), ""]
        columns = [
            Column("head", lambda row: row.head),
            Column("how", lambda row: row.form),
            Column("right", lambda row: row.failure or ("yes" if row.right else "NO")),
            Column("error", lambda row: row.error, scientific),
            Column("PyTorch's", lambda row: row.plain_error, scientific),
            Column("to PyTorch", lambda row: row.difference, scientific),
            Column("parameters", lambda row: row.parameters, scientific),
            Column("ms", lambda row: row.milliseconds),
            Column("chains", lambda row: "" if row.chains is None else str(row.chains)),
        ]
        for dtype, wrapper in dict.fromkeys((row.dtype, row.wrapper) for row in self.rows):
            rows = [row for row in self.rows if (row.dtype, row.wrapper) == (dtype, wrapper)]
            lines += [f"## {dtype}, {wrapper}", "", *table(columns, sorted(rows, key=lambda row: row.head))]
        return "\n".join(lines)


def plan(heads: Sequence[str], dtypes: Sequence[str], forms: Sequence[str]) -> list[Row]:
    """Return the rows in the order in which they are run: what compiles for long is last."""
    quick = [form for form in FORMS if form in forms and form != BACKEND]
    slow = [form for form in forms if form == BACKEND]
    cases = [(head, dtype, wrapper) for dtype in dtypes for wrapper in WRAPPERS for head in heads]
    return [Row(*case, form) for part in (quick, slow) for case in cases for form in part]


@functools.lru_cache(maxsize=1)
def load_models(head: str, shape: tuple[int, int, int], dtype: Any, device: Any) -> list[Any]:
    """Return the plain model and the drop-in one, with the same parameters in every process."""
    import torch

    from .rivals import load

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

    def environment(self) -> dict[str, Any]:
        if not self.gpu:
            found = {"gpu": "cpu", "torch": environment.version("torch")}
        else:
            import cupy

            found = environment.collect(cupy, self.torch.cuda.get_device_name(self.device))
        return {**found, "processes": self.count}

    def run(self, row: Row) -> None:
        """Fill in a row."""
        failure = ""
        try:
            self._measure(row)
        except Exception as error:
            failure = describe(error)
        failures: list[Any] = [None] * self.count
        self.dist.all_gather_object(failures, failure)
        row.failure = next((f"process {rank}: {text}" for rank, text in enumerate(failures) if text), "")
        if self.gpu:
            self.torch.cuda.empty_cache()

    def _measure(self, row: Row) -> None:
        torch, dtype = self.torch, getattr(self.torch, row.dtype)
        torch._dynamo.reset()
        plain, drop_in = load_models(row.head, self.shape, dtype, self.device)
        key = (row.head, row.dtype, row.wrapper)
        if key not in self._references:
            self._references.clear()
            exact, same = copy.deepcopy(plain).double(), copy.deepcopy(plain)
            self._references[key] = (
                self._train(self._wrap(exact, row.wrapper), torch.float64),
                self._train(self._wrap(same, row.wrapper), dtype),
            )
        (exact_losses, _), (plain_losses, plain_state) = self._references[key]
        model = self._build(row, plain, drop_in)
        losses, state = self._train(model, dtype)
        if len(set(plain_losses)) < STEPS:
            raise RuntimeError(f"PyTorch's losses repeat, which would hide stale weights: {plain_losses}")
        row.error, row.plain_error = _difference(losses, exact_losses), _difference(plain_losses, exact_losses)
        row.difference = _difference(losses, plain_losses)
        first = [p.detach().double() for p in plain.parameters()]
        moved = sum(float((p - f).square().sum()) for p, f in zip(plain_state, first, strict=True))
        between = sum(float((p - q).square().sum()) for p, q in zip(plain_state, state, strict=True))
        row.parameters = (between / moved) ** 0.5 if moved else None
        row.milliseconds = self._time(model, dtype)
        if row.form in (INSIDE, OUTSIDE, DROP_IN):
            from cupyfuse.torch import explain

            row.chains = sum(bool(part.plans) for part in explain(model).fused)

    def _build(self, row: Row, plain: Any, drop_in: Any) -> Any:
        from cupyfuse.torch import fuse

        # On a CPU no chain is worth it: there is only to see that they are right.
        fused = functools.partial(fuse, only_gains=self.gpu)
        module = copy.deepcopy(drop_in if row.form == DROP_IN else plain)
        if row.form == INSIDE:
            return self._wrap(fused(module), row.wrapper)
        # A drop-in module leaves what `fully_shard` has put hooks on to PyTorch.
        wrapped = self._wrap(module, row.wrapper, row.form != DROP_IN)
        if row.form == OUTSIDE:
            return fused(wrapped)
        if row.form == BACKEND:
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
        """Take one training step towards outputs of 0.3, and return the loss (float32 or float64)."""
        optimizer.zero_grad()
        y = module(x)
        loss = (y.to(self.torch.promote_types(y.dtype, self.torch.float32)) - 0.3).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss

    def _train(self, module: Any, dtype: Any) -> tuple[list[float], list[Any]]:
        """Return the losses of the first steps, and the parameters afterwards."""
        optimizer = self.torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        losses = [float(self._step(module, optimizer, self._batch(k, dtype)).detach()) for k in range(STEPS)]
        state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        return losses, [p.detach().double() for p in state]

    def _time(self, module: Any, dtype: Any, runs: int = 3, steps: int = 10) -> float:
        """Return the milliseconds of a step in the slowest process."""
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
            found.append((time.perf_counter() - begun) * 1e3 / steps)
        median = torch.tensor(sorted(found[1:])[runs // 2], device=self.device)
        self.dist.all_reduce(median, self.dist.ReduceOp.MAX)
        return float(median)

    def _synchronize(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()


def _difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses; infinite where one is not finite."""
    found = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(f if f == f else float("inf") for f in found)


def work(given: argparse.Namespace) -> int:
    """Run the rows in this process, together with the others; the first one writes them."""
    begun = time.time() if given.begun is None else given.begun
    worker = Worker(given.shape or (SHAPE if _gpus() else SHAPE_ON_CPU))
    found = Table(worker.broadcast(worker.environment()), {"shape": "x".join(map(str, worker.shape)), "steps": STEPS})
    folder = given.output or RESULTS / f"{environment.slug(found.environment['gpu'])}-x{worker.count}"
    earlier = folder / "distributed.json"
    rows = json.loads(earlier.read_text(encoding="utf-8"))["rows"] if given.keep and earlier.exists() else []
    found.rows = [Row(**row) for row in worker.broadcast(rows)]
    done = {row.key for row in found.rows}
    for row in plan(given.heads, given.dtypes, given.forms):
        if row.key in done:
            continue
        if worker.broadcast(time.time() - begun > given.budget):
            row.failure = NOT_RUN
        else:
            if worker.rank == 0:
                found.write(folder, begun=row)
            worker.run(row)
        found.rows.append(row)
        if worker.rank == 0:
            found.write(folder)
    worker.dist.destroy_process_group()
    if worker.rank == 0:
        print(found.markdown())
        print(f"written to {folder}/distributed.*", file=sys.stderr)
    return 0 if all(row.right or row.failure == NOT_RUN for row in found.rows) else 1


# All processes ------------------------------------------------------------------------------------------------------


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def spawn(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the processes; start others for the rows that are left where they end early."""
    count = given.processes or _gpus() or 2
    begun, status = time.time(), 1
    for turn in range(len(plan(given.heads, given.dtypes, given.forms))):
        command = [sys.executable, "-m", "benchmarks.distributed", *arguments, "--begun", str(begun)]
        command += ["--keep"] if turn or given.keep else []
        statuses = start(command, count, begun + given.budget + 60 - time.time())
        status = max(map(abs, statuses))
        if set(statuses) in ({0}, {1}) or time.time() > begun + given.budget:
            break
    return 1 if status else 0


def start(command: Sequence[str], count: int, seconds: float) -> list[int]:
    """Run `count` processes at once and return their exit codes; where one fails, wait only briefly for the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__.splitlines()[0])
    add_options(parser)
    given = parser.parse_args(arguments)
    return work(given) if "RANK" in os.environ else spawn(given, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
