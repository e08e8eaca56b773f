"""The heads trained on several GPUs: losses beside PyTorch's own, and times per step.

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
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import environment, torch_heads
from .arguments import some_of
from .distributed_report import (
    BACKEND,
    DROP_IN,
    DTYPES,
    FORMS,
    INSIDE,
    OUTSIDE,
    STEPS,
    Row,
    Table,
    distributed_markdown,
    planned,
)
from .timing import describe

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE, SHAPE_ON_CPU = (1024, 8192, 8192), (16, 64, 96)
BUDGET = 170.0  # seconds for all rows; those that are left then are not run
STUCK = timedelta(seconds=60)  # for one collective operation


# One process --------------------------------------------------------------------------------------------------------


class Worker:
    """One process of those that train together.

    Parameters
    ----------
    shape : (rows of a process, in_features, out_features)
    """

    def __init__(self, shape: tuple[int, int, int]):
        import torch

        self.torch, self.dist, self.shape = torch, torch.distributed, shape
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_RANK", self.rank))
        self.gpu = torch.cuda.is_available() and torch.cuda.device_count() > local
        self.place = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.place)
        more = {"device_id": self.place} if self.gpu else {}
        self.dist.init_process_group("nccl" if self.gpu else "gloo", timeout=STUCK, **more)
        self._known: dict[Any, tuple[tuple[list[float], list[Any]], ...]] = {}
        self._start: tuple[Any, Any, Any] = ((), None, None)

    def agreed(self, value: Any) -> Any:
        """What the first process says."""
        held = [value]
        self.dist.broadcast_object_list(held, src=0, device=self.place)
        return held[0]

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
        torch = self.torch
        torch._dynamo.reset()
        plain, drop_in = self._models(row)
        key = (row.head, row.dtype, row.wrapper)
        if key not in self._known:
            self._known.clear()
            exact, same = copy.deepcopy(plain).double(), copy.deepcopy(plain)
            self._known[key] = (
                self._trained(self._wrapped(exact, row.wrapper), torch.float64),
                self._trained(self._wrapped(same, row.wrapper), plain_dtype(row)),
            )
        (exact_losses, _), (plain_losses, plain_state) = self._known[key]
        made = self._made(row, plain, drop_in)
        losses, state = self._trained(made, plain_dtype(row))
        if len(set(plain_losses)) < STEPS:
            raise RuntimeError(
                f"PyTorch's losses repeat, which would hide weights that are not noticed: {plain_losses}"
            )
        row.error, row.plain_error = _apart(losses, exact_losses), _apart(plain_losses, exact_losses)
        row.difference = _apart(losses, plain_losses)
        first = [p.detach().double() for p in plain.parameters()]
        moved = sum(float((p - f).square().sum()) for p, f in zip(plain_state, first, strict=True))
        between = sum(float((p - q).square().sum()) for p, q in zip(plain_state, state, strict=True))
        row.parameters = (between / moved) ** 0.5 if moved else None
        row.milliseconds = self._time(made, plain_dtype(row))
        if row.form in (INSIDE, OUTSIDE, DROP_IN):
            from cupyfuse.torch import explain

            row.chains = sum(bool(part.plans) for part in explain(made).fused)

    def _models(self, row: Row) -> tuple[Any, Any]:
        """The plain model and the drop-in one, with the same parameters in every process."""
        key = (row.head, row.dtype)
        if self._start[0] != key:
            self._start = ((), None, None)
            source = torch_heads.load(row.head, self.shape)
            made = []
            for kind in (source.Model, source.ModelNew):
                self.torch.manual_seed(0)
                made.append(kind(*source.get_init_inputs()).to(self.place, plain_dtype(row)))
            self._start = (key, *made)
        return self._start[1], self._start[2]

    def _made(self, row: Row, plain: Any, drop_in: Any) -> Any:
        from cupyfuse.torch import fuse

        # On a CPU no chain is worth it: there is only to see that they are right.
        fused = functools.partial(fuse, only_gains=self.gpu)
        module = copy.deepcopy(drop_in if row.form == DROP_IN else plain)
        if row.form == INSIDE:
            return self._wrapped(fused(module), row.wrapper)
        # A drop-in module leaves what `fully_shard` has put hooks on to PyTorch.
        wrapped = self._wrapped(module, row.wrapper, row.form != DROP_IN)
        if row.form == OUTSIDE:
            return fused(wrapped)
        if row.form == BACKEND:
            from cupyfuse.torch.backend import backend

            return self.torch.compile(wrapped, backend=backend, options={"cupyfuse.only_gains": self.gpu})
        return wrapped

    def _wrapped(self, module: Any, wrapper: str, by_layer: bool = True) -> Any:
        if wrapper == "DDP":
            places = [self.place] if self.gpu else None
            return self.torch.nn.parallel.DistributedDataParallel(module, device_ids=places)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.place.type, (self.count,))
        # The linear layer's parameters apart from the others', as a layer of a larger model would have them.
        for part in module.children() if by_layer else ():
            if isinstance(part, self.torch.nn.Linear):
                fully_shard(part, mesh=mesh)
        return fully_shard(module, mesh=mesh)

    def _data(self, step: int, dtype: Any) -> Any:
        generator = self.torch.Generator().manual_seed(1000 * step + self.rank)
        return self.torch.randn(self.shape[:2], generator=generator).to(self.place, dtype)

    def _step(self, module: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        y = module(x)
        loss = (y.to(self.torch.promote_types(y.dtype, self.torch.float32)) - 0.3).square().sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss

    def _trained(self, module: Any, dtype: Any) -> tuple[list[float], list[Any]]:
        """Losses of the first steps, and the parameters afterwards."""
        optimizer = self.torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
        losses = [float(self._step(module, optimizer, self._data(k, dtype)).detach()) for k in range(STEPS)]
        state = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
        return losses, [p.detach().double() for p in state]

    def _time(self, module: Any, dtype: Any, runs: int = 3, steps: int = 10) -> float:
        torch = self.torch
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=True)
        x = self._data(0, dtype)
        found = []
        for run in range(runs + 1):
            self.dist.barrier()
            self._wait()
            begun = time.perf_counter()
            for _ in range(steps if run else 2):
                self._step(module, optimizer, x)
            self._wait()
            found.append((time.perf_counter() - begun) * 1e3 / steps)
        taken = torch.tensor(sorted(found[1:])[runs // 2], device=self.place)
        self.dist.all_reduce(taken, self.dist.ReduceOp.MAX)
        return float(taken)

    def _wait(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()


def plain_dtype(row: Row) -> Any:
    import torch

    return getattr(torch, row.dtype)


def _apart(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses; infinite where one is not finite."""
    found = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(losses, others, strict=True)]
    return max(f if f == f else float("inf") for f in found)


