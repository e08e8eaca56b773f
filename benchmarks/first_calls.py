"""First calls of whole models: in a process that finds no caches on disk, then in a second one that finds the first's.

A call is one of inference, or the forward and the backward pass of a training step. Each rival has processes of its
own, with empty folders for CuPy's, Triton's and the Inductor's caches, which no other rival fills for it. The module
has run eagerly before the clock starts, so that CUDA and cuBLAS are loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .lab import Lab
from .models import BATCHES, MODES, RIVALS, SETTINGS, TRAINING, Work, group_title
from .networks import NETWORKS
from .options import add_several
from .report import Case, Report, Result, ratio
from .rivals import BACKEND, COMPILED, FUSED, as_run_by
from .tables import Column, number, table, yes_or_no

FRESH, AGAIN = "no caches, s", "second process, s"
DEFAULTS: dict[str, tuple[Any, Any]] = {"models": (("bert", "llama", "vit"), ("bert",))}
_RIVALS = {name: rival for name, rival in RIVALS.items() if rival in (FUSED, BACKEND, COMPILED)}
_FOLDERS = ("CUPY_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_LIMIT = 300.0  # seconds of one process
# What ours may take of torch.compile's first call, and the second process of that bound.
_BOUNDS, _SECOND = {FUSED: 1.0, BACKEND: 1.3}, 0.5

_CHILD = "from benchmarks.first_calls import time_first_call; time_first_call"


def add_options(parser: argparse.ArgumentParser) -> None:
    for option, known in {"models": NETWORKS, "dtypes": SETTINGS, "modes": MODES, "rivals": _RIVALS}.items():
        add_several(parser, f"--{option}", known, **({"default": None} if option in DEFAULTS else {}))
    parser.add_argument("--tiny", action="store_true", help="tiny configurations, to try the benchmark itself")


def time_first_call(name: str, setting: str, mode: str, rival: str, tiny: bool) -> None:
    """Print the seconds from `fuse` or `torch.compile` to the end of the first call: what each process runs."""
    from . import pytorch

    torch = pytorch.torch
    lab = Lab(None, None, None, pytorch, "")  # type: ignore[arg-type]
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    with torch.set_grad_enabled(mode == TRAINING), pytorch.matmul_precision(SETTINGS[setting][1]):
        work = Work(pytorch, name, setting, mode, "large", tiny)
        step = work.step(work.module)
        step()
        step.drop_gradients()
        synchronize()
        began = time.perf_counter()
        work.step(as_run_by(rival, lab, work.module))()
        synchronize()
    print(json.dumps(time.perf_counter() - began))


def _run(arguments: tuple[Any, ...], folder: str) -> float:
    """Return what a process of its own measures, with its caches in a folder."""
    environment = {**os.environ, **{name: str(Path(folder, name.lower())) for name in _FOLDERS}}
    command = [sys.executable, "-c", f"{_CHILD}{arguments!r}"]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, env=environment, cwd=root)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return float(json.loads(done.stdout.strip().rpartition("\n")[2]))


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run each rival of each model in two processes, one after the other."""
    lab.need_torch()
    for setting, mode, name in itertools.product(options.dtypes, options.modes, options.models):
        batch = NETWORKS[name].batches[BATCHES["large"]]
        case = Case(group_title(mode, setting), name, (batch,), SETTINGS[setting][0])
        for rival in (_RIVALS[r] for r in options.rivals):
            case.results.append(result := Result(rival))
            try:
                with tempfile.TemporaryDirectory() as folder:
                    for what in (FRESH, AGAIN):
                        case.facts[f"{what}, {rival}"] = _run((name, setting, mode, rival, options.tiny), folder)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                result.failure = str(error)
        print(f"{case.group}: {name}", file=sys.stderr, flush=True)
        yield case


def report_lines(report: Report) -> list[str]:
    """Write a row a rival, with what is asked of it."""
    rows = [(case, result.rival) for case in report.cases for result in case.results]

    def fact(what: str, case: Case, rival: str) -> float | None:
        return case.facts.get(f"{what}, {rival}")

    def beside(row: tuple[Case, str]) -> float | None:
        return ratio(fact(FRESH, *row), fact(FRESH, row[0], COMPILED))

    def second(row: tuple[Case, str]) -> float | None:
        return ratio(fact(AGAIN, *row), fact(FRESH, row[0], COMPILED))

    def holds(row: tuple[Case, str]) -> str:
        bound, first, again = _BOUNDS.get(row[1]), beside(row), second(row)
        if bound is None:
            return ""
        known = first is not None and again is not None
        return yes_or_no(first <= bound and again <= _SECOND * bound if known else None)  # type: ignore[operator]

    columns = [
        Column("", lambda row: f"{row[0].group}: {row[0].name}, {row[1]}"),
        Column(FRESH, lambda row: fact(FRESH, *row)),
        Column(AGAIN, lambda row: fact(AGAIN, *row)),
        Column(f"× {COMPILED}", beside),
        Column(f"second × {COMPILED}", second),
        Column("holds", holds),
    ]
    failures = [f"- {c.group}: {c.name}, {r.rival}: {r.failure}" for c in report.cases for r in c.results if r.failure]
    asked = ", ".join(f"{rival} ≤ {number(bound)}" for rival, bound in _BOUNDS.items())
    about = [
        "Seconds from `fuse` or `torch.compile` to the end of the first call, in training of the first forward and",
        "backward pass, in processes of its own: one that finds no caches of CuPy's, Triton's and the Inductor's on",
        "disk, and a second one that finds the first one's.",
        f"*×*: of {COMPILED}'s first one. Asked: {asked}, and half of it in the second process.",
    ]
    return [*about, "", *table(columns, rows), *failures, *([""] if failures else [])]