def work(given: argparse.Namespace) -> int:
    """Run the rows in this process, together with the others; the first one writes them."""
    begun = time.time() if given.begun is None else given.begun
    worker = Worker(given.shape or (SHAPE if _gpus() else SHAPE_ON_CPU))
    table = Table(worker.agreed(_environment(worker)), {"shape": "x".join(map(str, worker.shape)), "steps": STEPS})
    folder = given.output or RESULTS / f"{environment.slug(table.environment['gpu'])}-x{worker.count}"
    rows = planned(given.heads, given.dtypes, given.forms)
    for number, row in enumerate(rows):
        done = worker.agreed(_finished(folder, given.keep) if number == 0 else None)
        if number == 0:
            table.rows = [Row(**each) for each in done]
        if any(_name(row) == _name(each) for each in table.rows):
            continue
        if worker.agreed(time.time() - begun > given.budget):
            row.failure = "not run: its time was up"
        else:
            if worker.rank == 0:
                _write(table, folder, begun_with=row)
            worker.run(row)
        table.rows.append(row)
        if worker.rank == 0:
            _write(table, folder)
    worker.dist.destroy_process_group()
    if worker.rank == 0:
        print(distributed_markdown(table))
        print(f"written to {folder}/distributed.*", file=sys.stderr)
    return 0 if all(row.right or row.failure.startswith("not run") for row in table.rows) else 1


def _name(row: Row) -> tuple[str, ...]:
    return row.head, row.dtype, row.wrapper, row.form


def _environment(worker: Worker) -> dict[str, Any]:
    name = worker.torch.cuda.get_device_name(worker.place) if worker.gpu else "cpu"
    if worker.gpu:
        import cupy
    found = environment.collect(cupy, name) if worker.gpu else {"gpu": name, "torch": environment.version("torch")}
    return {**found, "processes": worker.count}


def _write(table: Table, folder: Path, begun_with: Row | None = None) -> None:
    """What is measured stays, whatever happens to a later row; that one is noted as failed until it has ended."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(row) for row in table.rows]
    if begun_with is not None:
        rows.append({**asdict(begun_with), "failure": "the processes ended, or were stuck"})
    text = json.dumps({"environment": table.environment, "options": table.options, "rows": rows}, indent=1)
    (folder / "distributed.json").write_text(text + "\n", encoding="utf-8")
    written = Table(table.environment, table.options, [Row(**row) for row in rows])
    (folder / "distributed.md").write_text(distributed_markdown(written), encoding="utf-8")


def _finished(folder: Path, keep: bool) -> list[Any]:
    path = folder / "distributed.json"
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if keep and path.exists() else []


# All processes ------------------------------------------------------------------------------------------------------


def _gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def spawn(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the processes; start others for the rows that are left where they end early."""
    count = given.processes or _gpus() or 2
    begun, status = time.time(), 1
    for turn in range(len(planned(given.heads, given.dtypes, given.forms))):
        command = [sys.executable, "-m", "benchmarks.distributed", *arguments, "--begun", str(begun)]
        command += ["--keep"] if turn or given.keep else []
        statuses = _together(command, count, begun + given.budget + 60 - time.time())
        status = max(map(abs, statuses))
        if set(statuses) in ({0}, {1}) or time.time() > begun + given.budget:
            break
    return 1 if status else 0


def _together(command: Sequence[str], count: int, seconds: float) -> list[int]:
    """The exit codes of processes that run at once; where one fails, the others are not waited for long."""
    import socket

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


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--processes", type=int, metavar="N", help="how many (default: one for each GPU)")
    parser.add_argument("--heads", type=some_of(torch_heads.NAMES), default=torch_heads.NAMES, metavar="NAME,...")
    parser.add_argument("--dtypes", type=some_of(DTYPES), default=DTYPES, metavar="DTYPE,...")
    parser.add_argument("--no-backend", dest="forms", action="store_const", const=FORMS[:-1], default=FORMS)
    parser.add_argument("--shape", type=_shape, metavar="BxKxN", help="rows of a process, in_features, out_features")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="(default: %(default).0f)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: benchmarks/results/<gpu>-x<processes>")
    parser.add_argument("--keep", action="store_true", help="go on behind the rows that are written already")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__.splitlines()[0])
    options(parser)
    given = parser.parse_args(arguments)
    return work(given) if "RANK" in os.environ else spawn(given, arguments)


if __name__ == "__main__":
    sys.exit(main())
